"""`spark.read` of a whole topic in ``local[2]``, against the official pull consumers and Spark's own Kafka source.

Run: make bench PART=read (python -m tests.benchmarks.bench_read [rounds])

The topic has 2 million messages of 100 bytes with a key and a tag, in 8 queues of a broker. One broker has default
settings, which return at most 32 messages per pull; the other one returns 1,024. Kafka has as many rows in 8
partitions. All were written shortly before, so they are in the page cache.

Spark writes the rows to its format noop. Its sessions live through all rounds, and the first round does not count. Our
session uses the installed PySpark, Kafka's session the PySpark of its connector. Java's consumers only decode bodies,
and ask for 1,000 messages per pull: `DefaultLitePullConsumer` with a thread pool, and `DefaultMQPullConsumer` with a
thread for each queue, or for two. The two best ones of a first run take part, and each round counts the better one.
Every contestant drains the topic once in each run before the measurement.

On the second broker a further session reads with numpy instead of the compiled kernel (ROCKETMQ_SPARK_KERNEL=0). So
does `read_arrow`, in a process for each read.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rocketmq_spark import LocalCluster, Producer
from rocketmq_spark.arrow.kernel import VARIABLE
from tests.benchmarks import bench_kernel
from tests.benchmarks.bench_remoting import ROWS, record_batches
from tests.benchmarks.bench_spark import CONNECTOR, MILLION, QUEUES, Session, make_rows, sink
from tests.benchmarks.contest import Figure, apart, await_rest, best_of, by_name, in_turns, ratios, rounds_of, show
from tests.benchmarks.java_client import JavaClient
from tests.benchmarks.kafka import Kafka, jars_of

TOPIC = "bench"
TWO_COLUMNS = "body binary, keys string"
# The defaults of RocketMQ; local clusters return more.
DEFAULT_PULLS = {
    "maxTransferCountOnMessageInMemory": 32,
    "maxTransferBytesOnMessageInMemory": 262_144,
    "maxTransferCountOnMessageInDisk": 8,
    "maxTransferBytesOnMessageInDisk": 65_536,
}
TUNED = "1,024 messages per pull"
MILLIONS = 2
# With fewer threads than queues, a queue that is read to its end would block a thread of "lite" for 20 s.
CONSUMERS_AND_THREADS = [("lite", 8), ("lite", 20), ("pull", 4), ("pull", 8)]


def fill(cluster: LocalCluster, topic: str, millions: int, queues: int = QUEUES) -> None:
    """Create a topic with `millions` million messages."""
    with Producer("bench-fill", name_server=cluster.name_server) as producer:
        producer.create_topic("TBW102", topic, queues)
        rows = itertools.islice(record_batches(100, float("inf")), millions * MILLION // ROWS)
        producer.send_arrow(rows, topic=topic)


def java_drains(java: JavaClient, cluster: LocalCluster, consumer: str, threads: int) -> float:
    """Return the messages per second of a Java consumer."""
    said = json.loads(java.run("TopicDrainer", cluster.name_server, TOPIC, consumer, threads, MILLIONS * MILLION))
    return float(said["messages"] / said["seconds"])


def source(
    name: str, address: str, topic: str, millions: int, jars: str = "", environ: Mapping[str, str] | None = None
) -> Session:
    """Return a session that reads from one source on request; a request is the schema, empty for all columns."""
    return Session("spark_source.py", name, address, topic, millions * MILLION, jars, environ=environ)


def rates(
    cluster: LocalCluster, java: JavaClient, rounds: int, others: Mapping[str, Session] | None = None
) -> tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]]:
    """Return the messages per second of each round, and the processor seconds of Python's workers per million.

    Contestants are ``spark``, its read of ``two columns``, ``java``, and `others`.
    """
    fill(cluster, TOPIC, MILLIONS)
    with source("rocketmq", cluster.name_server, TOPIC, MILLIONS) as spark:
        sessions = {"spark": spark, "two columns": spark, **(others or {})}

        def measure(name: str) -> tuple[float, float]:
            await_rest(cluster)
            if name.startswith("java"):
                _, consumer, threads = name.split()
                return java_drains(java, cluster, consumer, int(threads[1:])), 0.0
            said = sessions[name].ask(TWO_COLUMNS if name == "two columns" else "")
            return float(said["rows"] / said["seconds"]), float(said["python"] / MILLIONS)

        tried = {f"java {consumer} x{threads}": 0.0 for consumer, threads in CONSUMERS_AND_THREADS}
        # The first reads make the broker's JVM compile its code, so they would be the slowest.
        measure("java pull x8")
        for name in tried:
            tried[name], _ = measure(name)
            print(f"  {name} {tried[name]:,.0f}", flush=True)
        best = sorted(tried, key=lambda name: tried[name])[-2:]
        results = rounds_of([*sessions, *best], rounds, measure)
    taken = by_name([{name: rate for name, (rate, _) in one.items()} for one in results])
    workers = by_name([{f"{name}, CPU of workers": one[name][1] for name in sessions} for one in results])
    return {**taken, "java": best_of(*(taken[name] for name in best))}, workers


def reads(folder: Path, rounds: int) -> Iterator[Figure]:
    """Rows per second, from a broker with default settings and from one that returns more messages per pull."""
    java = JavaClient(folder)
    with LocalCluster(broker_properties=DEFAULT_PULLS) as cluster:
        taken, _ = rates(cluster, java, rounds)
    against_java = "read, local[2], against the official pull consumer"
    yield Figure(f"{against_java}, default broker", ratios(taken["spark"], taken["java"]), 1.0)
    jars, parquet = ",".join(map(str, jars_of(*CONNECTOR))), folder / "rows.parquet"
    make_rows(parquet)
    with LocalCluster() as cluster, Kafka(keeps=True) as server:
        with sink("kafka", server.address, TOPIC, parquet, jars) as filling:
            filling.ask(MILLIONS)
        with (
            source("kafka", server.address, TOPIC, MILLIONS, jars) as kafka,
            source("rocketmq", cluster.name_server, TOPIC, MILLIONS, environ={VARIABLE: "0"}) as numpy,
        ):
            taken, workers = rates(cluster, java, rounds, {"kafka": kafka, "numpy": numpy})
        yield from arrow_reads(cluster, rounds)
    yield Figure(f"{against_java}, {TUNED}", ratios(taken["spark"], taken["java"]), 1.5)
    yield Figure(f"read, local[2], against Spark's Kafka source, {TUNED}", ratios(taken["spark"], taken["kafka"]), 1.6)
    yield Figure(
        f"read of two columns, against all columns, {TUNED}", ratios(taken["two columns"], taken["spark"]), 1.5
    )
    yield Figure(f"read, local[2], compiled kernel against numpy, {TUNED}", ratios(taken["spark"], taken["numpy"]))
    own, others = workers["spark, CPU of workers"], workers["numpy, CPU of workers"]
    note = f"with numpy {statistics.median(others):.2f}"
    yield Figure(f"read, CPU seconds of Python's workers per million rows, {TUNED}", own, 0.65, True, note)


def arrow_reads(cluster: LocalCluster, rounds: int) -> Iterator[Figure]:
    """The processor seconds of `read_arrow`, with the compiled kernel and with numpy."""
    for name, columns, aim in (("all columns", (), 0.45), ("bodies", ("body",), None)):
        arguments = cluster.name_server, TOPIC, MILLIONS * MILLION

        def measure(kernel: str, columns: Sequence[str] = columns, arguments: Sequence[object] = arguments) -> float:
            await_rest(cluster)
            seconds = apart("tests.benchmarks.bench_kernel", *arguments, kernel, *columns, within=600)
            return float(seconds / MILLIONS)

        taken = in_turns(["1", "0"], rounds, measure)
        own, others = taken["1"], taken["0"]
        note = f"{statistics.median(own):.2f} s per million rows, with numpy {statistics.median(others):.2f}"
        yield Figure(
            f"read_arrow, CPU with the compiled kernel, against numpy: {name}", ratios(own, others), aim, True, note
        )


def memory() -> Iterator[Figure]:
    """The most memory that a worker has, by how much it reads from one queue."""
    peaks = []
    with LocalCluster() as cluster:
        for millions in (1, 10):
            topic = f"{TOPIC}-{millions}"
            fill(cluster, topic, millions, queues=1)
            with source("rocketmq", cluster.name_server, topic, millions) as session:
                peaks.append(session.ask()["peak"])
    most = f"{peaks[1] / 1e6:.0f} MB for 10 million rows"
    yield Figure("memory of a reading worker, 10 million rows against 1", [peaks[1] / peaks[0]], 1.1, True, most)


def figures(rounds: int) -> Iterator[Figure]:
    """Measure everything here."""
    with tempfile.TemporaryDirectory() as folder:
        yield from reads(Path(folder), rounds)
    yield from bench_kernel.figures(rounds)
    yield from memory()


if __name__ == "__main__":
    show(figures, sys.argv[1:], 5)
