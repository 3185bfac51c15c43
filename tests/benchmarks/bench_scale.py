"""What one row, one task and one queue cost when there are many of them.

Run: make bench PART=scale (python -m tests.benchmarks.bench_scale [rounds] [seconds a run])

* `costs`: processor time of `Producer.send_arrow` for each row, to fake brokers in one other process that only
  acknowledge. The smallest case has 1 broker, 8 queues and 1 topic; each other case has one larger number.
* `tasks`: processor time of writes of Spark (JVM and Python) with 2 tasks and with 2,000, to such a broker.
* `planning`: the driver's time for a read of 10,000 queues, and the length of its offsets in the checkpoint.
* `reports`: the driver's time and memory for the reports of 10,000 tasks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from rocketmq_spark import Producer
from tests.benchmarks.acknowledging import TOPIC, brokers, topic_names
from tests.benchmarks.bench_merge import merged
from tests.benchmarks.bench_remoting import record_batches
from tests.benchmarks.bench_spark import Session
from tests.benchmarks.contest import Figure, apart, differences, in_turns, ratios, rows_of, show

# (brokers, queues of each topic on each broker, topics)
SMALLEST = (1, 8, 1)
CASES = {"64 brokers": (64, 8, 1), "1,024 queues": (1, 1024, 1), "1,000 topics": (1, 8, 1000)}
AIMS = {"64 brokers": 1.3, "1,024 queues": 1.3}
WARM_UP = 1.0

MANY_TASKS = 2000
# Rows of a task, in both sizes of a job: a task of Spark costs as much as some 100,000 rows.
ROWS_OF_A_TASK = 25_000
# Small jobs that are measured together, because processor time counts in steps of 10 ms.
SMALL_JOBS = 20

QUEUES = 10_000


def send(name_server: str, topics: int, seconds: float) -> dict[str, float]:
    """Send for some seconds; return CPU seconds per million rows, and what the process then has."""
    names = topic_names(topics)

    def rows(until: float) -> Iterator[pa.RecordBatch]:
        batch = next(record_batches(100, until))
        names_of_rows = list(itertools.islice(itertools.cycle(names), batch.num_rows))
        batch = batch.append_column("topic", pa.array(names_of_rows))
        while time.perf_counter() < until:
            yield batch

    with Producer("bench-scale", name_server=name_server) as producer:
        producer.send_arrow(rows(time.perf_counter() + WARM_UP))
        began = time.process_time()
        stored = rows_of(producer.send_arrow(rows(time.perf_counter() + seconds)))
        cost, process = (time.process_time() - began) / stored * 1e6, psutil.Process()
        open_ones = [one for one in process.net_connections() if one.status == psutil.CONN_ESTABLISHED]
        rss = process.memory_info().rss / 1e6
        return {"cpu": cost, "connections": len(open_ones), "threads": process.num_threads(), "mb": rss}


def costs(rounds: int, seconds: float) -> Iterator[Figure]:
    """The cost of a row by the numbers of brokers, queues and topics."""
    cases = {"smallest": SMALLEST, **CASES}
    said: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        addresses = {name: stack.enter_context(brokers(*case)) for name, case in cases.items()}

        def measure(name: str) -> float:
            topics = cases[name][2]
            arguments = "send", addresses[name], topics, seconds
            said[name] = apart("tests.benchmarks.bench_scale", *arguments, within=seconds + 60)
            return said[name]["cpu"] * 1e3

        print("  CPU ms per million rows:")
        taken = in_turns(list(cases), rounds, measure)
    for name in CASES:
        has = said[name]
        note = f"{has['connections']:.0f} connections, {has['threads']:.0f} threads, {has['mb']:.0f} MB"
        yield Figure(
            f"CPU of a row, {name} against 1 broker with 8 queues",
            ratios(taken[name], taken["smallest"]),
            AIMS.get(name),
            True,
            note,
        )


def tasks(rounds: int) -> Iterator[Figure]:
    """The cost of a row by the number of tasks."""
    with brokers(*SMALLEST) as address, contextlib.ExitStack() as stack:
        sessions = {
            name: stack.enter_context(Session("spark_sink.py", name, address, TOPIC, "-"))
            for name in ("rocketmq", "nothing")
        }

        def cost(name: str, tasks: int, jobs: int) -> float:
            said = [sessions[name].ask(tasks * ROWS_OF_A_TASK, tasks) for _ in range(jobs)]
            return float(sum(one["jvm"] + one["python"] for one in said) / sum(one["rows"] for one in said) * 1e6)

        def measure(contestant: str) -> float:
            name, size = contestant.split()
            return cost(name, *sizes[size]) * 1e3

        sizes = {"few": (2, SMALL_JOBS), "many": (MANY_TASKS, 1)}
        print("  CPU ms per million rows:")
        taken = in_turns([f"{name} {size}" for size in sizes for name in sessions], rounds, measure)
    yield Figure(
        "CPU of a row, 2,000 tasks against 2 tasks of as many rows",
        ratios(taken["rocketmq many"], taken["rocketmq few"]),
        1.3,
        True,
    )
    ours, spark = ([cost * ROWS_OF_A_TASK / 1e6 for cost in taken[f"{name} many"]] for name in ("rocketmq", "nothing"))
    yield Figure(
        f"CPU ms of a task of {ROWS_OF_A_TASK:,} rows, beyond a sink that does nothing",
        differences(ours, spark),
        note=f"{statistics.median(spark):.0f} ms with a sink that does nothing",
    )


def plan(name_server: str) -> dict[str, float]:
    """Plan a batch read, and run a streaming query of the same queues; return seconds and bytes."""
    from pyspark.sql import SparkSession
    from pyspark.sql.types import BinaryType, StructField, StructType

    import rocketmq_spark
    from rocketmq_spark.options.parsing import parse_source_options
    from rocketmq_spark.spark.reader import ReadPartition, RocketMQBatchReader

    options = {"nameServer": name_server, "topic": TOPIC}
    schema = StructType([StructField("body", BinaryType())])
    reader = RocketMQBatchReader(parse_source_options(options, {}, streaming=False), schema)
    began = time.perf_counter()
    partitions = reader.partitions()
    batch = time.perf_counter() - began
    found = sum(len(partition.plan.ranges) for partition in partitions if isinstance(partition, ReadPartition))
    assert found == QUEUES, found

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    rocketmq_spark.register(spark)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        query = (
            spark.readStream.format("rocketmq")
            .options(**options, startingOffsets="earliest")
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", folder)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        stream = time.perf_counter() - began
        bytes_ = (Path(folder) / "offsets" / "0").stat().st_size
        rows = sum(progress.numInputRows for progress in query.recentProgress)
    assert rows == QUEUES, rows
    spark.stop()
    return {"batch": batch, "stream": stream, "bytes": bytes_}


def planning(rounds: int) -> Iterator[Figure]:
    """The planning of a read of many queues of 100 brokers, each with one message."""
    said: list[dict[str, Any]] = []
    with brokers(100, QUEUES // 100, 1, 1) as address:
        for _ in range(rounds):
            said.append(apart("tests.benchmarks.bench_scale", "plan", address, within=300))
            print(f"  {said[-1]}", flush=True)
    kilobytes = said[0]["bytes"] / 1e3
    yield Figure("seconds to plan a read of 10,000 queues", [one["batch"] for one in said], 5.0, True)
    yield Figure(
        "seconds of a streaming query that reads 10,000 queues once",
        [one["stream"] for one in said],
        None,
        note=f"{kilobytes:.0f} kB of offsets in the checkpoint per micro-batch",
    )


def reports() -> Iterator[Figure]:
    """The driver's work for the reports of 10,000 tasks."""
    found = merged(10_000, 20, 2, 1)
    yield Figure(
        "ms of the driver to merge a task's report, 10,000 tasks, 20 brokers",
        [statistics.mean(found.merges) * 1e3],
        1.0,
        True,
        f"{found.memory / 1e3:.0f} kB in the end",
    )


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure everything here."""
    yield from costs(rounds, seconds)
    yield from tasks(min(rounds, 3))
    yield from planning(min(rounds, 3))
    yield from reports()


def main(arguments: list[str]) -> None:
    if arguments[:2] == ["--run", "send"]:
        name_server, topics, seconds = arguments[2:]
        print(json.dumps(send(name_server, int(topics), float(seconds))))
    elif arguments[:2] == ["--run", "plan"]:
        print(json.dumps(plan(arguments[2])))
    else:
        show(figures, arguments, 5, 4.0)


if __name__ == "__main__":
    main(sys.argv[1:])
