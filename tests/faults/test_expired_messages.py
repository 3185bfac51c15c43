"""Batch and streaming reads from a broker that has deleted its oldest messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.admin import QueueOffsets, queue_offsets
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import commit_log, forget
from tests.support.processes import at_most
from tests.support.streams import Feed, Kept
from tests.support.writes import make_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

# Files of the commit log (tests/faults/conftest.py) have three of these messages.
MIB = 1024 * 1024


@pytest.fixture
def load(spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(**options: Any) -> DataFrame:
        given = {"nameServer": two_brokers.name_server, "subscribe": topic, **options}
        return spark.read.format("rocketmq").options(**given).load()

    return load_from


@pytest.fixture
def read_available(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> Callable[..., list[str]]:
    """Run a stream with the test's checkpoint until it has read all present messages; return the sorted keys."""

    def run(**options: str) -> list[str]:
        given = {"nameServer": two_brokers.name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
        frame, kept = spark.readStream.format("rocketmq").options(**given).load(), Kept()
        writer = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return sorted(kept.keys.elements())

    return run


def test_expired_messages_fail_a_read_unless_data_loss_is_allowed(
    two_brokers: LocalCluster, topic: str, load: Callable[..., DataFrame], read_available: Callable[..., list[str]]
) -> None:
    broker = two_brokers.brokers[0]
    make_topic(two_brokers, topic, queues=1, on=[broker])
    before = len(commit_log(broker))
    with Producer("feed", name_server=two_brokers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, two_brokers.name_server, topic)
        # One at a time: requests that are in flight together may be stored in another order.
        keys = [key for _ in range(5) for key in feed(1, nbytes=MIB)]
        assert read_available() == sorted(keys)
        keys += [key for _ in range(25) for key in feed(1, nbytes=MIB)]
    forget(broker, files=before + 1)

    def state() -> QueueOffsets:
        (found,) = queue_offsets([two_brokers.name_server], topic)
        return found

    left = state().min_offset
    assert 5 < left < 30
    assert state().max_offset == 30
    starts = json.dumps({topic: {broker.name: {"0": 5}}})
    gone = rf"messages 5 to {left - 1} of .* are not there any more.*failOnDataLoss"
    with pytest.raises(PySparkException, match=gone):
        load(startingOffsets=starts).collect()
    with pytest.raises(PySparkException, match=gone):
        read_available()
    # Some micro-batches have only deleted messages.
    assert read_available(failOnDataLoss="false", **at_most(4)) == sorted(keys[left:])

    def offsets(**options: str) -> list[int]:
        rows = load(**options).select("keys", "queueOffset").collect()
        assert all(row["keys"] == keys[row.queueOffset] for row in rows)
        return sorted(row.queueOffset for row in rows)

    assert offsets() == list(range(left, 30))
    assert offsets(startingOffsets=starts, failOnDataLoss="false") == list(range(left, 30))
    end = json.dumps({topic: {broker.name: {"0": 8}}})
    assert offsets(startingOffsets=starts, endingOffsets=end, failOnDataLoss="false") == []
    with pytest.raises(PySparkException, match=r"messages 5 to 7 of .* are not there any more"):
        load(startingOffsets=starts, endingOffsets=end).collect()


def test_rerun_of_a_micro_batch_reports_expired_messages_of_new_queues(
    spark: SparkSession, metrics: Metrics, two_brokers: LocalCluster, topic: str, tmp_path: Path
) -> None:
    broker, kept = two_brokers.brokers[0], Kept()

    def run(checkpoint: str, into: Callable[[DataFrame, int], None], **options: str) -> None:
        given = {"nameServer": two_brokers.name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
        writer = spark.readStream.format("rocketmq").options(**given).load().writeStream.foreachBatch(into)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()

    def fail(frame: DataFrame, batch_id: int) -> None:
        raise RuntimeError("the sink is full")

    with Producer("feed", name_server=two_brokers.name_server, compress_type="NONE") as producer:
        make_topic(two_brokers, topic, queues=1, on=[broker])
        Feed(producer, two_brokers.name_server, topic)(1)
    run("running", kept)
    make_topic(two_brokers, topic, queues=2, on=[broker])
    with Producer("feed-again", name_server=two_brokers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, two_brokers.name_server, topic)
        # One at a time: requests that are in flight together may be stored in another order.
        keys = [key for _ in range(20) for key in feed(1, nbytes=MIB, to=(broker.name, 1))]
    # A new query meets both queues in the micro-batch that fails, the running query only the second one.
    for checkpoint in ("running", "new"):
        with pytest.raises(StreamingQueryException, match="the sink is full"):
            run(checkpoint, fail)
    forget(broker, files=len(commit_log(broker)) - 2)
    left = queue_offsets([two_brokers.name_server], topic)[1].min_offset
    assert 0 < left < 20
    for checkpoint, lost in (("running", rf"{left - 1} of {topic}/{broker.name}/1"), ("new", r"\d+ of .*")):
        kept.batches.clear()
        gone = f"messages 0 to {lost} are not there any more.*failOnDataLoss"
        with pytest.raises(StreamingQueryException, match=gone):
            run(checkpoint, kept)
        run(checkpoint, kept, failOnDataLoss="false")
        assert sorted(kept.keys.elements()) == sorted(keys[left:])
