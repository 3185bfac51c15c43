"""Readers on the driver: their requests to a cluster, and the partitions for tasks; without a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from rocketmq_spark.errors import DataLossError, ReadError, SchemaError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.offsets import OffsetSpec, flat
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.spark.reader import ReadPartition, RocketMQBatchReader
from rocketmq_spark.spark.stream_reader import RocketMQStreamReader, stream_reader
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.store import MessageStore
from tests.support.processes import NEEDS_LIMITS

SCHEMA = StructType().add("body", "binary")


def test_task_gets_only_the_routes_of_its_brokers() -> None:
    with FakeCluster("abc", topics={"t": 1}) as cluster:
        for name in "ab":
            queue = MessageQueue("t", name, 0)
            cluster.brokers[name].storage.store.put(queue, [Message.of("t", b"x")], 0.0)
        options = SourceOptions.of(name_server=(cluster.name_server,), subscribe=("t",), min_partitions=1)
        tasks = RocketMQBatchReader(options, SCHEMA).partitions()
    found = {}
    for task in tasks:
        assert isinstance(task, ReadPartition)
        [one] = task.plan.ranges
        found[one.queue.broker_name] = [broker.broker_name for broker in task.plan.routes["t"].broker_datas]
        assert [data.broker_name for data in task.plan.routes["t"].queue_datas] == found[one.queue.broker_name]
    assert found == {"a": ["a"], "b": ["b"]}


RAW = SourceOptions.of(on_unreadable="raw")


def test_only_a_raw_read_has_the_column_unreadable() -> None:
    schema = StructType().add("body", "binary").add("unreadable", "string")
    RocketMQBatchReader(RAW, schema)
    with pytest.raises(SchemaError, match="only reads with onUnreadable=raw have the column unreadable"):
        RocketMQBatchReader(SourceOptions(), schema)
    with pytest.raises(SchemaError, match=r"onUnreadable=raw the column unreadable \(string\) is required"):
        RocketMQBatchReader(RAW, SCHEMA)


def test_columns_that_a_raw_read_can_null_must_be_nullable() -> None:
    known = StructType().add("queueOffset", "long", nullable=False).add("unreadable", "string")
    RocketMQBatchReader(RAW, known)
    with pytest.raises(SchemaError, match="column bornHost is null for a record that cannot be decoded"):
        RocketMQBatchReader(RAW, known.add("bornHost", "string", nullable=False))


@pytest.mark.parametrize(
    ("name", "kind"), [("tags", "string"), ("bornTimestamp", "timestamp"), ("storeTimestamp", "timestamp")]
)
def test_columns_that_any_read_can_null_must_be_nullable(name: str, kind: str) -> None:
    with pytest.raises(SchemaError, match=f"column {name} may be null"):
        RocketMQBatchReader(SourceOptions(), StructType().add(name, kind, nullable=False))


Q0, Q1 = (MessageQueue("t", "a", number) for number in (0, 1))


class Stream:
    """A topic on one broker, and the queries that read it."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.queues(1)

    def queues(self, count: int, topic: str = "t") -> None:
        self._cluster.create_topic(topic, count)

    def delete(self, topic: str, *brokers: str) -> None:
        """Delete a topic on some brokers; by default on all."""
        for name in brokers or self._cluster.brokers:
            del self._cluster.brokers[name].storage.topics[topic]
            self._cluster.brokers[name].on_change()

    def put(self, queue: MessageQueue, messages: int, *, at: float = 0.0) -> None:
        """Store messages at a time (s)."""
        for _ in range(messages):
            self._store(queue).put(queue, [Message.of(queue.topic, b"x")], at)

    def replace(self, queue: MessageQueue, first: int, messages: int, *, at: float) -> None:
        """Lose the broker's messages from offset `first` of its only queue on, and store others."""
        self._store(queue).truncate(first)
        self.put(queue, messages, at=at)

    def expire(self, queue: MessageQueue, first: int) -> None:
        self._store(queue).expired[queue] = first

    def lose_answer(self, code: int) -> None:
        """Close the connection instead of the next answer to such a request."""
        self._cluster.brokers["a"].play(Reply(closes=True), code=code)

    def before(self, code: int, happens: Callable[[], object]) -> None:
        """Have something happen before the answer to the next such request."""

        def reply(_: object) -> Reply | None:
            happens()
            return None

        self._cluster.brokers["a"].play(reply, code=code)

    def _store(self, queue: MessageQueue) -> MessageStore:
        return self._cluster.brokers[queue.broker_name].storage.store

    @contextmanager
    def query(self, **options: Any) -> Iterator[RocketMQStreamReader]:
        reader = stream_reader(
            SourceOptions.of(name_server=(self._cluster.name_server,), **{"subscribe": ("t",), **options}), SCHEMA
        )
        try:
            yield reader
        finally:
            reader.stop()


@pytest.fixture
def stream() -> Iterator[Stream]:
    with FakeCluster(["a"]) as cluster:
        yield Stream(cluster)


def checkpointed(offset: dict[str, Any]) -> dict[str, Any]:
    """Return an offset as Spark hands it back."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


def ranges_of(tasks: Sequence[InputPartition]) -> list[OffsetRange]:
    return [part for task in tasks if isinstance(task, ReadPartition) for part in task.plan.ranges]


@pytest.mark.parametrize("fails", [True, False])
def test_rerun_of_the_first_micro_batch_reports_expired_messages(stream: Stream, fails: bool) -> None:
    stream.put(Q0, 5)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(query.initialOffset()))
    stream.expire(Q0, 2)
    with stream.query(fail_on_data_loss=fails) as query:
        # Spark does not store the start of a first micro-batch; it asks for it again.
        start = query.initialOffset()
        if fails:
            with pytest.raises(DataLossError, match="messages 0 to 1 of t/a/0 are not there any more"):
                query.partitions(start, end)
        else:
            assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 2, 5, expired=2)]


def test_rerun_of_a_first_micro_batch_from_latest_reads_the_same_messages(stream: Stream) -> None:
    stream.put(Q0, 3)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        start = query.initialOffset()
        stream.put(Q0, 2)
        end = checkpointed(query.latestOffset(start))
        stream.put(Q0, 4)
        # Spark asks for it again when it plans the micro-batch.
        assert query.initialOffset() == start
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 3, 5)]


@pytest.mark.parametrize("busy", [True, False])
def test_rerun_of_a_first_micro_batch_reads_nothing_of_a_quiet_topic(stream: Stream, busy: bool) -> None:
    quiet = MessageQueue("quiet", "a", 0)
    stream.queues(1, "quiet")
    stream.put(quiet, 7)
    latest = {"starting_offsets": OffsetSpec("latest")}
    for asks_first in (True, False):
        with stream.query(subscribe=("quiet", "t"), **latest) as query:
            # PySpark 4.0 and 4.1 ask for the end before they ask for the start.
            start = query.initialOffset() if asks_first else None
            if busy:
                stream.put(Q0, 2)
            end = checkpointed(query.latestOffset(start))
        with stream.query(**latest) as query:
            ranges = ranges_of(query.partitions(query.initialOffset(), end))
            assert ranges == ([OffsetRange(Q0, flat(end)[Q0] - 2, flat(end)[Q0])] if busy and asks_first else [])
            assert flat(query.latestOffset(end))[quiet] == 7


def test_broker_unlisted_at_first_is_not_read_from_its_beginning() -> None:
    away, latest = MessageQueue("t", "b", 0), {"starting_offsets": OffsetSpec("latest")}
    with FakeCluster(["a", "b"]) as cluster:
        stream = Stream(cluster)
        stream.put(away, 5)
        with stream.query(**latest) as query:
            start = query.initialOffset()
            cluster.kill("b")
            end = checkpointed(query.latestOffset(start))
        with stream.query(**latest) as query:
            start = query.initialOffset()
            assert away not in flat(start)
            cluster.restart("b")
            stream.put(away, 2)
            assert ranges_of(query.partitions(start, end)) == []
        with stream.query(**latest) as query:
            assert ranges_of(query.partitions(end, query.latestOffset(end))) == [OffsetRange(away, 5, 7)]


def test_first_batch_before_pyspark_4_2_starts_at_the_initial_offset(stream: Stream) -> None:
    stream.put(Q0, 3)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        # PySpark 4.0 and 4.1 ask for the end of the first micro-batch before its start.
        end = checkpointed(query.latestOffset())
        assert ranges_of(query.partitions(query.initialOffset(), end)) == []
        stream.put(Q0, 2)
        end = checkpointed(query.latestOffset())
        assert ranges_of(query.partitions({"t": {"a": {"0": 3}}}, end)) == [OffsetRange(Q0, 3, 5)]


def test_rerun_of_first_batch_before_pyspark_4_2_reads_same_messages(stream: Stream) -> None:
    stream.put(Q0, 3)
    with stream.query() as query:
        end = checkpointed(query.latestOffset())
    stream.put(Q0, 4)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 0, 3)]


def test_restarted_query_that_spark_wraps_continues_at_its_checkpoint(stream: Stream) -> None:
    stream.put(Q0, 5)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        # The wrapper for Trigger.AvailableNow asks for the end first, also where a query continues.
        end = checkpointed(query.latestOffset())
        assert ranges_of(query.partitions({"t": {"a": {"0": 2}}}, end)) == [OffsetRange(Q0, 2, 5)]


def test_end_from_before_its_checkpoint_skips_no_new_queue(stream: Stream) -> None:
    stream.queues(2)
    stream.put(Q1, 5)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        end = checkpointed(query.latestOffset())
        assert ranges_of(query.partitions({"t": {"a": {"0": 0}}}, end)) == [OffsetRange(Q1, 0, 5)]


def test_first_micro_batch_of_1_0_0rc1_is_repeated_without_quiet_queues(stream: Stream) -> None:
    quiet = MessageQueue("quiet", "a", 0)
    stream.queues(1, "quiet")
    stream.put(quiet, 7)
    stream.put(Q0, 5)
    end = {"quiet": {"a": {"0": 7}}, "t": {"a": {"0": [3, 5]}}}
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 3, 5)]


def test_first_micro_batch_of_a_new_queue_reports_expired_messages(stream: Stream) -> None:
    stream.put(Q0, 1)
    start = {"t": {"a": {"0": 1}}}
    stream.queues(2)
    stream.put(Q1, 5)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(start))
        assert flat(end) == {Q0: 1, Q1: 5}
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q1, 0, 5)]
        stream.expire(Q1, 3)
        with pytest.raises(DataLossError, match="messages 0 to 2 of t/a/1 are not there any more"):
            query.partitions(start, end)


def test_new_queue_that_does_not_begin_at_0_is_logged(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    stream.queues(2)
    stream.put(Q1, 5)
    stream.expire(Q1, 3)
    with stream.query() as query:
        start = {"t": {"a": {"0": 0}}}
        query.partitions(start, query.latestOffset(start))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "t/a/1 begins at offset 3" in warnings[0]


def test_offset_text_is_unchanged_until_new_messages_arrive(stream: Stream) -> None:
    stream.put(Q0, 5)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(query.initialOffset()))
    with stream.query() as query:
        assert json.dumps(query.latestOffset(end)) == json.dumps(end)
        # Spark asks for an empty range when a query continues.
        assert ranges_of(query.partitions(end, end)) == []
        # Releases before 4.2 do not say where a micro-batch starts.
        assert json.dumps(query.latestOffset()) == json.dumps(end)
        stream.put(Q0, 1)
        assert query.latestOffset(end) == {"t": {"a": {"0": 6, "storeTimestamp": {"0": 0}}}}
        assert ranges_of(query.partitions(end, {"t": {"a": {"0": 6}}})) == [OffsetRange(Q0, 5, 6)]


def test_micro_batch_of_a_checkpoint_without_beginnings_is_read(stream: Stream) -> None:
    stream.queues(2)
    stream.put(Q1, 5)
    with stream.query() as query:
        end = {"t": {"a": {"0": 0, "1": 5}}}
        assert ranges_of(query.partitions({"t": {"a": {"0": 0}}}, end)) == [OffsetRange(Q1, 0, 5)]


def after_a_batch(stream: Stream, messages: int) -> dict[str, Any]:
    """Return the offset of a query that has read messages, stored at 1 s, 2 s, ..."""
    for number in range(messages):
        stream.put(Q0, 1, at=number + 1)
    with stream.query() as query:
        start = query.initialOffset()
        end = checkpointed(query.latestOffset(start))
        query.partitions(start, end)
    assert end == {"t": {"a": {"0": [0, messages], "storeTimestamp": {"0": 1000 * messages}}}}
    return end


OTHER = (
    r"queue t/a/0 has another message at offset 4 than .* stored at 1970-01-01 00:00:09.000 UTC, and .* at "
    r"1970-01-01 00:00:05.000 UTC\. .*failOnDataLoss"
)


@pytest.mark.parametrize("running", [True, False], ids=["running", "begun again"])
@pytest.mark.parametrize("kept", [0, 3], ids=["created again", "failover"])
def test_queue_that_has_regrown_past_its_offset_is_lost_data(
    stream: Stream, caplog: pytest.LogCaptureFixture, kept: int, running: bool
) -> None:
    start = after_a_batch(stream, 5)
    if running:
        with stream.query() as query:
            assert query.latestOffset(start) == start
            stream.replace(Q0, kept, 6, at=9.0)
            end = query.latestOffset(start)
            with pytest.raises(DataLossError, match=OTHER):
                query.partitions(start, end)
        return
    stream.replace(Q0, kept, 6, at=9.0)
    for _ in range(2):
        with stream.query() as query:
            end = checkpointed(query.latestOffset(start))
            with pytest.raises(DataLossError, match=OTHER):
                query.partitions(start, end)
    with stream.query(fail_on_data_loss=False) as query:
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, kept, kept + 6)]
        assert (
            f"queue t/a/0 continues at offset {kept}, the first stored after 1970-01-01 00:00:05.000 UTC" in caplog.text
        )
        assert query.latestOffset(end) == end
    # The next micro-batches are of the new messages alone.
    stream.put(Q0, 2, at=10.0)
    with stream.query() as query:
        assert ranges_of(query.partitions(end, query.latestOffset(end))) == [OffsetRange(Q0, kept + 6, kept + 8)]


@pytest.mark.parametrize("kept", [0, 3])
def test_queue_that_ends_at_its_offset_again_is_lost_data_after_a_restart(stream: Stream, kept: int) -> None:
    start = after_a_batch(stream, 5)
    stream.replace(Q0, kept, 5 - kept, at=9.0)
    with stream.query() as query, pytest.raises(DataLossError, match=OTHER):
        query.latestOffset(start)
    with stream.query(fail_on_data_loss=False) as query:
        end = checkpointed(query.latestOffset(start))
    for _ in range(2):
        with stream.query(fail_on_data_loss=False) as query:
            assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, kept, 5)]
            assert query.latestOffset(end) == end


@pytest.mark.parametrize("kept", [0, 3])
def test_new_messages_of_a_shorter_queue_are_read_if_loss_is_allowed(stream: Stream, kept: int) -> None:
    start = after_a_batch(stream, 5)
    stream.replace(Q0, kept, 1, at=9.0)
    with stream.query(fail_on_data_loss=False) as query:
        end = checkpointed(query.latestOffset(start))
    for _ in range(2):
        with stream.query(fail_on_data_loss=False) as query:
            assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, kept, kept + 1)]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(("messages", "left"), [(4, 2), (4, 4), (4, 6), (8, 2), (8, 4)])
def test_new_messages_that_expire_before_a_queue_continues_are_lost_data(
    stream: Stream, caplog: pytest.LogCaptureFixture, messages: int, left: int, fails: bool
) -> None:
    start = after_a_batch(stream, 5)
    stream.replace(Q0, 0, messages, at=9.0)
    with stream.query(fail_on_data_loss=False) as query:
        end = checkpointed(query.latestOffset(start))
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 0, messages)]
    # The driver fails before the micro-batch is complete, so another one repeats it.
    stream.put(Q0, 2, at=9.5)
    stream.expire(Q0, left)
    begin = min(left, messages)
    gone = f"queue t/a/0 has no messages before offset {begin} any more, and the query may not have read them all"
    with stream.query(fail_on_data_loss=fails) as query:
        if fails:
            with pytest.raises(DataLossError, match=gone if messages == 4 else OTHER):
                query.partitions(start, end)
        else:
            ranges = [part for part in ranges_of(query.partitions(start, end)) if part.size]
            assert ranges == ([OffsetRange(Q0, begin, messages)] if begin < messages else [])
            assert gone in caplog.text


@pytest.mark.parametrize(("kept", "expired"), [(0, 0), (3, 2)])
def test_queue_with_the_messages_around_its_new_start_has_lost_none(
    stream: Stream, caplog: pytest.LogCaptureFixture, kept: int, expired: int
) -> None:
    start = after_a_batch(stream, 5)
    stream.replace(Q0, kept, 1, at=9.0)
    with stream.query(fail_on_data_loss=False) as query:
        end = checkpointed(query.latestOffset(start))
    stream.expire(Q0, expired)
    with stream.query() as query:
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, kept, kept + 1)]
    assert "has no messages before" not in caplog.text


@pytest.mark.parametrize("kept", [0, 3])
def test_repeated_micro_batch_whose_messages_were_replaced_is_lost_data(stream: Stream, kept: int) -> None:
    for number in range(5):
        stream.put(Q0, 1, at=number + 1)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(query.initialOffset()))
    stream.replace(Q0, kept, 5, at=9.0)
    with stream.query() as query, pytest.raises(DataLossError, match=OTHER):
        query.partitions(query.initialOffset(), end)
    with stream.query(fail_on_data_loss=False) as query:
        # It reads those of its messages that are left, and the next micro-batch the others.
        ranges = ranges_of(query.partitions(query.initialOffset(), end))
        assert ranges == ([OffsetRange(Q0, 0, kept)] if kept else [])
        stream.put(Q0, 1, at=10.0)
        assert ranges_of(query.partitions(end, query.latestOffset(end))) == [OffsetRange(Q0, kept, kept + 6)]


@pytest.mark.parametrize("timed", [True, False], ids=["times", "no times"])
@pytest.mark.parametrize(("kept", "later"), [(0, 0), (0, 2), (3, 0), (3, 1)])
def test_repeated_micro_batch_whose_queue_is_shorter_now_is_lost_data(
    stream: Stream, kept: int, later: int, timed: bool
) -> None:
    for number in range(5):
        stream.put(Q0, 1, at=number + 1)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(query.initialOffset()))
    if not timed:
        # Release 1.0.0rc1 wrote no store times.
        del end["t"]["a"]["storeTimestamp"]
    stream.replace(Q0, kept, later, at=9.0)
    waits = {"pull_timeout_ms": 1_500}
    shorter = f"queue t/a/0 ends at offset {kept + later}, before 5, where the micro-batch ends.*failOnDataLoss"
    with stream.query(**waits) as query, pytest.raises(DataLossError, match=shorter):
        query.partitions(query.initialOffset(), end)
    with stream.query(fail_on_data_loss=False, **waits) as query:
        # It reads those of its messages that are left, and the next micro-batch the others.
        last = kept if timed else kept + later
        ranges = ranges_of(query.partitions(query.initialOffset(), end))
        assert ranges == ([OffsetRange(Q0, 0, last)] if last else [])
        if timed:
            stream.put(Q0, 6, at=10.0)
            assert ranges_of(query.partitions(end, query.latestOffset(end))) == [
                OffsetRange(Q0, kept, kept + later + 6)
            ]


@pytest.mark.parametrize(("kept", "later"), [(0, 0), (0, 1), (1, 1), (0, 4), (4, 0)])
def test_repeated_micro_batch_of_a_shorter_queue_reads_each_message_once(stream: Stream, kept: int, later: int) -> None:
    start = after_a_batch(stream, 3)
    for number in range(3, 6):
        stream.put(Q0, 1, at=number + 1)
    with stream.query() as query:
        end = checkpointed(query.latestOffset(start))
    stream.replace(Q0, kept, later, at=9.0)
    with stream.query(fail_on_data_loss=False, pull_timeout_ms=1_500) as query:
        ranges = ranges_of(query.partitions(start, end))
        # Of its messages, those at offsets 3, 4 and 5, the failover has kept this many.
        assert sum(part.size for part in ranges) == max(0, kept - 3)
        stream.put(Q0, 6, at=10.0)
        assert ranges_of(query.partitions(end, query.latestOffset(end))) == [OffsetRange(Q0, kept, kept + later + 6)]


def test_topic_without_new_messages_since_the_start_is_compared_too(stream: Stream) -> None:
    stream.put(Q0, 5, at=5.0)
    latest = {"starting_offsets": OffsetSpec("latest")}
    with stream.query(**latest) as query:
        # The first micro-batch has no messages.
        end = checkpointed(query.latestOffset(query.initialOffset()))
        assert end == {"t": {"a": {"0": [5, 5], "storeTimestamp": {"0": 5000}}}}
    stream.replace(Q0, 0, 8, at=9.0)
    with stream.query(**latest) as query, pytest.raises(DataLossError, match=OTHER):
        query.partitions(end, query.latestOffset(end))


def test_topic_that_returns_to_a_query_is_compared(stream: Stream) -> None:
    other = MessageQueue("other", "a", 0)
    stream.queues(1, "other")
    stream.put(other, 1)
    start = after_a_batch(stream, 5)
    with stream.query(subscribe=("other",)) as query:
        end = checkpointed(query.latestOffset(start))
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(other, 0, 1)]
        assert query.latestOffset(end) == end
    # The commit log keeps its first message, that of the other topic.
    stream.replace(Q0, 1, 6, at=9.0)
    with stream.query(subscribe=("other", "t")) as query, pytest.raises(DataLossError, match=OTHER):
        query.partitions(end, query.latestOffset(end))


def test_queue_whose_last_message_read_has_expired_is_not_compared(stream: Stream) -> None:
    start = after_a_batch(stream, 5)
    stream.put(Q0, 2, at=6.0)
    stream.expire(Q0, 5)
    with stream.query() as query:
        assert ranges_of(query.partitions(start, query.latestOffset(start))) == [OffsetRange(Q0, 5, 7)]


def test_checkpoint_without_store_times_gets_them_with_the_next_messages(stream: Stream) -> None:
    stream.queues(2)
    stream.put(Q0, 5, at=5.0)
    stream.put(Q1, 3, at=3.0)
    start = {"t": {"a": {"0": 5, "1": 3}}}
    with stream.query() as query:
        assert query.latestOffset(start) == start
        stream.put(Q0, 1, at=6.0)
        end = query.latestOffset(start)
        assert end == {"t": {"a": {"0": 6, "1": 3, "storeTimestamp": {"0": 6000, "1": 3000}}}}
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 5, 6)]


def test_topic_created_again_after_an_empty_first_micro_batch_is_read(stream: Stream) -> None:
    stream.put(Q0, 3, at=1.0)
    with stream.query(starting_offsets=OffsetSpec("latest"), fail_on_data_loss=False) as query:
        start = checkpointed(query.latestOffset(query.initialOffset()))
        stream.replace(Q0, 0, 1, at=9.0)
        end = checkpointed(query.latestOffset(start))
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 0, 1)]


def test_lost_answer_does_not_hide_a_topic_created_again_at_the_start(stream: Stream) -> None:
    stream.put(Q0, 5, at=5.0)
    with stream.query(starting_offsets=OffsetSpec("latest")) as query:
        stream.lose_answer(RequestCode.PULL_MESSAGE)
        start = query.initialOffset()
        stream.replace(Q0, 0, 8, at=9.0)
        with pytest.raises(DataLossError, match=OTHER):
            query.partitions(start, query.latestOffset(start))


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("regrown", [8, 3])
def test_rerun_of_a_first_micro_batch_reads_a_topic_created_again(stream: Stream, fails: bool, regrown: int) -> None:
    options: dict[str, Any] = {"starting_offsets": OffsetSpec("latest"), "fail_on_data_loss": fails}
    stream.put(Q0, 5, at=5.0)
    with stream.query(**options) as query:
        start = query.initialOffset()
        stream.replace(Q0, 0, regrown, at=9.0)
        if fails:
            # Later the offset log would have the start, and no store time of the message before it.
            with pytest.raises(DataLossError, match=r"queue t/a/0 (has another message|ends at offset 3)"):
                query.latestOffset(start)
            return
        end = checkpointed(query.latestOffset(start))
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 0, regrown)]
    with stream.query(**options) as query:
        query.partitions(end, end)
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 0, regrown)]


def test_first_micro_batch_reads_a_topic_created_again_up_to_its_start(stream: Stream) -> None:
    options: dict[str, Any] = {"starting_offsets": OffsetSpec("latest"), "fail_on_data_loss": False}
    stream.put(Q0, 5, at=5.0)
    with stream.query(**options) as query:
        start = query.initialOffset()
        stream.put(Q0, 2, at=6.0)
        stream.before(RequestCode.PULL_MESSAGE, lambda: stream.replace(Q0, 0, 5, at=9.0))
        end = checkpointed(query.latestOffset(start))
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 0, 5)]
    with stream.query(**options) as query:
        query.partitions(end, end)
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 0, 5)]


def test_topic_created_again_after_a_micro_batch_was_planned_is_read_once(stream: Stream) -> None:
    start = after_a_batch(stream, 5)
    with stream.query(fail_on_data_loss=False) as query:
        stream.put(Q0, 2, at=6.0)
        end = checkpointed(query.latestOffset(start))
        stream.replace(Q0, 0, 8, at=9.0)
        assert ranges_of(query.partitions(start, end)) == []
        assert ranges_of(query.partitions(end, query.latestOffset(end))) == [OffsetRange(Q0, 0, 8)]


def test_end_that_is_lost_while_a_micro_batch_is_planned_is_lost_data(stream: Stream) -> None:
    start = after_a_batch(stream, 5)

    def plan(query: RocketMQStreamReader) -> dict[str, Any]:
        stream.put(Q0, 2, at=6.0)
        stream.before(RequestCode.PULL_MESSAGE, lambda: stream.replace(Q0, 6, 0, at=9.0))
        return query.latestOffset(start)

    shorter = "queue t/a/0 ends at offset 6, before 7, where the micro-batch ends"
    with stream.query(pull_timeout_ms=500) as query, pytest.raises(DataLossError, match=shorter):
        plan(query)
    stream.replace(Q0, 5, 0, at=9.0)
    with stream.query(pull_timeout_ms=500, fail_on_data_loss=False) as query:
        end = checkpointed(plan(query))
        assert end == {"t": {"a": {"0": 6, "storeTimestamp": {"0": 6000}}}}
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 5, 6)]


def test_end_that_is_reached_again_while_it_is_planned_is_compared(stream: Stream) -> None:
    start = after_a_batch(stream, 5)
    stream.put(Q0, 2, at=6.0)

    def lose() -> None:
        stream.replace(Q0, 5, 0, at=7.0)
        stream.before(RequestCode.GET_MAX_OFFSET, lambda: stream.put(Q0, 3, at=8.0))

    with stream.query() as query:
        stream.before(RequestCode.PULL_MESSAGE, lose)
        end = checkpointed(query.latestOffset(start))
    assert end == {"t": {"a": {"0": 7, "storeTimestamp": {"0": 8000}}}}
    stream.replace(Q0, 5, 3, at=9.0)
    with stream.query() as query, pytest.raises(DataLossError, match=r"offset 6 .*00:00:09.000 UTC, and .* 00:00:08"):
        query.partitions(start, end)


@NEEDS_LIMITS
def test_available_now_reports_an_end_that_is_lost_once(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    start = after_a_batch(stream, 5)
    stream.put(Q0, 2, at=6.0)
    with stream.query(pull_timeout_ms=500, fail_on_data_loss=False) as query:
        assert isinstance(query, SupportsTriggerAvailableNow)
        query.prepareForTriggerAvailableNow()
        stream.before(RequestCode.PULL_MESSAGE, lambda: stream.replace(Q0, 6, 0, at=9.0))
        end = checkpointed(query.latestOffset(start))
        assert query.latestOffset(end) == end
    assert sum("ends at offset 6, before 7" in text for text in caplog.messages) == 1


@NEEDS_LIMITS
def test_lost_messages_are_logged_once_while_a_query_waits_for_more(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    start = after_a_batch(stream, 5)
    with stream.query(fail_on_data_loss=False, min_offsets_per_trigger=5) as query:
        limit = query.getDefaultReadLimit()
        stream.replace(Q0, 0, 2, at=9.0)
        end = query.latestOffset(start, limit)
        assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 0, 2)]
        stream.put(Q0, 4, at=9.0)
        assert query.latestOffset(end, limit) == end
        stream.put(Q0, 1, at=9.0)
        assert ranges_of(query.partitions(end, query.latestOffset(end, limit))) == [OffsetRange(Q0, 2, 7)]
    assert sum("queue t/a/0 ends at offset" in text for text in caplog.messages) == 1


def test_start_after_the_end_of_a_queue_is_lost_data(stream: Stream) -> None:
    stream.put(Q0, 2, at=1.0)
    options = {"starting_offsets": OffsetSpec(offsets=((Q0, 4),)), "pull_timeout_ms": 100}
    shorter = "queue t/a/0 ends at offset 2, before 4, where the query begins.*failOnDataLoss"
    with stream.query(**options) as query, pytest.raises(DataLossError, match=shorter):
        query.initialOffset()
    with stream.query(fail_on_data_loss=False, **options) as query:
        start = query.initialOffset()
        # It does not skip messages that come before the first plan.
        stream.put(Q0, 3, at=2.0)
        assert ranges_of(query.partitions(start, query.latestOffset(start))) == [OffsetRange(Q0, 2, 5)]


@NEEDS_LIMITS
def test_message_above_the_limit_of_bytes_is_read(stream: Stream) -> None:
    stream.put(Q0, 3)
    with stream.query(max_bytes_per_trigger=1) as query:
        start = query.initialOffset()
        assert flat(query.latestOffset(start, query.getDefaultReadLimit())) == {Q0: 1}


@NEEDS_LIMITS
@pytest.mark.parametrize("fault", ["messages expired", "no answer"])
def test_limit_of_bytes_stays_without_a_sample_of_the_next_message(stream: Stream, fault: str) -> None:
    stream.put(Q0, 1000)
    with stream.query(max_bytes_per_trigger=2000, fail_on_data_loss=False) as query:
        limit, start = query.getDefaultReadLimit(), query.initialOffset()
        if fault == "no answer":
            stream.lose_answer(RequestCode.PULL_MESSAGE)
        else:
            stream.expire(Q0, 500)
        assert flat(query.latestOffset(start, limit))[Q0] < 50


def test_offset_reached_again_has_the_store_time_of_its_message(stream: Stream) -> None:
    stream.put(Q0, 1, at=1.0)
    with stream.query(fail_on_data_loss=False) as query:
        ends = [checkpointed(query.latestOffset(query.initialOffset()))]
        stream.replace(Q0, 0, 0, at=9.0)
        ends.append(checkpointed(query.latestOffset(ends[-1])))
        stream.put(Q0, 1, at=9.0)
        ends.append(checkpointed(query.latestOffset(ends[-1])))
    assert ends[1:] == [{"t": {"a": {"0": 0}}}, {"t": {"a": {"0": 1, "storeTimestamp": {"0": 9000}}}}]
    with stream.query() as query:
        assert query.latestOffset(ends[-1]) == ends[-1]


def test_repeated_first_micro_batch_continues_without_a_deleted_topic(stream: Stream) -> None:
    stream.queues(1, "old")
    stream.put(Q0, 5)
    both = {"subscribe": ("old", "t"), "fail_on_data_loss": False, "pull_timeout_ms": 100, "read_timeout_ms": 1000}
    with stream.query(**both) as query:
        end = checkpointed(query.latestOffset(query.initialOffset()))
    stream.delete("old")
    with stream.query(**both) as query:
        # Spark asks for an empty range when a query continues.
        assert query.partitions(end, end) == []
        assert ranges_of(query.partitions(query.initialOffset(), end)) == [OffsetRange(Q0, 0, 5)]


@pytest.mark.parametrize("fails", [True, False])
def test_repeated_micro_batch_of_a_broker_that_lost_its_topic_is_lost_data(fails: bool) -> None:
    with FakeCluster("ab", topics={"t": 1}) as cluster:
        stream = Stream(cluster)
        options = {"fail_on_data_loss": fails, "pull_timeout_ms": 100, "read_timeout_ms": 1000}
        lost = MessageQueue("t", "b", 0)
        stream.put(Q0, 2)
        stream.put(lost, 3)
        with stream.query(**options) as query:
            start = checkpointed(query.latestOffset(query.initialOffset()))
            stream.put(Q0, 2)
            stream.put(lost, 3)
            end = checkpointed(query.latestOffset(start))
        stream.delete("t", "b")
        with stream.query(**options) as query:
            query.partitions(end, end)
            if fails:
                with pytest.raises(DataLossError, match="queue t/b/0 is gone: its messages from offset 3 on"):
                    query.partitions(start, end)
                return
            assert ranges_of(query.partitions(start, end)) == [OffsetRange(Q0, 2, 4)]
            assert query.latestOffset(end) == end


@pytest.mark.parametrize("answers", [True, False], ids=["", "brokers unknown"])
def test_repeated_micro_batch_waits_for_the_only_broker_of_a_topic(answers: bool) -> None:
    with FakeCluster("ab") as cluster:
        stream = Stream(cluster)
        stream.delete("t", "b")
        options = {"fail_on_data_loss": False, "pull_timeout_ms": 100, "read_timeout_ms": 1000}
        stream.put(Q0, 2)
        with stream.query(**options) as query:
            end = checkpointed(query.latestOffset(query.initialOffset()))
        cluster.kill("a")
        if not answers:
            cluster.name_servers[0].always[RequestCode.GET_BROKER_CLUSTER_INFO] = Reply(closes=True)
        with stream.query(**options) as query:
            with pytest.raises(ReadError, match="requests about queue t/a/0"):
                query.partitions({}, end)
            cluster.restart("a")
            assert ranges_of(query.partitions({}, end)) == [OffsetRange(Q0, 0, 2)]
