"""`register`, the automatic lookup, and the way back to the driver, in sessions of their own where they need one."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyspark
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrameWriter, SparkSession

from rocketmq_spark.spark.register import register, unregister
from rocketmq_spark.spark.report import Metrics
from tests.reading import read_topic
from tests.sharing import SharedCluster

pytestmark = [pytest.mark.spark, pytest.mark.integration]

# SPARK-51919: from then on a registered source may take the place of one found by lookup.
LOOKUP_AND_REGISTER = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 1)

PREAMBLE = """
import os, sys
from pyspark.sql import SparkSession
name_server, topic = sys.argv[1:]
def session(builder):
    for key, value in {"spark.ui.enabled": "false", "spark.log.level": "ERROR",
                       "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"],
                       "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
def save(spark, rows, mode=None):
    frame = spark.range(0, rows, 1, 4).selectExpr("cast(id as string) as body")
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    (writer.mode(mode) if mode else writer).save()
"""


def run(script: str, cluster: SharedCluster, topic: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter, so in a JVM, of its own."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, cluster.name_server, topic],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_without_register_the_source_is_found_and_the_summary_logged(cluster: SharedCluster, topic: str) -> None:
    done = run(
        """
spark = session(SparkSession.builder.master("local[2]"))
save(spark, 1000, "append")
import rocketmq_spark
metrics = rocketmq_spark.register(spark)
save(spark, 500)
print("rows", sum(facts["rows"] for facts in metrics.to_dict().values()))
spark.stop()
""",
        cluster,
        topic,
    )
    if LOOKUP_AND_REGISTER:
        assert done.returncode == 0, done.stderr
        assert "rows 500" in done.stdout
        assert "4 tasks stored 1,000 rows" in done.stderr or "4 tasks stored 1000 rows" in done.stderr, done.stderr
        assert len(read_topic(cluster.name_server, topic, 1500)) == 1500
    else:
        assert "rocketmq" in done.stderr
        assert "DATA_SOURCE_NOT_FOUND" in done.stderr


def test_metrics_come_back_from_executors_in_other_processes(cluster: SharedCluster, topic: str) -> None:
    done = run(
        """
spark = session(SparkSession.builder.master("local-cluster[2,1,1024]"))
import rocketmq_spark
metrics = rocketmq_spark.register(spark)
save(spark, 2000)
facts = metrics.to_dict()
print("rows", sum(broker["rows"] for broker in facts.values()), "p99", all(b["p99_ms"] > 0 for b in facts.values()))
spark.stop()
""",
        cluster,
        topic,
    )
    assert done.returncode == 0, done.stderr
    assert "rows 2000 p99 True" in done.stdout
    assert len(read_topic(cluster.name_server, topic, 2000)) == 2000


def test_on_connect_writes_and_streams_work_and_the_metrics_say_where_they_are(
    cluster: SharedCluster, topic: str
) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")
    # One session for all: a Connect server takes long to start.
    done = run(
        """
import tempfile, time
import rocketmq_spark
from rocketmq_spark.admin import queue_offsets
spark = session(SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2"))
metrics = rocketmq_spark.register(spark)
save(spark, 1000)
save(spark, 100, "append")
for mode in ("overwrite", "ignore"):
    try:
        save(spark, 1, mode)
    except rocketmq_spark.OptionError as exc:
        print("refused", mode, "append" in str(exc))
try:
    metrics.show()
except rocketmq_spark.MetricsUnavailableError as exc:
    print("metrics:", exc)

sink = {"nameServer": name_server, "topic": topic + "-stream"}
def numbers(rows):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    return source.load().selectExpr("cast(value as string) as body")
def start(writer):
    return writer.option("checkpointLocation", tempfile.mkdtemp()).trigger(once=True).start()
def stored():
    return sum(queue.messages for queue in queue_offsets([name_server], sink["topic"]))

twice = numbers(100).selectExpr("body", "map('SPARK_ROW_ID', string(body div 2)) as properties")
deduped = rocketmq_spark.dedupe(twice, within="1 hour").select("body")
query = start(deduped.writeStream.format("rocketmq").options(**sink))
print("deduped", query.awaitTermination(120), query.exception(), query.id)
slowly = {"maxRatePerSecond": "100", "maxRateTasks": "2"}
query = start(numbers(1_000_000).writeStream.format("rocketmq").options(**sink, **slowly))
deadline = time.monotonic() + 60
while stored() <= 60 and time.monotonic() < deadline:
    time.sleep(0.1)
query.stop()
print("stopped", query.exception(), len(query.recentProgress), stored() > 60)
spark.stop()
""",
        cluster,
        topic,
    )
    assert done.returncode == 0, done.stderr
    assert "refused overwrite True\nrefused ignore True\nmetrics: " in done.stdout
    assert "driver" in done.stdout
    assert len(read_topic(cluster.name_server, topic, 1100)) == 1100
    deduped = re.search(r"deduped True None (\S+)", done.stdout)
    assert deduped is not None, done.stdout
    assert re.search(rf"micro-batch 0 of {deduped[1]}: \d+ tasks stored 50 rows", done.stderr), done.stderr
    assert "stopped None 0 True" in done.stdout
    # Spark logs at length that it has killed tasks in mid-batch; nothing of that is Python's.
    assert "Traceback" not in done.stderr


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
