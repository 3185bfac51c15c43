"""A Spark session that runs a streaming query for each line on stdin; each answer is a line of JSON: ms by percentile.

Run: python spark_latency.py NAME_SERVER SOURCE TARGET, then lines "SINK [SECONDS [QUERY]]". SINK is ``rocketmq`` or
``arrivals``. SECONDS are measured. With QUERY the session has `LOW_LATENCY`; QUERY ``dropDuplicates`` drops duplicates.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

import rocketmq_spark
from tests.benchmarks.spark_sink import session
from tests.support.reading import read_topic

WARM_UP = 5.0
PATIENCE = 60.0
MEASURED = 15.0
# Settings for a low latency, beside the default trigger, which starts a micro-batch when the last one has ended.
LOW_LATENCY = {
    # A task for each processor.
    "spark.sql.shuffle.partitions": "2",
    # It starts fewer processes for each file of a checkpoint on a local disk.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # A micro-batch saves what has changed of the state.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
# Digits of a time in nanoseconds.
DIGITS = 19


class ArrivalWriter(DataSourceStreamArrowWriter):
    """Saves when each row was sent and when it came, in a file for each task."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        pairs = []
        for batch in iterator:
            now = time.time_ns()
            pairs += [(sent, now) for sent in sent_times(batch.column("body"))]
        np.save(self._folder / f"{uuid.uuid4().hex}.npy", np.array(pairs, np.int64).reshape(-1, 2))
        return WriterCommitMessage()


class ArrivalDataSource(DataSource):
    """``format("arrivals")``; the option ``folder`` has the files."""

    @classmethod
    def name(cls) -> str:
        return "arrivals"

    def streamWriter(self, schema: StructType, overwrite: bool) -> ArrivalWriter:  # noqa: N802 - Spark's name
        return ArrivalWriter(self.options["folder"])


def sent_times(bodies: pa.Array) -> list[int]:
    """Return the times in the bodies, epoch nanoseconds."""
    texts = pc.binary_slice(bodies.cast(pa.binary()), 0, DIGITS).cast(pa.string())
    return list(texts.cast(pa.int64()).to_pylist())


def batches(query: StreamingQuery) -> int:
    """Return the number of the last micro-batch that has ended, -1 at first."""
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def await_batch(query: StreamingQuery, number: int) -> None:
    """Wait until this micro-batch has ended, or the query, at most `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while batches(query) < number and query.isActive and time.monotonic() < deadline:
        time.sleep(0.1)


def run(
    spark: SparkSession,
    name_server: str,
    source: str,
    target: str,
    sink: str,
    measured: float = MEASURED,
    query_kind: str = "",
) -> dict[str, float]:
    """Return percentiles of the latency, milliseconds, of the messages that were sent after the warm-up."""
    rows = spark.readStream.format("rocketmq").option("nameServer", name_server).option("subscribe", source).load()
    rows = rows.select("body")
    for name, value in LOW_LATENCY.items() if query_kind else ():
        spark.conf.set(name, value)
    if query_kind == "dropDuplicates":
        rows = rows.dropDuplicates()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as checkpoint:
        options = {"nameServer": name_server, "topic": target} if sink == "rocketmq" else {"folder": folder}
        writer = rows.writeStream.format(sink).options(**options)
        query = writer.option("checkpointLocation", checkpoint).start()
        await_batch(query, 0)
        time.sleep(WARM_UP)
        began = time.time_ns()
        time.sleep(measured)
        ended = time.time_ns()
        # The micro-batch after the running one has the last messages that were sent until now.
        await_batch(query, batches(query) + 2)
        query.stop()
        if query.exception() is not None:
            raise SystemExit(f"the query has failed: {query.exception()}")
        if sink == "rocketmq":
            found = read_topic(name_server, target, within=5.0)
            pairs = [(int(one.body[:DIGITS]), one.store_timestamp * 1_000_000) for one in found]
            times = np.array(pairs, np.int64)
        else:
            times = np.concatenate([np.load(file) for file in Path(folder).glob("*.npy")])
    times = times[(times[:, 0] >= began) & (times[:, 0] < ended)]
    expected = 1000 * measured
    if not 0.9 * expected <= len(times) <= 1.1 * expected:
        raise SystemExit(f"{len(times)} messages of about {expected:.0f} have come: the query or the sender is slow")
    latencies = (times[:, 1] - times[:, 0]) / 1e6
    return {"p50": float(np.percentile(latencies, 50)), "p99": float(np.percentile(latencies, 99))}


def main(name_server: str, source: str, target: str) -> None:
    spark = session("")
    rocketmq_spark.register(spark)
    spark.dataSource.register(ArrivalDataSource)
    for line in sys.stdin:
        sink, *rest = line.split()
        measured = float(rest[0]) if rest else MEASURED
        print(json.dumps(run(spark, name_server, source, target, sink, measured, *rest[1:])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
