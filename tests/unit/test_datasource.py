"""What the data source checks on the driver, without a session and without a server."""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import IntegerType, StringType, StructType

from rocketmq_spark.errors import MQBrokerException, OptionError, RemotingConnectException, SchemaError
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.spark.datasource import RocketMQDataSource, _warn_once, _with_namespace
from rocketmq_spark.spark.writer import _await_any_answer
from tests.proxies import ScriptedProxies
from tests.proxy import FakeProxy

BODY = StructType().add("body", StringType())


@pytest.fixture(autouse=True)
def nothing_was_warned_of_yet() -> None:
    _warn_once.cache_clear()


class OnASpeculatingCluster(RocketMQDataSource):
    _speculation = True


@pytest.mark.parametrize(("row_id", "warnings"), [("false", 1), ("true", 0), ("columns:body", 0)])
def test_speculation_without_row_ids_is_warned_of(caplog: pytest.LogCaptureFixture, row_id: str, warnings: int) -> None:
    source = OnASpeculatingCluster({"nameServer": "a:1", "topic": "t", "rowId": row_id})
    source.streamWriter(BODY, overwrite=False)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * warnings
    assert all("set rowId=true" in message for message in caplog.messages)


def test_a_stream_whose_writer_is_made_twice_in_each_micro_batch_is_warned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        RocketMQDataSource({"nameServer": "a:1", "topic": "t", "sendMode": "oneway"}).streamWriter(BODY, overwrite=True)
    assert [message.split(":")[0] for message in caplog.messages] == ["sendMode=oneway", "outputMode complete"]


def test_without_speculation_nobody_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    RocketMQDataSource({"nameServer": "a:1", "topic": "t"}).streamWriter(BODY, overwrite=False)
    assert caplog.messages == []


def test_a_selector_class_is_looked_for_on_the_driver() -> None:
    source = RocketMQDataSource({"nameServer": "a:1", "topic": "t", "queueSelector": "no_such_module:Thing"})
    with pytest.raises(OptionError, match="importing module no_such_module failed"):
        source.streamWriter(BODY, overwrite=False)


OVER_GRPC = {"endpoints": "p:8081", "topic": "t"}


def test_a_stream_over_grpc_is_checked_without_asking_a_proxy() -> None:
    RocketMQDataSource(OVER_GRPC).streamWriter(BODY, overwrite=False)


class Unpickler(pickle.Unpickler):
    """Notes where everything in a pickle comes from."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


def test_grpc_10_what_is_shipped_of_a_write_holds_nothing_of_the_connection_that_looked_up_its_route() -> None:
    with FakeProxy() as proxy:
        source = RocketMQDataSource({"endpoints": proxy.address, "topic": "orders"})
        shipped = cloudpickle.dumps(source.writer(BODY, overwrite=False))
        assert [call.method for call in proxy.calls] == ["QueryRoute"]
    unpickler = Unpickler(shipped)
    assert unpickler.load()._options.endpoints == (proxy.address,)
    assert unpickler.modules == {"rocketmq_spark.spark.writer", "rocketmq_spark.options"}


def test_grpc_10_the_data_source_and_its_pickled_writer_import_no_grpc() -> None:
    script = f"""
import pickle, sys
import pyspark_rocketmq, rocketmq_spark
from pyspark import cloudpickle
from pyspark.sql.types import StructType
source = pyspark_rocketmq.DefaultSource({OVER_GRPC!r})
writer = source.streamWriter(StructType().add("body", "string"), False)
pickle.loads(cloudpickle.dumps((rocketmq_spark.Producer, type(source), writer)))
sys.exit(str({{"grpc", "google.protobuf"}} & set(sys.modules) or ""))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() == ""


def test_a_delay_level_over_grpc_is_refused_on_the_driver() -> None:
    levels = StructType([*BODY, *StructType().add("delayTimeLevel", IntegerType())])
    RocketMQDataSource({"nameServer": "a:1", "topic": "t"}).streamWriter(levels, overwrite=False)
    with pytest.raises(SchemaError, match=r"column delayTimeLevel: .*use delayMs or deliverTime"):
        RocketMQDataSource(OVER_GRPC).streamWriter(levels, overwrite=False)


def test_grpc_that_is_not_installed_is_said_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(OptionError, match=r"pip install 'rocketmq-spark\[grpc\]'"):
        RocketMQDataSource(OVER_GRPC).streamWriter(BODY, overwrite=False)


def test_the_group_goes_into_the_namespace_by_remoting_only() -> None:
    remoting = SinkOptions(name_server=("MQ_INST_1_2.example:9876",), producer_group="g")
    assert _with_namespace(remoting).producer_group == "MQ_INST_1_2%g"
    grpc = SinkOptions(
        transport="grpc", endpoints=("MQ_INST_1_2.example:8081",), producer_group="g", namespace="n", topic="t" * 127
    )
    assert _with_namespace(grpc) == grpc


def instance_of(options: SinkOptions) -> tuple[ClientInstance, ScriptedProxies]:
    transport = ScriptedProxies({})
    return ClientInstance("test@1", transport, options), transport


def test_where_topics_come_with_the_rows_any_answer_of_a_proxy_to_a_question_will_do() -> None:
    options = SinkOptions(transport="grpc", endpoints=("p:8081", "q:8081"))
    instance, transport = instance_of(options)
    _await_any_answer(options, instance)
    for code in (40002, 40100, 40300):
        transport.fail("query_route", MQBrokerException("refused", code, "refused", "p:8081"))
        _await_any_answer(options, instance)
    # No proxy, but a gateway on the way to it.
    transport.fail("query_route", MQBrokerException("UNIMPLEMENTED", 50100, "status: 404", "p:8081"))
    with pytest.raises(MQBrokerException, match="UNIMPLEMENTED"):
        _await_any_answer(options, instance)
    transport.fail("query_route", RemotingConnectException("connecting to p:8081: refused"))
    with pytest.raises(RemotingConnectException):
        _await_any_answer(options, instance)
    assert len(transport.calls) == 6


def test_where_topics_come_with_the_rows_a_name_server_need_not_know_the_template() -> None:
    options = SinkOptions(name_server=("a:1",))
    instance, transport = instance_of(options)
    _await_any_answer(options, instance)
    transport.fail("query_route", MQBrokerException("not ready", 1, "not ready", "a:1"))
    with pytest.raises(MQBrokerException, match="not ready"):
        _await_any_answer(options, instance)
