"""The writers of batch and streaming queries, which send rows in tasks and end the write on the driver.

Spark pickles a writer into tasks and into the process that ends the write. So this module imports little: modules that
only one of these processes needs are imported where they are used. docs/internals/architecture.md#processes has the
processes and their connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext

from rocketmq_spark.errors import RocketMQError, RouteNotFoundException
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.spark.partition import NO_LOOKUP, RouteLookup, name_micro_batch, open_instance, send_rows
from rocketmq_spark.spark.report import (
    CommitMessage,
    check_complete,
    log_summary,
    micro_batch_of,
    record_commit,
    results_of,
    summarise,
)
from rocketmq_spark.spark.spark_api import (
    QUERY_ID,
    STREAM_ARROW_WRITER,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from rocketmq_spark.spark.worker_log import is_kept, log_record

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from rocketmq_spark.deliveries.base import Delivery, Write

_BATCH_ID = "streaming.sql.batchId"


def names_of_task(write: Write | None, local_property: Callable[[str], str | None], save_id: str) -> tuple[str, int]:
    """Return the query and the micro-batch of a task; `save_id` and -1 if it has none.

    `write` is what the driver knows before the tasks.
    """
    if write is not None and write.query:
        # The local properties would name the query and the micro-batch only on classic Spark, and only if no other
        # thread of the driver starts the write.
        return write.query, write.batch_id
    return local_property(QUERY_ID) or save_id, int(local_property(_BATCH_ID) or -1)


@dataclass(eq=False, repr=False)
class _PartitionWriter:
    """One write of one session; `write` runs in every task. Only `RocketMQRowStreamWriter` needs `schema`."""

    delivery: Delivery[Any]
    accumulator: Accumulator[Any] | None
    save_id: str = ""  # Of one `save`; empty in a stream
    lookup: RouteLookup = NO_LOOKUP
    schema: StructType | None = None
    metrics_id: str = ""  # Of the metrics on Spark Connect; empty in a stream

    @property
    def options(self) -> SinkOptions:
        return self.delivery.options

    def write(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send every row of one partition; return when each is acknowledged (except with ``sendMode=oneway``)."""
        from rocketmq_spark.deliveries.base import PartitionTask

        context = TaskContext.get()
        partition_id = context.partitionId() if context else 0
        local_property = context.getLocalProperty if context else lambda _: None
        query_id, batch_id = names_of_task(self.delivery.write, local_property, self.save_id)
        recorder = Recorder(query_id, batch_id, partition_id)
        rows = (batch for batch in batches if batch.num_rows)
        send = partial(send_rows, self.options, recorder, self.lookup, self.save_id)
        task = PartitionTask(recorder, rows, partial(open_instance, self.options), send)
        try:
            result = self.delivery.write_partition(task)
        except RocketMQError as exc:
            if batch_id >= 0:
                name_micro_batch(exc, query_id, batch_id)
            raise
        report = recorder.snapshot()
        if self.accumulator is not None:
            self.accumulator.add(report)
        latencies, whole = self.options.metrics_path is not None, bool(self.metrics_id) and is_kept()
        histograms = self.accumulator is None
        return CommitMessage.of(report, histograms=histograms, latencies=latencies, whole=whole, result=result)

    def _complete(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> None:
        """End the write, log its figures, and append them to ``metricsPath``."""
        options = self.options
        report = self.delivery.complete(partial(open_instance, options), results_of(messages, batch_id))
        shown = micro_batch_of(messages) if batch_id is None else batch_id
        log_summary(messages, shown, report=report)
        if options.metrics_path is not None:
            record_commit(
                options.metrics_path,
                messages,
                self.save_id,
                shown,
                now=time.time(),
                report=report,
                openmetrics=options.metrics_format == "openmetrics",
            )

    def _abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> None:
        self.delivery.abort(partial(open_instance, self.options), results_of(messages, batch_id))
        log_summary(messages, micro_batch_of(messages) if batch_id is None else batch_id, aborted=True)


class RocketMQBatchWriter(_PartitionWriter, DataSourceArrowWriter):
    """The writer of ``df.write``."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """End the write (on the driver, after all tasks succeeded)."""
        check_complete(messages, None)
        self._complete(messages, None)
        self._record(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what a failed write has stored, as far as known (runs on the driver)."""
        self._abort(messages, None)
        self._record(messages)

    def _record(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the measures of the tasks that succeeded, for metrics on Spark Connect."""
        if self.metrics_id and is_kept():
            summary = summarise(messages)
            for write_id, batch_id in summary.keys()[:1]:
                log_record(self.metrics_id, write_id, batch_id, summary.measures())


class _StreamWriter(_PartitionWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """End a micro-batch (runs on the driver).

        If this raises, Spark does not commit an epoch of a continuous trigger. It only logs the error, and continues.
        """
        check_complete(messages, batchId)
        # If a query's first micro-batch has stored nothing, the address is probably wrong. Later micro-batches would
        # assume an outage.
        if batchId == 0 and self.lookup.unreached and not summarise(messages).to_dict():
            raise RouteNotFoundException(self.lookup.unreached, unreachable=True)
        self._complete(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what an unfinished micro-batch has stored. Spark also calls this for a query that stops in mid-batch."""
        self._abort(messages, batchId)


class RocketMQRowStreamWriter(_StreamWriter, DataSourceStreamWriter):
    """The writer of ``df.writeStream`` on PySpark 4.0, which passes rows: `write` makes record batches of them."""

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        from pyspark.sql.conversion import LocalDataToArrowConversion

        from rocketmq_spark.spark.row_chunks import chunks_of

        assert self.schema is not None
        to_table = partial(LocalDataToArrowConversion.convert, schema=self.schema, use_large_var_types=False)
        return super().write(chain.from_iterable(to_table(chunk).to_batches() for chunk in chunks_of(iterator)))


if STREAM_ARROW_WRITER is not None:

    class RocketMQStreamWriter(_StreamWriter, STREAM_ARROW_WRITER):  # type: ignore[misc, valid-type]
        """The writer of ``df.writeStream`` (PySpark 4.1 and newer)."""


def stream_writer(
    delivery: Delivery[Any],
    accumulator: Accumulator[Any] | None,
    schema: StructType,
    lookup: RouteLookup = NO_LOOKUP,
) -> DataSourceStreamWriter:
    """Return the streaming writer for this PySpark release."""
    if STREAM_ARROW_WRITER is None:
        return RocketMQRowStreamWriter(delivery, accumulator, lookup=lookup, schema=schema)
    return RocketMQStreamWriter(delivery, accumulator, lookup=lookup)
