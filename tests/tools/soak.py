"""Run a streaming query for half an hour while its brokers are restarted; fail if rows are missing or memory grows.

Run: make soak (python tests/tools/soak.py [--minutes 30] [--rows-per-second 500])

Every minute one of two brokers is stopped, by turns in an orderly way and by SIGKILL, and restarted. Every 5 seconds
the tool records memory, threads and file descriptors of three kinds of processes: this one, Spark's JVM, and the Python
workers. Of the JVM it records resident memory, and the heap after a collection; of the workers their number and the
largest figures. flatness.py decides whether a figure has grown. At the end RocketMQ's consumer reads every row back
(tests/support/auditor.py). The exit status is 0 if nothing has grown, no row is missing, every repeat is
marked, no offset is skipped, and at least one broker was restarted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import rocketmq_spark
from rocketmq_spark.cluster import LocalCluster
from tests.support.auditor import ROW_ID, Found, Row, audit
from tests.support.cluster import create_topic
from tests.support.java import Java
from tests.tools.flatness import Line, Sample, judge

TOPIC = "soak"
SAMPLED_EVERY = 5.0
RESTARTED_EVERY = 60.0

# Spark's JVM grows for a long time without a leak: its heap up to -Xmx, and other memory by classes, compiled code,
# threads and network buffers. Here the whole heap is allocated at the start, and the other memory has this ceiling. It
# was 420 MB after 9 minutes, and grew by 2 MB a minute.
HEAP_MB = 768
CEILINGS = {"JVM MB": HEAP_MB * 1.048576 + 600}
# Each of these pools gets a thread with each of Spark's first tasks, up to 100; later its size varies.
FILLED_POOLS = ("block-manager-ask-thread-pool-", "block-manager-storage-async-thread-pool-")


class Gauge:
    """Measures the processes of a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self._driver = psutil.Process()
        context: Any = spark.sparkContext
        self._jvm = psutil.Process(context._gateway.proc.pid)
        self._java = context._jvm

    def sample(self) -> Sample:
        """Return the present figures; those of the workers are the largest of all workers."""
        return Sample(time.monotonic(), self._figures())

    def _figures(self) -> Mapping[str, float]:
        self._java.System.gc()
        heap = self._java.java.lang.management.ManagementFactory.getMemoryMXBean().getHeapMemoryUsage().getUsed()
        threads = self._java.Thread.getAllStackTraces().keySet()
        named = threads.toString()
        workers = list(self._workers())
        return {
            "driver MB": self._driver.memory_info().rss / 1e6,
            "driver threads": self._driver.num_threads(),
            "driver descriptors": self._driver.num_fds(),
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


class Every(threading.Thread):
    """Calls `do` periodically with 0, 1, 2, ... until the end of the block; stops at an exception, and keeps it."""

    def __init__(self, seconds: float, do: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self._seconds = seconds
        self._do = do
        self._stopped = threading.Event()
        self.failure: Exception | None = None
        self.times = 0

    def run(self) -> None:
        due = time.monotonic() + self._seconds
        while not self._stopped.wait(max(due - time.monotonic(), 0.0)):
            due = max(due + self._seconds, time.monotonic())
            try:
                self._do(self.times)
            except Exception as exc:
                self.failure = exc
                return
            self.times += 1

    def __enter__(self) -> Every:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        # A restart may be in progress: it must end before the servers are read or stopped.
        self.join()


def session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The query's exception says why it ended.
        "spark.log.level": "OFF",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": f"{HEAP_MB}m",
        "spark.driver.extraJavaOptions": f"-Xms{HEAP_MB}m -XX:+AlwaysPreTouch",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # Small limits, so that Spark's records of finished jobs reach their final size within a minute.
        "spark.ui.retainedJobs": "20",
        "spark.ui.retainedStages": "20",
        "spark.ui.retainedTasks": "200",
        "spark.sql.ui.retainedExecutions": "20",
        "spark.sql.streaming.minBatchesToRetain": "10",
    }
    builder = SparkSession.builder.master("local[2,4]").appName("rocketmq-spark soak")
    return builder.config(map=settings).getOrCreate()


def start(spark: SparkSession, name_server: str, rate: int, seconds: int, checkpoint: str) -> StreamingQuery:
    """Start a query whose rows count from 0 to rate * seconds."""
    numbers = spark.readStream.format("rate").option("rowsPerSecond", rate).option("numPartitions", 2).load()
    return (
        numbers.where(f"value < {rate * seconds}")
        .selectExpr("rpad(cast(value as string), 100, '.') as body", "cast(value as string) as keys")
        .writeStream.format("rocketmq")
        .options(nameServer=name_server, topic=TOPIC, rowId="true", checkpointLocation=checkpoint)
        .trigger(processingTime="1 second")
        .start()
    )


def run_out(query: StreamingQuery, seconds: int, watched: Sequence[Every]) -> None:
    """Wait until the query has sent the rows of the first `seconds` seconds of its source."""
    said = time.monotonic()
    while True:
        for one in watched:
            if one.failure is not None:
                raise one.failure
        if query.exception() is not None or not query.isActive:
            raise SystemExit(f"the query has ended: {query.exception()}")
        progress = query.lastProgress
        done = int(progress.sources[0].endOffset or 0) if progress is not None else 0
        if done >= seconds:
            return
        if time.monotonic() - said > 60:
            said = time.monotonic()
            print(f"  {done} of {seconds} s sent, {watched[0].times} restarts", flush=True)
        time.sleep(1)


def compare(name_server: str, rows: int, folder: Path) -> Found:
    """Compare the topic with the rows of the query. Repeats of a row share its row id."""
    given = (
        Row(TOPIC, str(number), str(number).ljust(100, ".").encode(), keys=str(number), repeats=True)
        for number in range(rows)
    )
    return audit(Java(folder, folder / "classes"), name_server, given, marks=[ROW_ID])


def soak(minutes: float, rate: int) -> int:
    """Run the soak, print its result, and return the exit status."""
    seconds, samples = int(minutes * 60), list[Sample]()
    with LocalCluster(brokers=2) as cluster, tempfile.TemporaryDirectory() as checkpoint:
        create_topic(cluster, TOPIC, "NORMAL", 4)

        def restart(number: int) -> None:
            broker = cluster.brokers[number % 2]
            if number // 2 % 2:
                broker.kill()
            broker.restart()

        spark = session()
        try:
            metrics = rocketmq_spark.register(spark)
            gauge = Gauge(spark)
            query = start(spark, cluster.name_server, rate, seconds, checkpoint)
            print(f"{rate} rows a second for {minutes:g} minutes; Ctrl-C ends it", flush=True)
            try:
                with (
                    Every(RESTARTED_EVERY, restart) as restarts,
                    Every(SAMPLED_EVERY, lambda _: samples.append(gauge.sample())) as sampling,
                ):
                    run_out(query, seconds, (restarts, sampling))
            finally:
                query.stop()
            retries = sum(broker["retries"] for broker in metrics.to_dict().values())
        finally:
            spark.stop()
        found = compare(cluster.name_server, rate * seconds, Path(checkpoint))
    lines = judge(samples, CEILINGS)
    print_table(lines)
    print(f"\nbrokers restarted {restarts.times} times, {retries} retries")
    print(f"rows in {rate * seconds:,}, rows stored {found.found:,}, repeats {found.repeats:,}")
    faults = [f"{line.name} has grown" for line in lines if not line.fine]
    faults += [] if restarts.times else ["no broker was restarted"]
    faults += found.lines()
    print("\n".join(faults) or "nothing is missing, nothing has grown")
    return 1 if faults else 0


def print_table(lines: Sequence[Line]) -> None:
    """Print each figure after the warm-up, at the end and at its highest, and its growth per hour."""
    print(f"\n{'':20} {'first quarter':>13} {'last quarter':>13} {'highest':>10} {'per hour':>10}")
    for name, first, last, highest, per_hour, fine in lines:
        verdict = "fine" if fine else "GROWS"
        print(f"{name:20} {first:>13.1f} {last:>13.1f} {highest:>10.1f} {per_hour:>+10.1f}  {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write for a long time while brokers are restarted.")
    parser.add_argument("--minutes", type=float, default=30.0, help="at least 2; default 30")
    parser.add_argument("--rows-per-second", type=int, default=500, help="default 500")
    given = parser.parse_args()
    if given.minutes < 2 or given.rows_per_second < 1:
        parser.error("at least 2 minutes and 1 row per second")
    try:
        return soak(given.minutes, given.rows_per_second)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
