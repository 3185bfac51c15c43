"""Message trace: a record of each message sent, gathered and sent to the trace topic on the side.

Rule 1: tracing never holds up or fails a send: what does not fit the queue is dropped and counted, what can't be sent
        is logged.
Rule 2: only answered sends leave a record, and none to the trace topic itself does.
Rule 3: no transport here: a sender is handed in, with a producer of its own behind it.

Follows ``SendMessageTraceHookImpl.java``, ``TraceDataEncoder.java``, ``AsyncTraceDispatcher.java`` (spec/producer.md
section 14).
"""

from __future__ import annotations

import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.message import Message, SendStatus
from rocketmq_spark.namespace import unwrap
from rocketmq_spark.producer.hooks import MessageType, SendMessageContext

logger = logging.getLogger("rocketmq_spark.producer")

DEFAULT_TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
MAX_MESSAGE_BYTES: Final = 128_000
FLUSH_SECONDS: Final = 5.0

# A property string has 32,767 bytes; this leaves room for the trace message's own id, WAIT and names.
_MAX_KEYS_BYTES: Final = 32_000

_MAX_BATCH: Final = 20
_MAX_QUEUE: Final = 2048
_STARTED: Final = "trace.started_ms"

SendTrace = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class PubTrace:
    """One message sent, as a trace record has it (``TraceContext.java``, ``TraceBean.java``).

    Parameters
    ----------
    time_stamp : int
        When the attempt began, epoch milliseconds.
    region_id, group_name, topic, msg_id : str
        Group and topic without the namespace.
    tags, keys : str or None
    store_host : str
        ``host:port`` of the broker.
    body_length : int
        As sent, bytes.
    cost_time : int
        Milliseconds.
    message_type : MessageType
    offset_msg_id : str
    success : bool
        ``SEND_OK``; anything else that was answered is false.
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
        """Return the record as trace readers expect it: fields between 0x01, 0x02 at the end, ``null`` for none."""
        fields = (
            "Pub", self.time_stamp, self.region_id, self.group_name, self.topic, self.msg_id, self.tags, self.keys,
            self.store_host, self.body_length, self.cost_time, int(self.message_type), self.offset_msg_id,
            "true" if self.success else "false",
        )  # fmt: skip
        return "\x01".join("null" if field is None else str(field) for field in fields) + "\x02"

    @property
    def key_words(self) -> Iterator[str]:
        """What the record is found by: the message's id (each member's, of a batch) and its own keys."""
        yield from filter(None, self.msg_id.split(","))
        yield from (self.keys or "").split()


class TraceHook:
    """The send hook that makes trace records.

    Parameters
    ----------
    trace_topic : str
    append : callable
        Takes a record; must not block.
    clock : callable, default time.time
        Seconds since the epoch.
    """

    def __init__(
        self, trace_topic: str, append: Callable[[PubTrace], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._trace_topic = trace_topic
        self._append = append
        self._clock = clock

    def send_message_before(self, context: SendMessageContext) -> None:
        """Note when the attempt began."""
        if not context.message.topic.startswith(self._trace_topic):
            context.props[_STARTED] = int(self._clock() * 1000)

    def send_message_after(self, context: SendMessageContext) -> None:
        """Make the record of an answered attempt."""
        result, started = context.send_result, context.props.get(_STARTED)
        if result is None or started is None or not (result.region_id and result.trace_on):
            return
        message = context.message
        self._append(
            PubTrace(
                time_stamp=started,
                region_id=result.region_id,
                group_name=unwrap(context.producer_group, context.namespace),
                topic=unwrap(message.topic, context.namespace),
                msg_id=result.msg_id,
                tags=message.properties.get("TAGS"),
                keys=message.properties.get("KEYS"),
                store_host=context.broker_addr,
                body_length=len(message.body),
                cost_time=int(self._clock() * 1000) - started,
                message_type=context.message_type,
                offset_msg_id=result.offset_msg_id,
                success=result.status is SendStatus.SEND_OK,
            )
        )


def trace_messages(trace_topic: str, records: Iterable[PubTrace]) -> Iterator[Message]:
    """Yield messages for the trace topic with these records.

    Each body has at most 128,000 bytes, and the keys fit a message's properties: a record whose own don't (a batch of
    very many) is found by the first of them.
    """
    texts: list[bytes] = []
    keys: dict[str, None] = {}
    size = key_bytes = 0
    for record in records:
        text = record.encode().encode("utf-8", "replace")
        words = _fitting(record.key_words)
        more = sum(words.values())
        if texts and (size + len(text) > MAX_MESSAGE_BYTES or key_bytes + more > _MAX_KEYS_BYTES):
            yield _trace_message(trace_topic, texts, keys)
            texts, keys, size, key_bytes = [], {}, 0, 0
        texts.append(text)
        keys.update(dict.fromkeys(words))
        size += len(text)
        key_bytes += more
    if texts:
        yield _trace_message(trace_topic, texts, keys)


def _fitting(words: Iterable[str]) -> dict[str, int]:
    """Return as many of the words as one message may have for keys, each with its bytes."""
    sizes: dict[str, int] = {}
    left = _MAX_KEYS_BYTES
    for word in words:
        sizes[word] = len(word.encode()) + 1
        left -= sizes[word]
        if left < 0:
            del sizes[word]
            break
    return sizes


def _trace_message(trace_topic: str, texts: list[bytes], keys: dict[str, None]) -> Message:
    return Message.of(trace_topic, b"".join(texts), keys=" ".join(keys))


class TraceDispatcher:
    """Gathers records and sends them, from a thread of its own.

    Parameters
    ----------
    trace_topic : str
    send : callable
        Sends one trace message; what it raises is logged.
    batch_num : int, default 10
        ``traceMsgBatchNum``: records that are sent together, 20 at most.

    Attributes
    ----------
    discarded : int
        Records that found the queue full.
    """

    def __init__(self, trace_topic: str, send: SendTrace, batch_num: int = 10) -> None:
        self._trace_topic = trace_topic
        self._send = send
        self._batch_num = min(batch_num, _MAX_BATCH)
        self._queue: queues.Queue[PubTrace | None] = queues.Queue(_MAX_QUEUE)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.discarded = 0

    def start(self) -> None:
        """Begin to send."""
        self._thread = threading.Thread(target=self._run, name="rocketmq-trace", daemon=True)
        self._thread.start()

    def append(self, record: PubTrace) -> None:
        """Take a record, or drop it if too many wait."""
        try:
            self._queue.put_nowait(record)
        except queues.Full:
            self.discarded += 1
            logger.warning("trace record of %s dropped: %d wait already (%d dropped)", record.msg_id, _MAX_QUEUE,
                           self.discarded)  # fmt: skip

    def shutdown(self, timeout: float = FLUSH_SECONDS) -> None:
        """Send what waits and end the thread, within `timeout` seconds."""
        self._closed.set()
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=timeout)
            except queues.Full:
                logger.warning("trace records are left behind: the queue stayed full for %g s", timeout)
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            records = self._next_batch()
            for message in trace_messages(self._trace_topic, records):
                try:
                    self._send(message)
                except Exception:
                    # Whatever it was: the records after these are sent.
                    logger.warning("%d trace records could not be sent to %s", len(records), self._trace_topic,
                                   exc_info=True)  # fmt: skip
            if self._closed.is_set() and self._queue.empty():
                return

    def _next_batch(self) -> list[PubTrace]:
        """Return records once there are enough, the oldest has waited for 5 s, or the end has come."""
        records: list[PubTrace] = []
        deadline = time.monotonic() + FLUSH_SECONDS
        while len(records) < self._batch_num:
            try:
                record = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queues.Empty:
                break
            if record is None:
                break
            records.append(record)
        return records

    def __repr__(self) -> str:
        return f"<TraceDispatcher {self._trace_topic} waiting={self._queue.qsize()} discarded={self.discarded}>"
