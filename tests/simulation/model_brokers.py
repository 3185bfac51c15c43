"""Modelled brokers: a request is one call, so that a schedule takes milliseconds.

Brokers store a message before it is flushed and before it is readable. A power failure loses messages that are not
flushed, also acknowledged ones with ``ASYNC_FLUSH``. Retention deletes the first messages of a queue. Everybody with
the right may store messages. So does another producer, see `tests.simulation.hostile`.

A half message is in a queue of its own until an END_TRANSACTION commits it, as docs/internals/exactly-once.md says.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from rocketmq_spark.errors import TopicRouteStaleException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullStatus
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.properties import CHECK_IMMUNITY_TIME_IN_SECONDS, PGROUP, TRAN_MSG
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_PREPARED_TYPE, EndTransaction
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import encode_record
from tests.simulation.spark import LOG, TOPIC, Attempt
from tests.simulation.world import EPOCH, World

# What happens to a request that stores something: it is refused, or has no answer, or one that says "not safe".
REQUESTS = ("refused", "silent", "silent after storing", "delayed", "late", "not flushed")
# What happens to a broker. A broker that is not listed is in no route.
EVENTS = ("pause", "power failure", "not listed", "slow storage", "promotion", "retention", "others", "more queues")
# Others store rows again and again, and a broker loses the last ones just before it stores a row of the write. So a
# queue ends below the start offset of the write.
LOST_END = "lost end"
# How brokers are from the start.
SETTINGS = ("async flush", "new topic")
# What happens to an END_TRANSACTION: the broker answers SYSTEM_BUSY, or with success before it has flushed the commit.
# It appends commits some time after its check.
OF_ENDS = ("busy", "unsafe end", "slow end")

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
_REAL: Final = "REAL_TOPIC", "REAL_QID"
# A broker appends a commit at most so much later than it has checked its deadline, seconds.
_SLOW_END: Final = 0.9
_OFTEN: Final = 0.5

_MOST_PULLED = 32
# The longest time until a broker with ``ASYNC_FLUSH`` flushes a message, seconds.
_FLUSHED_WITHIN = 1.0
# The most messages that a new master lacks.
_LACKED = 20
_MOST_OTHERS = 60
# How often others store rows until the horizon, if brokers lose ends, and how many.
_OTHERS_BEFORE_LOSSES = 100
_BEFORE_LOSSES = 3


class Drawn(Protocol):
    """What a cluster needs of a plan."""

    faults: tuple[str, ...]
    brokers: int
    queues: int
    horizon: float


class Sender(NamedTuple):
    """The attempt that has sent a message, and when. Another producer has none."""

    attempt: Attempt | None
    sent_at: float
    # Another producer has stored an exact copy of a row.
    same: bool = False
    # The process of the connector that has sent it; empty for another producer.
    process: str = ""


@dataclass(eq=False, slots=True)
class Entry:
    """A message in a commit log."""

    message: MessageExt
    queue: MessageQueue
    sender: Sender | None
    stored_at: float
    readable_at: float
    flushed_at: float
    acknowledged: bool = False
    lost_at: float = math.inf
    # Of a half message: the queue of its topic. Of a committed message: its half message.
    real_queue: MessageQueue | None = None
    half: Entry | None = None
    # Whether the connector has ended this half message.
    ended: bool = False
    _record: bytes = b""

    @property
    def record(self) -> bytes:
        """The message as a pull returns it."""
        if not self._record:
            self._record = encode_record(self.message)
        return self._record


class Answer(bytes):
    """The records in the answer to a pull, and their messages."""

    messages: list[MessageExt]

    @classmethod
    def of(cls, entries: list[Entry]) -> Answer:
        """Return the answer with some messages."""
        answer = cls(b"".join(entry.record for entry in entries))
        answer.messages = [entry.message for entry in entries]
        return answer


@dataclass(eq=False, slots=True)
class Request:
    """One attempt to store messages, which arrives now or later, or never."""

    fault: str
    on_answer: Callable[[Request], None]
    entries: list[Entry] = field(default_factory=list)


class ModelBroker:
    """Messages of one broker. Offsets of a queue have no gaps."""

    def __init__(self, world: World, name: str, number: int, queues: int) -> None:
        self.name = name
        self.address = f"10.2.0.{number + 1}:10911"
        # Until then it does nothing.
        self.idle_until = 0.0
        # Whether it is down in that time, so that requests are lost.
        self.down = False
        # When name servers list it again.
        self.listed_at = 0.0
        # How long it takes to flush a message, and to make it readable.
        self.lags = (0.0, 0.0)
        self.async_flush = False
        # The broker's ``transactionTimeOut``, seconds.
        self.transaction_timeout = 0.0
        # The number of queues of each topic.
        self.topics = {LOG: 1, TOPIC: queues}
        self.queues: defaultdict[MessageQueue, list[Entry]] = defaultdict(list)
        # The first message of each queue that is left.
        self.first: defaultdict[MessageQueue, int] = defaultdict(int)
        self.lost: list[Entry] = []
        # How often it has failed, or was replaced.
        self.failures = 0
        self._world = world
        self._log: list[Entry] = []

    @property
    def idle(self) -> bool:
        """Whether it is paused or down."""
        return self._world.now < self.idle_until

    def store(
        self,
        queue: MessageQueue,
        message: Message,
        sender: Sender | None,
        sys_flag: int = 0,
        *,
        born: int = 0,
        prepared: int = 0,
    ) -> Entry:
        """Append a message; a half message to the queue of half messages."""
        real_queue = None
        if message.is_half_message:
            real_queue, queue = queue, MessageQueue(HALF_TOPIC, self.name, 0)
            names = dict(zip(_REAL, (real_queue.topic, str(real_queue.queue_id)), strict=True))
            message = replace(message, properties={**message.properties, **names})
        now, entries = self._world.now, self.queues[queue]
        last = self._log[-1] if self._log else None
        lag = self._world.rng.random() * _FLUSHED_WITHIN if self.async_flush else 0.0
        flushed, readable = now + self.lags[0] + lag, now + self.lags[1]
        if last is not None:
            flushed, readable = max(flushed, last.flushed_at), max(readable, last.readable_at)
        stored_at = int((now + EPOCH) * 1000)
        stored = MessageExt(
            queue.topic,
            message.body,
            message.flag,
            message.properties,
            queue_id=(real_queue or queue).queue_id,
            queue_offset=len(entries),
            physical_offset=len(self._log),
            sys_flag=sys_flag,
            born_timestamp=born or stored_at,
            born_host="10.0.0.1:50000",
            store_timestamp=stored_at,
            store_host=self.address,
            reconsume_times=0,
            prepared_transaction_offset=prepared,
            body_crc=zlib.crc32(message.body) & 0x7FFFFFFF,
        )
        entry = Entry(stored, queue, sender, now, readable, flushed, real_queue=real_queue)
        self._log.append(entry)
        entries.append(entry)
        return entry

    def view(self, offset: int) -> Entry | None:
        """Return the message at an offset of the commit log."""
        return self._log[offset] if 0 <= offset < len(self._log) else None

    def check_end(self, request: EndTransaction) -> int:
        """Return the code with which a broker answers an END_TRANSACTION."""
        half = self.view(request.commit_log_offset)
        if half is None:
            return ResponseCode.SYSTEM_ERROR
        properties = half.message.properties
        text = properties.get(CHECK_IMMUNITY_TIME_IN_SECONDS, "")
        immunity = int(text) if text.isdecimal() else 0
        age = (self._world.now + EPOCH) - half.message.born_timestamp / 1000
        if immunity and age > max(immunity, self.transaction_timeout) and not request.from_transaction_check:
            return ResponseCode.ILLEGAL_OPERATION
        is_half = half.queue.topic == HALF_TOPIC and properties.get(PGROUP) == request.producer_group
        if not is_half or half.message.queue_offset != request.tran_state_table_offset:
            return ResponseCode.SYSTEM_ERROR
        return ResponseCode.SUCCESS

    def commit(self, half: Entry, sender: Sender) -> Entry:
        """Append the message of a half message to its queue."""
        message, queue = half.message, half.real_queue
        assert queue is not None
        kept = {name: value for name, value in message.properties.items() if name not in (*_REAL, TRAN_MSG)}
        visible = Message(queue.topic, message.body, message.flag, kept)
        flags = message.sys_flag & ~TRANSACTION_PREPARED_TYPE
        entry = self.store(
            queue, visible, sender, flags, born=message.born_timestamp, prepared=message.physical_offset
        )  # fmt: skip
        entry.half = half
        return entry

    def end(self, queue: MessageQueue) -> int:
        """Return the offset after the last readable message."""
        entries, now = self.queues.get(queue, ()), self._world.now
        end = len(entries)
        while end and entries[end - 1].readable_at > now:
            end -= 1
        return end

    def pull(self, queue: MessageQueue, offset: int, most: int, expression: str) -> PullOutcome:
        """Return what a broker answers to a pull."""
        first, end = self.first.get(queue, 0), self.end(queue)
        first = min(first, end)
        if not first <= offset <= end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        if offset == end:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        stop = min(end, offset + min(most, _MOST_PULLED))
        found = self.queues[queue][offset:stop]
        matched = [entry for entry in found if expression in ("*", entry.message.tags)]
        if not matched:
            return PullOutcome(PullStatus.NO_MATCHED_MSG, stop, first, end)
        return PullOutcome(PullStatus.FOUND, stop, first, end, Answer.of(matched))

    def fail(self) -> None:
        """Lose all or some messages that are not flushed."""
        now = self._world.now
        first = next((at for at, entry in enumerate(self._log) if entry.flushed_at > now), len(self._log))
        self._cut(self._world.rng.randint(first, len(self._log)))

    def lack(self) -> None:
        """Be replaced by a replica that lacks the last messages."""
        self._cut(max(0, len(self._log) - self._world.rng.randrange(_LACKED)))

    def _cut(self, kept: int) -> None:
        self.failures += 1
        # The transactionTopic keeps what was acknowledged, by assumption.
        last = max(
            (at for at, entry in enumerate(self._log) if entry.queue.topic == LOG and entry.acknowledged), default=-1
        )
        kept = max(kept, last + 1)
        for entry in reversed(self._log[kept:]):
            entry.lost_at = self._world.now
            assert self.queues[entry.queue].pop() is entry
            self.lost.append(entry)
        del self._log[kept:]

    def expire(self, queue: MessageQueue) -> None:
        """Delete the first messages of a queue."""
        end = len(self.queues[queue])
        self.first[queue] = self._world.rng.randint(min(self.first[queue], end), end)


class ModelCluster:
    """Brokers ``b0``, ``b1``, ..., and their faults."""

    def __init__(self, world: World, plan: Drawn) -> None:
        self.world, self.plan, self.rng = world, plan, world.rng
        self.brokers = {
            f"b{number}": ModelBroker(world, f"b{number}", number, plan.queues) for number in range(plan.brokers)
        }
        self.by_address = {broker.address: broker for broker in self.brokers.values()}
        self.counts: Counter[str] = Counter()
        # The messages of all requests, stored or not.
        self.seen: list[Message] = []
        self._requests = [kind for kind in REQUESTS if kind in plan.faults]
        self._chance = self.rng.choice((0.05, 0.2, 0.5))
        for broker in self.brokers.values():
            if "async flush" in plan.faults:
                broker.async_flush = True
            if "new topic" in plan.faults:
                del broker.topics[TOPIC]
        self.counts.update(kind for kind in SETTINGS if kind in plan.faults)

    def stored(self, topic: str) -> Iterator[MessageExt]:
        """Return the messages of a topic, queue by queue."""
        return (entry.message for entry in self.entries(topic))

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that exist."""
        brokers = [broker for broker in self.brokers.values() if topic in broker.topics]
        return [
            MessageQueue(topic, broker.name, number) for broker in brokers for number in range(broker.topics[topic])
        ]

    def forge(self, queue: MessageQueue, message: Message, *, same: bool) -> None:
        """Store a message of another user; `same`: it is an exact copy of a row."""
        self.brokers[queue.broker_name].store(queue, message, Sender(None, self.world.now, same))

    def entries(self, topic: str) -> Iterator[Entry]:
        """Return the entries of a topic, queue by queue."""
        for broker in self.brokers.values():
            for queue, entries in sorted(broker.queues.items()):
                if queue.topic == topic:
                    yield from entries

    def all_entries(self) -> Iterator[Entry]:
        """Return all entries of rows and half messages, also lost ones."""
        for broker in self.brokers.values():
            yield from broker.lost
            for queue, entries in sorted(broker.queues.items()):
                if queue.topic != LOG:
                    yield from entries

    def route(self, topic: str) -> TopicRouteData:
        """Return a topic's queues on the brokers that are listed now; raise if no broker has the topic."""
        listed = [broker for broker in self.brokers.values() if broker.listed_at <= self.world.now]
        if topic == AUTO_CREATE_TOPIC:
            queues = tuple((broker.name, broker.address, self.plan.queues) for broker in listed)
        else:
            having = [broker for broker in listed if topic in broker.topics]
            queues = tuple((broker.name, broker.address, broker.topics[topic]) for broker in having)
        if not queues:
            raise TopicRouteStaleException(f"no broker has topic {topic}", ResponseCode.TOPIC_NOT_EXIST, topic, "")
        return _route_of(queues)

    def fault(self, *more: str) -> str:
        """Draw what happens to a request; empty: nothing. `more` are the faults of its kind."""
        kinds = [*self._requests, *(kind for kind in more if kind in self.plan.faults)]
        if not kinds or self.world.now > self.plan.horizon or self.rng.random() > self._chance:
            return ""
        kind = self.rng.choice(kinds)
        self.counts[kind] += 1
        return kind

    def start_events(self) -> None:
        """Schedule what happens to brokers."""
        if "others" in self.plan.faults:
            self._store_others(self.rng.choice(list(self.brokers.values())))
        if LOST_END in self.plan.faults:
            for broker in self.brokers.values():
                for _ in range(_OTHERS_BEFORE_LOSSES):
                    at = self.rng.random() * self.plan.horizon
                    self.world.call_later(at, functools.partial(self._store_others, broker, _BEFORE_LOSSES))
        for kind in EVENTS:
            if kind in self.plan.faults:
                for _ in range(self.rng.choice((1, 2, 4))):
                    # Most writes end within the first second.
                    at = self.rng.random() * self.rng.choice((0.1, 1.0, self.plan.horizon))
                    self.world.call_later(at, functools.partial(self._event, kind))

    def _event(self, kind: str) -> None:
        broker, now = self.rng.choice(list(self.brokers.values())), self.world.now
        lasting = self.rng.choice((0.05, 0.5, 3.0))
        self.counts[kind] += 1
        self.world.note(f"{kind}: {broker.name} for {lasting} s")
        if kind == "not listed":
            broker.listed_at = now + lasting
        elif kind == "slow storage":
            broker.lags = self.rng.random() * lasting, self.rng.random() * lasting
            self.world.call_later(lasting, lambda: setattr(broker, "lags", (0.0, 0.0)))
        elif kind == "promotion":
            broker.lack()
        elif kind == "others":
            self._store_others(broker)
        elif kind == "more queues" and TOPIC in broker.topics:
            broker.topics[TOPIC] += 1
        elif kind == "retention":
            for queue in [queue for queue in broker.queues if queue.topic == TOPIC]:
                broker.expire(queue)
        elif kind in ("pause", "power failure") and not broker.idle:
            broker.down = kind == "power failure"
            broker.idle_until = now + lasting
            if broker.down:
                broker.fail()

    def lose_end(self, broker: ModelBroker) -> None:
        """Let a broker lose its last messages now and then, before it stores a row."""
        if LOST_END in self.plan.faults and self.world.now < self.plan.horizon and self.rng.random() < _OFTEN:
            self.counts[LOST_END] += 1
            self.world.note(f"{LOST_END}: {broker.name}")
            broker.lack()

    def _store_others(self, broker: ModelBroker, count: int = 0) -> None:
        """Store rows of another producer, which knows nothing of the write; by default a drawn number of them."""
        queue = MessageQueue(TOPIC, broker.name, self.rng.randrange(broker.topics.get(TOPIC, 1)))
        broker.topics.setdefault(TOPIC, self.plan.queues)
        for number in range(count or self.rng.choice((1, _MOST_OTHERS))):
            broker.store(queue, Message(TOPIC, b"other %d" % number, 0, {}), None)

    def start(
        self, broker: ModelBroker, execute: Callable[[], list[Entry]], on_answer: Callable[[Request], None]
    ) -> Request:
        """Send a request that stores messages. `on_answer` is called if the broker answers."""
        request = Request(self.fault(), on_answer)

        def execute_now() -> None:
            request.entries = execute()
            self._answer_later(broker, request)

        self._deliver(broker, request.fault, execute_now)
        return request

    def end(
        self, broker: ModelBroker, request: EndTransaction, sender: Sender, on_answer: Callable[[int], None]
    ) -> str:
        """Send an END_TRANSACTION, and return what happens to it. `on_answer` is called if the broker answers."""
        fault = self.fault("busy", "unsafe end")

        def execute() -> None:
            code: int = ResponseCode.SYSTEM_BUSY if fault == "busy" else broker.check_end(request)
            half, later = broker.view(request.commit_log_offset), 0.0
            if half is not None and code == ResponseCode.SUCCESS:
                half.ended = half.ended or bool(sender.process)
            commits = code == ResponseCode.SUCCESS and request.commit_or_rollback == TRANSACTION_COMMIT_TYPE
            if commits and "slow end" in self.plan.faults and self.rng.random() < _OFTEN:
                self.counts["slow end"] += 1
                later = _SLOW_END * self.rng.random()

            def append() -> None:
                flushed = self.world.now
                if commits and half is not None and half.lost_at == math.inf:
                    flushed = broker.commit(half, sender).flushed_at
                if fault not in ("", "delayed", "not flushed", "busy", "unsafe end"):
                    return
                unsafe = broker.async_flush or fault in ("not flushed", "unsafe end")
                wait = 0.0 if unsafe else max(0.0, flushed - self.world.now)
                self.world.call_later(wait + 0.0005, lambda: None if broker.down and broker.idle else on_answer(code))

            self.world.call_later(later, append) if later else append()

        self._deliver(broker, fault, execute)
        return fault

    def _deliver(self, broker: ModelBroker, fault: str, execute: Callable[[], None]) -> None:
        """Have a broker execute a request when it arrives, if it does."""
        world = self.world

        def arrive() -> None:
            if not broker.idle:
                execute()
            elif not broker.down:
                # A paused broker executes it afterwards, with all others that wait.
                world.call_later(broker.idle_until - world.now + 0.5 * self.rng.random(), arrive)

        longest = {"delayed": 1.5, "late": 8.0}.get(fault, 0.0005)
        if fault not in ("refused", "silent"):
            world.call_later(longest * self.rng.random(), arrive)

    def _answer_later(self, broker: ModelBroker, request: Request) -> None:
        if request.fault not in ("", "not flushed", "delayed") or not request.entries:
            return

        def answer() -> None:
            if request.entries[-1].lost_at == math.inf:
                if request.fault != "not flushed":
                    for entry in request.entries:
                        entry.acknowledged = True
                request.on_answer(request)

        now = self.world.now
        flushed = now if broker.async_flush or request.fault == "not flushed" else request.entries[-1].flushed_at
        self.world.call_later(max(0.0, flushed - now) + 0.0005, answer)


@functools.lru_cache(maxsize=256)
def _route_of(queues: tuple[tuple[str, str, int], ...]) -> TopicRouteData:
    return TopicRouteData(
        tuple(QueueData(name, nums, nums, 6) for name, _, nums in queues),
        tuple(BrokerData(name, {MASTER_ID: address}) for name, address, _ in queues),
    )
