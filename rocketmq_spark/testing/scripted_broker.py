"""The parts of `ScriptedTransport`: replies, a clock for tests, the delivery of outcomes, and the stored messages.

Messages are read by queue and queue offset, or by commit-log offset; all queues of all brokers share one commit log. A
transaction's half message is in a queue of the half topic, and after its commit also in its own topic's queue. Messages
expire only if a test sets `expired`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from rocketmq_spark.errors import RemotingSendRequestException, RocketMQError
from rocketmq_spark.model.message import (
    EncodedBatch,
    Encoding,
    Message,
    MessageQueue,
    SendOutcome,
    SendRequest,
    SendStatus,
)
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.properties import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, TransactionCheck
from rocketmq_spark.protocol.remoting.codes import broker_error
from rocketmq_spark.protocol.remoting.records import encode_record, messages_in

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"

_STORE_HOST: Final = "127.0.0.1:10911"
_BORN_HOST: Final = "127.0.0.1:50000"


class _Entry(NamedTuple):
    """An entry of the commit log: a message as sent and as read, its actual queue and its final queue."""

    sent: Message
    read: MessageExt
    stored_in: MessageQueue
    meant_for: MessageQueue


class ScriptedStore:
    """Stored messages, acknowledged or not.

    `queues` has the messages that consumers see, and those of the half topic. `expired` and `removed` have the first
    remaining offset of each queue; brokers correct the minimum offset only for `expired`.
    """

    def __init__(self) -> None:
        self.queues: dict[MessageQueue, list[Message]] = {}
        self.expired: dict[MessageQueue, int] = {}
        self.removed: dict[MessageQueue, int] = {}
        self._log: list[_Entry] = []

    def keep(self, request: SendRequest, now: float) -> tuple[int, str]:
        """Store a request's messages; return the queue offset of the first, and the comma-separated ids."""
        batch, queue = request.batch, request.queue
        messages = _messages_of(batch)
        half = not batch.batch and messages[0].is_half_message
        stored_in = MessageQueue(HALF_TOPIC, queue.broker_name, 0) if half else queue
        read = [
            self._append(message, stored_in, queue, batch.sys_flag, request.born_timestamp, now) for message in messages
        ]
        return read[0].queue_offset, ",".join(message.offset_msg_id for message in read)

    def put(self, queue: MessageQueue, messages: Iterable[Message], now: float) -> None:
        """Store messages without a request."""
        for message in messages:
            self._append(message, queue, queue, 0, int(now * 1000), now)

    def messages(self, queue: MessageQueue, start: int, stop: int) -> list[MessageExt]:
        """Return the messages of a queue in a range of offsets."""
        entries = (entry.read for entry in self._log if entry.stored_in == queue)
        return [message for message in entries if start <= message.queue_offset < stop]

    def pull(self, request: PullRequest, most: int) -> PullOutcome:
        """Return the outcome of a pull with at most `most` messages."""
        queue, offset = request.target.queue, request.offset
        first, end = self.expired.get(queue, 0), len(self.queues.get(queue, ()))
        if offset < first or offset > end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        stop = min(offset + max(1, min(request.target.max_msg_nums, most, MOST_PULLED)), end)
        if offset == stop:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        left = max(offset, self.removed.get(queue, 0))
        if left >= stop:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, stop, first, end)
        body = b"".join(map(encode_record, self.messages(queue, left, stop)))
        return PullOutcome(PullStatus.FOUND, stop, first, end, body)

    def view(self, physical_offset: int) -> MessageExt | None:
        """Return the message at a commit-log offset, with its final topic and queue."""
        return self._log[physical_offset].read if 0 <= physical_offset < len(self._log) else None

    def search(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first offset stored at or after a time, or the end."""
        times = (entry.read.store_timestamp for entry in self._log if entry.stored_in == queue)
        return sum(stored < timestamp_ms for stored in times)

    def earliest(self, queue: MessageQueue) -> int:
        """Return the store time of the queue's first message; -1 if the queue is empty."""
        return next((entry.read.store_timestamp for entry in self._log if entry.stored_in == queue), -1)

    def end_transaction(self, request: EndTransaction, now: float) -> None:
        """Make a committed half message visible; like a broker, again for each call."""
        if request.commit_or_rollback == TRANSACTION_COMMIT_TYPE and request.commit_log_offset < len(self._log):
            half = self._log[request.commit_log_offset]
            self._append(half.sent, half.meant_for, half.meant_for, half.read.sys_flag, half.read.born_timestamp, now)

    def check(self, address: str, physical_offset: int, now: float) -> TransactionCheck:
        """Store a half message again, as brokers do (docs/internals/messages.md#checks), and return the check."""
        half = self._log[physical_offset]
        message = self._append(
            half.sent, half.stored_in, half.meant_for, half.read.sys_flag, half.read.born_timestamp, now
        )
        unique_id = message.unique_id or ""
        return TransactionCheck(
            address=address,
            message=message,
            tran_state_table_offset=message.queue_offset,
            commit_log_offset=message.physical_offset,
            msg_id=unique_id,
            transaction_id=unique_id,
            offset_msg_id=message.offset_msg_id,
            broker_name=half.meant_for.broker_name,
        )

    def _append(
        self,
        message: Message,
        stored_in: MessageQueue,
        meant_for: MessageQueue,
        sys_flag: int,
        born_timestamp: int,
        now: float,
    ) -> MessageExt:
        kept = self.queues.setdefault(stored_in, [])
        read = MessageExt(
            topic=message.topic,
            body=message.body,
            flag=message.flag,
            properties=message.properties,
            queue_id=meant_for.queue_id,
            queue_offset=len(kept),
            physical_offset=len(self._log),
            sys_flag=sys_flag,
            born_timestamp=born_timestamp,
            born_host=_BORN_HOST,
            store_timestamp=int(now * 1000),
            store_host=_STORE_HOST,
            reconsume_times=0,
            prepared_transaction_offset=0,
            body_crc=zlib.crc32(message.body) & 0x7FFFFFFF,
        )
        kept.append(message)
        self._log.append(_Entry(message, read, stored_in, meant_for))
        return read


def _messages_of(batch: EncodedBatch) -> list[Message]:
    if batch.encoding is Encoding.REMOTING:
        return messages_in(batch)
    # Tests over remoting do not need protobuf.
    from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest

    messages = []
    for message in SendMessageRequest.FromString(b"".join(batch.body)).messages:
        system = message.system_properties
        named = {KEYS: " ".join(system.keys), TAGS: system.tag, UNIQ_KEY: system.message_id}
        properties = {name: text for name, text in named.items() if text} | dict(message.user_properties)
        messages.append(Message(message.topic.name, message.body, properties=properties))
    return messages


logger = logging.getLogger("rocketmq_spark.transport")

_JOIN_TIMEOUT: Final = 5.0

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

MOST_PULLED: Final = 32  # A broker's limit of messages in one answer


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one send: acknowledge it with `status`, fail with `error`, or stay `silent`.

    `stored` says whether the rows are kept. By default only an answer with a status keeps them.
    ``Reply(silent=True, stored=True)`` is a lost acknowledgement.
    """

    status: SendStatus = SendStatus.SEND_OK
    error: RocketMQError | None = None
    delay: float = 0.0  # Seconds until the outcome. A delay beyond the send's timeout is a RemotingTimeoutException
    silent: bool = False
    stored: bool | None = None

    @classmethod
    def code(cls, code: int, remark: str = "", delay: float = 0.0) -> Reply:
        """Return a reply with the error of a broker's response code, such as 2 (SYSTEM_BUSY)."""
        return cls(error=broker_error(code, remark, "scripted", "sending"), delay=delay)


@dataclass(frozen=True, slots=True)
class PullReply:
    """The reply to one pull: `outcome`, or at most `most` messages of the queue, after `delay` seconds.

    If `silent`, or beyond the pull's own timeout, it is a ``RemotingTimeoutException``.
    """

    outcome: PullOutcome | None = None
    most: int = MOST_PULLED
    delay: float = 0.0
    silent: bool = False


def route(topic_queues: Mapping[str, int], perm: int = 6) -> TopicRouteData:
    """Return a route with the given number of queues per broker. A broker's address is its name and port 10911.

    >>> route({"broker-a": 4}).broker_datas[0].master
    'broker-a:10911'
    """
    names = sorted(topic_queues)
    return TopicRouteData(
        queue_datas=tuple(QueueData(name, topic_queues[name], topic_queues[name], perm) for name in names),
        broker_datas=tuple(BrokerData(name, {MASTER_ID: f"{name}:10911"}) for name in names),
    )


def with_broker(old: TopicRouteData, data: QueueData, address: str) -> TopicRouteData:
    """Return a route with a broker added or replaced."""
    queues = [*(queue for queue in old.queue_datas if queue.broker_name != data.broker_name), data]
    brokers = [broker for broker in old.broker_datas if broker.broker_name != data.broker_name]
    brokers.append(BrokerData(data.broker_name, {MASTER_ID: address}))
    return replace(
        old,
        queue_datas=tuple(sorted(queues, key=lambda queue: queue.broker_name)),
        broker_datas=tuple(sorted(brokers, key=lambda broker: broker.broker_name)),
    )


def take_reply(script: deque[_Reply | Callable[[_Request], _Reply]], request: _Request, used_up: _Reply) -> _Reply:
    """Take the next reply from a script, or return `used_up`; a function makes the reply to its request."""
    reply = script.popleft() if script else used_up
    return reply(request) if callable(reply) else reply


class ManualClock:
    """A clock, in seconds, that `advance` moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now += seconds


class Deliveries:
    """Outcomes in flight, ordered by their time, then by their request.

    If `threaded`, a thread delivers due outcomes, otherwise `deliver` and `advance` do. The condition `changed` guards
    this object and the transport's state. The caller of `schedule` holds it.
    """

    def __init__(self, clock: Callable[[], float], *, threaded: bool) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.closed = False
        self.threaded = threaded
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Any, Callable[[Any], None]]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def next_due(self) -> float:
        """The time of the next outcome; inf if none is in flight."""
        with self.changed:
            return self._due[0][0] if self._due else math.inf

    def schedule(self, wait: float, outcome: Any, on_outcome: Callable[[Any], None]) -> None:
        """Deliver an outcome `wait` seconds from now."""
        heapq.heappush(self._due, (self.clock() + wait, next(self._numbers), outcome, on_outcome))
        if self.threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rocketmq-spark-scripted", daemon=True)
            self._thread.start()
        self.changed.notify_all()

    def deliver(self) -> int:
        """Deliver the outcomes that are due and were scheduled before this call; return their number."""
        with self.changed:
            before, now = next(self._numbers), self.clock()
        count = 0
        while self._deliver_one(now, before):
            count += 1
        return count

    def advance(self, seconds: float) -> int:
        """Move the manual clock step by step to every outcome; return the number of delivered outcomes."""
        clock = self.clock
        if not isinstance(clock, ManualClock):
            raise TypeError(f"advance() needs a ManualClock, this transport has {clock!r}")
        until, count = clock.now + seconds, 0
        while self.next_due <= until:
            self._move(clock, max(clock.now, self.next_due))
            count += self.deliver()
        self._move(clock, until)
        return count

    def close(self) -> None:
        """Deliver all outcomes in flight as failed. Idempotent."""
        with self.changed:
            self.closed = True
            thread = self._thread
            self.changed.notify_all()
        if thread is None:
            self._end_all()
        elif thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)

    def _move(self, clock: ManualClock, now: float) -> None:
        clock.now = now
        with self.changed:
            self.changed.notify_all()

    def _deliver_one(self, now: float, before: float) -> bool:
        with self.changed:
            if not self._due or self._due[0][0] > now or self._due[0][1] >= before:
                return False
            _, _, outcome, on_outcome = heapq.heappop(self._due)
        on_outcome(outcome)
        return True

    def _run(self) -> None:
        while True:
            with self.changed:
                if self.closed:
                    break
                wait = self._due[0][0] - self.clock() if self._due else math.inf
                if wait > 0:
                    # advance() notifies this thread when it moves a manual clock.
                    endless = wait == math.inf or isinstance(self.clock, ManualClock)
                    self.changed.wait(None if endless else wait)
                    continue
            try:
                self._deliver_one(self.clock(), math.inf)
            except Exception:
                logger.exception("a callback raised")
        self._end_all()

    def _end_all(self) -> None:
        while True:
            with self.changed:
                if not self._due:
                    return
                _, _, outcome, on_outcome = heapq.heappop(self._due)
            on_outcome(_at_close(outcome))


def _at_close(outcome: Any) -> Any:
    """Return the failure that replaces an outcome in flight when the transport closes."""
    if isinstance(outcome, PullOutcome):
        return PullOutcome(None, error=RemotingSendRequestException("pulling: the transport was closed"))
    if isinstance(outcome, SendOutcome):
        text = f"sending to {outcome.queue}: the transport was closed; the rows may be stored"
        return replace(outcome, status=None, error=RemotingSendRequestException(text), queue_offset=-1)
    return outcome
