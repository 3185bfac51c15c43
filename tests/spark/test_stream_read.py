"""`spark.readStream` from real brokers: the rows, their micro-batches, and that each row is read once."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark import ProgressListener, dedupe, lag
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import flat
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster, mqadmin
from tests.support.java import WITHIN, Java, un64
from tests.support.processes import NEEDS_LIMITS, PYSPARK, at_most, descendants, wait_for
from tests.support.reading import read_topic
from tests.support.streams import Feed, Kept, once
from tests.support.writes import failing_late, make_topic, messages_in, numbered

pytestmark = [pytest.mark.spark, pytest.mark.integration]

PROGRAMS = Path(__file__).parents[1] / "programs"
Load = Callable[..., DataFrame]
Start = Callable[..., StreamingQuery]
# Before PySpark 4.2 a run of Trigger.AvailableNow has one micro-batch. If that is a repeated one, the next run reads
# newer messages. The next run also commits the micro-batch.
RUNS = 1 if PYSPARK >= (4, 2) else 2


@pytest.fixture
def feed(cluster: SharedCluster, topic: str) -> Iterator[Feed]:
    """A feed of the test's topic, which has two queues on each broker."""
    make_topic(cluster, topic, queues=2)
    with Producer("feed", name_server=cluster.name_server) as producer:
        yield Feed(producer, cluster.name_server, topic)


@pytest.fixture
def load(spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics) -> Load:
    """Read the test's topic from its beginning. Keyword arguments are options; None removes a default."""

    def read(**options: Any) -> DataFrame:
        given = {"nameServer": cluster.name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
        given = {name: value for name, value in given.items() if value is not None}
        return spark.readStream.format("rocketmq").options(**given).load()

    return read


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def start(spark: SparkSession, kept: Kept, tmp_path: Path) -> Iterator[Start]:
    """Start a query that keeps its rows, with the test's checkpoint; the fixture stops it after the test."""
    started: list[StreamingQuery] = []

    def begin(frame: DataFrame, checkpoint: str = "checkpoint", into: Kept = kept, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.foreachBatch(into).option("checkpointLocation", str(tmp_path / checkpoint))
        started.append((writer.trigger(**trigger) if trigger else writer).start())
        return started[-1]

    # Progress events also come from micro-batches without rows.
    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "100")
    yield begin
    spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")
    for query in started:
        query.stop()


def run(query: StreamingQuery) -> list[int]:
    """Wait for the end of a query, and return the rows of each micro-batch that had any."""
    assert query.awaitTermination(120)
    return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]


def offsets(text: str) -> dict[MessageQueue, int]:
    return flat(json.loads(text))


def test_java_consumer_and_stream_continue_where_the_other_stopped(
    spark: SparkSession,
    cluster: SharedCluster,
    java: Java,
    load: Load,
    start: Start,
    kept: Kept,
    feed: Feed,
    topic: str,
) -> None:
    group = f"group-{topic}"

    def consume(count: int) -> Counter[str]:
        request = {"nameServer": cluster.name_server, "topic": topic, "group": group, "count": count}
        lines = java.run("PushConsumer", [{**request, "withinMs": int(WITHIN * 1000)}])
        return Counter(un64(line["keys"]).decode() for line in lines)

    keys = feed(120)
    consumed = consume(50)
    assert consumed.total() == 50
    read = load(startingOffsets="committed", consumerGroup=group, commitOffsets=True)
    run(start(read, availableNow=True))
    assert kept.keys + consumed == once(keys)
    later = feed(30)
    for _ in range(RUNS):
        run(start(read, availableNow=True))
    assert kept.keys + consumed == once([*keys, *later])
    newest = feed(20)
    assert consume(20) == once(newest)


def test_lag_counts_messages_that_the_query_has_not_read(
    spark: SparkSession, cluster: SharedCluster, load: Load, start: Start, feed: Feed, caplog: pytest.LogCaptureFixture
) -> None:
    feed(300)
    caplog.set_level(logging.INFO, "rocketmq_spark.spark")
    listener = ProgressListener()
    spark.streams.addListener(listener)
    try:
        query = start(load(), availableNow=True)
        assert sum(run(query)) == 300
        wait_for(lambda: "has ended" in caplog.text)
    finally:
        spark.streams.removeListener(listener)
    assert sum(queue.messages for queue in lag(query, cluster.name_server)) == 0
    feed(20)
    behind = lag(query, cluster.name_server)
    assert sum(queue.messages for queue in behind) == 20
    assert len(behind) == 4
    assert "300 rows in " in caplog.text
    if PYSPARK >= (4, 2):
        assert sum(queue.messages for queue in lag(query)) == 0
        assert "0 messages not read" in caplog.text


@NEEDS_LIMITS
def test_available_now_leaves_later_messages_to_the_next_run(load: Load, start: Start, feed: Feed, kept: Kept) -> None:
    first, later = feed(3000), list[str]()
    kept.then = lambda batch_id: later.extend(feed(100) if batch_id == 0 else [])
    frame = load(maxOffsetsPerTrigger=1000)
    assert run(start(frame, availableNow=True)) == [1000, 1000, 1000]
    assert kept.keys == once(first)
    later += feed(50)
    assert run(start(frame, availableNow=True)) == [150]
    assert kept.keys == once(first + later)
    assert run(start(frame, availableNow=True)) == []


@NEEDS_LIMITS
def test_bytes_of_a_micro_batch_are_about_the_limit(
    spark: SparkSession, cluster: SharedCluster, topic: str, load: Load, start: Start, feed: Feed, kept: Kept
) -> None:
    keys = feed(3000)
    stored = sum(len(message.body) + 200 for message in read_topic(cluster.name_server, topic, 3000))
    sizes = run(start(load(maxBytesPerTrigger=stored // 3), availableNow=True))
    assert 2 <= len(sizes) <= 6
    assert max(sizes) < 2 * 3000 / 3
    assert sum(sizes) == 3000
    assert kept.keys == once(keys)


def test_available_now_without_limits_is_one_micro_batch_each_time(
    load: Load, start: Start, feed: Feed, kept: Kept
) -> None:
    keys = feed(300)
    assert run(start(load(), availableNow=True)) == [300]
    keys += feed(50)
    assert run(start(load(), availableNow=True)) == [50]
    assert run(start(load(), availableNow=True)) == []
    assert kept.keys == once(keys)


@NEEDS_LIMITS
def test_micro_batch_limit_is_shared_in_proportion_to_the_queues(
    load: Load, start: Start, feed: Feed, kept: Kept, cluster: SharedCluster
) -> None:
    (one, two) = (broker.name for broker in cluster.brokers)
    for rows, queue in ((300, (one, 0)), (80, (one, 1)), (20, (two, 0))):
        feed(rows, to=queue)
    run(start(load(maxOffsetsPerTrigger=200), availableNow=True))
    shares = [Counter((broker, queue) for _, broker, queue in batch) for batch in kept.batches]
    assert shares == [{(one, 0): 150, (one, 1): 40, (two, 0): 10}] * 2


@NEEDS_LIMITS
def test_progress_reports_available_offsets_and_checkpoint_the_read_ones(
    load: Load, start: Start, feed: Feed, topic: str, tmp_path: Path
) -> None:
    feed(500)
    query = start(load(maxOffsetsPerTrigger=200), availableNow=True)
    assert run(query) == [200, 200, 100]
    ends = []
    for batch in query.recentProgress:
        if batch.numInputRows:
            [source] = batch.sources
            assert sum(offsets(source.latestOffset).values()) == 500
            ends.append(offsets(source.endOffset))
    assert [sum(end.values()) for end in ends] == [200, 400, 500]
    for number, end in enumerate(ends):
        written = (tmp_path / "checkpoint" / "offsets" / str(number)).read_text().splitlines()[-1]
        assert offsets(written) == end
        assert {queue.topic for queue in end} == {topic}
        assert len(end) == 4


@NEEDS_LIMITS
def test_a_micro_batch_waits_for_its_least_rows(load: Load, start: Start, feed: Feed, kept: Kept) -> None:
    few = feed(50)
    query = start(load(minOffsetsPerTrigger=100, maxTriggerDelay="1h"))

    def waits() -> bool:
        last = query.lastProgress
        return last is not None and sum(offsets(last.sources[0].latestOffset or "{}").values()) == 50

    wait_for(waits)
    assert kept.batches == []
    more = feed(60)
    wait_for(lambda: len(kept.batches) == 1)
    assert kept.keys == once(few + more)


@NEEDS_LIMITS
def test_a_micro_batch_goes_with_few_rows_when_its_delay_is_over(
    load: Load, start: Start, feed: Feed, kept: Kept
) -> None:
    few = feed(50)
    start(load(minOffsetsPerTrigger=1_000_000, maxTriggerDelay="1s"))
    wait_for(lambda: kept.keys == once(few))


@NEEDS_LIMITS
@pytest.mark.parametrize("trigger", [pytest.param("once", marks=pytest.mark.long), "availableNow"])
def test_terminating_trigger_ignores_min_offsets_per_trigger(
    load: Load, start: Start, feed: Feed, kept: Kept, trigger: str
) -> None:
    few = feed(50)
    assert run(start(load(minOffsetsPerTrigger=100, maxOffsetsPerTrigger=200), **{trigger: True})) == [50]
    assert kept.keys == once(few)


def held_up(gate: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Pass all rows on, create a file for each partition, and wait until the test removes it."""

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        gate.touch()
        wait_for(lambda: not gate.exists())

    return passed_on


def into_files(frame: DataFrame, folder: Path, **trigger: Any) -> StreamingQuery:
    writer = frame.writeStream.format("parquet").trigger(**trigger)
    return writer.options(path=str(folder / "out"), checkpointLocation=str(folder / "checkpoint")).start()


def keys_in(spark: SparkSession, folder: Path) -> Counter[str]:
    return Counter(row.keys_ for row in spark.read.parquet(str(folder / "out")).toDF("keys_").collect())


def test_query_stopped_during_a_micro_batch_reads_every_row_once(
    spark: SparkSession, load: Load, feed: Feed, tmp_path: Path
) -> None:
    keys, gate = feed(700), tmp_path / "gate"
    frame = load(**at_most(500)).select("keys")
    query = into_files(frame.mapInArrow(held_up(gate), frame.schema), tmp_path, processingTime="0 seconds")
    try:
        wait_for(gate.exists)
        keys += feed(700)
    finally:
        query.stop()
        gate.unlink()
    assert query.recentProgress == []
    # The restarted micro-batch has its original rows, without newer ones. Before PySpark 4.2 it is the only one of its
    # run.
    for batches in [[500, 500, 400]] if at_most(500) else [[700], [700]]:
        assert run(into_files(frame, tmp_path, availableNow=True)) == batches
    assert keys_in(spark, tmp_path) == once(keys)


@NEEDS_LIMITS
def test_query_with_driver_killed_during_a_batch_reads_every_row_once(
    spark: SparkSession, cluster: SharedCluster, load: Load, feed: Feed, topic: str, tmp_path: Path
) -> None:
    keys, gate = feed(3000), tmp_path / "gate"
    arguments = {
        "batch": 2,
        "gate": str(gate),
        "options": {
            "nameServer": cluster.name_server,
            "subscribe": topic,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "1000",
        },
        "sink": {"path": str(tmp_path / "out"), "checkpointLocation": str(tmp_path / "checkpoint")},
    }
    command = [sys.executable, str(PROGRAMS / "read_stream.py"), json.dumps(arguments)]
    with (tmp_path / "said").open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as driver:
        try:
            wait_for(lambda: gate.exists() or driver.poll() is not None)
            assert driver.poll() is None, (tmp_path / "said").read_text()
            keys += feed(500)
        finally:
            for pid in (*descendants(driver.pid), driver.pid):
                os.kill(pid, signal.SIGKILL)
    assert keys_in(spark, tmp_path).total() == 2000
    keys += feed(500)
    query = into_files(load(maxOffsetsPerTrigger=1000).select("keys"), tmp_path, availableNow=True)
    assert run(query) == [1000, 1000]
    assert keys_in(spark, tmp_path) == once(keys)


def test_new_queues_and_brokers_are_read_from_their_first_message(
    load: Load, start: Start, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    one, two = cluster.brokers
    make_topic(cluster, topic, queues=1, on=[one])
    with Producer("feed", name_server=cluster.name_server) as producer:
        feed = Feed(producer, cluster.name_server, topic)
        feed(10)
        # Messages from before the query are not read; a new topic is read from its beginning.
        query = start(load(startingOffsets="latest"))
        wait_for(lambda: query.lastProgress is not None)
        make_topic(cluster, topic, queues=2)
    with Producer("feed-again", name_server=cluster.name_server) as producer:
        feed = Feed(producer, cluster.name_server, topic)
        feed.sent, keys = 10, list[str]()
        for queue in ((one.name, 0), (one.name, 1), (two.name, 0), (two.name, 1)):
            keys += feed(25, to=queue)
    wait_for(lambda: kept.keys == once(keys))


def test_missing_queue_fails_the_query_or_is_read_after_its_return(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    keys = feed(100)
    run(start(load(), availableNow=True))
    (broker, _) = (one.name for one in cluster.brokers)
    unread = feed(10, to=(broker, 1))
    make_topic(cluster, topic, queues=1)
    keys += feed(10, to=(broker, 0))
    for trigger in ({"availableNow": True}, {}):
        query = start(load(), **trigger)
        with pytest.raises(StreamingQueryException, match=rf"queue {topic}/{broker}/1 is gone.*failOnDataLoss=false"):
            query.awaitTermination(60)
    assert run(start(load(failOnDataLoss="false"), availableNow=True)) == [10]
    assert kept.keys == once(keys)
    # The checkpoint still has its offsets: messages that were read are not read again.
    make_topic(cluster, topic, queues=2)
    assert run(start(load(), availableNow=True)) == [10]
    assert kept.keys == once(keys + unread)
    # Now the query has read all messages of the queue that is removed.
    make_topic(cluster, topic, queues=1)
    keys += feed(10, to=(broker, 0))
    assert run(start(load(), availableNow=True)) == [10]
    assert kept.keys == once(keys + unread)


def test_a_repeated_micro_batch_leaves_out_a_removed_queue_on_request(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    (broker, _) = (one.name for one in cluster.brokers)
    keys = feed(10, to=(broker, 0))
    feed(10, to=(broker, 1))

    def fail(_: int) -> None:
        raise RuntimeError("the sink failed")

    kept.then = fail
    query = start(load(), availableNow=True)
    with pytest.raises(StreamingQueryException, match="the sink failed"):
        query.awaitTermination(60)
    kept.then = lambda _: None
    kept.batches.clear()
    make_topic(cluster, topic, queues=1)
    for _ in range(2):
        query = start(load(), availableNow=True)
        with pytest.raises(StreamingQueryException, match=rf"queue {topic}/{broker}/1 is gone.*failOnDataLoss=false"):
            query.awaitTermination(60)
    keys += feed(10, to=(broker, 0))
    for _ in range(RUNS):
        run(start(load(failOnDataLoss="false"), availableNow=True))
    assert kept.keys == once(keys)


def test_first_micro_batch_with_other_topics_reads_no_earlier_messages(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    make_topic(cluster, f"{topic}-quiet", queues=2)
    feed(50, topic=f"{topic}-quiet")

    def fail(_: int) -> None:
        raise RuntimeError("the sink failed")

    kept.then = fail
    query = start(load(subscribe=f"{topic},{topic}-quiet", startingOffsets="latest"))
    with pytest.raises(StreamingQueryException, match="the sink failed"):
        query.awaitTermination(60)
    kept.then, keys = lambda _: None, feed(10)
    for _ in range(2):
        run(start(load(startingOffsets="latest"), availableNow=True))
    assert kept.keys == once(keys)


def test_query_stops_while_the_permission_to_read_is_missing(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    keys = feed(100)
    query = start(load(failOnDataLoss="false"))
    wait_for(lambda: kept.keys == once(keys))
    # Without new messages: a task that the driver starts before it asks for the route again would wait for the broker.
    make_topic(cluster, topic, queues=2, perm=2, on=cluster.brokers[:1])
    text = f"broker {cluster.brokers[0].name} rejects reads, because the topic's permission there is w"
    with pytest.raises(StreamingQueryException, match=text):
        query.awaitTermination(60)
    keys += feed(100)
    # A second query with the same checkpoint would stop the first one.
    query = start(load(), availableNow=True)
    with pytest.raises(StreamingQueryException, match=text):
        query.awaitTermination(60)
    make_topic(cluster, topic, queues=2)
    run(start(load(), availableNow=True))
    assert kept.keys == once(keys)


def test_longer_topic_of_the_same_name_is_lost_data(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, kept: Kept
) -> None:
    queue = cluster.brokers[0].name, 0
    keys = feed(100, to=queue)
    run(start(load(), availableNow=True))
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            deleted = transport.client.invoke(
                broker.address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}, (), 5.0
            )
            assert deleted.code == ResponseCode.SUCCESS
        wait_for(lambda: messages_in(cluster.name_server, topic) == 0)
    make_topic(cluster, topic, queues=2)
    keys += feed(150, to=queue)
    query = start(load(), availableNow=True)
    with pytest.raises(StreamingQueryException, match=rf"queue {topic}/.* has another message at offset \d+ than"):
        query.awaitTermination(60)
    assert run(start(load(failOnDataLoss="false"), availableNow=True)) == [150]
    assert kept.keys == once(keys)
    keys += feed(10, to=queue)
    assert run(start(load(), availableNow=True)) == [10]
    assert kept.keys == once(keys)


def committed(cluster: SharedCluster, group: str, topic: str) -> dict[tuple[str, int], int]:
    """Return the committed offsets of a group at the brokers (QUERY_CONSUMER_OFFSET)."""
    found = {}
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            for queue in range(2):
                fields = {"consumerGroup": group, "topic": topic, "queueId": str(queue), "setZeroIfNotFound": "false"}
                answer = transport.client.invoke(broker.address, RequestCode.QUERY_CONSUMER_OFFSET, fields, (), 5.0)
                if answer.code == ResponseCode.SUCCESS:
                    found[broker.name, queue] = int(answer.ext_fields["offset"])
    return found


# Topic, broker, queue, the broker's offset, the group's, the difference.
PROGRESS = re.compile(r"^(\S+) +(\S+) +(\d+) +(\d+) +(\d+) +(-?\d+) ", re.MULTILINE)


def test_committed_offsets_determine_the_lag_shown_by_mqadmin(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str, tmp_path: Path
) -> None:
    group = f"group-{topic}"
    (one, two) = (broker.name for broker in cluster.brokers)
    sent = {(one, 0): 30, (one, 1): 20, (two, 0): 10, (two, 1): 0}
    for queue, rows in sent.items():
        if rows:
            feed(rows, to=queue)
    for _ in range(RUNS):
        run(start(load(commitOffsets="true", consumerGroup=group), availableNow=True))
    assert committed(cluster, group, topic) == sent
    feed(7, to=(one, 1))
    # Without the option, nothing is committed.
    run(start(load(consumerGroup=f"{group}-silent"), "silent", availableNow=True))
    assert committed(cluster, f"{group}-silent", topic) == {}
    printed = mqadmin(tmp_path, "consumerProgress", "-n", cluster.name_server, "-g", group)
    lag = {(broker, int(queue)): int(diff) for _, broker, queue, _, _, diff in PROGRESS.findall(printed)}
    assert lag == {(one, 0): 0, (one, 1): 7, (two, 0): 0, (two, 1): 0}, printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets: ending offset not valid in streaming queries"),
        ({"startingOfsets": "latest"}, "startingofsets.*startingOffsets"),
        ({"maxTriggerDelay": "1m"}, "maxTriggerDelay is given without minOffsetsPerTrigger"),
        ({"minOffsetsPerTrigger": 10, "maxOffsetsPerTrigger": 5}, "minOffsetsPerTrigger.*maxOffsetsPerTrigger"),
        ({"subscribe": None}, "one of the following options must be specified"),
    ],
)
def test_an_option_that_makes_no_sense_ends_a_query_before_it_reads(
    load: Load, start: Start, kept: Kept, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(StreamingQueryException, match=message) as raised:
        start(load(**options)).awaitTermination(60)
    # PySpark's own error after a failed reader does not hide the reason.
    assert "UnboundLocalError" not in str(raised.value)
    assert kept.batches == []


@pytest.mark.skipif(PYSPARK >= (4, 2), reason="PySpark 4.2 and newer limit micro-batches")
@pytest.mark.parametrize("option", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger"])
def test_offset_limits_are_rejected_before_pyspark_4_2(load: Load, start: Start, option: str) -> None:
    with pytest.raises(StreamingQueryException, match=f"{option} requires PySpark 4.2 or newer"):
        start(load(**{option: 10})).awaitTermination(60)


def test_stream_starts_at_offsets_or_at_a_time(
    load: Load, start: Start, feed: Feed, spark: SparkSession, cluster: SharedCluster, topic: str
) -> None:
    (one, two) = (broker.name for broker in cluster.brokers)
    for queue in ((one, 0), (one, 1), (two, 0)):
        feed(20, to=queue)
    time.sleep(0.01)  # A different store timestamp.
    late = feed(10, to=(two, 1))
    batch = spark.read.format("rocketmq").options(nameServer=cluster.name_server, subscribe=topic).load()
    [since] = batch.where(f"keys = '{late[0]}'").selectExpr("unix_millis(storeTimestamp) as since").collect()
    given = json.dumps({topic: {one: {"0": 15, "1": -1}, two: {"0": -2, "1": 3}}})
    times = json.dumps({topic: {name: {"0": since.since, "1": since.since} for name in (one, two)}})
    empty = {"startingOffsetsByTimestampStrategy": "latest"}
    wanted: list[tuple[dict[str, Any], dict[tuple[str, int], int]]] = [
        ({"startingOffsets": "latest"}, {}),
        ({"startingOffsets": None}, {}),
        ({"startingOffsets": given}, {(one, 0): 5, (two, 0): 20, (two, 1): 7}),
        ({"startingTimestamp": since.since, **empty}, {(two, 1): 10}),
        ({"startingOffsetsByTimestamp": times, **empty}, {(two, 1): 10}),
    ]
    for number, (options, expected) in enumerate(wanted):
        found = Kept()
        run(start(load(**options), f"checkpoint-{number}", found, once=True))
        assert Counter((broker, queue) for batch in found.batches for _, broker, queue in batch) == expected
    refused = start(load(startingTimestamp=since.since), "refused", Kept(), once=True)
    with pytest.raises(StreamingQueryException, match="has no message stored at the starting time"):
        refused.awaitTermination(60)


def test_a_deduped_copy_of_a_topic_has_every_row_once_with_all_it_had(
    spark: SparkSession,
    small_record_batches: None,
    cluster: SharedCluster,
    load: Load,
    topic: str,
    tmp_path: Path,
) -> None:
    rows, name_server, target = 4_000, cluster.name_server, f"{topic}-copy"
    for name in (topic, target):
        make_topic(cluster, name, queues=2)
    frame = numbered(spark, rows, 100, partitions=2)
    frame = frame.selectExpr("*", "'tag' || right(keys, 1) as tags", "map('n', keys) as properties")
    late = failing_late(frame, name_server, topic, rows // 2)
    sink = {"nameServer": name_server, "rowId": "true", "maxRatePerSecond": "8000", "batchBytes": "16k"}
    late.write.format("rocketmq").options(**sink).save(topic)
    stored = messages_in(name_server, topic)
    assert stored > rows
    query = (
        dedupe(load(**at_most(stored // 2)), within="1 hour").writeStream.format("rocketmq")
        .options(nameServer=name_server, topic=target, checkpointLocation=str(tmp_path / "copy"))
        .trigger(availableNow=True)
        .start()
    )  # fmt: skip
    run(query)
    copies = read_topic(name_server, target, rows)
    found = {message.properties["KEYS"]: message for message in copies}
    assert len(copies) == len(found) == rows
    for key, message in found.items():
        assert message.body == key[1:].ljust(100, ".").encode()
        assert message.properties["TAGS"] == f"tag{key[-1]}"
        assert message.properties["n"] == key


def test_two_streams_run_in_a_session_and_a_new_topic_is_found(
    load: Load, start: Start, feed: Feed, cluster: SharedCluster, topic: str
) -> None:
    first = feed(100)
    by_name, by_pattern = Kept(), Kept()
    start(load(), "name", by_name)
    pattern = {"subscribe": None, "subscribePattern": f"{re.escape(topic)}(-new)?", "startingOffsets": "latest"}
    other = start(load(**pattern), "pattern", by_pattern)
    wait_for(lambda: by_name.keys == once(first) and other.lastProgress is not None)
    make_topic(cluster, f"{topic}-new", queues=2)
    new = feed(100, topic=f"{topic}-new")
    wait_for(lambda: once(new) <= by_pattern.keys)
    second = feed(100)
    wait_for(lambda: by_name.keys == once(first + second))
    wait_for(lambda: by_pattern.keys == once(second + new))
