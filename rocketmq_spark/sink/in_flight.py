"""A batch in flight, the attempt to send it, and the lines in which batches wait for their turn.

There is no clock and no decision here: `SendPipeline` moves a batch from state to state, and these classes hold it. A
batch for any queue waits in the line of its topic, a batch for one queue in the line of that queue. Lines are served in
turn, so that none starves. A serial line (``ordered``, ``sendMode=sync``, and always for message groups) has one batch
in flight or waiting for a retry, and the others behind it. Groups share lines: a million keys would be a million lines.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.errors import DeliveryError, MQBrokerException, RocketMQError
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome
from rocketmq_spark.protocol.batches import lone_message
from rocketmq_spark.sink.pacing import BATCH_COST, SINGLE_COST, Attempts

# Memory of the objects around a waiting single message, measured, bytes.
_SINGLE_OVERHEAD = 512

# Lines that the message groups of a topic share: as many as single messages may be in flight to one endpoint.
_GROUP_LINES: Final = 64

# `SendQueues.take` tries this many blocked lines that can't start, which takes about 0.5 ms.
_CHECKS: Final = 64

# A recheck tries this part of the blocked lines, if that is more than 64. So each line has requested a new route within
# 20 rechecks (2 s by default), however many there are.
_RECHECKED_PART: Final = 20


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that was offered, and its attempts so far; `bound` is the only queue it may go to."""

    batch: EncodedBatch
    bound: MessageQueue | None
    attempts: Attempts = field(default_factory=Attempts)
    queue: MessageQueue | None = None
    same_queue: bool = False
    last_broker_name: str | None = None
    first_tried_at: float | None = None
    sent_at: float = 0.0
    maybe_stored: bool = False
    last_error: RocketMQError | None = None
    # Attempts that have timed out.
    timeouts: int = 0

    @property
    def cost(self) -> float:
        """Its share of a window, in batches."""
        return BATCH_COST if self.batch.batch else SINGLE_COST

    @property
    def weight(self) -> int:
        """Its share of ``maxInFlightBytes``, bytes."""
        return batch_weight(self.batch)

    @property
    def wanted_queue(self) -> MessageQueue | None:
        """The queue that the batch waits for, or None for any."""
        return self.bound or (self.queue if self.same_queue else None)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An attempt to make now."""

    delivery: InFlightBatch
    queue: MessageQueue
    address: str
    # ``sendMsgTimeout`` plus the share for the size, seconds from the last byte written. Over gRPC it counts from the
    # start of the call, and doubles after each timeout.
    timeout: float
    # The rest of ``deliveryTimeoutMs``, seconds from now.
    within: float


@dataclass(slots=True, eq=False)
class _Line:
    """Batches that start in their order."""

    key: Hashable
    turn: int
    deliveries: deque[InFlightBatch] = field(default_factory=deque)
    # The brokers that have no room for the first batch; empty if the line is not blocked by a window.
    brokers: frozenset[str] = frozenset()


class SendQueues:
    """Batches that may start, first come first served within a line.

    A line whose first batch cannot start is blocked. It is tried again when a broker that it waits for has room. So the
    cost of an acknowledgement does not depend on the number of lines. A recheck notices new routes, deadlines and the
    end of an isolation. With `serial`, a line has one batch in flight at a time, and unbound batches stay in their
    topic's line. With `single` there is one line.
    """

    def __init__(self, *, serial: bool = False, single: bool = False) -> None:
        self._serial = serial
        self._single = single
        self._size = 0
        self._turns = itertools.count()
        # All lines. While the batch of a serial line is in flight or waits, the line is in none of the others.
        self._lines: dict[Hashable, _Line] = {}
        # Lines to try at the next `take`.
        self._untried: dict[Hashable, _Line] = {}
        # Lines whose first batch could not start, ordered by the time of their last try.
        self._blocked: dict[Hashable, _Line] = {}
        # Lines that wait for room at a broker, by the cost of their first batch, in their turn.
        self._by_broker: dict[str, dict[float, dict[Hashable, _Line]]] = {}

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[InFlightBatch]:
        return (delivery for line in self._lines.values() for delivery in line.deliveries)

    @property
    def open(self) -> bool:
        """True if a line's first batch may start."""
        return bool(self._untried or self._blocked)

    def add(self, delivery: InFlightBatch) -> None:
        """Put a batch into its line: a new one at the end, a retried one at the head."""
        self._size += 1
        key = self._key(delivery)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._untried[key] = _Line(key, next(self._turns))
        if delivery.first_tried_at is None:
            line.deliveries.append(delivery)
            return
        # A retry precedes new batches, because its deadline is running.
        if line.deliveries and line.deliveries[0].cost != delivery.cost:
            self._wait_for(line, frozenset())
        line.deliveries.appendleft(delivery)
        self._untried[key] = line

    def release(self, delivery: InFlightBatch) -> None:
        """Let the batch behind a stored one start."""
        if not self._is_serial(delivery):
            return
        line = self._lines[self._key(delivery)]
        if line.deliveries:
            self._untried[line.key] = line
        else:
            del self._lines[line.key]

    def take(
        self,
        start: Callable[[InFlightBatch], Dispatch | Collection[str]],
        admits: Callable[[str, float], bool],
        *,
        recheck: bool,
    ) -> Iterator[Dispatch]:
        """Start the first batches of lines until no more can start, and yield their attempts.

        A line that was served goes to the end; one whose first batch cannot start keeps its turn.

        `start` returns the attempt, or the brokers whose windows have no room for the batch. `admits` tells whether a
        broker's window has room for a cost. A `recheck` also tries the blocked lines that were tried longest ago, until
        a 20th of them, and at least 64, could neither start nor wait for other brokers than before. So all lines
        recover at once when an outage ends.
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
            result = start(line.deliveries[0])
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
                return min(first, key=lambda line: line.turn)
        return None

    def _serve(self, line: _Line) -> None:
        """Take the first batch out of its line, which goes to the end."""
        self._wait_for(line, frozenset())
        self._blocked.pop(line.key, None)
        self._untried.pop(line.key, None)
        self._size -= 1
        line.turn = next(self._turns)
        if self._is_serial(line.deliveries.popleft()):
            return
        if line.deliveries:
            self._untried[line.key] = line
        else:
            del self._lines[line.key]

    def _wait_for(self, line: _Line, brokers: frozenset[str]) -> None:
        """Set the brokers that a line waits for. At brokers that stay in the set, the line keeps its turn."""
        if brokers == line.brokers:
            return
        cost = line.deliveries[0].cost
        for broker in line.brokers - brokers:
            del self._by_broker[broker][cost][line.key]
        for broker in brokers - line.brokers:
            self._by_broker.setdefault(broker, {BATCH_COST: {}, SINGLE_COST: {}})[cost][line.key] = line
        line.brokers = brokers

    def _is_serial(self, delivery: InFlightBatch) -> bool:
        return self._serial or bool(delivery.batch.message_group)

    def _key(self, delivery: InFlightBatch) -> Hashable:
        if self._single:
            return None
        if delivery.batch.message_group:
            return delivery.batch.topic, zlib.crc32(delivery.batch.message_group.encode()) % _GROUP_LINES
        # The key of a serial line never changes, so that a retry finds its line.
        queue = delivery.bound if self._serial else delivery.wanted_queue
        return queue or delivery.batch.topic


def batch_weight(batch: EncodedBatch) -> int:
    """Return the memory of a waiting batch, bytes; the objects around a single message count."""
    return batch.nbytes if batch.batch else batch.nbytes + len(batch.properties) + _SINGLE_OVERHEAD


# The most characters of a message's keys or tags in an error.
_SHOWN: Final = 100


def reason(outcome: SendOutcome) -> str:
    """Return the name of a failed outcome, for ``retries_by_reason`` and ``failures_by_code``."""
    if outcome.status is not None:
        return outcome.status.name
    code = getattr(outcome.error, "response_code", None)
    name = type(outcome.error).__name__
    return f"{name} {code}" if code is not None else name


def refused_for_good(delivery: InFlightBatch, outcome: SendOutcome) -> str:
    """Return why a batch is given up before its deadline."""
    if outcome.status is None:
        # Other errors are this side's, for example a certificate that it does not trust.
        told_by_broker = isinstance(outcome.error, MQBrokerException)
        return "the broker refused it for good" if told_by_broker else "sending it again would not help"
    return (
        f"broker {outcome.queue.broker_name} stored it {delivery.attempts.not_store_ok} times but answered "
        f"{outcome.status.name} each time: it is not safe there yet. Mend the broker's flushing or replication, "
        "or set requireStoreOk=false to accept that"
    )


def no_queue(delivery: InFlightBatch, delivery_timeout_ms: int) -> str:
    """Return which queue a batch has waited for until its deadline."""
    wanted = delivery.wanted_queue
    if wanted is None:
        return f"waited deliveryTimeoutMs={delivery_timeout_ms} for any writable queue of topic {delivery.batch.topic}"
    return (
        f"waited deliveryTimeoutMs={delivery_timeout_ms} for queue {wanted}: no name server lists a master of broker "
        f"{wanted.broker_name} with this queue; start the broker"
    )


def delivery_error(delivery: InFlightBatch, why: str) -> DeliveryError:
    """Return the error of a write that this batch ends; its cause is the last attempt's error."""
    batch, error = delivery.batch, delivery.last_error
    where = f" to {delivery.queue}" if delivery.queue else ""
    what = f"{batch.rows} rows of topic {batch.topic} ({'; '.join((f'{batch.nbytes} bytes', *_which(batch)))})"
    failure = DeliveryError(f"sending {what}{where}: {why}" + (f"; last error: {error}" if error else ""))
    failure.__cause__ = error
    return failure


def _which(batch: EncodedBatch) -> list[str]:
    """Return keys, tags and id of a batch's only row; nothing for several rows."""
    try:
        message = lone_message(batch)
    except RocketMQError:
        # The error has the reason of the failure. That the batch cannot be decoded is a less useful one.
        return []
    if message is None:
        return []
    found = {"keys": message.keys, "tags": message.tags, "message id": message.unique_id}
    return [f"{name} {text[:_SHOWN]}" for name, text in found.items() if text]
