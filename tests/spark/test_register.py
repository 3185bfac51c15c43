"""`register`, and the transfer of metrics to the driver."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import rocketmq_spark
from rocketmq_spark.errors import InvalidRowError, OptionError
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.reading import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def spoil_first_attempt(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add a row with a null body to the end of partition 0 in its first attempt."""
    yield from batches
    context = TaskContext.get()
    assert context is not None
    if context.partitionId() == 0 and context.attemptNumber() == 0:
        yield pa.record_batch({"body": pa.array([None], pa.string())})


def test_rows_of_a_failed_attempt_are_resent_but_counted_once(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics
) -> None:
    # More rows than one record batch holds, so the first rows are stored before the task reads the invalid one.
    frame = spark.range(0, 60_000, 1, 2).selectExpr("cast(id as string) as body")
    frame = frame.mapInArrow(spoil_first_attempt, "body string")
    writer = frame.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", topic)
    writer.option("batchBytes", "8k").save()
    messages = read_topic(cluster.name_server, topic, 60_000, key=attrgetter("body"))
    stored = [int(message.body) for message in messages]
    assert set(stored) == set(range(60_000))
    assert len(stored) > 60_000
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 60_000


def test_metrics_of_two_writes_are_separate_and_reset_clears_them(
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


def test_the_cause_of_a_failed_write_or_query_is_the_last_line(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    metrics: Metrics,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = {"nameServer": cluster.name_server, "topic": topic}
    invalid = spark.range(0, 10, 1, 2).selectExpr("if(id = 9, null, 'x') as body")
    (tmp_path / "in").mkdir()
    invalid.write.mode("overwrite").parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("body string").parquet(str(tmp_path / "in")).writeStream.format("rocketmq")
    query = stream.options(**address, checkpointLocation=str(tmp_path / "checkpoint")).trigger(once=True).start()
    for write, what, row in (
        (lambda: invalid.write.format("rocketmq").options(**address).save(), "the write", "partition 1, row 4 "),
        (lambda: rocketmq_spark.write(invalid, **address), "the write", "partition 1, row 4 "),
        (lambda: query.awaitTermination(120), f"query {query.id}", rf"micro-batch 0 of query {query.id}: "),
    ):
        caplog.clear()
        with pytest.raises(PySparkException) as raised:
            write()
        error = rocketmq_spark.cause(raised.value)
        assert isinstance(error, InvalidRowError)
        assert str(error).startswith(row)
        line = f"{what} failed: InvalidRowError: {error}"
        assert caplog.records[-1].getMessage() == line
        if sys.version_info >= (3, 11):
            assert "".join(traceback.format_exception(raised.value)).endswith(f"\n{line}\n")
    error = rocketmq_spark.cause(query.exception())
    assert isinstance(error, InvalidRowError)
    # The planner of a write is another process, too.
    with pytest.raises(PySparkException) as raised:
        invalid.write.format("rocketmq").options(**address, batchBites="1").save()
    assert isinstance(rocketmq_spark.cause(raised.value), OptionError)


def test_write_and_stream_start_work_in_another_thread(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    """An interrupted notebook does this as well: Py4J continues with another thread of the JVM."""
    address = {"nameServer": cluster.name_server, "topic": topic}

    def write() -> None:
        spark.range(5).selectExpr("concat('batch ', id) as body").write.format("rocketmq").options(**address).save()

    def stream() -> None:
        rows = spark.readStream.format("rate").load().selectExpr("'stream' as body")
        sink = rows.writeStream.format("rocketmq").options(**address).option("checkpointLocation", str(tmp_path))
        sink.trigger(once=True).start().awaitTermination(60)

    for task in (write, stream, write):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(task).result(120)
    assert len(read_topic(cluster.name_server, topic, 10)) == 10
