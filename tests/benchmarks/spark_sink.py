"""A Spark session that writes the same rows to a sink for each line on stdin; each answer is a line of JSON.

Run: python spark_sink.py SINK ADDRESS TOPIC PARQUET [JAR,JAR...], then lines "TIMES" (how often the rows are read), or
"TIMES TASKS". With PARQUET "-", Spark makes the rows: TIMES is their number, and TASKS that of the tasks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable

import psutil
from pyspark.sql import DataFrame, SparkSession

# The options of our sink's variants.
OPTIONS = {"inner": {"batchType": "inner"}, "anonymous": {"uniqueKey": "false"}}


def session(jars: str) -> SparkSession:
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        # By default Spark adds up the sizes of an Arrow batch's columns after each row, a quarter of what the JVM does
        # for a sink in Python; batches stay bounded by maxRecordsPerBatch. Nothing changes for Kafka's sink.
        .config("spark.sql.execution.arrow.maxBytesPerBatch", str(2**31 - 1))
        # From PySpark 4.1 on: JVM and Python's workers exchange bytes without TCP.
        .config("spark.python.unix.domain.socket.enabled", "true")
    )
    return (builder.config("spark.jars", jars) if jars else builder).getOrCreate()


def write(rows: DataFrame, sink: str, address: str, topic: str) -> None:
    if sink == "kafka":
        columns = rows.selectExpr("cast(keys AS binary) AS key", "body AS value")
        options: dict[str, Any] = {
            "linger.ms": 20,
            "batch.size": 262_144,
            "acks": 1,
            "bootstrap.servers": address,
        }
        writer = columns.write.format("kafka").options(**{f"kafka.{name}": value for name, value in options.items()})
        writer.option("topic", topic).save()
    elif sink == "nothing":
        rows.write.format("nothing").mode("append").save()
    else:
        writer = rows.write.format("rocketmq").option("nameServer", address).option("topic", topic).mode("append")
        writer.options(**OPTIONS.get(sink, {})).save()


def used() -> dict[str, Any]:
    """Return processor seconds of the JVM and of the Python workers, and the largest peak memory of a worker, bytes."""
    # A benchmark may also have started brokers, whose processes are Java's too.
    jvm = next(one for one in psutil.Process().children() if "org.apache.spark.deploy.SparkSubmit" in one.cmdline())
    workers = jvm.children(recursive=True)
    peaks = [0]
    for worker in workers:
        with open(f"/proc/{worker.pid}/status", encoding="ascii") as status:
            peaks += [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
    return {
        "jvm": sum(jvm.cpu_times()[:2]),
        "python": sum(sum(worker.cpu_times()[:4]) for worker in workers),
        "peak": max(peaks),
    }


def main(sink: str, address: str, topic: str, parquet: str, jars: str = "") -> None:
    spark = session(jars)
    if sink == "rocketmq" or sink in OPTIONS:
        import rocketmq_spark

        rocketmq_spark.register(spark)
    elif sink == "nothing":
        from tests.benchmarks.nothing import NothingDataSource

        spark.dataSource.register(NothingDataSource)
    for line in sys.stdin:
        times, *tasks = map(int, line.split())
        if parquet == "-":
            columns = "rpad('', 100, 'x') AS body", "concat('key-', id) AS keys", "'tag' AS tags"
            rows = spark.range(0, times, 1, *tasks).selectExpr(*columns)
        else:
            rows = spark.read.parquet(*[parquet] * times)
            rows = rows.coalesce(*tasks) if tasks else rows
        count, before, began = rows.count(), used(), time.perf_counter()
        write(rows, sink, address, topic)
        took, after = time.perf_counter() - began, used()
        cpu = {name: after[name] - before[name] for name in ("jvm", "python")}
        print(json.dumps({"rows": count, "seconds": took, **cpu, "peak": after["peak"]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
