"""Numbered rows for tests of reads, and the rows that a streaming query has read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark.options.parsing import parse_source_options
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.producer.producer import Producer
from tests.support.processes import wait_for
from tests.support.writes import await_messages, messages_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from rocketmq_spark.cluster import LocalCluster
    from tests.support.cluster import SharedCluster


class Feed:
    """Sends the next rows, with their numbers as keys and bodies, and returns when consumers can read them.

    Attributes
    ----------
    sent : int
        Number of rows sent so far.
    """

    def __init__(self, producer: Producer, name_server: str, topic: str) -> None:
        self._producer = producer
        self._name_server = name_server
        self._topic = topic
        self.sent = 0

    def __call__(
        self,
        rows: int,
        *,
        topic: str | None = None,
        to: tuple[str, int] | None = None,
        nbytes: int = 20,
        awaited: bool = True,
        **options: Any,
    ) -> list[str]:
        """Send `rows` rows of `nbytes` bytes and return their keys.

        They go to all queues by turns, or `to` one queue (broker name, queue id). Set `awaited` to False if no name
        server runs: the feed then cannot wait until the rows are readable. `options` are options of the sink.
        """
        where = topic or self._topic
        numbers = range(self.sent, self.sent + rows)
        self.sent += rows
        keys = [f"k{number}" for number in numbers]
        columns: dict[str, Iterable[object]] = {"body": [f"{n}".ljust(nbytes, ".") for n in numbers], "keys": keys}
        if to is not None:
            columns |= {"brokerName": [to[0]] * rows, "queueId": pa.array([to[1]] * rows, pa.int32())}
            options["queueSelector"] = "column"
        before = messages_in(self._name_server, where) if awaited else 0
        self._producer.send_arrow(pa.table(columns), where, **options)
        if awaited:
            await_messages(self._name_server, where, before + rows)
        return keys


def source_options(
    cluster: LocalCluster | SharedCluster, topic: str, *, streaming: bool = False, **options: object
) -> SourceOptions:
    """Return the options of a read of a topic."""
    texts = {name: str(value) for name, value in options.items()}
    given = {"nameServer": cluster.name_server, "subscribe": topic, **texts}
    return parse_source_options(given, {}, streaming=streaming)


def column_of(batches: Iterable[pa.RecordBatch], name: str) -> Iterator[Any]:
    """Yield the values of a column of batches."""
    for batch in batches:
        yield from batch.column(name).to_pylist()


class Kept:
    """Keeps the rows of each micro-batch in this process; passed to `foreachBatch`."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, str, int]]] = []
        self.then: Callable[[int], object] = lambda _: None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        rows = batch.select("keys", "brokerName", "queueId").collect()
        if rows:
            self.batches.append([tuple(row) for row in rows])
        self.then(batch_id)

    @property
    def keys(self) -> Counter[str]:
        return Counter(key for batch in self.batches for key, _, _ in batch)


def once(keys: Iterable[str]) -> Counter[str]:
    """Return the expected counts: each key once."""
    return Counter(dict.fromkeys(keys, 1))


def start(spark: SparkSession, topic: str, checkpoint: Path, **options: str) -> StreamingQuery:
    """Start a query that sends the numbers from 0 on, 2,000 a second, in two partitions, with options of the sink."""
    rates = spark.readStream.format("rate").option("rowsPerSecond", 2000).option("numPartitions", 2).load()
    return (
        rates.selectExpr("cast(value as string) as body", "concat('k', value) as keys")
        .writeStream.format("rocketmq")
        .options(topic=topic, checkpointLocation=str(checkpoint), **options)
        .trigger(processingTime="500 milliseconds")
        .start()
    )


def numbers(spark: SparkSession, rows: int, partitions: int = 2) -> DataFrame:
    """Return a stream whose every micro-batch has the next `rows` numbers as `value`, however often it is read."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return source.option("numPartitions", partitions).load().select("value")


def run_until(query: StreamingQuery, batches: int) -> int:
    """Wait for `batches` micro-batches with rows, stop the query, and return the number of rows that it reports."""

    def has_run() -> bool:
        assert query.exception() is None
        return sum(progress.numInputRows > 0 for progress in query.recentProgress) >= batches

    wait_for(has_run)
    rows = sum(progress.numInputRows for progress in query.recentProgress)
    query.stop()
    return rows


def write_files(
    spark: SparkSession, name_server: str, topic: str, folder: Path, checkpoint: str, **options: str
) -> None:
    """Write the rows of the files in ``in`` that are new since the checkpoint, one file per micro-batch."""
    query = (
        spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).text(str(folder / "in"))
        .writeStream.format("rocketmq")
        .options(nameServer=name_server, checkpointLocation=str(folder / checkpoint), **options)
        .trigger(availableNow=True)
        .start(topic)
    )  # fmt: skip
    query.awaitTermination(180)
