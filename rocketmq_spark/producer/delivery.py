"""One batch on its way, the attempt made at it, and the lines in which batches wait for their turn.

Rule 1: no clock and no decision here: `SendPipeline` moves a delivery from state to state, these only hold it.
Rule 2: what may go to any queue of a topic waits in the topic's line, what waits for one queue in that queue's.
Rule 3: lines are served in turn, so that with one slot free at a time none starves.
Rule 4: serial lines (``ordered``, ``sendMode=sync``) have one delivery under way each: what is behind it waits until it
        is stored, its own waits for another attempt included.
Rule 5: messages of a group are in a serial line always; groups share lines, or a million keys would be a million lines.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
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


class Lines:
    """Deliveries that may start, first come first served within a line.

    Parameters
    ----------
    serial : bool, default False
        One delivery of a line under way at a time. What is bound to no queue stays in its topic's line then.
    single : bool, default False
        All deliveries wait in one line.
    """

    def __init__(self, *, serial: bool = False, single: bool = False) -> None:
        self._serial = serial
        self._single = single
        self._by_key: dict[Hashable, deque[Delivery]] = {}
        # Lines whose first delivery is under way, without it.
        self._held: dict[Hashable, deque[Delivery]] = {}

    def __len__(self) -> int:
        return sum(map(len, (*self._by_key.values(), *self._held.values())))

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for line in (*self._by_key.values(), *self._held.values()) for delivery in line)

    @property
    def open(self) -> bool:
        """True if a line's first delivery may start."""
        return bool(self._by_key)

    def add(self, delivery: Delivery) -> None:
        """Put a delivery into its line: a new one at its end, one that was tried before at its head."""
        key = self._key(delivery)
        if delivery.first_tried_at is None:
            line = self._held[key] if key in self._held else self._by_key.setdefault(key, deque())
            line.append(delivery)
            return
        # What was sent before goes ahead of what was not: it is older, and its deadline is running.
        line = self._held.pop(key) if key in self._held else self._by_key.get(key, deque())
        line.appendleft(delivery)
        self._by_key[key] = line

    def release(self, delivery: Delivery) -> None:
        """Let the one behind a delivery that is stored go."""
        if self._is_serial(delivery) and (line := self._held.pop(self._key(delivery))):
            self._by_key[self._key(delivery)] = line

    def take(self, start: Callable[[Delivery], Dispatch | None]) -> Iterator[Dispatch]:
        """Offer the first of each line to `start` until it takes none any more, and yield what it made of them.

        A line that was served goes to the end, one whose first delivery has to wait stays in front.
        """
        served = True
        while served:
            served = False
            for key in tuple(self._by_key):
                line = self._by_key[key]
                dispatch = start(line[0])
                if dispatch is None:
                    continue
                served = True
                del self._by_key[key]
                if self._is_serial(line.popleft()):
                    self._held[key] = line
                elif line:
                    self._by_key[key] = line
                yield dispatch

    def _is_serial(self, delivery: Delivery) -> bool:
        return self._serial or bool(delivery.batch.message_group)

    def _key(self, delivery: Delivery) -> Hashable:
        if self._single:
            return None
        if delivery.batch.message_group:
            return delivery.batch.topic, zlib.crc32(delivery.batch.message_group.encode()) % _GROUP_LINES
        # A serial line is known by what never changes: its delivery is to find it again when it comes back.
        queue = delivery.bound if self._serial else delivery.wanted_queue
        return queue or delivery.batch.topic


def batch_weight(batch: EncodedBatch) -> int:
    """Return the memory that a batch takes up while it waits, bytes: a single message is more object than body."""
    return batch.nbytes if batch.batch else batch.nbytes + len(batch.properties) + _SINGLE_OVERHEAD


def broker_vip_channel(address: str) -> str:
    """Return a broker's second address: the port two below (``MixAll.brokerVIPChannel``)."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"
