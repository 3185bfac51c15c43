"""The writers of micro-batches, without Spark. That of PySpark 4.0 gets rows one by one."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.types import StringType, StructType

from rocketmq_spark.deliveries.at_least_once import AtLeastOnce
from rocketmq_spark.errors import DeliveryError, InvalidRowError, RouteNotFoundException
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.partition import RouteLookup
from rocketmq_spark.spark.report import CommitMessage
from rocketmq_spark.spark.row_chunks import chunks_of
from rocketmq_spark.spark.writer import RocketMQRowStreamWriter, stream_writer
from rocketmq_spark.testing import FakeCluster
from tests.support.sessions import task_of

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "row",
    [
        Row(body=bytes(MIB)),
        Row(body="x" * MIB),
        Row(body=b"x", keys=["k" * (MIB // 4)] * 4),
        Row(body=b"x", properties={"n": "v" * MIB}),
        Row(body=b"x", properties={"n" * MIB: "v"}),
    ],
)
def test_rows_of_one_mib_are_collected_up_to_four_mib(row: Row) -> None:
    taken = 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for _ in range(10):
            taken += 1
            yield row

    sizes = []
    for chunk in chunks_of(rows()):
        sizes.append(len(chunk))
        assert taken == sum(sizes)
    assert sizes == [4, 4, 2]


def test_small_rows_are_collected_in_chunks_of_10_000() -> None:
    rows = [Row(body=b"%d" % number) for number in range(25_000)]
    chunks = list(chunks_of(rows))
    assert [len(chunk) for chunk in chunks] == [10_000, 10_000, 5_000]
    assert [row for chunk in chunks for row in chunk] == rows
    assert list(chunks_of([])) == []


def options_of(cluster: FakeCluster) -> SinkOptions:
    return parse_sink_options({"nameServer": cluster.name_server, "topic": "orders"}, {})


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"orders": 2}) as running:
        yield running
        registry.close_all()


def test_rows_of_pyspark_4_0_are_stored_as_a_part_of_their_micro_batch(cluster: FakeCluster) -> None:
    schema = StructType().add("body", StringType())
    delivery = AtLeastOnce(options_of(cluster))
    writer = pickle.loads(cloudpickle.dumps(RocketMQRowStreamWriter(delivery, None, schema=schema)))
    with task_of(3, **{"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "7"}):
        message = writer.write(iter([Row(body="a"), Row(body="b")]))
    assert sorted(stored.body for stored in cluster.messages("orders")) == [b"a", b"b"]
    assert (message.write_id, message.batch_id, message.partition_id) == ("query-1", 7, 3)


def test_error_of_a_task_names_its_micro_batch(cluster: FakeCluster) -> None:
    schema = StructType().add("body", StringType())
    writer = RocketMQRowStreamWriter(AtLeastOnce(options_of(cluster)), None, schema=schema)
    with (
        task_of(0, **{"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "7"}),
        pytest.raises(InvalidRowError, match="micro-batch 7 of query query-1: "),
    ):
        writer.write(iter([Row(body=None)]))


def test_first_micro_batch_that_reached_no_server_is_not_committed(cluster: FakeCluster) -> None:
    """Later ones are, because the addresses have been right."""
    delivery = AtLeastOnce(options_of(cluster))
    writer = stream_writer(delivery, None, StructType(), RouteLookup(unreached="10.0.0.1:9876 refused"))
    nothing: list[Any] = [CommitMessage.of(Recorder("query-1", 0, 0).snapshot(), histograms=True)]
    with pytest.raises(RouteNotFoundException, match=r"10\.0\.0\.1:9876 refused"):
        writer.commit(nothing, 0)
    writer.commit(nothing, 1)


def test_micro_batch_without_the_message_of_a_task_is_not_committed(cluster: FakeCluster) -> None:
    writer = stream_writer(AtLeastOnce(options_of(cluster)), None, StructType())
    messages: list[Any] = [CommitMessage.of(Recorder("query-1", 5, 0).snapshot(), histograms=True), None]
    with pytest.raises(DeliveryError, match="micro-batch or epoch 5: 1 of at least 2 tasks sent no message"):
        writer.commit(messages, 5)
