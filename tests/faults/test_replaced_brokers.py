"""Reads while other messages take the offsets of those that were planned or read, and the queue becomes longer.

An empty broker takes the name of another one, or a slave that lacks messages becomes the master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.types import StructType

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.reader import RocketMQBatchReader
from rocketmq_spark.spark.stream_reader import RocketMQStreamReader, stream_reader
from tests.support.cluster import create_topic, started
from tests.support.losses import EmptyStore, Loss
from tests.support.processes import PATIENCE, wait_for
from tests.support.streams import Feed, column_of, source_options

pytestmark = [pytest.mark.faults, pytest.mark.integration]

SCHEMA = StructType().add("queueOffset", "long").add("tags", "string").add("keys", "string")
ROWS = 1_000
PLANNED = r"has another message at offset \d+ than the query has planned to read"
READ = r"has another message at offset \d+ than the query has read"


@pytest.fixture(scope="module")
def empty_store() -> Iterator[EmptyStore]:
    with started(LocalCluster(start_timeout=PATIENCE)) as cluster:
        yield EmptyStore(cluster)


@pytest.fixture(params=["empty_store", pytest.param("unclean_switch", marks=pytest.mark.long)])
def loss(request: pytest.FixtureRequest, topic: str) -> Loss:
    """A way to lose messages of the topic, which has one queue."""
    loss: Loss = request.getfixturevalue(request.param)
    create_topic(loss.cluster, topic, "NORMAL", 1)
    return loss


@pytest.fixture
def feed(loss: Loss, topic: str) -> Iterator[Feed]:
    """A feed of the topic, which has messages that the broker will lose, and perhaps others."""
    name_server = loss.cluster.name_server
    with Producer("feed", name_server=name_server) as producer:
        feed = Feed(producer, name_server, topic)
        feed(ROWS)
        loss.mark()
        feed(ROWS)
        yield feed


@pytest.fixture
def replace(loss: Loss, topic: str, feed: Feed) -> Callable[[], None]:
    """Lose messages, and store more of them than were lost."""

    def replace() -> None:
        loss.lose()
        create_topic(loss.cluster, topic, "NORMAL", 1)
        feed(3 * ROWS)

    return replace


@pytest.mark.parametrize("given", [{}, {"minPartitions": "4"}, {"subExpression": "none"}], ids=["", "parts", "filter"])
def test_batch_read_fails_if_messages_are_replaced_after_its_plan(
    loss: Loss, topic: str, replace: Callable[[], None], given: dict[str, Any]
) -> None:
    reader = RocketMQBatchReader(source_options(loss.cluster, topic, **given), SCHEMA)
    tasks = reader.partitions()
    replace()
    assert len(tasks) == int(given.get("minPartitions", 1))
    for task in tasks:
        with pytest.raises(DataLossError, match=PLANNED):
            list(column_of(reader.read(task), "keys"))


@pytest.fixture
def stream(loss: Loss, topic: str) -> Iterator[RocketMQStreamReader]:
    options = source_options(loss.cluster, topic, streaming=True, startingOffsets="earliest")
    stream = stream_reader(options, SCHEMA)
    yield stream
    stream.stop()


def later_offset(stream: RocketMQStreamReader, end: dict[str, Any]) -> dict[str, Any]:
    """Return the offset of the next micro-batch. The route may still name the lost master at the first tries."""
    wait_for(lambda: stream.latestOffset(end) != end)
    return stream.latestOffset(end)


def test_stream_fails_if_messages_are_replaced_between_micro_batches(
    stream: RocketMQStreamReader, replace: Callable[[], None]
) -> None:
    start = stream.initialOffset()
    end = stream.latestOffset(start)
    read = [key for task in stream.partitions(start, end) for key in column_of(stream.read(task), "keys")]
    assert read == [f"k{number}" for number in range(2 * ROWS)]
    replace()
    with pytest.raises(DataLossError, match=READ):
        stream.partitions(end, later_offset(stream, end))


def test_stream_fails_if_messages_are_replaced_after_a_plan(
    stream: RocketMQStreamReader, replace: Callable[[], None]
) -> None:
    start = stream.initialOffset()
    end = stream.latestOffset(start)
    tasks = stream.partitions(start, end)
    replace()
    assert tasks
    for task in tasks:
        with pytest.raises(DataLossError, match=PLANNED):
            list(column_of(stream.read(task), "keys"))
    with pytest.raises(DataLossError, match=READ):
        stream.partitions(end, later_offset(stream, end))
