"""`write` and `foreach_batch`, with tasks in this process and a fake cluster."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructType

from rocketmq_spark import foreach_batch, write
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import DeliveryError, OptionError, SchemaError
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.testing import FakeCluster
from tests.support.sessions import ConnectSession, Frame, Session

BODY = StructType().add("body", StringType())


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"orders": 2}) as running:
        yield running
        registry.close_all()
    forget_logs()


def rows(*bodies: str | None) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array(bodies, pa.string())})


def frame_of(*partitions: Iterable[pa.RecordBatch], session: Session | None = None) -> Any:
    return Frame(session or Session(), BODY, partitions)


def stored(cluster: FakeCluster) -> list[str]:
    return sorted(message.body.decode() for message in cluster.messages("orders"))


def test_write_stores_each_partition_and_returns_its_figures(cluster: FakeCluster) -> None:
    frame = frame_of([rows("a", "b"), rows()], [], [rows("c")])
    written = write(frame, nameServer=cluster.name_server, topic="orders", rowId=True)
    assert stored(cluster) == ["a", "b", "c"]
    assert written.to_dict()["broker-0"]["rows"] == 3
    assert len(written.keys()) == 1


def test_an_option_of_none_is_not_given(cluster: FakeCluster) -> None:
    write(frame_of([rows("a")]), nameServer=cluster.name_server, topic="orders", tags=None)
    foreach_batch(nameServer=cluster.name_server, topic="orders", tags=None)(frame_of([rows("b")]), 0)
    assert [message.tags for message in cluster.messages("orders")] == [None, None]
    with pytest.raises(SchemaError, match="topic option required"):
        write(frame_of([rows("a")]), nameServer=cluster.name_server, topic=None)


def test_write_of_a_frame_without_partitions_succeeds_with_no_rows(cluster: FakeCluster) -> None:
    assert write(frame_of(), nameServer=cluster.name_server, topic="orders").to_dict() == {}


def test_write_fails_if_tasks_with_rows_send_no_report(cluster: FakeCluster) -> None:
    class Silent(Frame):
        def mapInArrow(self, function: Any, schema: str) -> Frame:  # noqa: N802 - Spark's names
            return Frame(self.sparkSession, BODY, []).mapInArrow(function, schema)

    with pytest.raises(DeliveryError, match="1 of at least 1 tasks sent no message, so their rows may not be stored"):
        write(Silent(Session(), BODY, [[rows("a")]]), nameServer=cluster.name_server, topic="orders")  # type: ignore[arg-type]


def test_failed_task_aborts_the_write_and_its_error_is_raised(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RuntimeError):
        pass

    def rows_then_error() -> Iterator[pa.RecordBatch]:
        yield rows("a")
        raise Broken("the disk of the input is broken")

    caplog.set_level(logging.INFO, "rocketmq_spark.spark")
    with pytest.raises(Broken):
        write(frame_of(rows_then_error()), nameServer=cluster.name_server, topic="orders")
    assert "aborted write: 0 of 1 tasks had finished and stored nothing" in caplog.text


def test_repeated_micro_batch_is_written_once_by_effectively_once(cluster: FakeCluster) -> None:
    options: dict[str, str | int] = {
        "nameServer": cluster.name_server,
        "topic": "orders",
        "delivery": "effectivelyOnce",
        "transactionalId": "job",
        "fenceMs": 0,
    }
    write_batch = foreach_batch(**options)
    for batch_id, body in ((0, "first"), (0, "first"), (1, "second")):
        write_batch(frame_of([rows(body, body)]), batch_id)
        # A later run is another process, which remembers nothing.
        forget_logs()
    assert stored(cluster) == ["first", "first", "second", "second"]


def of_query(query: str) -> Session:
    """Return a session, as the thread of a query has it; empty: another thread."""
    session = Session()
    session.sparkContext.properties["sql.streaming.queryId"] = query
    return session


def exactly_once(cluster: FakeCluster, **more: Any) -> Any:
    job = {"delivery": "exactlyOnce", "transactionalId": "job", "transactionTimeoutMs": 20_000, **more}
    return foreach_batch(nameServer=cluster.name_server, topic="orders", **job)


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
def test_a_second_query_with_the_same_transactional_id_fails(cluster: FakeCluster, at_once: bool) -> None:
    write_batch = exactly_once(cluster)

    def first() -> None:
        write_batch(frame_of([rows("a")], session=of_query("query-a")), 0)
        # Another process, which remembers nothing.
        forget_logs()

    def second() -> Iterator[pa.RecordBatch]:
        if at_once:
            first()
        yield rows("b")

    if not at_once:
        first()
    frame = frame_of(second(), session=of_query("query-b"))
    with pytest.raises(
        OptionError, match=r"micro-batch 0 of .* was decided by a query with another checkpoint, so the"
    ):
        write_batch(frame, 0)
    # The first query may repeat its micro-batch, and continue.
    for batch_id, body in ((0, "a"), (1, "c")):
        write_batch(frame_of([rows(body)], session=of_query("query-a")), batch_id)
    assert stored(cluster) == ["a", "c"]


@pytest.mark.parametrize(("query", "start_anew"), [("", False), ("query-b", True)])
def test_rows_of_a_complete_micro_batch_are_left_out_with_a_warning(
    cluster: FakeCluster, query: str, start_anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    exactly_once(cluster)(frame_of([rows("a")], session=of_query("query-a")), 0)
    write_batch = exactly_once(cluster, startAnew=start_anew)
    write_batch(frame_of([rows("a")], session=of_query(query)), 0)
    assert "the rows of this save are not written" in caplog.text
    assert stored(cluster) == ["a"]


def test_rate_limit_needs_the_number_of_tasks_on_spark_connect_only(cluster: FakeCluster) -> None:
    options: dict[str, str | int] = {"nameServer": cluster.name_server, "topic": "orders", "maxRatePerSecond": 1000}
    write(frame_of([rows("a")]), **options)
    with pytest.raises(OptionError, match="needs to know how many tasks share it"):
        write(frame_of([rows("b")], session=ConnectSession()), **options)
    write(frame_of([rows("c")], session=ConnectSession()), **options, maxRateTasks=1)
    assert stored(cluster) == ["a", "c"]


@pytest.mark.parametrize(("setting", "warned"), [("TRUE", True), ("false", False)])
def test_write_warns_of_speculation_without_row_ids(
    cluster: FakeCluster, setting: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(spark_speculation=setting)
    write(frame_of([rows("a")], session=session), nameServer=cluster.name_server, topic="orders")
    assert ("spark.speculation" in caplog.text) == warned
