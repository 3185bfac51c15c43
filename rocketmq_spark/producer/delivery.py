"""One batch on its way, the attempt made at it, and the lines in which batches wait for their turn.

Rule 1: no clock and no decision here: `SendPipeline` moves a delivery from state to state, these only hold it.
Rule 2: what may go to any queue of a topic waits in the topic's line, what waits for one queue in that queue's.
Rule 3: lines are served in turn, so that with one slot free at a time none starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import EncodedBatch, MessageQueue
from rocketmq_spark.producer.retry import Attempts
from rocketmq_spark.producer.window import BATCH_COST, SINGLE_COST

# What a waiting single message takes beside its bytes: measured, the objects around it.
_SINGLE_OVERHEAD = 512


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
        ``sendMsgTimeout`` and its share for the size, seconds from the last byte written.
    within : float
        What is left of ``deliveryTimeoutMs``, seconds from now.
    """

    delivery: Delivery
    queue: MessageQueue
    address: str
    timeout: float
    within: float


class Lines:
    """Deliveries that may start, first come first served within a line."""

    def __init__(self) -> None:
        self._by_key: dict[str | MessageQueue, deque[Delivery]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def __iter__(self) -> Iterator[Delivery]:
        return (delivery for line in self._by_key.values() for delivery in line)

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def add(self, delivery: Delivery) -> None:
        """Put a delivery into its line."""
        line = self._by_key.setdefault(delivery.wanted_queue or delivery.batch.topic, deque())
        # What was sent before goes ahead of what was not: it is older, and its deadline is running.
        (line.append if delivery.first_tried_at is None else line.appendleft)(delivery)

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
                line.popleft()
                del self._by_key[key]
                if line:
                    self._by_key[key] = line
                yield dispatch


def batch_weight(batch: EncodedBatch) -> int:
    """Return the memory that a batch takes up while it waits, bytes: a single message is more object than body."""
    return batch.nbytes if batch.batch else batch.nbytes + len(batch.properties) + _SINGLE_OVERHEAD
