"""What a partition task runs, for batch and for streams.

    Arrow record batches -> RemotingBatcher -> BatchSender -> PartitionReport -> accumulator, commit message

Rule 1: what Spark pickles holds options and ids only; connections are made inside `write`, after the fork.
Rule 2: a task that returns has every row acknowledged; anything else is an exception. (``sendMode=oneway`` has no
        acknowledgements, and says so wherever it counts rows.)
Rule 3: nothing is opened for a partition without rows.

Follows design.md sections 2 and 6; Spark's side of it is in anchors/connectors.md section 6.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pyspark.sql.datasource as spark_datasource
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from rocketmq_spark.client.connect import client_id_of, new_transport
from rocketmq_spark.client.credentials import with_variables
from rocketmq_spark.errors import MQBrokerException, RocketMQError, RouteNotFoundException, TopicRouteStaleException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.namespace import wrap
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.client_instance import ClientInstance, acquire_instance
from rocketmq_spark.spark.metrics_file import record_commit
from rocketmq_spark.spark.ordered_queues import QueueMemory
from rocketmq_spark.spark.report import CommitMessage, log_summary, micro_batch_of, summarise
from rocketmq_spark.wire.grpc_codes import Code

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql import Row
    from pyspark.sql.types import StructType


logger = logging.getLogger("rocketmq_spark.spark")

# Rows that PySpark 4.0 hands over one by one become record batches of at most this many rows, Spark's own default for
# spark.sql.execution.arrow.maxRecordsPerBatch, or bytes: 10,000 rows of 4 MiB would be 40 GiB.
_ROWS_PER_BATCH = 10_000
_BYTES_PER_BATCH = 4 * 1024 * 1024

# What a proxy may say that is asked about the template topic: it is one of its own, or the user has no right to it.
_REFUSALS = frozenset({Code.ILLEGAL_TOPIC, Code.UNAUTHORIZED, Code.FORBIDDEN})

_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

# PySpark 4.0 has no streaming Arrow writer.
_STREAM_ARROW_WRITER: type[DataSourceStreamWriter] | None = getattr(
    spark_datasource, "DataSourceStreamArrowWriter", None
)


class Found(NamedTuple):
    """What the driver's look-up of a write has found.

    Parameters
    ----------
    queues : sequence of MessageQueue or None
        With ``ordered``, those that every task binds its rows to; None for any other write, whose tasks find their own.
    servers_reached : bool
        A name server or proxy has answered: where a task reaches none, that is an outage and no wrong address.
    unreached : str
        Why none has, where a look-up was left to the tasks.
    """

    queues: Sequence[MessageQueue] | None = None
    servers_reached: bool = False
    unreached: str = ""


_NOTHING_FOUND = Found()


class _PartitionWriter:
    """One write of one session; `write_batches` runs in every task.

    Parameters
    ----------
    options : SinkOptions
    accumulator : pyspark.Accumulator or None
        The way back to the driver; None where there is none, then the commit message carries the histograms.
    write_id : str
        The key of the write's reports; in a stream the query id takes its place.
    found : Found
        By the driver.
    """

    def __init__(
        self,
        options: SinkOptions,
        accumulator: Accumulator[Any] | None,
        write_id: str = "",
        found: Found = _NOTHING_FOUND,
    ) -> None:
        self._options = options
        self._accumulator = accumulator
        self._write_id = write_id
        self._found = found

    def write_batches(self, batches: Iterator[pa.RecordBatch]) -> CommitMessage:
        """Send every row of one partition; return when each is acknowledged."""
        context = TaskContext.get()
        partition_id = context.partitionId() if context else 0
        write_id = (context and context.getLocalProperty(_QUERY_ID)) or self._write_id
        batch_id = int((context and context.getLocalProperty(_BATCH_ID)) or -1)
        recorder = Recorder(write_id, batch_id, partition_id)
        rows = (batch for batch in batches if batch.num_rows)
        first = next(rows, None)
        if first is not None:
            try:
                self._send(first, rows, recorder)
            except RocketMQError as exc:
                if batch_id >= 0:
                    # Spark does not say it: its own message names stage and task, which count on from batch to batch.
                    exc.args = (f"micro-batch {batch_id} of query {write_id}: {exc}", *exc.args[1:])
                raise
        report = recorder.snapshot()
        if self._accumulator is not None:
            self._accumulator.add(report)
        latencies = self._options.metrics_path is not None
        return CommitMessage.of(report, histograms=self._accumulator is None, latencies=latencies)

    def _reached(self, batch_id: int) -> bool:  # noqa: ARG002 - a stream looks at it
        return self._found.servers_reached

    def _committed(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> None:
        log_summary(logger, messages, batch_id=batch_id)
        if self._options.metrics_path is not None:
            record_commit(self._options.metrics_path, messages, self._write_id, batch_id, now=time.time())

    def _send(self, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch], recorder: Recorder) -> None:
        from rocketmq_spark.client.write_rows import write_rows

        options = self._options
        instance = _acquire(options)
        try:
            write_rows(
                options,
                instance,
                recorder,
                chain([first], rest),
                # Within foreachBatch the recorder has the query's id, which several writes of a micro-batch share.
                write_id=self._write_id or recorder.write_id,
                queues=self._found.queues,
                servers_reached=self._reached(recorder.batch_id),
            )
        finally:
            instance.unregister(options.producer_group)


class RocketMQBatchWriter(_PartitionWriter, DataSourceArrowWriter):
    """The writer of ``df.write``."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        return self.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what the write did, and leave it at ``metricsPath`` (on the driver, once every task has succeeded)."""
        self._committed(messages, micro_batch_of(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what a failed write has stored, as far as it is known (runs on the driver)."""
        log_summary(logger, messages, micro_batch_of(messages), aborted=True)


class _StreamWriter(_PartitionWriter):
    def _reached(self, batch_id: int) -> bool:
        # Where the driver's look-up has reached nobody, a micro-batch that follows another one still tells an outage
        # from a wrong address.
        return super()._reached(batch_id) or batch_id > 0

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what a micro-batch did, and leave it at ``metricsPath`` (runs on the driver).

        Raises
        ------
        RouteNotFoundException
            A query's first micro-batch has stored nothing, and nobody was reached: a wrong address, most likely, which
            later micro-batches would take for an outage.
        """
        if batchId == 0 and self._found.unreached and not summarise(messages).to_dict():
            raise RouteNotFoundException(self._found.unreached, unreachable=True)
        self._committed(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what an unfinished micro-batch has stored; it is also what a stopped query does in mid-batch."""
        log_summary(logger, messages, batch_id=batchId, aborted=True)


class RocketMQRowStreamWriter(_StreamWriter, DataSourceStreamWriter):
    """The writer of ``df.writeStream`` where PySpark hands over rows (4.0): they become record batches here."""

    def __init__(
        self,
        options: SinkOptions,
        accumulator: Accumulator[Any] | None,
        schema: StructType,
        found: Found = _NOTHING_FOUND,
    ) -> None:
        super().__init__(options, accumulator, found=found)
        self._schema = schema

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        return self.write_batches(self._record_batches(iterator))

    def _record_batches(self, rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.conversion import LocalDataToArrowConversion

        for chunk in chunks_of(rows):
            table = LocalDataToArrowConversion.convert(chunk, self._schema, use_large_var_types=False)
            yield from table.to_batches()


def chunks_of(
    rows: Iterable[Row], most_rows: int = _ROWS_PER_BATCH, most_bytes: int = _BYTES_PER_BATCH
) -> Iterator[list[Row]]:
    """Yield the rows in lists of at most `most_rows`; a list also ends with the row that reaches `most_bytes`."""
    chunk: list[Row] = []
    nbytes = 0
    for row in rows:
        chunk.append(row)
        nbytes += _nbytes(row)
        if len(chunk) >= most_rows or nbytes >= most_bytes:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _nbytes(value: object) -> int:
    """Return the memory that a value of a row takes, with all that it contains."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_nbytes(key) + _nbytes(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sys.getsizeof(value) + sum(map(_nbytes, value))
    return sys.getsizeof(value)


if _STREAM_ARROW_WRITER is not None:

    class RocketMQStreamWriter(_StreamWriter, _STREAM_ARROW_WRITER):  # type: ignore[misc, valid-type]
        """The writer of ``df.writeStream`` (PySpark 4.1 and newer)."""

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            """Send one partition (runs in a task)."""
            return self.write_batches(iterator)


def stream_writer(
    options: SinkOptions,
    accumulator: Accumulator[Any] | None,
    schema: StructType,
    found: Found = _NOTHING_FOUND,
) -> DataSourceStreamWriter:
    """Return the streaming writer that this PySpark release can drive."""
    if _STREAM_ARROW_WRITER is None:
        return RocketMQRowStreamWriter(options, accumulator, schema, found)
    return RocketMQStreamWriter(options, accumulator, found=found)


def look_up_route(options: SinkOptions, columns: pa.Schema) -> Found:
    """Look up the routes of the topics that options name, so that a wrong address or topic fails before any task.

    Parameters
    ----------
    options : SinkOptions
    columns : pyarrow.Schema
        Of the data to be written.

    Raises
    ------
    MQClientException
        10005: no name server or proxy answers, or none knows the topic, nor a template to create it from; with
        ``ordered`` and over gRPC the topic itself must exist.
    SchemaError
        Over gRPC: the topic does not accept messages of the type that the columns make.
    """
    instance = _new_instance(options)
    try:
        queues = _look_up(options, columns, instance)
        if options.topic is None and options.dead_letter_topic is None:
            _await_any_answer(options, instance)
        return Found(queues, servers_reached=True)
    finally:
        instance.close()


def look_up_route_of_stream(options: SinkOptions, columns: pa.Schema, checkpoint: str | None = None) -> Found:
    """Look up what `look_up_route` does, for one micro-batch.

    Connection and routes stay for the next look-up, of which a micro-batch has two: name servers that are gone for a
    while then fail none, neither at its start nor, with its rows stored, in its commit. After a minute without a
    look-up the driver begins anew. If it reaches nobody then, it leaves that to the tasks, which have more patience;
    not so with ``ordered``, where all tasks need the same queues. Where topics come with the rows nothing is looked up.

    With ``ordered`` the queues of a broker that is gone stay among those that keys are bound to: `QueueMemory` keeps
    them in the query's `checkpoint`.

    Raises
    ------
    MQClientException, SchemaError
        See `look_up_route`.
    """
    if options.topic is None and options.dead_letter_topic is None:
        return Found()
    instance = _acquire(options)
    try:
        if not options.ordered or options.over_grpc:
            return Found(_look_up(options, columns, instance), servers_reached=True)
        memory = QueueMemory(checkpoint, wrap(options.wrapped_namespace, str(options.topic)))
        return Found(_look_up_ordered(options, columns, instance, memory), servers_reached=True)
    except RouteNotFoundException as exc:
        if options.ordered or not exc.unreachable:
            raise
        logger.warning("the driver could not check a micro-batch, its tasks will try for themselves: %s", exc)
        return Found(unreached=str(exc))
    finally:
        instance.unregister(options.producer_group)


def _look_up_ordered(
    options: SinkOptions, columns: pa.Schema, instance: ClientInstance, memory: QueueMemory
) -> Sequence[MessageQueue]:
    from rocketmq_spark.client.write_rows import ordered_queues

    known = memory.load()
    queues = ordered_queues(options, instance, known) or ()
    info = instance.routes.cached(queues[0].topic)
    if info is None or not info.order_topic:
        numbers = Counter(queue.broker_name for queue in queues)
        if numbers != known:
            memory.save(numbers)
        missing = sorted(numbers.keys() - (() if info is None else info.addresses))
        if missing:
            logger.warning(
                "ordered=true: topic %s has no master of %s now, and rows for its queues wait until deliveryTimeoutMs. "
                "If a broker was removed permanently: stop the query, delete %s, and start it again",
                options.topic,
                ", ".join(missing),
                memory.place,
            )
    _check_topics(options, columns, instance, waits=bool(known))
    return queues


def _look_up(options: SinkOptions, columns: pa.Schema, instance: ClientInstance) -> Sequence[MessageQueue] | None:
    from rocketmq_spark.client.write_rows import ordered_queues

    queues = ordered_queues(options, instance)
    _check_topics(options, columns, instance)
    return queues


def _check_topics(options: SinkOptions, columns: pa.Schema, instance: ClientInstance, *, waits: bool = False) -> None:
    """Check the columns against the topics that options name; with `waits` the topic may have no route now."""
    import pyarrow as pa

    from rocketmq_spark.client.write_rows import check_topic

    try:
        check_topic(options, instance, columns)
    except RouteNotFoundException as exc:
        if exc.unreachable or not waits:
            raise
    if options.dead_letter_topic is not None:
        # Dead letters have neither keys of order nor delays, and any type of topic takes them.
        dead_letters = replace(options, topic=options.dead_letter_topic, batch_type="plain")
        check_topic(dead_letters, instance, pa.schema([]))


def _await_any_answer(options: SinkOptions, instance: ClientInstance) -> None:
    """Return once a name server or proxy has answered: where topics come with the rows, no more can be known now."""
    try:
        instance.transport.query_route(
            options.create_topic_key, options.send_msg_timeout * len(options.route_servers) / 1000
        )
    except MQBrokerException as exc:
        if not (isinstance(exc, TopicRouteStaleException) or (options.over_grpc and exc.response_code in _REFUSALS)):
            raise
        logger.debug("an answer, if not a route: %s", exc)


def _acquire(options: SinkOptions) -> ClientInstance:
    key = (options, with_variables(options))
    return acquire_instance(key, options.producer_group, lambda: _new_instance(options))


def _new_instance(options: SinkOptions) -> ClientInstance:
    # The repr has no secrets: a client id is sent and logged, and must not be a means to guess them.
    name = options.instance_name or f"{os.getpid()}#{hashlib.sha1(repr(options).encode()).hexdigest()[:8]}"
    client_id = client_id_of(options, name)
    return ClientInstance(client_id, new_transport(options, client_id), options)
