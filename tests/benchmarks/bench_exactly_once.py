"""Exactly-once writes: rows per second, the cost of a decision, and the memory of the driver.

Run: make bench PART=exactly_once (python -m tests.benchmarks.bench_exactly_once [rounds])

The rows have 100 bytes. Each round also writes the same rows with the default delivery.
"""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
import uuid
from collections.abc import Iterator
from contextlib import nullcontext

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark
from rocketmq_spark import LocalCluster
from rocketmq_spark.deliveries.base import TaskResults, Write
from rocketmq_spark.deliveries.exactly_once.commit import group_of
from rocketmq_spark.deliveries.exactly_once.delivery import ExactlyOnce, Prepared
from rocketmq_spark.deliveries.exactly_once.half_sender import half_rules
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import new_transport
from rocketmq_spark.sink.task import SendContext, write_rows
from tests.benchmarks.contest import ROOT, Figure, in_turns, ratios, show

ROWS = 240_000
MICRO_BATCH = 1_000
TOPIC = "bench"
ONCE = {"delivery": "exactlyOnce", "transactionalId": "bench", "transactionTimeoutMs": "600000"}


def rate(rows: DataFrame, options: dict[str, str]) -> float:
    """Return the thousands of rows per second of a write."""
    if "transactionalId" in options:
        options = {**options, "writeId": uuid.uuid4().hex}
    began = time.perf_counter()
    rows.write.format("rocketmq").options(**options).mode("append").save()
    return ROWS / (time.perf_counter() - began) / 1000


class Driver:
    """Plans, prepares and commits micro-batches in this process."""

    def __init__(self, name_server: str) -> None:
        given = {"nameServer": name_server, "topic": TOPIC, **ONCE, "transactionalId": "micro-batches"}
        self._options = parse_sink_options(given, {})
        connection = self._options.connection
        self._instance = ClientInstance("bench", new_transport(connection, "bench"), connection)
        self._instance.start()
        # An instance without a producer closes after a while.
        self._instance.register(self._options.producer_group)
        self._number = 0

    def prepared(self, rows: int) -> tuple[ExactlyOnce, Write, Prepared]:
        """Plan a micro-batch, and store its rows as half messages."""
        planned = ExactlyOnce.plan(self._options, lambda: nullcontext(self._instance))
        write = Write(str(self._number), "query")
        self._number += 1
        group, collector = group_of("micro-batches", write, 1, planned.planned.run_id), HalfCollector()
        batch = pa.record_batch({"body": pa.array([b"x" * 100] * rows)})
        context = SendContext(options=self._options, instance=self._instance)
        rules = half_rules(group, self._options.transaction_timeout_ms, collector.append)
        write_rows(context, Recorder("query", self._number, 0), iter([batch]), "query", rules)
        return planned, write, Prepared(group, collector.halves().to_bytes())

    def commit(self, planned: ExactlyOnce, write: Write, prepared: Prepared) -> CommitReport:
        """Commit a micro-batch."""
        results = TaskResults([prepared], write.query, write.batch_id)
        return planned.complete(lambda: nullcontext(self._instance), results)

    def bytes_per_row(self, rows: int) -> float:
        """Return the memory of a commit at its peak, with the messages of the tasks."""
        prepared = self.prepared(rows)
        tracemalloc.start()
        self.commit(*prepared)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return (peak + len(prepared[2].halves)) / rows

    def close(self) -> None:
        """Close the connections."""
        self._instance.unregister(self._options.producer_group)
        self._instance.close()


def session() -> SparkSession:
    """Return a session of this process with two task threads, whose workers import this package."""
    os.environ["PYSPARK_PYTHON"], os.environ["PYTHONPATH"] = sys.executable, str(ROOT)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    rocketmq_spark.register(spark)
    return spark


def figures(rounds: int) -> Iterator[Figure]:
    """Measure everything here."""
    with LocalCluster() as cluster, rocketmq_spark.Admin(cluster.name_server) as admin:
        admin.create_topic(TOPIC, 8)
        spark = session()
        rows = spark.range(0, ROWS, 1, 2).selectExpr("rpad(cast(id AS string), 100, '.') AS body")
        plain = {"nameServer": cluster.name_server, "topic": TOPIC}
        deliveries = {"exactlyOnce": plain | ONCE, "atLeastOnce": plain}
        taken = in_turns(list(deliveries), rounds, lambda name: rate(rows, deliveries[name]))
        spark.stop()
        once, usual = taken["exactlyOnce"], taken["atLeastOnce"]
        yield Figure("exactly-once writes, thousand rows/s", once, 12)
        yield Figure("exactly-once writes / writes with the default delivery", ratios(once, usual))
        driver = Driver(cluster.name_server)
        for _ in range(20):
            driver.commit(*driver.prepared(MICRO_BATCH))
        reports = [driver.commit(*driver.prepared(MICRO_BATCH)) for _ in range(10 * rounds)]
        decisions = [report.decide_s * 1000 for report in reports]
        yield Figure("ms for floors and decision of a micro-batch of 1,000 rows", decisions, 50, True)
        memory = [driver.bytes_per_row(100_000) for _ in range(rounds)]
        yield Figure("bytes of the driver per row of a write", memory, 64, True)
        driver.close()


if __name__ == "__main__":
    show(figures, sys.argv[1:], 3)
