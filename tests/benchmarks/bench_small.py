"""The cost of small writes, milliseconds: the first row, a write of 10 rows, and a micro-batch of 1,000 rows.

Run: make bench (python -m tests.benchmarks.bench_small [rounds])

The last two are the time beyond a Python data source that drops its rows, which is Spark's own part. Both sinks run by
turns in one session with warm workers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark import LocalCluster, Producer
from tests.benchmarks.bench_exactly_once import session
from tests.benchmarks.contest import Figure, differences, in_turns, show
from tests.benchmarks.nothing import NothingDataSource

SINKS = ("rocketmq", "nothing")
MICRO_BATCHES = 12
# The first micro-batches start workers and look up routes.
WARM_UP = 4


def rows_of(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(0, rows, 1, 2).selectExpr(
        "rpad(cast(id AS string), 100, '.') AS body", "cast(id AS string) keys"
    )


def batch_write(rows: DataFrame, sink: str, options: dict[str, str]) -> float:
    """Return how long a write takes, milliseconds."""
    began = time.perf_counter()
    rows.write.format(sink).options(**options).mode("append").save()
    return (time.perf_counter() - began) * 1000


def micro_batches(spark: SparkSession, sink: str, options: dict[str, str]) -> float:
    """Return the median time of a micro-batch of 1,000 rows after the warm-up, milliseconds."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).option("numPartitions", 2).load()
    rows = source.selectExpr("rpad(cast(value AS string), 100, '.') AS body", "cast(value AS string) keys")
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = rows.writeStream.format(sink).options(**options).option("checkpointLocation", checkpoint)
        query = writer.start()
        deadline = time.monotonic() + 120
        while len(query.recentProgress) < WARM_UP + MICRO_BATCHES and query.isActive and time.monotonic() < deadline:
            time.sleep(0.1)
        progress = query.recentProgress[WARM_UP:]
        query.stop()
    if query.exception() is not None or len(progress) < MICRO_BATCHES:
        raise SystemExit(f"a query has stopped: {query.exception()}")
    return float(statistics.median(one["durationMs"]["triggerExecution"] for one in progress))


def beyond(rounds: int, measure: Callable[[str], float]) -> list[float]:
    """Return the time of our sink beyond the sink that does nothing, by round."""
    taken = in_turns(SINKS, rounds, measure)
    return differences(taken["rocketmq"], taken["nothing"])


def first_row(rounds: int, name_server: str) -> list[float]:
    """Return the time from `send_arrow` of one row to its acknowledgement in a warm process, milliseconds, by round."""
    row = pa.table({"body": ["x" * 100], "keys": ["key"]})

    def send(producer: Producer) -> float:
        began = time.perf_counter()
        producer.send_arrow(row, topic="bench")
        return (time.perf_counter() - began) * 1000

    with Producer("bench-small", name_server=name_server) as producer:
        return [statistics.median(send(producer) for _ in range(100)) for _ in range(rounds + 1)][1:]


def figures(rounds: int) -> Iterator[Figure]:
    """Measure everything here."""
    with LocalCluster() as cluster:
        spark = session()
        spark.dataSource.register(NothingDataSource)
        options = {
            "rocketmq": {"nameServer": cluster.name_server, "topic": "bench"},
            "nothing": {},
        }
        few = rows_of(spark, 10)

        def median_write(sink: str) -> float:
            return statistics.median(batch_write(few, sink, options[sink]) for _ in range(9))

        yield Figure("ms to the first acknowledged row, in a warm worker", first_row(rounds, cluster.name_server))
        yield Figure("ms beyond a sink that does nothing: 10 rows", beyond(rounds, median_write), 30, True)
        yield Figure(
            "the same: a micro-batch of 1,000 rows",
            beyond(rounds, lambda sink: micro_batches(spark, sink, options[sink])),
            30,
            True,
        )
        spark.stop()


if __name__ == "__main__":
    show(figures, sys.argv[1:], 5)
