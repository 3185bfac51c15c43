"""Batch and streaming reads while brokers, name servers and links fail: every row once, or an error with the reason."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.options.offsets import nested
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import Slave, heal, set_config
from tests.support.links import Fault, cut, linked_cluster
from tests.support.processes import NEEDS_LIMITS, wait_for
from tests.support.streams import Feed, Kept, once
from tests.support.writes import make_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

# More rows than Spark buffers for a blocked task, and more tasks than run at once: at the time of a fault, rows of each
# broker are still unread.
ROWS, NBYTES, TASKS = 60_000, 400, 8


@pytest.fixture
def feed(two_brokers: LocalCluster, topic: str) -> Iterator[Feed]:
    """A feed of the test's topic, which has two queues on each broker."""
    make_topic(two_brokers, topic, queues=2)
    with Producer("feed", name_server=two_brokers.name_server) as producer:
        yield Feed(producer, two_brokers.name_server, topic)


def source(reader: Any, name_server: str, topic: str, **options: Any) -> DataFrame:
    """Read a topic from its beginning, in batch or as a stream."""
    given = {"nameServer": name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
    frame: DataFrame = reader.format("rocketmq").options(**given).load()
    return frame


def read_while(frame: DataFrame, folder: Path, fault: Callable[[Callable[[], None]], object]) -> Counter[str]:
    """Read a batch, call `fault` during the read, and return the keys of the rows.

    The tasks are blocked until `fault` calls its argument.
    """
    begun, gate = folder / "begun", folder / "gate"

    def held_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            begun.touch()
            wait_for(gate.exists)

    def keys() -> Counter[str]:
        rows = frame.mapInArrow(held_up, frame.schema).select("keys").collect()
        return Counter(key for (key,) in rows)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(keys)
        wait_for(lambda: begun.exists() or found.done())
        try:
            fault(gate.touch)
        finally:
            gate.touch()
        return found.result()


def fullest(cluster: LocalCluster, topic: str) -> Broker:
    """Return the broker with the most messages of a topic. A broker that was slow for a moment gets fewer."""
    messages: Counter[str] = Counter()
    for offsets in queue_offsets([cluster.name_server], topic):
        messages[offsets.broker_name] += offsets.messages
    return max(cluster.brokers, key=lambda broker: messages[broker.name])


def killed_and_restarted(cluster: LocalCluster, go_on: Callable[[], None]) -> None:
    victim = cluster.brokers[0]
    victim.kill()
    go_on()
    victim.restart()


def paused(cluster: LocalCluster, go_on: Callable[[], None]) -> None:
    victim = cluster.brokers[0]
    victim.pause()
    go_on()
    # Longer than the timeout of a request.
    time.sleep(2.5)
    victim.resume()


@pytest.mark.parametrize("fault", [killed_and_restarted, pytest.param(paused, marks=pytest.mark.long)])
def test_temporary_broker_failure_loses_and_repeats_no_row_of_batch_read(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    tmp_path: Path,
    fault: Callable[[LocalCluster, Callable[[], None]], None],
) -> None:
    keys = feed(ROWS, nbytes=NBYTES)
    frame = source(spark.read, two_brokers.name_server, topic, pullTimeoutMs=1000, minPartitions=TASKS)
    assert read_while(frame, tmp_path, lambda go_on: fault(two_brokers, go_on)) == once(keys)


def test_unreachable_broker_fails_read_naming_queue_and_option(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str, tmp_path: Path
) -> None:
    feed(ROWS, nbytes=NBYTES)
    # It has rows for half of the tasks or more, so at the time of the fault some of these tasks have not begun.
    victim = fullest(two_brokers, topic)
    options = {"pullTimeoutMs": 1000, "readTimeoutMs": 2000, "minPartitions": TASKS}
    frame = source(spark.read, two_brokers.name_server, topic, **options)

    def kill(go_on: Callable[[], None]) -> None:
        victim.kill()
        go_on()

    where = rf"reading {topic}/{victim.name}/\d up to offset \d+: nothing came from offset \d+ on for "
    with pytest.raises(PySparkException, match=rf"{where}readTimeoutMs=2000"):
        read_while(frame, tmp_path, kill)


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., StreamingQuery]]:
    """Start a query with the test's checkpoint; the fixture stops it after the test."""
    begun: list[StreamingQuery] = []

    def begin(frame: DataFrame, kept: Kept, **trigger: Any) -> StreamingQuery:
        writer = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path / "checkpoint"))
        begun.append((writer.trigger(**trigger) if trigger else writer).start())
        return begun[-1]

    yield begin
    for query in begun:
        query.stop()


@NEEDS_LIMITS
@pytest.mark.parametrize("fault", [killed_and_restarted, pytest.param(paused, marks=pytest.mark.long)])
def test_temporary_broker_failure_loses_and_repeats_no_row_of_stream(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    start: Callable[..., StreamingQuery],
    fault: Callable[[LocalCluster, Callable[[], None]], None],
) -> None:
    keys, kept = feed(8000), Kept()
    options = {"pullTimeoutMs": 1000, "maxOffsetsPerTrigger": 1000}
    query = start(source(spark.readStream, two_brokers.name_server, topic, **options), kept)
    wait_for(lambda: len(kept.batches) >= 2)
    # Rows of the other broker arrive meanwhile.
    fault(two_brokers, lambda: keys.extend(feed(500, to=(two_brokers.brokers[1].name, 0), awaited=False)))
    keys += feed(500)
    wait_for(lambda: kept.keys.total() >= len(keys) or query.exception() is not None)
    assert query.exception() is None
    assert kept.keys == once(keys)


def test_stream_continues_without_name_server_and_finds_queues_after_it(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    start: Callable[..., StreamingQuery],
) -> None:
    keys, kept = feed(100), Kept()
    # With a pattern, the source also asks for the list of topics.
    options = {"subscribePattern": re.escape(topic), "startingOffsets": "earliest"}
    frame = spark.readStream.format("rocketmq").options(nameServer=two_brokers.name_server, **options).load()
    query = start(frame, kept)
    wait_for(lambda: kept.keys == once(keys))
    two_brokers.servers[0].kill()
    keys += feed(100, awaited=False)
    wait_for(lambda: kept.keys == once(keys) or query.exception() is not None)
    two_brokers.servers[0].restart()
    # Brokers register within 30 s.
    heal(two_brokers)
    make_topic(two_brokers, topic, queues=3)
    with Producer("feed-again", name_server=two_brokers.name_server) as producer:
        again = Feed(producer, two_brokers.name_server, topic)
        again.sent = feed.sent
        for broker in two_brokers.brokers:
            keys += again(20, to=(broker.name, 2), awaited=False)
    wait_for(lambda: kept.keys == once(keys) or query.exception() is not None)
    assert query.exception() is None


@NEEDS_LIMITS
def test_available_now_fails_if_a_broker_of_its_checkpoint_is_missing(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    start: Callable[..., StreamingQuery],
) -> None:
    keys, kept = feed(100), Kept()

    def run(**options: Any) -> None:
        frame = source(spark.readStream, two_brokers.name_server, topic, pullTimeoutMs=1000, **options)
        assert start(frame, kept, availableNow=True).awaitTermination(60)

    run()
    victim, other = two_brokers.brokers
    unread = feed(10, to=(victim.name, 0))
    victim.kill()
    with RemotingTransport([two_brokers.name_server]) as transport:
        wait_for(lambda: [data.broker_name for data in transport.query_route(topic, 5.0).broker_datas] == [other.name])
    keys += feed(10, to=(other.name, 0), awaited=False)
    with pytest.raises(
        StreamingQueryException, match=rf"broker {victim.name} is in no route.*readTimeoutMs=2000.*failOnDataLoss=false"
    ):
        run(readTimeoutMs=2000)
    run(failOnDataLoss="false")
    assert kept.keys == once(keys)
    victim.restart()
    # The source waits until a route has the broker again.
    run()
    assert kept.keys == once(keys + unread)


def test_connections_cut_inside_an_answer_lose_and_repeat_no_row(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str
) -> None:
    keys = feed(20_000, nbytes=100)
    answers = Fault(cut, 1_000_000)
    links = linked_cluster(
        two_brokers.name_server, [broker.address for broker in two_brokers.brokers], to_client=answers
    )
    with links as (name_server, _):
        rows = source(spark.read, name_server, topic).select("keys").collect()
    assert answers.times > 0
    assert Counter(key for (key,) in rows) == once(keys)


def test_corrupted_body_is_an_error_naming_queue_and_offset(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str
) -> None:
    feed(1000, nbytes=100)
    dots = b"." * 20

    def flip(data: bytes) -> Iterator[bytes]:
        yield data.replace(dots, dots[:-1] + b"/", 1)

    brokers = [broker.address for broker in two_brokers.brokers]
    with linked_cluster(two_brokers.name_server, brokers, to_client=flip) as (name_server, _):
        frame = source(spark.read, name_server, topic)
        with pytest.raises(
            PySparkException,
            match=rf"reading {topic}/broker-\d/\d, the message at offset \d+ cannot be read: the body has",
        ):
            frame.select("keys").collect()


@pytest.fixture
def slave(two_brokers: LocalCluster, feed: Feed, topic: str) -> Iterator[Slave]:
    """A slave of the first broker, which replicates the test's topic."""
    slave = Slave(two_brokers, topic)
    try:
        slave.start()
        yield slave
    finally:
        slave.end()


def test_messages_of_lost_master_are_read_once_from_its_slave(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    slave: Slave,
    tmp_path: Path,
) -> None:
    keys = feed(ROWS, nbytes=NBYTES)
    slave.catch_up()
    ends = {found.queue: found.max_offset for found in queue_offsets([two_brokers.name_server], topic)}
    options = {"pullTimeoutMs": 1000, "minPartitions": TASKS, "endingOffsets": json.dumps(nested(ends))}
    planned = source(spark.read, two_brokers.name_server, topic, **options).rdd
    # This call plans the read.
    assert planned.getNumPartitions() >= TASKS

    def kill(go_on: Callable[[], None]) -> None:
        two_brokers.brokers[0].kill()
        go_on()

    frame = source(spark.read, two_brokers.name_server, topic, **options)
    assert read_while(frame, tmp_path, kill) == once(keys)
    assert Counter(row["keys"] for row in planned.collect()) == once(keys)
    # Without the master, the slave's first offsets count after `readTimeoutMs`.
    rows = source(spark.read, two_brokers.name_server, topic, **options, readTimeoutMs=10_000).select("keys").collect()
    assert Counter(key for (key,) in rows) == once(keys)


@NEEDS_LIMITS
def test_stream_continues_from_slave_after_master_is_lost(
    spark: SparkSession,
    metrics: Metrics,
    two_brokers: LocalCluster,
    feed: Feed,
    topic: str,
    slave: Slave,
    start: Callable[..., StreamingQuery],
) -> None:
    keys, kept = feed(8000), Kept()
    slave.catch_up()
    options = {"pullTimeoutMs": 1000, "maxOffsetsPerTrigger": 1000}
    query = start(source(spark.readStream, two_brokers.name_server, topic, **options), kept)
    wait_for(lambda: len(kept.batches) >= 2)
    two_brokers.brokers[0].kill()
    keys += feed(500, to=(two_brokers.brokers[1].name, 0), awaited=False)
    wait_for(lambda: kept.keys.total() >= len(keys) or query.exception() is not None)
    assert query.exception() is None
    assert kept.keys == once(keys)


def test_batch_without_a_required_broker_is_an_error(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str
) -> None:
    one, two = two_brokers.brokers
    keys = {broker.name: feed(100, to=(broker.name, 0)) for broker in (one, two)}
    two.kill()
    with RemotingTransport([two_brokers.name_server]) as transport:
        wait_for(lambda: len(transport.query_route(topic, 5.0).broker_datas) == 1)

    def read(**options: Any) -> Counter[str]:
        rows = source(spark.read, two_brokers.name_server, topic, **options).select("keys").collect()
        return Counter(row.keys for row in rows)

    # No name server lists the other broker, so the read does not know it.
    assert read() == read(requireBrokers=one.name) == once(keys[one.name])
    for required in (2, f"{one.name},{two.name}"):
        with pytest.raises(PySparkException, match=rf"requireBrokers={required}: .* list {one.name}, and not"):
            read(requireBrokers=required)
    heal(two_brokers)
    assert read(requireBrokers=2) == once(keys[one.name] + keys[two.name])


def test_broker_without_read_permission_is_an_error_with_the_command(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str
) -> None:
    keys, broker = feed(100), two_brokers.brokers[0]
    frame = source(spark.read, two_brokers.name_server, topic)
    set_config(broker, brokerPermission=2)
    with RemotingTransport([two_brokers.name_server]) as transport:
        wait_for(lambda: transport.query_route(topic, 5.0).queue_datas[0].perm == 2)
    text = f"{broker.name} rejects reads.*updateBrokerConfig -b {broker.address} -k brokerPermission -v 6"
    with pytest.raises(PySparkException, match=text):
        frame.collect()
    set_config(broker, brokerPermission=6)
    with RemotingTransport([two_brokers.name_server]) as transport:
        wait_for(lambda: transport.query_route(topic, 5.0).queue_datas[0].perm == 6)
    assert Counter(row.keys for row in frame.select("keys").collect()) == once(keys)


def test_slave_without_read_permission_fails_read_naming_queue_and_option(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, feed: Feed, topic: str, slave: Slave
) -> None:
    master = two_brokers.brokers[0]
    feed(100, to=(master.name, 0))
    slave.catch_up()
    set_config(slave.broker, slaveReadEnable=False)
    master.kill()
    options = {"pullTimeoutMs": 1000, "readTimeoutMs": 2000}
    where = rf"reading {topic}/{master.name}/0 up to offset 99: nothing came from offset 0 on for "
    with pytest.raises(PySparkException, match=rf"{where}readTimeoutMs=2000.*system busy"):
        source(spark.read, two_brokers.name_server, topic, **options).collect()
