"""`write(df)` and `foreach_batch()`: the sink as functions, for PySpark 3.5, which has no Python data sources.

They run the writer of ``df.write`` in the tasks of `DataFrame.mapInArrow`, whose rows are the reports that the data
source returns as commit messages. They work on newer releases, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.options.kinds import option_text
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from rocketmq_spark.spark.spark_api import WriterCommitMessage
    from rocketmq_spark.spark.writer import RocketMQBatchWriter

logger = logging.getLogger("rocketmq_spark.spark")

# The report of a task. The last columns are those of `Prepared` and `Attempted`.
_REPORT: Final = (
    "writeId string, batchId int, partitionId int, packed binary, histograms boolean, kind string, sendGroup string, "
    "halves binary, begun boolean, recovered boolean"
)


def write(frame: DataFrame, **options: str | int | bool) -> WriteSummary:
    """Write a DataFrame, and return what its tasks have measured, when every row is stored and acknowledged.

    `options` and columns are those of ``df.write.format("rocketmq")``, and so are the guarantee and the errors, which
    Spark wraps if they come from a task. Needs no `register`. On Spark Connect the option ``maxRatePerSecond`` needs
    ``maxRateTasks``.

    >>> written = rocketmq_spark.write(df, nameServer="127.0.0.1:9876", topic="orders")  # doctest: +SKIP
    >>> written.show()  # doctest: +SKIP
    """
    return _write(frame, options)


def _write(frame: DataFrame, options: Mapping[str, str | int | bool], batch_id: int | None = None) -> WriteSummary:
    """Write a DataFrame; `batch_id` is the micro-batch that it is, None for other writes."""
    from rocketmq_spark.spark.planning import plan_batch_write
    from rocketmq_spark.spark.report import report_cause, summarise

    texts = {name: option_text(value) for name, value in options.items()}
    writer = plan_batch_write(texts, arrow_schema(frame.schema), _facts(frame), logger.warning, batch_id)
    try:
        rows = frame.mapInArrow(partial(_write_partition, writer), _REPORT).collect()
    except BaseException as exc:
        # The reports of tasks that have succeeded are lost, so an exactly-once write leaves its half messages.
        writer.abort([None])
        report_cause(exc, "the write")
        raise
    messages: list[WriterCommitMessage | None] = [_message(row) for row in rows]
    if not messages and frame.isEmpty():
        # A DataFrame without partitions has no tasks. Spark's own writers then start one.
        messages = [writer.write(iter(()))]
    writer.commit(messages)
    return summarise(messages)


def foreach_batch(**options: str | int | bool) -> Callable[[DataFrame, int], None]:
    """Return a function for ``writeStream.foreachBatch`` that writes each micro-batch with `write`.

    With ``delivery=effectivelyOnce`` or ``exactlyOnce`` a repeated micro-batch is written once, also by other threads
    and on Spark Connect. Its identity is ``transactionalId``, the topic and its number. A query with a new checkpoint
    begins again with number 0, and needs another ``transactionalId``. So does a second write of the same micro-batch,
    except one with ``effectivelyOnce`` to another topic.

    >>> query = df.writeStream.foreachBatch(rocketmq_spark.foreach_batch(nameServer=..., topic=...))  # doctest: +SKIP
    """

    def write_batch(frame: DataFrame, batch_id: int) -> None:
        _write(frame, options, batch_id)

    return write_batch


def _facts(frame: DataFrame) -> SessionFacts:
    session = frame.sparkSession
    speculation = (session.conf.get("spark.speculation", "false") or "").lower() == "true"
    if type(session).__module__.startswith("pyspark.sql.connect."):
        return SessionFacts(speculation=speculation)
    return SessionFacts(speculation=speculation, parallelism=session.sparkContext.defaultParallelism)


def _write_partition(writer: RocketMQBatchWriter, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Send one partition (runs in a task), and yield its report as a row."""
    import pyarrow as pa

    report: Any = writer.write(batches)
    prepared = report.prepared
    kind = "" if prepared is None else type(prepared).__name__
    row = {
        "writeId": report.write_id,
        "batchId": report.batch_id,
        "partitionId": report.partition_id,
        "packed": report.packed,
        "histograms": report.histograms,
        "kind": kind,
        "sendGroup": prepared.group if kind == "Prepared" else None,
        "halves": prepared.halves if kind == "Prepared" else None,
        "begun": prepared.begun if kind == "Attempted" else None,
        "recovered": prepared.recovered if kind == "Attempted" else None,
    }
    yield pa.RecordBatch.from_pylist([row], _schema())


def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {"string": pa.string(), "int": pa.int32(), "binary": pa.binary(), "boolean": pa.bool_()}
    names = (column.split(" ") for column in _REPORT.split(", "))
    return pa.schema([(name, types[kind]) for name, kind in names])


def _message(row: Any) -> WriterCommitMessage:
    """Return the commit message that a task has reported as a row."""
    from rocketmq_spark.deliveries.effectively_once.attempt import Attempted
    from rocketmq_spark.deliveries.exactly_once.plan import Prepared
    from rocketmq_spark.spark.report import CommitMessage

    prepared: Prepared | Attempted | None = None
    if row.kind == "Prepared":
        prepared = Prepared(row.sendGroup, bytes(row.halves))
    elif row.kind == "Attempted":
        prepared = Attempted(row.partitionId, row.begun, row.recovered)
    return CommitMessage(row.writeId, row.batchId, row.partitionId, bytes(row.packed), row.histograms, prepared)
