"""Sessions in separate processes: other executors, the automatic lookup of the data source, Spark Connect."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.cluster import SharedCluster
from tests.support.markdown import ROOT, blocks
from tests.support.processes import PATIENCE, PYSPARK
from tests.support.reading import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.integration]

# SPARK-51919: from then on a registered source may take the place of one found by lookup.
LOOKUP_AND_REGISTER = PYSPARK >= (4, 1)

PREAMBLE = """
import os, sys
from pyspark.sql import SparkSession
name_server, topic = sys.argv[1:]
def session(builder):
    for key, value in {"spark.ui.enabled": "false", "spark.log.level": "ERROR",
                       "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
def save(spark, rows, mode=None):
    frame = spark.range(0, rows, 1, 4).selectExpr("cast(id as string) as body")
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    (writer.mode(mode) if mode else writer).save()
"""


def run(
    script: str, cluster: SharedCluster, topic: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, and so with a new JVM."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + script, cluster.name_server, topic],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=folder,
        env={**os.environ, **variables},
    )


def test_separate_executor_processes_find_the_source_and_report_metrics(cluster: SharedCluster, topic: str) -> None:
    done = run(
        """
spark = session(SparkSession.builder.master("local-cluster[1,2,1024]"))
try:
    save(spark, 1000, "append")
except Exception as exc:
    print("without register:", exc)
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
    if LOOKUP_AND_REGISTER:
        assert "without register" not in done.stdout
        assert "4 tasks stored 1,000 rows" in done.stderr or "4 tasks stored 1000 rows" in done.stderr, done.stderr
    else:
        assert "rocketmq" in done.stdout
        assert "DATA_SOURCE_NOT_FOUND" in done.stdout
    rows = 3000 if LOOKUP_AND_REGISTER else 2000
    assert len(read_topic(cluster.name_server, topic, rows)) == rows


def test_spark_connect_writes_and_streams_and_reports_missing_metrics(cluster: SharedCluster, topic: str) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")
    # One session for all cases, because a Connect server starts slowly.
    done = run(
        """
import json, tempfile, time
import pyspark, rocketmq_spark
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
SETTING = "spark.sql.pyspark.worker.logging.enabled"
if pyspark.__version__ >= "4.1":
    spark.conf.set(SETTING, "true")
    print("before", metrics.writes())
    frame = spark.range(0, 60, 1, 3).selectExpr("if(id = 30, null, cast(id as string)) as body")
    writer = frame.write.format("rocketmq").options(nameServer=name_server, topic=topic + "-kept", onError="skip")
    writer.save()
    ((kept, number),) = metrics.writes()
    receipt = json.dumps(metrics.to_dict(kept))
    copy = spark.read.format("rocketmq").option("nameServer", name_server).option("startingOffsets", receipt).load()
    print("kept", number, sum(broker["rows"] for broker in metrics.to_dict().values()), copy.count(),
          metrics.invalid_rows()["skipped"], len(metrics.timeline()) > 0)
    try:
        metrics.skipped_by_reads()
    except rocketmq_spark.MetricsUnavailableError:
        print("no reads")
    later = rocketmq_spark.register(spark)
    metrics.reset()
    writer.save()
    later.show()
    print("later", len(metrics.writes()), later.reports, metrics.summary.reports)
    path = tempfile.mktemp()
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 40).option("numPartitions", 2).load()
    stream = source.selectExpr("cast(value as string) as body").writeStream.format("rocketmq").options(
        nameServer=name_server, topic=topic + "-kept", metricsPath=path, checkpointLocation=tempfile.mkdtemp())
    kept = stream.trigger(once=True).start()
    print("unkept", kept.awaitTermination(120), kept.exception(), len(later.writes()), kept.id)
    print("file", spark.read.json(path).where(f"write_id = '{kept.id}'").select("tasks").collect()[0].tasks)
    spark.conf.set(SETTING, "false")

def stored_in(topic):
    return sum(queue.messages for queue in queue_offsets([name_server], topic))
while stored_in(topic) < 1100:
    time.sleep(0.1)
with rocketmq_spark.live(spark, topic + "-live", name_server) as display:
    spark.range(50).selectExpr("cast(id as string) as body").write.format("rocketmq").mode("append").options(
        nameServer=name_server, topic=topic + "-live").save()
print("live", display.view.messages, display.view.tasks, display.view.problems)
written = rocketmq_spark.write(spark.range(7).selectExpr("cast(id as string) as body"), nameServer=name_server,
                               topic=topic + "-function")
print("written", sum(broker["rows"] for broker in written.to_dict().values()))
read = spark.read.format("rocketmq").option("nameServer", name_server).load(topic)
print("read", read.count(), read.where("queueOffset >= 0 AND body = X'39'").count(), len(read.take(3)))
print("once", rocketmq_spark.dedupe(read).select("msgId").distinct().count())
try:
    spark.read.format("rocketmq").option("nameServer", name_server).load(topic + "-missing").collect()
except Exception as exc:
    print("missing", "create the topic" in str(exc))

sink = {"nameServer": name_server, "topic": topic + "-stream"}
def numbers(rows):
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    return source.load().selectExpr("cast(value as string) as body")
def start(writer):
    return writer.option("checkpointLocation", tempfile.mkdtemp()).trigger(once=True).start()

twice = numbers(100).selectExpr("string(body div 2) as body", "'t' as topic", "0 as flag",
    "map('SPARK_ROW_ID', concat('w/0/', lpad(string(body div 2), 32, '0'))) as properties")
deduped = rocketmq_spark.dedupe(twice, within="1 hour").select("body")
query = start(deduped.writeStream.format("rocketmq").options(**sink))
print("deduped", query.awaitTermination(120), query.exception(), query.id)
try:
    numbers(1).writeStream.format("rocketmq").options(**sink).trigger(continuous="1 second").start()
except rocketmq_spark.OptionError as exc:
    print("continuous", "passes no row" in str(exc))
where = {"nameServer": name_server, "topic": topic + "-once"}
once = {"delivery": "effectivelyOnce", "transactionalId": topic, "fenceMs": "100"}
try:
    spark.range(1).selectExpr("'x' as body").write.format("rocketmq").options(**where, **once).save()
except Exception as exc:
    print("anonymous", type(rocketmq_spark.cause(exc)).__name__, "requires writeId" in str(rocketmq_spark.cause(exc)))
for delivery in ("effectivelyOnce", "exactlyOnce"):
    try:
        rocketmq_spark.write(spark.range(1).selectExpr("'x' as body"), **where, **{**once, "delivery": delivery})
    except rocketmq_spark.OptionError as exc:
        print("anonymous", delivery, "requires writeId" in str(exc))
try:
    spark.range(0, 9, 1, 1).selectExpr("if(id = 8, null, 'x') as body").write.format("rocketmq").options(**where).save()
except Exception as exc:
    print("cause", type(rocketmq_spark.cause(exc)).__name__, rocketmq_spark.cause(exc).row)
checkpoint = tempfile.mkdtemp()
writer = numbers(100).writeStream.foreachBatch(rocketmq_spark.foreach_batch(**where, **once))
writer = writer.option("checkpointLocation", checkpoint).trigger(once=True)
for attempt in range(2):
    while True:
        try:
            query = writer.start()
            break
        except Exception as exc:
            # Spark gives the worker of foreachBatch 10 s for its imports.
            if "Python worker failed to connect back" not in str(exc):
                raise
    print("attempt", query.awaitTermination(120), query.exception())
    # Spark repeats the micro-batch if it was not noted as complete.
    for name in ("0", ".0.crc"):
        os.remove(checkpoint + "/commits/" + name)
print("stored", stored_in(where["topic"]))
native = {**where, "topic": topic + "-native"}
own = {**once, "transactionalId": topic + "-native", "checkpointLocation": tempfile.mkdtemp()}
for attempt in range(2):
    query = numbers(100).writeStream.format("rocketmq").options(**native, **own).trigger(once=True).start()
    print("native", query.awaitTermination(120), query.exception())
    for name in ("0", ".0.crc"):
        os.remove(own["checkpointLocation"] + "/commits/" + name)
print("stored by its own id", stored_in(native["topic"]))
slowly = {"maxRatePerSecond": "100", "maxRateTasks": "2"}
query = start(numbers(1_000_000).writeStream.format("rocketmq").options(**sink, **slowly))
deadline = time.monotonic() + 300
while stored_in(sink["topic"]) <= 60 and time.monotonic() < deadline:
    time.sleep(0.1)
query.stop()
print("stopped", query.exception(), len(query.recentProgress), stored_in(sink["topic"]) > 60)
spark.stop()
""",
        cluster,
        topic,
    )
    assert done.returncode == 0, done.stderr
    assert "refused overwrite True\nrefused ignore True\nmetrics: " in done.stdout
    assert "metricsPath" in done.stdout
    if LOOKUP_AND_REGISTER:
        assert "before []\nkept -1 59 59 1 True\nno reads\n" in done.stdout, done.stdout
        assert "later 0 1 0\nunkept True None 1 " in done.stdout
        assert "file 2\n" in done.stdout
    assert "live 50 None ()" in done.stdout
    assert "written 7" in done.stdout
    assert "read 1100 2 3\nonce 1100\nmissing True" in done.stdout
    assert len(read_topic(cluster.name_server, topic, 1100)) == 1100
    deduped = re.search(r"deduped True None (\S+)", done.stdout)
    assert deduped is not None, done.stdout
    assert re.search(rf"micro-batch 0 of {deduped[1]}: \d+ tasks stored 50 rows", done.stderr), done.stderr
    refused = "anonymous OptionError True\nanonymous effectivelyOnce True\nanonymous exactlyOnce True\n"
    assert f"continuous True\n{refused}cause InvalidRowError 8\n" in done.stdout
    assert "attempt True None\nattempt True None\nstored 100\n" in done.stdout
    assert "native True None\nnative True None\nstored by its own id 100\n" in done.stdout
    assert "stopped None 0 True" in done.stdout
    # Spark logs at length that it has killed tasks in mid-batch; nothing of that is Python's. A worker of foreachBatch
    # that needed more than 10 s finds that Spark no longer waits for it.
    expected = re.compile(r"Traceback(?:(?!Traceback)[\s\S])*?(?:InvalidRowError: |CANNOT_OPEN_SOCKET)[^\n]*")
    assert "Traceback" not in (rest := expected.sub("", done.stderr)), rest


def test_artifacts_bring_the_package_to_a_connect_server_without_it(
    cluster: SharedCluster, topic: str, tmp_path: Path
) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")
    # The workers of the server find all that is installed, except for this package.
    site = tmp_path / "site"
    site.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "rocketmq" not in entry.name:
            (site / entry.name).symlink_to(entry)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" -S "$@"\n')
    interpreter.chmod(0o755)
    code = next(
        block.text for block in blocks(ROOT / "docs" / "clusters" / "connect.md") if "addArtifacts" in block.text
    )
    done = run(
        f"""
sys.path[:0] = [{str(ROOT)!r}]
import rocketmq_spark
spark = session(SparkSession.builder.remote("local[2]"))
rocketmq_spark.register(spark)
try:
    save(spark, 1, "append")
except Exception as exc:
    print("without", "No module named 'rocketmq_spark'" in str(exc))
{code.replace("/tmp/", f"{tmp_path}/")}
save(spark, 100, "append")
print("read", spark.read.format("rocketmq").option("nameServer", name_server).load(topic).count())
spark.stop()
""",
        cluster,
        topic,
        tmp_path,
        PYSPARK_PYTHON=str(interpreter),
    )
    assert done.returncode == 0, done.stderr
    assert "without True\nread 100\n" in done.stdout, done.stdout
