"""Reads of brokers that no longer have all messages: each offset is read, or reported as missing."""

from __future__ import annotations

import itertools
import json
import queue as queues
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.spark.reader import RocketMQBatchReader
from rocketmq_spark.spark.stream_reader import stream_reader
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import Slave, commit_log, set_config
from tests.support.processes import PATIENCE, wait_for
from tests.support.streams import Feed, column_of, source_options
from tests.support.writes import make_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

SCHEMA = StructType().add("queueOffset", "long").add("tags", "string")
GAP = re.compile(r"messages (\d+) to (\d+) of \S+ are not there any more")
# Four commit-log files of 4 MiB, and a part of a fifth.
ROWS, NBYTES = 8_000, 2_000


@pytest.fixture
def feed(two_brokers: LocalCluster, topic: str) -> Iterator[Feed]:
    """A feed of the test's topic, which has one queue, on the first broker."""
    make_topic(two_brokers, topic, queues=1, on=two_brokers.brokers[:1])
    with Producer("feed", name_server=two_brokers.name_server) as producer:
        yield Feed(producer, two_brokers.name_server, topic)


def missing(texts: list[str]) -> list[int]:
    """Return the offsets that texts report as missing."""
    gaps = GAP.findall("\n".join(texts))
    return [offset for first, last in gaps for offset in range(int(first), int(last) + 1)]


def test_slave_that_started_later_loses_no_row_while_master_hangs(
    two_brokers: LocalCluster, feed: Feed, topic: str
) -> None:
    master, queue = two_brokers.brokers[0], MessageQueue(topic, "broker-0", 0)
    feed(ROWS, nbytes=NBYTES)
    slave = Slave(two_brokers, topic)
    try:
        slave.launch()
        feed(100)
        slave.catch_up()
        with RemotingTransport([two_brokers.name_server]) as transport:
            assert transport.min_offset(queue, slave.broker.address, 5.0) > 0
        reader = RocketMQBatchReader(source_options(two_brokers, topic, pullTimeoutMs=1000), SCHEMA)
        with ThreadPoolExecutor(1) as pool:
            master.pause()
            try:
                planning = pool.submit(reader.partitions)
                # More than one request to the master times out.
                time.sleep(3.0)
            finally:
                master.resume()
            tasks = planning.result()
        offsets = [offset for task in tasks for offset in column_of(reader.read(task), "queueOffset")]
        assert offsets == list(range(ROWS + 100))
    finally:
        slave.end()


def test_deleted_files_are_reported_before_the_minimum_offset_is_corrected(
    two_brokers: LocalCluster, feed: Feed, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = two_brokers.brokers[0]
    before = len(commit_log(broker))
    feed(ROWS, nbytes=NBYTES)
    broker.kill()
    for file in commit_log(broker)[before : before + 2]:
        file.unlink()
    broker.restart()
    with RemotingTransport([two_brokers.name_server]) as transport:
        assert transport.min_offset(MessageQueue(topic, broker.name, 0), broker.address, 5.0) == 0
    reader = RocketMQBatchReader(source_options(two_brokers, topic, failOnDataLoss=False, minPartitions=3), SCHEMA)
    offsets = [offset for task in reader.partitions() for offset in column_of(reader.read(task), "queueOffset")]
    lost = missing(caplog.messages)
    assert len(lost) > ROWS // 4
    assert sorted(offsets + lost) == list(range(ROWS))
    # One task meets the gap as a whole, and names it as a whole.
    reader = RocketMQBatchReader(source_options(two_brokers, topic), SCHEMA)
    [task] = reader.partitions()
    with pytest.raises(DataLossError, match=rf"messages {lost[0]} to {lost[-1]} of {topic}/broker-0/0 are not there"):
        list(reader.read(task))
    # A broker passes over deleted messages with a filter, too.
    starts = json.dumps({topic: {broker.name: {"0": lost[0]}}})
    reader = RocketMQBatchReader(
        source_options(two_brokers, topic, subExpression="none", startingOffsets=starts), SCHEMA
    )
    [task] = reader.partitions()
    with pytest.raises(DataLossError, match=rf"messages {lost[0]} to {lost[-1]} of {topic}/broker-0/0 are not there"):
        list(reader.read(task))


def test_gaps_of_a_compacted_topic_are_not_reported(two_brokers: LocalCluster, topic: str) -> None:
    """A broker drops messages without keys at once, and counts their offsets."""
    broker = two_brokers.brokers[0]
    with (
        Producer("feed", name_server=two_brokers.name_server) as producer,
        RemotingTransport([two_brokers.name_server]) as transport,
    ):
        transport.create_topic(broker.address, topic, 1, 6, 5.0, attributes="+cleanup.policy=COMPACTION")
        wait_for(lambda: topic in transport.topics(5.0))
        queue = MessageQueue(topic, broker.name, 0)
        producer.send_arrow(pa.table({"body": ["x"] * 10, "keys": ["k"] * 10}), topic)
        # A broker accepts a batch of messages without keys. Producers refuse it.
        body = encode_batch([Message(topic, b"x")] * 10)
        batch = EncodedBatch(topic, (body,), 10, len(body), True)
        outcomes: queues.Queue[SendOutcome] = queues.Queue()
        transport.send(SendRequest(batch, queue, broker.address, "feed", "TBW102", 4, 0), PATIENCE, outcomes.put)
        assert outcomes.get(timeout=PATIENCE).error is None
        producer.send_arrow(pa.table({"body": ["x"] * 10, "keys": ["k"] * 10}), topic)
        wait_for(lambda: transport.max_offset(queue, broker.address, 5.0) == 30)
    reader = RocketMQBatchReader(source_options(two_brokers, topic), SCHEMA)
    [task] = reader.partitions()
    assert list(column_of(reader.read(task), "queueOffset")) == [*range(10), *range(20, 30)]


@pytest.mark.long
@pytest.mark.parametrize("streaming", [False, True], ids=["batch", "stream"])
def test_messages_that_expire_during_a_read_are_all_reported(
    two_brokers: LocalCluster, feed: Feed, topic: str, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    """A broker cleans up for the first time a minute after its start, and every four seconds from then on."""
    broker = two_brokers.brokers[0]
    feed(ROWS, nbytes=NBYTES)
    options = source_options(two_brokers, topic, streaming=streaming, failOnDataLoss=False, startingOffsets="earliest")
    if streaming:
        stream = stream_reader(options, SCHEMA)
        start = stream.initialOffset()
        end = stream.latestOffset(start)
        [task] = stream.partitions(start, end)
        read = stream.read
    else:
        batch = RocketMQBatchReader(options, SCHEMA)
        [task] = batch.partitions()
        read = batch.read
    files = len(commit_log(broker))
    rows = column_of(read(task), "queueOffset")

    def files_left(most: int) -> bool:
        return len(commit_log(broker)) <= most

    offsets = list(itertools.islice(rows, 1))
    set_config(broker, fileReservedTime=0)
    try:
        # Read a part with each file that is deleted.
        for left in range(files - 1, 2, -1):
            wait_for(partial(files_left, left))
            offsets += itertools.islice(rows, 100)
        offsets += rows
    finally:
        set_config(broker, fileReservedTime=72)
        if streaming:
            stream.stop()
    lost = missing(caplog.messages)
    assert lost
    assert sorted(offsets + lost) == list(range(ROWS))
