"""Makes trace records, and sends those of a write's stored batches on a separate thread.

The thread decodes each batch row by row, which costs more than the write itself. If it falls behind, rows are counted
and logged instead of traced. A failed send of records is logged. At the end, `BatchTracer` waits at most 10 s for its
records. `Producer` has its own thread, but the same records. See docs/internals/producer.md#trace.
"""

from __future__ import annotations

import enum
import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import EncodedBatch, Message, SendOutcome, SendStatus
from rocketmq_spark.model.properties import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.sink.in_flight import PendingBatch

logger = logging.getLogger("rocketmq_spark.producer")

MAX_MESSAGE_BYTES: Final = 128_000
FLUSH_SECONDS: Final = 5.0

# A property string has 32,767 bytes; this leaves room for the trace message's own id, WAIT and names.
_MAX_KEYS_BYTES: Final = 32_000

# Batches that wait to be traced: each keeps its bytes alive.
_MAX_WAITING: Final = 16

SendTrace = Callable[[Message], object]


class MessageType(enum.IntEnum):
    """The kind of a message (``MessageType.java``), with its value in a trace record."""

    NORMAL = 0
    TRANS_HALF = 1
    TRANS_COMMIT = 2
    DELAY = 3
    ORDER = 4


def message_type_of(message: Message) -> MessageType:
    """Return a message's kind by its properties. A delay precedes a transaction; timer properties do not count."""
    properties = message.properties
    if "__STARTDELIVERTIME" in properties or "DELAY" in properties:
        return MessageType.DELAY
    return MessageType.TRANS_HALF if properties.get("TRAN_MSG") == "true" else MessageType.NORMAL


@dataclass(frozen=True, slots=True)
class PubTrace:
    """The trace record of one sent message (``TraceContext.java``, ``TraceBean.java``).

    `time_stamp` is the begin of the attempt (epoch), `cost_time` its duration, in ms. `body_length` is the sent size.
    """

    time_stamp: int
    region_id: str
    group_name: str
    topic: str
    msg_id: str
    tags: str | None
    keys: str | None
    store_host: str
    body_length: int
    cost_time: int
    message_type: MessageType
    offset_msg_id: str
    success: bool

    def encode(self) -> str:
        """Return the record's text: fields between 0x01, 0x02 at the end, ``null`` for None."""
        fields = (
            "Pub", self.time_stamp, self.region_id, self.group_name, self.topic, self.msg_id, self.tags, self.keys,
            self.store_host, self.body_length, self.cost_time, int(self.message_type), self.offset_msg_id,
            "true" if self.success else "false",
        )  # fmt: skip
        return "\x01".join("null" if field is None else str(field) for field in fields) + "\x02"

    @property
    def key_words(self) -> Iterator[str]:
        """The index keys of the record: the message's id (of a batch, each id) and its keys."""
        yield from filter(None, self.msg_id.split(","))
        yield from (self.keys or "").split()


def trace_messages(trace_topic: str, records: Iterable[PubTrace]) -> Iterator[Message]:
    """Yield messages of at most 128,000 bytes with these records. One with too many keys is found by its first ones."""
    texts: list[bytes] = []
    keys: dict[str, None] = {}
    size = key_bytes = 0
    for record in records:
        text = record.encode().encode("utf-8", "replace")
        words = _fitting(record.key_words)
        more = sum(words.values())
        if texts and (size + len(text) > MAX_MESSAGE_BYTES or key_bytes + more > _MAX_KEYS_BYTES):
            yield Message.of(trace_topic, b"".join(texts), keys=" ".join(keys))
            texts, keys, size, key_bytes = [], {}, 0, 0
        texts.append(text)
        keys.update(dict.fromkeys(words))
        size += len(text)
        key_bytes += more
    if texts:
        yield Message.of(trace_topic, b"".join(texts), keys=" ".join(keys))


def _fitting(words: Iterable[str]) -> dict[str, int]:
    """Return the first words that fit the keys of one message, each with its size."""
    sizes: dict[str, int] = {}
    left = _MAX_KEYS_BYTES
    for word in words:
        size = len(word.encode()) + 1
        left -= size
        if left < 0:
            break
        sizes[word] = size
    return sizes


class BatchTracer:
    """A context manager around a write that traces the stored batches.

    `address_of` returns the ``host:port`` of a broker name, or "". `discarded` rows were stored and not traced.
    """

    def __init__(
        self,
        options: SinkOptions,
        address_of: Callable[[str], str],
        send: SendTrace,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._address_of = address_of
        self._clock = clock
        self._send = send
        self._queue: queues.Queue[tuple[EncodedBatch, SendOutcome, float] | None] = queues.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="rocketmq-batch-trace", daemon=True)
        self.discarded = 0

    def __enter__(self) -> BatchTracer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._queue.put(None, timeout=FLUSH_SECONDS)
            self._thread.join(FLUSH_SECONDS)
        except queues.Full:
            text = (
                "message trace: topic %s accepted nothing for %g s, and pending records are lost; rows are not affected"
            )
            logger.warning(text, self._options.trace_topic, FLUSH_SECONDS)
        if self.discarded:
            text = "message trace: %d rows were stored but not traced, because the trace is slower than the write"
            logger.warning(text, self.discarded)

    def append(self, pending: PendingBatch, outcome: SendOutcome) -> None:
        """Accept a batch with its outcome; never waits."""
        batch = pending.batch
        try:
            self._queue.put_nowait((batch, outcome, self._clock()))
        except queues.Full:
            self.discarded += batch.rows

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                for message in trace_messages(self._options.trace_topic, self._records(*item)):
                    self._send(message)
            except RocketMQError:
                text = "message trace: records of %d rows could not be sent to topic %s; rows are not affected"
                logger.warning(text, item[0].rows, self._options.trace_topic, exc_info=True)

    def _records(self, batch: EncodedBatch, outcome: SendOutcome, answered: float) -> Iterator[PubTrace]:
        if not (outcome.trace_on and outcome.status):
            return
        ids = outcome.offset_msg_id.split(",")
        for number, message in enumerate(messages_in(batch)):
            yield PubTrace(
                time_stamp=int(answered * 1000 - outcome.latency_ms),
                region_id=outcome.region_id or "DefaultRegion",
                group_name=self._options.producer_group,
                topic=message.topic,
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
