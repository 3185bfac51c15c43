"""What a partition task runs, for batch and for streams.

    Arrow record batches -> RemotingBatcher -> Producer -> PartitionReport -> accumulator, commit message

Rule 1: what Spark pickles holds options and ids only; connections are made inside `write`, after the fork.
Rule 2: a task that returns has every row acknowledged; anything else is an exception.
Rule 3: nothing is opened for a partition without rows.

Follows design.md sections 2 and 6; Spark's side of it is in anchors/connectors.md section 6.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import socket
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pyspark.sql.datasource as spark_datasource
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

from rocketmq_spark.compression import CompressionType
from rocketmq_spark.errors import TopicRouteStaleException
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.client_instance import ClientInstance, acquire_instance
from rocketmq_spark.producer.send import Producer
from rocketmq_spark.spark.report import CommitMessage, log_summary
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql import Row
    from pyspark.sql.types import StructType


logger = logging.getLogger("rocketmq_spark.spark")

# Rows that PySpark 4.0 hands over one by one become record batches of this many rows: Spark's own default for
# spark.sql.execution.arrow.maxRecordsPerBatch.
_ROWS_PER_BATCH = 10_000

_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

# PySpark 4.0 has no streaming Arrow writer.
_STREAM_ARROW_WRITER: type[DataSourceStreamWriter] | None = getattr(
    spark_datasource, "DataSourceStreamArrowWriter", None
)


class _PartitionWriter:
    """One write of one session; `write_batches` runs in every task.

    Parameters
    ----------
    options : SinkOptions
    accumulator : pyspark.Accumulator or None
        The way back to the driver; None where there is none, then the commit message carries the histograms.
    write_id : str
        The key of the write's reports; in a stream the query id takes its place.
    """

    def __init__(self, options: SinkOptions, accumulator: Accumulator[Any] | None, write_id: str = "") -> None:
        self._options = options
        self._accumulator = accumulator
        self._write_id = write_id

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
            self._send(first, rows, recorder)
        report = recorder.snapshot()
        if self._accumulator is not None:
            self._accumulator.add(report)
        return CommitMessage.of(report, histograms=self._accumulator is None)

    def _send(self, first: pa.RecordBatch, rest: Iterator[pa.RecordBatch], recorder: Recorder) -> None:
        from rocketmq_spark.arrow.settings import BatchSettings
        from rocketmq_spark.arrow.unique_id import UniqueIds
        from rocketmq_spark.spark.batching import row_batcher

        options = self._options
        instance = acquire_instance(options, options.producer_group, lambda: _new_instance(options))
        try:
            producer: Producer[pa.RecordBatch] = Producer(options, instance, recorder)
            settings = BatchSettings(
                topic=options.topic,
                tags=options.tags,
                max_message_size=options.max_message_size,
                batch_bytes=options.batch_bytes,
                batching=options.batching,
                inner_batches=options.batch_type == "inner",
                compress_type=None if options.compress_type == "NONE" else CompressionType.parse(options.compress_type),
                compress_over=options.compress_msg_body_over_howmuch,
                compress_level=options.compress_level,
                queue_selector=options.queue_selector,
                # Groups that fill and batches that are on their way share maxInFlightBytes.
                max_pending_bytes=options.max_in_flight_bytes // 2,
            )
            ip = socket.inet_aton(_local_ip())
            unique_ids = UniqueIds(ip=ip, pid=os.getpid(), wall_clock=time.time, rng=random.SystemRandom())
            batcher = row_batcher(
                options,
                settings,
                recorder,
                # Within foreachBatch the recorder has the query's id, which several writes of a micro-batch share.
                write_id=self._write_id or recorder.write_id,
                queues_of=producer.publish_queues,
                unique_ids=unique_ids,
            )
            producer.write(chain([first], rest), batcher)
        finally:
            instance.unregister(options.producer_group)


class RocketMQBatchWriter(_PartitionWriter, DataSourceArrowWriter):
    """The writer of ``df.write``."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        return self.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what the write did (runs on the driver, once every task has succeeded)."""
        log_summary(logger, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log what a failed write has stored, as far as it is known (runs on the driver)."""
        log_summary(logger, messages, aborted=True)


class _StreamWriter(_PartitionWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what a micro-batch did (runs on the driver)."""
        log_summary(logger, messages, batch_id=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Log what an unfinished micro-batch has stored; it is also what a stopped query does in mid-batch."""
        log_summary(logger, messages, batch_id=batchId, aborted=True)


class RocketMQRowStreamWriter(_StreamWriter, DataSourceStreamWriter):
    """The writer of ``df.writeStream`` where PySpark hands over rows (4.0): they become record batches here."""

    def __init__(self, options: SinkOptions, accumulator: Accumulator[Any] | None, schema: StructType) -> None:
        super().__init__(options, accumulator)
        self._schema = schema

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Send one partition (runs in a task)."""
        return self.write_batches(self._record_batches(iterator))

    def _record_batches(self, rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
        from pyspark.sql.conversion import LocalDataToArrowConversion

        while chunk := list(islice(rows, _ROWS_PER_BATCH)):
            table = LocalDataToArrowConversion.convert(chunk, self._schema, use_large_var_types=False)
            yield from table.to_batches()


if _STREAM_ARROW_WRITER is not None:

    class RocketMQStreamWriter(_StreamWriter, _STREAM_ARROW_WRITER):  # type: ignore[misc, valid-type]
        """The writer of ``df.writeStream`` (PySpark 4.1 and newer)."""

        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            """Send one partition (runs in a task)."""
            return self.write_batches(iterator)


def stream_writer(
    options: SinkOptions, accumulator: Accumulator[Any] | None, schema: StructType
) -> DataSourceStreamWriter:
    """Return the streaming writer that this PySpark release can drive."""
    if _STREAM_ARROW_WRITER is None:
        return RocketMQRowStreamWriter(options, accumulator, schema)
    return RocketMQStreamWriter(options, accumulator)


def look_up_route(options: SinkOptions) -> None:
    """Look up the routes of the topics that options name, so that a wrong address or topic fails before any task.

    Raises
    ------
    MQClientException
        10005: no name server answers, or none knows the topic nor a template to create it from.
    """
    instance = _new_instance(options)
    try:
        named = [topic for topic in (options.topic, options.dead_letter_topic) if topic]
        for topic in named:
            Producer(options, instance, Recorder("", -1, 0)).publish_queues(topic)
        if not named:
            # Topics come with the rows; that a name server answers at all is what can be known now.
            patience = options.send_msg_timeout * len(options.name_server) / 1000
            instance.transport.query_route(options.create_topic_key, patience)
    except TopicRouteStaleException:
        logger.debug("the name server answers, and has no topic %s", options.create_topic_key)
    finally:
        instance.close()


def tls_settings(options: SinkOptions) -> TlsSettings | None:
    """Return how connections are encrypted; None: not at all."""
    return TlsSettings(options.tls_ca_file) if options.use_tls else None


def _new_instance(options: SinkOptions) -> ClientInstance:
    # The repr has no secrets: a client id is sent and logged, and must not be a means to guess them.
    name = options.instance_name or f"{os.getpid()}#{hashlib.sha1(repr(options).encode()).hexdigest()[:8]}"
    client_ip = options.client_ip or _local_ip()
    credentials = None
    if options.access_key is not None and options.secret_key is not None:
        credentials = Credentials(options.access_key, options.secret_key, options.security_token or "")
    transport = RemotingTransport(options.name_server, credentials=credentials, tls=tls_settings(options))
    return ClientInstance(f"{client_ip}@{name}", transport, options)


def _local_ip() -> str:
    """Return this host's address as others see it, or loopback; nothing is sent (spec/producer.md section 1.3)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # TEST-NET-1: connecting a datagram socket only asks the routing table for the interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
