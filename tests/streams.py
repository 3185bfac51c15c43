"""Streaming queries of the tests: rows that count on, and a stop after so many micro-batches."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.waiting import wait_for


def start(spark: SparkSession, topic: str, checkpoint: Path, **options: str) -> StreamingQuery:
    """Start a query that sends the numbers from 0 on, 2,000 a second, in two partitions; `options` are the sink's."""
    rates = spark.readStream.format("rate").option("rowsPerSecond", 2000).option("numPartitions", 2).load()
    return (
        rates.selectExpr("cast(value as string) as body", "concat('k', value) as keys")
        .writeStream.format("rocketmq")
        .options(topic=topic, checkpointLocation=str(checkpoint), **options)
        .trigger(processingTime="500 milliseconds")
        .start()
    )


def numbers(spark: SparkSession, rows: int, partitions: int = 2) -> DataFrame:
    """Return a stream whose every micro-batch has the next `rows` numbers as `value`, however often it is read."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return source.option("numPartitions", partitions).load().select("value")


def run_until(query: StreamingQuery, batches: int) -> int:
    """Wait for so many more micro-batches with rows, stop the query, and return the rows it reports."""

    def has_run() -> bool:
        assert query.exception() is None
        return sum(progress.numInputRows > 0 for progress in query.recentProgress) >= batches

    wait_for(has_run)
    rows = sum(progress.numInputRows for progress in query.recentProgress)
    query.stop()
    return rows
