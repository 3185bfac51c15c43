"""Texts of hostile servers and rows reach exceptions, log records and terminals without control characters."""

from __future__ import annotations

import ast
import io
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import rocketmq_spark
from rocketmq_spark.cli.app import main
from rocketmq_spark.errors import DeliveryError, InvalidRowError, MQBrokerException, RocketMQError, escaped
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.live import LiveView
from rocketmq_spark.spark.live_arrivals import BrokerArrivals
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.proxies import running_proxy

FORGED = "26/11/23 12:00:00 ERROR Executor: all rows are lost"
HOSTILE = f"no\r\n{FORGED}\x1b[2J\x9b31m\u2028\u202edne\x07"
SHOWN = escaped(HOSTILE)
SCHEMA = StructType().add("body", "string")
ROWS = pa.RecordBatch.from_pydict({"body": ["one", "two"]})


@pytest.fixture(autouse=True)
def _close_instances() -> Iterator[None]:
    yield
    registry.close_all()


@contextmanager
def hostile_broker() -> Iterator[FakeCluster]:
    """Run a broker with a hostile name that rejects all sends with a hostile remark."""
    with FakeCluster([HOSTILE], topics={"orders": 4}) as cluster:
        cluster.brokers[HOSTILE].always[None] = Reply.code(ResponseCode.NO_PERMISSION, HOSTILE)
        yield cluster


def assert_safe(text: str, *, shown: str = SHOWN) -> None:
    """Check a text of several lines: no line is forged, and none has control characters."""
    lines = text.split("\n")
    assert [line for line in lines if escaped(line, len(text)) != line] == []
    assert [line for line in lines if line.startswith(FORGED)] == []
    assert shown in text


def write_error(options: dict[str, str], rows: pa.RecordBatch = ROWS) -> RocketMQError:
    source = RocketMQDataSource({"topic": "orders", "retryBackoffMs": "1", **options})
    writer = source.writer(SCHEMA, overwrite=False)
    with pytest.raises(RocketMQError) as raised:
        writer.write(iter([rows]))
    registry.close_all()
    return raised.value


def records_text(caplog: pytest.LogCaptureFixture) -> str:
    formatter = logging.Formatter("%(name)s %(message)s")
    return "\n".join(map(formatter.format, caplog.records))


def test_remark_and_broker_name_are_escaped_in_errors_and_log_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with hostile_broker() as cluster:
        error = write_error({"nameServer": cluster.name_server})
    assert isinstance(error, DeliveryError)
    assert isinstance(error.__cause__, MQBrokerException)
    assert error.__cause__.remark == HOSTILE, "the data is not changed"
    assert_safe("".join(traceback.format_exception(error)))
    assert_safe(records_text(caplog), shown="orders")


@pytest.mark.parametrize("replies", ["status", "details"])
def test_texts_of_a_proxy_are_escaped_in_errors_and_log_records(caplog: pytest.LogCaptureFixture, replies: str) -> None:
    caplog.set_level(logging.DEBUG)
    import grpc

    with running_proxy() as proxy:
        if replies == "details":
            proxy.handlers["SendMessage"] = lambda _, context: context.abort(grpc.StatusCode.PERMISSION_DENIED, HOSTILE)
        proxy.play(Reply.code(40300, HOSTILE), times=9)
        error = write_error({"endpoints": proxy.address})
    assert_safe("".join(traceback.format_exception(error)))
    assert_safe(records_text(caplog), shown="")


def test_topics_and_keys_of_rows_are_escaped_in_errors() -> None:
    rows = pa.RecordBatch.from_pydict({"body": ["x"], "topic": [HOSTILE], "keys": [HOSTILE], "tags": [HOSTILE]})
    with FakeCluster() as cluster:
        source = RocketMQDataSource({"nameServer": cluster.name_server})
        schema = StructType().add("body", "string").add("topic", "string").add("keys", "string").add("tags", "string")
        writer = source.writer(schema, overwrite=False)
        with pytest.raises(InvalidRowError) as raised:
            writer.write(iter([rows]))
    assert_safe("".join(traceback.format_exception(raised.value)))


def test_keys_of_a_refused_row_are_escaped_in_errors() -> None:
    rows = pa.RecordBatch.from_pydict({"body": ["x"], "keys": [HOSTILE], "tags": [f"{HOSTILE}."]})
    schema = StructType().add("body", "string").add("keys", "string").add("tags", "string")
    with FakeCluster(topics={"orders": 4}) as cluster:
        cluster.brokers["broker-0"].play(Reply.code(ResponseCode.MESSAGE_ILLEGAL, "no"))
        source = RocketMQDataSource({"nameServer": cluster.name_server, "topic": "orders"})
        with pytest.raises(DeliveryError) as raised:
            source.writer(schema, overwrite=False).write(iter([rows]))
    assert_safe("".join(traceback.format_exception(raised.value)), shown=SHOWN[:60])


def test_command_line_shows_no_control_characters_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with hostile_broker() as cluster:
        assert main(["route", "orders", "-n", cluster.name_server]) == 0
        assert_safe(capsys.readouterr().out, shown=FORGED)
        assert main(["send", "orders", "x", "-n", cluster.name_server]) == 1
    assert_safe(capsys.readouterr().err)


def test_a_log_record_of_a_foreign_exception_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("rocketmq_spark.producer")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("the hook %r failed for %s", HOSTILE, HOSTILE)
    assert_safe(records_text(caplog))


def test_a_harmless_log_record_keeps_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rocketmq_spark.producer").warning("100%% of %s", "orders")
    assert [(record.msg, record.args) for record in caplog.records] == [("100%% of %s", ("orders",))]


def test_every_logger_of_the_package_escapes_its_records() -> None:
    names = {
        node.args[0].value
        for path in Path(rocketmq_spark.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"
        if isinstance(node.args[0], ast.Constant)
    }
    assert len(names) > 5
    names.discard("rocketmq_spark")  # has a handler, and no records
    assert [name for name in names if not logging.getLogger(str(name)).filters] == []


def test_live_display_shows_no_control_characters() -> None:
    from rich.console import Console

    broker = BrokerArrivals(HOSTILE, 1, 1.0, HOSTILE, HOSTILE)
    view = LiveView(HOSTILE, 1.0, over=False, tasks=None, brokers=(broker,), problems=(HOSTILE,))
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    for text in (view.line(), view._repr_html_(), console.file.getvalue()):
        assert_safe(text)
