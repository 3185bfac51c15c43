"""Message trace for the batches of a write: a record for each row, sent on the side.

Rule 1: tracing never holds up or fails a write: batches that come faster than they can be traced are left out, counted
        and logged.
Rule 2: a batch is decoded again, row by row, on a thread of its own: the write path keeps nothing for it. That costs as
        much as the write itself and more; it is for looking at single messages, not for every day.

Follows ``SendMessageTraceHookImpl.java`` (spec/producer.md section 14); where Java's record of a batch names all its
ids in one field, ours are one for each row, so that each is found by its id and its keys.
"""

from __future__ import annotations

import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final

from rocketmq_spark.client.connect import SECURITY
from rocketmq_spark.client.producer import Producer
from rocketmq_spark.client.service import trace_group
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import EncodedBatch, Message, SendOutcome, SendStatus
from rocketmq_spark.message_const import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.namespace import unwrap
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.hooks import message_type_of
from rocketmq_spark.producer.trace import FLUSH_SECONDS, MAX_MESSAGE_BYTES, PubTrace, trace_messages
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.wire.records import decode_batch, decode_properties

logger = logging.getLogger("rocketmq_spark.producer")

# Batches that wait to be traced: each keeps its bytes alive.
_MAX_WAITING: Final = 16

_TIMEOUT_MS: Final = 5000


class BatchTracer:
    """Traces what one write has stored; a context manager around it.

    Parameters
    ----------
    options : SinkOptions
    address_of : callable
        ``broker name -> host:port``, empty if it isn't known.
    clock : callable, default time.time
        Seconds since the epoch.
    transport : Transport, optional
        Where trace messages go; default: connections of its own.

    Attributes
    ----------
    discarded : int
        Rows that were stored and not traced.
    """

    def __init__(
        self,
        options: SinkOptions,
        address_of: Callable[[str], str],
        clock: Callable[[], float] = time.time,
        *,
        transport: Transport | None = None,
    ) -> None:
        self._topic = options.trace_topic
        self._group = unwrap(options.producer_group, options.wrapped_namespace)
        self._namespace = options.wrapped_namespace
        self._address_of = address_of
        self._clock = clock
        self._producer = Producer(
            trace_group(self._group),
            transport=transport,
            name_server=options.name_server,
            client_ip=options.client_ip,
            **{name: getattr(options, name) for name in SECURITY},
            send_msg_timeout=_TIMEOUT_MS,
            max_message_size=MAX_MESSAGE_BYTES,
        )
        self._queue: queues.Queue[tuple[EncodedBatch, SendOutcome, float] | None] = queues.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="rocketmq-batch-trace", daemon=True)
        self.discarded = 0

    def __enter__(self) -> BatchTracer:
        self._producer.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._queue.put(None, timeout=FLUSH_SECONDS)
            self._thread.join(FLUSH_SECONDS)
        except queues.Full:
            logger.warning("trace records are left behind: %s took none for %g s", self._topic, FLUSH_SECONDS)
        self._producer.shutdown()
        if self.discarded:
            logger.warning("%d rows were stored and not traced: they came too fast for it", self.discarded)

    def append(self, batch: EncodedBatch, outcome: SendOutcome) -> None:
        """Take a batch that was answered; never waits."""
        try:
            self._queue.put_nowait((batch, outcome, self._clock()))
        except queues.Full:
            self.discarded += batch.rows

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                for message in trace_messages(self._topic, self._records(*item)):
                    self._producer.send(message)
            except RocketMQError:
                logger.warning("trace records of %d rows could not be sent to %s", item[0].rows, self._topic,
                               exc_info=True)  # fmt: skip

    def _records(self, batch: EncodedBatch, outcome: SendOutcome, answered: float) -> Iterator[PubTrace]:
        if not (outcome.trace_on and outcome.status):
            return
        ids = outcome.offset_msg_id.split(",")
        for number, message in enumerate(_messages(batch)):
            yield PubTrace(
                time_stamp=int(answered * 1000 - outcome.latency_ms),
                region_id=outcome.region_id or "DefaultRegion",
                group_name=self._group,
                topic=unwrap(message.topic, self._namespace),
                msg_id=message.properties.get(UNIQ_KEY, ""),
                tags=message.properties.get(TAGS),
                keys=message.properties.get(KEYS),
                store_host=self._address_of(outcome.queue.broker_name),
                body_length=len(message.body),
                cost_time=int(outcome.latency_ms),
                message_type=message_type_of(message),
                # An inner batch has one id for all its rows.
                offset_msg_id=ids[number] if number < len(ids) else ids[0],
                success=outcome.status is SendStatus.SEND_OK,
            )


def _messages(batch: EncodedBatch) -> list[Message]:
    body = b"".join(batch.body)
    if batch.batch:
        return decode_batch(body, batch.topic)
    return [Message(batch.topic, body, batch.flag, decode_properties(batch.properties.encode()))]
