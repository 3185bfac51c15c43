"""The parts of `SendPipeline`: batches and their attempts, retry rules, lines of ready batches.

A line is a queue of batches that may start; a retried batch goes to its head. Batches bound to a message queue share a
line, and so do the other batches of a topic; `SendQueues` has more rules. Lines take turns. A serial line waits until
its previous batch is stored (docs/internals/sink.md#ordered-writes). Nothing here reads a clock: `now` is an argument,
in seconds.
"""

from __future__ import annotations

import enum
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.properties import (
    DELAY,
    NAME_VALUE_SEPARATOR,
    PROPERTY_SEPARATOR,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
)
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.sink.limits import BATCH_COST, SINGLE_COST

# How the properties of delayed messages begin.
_DELAYS: Final = tuple(
    f"{PROPERTY_SEPARATOR}{name}{NAME_VALUE_SEPARATOR}"
    for name in (DELAY, TIMER_DELAY_MS, TIMER_DELAY_SEC, TIMER_DELIVER_MS)
)

# Memory of the objects around a waiting single message, measured, bytes.
_SINGLE_OVERHEAD: Final = 512
# Lines that the message groups of a topic share: as many as single messages may be in flight to one endpoint.
_GROUP_LINES: Final = 64

# `SendQueues.start_ready` tries this many blocked lines that cannot start, which takes about 0.5 ms.
_CHECKS: Final = 64
# A recheck tries a 20th of the blocked lines, if that is more than 64. So each line requests a new route within 20
# rechecks (2 s by default), however many there are.
_RECHECKED_PART: Final = 20


class Verdict(enum.Enum):
    """What to do with a batch after one attempt."""

    STORED = "stored"
    SAME_QUEUE = "same queue again, after a wait"
    OTHER_BROKER = "another broker, at once"
    LATER = "another broker, after a wait"
    GIVE_UP = "fail"


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that was offered, and its attempts so far; `bound` is the only queue it may go to."""

    batch: EncodedBatch
    bound: MessageQueue | None
    queue: MessageQueue | None = None
    same_queue: bool = False
    last_broker_name: str | None = None
    first_tried_at: float | None = None
    sent_at: float = 0.0
    # Of the last attempt, epoch milliseconds.
    born_timestamp: int = 0
    maybe_stored: bool = False
    last_error: RocketMQError | None = None
    # Attempts that failed since the last wait, and the number of waits (the exponent of the backoff).
    failures_in_round: int = 0
    waits: int = 0
    # Attempts whose answer was "stored, but not safe", and attempts that timed out.
    not_store_ok: int = 0
    timeouts: int = 0
    # A part of a batch that costs as much as a single message.
    small: bool = False

    @property
    def cost(self) -> float:
        """Its share of a window, in batches."""
        return BATCH_COST if self.batch.batch and not self.small else SINGLE_COST

    @property
    def wanted_queue(self) -> MessageQueue | None:
        """The queue that the batch waits for, or None for any."""
        return self.bound or (self.queue if self.same_queue else None)

    def part(self, batch: EncodedBatch, *, small: bool) -> PendingBatch:
        """Return a part of this batch: it has the same deadline, and is perhaps stored if this batch is."""
        tried_at, maybe_stored = self.first_tried_at, self.maybe_stored
        return PendingBatch(
            batch, self.bound, self.queue, first_tried_at=tried_at, maybe_stored=maybe_stored, small=small
        )


class RetryPolicy:
    """Whether a batch is sent again, and where to, by the options of a write."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._retry_times = options.retry_times_when_send_failed
        # Attempts that follow a failed one without a wait.
        self._retry_times_at_once = self._retry_times
        if options.send_mode == "async":
            self._retry_times_at_once = options.retry_times_when_send_async_failed

    def decide(self, pending: PendingBatch, outcome: SendOutcome) -> Verdict:
        """Return what to do after an attempt's outcome, and count it."""
        if outcome.status is SendStatus.SEND_OK:
            return Verdict.STORED
        if outcome.status is not None:
            return self._after_unsafe_answer(pending)
        assert outcome.error is not None
        return self._after_error(pending, outcome.error)

    def follows_at_once(self, pending: PendingBatch) -> bool:
        """Return whether a failure of the next attempt would be retried at another broker without a wait."""
        return pending.bound is None and pending.failures_in_round < self._retry_times_at_once

    def _after_unsafe_answer(self, pending: PendingBatch) -> Verdict:
        required = self._options.require_store_ok
        elsewhere = self._options.retry_another_broker_when_not_store_ok and pending.bound is None
        if not required and not elsewhere:
            return Verdict.STORED
        pending.not_store_ok += 1
        # Endless resends would only multiply rows that are stored already.
        if pending.not_store_ok > self._retry_times:
            return Verdict.GIVE_UP if required else Verdict.STORED
        pending.waits += 1
        return Verdict.LATER if elsewhere else Verdict.SAME_QUEUE

    def _after_error(self, pending: PendingBatch, error: RocketMQError) -> Verdict:
        if not error.retriable:
            return Verdict.GIVE_UP
        if pending.bound is not None or error.flow_control:
            pending.waits += 1
            return Verdict.SAME_QUEUE
        if self.follows_at_once(pending):
            pending.failures_in_round += 1
            return Verdict.OTHER_BROKER
        pending.failures_in_round = 0
        pending.waits += 1
        return Verdict.LATER


@dataclass(slots=True)
class Dispatch:
    """An attempt to make now."""

    pending: PendingBatch
    queue: MessageQueue
    address: str
    # Seconds from the last byte written, over gRPC from the call's start (docs/internals/producer.md#timeouts).
    timeout: float
    # The rest of ``deliveryTimeoutMs``, seconds from now.
    within: float


@dataclass(frozen=True)
class Parts:
    """The parts of a batch that is too large for the `Pace`, in their order."""

    batches: Sequence[PendingBatch]


@dataclass(slots=True, eq=False)
class _Line:
    """Batches that start in their order."""

    key: Hashable
    turn: int
    batches: deque[PendingBatch] = field(default_factory=deque)
    # The brokers that have no room for the first batch; empty if the line is not blocked by a window.
    brokers: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)
class SendQueues:
    """Batches that may start, in lines, first come first served except for retries; with `single` there is one line.

    A message queue has a line for the batches that are bound to it or go there again, a topic one for its others. Over
    gRPC the message groups of a topic share 64 more, which are always serial.

    A line whose first batch cannot start is blocked until a broker that it waits for has room. So the cost of an
    acknowledgement does not depend on the number of lines. A recheck notices new routes, deadlines and the end of an
    isolation. With `serial`, unbound batches stay in their topic's line.
    """

    _: KW_ONLY
    serial: bool = False
    single: bool = False
    _size: int = 0
    _turns: Iterator[int] = field(default_factory=itertools.count)
    # All lines. While the batch of a serial line is in flight or waits, the line is in none of the others.
    _lines: dict[Hashable, _Line] = field(default_factory=dict)
    # Lines to try at the next `start_ready`.
    _untried: dict[Hashable, _Line] = field(default_factory=dict)
    # Lines whose first batch could not start, ordered by the time of their last try.
    _blocked: dict[Hashable, _Line] = field(default_factory=dict)
    # Lines that wait for room at a broker, by the cost of their first batch, in their turn.
    _by_broker: dict[str, dict[float, dict[Hashable, _Line]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[PendingBatch]:
        return (pending for line in self._lines.values() for pending in line.batches)

    @property
    def open(self) -> bool:
        """True if a line's first batch may start."""
        return bool(self._untried or self._blocked)

    def add(self, pending: PendingBatch) -> None:
        """Put a batch into its line: a new one at the end, a retried one at the head."""
        self._size += 1
        key = self._key(pending)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._untried[key] = _Line(key, next(self._turns))
        if pending.first_tried_at is None:
            line.batches.append(pending)
            return
        # A retry precedes batches with a later deadline, and new batches. The parts of one batch have one deadline.
        place = 0
        for other in line.batches:
            if other.first_tried_at is None or other.first_tried_at >= pending.first_tried_at:
                break
            place += 1
        if place == 0 and line.batches and line.batches[0].cost != pending.cost:
            self._wait_for(line, frozenset())
        line.batches.insert(place, pending)
        self._untried[key] = line

    def release(self, pending: PendingBatch) -> None:
        """Let the batch behind a stored one start."""
        if not self._is_serial(pending):
            return
        line = self._lines[self._key(pending)]
        if line.batches:
            self._untried[line.key] = line
        else:
            del self._lines[line.key]

    def start_ready(
        self,
        start: Callable[[PendingBatch], Dispatch | Parts | Collection[str]],
        admits: Callable[[str, float], bool],
        *,
        recheck: bool,
    ) -> Iterator[Dispatch]:
        """Start the first batches of lines until no more can start, and yield their attempts.

        `start` returns the attempt, parts to try in the batch's place, or the brokers that have no room for it.
        `admits` returns whether a broker has room for a cost. A `recheck` also tries the blocked lines, beginning with
        the one tried longest ago. It ends when a 20th of them, and at least 64, could neither start nor wait for other
        brokers than before. So all lines recover at once when an outage ends.
        """
        rechecked = iter(tuple(self._blocked.values()) if recheck else ())
        rechecks = max(_CHECKS, len(self._blocked) // _RECHECKED_PART)
        # Lines may wait for a broker that has room and is isolated now. The next calls try more of them.
        checks = _CHECKS
        while True:
            from_recheck = False
            line = self._admitted(admits) if checks else None
            checks -= line is not None
            if line is None and self._untried:
                line = self._untried.pop(next(iter(self._untried)))
            if line is None and rechecks:
                line = next((line for line in rechecked if self._blocked.get(line.key) is line), None)
                from_recheck = True
            if line is None:
                return
            result = start(line.batches[0])
            if isinstance(result, Parts):
                self._wait_for(line, frozenset())
                self._blocked.pop(line.key, None)
                line.batches.popleft()
                line.batches.extendleft(reversed(result.batches))
                self._size += len(result.batches) - 1
                self._untried[line.key] = line
                continue
            if not isinstance(result, Dispatch):
                brokers = frozenset(result)
                rechecks -= from_recheck and brokers == line.brokers
                self._wait_for(line, brokers)
                self._blocked.pop(line.key, None)
                self._blocked[line.key] = line
                continue
            checks = _CHECKS
            self._serve(line)
            yield result

    def _admitted(self, admits: Callable[[str, float], bool]) -> _Line | None:
        """Return a line that waits for a broker that has room, if there is one."""
        for broker, lines_by_cost in self._by_broker.items():
            first = [
                next(iter(lines.values())) for cost, lines in lines_by_cost.items() if lines and admits(broker, cost)
            ]
            if first:
                # Brokers take turns: while a `Pace` is on, `admits` allows one request at a time for all of them.
                self._by_broker[broker] = self._by_broker.pop(broker)
                return min(first, key=lambda line: line.turn)
        return None

    def _serve(self, line: _Line) -> None:
        """Take the first batch out of its line, and give the line a new turn, after all others."""
        self._wait_for(line, frozenset())
        self._blocked.pop(line.key, None)
        self._untried.pop(line.key, None)
        self._size -= 1
        line.turn = next(self._turns)
        if self._is_serial(line.batches.popleft()):
            return
        if line.batches:
            self._untried[line.key] = line
        else:
            del self._lines[line.key]

    def _wait_for(self, line: _Line, brokers: frozenset[str]) -> None:
        """Set the brokers that a line waits for. At brokers that stay in the set, the line keeps its turn."""
        if brokers == line.brokers:
            return
        cost = line.batches[0].cost
        for broker in line.brokers - brokers:
            del self._by_broker[broker][cost][line.key]
        for broker in brokers - line.brokers:
            self._by_broker.setdefault(broker, {BATCH_COST: {}, SINGLE_COST: {}})[cost][line.key] = line
        line.brokers = brokers

    def _is_serial(self, pending: PendingBatch) -> bool:
        return self.serial or bool(pending.batch.message_group)

    def _key(self, pending: PendingBatch) -> Hashable:
        if self.single:
            return None
        if pending.batch.message_group:
            return pending.batch.topic, zlib.crc32(pending.batch.message_group.encode()) % _GROUP_LINES
        # The key of a serial line never changes, so that a retry finds its line.
        queue = pending.bound if self.serial else pending.wanted_queue
        return queue or pending.batch.topic


def batch_weight(batch: EncodedBatch) -> int:
    """Return a waiting batch's share of ``maxInFlightBytes``; the objects around a single message count."""
    if batch.messages:
        return sum(map(batch_weight, batch.messages))
    return batch.nbytes if batch.batch else batch.nbytes + len(batch.properties) + _SINGLE_OVERHEAD


def offset_of(batch: EncodedBatch, outcome: SendOutcome) -> int:
    """Return the offset of a batch's first message in its queue; -1 if it is unknown.

    A delayed message is no part of a batch. It is in a topic of the broker first. The acknowledgement has that offset.
    """
    properties = batch.properties
    # All names have one of these parts; few other messages do.
    if not batch.batch and (DELAY in properties or TIMER_DELIVER_MS in properties):
        separated = f"{PROPERTY_SEPARATOR}{properties}"
        if any(name in separated for name in _DELAYS):
            return -1
    return outcome.queue_offset
