"""`register`, and the way of metrics back to the driver."""

from __future__ import annotations

import io
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrameWriter, SparkSession

from rocketmq_spark.spark.register import register, unregister
from rocketmq_spark.spark.report import Metrics
from tests.reading import read_topic
from tests.sharing import SharedCluster

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def spoil_first_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Put a null body behind the rows of partition 0's first attempt."""
    yield from batches
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == 0 and context.attemptNumber() == 0:
        yield pa.record_batch({"body": pa.array([None], pa.string())})


def test_failed_attempts_are_sent_again_and_do_not_count(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics
) -> None:
    # More rows than one record batch holds: the first ones are stored before the bad one is seen.
    frame = spark.range(0, 60_000, 1, 2).selectExpr("cast(id as string) as body")
    frame = frame.mapInArrow(spoil_first_attempt, "body string")
    writer = frame.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", topic)
    writer.option("batchBytes", "8k").save()
    messages = read_topic(cluster.name_server, topic, 60_000, key=attrgetter("body"))
    stored = [int(message.body) for message in messages]
    assert set(stored) == set(range(60_000))
    assert len(stored) > 60_000
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 60_000


def test_two_writes_stay_apart_and_reset_begins_anew(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Any
) -> None:
    for rows in (30, 7):
        save(spark.range(rows).selectExpr("cast(id as string) as body"))
    first, second = metrics.writes()
    per_write = [
        sum(facts["rows"] for facts in metrics.to_dict(write_id=write_id).values()) for write_id, _ in (first, second)
    ]
    assert per_write == [30, 7]
    table = io.StringIO()
    metrics.show(file=table)
    assert "broker-" in table.getvalue()
    metrics.reset()
    assert metrics.to_dict() == {}
    save(spark.range(3).selectExpr("cast(id as string) as body"))
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 3


def test_register_again_begins_new_metrics_and_leaves_one_hook(spark: SparkSession) -> None:
    register(spark)
    once = DataFrameWriter.save
    register(spark)
    assert DataFrameWriter.save is once
    unregister()
    unregister()
    assert not hasattr(DataFrameWriter.save, "_rocketmq_original")
