"""`write(df)` and `foreach_batch()`: the sink as functions, for PySpark 3.5, which has no Python data sources.

They run the writer of ``df.write`` in the tasks of `DataFrame.mapInArrow`, whose rows are the reports that the data
source returns as commit messages. They work on newer releases, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.options.kinds import option_texts
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from rocketmq_spark.deliveries.base import PartitionResult
    from rocketmq_spark.spark.spark_api import WriterCommitMessage
    from rocketmq_spark.spark.writer import RocketMQBatchWriter

logger = logging.getLogger("rocketmq_spark.spark")

# The columns of a delivery's result begin so.
_RESULT: Final = "result_"
# The types of columns, by the types of fields.
_SQL: Final = {"str": "string", "int": "int", "bool": "boolean", "bytes": "binary"}
_ARROW: Final = {"str": "string", "int": "int32", "bool": "bool_", "bytes": "binary"}


def write(frame: DataFrame, **options: str | int | bool | None) -> WriteSummary:
    """Write a DataFrame, and return what its tasks have measured, when every row is stored and acknowledged.

    `options` and columns are those of ``df.write.format("rocketmq")``, and so are the guarantee and the errors, which
    Spark wraps if they come from a task. An option of None is not given. Needs no `register`. On Spark Connect the
    option ``maxRatePerSecond`` needs ``maxRateTasks``.

    >>> written = rocketmq_spark.write(df, nameServer="127.0.0.1:9876", topic="orders")  # doctest: +SKIP
    >>> written.show()  # doctest: +SKIP
    """
    return _write(frame, options)


def _write(
    frame: DataFrame, options: Mapping[str, str | int | bool | None], batch_id: int | None = None
) -> WriteSummary:
    """Write a DataFrame; `batch_id` is the micro-batch that it is, None for other writes."""
    from rocketmq_spark.spark.interrupts import cancelled_by_interrupt
    from rocketmq_spark.spark.planning import plan_batch_write
    from rocketmq_spark.spark.report import report_cause, summarise

    texts = option_texts(options)
    session = SessionFacts.of(frame.sparkSession)
    writer = plan_batch_write(texts, arrow_schema(frame.schema), session, logger.warning, batch_id)
    try:
        columns = ", ".join(f"{name} {_SQL[kind]}" for name, kind in _columns(writer).items())
        with cancelled_by_interrupt(frame.sparkSession):
            rows = frame.mapInArrow(partial(_write_partition, writer), columns).collect()
    except BaseException as exc:
        # The reports of tasks that have succeeded are lost, so an exactly-once write leaves its half messages.
        writer.abort([None])
        report_cause(exc, "the write")
        raise
    messages: list[WriterCommitMessage | None] = [_message_of(row, writer.delivery.RESULT) for row in rows]
    if not messages and frame.isEmpty():
        # A DataFrame without partitions has no tasks. Spark's own writers then start one.
        messages = [writer.write(iter(()))]
    writer.commit(messages)
    return summarise(messages)


def foreach_batch(**options: str | int | bool | None) -> Callable[[DataFrame, int], None]:
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


def _write_partition(writer: RocketMQBatchWriter, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Send one partition (runs in a task), and yield its commit message as a row."""
    import pyarrow as pa

    message: Any = writer.write(batches)
    row: dict[str, Any] = {name: getattr(message, name) for name in _names(type(message))}
    if message.result is not None:
        row |= {f"{_RESULT}{name}": getattr(message.result, name) for name in _names(type(message.result))}
    columns = {name: pa.array([row.get(name)], getattr(pa, _ARROW[kind])()) for name, kind in _columns(writer).items()}
    yield pa.record_batch(columns)


def _names(of: type[Any]) -> dict[str, str]:
    """Return the fields of a dataclass, except for a `result`, with their types."""
    return {field.name: str(field.type) for field in fields(of) if field.name != "result"}


def _columns(writer: RocketMQBatchWriter) -> dict[str, str]:
    """Return the columns of a commit message, with the types of its fields."""
    from rocketmq_spark.spark.report import CommitMessage

    result = {f"{_RESULT}{name}": kind for name, kind in _names(writer.delivery.RESULT).items()}
    return {**_names(CommitMessage), **result}


def _message_of(row: Any, result: type[PartitionResult]) -> WriterCommitMessage:
    """Return the commit message that a task has reported as a row."""
    from rocketmq_spark.spark.report import CommitMessage

    values: dict[str, Any] = {
        name: bytes(value) if isinstance(value, bytearray) else value for name, value in row.asDict().items()
    }
    reported = {name: values.pop(f"{_RESULT}{name}") for name in _names(result)}
    is_none = all(value is None for value in reported.values())
    return CommitMessage(**values, result=None if is_none else result(**reported))
