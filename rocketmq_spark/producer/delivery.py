"""One batch on its way, the attempt made at it, and the lines in which batches wait for their turn.

Rule 1: no clock and no decision here: `SendPipeline` moves a delivery from state to state, these only hold it.
Rule 2: what may go to any queue of a topic waits in the topic's line, what waits for one queue in that queue's.
Rule 3: lines are served in turn, so that with one slot free at a time none starves.
Rule 4: serial lines (``ordered``, ``sendMode=sync``) have one delivery under way each: what is behind it waits until it
        is stored, its own waits for another attempt included.
Rule 5: messages of a group are in a serial line always; groups share lines, or a million keys would be a million lines.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import EncodedBatch, MessageQueue
from rocketmq_spark.producer.retry import Attempts
from rocketmq_spark.producer.window import BATCH_COST, SINGLE_COST

# What a waiting single message takes beside its bytes: measured, the objects around it.
_SINGLE_OVERHEAD = 512

# Lines that the message groups of a topic share: as many as single messages may be on their way to one endpoint.
_GROUP_LINES: Final = 64

# `Lines.take` tries this many blocked lines that can't start, which takes about 0.5 ms.
_CHECKS: Final = 64

# A recheck tries this part of the blocked lines, if that is more than 64. So each line has requested a new route within
# 20 rechecks (2 s by default), however many there are.
_RECHECKED_PART: Final = 20


@dataclass(slots=True, eq=False)
class Delivery:
    """One batch on its way."""

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
    # Attempts that have ended without an answer in time.
    timeouts: int = 0

    @property
    def cost(self) -> float:
        """What it takes up of a window, in batches."""
        return BATCH_COST if self.batch.batch else SINGLE_COST

    @property
    def weight(self) -> int:
        """What it takes up of ``maxInFlightBytes``, bytes."""
        return batch_weight(self.batch)

    @property
    def wanted_queue(self) -> MessageQueue | None:
        """The one queue that this delivery waits for, or None if any will do."""
        return self.bound or (self.queue if self.same_queue else None)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One attempt to make now.

    Parameters
    ----------
    delivery : Delivery
    queue : MessageQueue
    address : str
    timeout : float
        ``sendMsgTimeout`` and its share for the size, seconds from the last byte written; over gRPC from the call's
        start, and twice as long after each attempt that it was too short for.
    within : float
        What is left of ``deliveryTimeoutMs``, seconds from now.
    """

    delivery: Delivery
    queue: MessageQueue
    address: str
    timeout: float
    within: float


@dataclass(slots=True, eq=False)
class _Line:
    """Deliveries that start in their order."""

    key: Hashable
    turn: int
    deliveries: deque[Delivery] = field(default_factory=deque)
    # The brokers that have no room for the first delivery; empty if the line is not blocked by a window.
    brokers: frozenset[str] = frozenset()


class Lines:
    """Deliveries that may start, first come first served within a line.

    A line whose first delivery can't start is blocked. It is tried again when a broker that it waits for has room: the
    cost of an acknowledgement does not depend on the number of lines. A new route, a deadline and the end of an
    isolation are noticed by a recheck.

    Parameters
    ----------
    serial : bool, default False
        One delivery of a line in flight at a time. Deliveries that are bound to no queue stay in their topic's line.
    single : bool, default False
        All deliveries wait in one line.
    """

    def __init__(self, *, serial: bool = False, single: bool = False) -> None:
        self._serial = serial
        self._single = single
        self._size = 0
        self._turns = itertools.count()
        # All lines; a serial line stays here, in none of the others, while its delivery is in flight or waits.
        self._lines: dict[Hashable, _Line] = {}
        # Lines to try at the next `take`.
        self._untried: dict[Hashable, _Line] = {}
        # Lines whose first delivery could not start, ordered by the time of their last try.
        self._blocked: dict[Hashable, _Line] = {}
        # Lines that wait for room at a broker, by the cost of their first delivery, in their turn.
        self._by_broker: dict[str, dict[float, dict[Hashable, _Line]]] = {}

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for line in self._lines.values() for delivery in line.deliveries)

    @property
    def open(self) -> bool:
        """True if a line's first delivery may start."""
        return bool(self._untried or self._blocked)

    def add(self, delivery: Delivery) -> None:
        """Put a delivery into its line: a new one at its end, one that was tried before at its head."""
        self._size += 1
        key = self._key(delivery)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._untried[key] = _Line(key, next(self._turns))
        if delivery.first_tried_at is None:
            line.deliveries.append(delivery)
            return
        # A retry goes ahead of new deliveries: it is older, and its deadline is running.
        if line.deliveries and line.deliveries[0].cost != delivery.cost:
            self._wait_for(line, frozenset())
        line.deliveries.appendleft(delivery)
        self._untried[key] = line

    def release(self, delivery: Delivery) -> None:
        """Let the delivery behind a stored one start."""
        if not self._is_serial(delivery):
            return
        line = self._lines[self._key(delivery)]
        if line.deliveries:
            self._untried[line.key] = line
        else:
            del self._lines[line.key]

    def take(
        self,
        start: Callable[[Delivery], Dispatch | Collection[str]],
        admits: Callable[[str, float], bool],
        *,
        recheck: bool,
    ) -> Iterator[Dispatch]:
        """Start the first deliveries of lines until no more can start, and yield their attempts.

        A line that was served goes to the end; one whose first delivery can't start keeps its turn.

        Parameters
        ----------
        start : callable
            Returns the attempt, or the brokers whose windows have no room for the delivery.
        admits : callable
            ``(broker name, cost) -> bool``: the broker's window has room.
        recheck : bool
            Also try the blocked lines that were tried longest ago, until a 20th of them, and at least 64, could neither
            start nor wait for other brokers than before: when an outage ends, all lines recover at once.
        """
        rechecked = iter(tuple(self._blocked.values()) if recheck else ())
        rechecks = max(_CHECKS, len(self._blocked) // _RECHECKED_PART)
        # Lines may wait for a broker that has room and is in isolation now. The next calls try more of them.
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
        """Take the first delivery out of its line, which goes to the end."""
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

    def _is_serial(self, delivery: Delivery) -> bool:
        return self._serial or bool(delivery.batch.message_group)

    def _key(self, delivery: Delivery) -> Hashable:
        if self._single:
            return None
        if delivery.batch.message_group:
            return delivery.batch.topic, zlib.crc32(delivery.batch.message_group.encode()) % _GROUP_LINES
        # The key of a serial line never changes, so that a retry finds its line.
        queue = delivery.bound if self._serial else delivery.wanted_queue
        return queue or delivery.batch.topic


def batch_weight(batch: EncodedBatch) -> int:
    """Return the memory that a batch takes up while it waits, bytes: a single message is more object than body."""
    return batch.nbytes if batch.batch else batch.nbytes + len(batch.properties) + _SINGLE_OVERHEAD


def broker_vip_channel(address: str) -> str:
    """Return a broker's second address: the port two below (``MixAll.brokerVIPChannel``)."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"
