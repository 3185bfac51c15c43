"""The writers of batch and streaming queries, which send rows in tasks and end the write on the driver.

Spark pickles a writer into tasks and into the process that ends the write. So this module imports little: modules that
only one of these processes needs are imported where they are used. docs/internals/architecture.md#processes has the
processes and their connections.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext

from rocketmq_spark.errors import RocketMQError, RouteNotFoundException
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.spark.report import (
    CommitMessage,
    check_complete,
    log_summary,
    micro_batch_of,
    prepared_in,
    query_of,
    record_commit,
    summarise,
)
from rocketmq_spark.spark.spark_api import (
    STREAM_ARROW_WRITER,
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from rocketmq_spark.deliveries.effectively_once.attempt import Attempted, ResumePlan, ResumeReport
    from rocketmq_spark.deliveries.exactly_once.commit import CommitReport
    from rocketmq_spark.deliveries.exactly_once.plan import Prepared, TransactionPlan
    from rocketmq_spark.deliveries.log.records import Write

logger = logging.getLogger("rocketmq_spark.spark")

# PySpark 4.0 passes single rows, which become record batches of at most this many rows or bytes. 10,000 is the default
# of spark.sql.execution.arrow.maxRecordsPerBatch; 10,000 rows of 4 MiB would be 40 GiB.
_ROWS_PER_BATCH = 10_000
_BYTES_PER_BATCH = 4 * MIB

_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"


class RouteLookup(NamedTuple):
    """The result of the driver's look-up for a write; `queues` are those of an ordered write."""

    queues: Sequence[MessageQueue] | None = None
    # A name server or proxy has answered. A task that reaches none then knows that they are down.
    servers_reached: bool = False
    # The error, if no server was reached and the look-up is left to the tasks.
    unreached: str = ""


NO_LOOKUP = RouteLookup()


@dataclass(eq=False, repr=False)
class _PartitionWriter:
    """One write of one session; `write` runs in every task.

    `write_id` is the key of the reports, in a stream the query id. Only `RocketMQRowStreamWriter` needs `schema`.
    """

    options: SinkOptions
    accumulator: Accumulator[Any] | None
    write_id: str = ""
    lookup: RouteLookup = NO_LOOKUP
    schema: StructType | None = None
    # With ``delivery=exactlyOnce`` and ``effectivelyOnce``.
    plan: TransactionPlan | ResumePlan | None = None
    # With such a delivery, the identity that `foreach_batch` gives the write. The task's local properties would name
    # the query and the micro-batch only on classic Spark, and only if no other thread of the driver starts the write.
    micro_batch: Write | None = None

    def write(self, batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send every row of one partition; return when each is acknowledged (except with ``sendMode=oneway``)."""
        context = TaskContext.get()
        partition_id = context.partitionId() if context else 0
        if self.micro_batch is None:
            write_id = (context and context.getLocalProperty(_QUERY_ID)) or self.write_id
            batch_id = int((context and context.getLocalProperty(_BATCH_ID)) or -1)
        else:
            write_id, batch_id = self.micro_batch.query, self.micro_batch.batch_id
        recorder = Recorder(write_id, batch_id, partition_id)
        rows = (batch for batch in batches if batch.num_rows)
        prepared: Prepared | Attempted | None = None
        try:
            if self.options.effectively_once:
                prepared = self._resume(rows, recorder)
            elif self.options.exactly_once:
                prepared = self._prepare(rows, recorder)
            elif (first := next(rows, None)) is not None:
                self._send(recorder, chain([first], rows))
        except RocketMQError as exc:
            if batch_id >= 0:
                name_micro_batch(exc, write_id, batch_id)
            raise
        if self.plan is not None and prepared is None:
            recorder.record_skipped_write(str(self.plan.write_of(write_id, batch_id)))
        report = recorder.snapshot()
        if self.accumulator is not None:
            self.accumulator.add(report)
        latencies = self.options.metrics_path is not None
        histograms = self.accumulator is None
        return CommitMessage.of(report, histograms=histograms, latencies=latencies, prepared=prepared)

    def _resume(self, rows: Iterator[pa.RecordBatch], recorder: Recorder) -> Attempted | None:
        """Send the rows that no earlier attempt has stored; return None if the write was completed before."""
        from rocketmq_spark.deliveries.effectively_once.attempt import Attempt, ResumePlan, send_missing
        from rocketmq_spark.deliveries.log.brokers import Brokers
        from rocketmq_spark.sink.routes import acquire

        options, plan = self.options, self.plan
        assert isinstance(plan, ResumePlan)
        write = plan.write_of(recorder.write_id, recorder.batch_id)
        instance = acquire(options)
        try:
            attempt = Attempt(Brokers(options, instance), plan, write, recorder.partition_id)
            return attempt.run(recorder, rows, partial(send_missing, self._send))
        finally:
            instance.unregister(options.producer_group)

    def _prepare(self, rows: Iterator[pa.RecordBatch], recorder: Recorder) -> Prepared | None:
        """Send the rows as half messages; return None without sending if the write was decided before."""
        from rocketmq_spark.deliveries.exactly_once.commit import group_of
        from rocketmq_spark.deliveries.exactly_once.half_sender import half_rules
        from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector
        from rocketmq_spark.deliveries.exactly_once.plan import Prepared, TransactionPlan, check_stream

        options, plan = self.options, self.plan
        assert isinstance(plan, TransactionPlan)
        write = plan.write_of(recorder.write_id, recorder.batch_id)
        check_stream(options, plan, write)
        if plan.is_decided(write):
            return None
        group, collector = group_of(str(options.transactional_id), write, 1, plan.run_id), HalfCollector()
        if (first := next(rows, None)) is not None:
            rules = half_rules(group, options.transaction_timeout_ms, collector.append)
            self._send(recorder, chain([first], rows), rules=rules)
        return Prepared(group, collector.halves().to_bytes())

    def _end(
        self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None, *, aborted: bool = False
    ) -> CommitReport | ResumeReport | None:
        """Commit an exactly-once write, or roll it back; complete an effectively-once write (on the driver)."""
        options = self.options
        if self.plan is None or (aborted and options.effectively_once):
            return None
        from rocketmq_spark.deliveries.effectively_once import attempt as resume
        from rocketmq_spark.deliveries.exactly_once import plan
        from rocketmq_spark.deliveries.log.brokers import Brokers
        from rocketmq_spark.sink.routes import acquire

        write = self.micro_batch or self.plan.write_of(query_of(messages), -1 if batch_id is None else batch_id)
        prepared = prepared_in(messages)
        instance = acquire(options)
        try:
            if isinstance(self.plan, resume.ResumePlan):
                broker_names = summarise(messages).to_dict().keys()
                brokers, log = Brokers(options, instance), plan.log_of(options)
                return resume.complete(brokers, log, self.plan, write, prepared, broker_names)
            if not aborted:
                return plan.commit(options, instance, self.plan, write, prepared)
            try:
                plan.roll_back(options, instance, self.plan, write, prepared)
            except RocketMQError as exc:
                # A rollback only saves space, and must not hide the error of the write.
                logger.warning("rolling back %s failed; its rows stay invisible: %s", write, exc)
            return None
        finally:
            instance.unregister(options.producer_group)

    def _reached(self, batch_id: int) -> bool:
        # After a first micro-batch the addresses are right, even if the driver reached no server now.
        return self.lookup.servers_reached or batch_id > 0

    def _committed(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batch_id: int | None,
        report: CommitReport | ResumeReport | None,
    ) -> None:
        log_summary(messages, batch_id=batch_id, report=report)
        options = self.options
        if options.metrics_path is not None:
            openmetrics = options.metrics_format == "openmetrics"
            record_commit(
                options.metrics_path,
                messages,
                self.write_id,
                batch_id,
                now=time.time(),
                report=report,
                openmetrics=openmetrics,
            )

    def _send(
        self, recorder: Recorder, batches: Iterator[pa.RecordBatch], write_id: str | None = None, **delivery: Any
    ) -> None:
        from rocketmq_spark.sink.routes import acquire
        from rocketmq_spark.sink.task import write_rows

        options = self.options
        open_trace_sender = None
        if options.enable_trace:
            # Only tasks with message trace load the producer's modules.
            from rocketmq_spark.producer.service import batch_trace_sender

            open_trace_sender = partial(batch_trace_sender, options)
        instance = acquire(options)
        try:
            write_rows(
                options,
                instance,
                recorder,
                batches,
                # Within foreachBatch the recorder has the query's id, which all writes of a micro-batch share.
                write_id=write_id or self.write_id or recorder.write_id,
                queues=self.lookup.queues,
                servers_reached=self._reached(recorder.batch_id),
                open_trace_sender=open_trace_sender,
                **delivery,
            )
        finally:
            instance.unregister(options.producer_group)


class RocketMQBatchWriter(_PartitionWriter, DataSourceArrowWriter):
    """The writer of ``df.write``."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the write's figures, and append them to ``metricsPath`` (on the driver, after all tasks succeeded)."""
        check_complete(messages, None)
        report = self._end(messages, None)
        self._committed(messages, micro_batch_of(messages), report)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what a failed write has stored, as far as known (runs on the driver)."""
        self._end(messages, None, aborted=True)
        log_summary(messages, micro_batch_of(messages), aborted=True)


class _StreamWriter(_PartitionWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log a micro-batch's figures, and append them to ``metricsPath`` (runs on the driver).

        If this raises, Spark does not commit an epoch of a continuous trigger. It only logs the error, and continues.
        """
        check_complete(messages, batchId)
        # If a query's first micro-batch has stored nothing, the address is probably wrong. Later micro-batches would
        # assume an outage.
        if batchId == 0 and self.lookup.unreached and not summarise(messages).to_dict():
            raise RouteNotFoundException(self.lookup.unreached, unreachable=True)
        report = self._end(messages, batchId)
        self._committed(messages, batchId, report)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what an unfinished micro-batch has stored. Spark also calls this for a query that stops in mid-batch."""
        self._end(messages, batchId, aborted=True)
        log_summary(messages, batch_id=batchId, aborted=True)


class RocketMQRowStreamWriter(_StreamWriter, DataSourceStreamWriter):
    """The writer of ``df.writeStream`` on PySpark 4.0, which passes rows: `write` makes record batches of them."""

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        from pyspark.sql.conversion import LocalDataToArrowConversion

        assert self.schema is not None
        to_table = partial(LocalDataToArrowConversion.convert, schema=self.schema, use_large_var_types=False)
        return super().write(chain.from_iterable(to_table(chunk).to_batches() for chunk in chunks_of(iterator)))


def name_micro_batch(error: RocketMQError, query_id: str, batch_id: int) -> None:
    """Begin the text of a task's error with the micro-batch, unless the text names it already.

    Spark's own error names only stage and task, whose numbers continue from batch to batch.
    """
    where = f"micro-batch {batch_id} of query {query_id}"
    if where not in str(error):
        error.args = (f"{where}: {error}", *error.args[1:])


def chunks_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists, each up to the row that reaches `_ROWS_PER_BATCH` or `_BYTES_PER_BATCH`."""
    chunk: list[Row] = []
    nbytes = 0
    for row in rows:
        chunk.append(row)
        nbytes += _nbytes(row)
        if len(chunk) >= _ROWS_PER_BATCH or nbytes >= _BYTES_PER_BATCH:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _nbytes(value: object) -> int:
    """Return the memory of a row's value, with everything that it contains."""
    inner: Iterable[object] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        inner = chain(value, value.values())
    return sys.getsizeof(value) + sum(map(_nbytes, inner))


if STREAM_ARROW_WRITER is not None:

    class RocketMQStreamWriter(_StreamWriter, STREAM_ARROW_WRITER):  # type: ignore[misc, valid-type]
        """The writer of ``df.writeStream`` (PySpark 4.1 and newer)."""


def stream_writer(
    options: SinkOptions,
    accumulator: Accumulator[Any] | None,
    schema: StructType,
    lookup: RouteLookup = NO_LOOKUP,
    plan: TransactionPlan | ResumePlan | None = None,
) -> DataSourceStreamWriter:
    """Return the streaming writer for this PySpark release."""
    if STREAM_ARROW_WRITER is None:
        return RocketMQRowStreamWriter(options, accumulator, lookup=lookup, schema=schema, plan=plan)
    return RocketMQStreamWriter(options, accumulator, lookup=lookup, plan=plan)
