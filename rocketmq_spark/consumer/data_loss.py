"""Reports messages that a read misses (``failOnDataLoss``) or skips (``onUnreadable=skip``)."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.wire.unwrap import Unreadable

logger = logging.getLogger("rocketmq_spark.consumer")

# Seconds from one warning of skipped messages to the next.
_WARNING_INTERVAL: Final = 1.0
# How many gaps one error names. A broker that deletes files leaves one gap per queue.
_MOST_NAMED: Final = 1_000


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages of a queue that its broker no longer has.

    Parameters
    ----------
    queue : MessageQueue
        With the topic as the user knows it.
    start, end : int
        The first missing offset, and the one after the last.
    first_left : int
        The first offset after `start` that the broker has.
    """

    queue: MessageQueue
    start: int
    end: int
    first_left: int

    def __str__(self) -> str:
        return (
            f"messages {self.start} to {self.end - 1} of {self.queue} are not there any more, the first one left is "
            f"{self.first_left}"
        )


def lost(options: ReaderOptions, text: str) -> None:
    """Raise `DataLossError`, or with ``failOnDataLoss=false`` log it."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{text}. To go on with what is left, set failOnDataLoss=false")
    logger.warning("%s; failOnDataLoss=false goes on with what is left", text)


def expired(options: ReaderOptions, gaps: Sequence[Gap]) -> None:
    """Raise one `DataLossError` that names all gaps, or with ``failOnDataLoss=false`` log each."""
    why = "they expired (fileReservedTime), or the topic was deleted and created again"
    if gaps and options.fail_on_data_loss:
        more = f"; and {len(gaps) - _MOST_NAMED} more gaps" if len(gaps) > _MOST_NAMED else ""
        lost(options, f"{'; '.join(map(str, gaps[:_MOST_NAMED]))}{more}: {why}")
    for gap in gaps:
        lost(options, f"{gap}: {why}")


class Gaps:
    """The gaps that a task has met and not reported yet. Gaps of a queue that touch are one.

    Parameters
    ----------
    options : ReaderOptions
    """

    def __init__(self, options: ReaderOptions) -> None:
        self._options = options
        self._gaps: list[Gap] = []

    def add(self, queue: MessageQueue, start: int, end: int) -> None:
        """Add missing offsets; those of a queue come in order."""
        for number, gap in enumerate(self._gaps):
            if gap.queue == queue and gap.end == start:
                self._gaps[number] = replace(gap, end=end, first_left=end)
                return
        self._gaps.append(Gap(queue, start, end, end))

    def report(self, reached: Mapping[MessageQueue, int] | None = None) -> None:
        """Report the gaps that end before the offset that a read has reached in their queue; by default all.

        Raises
        ------
        DataLossError
            There is such a gap, with ``failOnDataLoss``. The error names the other gaps, too.
        """
        open_gaps = [gap for gap in self._gaps if reached is not None and gap.end >= reached.get(gap.queue, gap.end)]
        if len(open_gaps) < len(self._gaps):
            closed = self._gaps if self._options.fail_on_data_loss else [g for g in self._gaps if g not in open_gaps]
            self._gaps = open_gaps
            expired(self._options, closed)


class SkippedMessages:
    """The unreadable messages that one task leaves out with ``onUnreadable=skip``: counted, and logged.

    A warning names the newest position, at most once per second; `close` logs what no warning has counted yet.

    Parameters
    ----------
    clock : callable, default time.monotonic
        Seconds.

    Attributes
    ----------
    by_topic : Counter of str
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.by_topic: Counter[str] = Counter()
        self._clock = clock
        self._warned_at = -math.inf
        self._newest: Unreadable | None = None

    def skip(self, message: Unreadable) -> bool:
        """Count a message, and return False: it becomes no row."""
        self.by_topic[message.queue.topic] += message.end - message.start
        self._newest = message
        if self._clock() - self._warned_at >= _WARNING_INTERVAL:
            self.close()
        return False

    def close(self) -> None:
        """Log what has been skipped since the last warning, if anything has. Idempotent."""
        if self._newest is not None:
            logger.warning(
                "onUnreadable=skip: this task has left out %d messages so far; %s",
                *(self.by_topic.total(), self._newest),
            )
            self._newest, self._warned_at = None, self._clock()
