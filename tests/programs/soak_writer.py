"""Writes numbered rows with one delivery until all are written, and records the memory of its processes.

The form is ``stream`` (a query on Spark's rate source), ``batch`` (a batch write for each period), or ``producer`` (the
same with `Producer.send_arrow`, without Spark). A restarted program continues from the checkpoint of the stream, or
from the file ``written``, which has the number of written batches. A write that fails is repeated, `restarts` times in
a row if nothing is written in between. With ``delivery=exactlyOnce`` each run of the program writes other bodies.

The program waits for the file ``go``. Every few seconds it appends a line of JSON to ``figures.jsonl``, with the
number of complete writes, and the figures of `Gauge` or `own_figures`.

usage: python soak_writer.py '{"form": "stream", "folder": ..., "rate": 200, "seconds": 120, "period": 5, ...}'
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark
from rocketmq_spark import Producer

SAMPLED_EVERY = 20.0
# Each of these pools gets a thread with each of Spark's first tasks, up to 100; later its size varies.
FILLED_POOLS = ("block-manager-ask-thread-pool-", "block-manager-storage-async-thread-pool-")

arguments = json.loads(sys.argv[1])
folder, options = Path(arguments["folder"]), arguments["options"]
rate, seconds, period = arguments["rate"], arguments["seconds"], arguments["period"]
written, started = folder / "written", folder / "started"
attempt = uuid.uuid4().hex if options["delivery"] == "exactlyOnce" else ""


class Gauge:
    """Measures the processes of a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        context: Any = spark.sparkContext
        self._jvm = psutil.Process(context._gateway.proc.pid)
        self._java = context._jvm

    def figures(self) -> Mapping[str, float]:
        """Return the present figures; those of the workers are the largest of all workers."""
        self._java.System.gc()
        heap = self._java.java.lang.management.ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed()
        threads = self._java.Thread.getAllStackTraces().keySet()
        named = threads.toString()
        workers = list(self._workers())
        return {
            **own_figures(),
            "JVM MB": self._jvm.memory_info().rss / 1e6,
            "JVM heap MB": heap / 1e6,
            "JVM threads": len(threads) - sum(named.count(pool) for pool in FILLED_POOLS),
            "JVM descriptors": self._jvm.num_fds(),
            "workers": len(workers),
            "worker MB": max((memory for memory, _, _ in workers), default=0.0),
            "worker threads": max((threads for _, threads, _ in workers), default=0),
            "worker descriptors": max((descriptors for _, _, descriptors in workers), default=0),
        }

    def _workers(self) -> Iterator[tuple[float, int, int]]:
        for process in self._jvm.children(recursive=True):
            # A process that ends meanwhile is skipped. Children of the JVM are daemons; they fork the workers.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if process.ppid() != self._jvm.pid:
                    yield process.memory_info().rss / 1e6, process.num_threads(), process.num_fds()


def own_figures() -> Mapping[str, float]:
    """Return the figures of this process."""
    process = psutil.Process()
    return {
        "program MB": process.memory_info().rss / 1e6,
        "program threads": process.num_threads(),
        "program descriptors": process.num_fds(),
    }


def record(figures: Callable[[], Mapping[str, float]]) -> None:
    """Append the figures to the file every few seconds, for ever."""
    while True:
        time.sleep(SAMPLED_EVERY)
        line = json.dumps({"at": time.time(), "pid": os.getpid(), "done": done(), "figures": figures()})
        with (folder / "figures.jsonl").open("a") as file:
            file.write(f"{line}\n")


def batches_written() -> int:
    return int(written.read_text()) if written.exists() else 0


def note(batches: int) -> None:
    """Record that so many batches are written. A killed program leaves the file of before, or the new one."""
    draft = folder / "draft"
    draft.write_text(str(batches))
    draft.rename(written)


def done() -> int:
    """Return the number of writes that are complete. Spark deletes its notes of old ones."""
    notes = (folder / "checkpoint" / "commits").glob("[0-9]*")
    return batches_written() + max((int(note.name) + 1 for note in notes if note.name.isdigit()), default=0)


def rows_of(numbers: DataFrame) -> DataFrame:
    """Return the rows with the numbers of the column ``value``."""
    body = "rpad(cast(value as string), 100, '.')"
    columns = [
        f"concat({body}, ' {attempt}') AS body" if attempt else f"{body} AS body",
        "concat('k', value) AS keys",
        "concat('tag-', value % 3) AS tags",
    ]
    if options.get("ordered") == "true":
        # The rate source has rows with even numbers in one partition, and those with odd numbers in the other one, in
        # their order. So the rows of a key are in one partition.
        columns.append("concat('group-', value % 20) AS shardingKey")
    return numbers.selectExpr(*columns)


def stream(spark: SparkSession) -> None:
    """Run the query until it has written the rows of all seconds of its source."""
    numbers = spark.readStream.format("rate").option("rowsPerSecond", rate).option("numPartitions", 2).load()
    query = (
        rows_of(numbers.where(f"value < {rate * seconds}"))
        .writeStream.format("rocketmq")
        .options(checkpointLocation=str(folder / "checkpoint"), **options)
        .trigger(processingTime="2 seconds")
        .start()
    )
    try:
        while not query.awaitTermination(1):
            progress = query.lastProgress
            if progress is not None and int(progress.sources[0].endOffset or 0) >= seconds:
                return
    finally:
        query.stop()


def batches(write: Callable[[int], None]) -> None:
    """Write the rows of each period when it is over, and note it."""
    if not started.exists():
        started.write_text(str(time.time()))
    since = float(started.read_text())
    for number in range(batches_written(), seconds // period):
        time.sleep(max(0.0, since + (number + 1) * period - time.time()))
        write(number)
        note(number + 1)


def save(spark: SparkSession) -> Callable[[int], None]:
    """Return a function that writes a batch with Spark."""

    def write(number: int) -> None:
        rows = rate * period
        numbers = spark.range(number * rows, (number + 1) * rows, 1, 2).withColumnRenamed("id", "value")
        named = {"metricsPath": str(folder / f"metrics-{number}.jsonl")}
        if options["delivery"] != "atLeastOnce":
            named["writeId"] = f"w{number}"
        rows_of(numbers).write.format("rocketmq").options(**options, **named).save()

    return write


def send(producer: Producer) -> Callable[[int], None]:
    """Return a function that writes a batch without Spark."""
    rest = {name: value for name, value in options.items() if name not in ("nameServer", "topic")}

    def write(number: int) -> None:
        numbers = range(number * rate * period, (number + 1) * rate * period)
        table = pa.table(
            {
                "body": [str(value).ljust(100, ".") for value in numbers],
                "keys": [f"k{value}" for value in numbers],
                "tags": [f"tag-{value % 3}" for value in numbers],
            }
        )
        producer.send_arrow(table, options["topic"], writeId=f"w{number}", **rest)

    return write


def persist(write: Callable[[], None]) -> None:
    """Repeat a write that fails."""
    before, failures = done(), 0
    while True:
        try:
            return write()
        except Exception as exc:
            # Spark fails with an IOException of Java if the daemon of its Python workers was killed.
            print(f"failed: {exc}", flush=True)
            failures = failures + 1 if done() == before else 1
            before = done()
            # A write that never succeeds has no chance later.
            if failures > (arguments["restarts"] if before else 3):
                raise
            time.sleep(1)


def begin(figures: Callable[[], Mapping[str, float]]) -> None:
    """Record the figures from now on, and wait until the caller lets all writers begin at the same time."""
    threading.Thread(target=record, args=(figures,), daemon=True).start()
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)


def main() -> None:
    if arguments["form"] == "producer":
        begin(own_figures)
        with Producer("soak", name_server=options["nameServer"]) as producer:
            persist(lambda: batches(send(producer)))
        return
    builder = SparkSession.builder
    for name, value in arguments["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    rocketmq_spark.register(spark)
    begin(Gauge(spark).figures)
    if arguments["form"] == "stream":
        persist(lambda: stream(spark))
    else:
        persist(lambda: batches(save(spark)))
    spark.stop()


if __name__ == "__main__":
    main()
