"""Where a recovery begins to read a queue (floors), and the one way in which it reads: every message, or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from rocketmq_spark.deliveries.log.brokers import COMPARE, Brokers
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, Pulled
from rocketmq_spark.sink.failures import HOW_LOST

logger = logging.getLogger("rocketmq_spark.producer")

# A queue that lost its end may have rows of the write below their floor. A recovery looks at this many messages there.
_LOOK_BACK: Final = 32
LOST_TAIL: Final = f"the broker has lost messages that it had stored ({HOW_LOST}), or the topic was created again"


@dataclass(frozen=True, slots=True)
class Known:
    """The rows have this offset of their queue, or higher ones."""

    offset: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """The rows may be anywhere in their queue. So all of its messages must be there, from offset 0 on."""


UNKNOWN: Final = Unknown()
Floor: TypeAlias = Known | Unknown


def lowest(floors: Iterable[Floor]) -> Floor:
    """Return the lowest floor; it is unknown if one of them is."""
    offsets = [floor.offset if isinstance(floor, Known) else None for floor in floors]
    known = [offset for offset in offsets if offset is not None]
    return Known(min(known)) if known and len(known) == len(offsets) else UNKNOWN


def floor_now(
    brokers: Brokers, queue: MessageQueue, floor: Floor, end: int, is_own: Callable[[MessageExt], bool]
) -> Floor:
    """Return the floor of a queue that ends at `end` now: it is unknown if the broker has lost messages since then."""
    if isinstance(floor, Unknown):
        return floor
    if end < floor.offset:
        warn_of_lost_tail(queue, floor.offset, end, "The whole queue is read")
        return UNKNOWN
    if any(map(is_own, brokers.messages_before(queue, floor.offset, _LOOK_BACK))):
        text = "queue %s ended at offset %d before, and has rows of this write before it: %s. The whole queue is read"
        logger.warning(text, queue, floor.offset, LOST_TAIL)
        return UNKNOWN
    return floor


def scan(brokers: Brokers, queue: MessageQueue, floor: Floor, end: int) -> Iterator[Pulled]:
    """Yield the answers that have the messages of a queue from a floor to `end`.

    Raises a DataLossError if an offset between them has no message, the first one included.
    """
    return brokers.pulls(queue, _start(queue, floor, end), end, complete=True)


def scan_messages(brokers: Brokers, queue: MessageQueue, floor: Floor, end: int) -> Iterator[MessageExt]:
    """Yield the messages of a queue from a floor to `end`; raises as `scan`."""
    return brokers.read(queue, _start(queue, floor, end), end, complete=True)


def _start(queue: MessageQueue, floor: Floor, end: int) -> int:
    if isinstance(floor, Unknown):
        return 0
    if end < floor.offset:
        raise DataLossError(
            f"reading queue {queue}: it ended at offset {floor.offset} before, and ends at {end} now: {LOST_TAIL}. "
            f"{COMPARE}"
        )
    return floor.offset


def warn_of_lost_tail(queue: MessageQueue, before: int, now: int, effect: str) -> None:
    """Log that a queue ended at offset `before`, and ends at `now`."""
    logger.warning(
        "queue %s ended at offset %d before, and ends at %d now: %s. %s", queue, before, now, LOST_TAIL, effect
    )
