"""What a read does about messages that are gone (``failOnDataLoss``), and about those that it leaves out."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.wire.unwrap import Unreadable

logger = logging.getLogger("rocketmq_spark.consumer")

# Seconds from one warning of skipped messages to the next.
_WARNING_INTERVAL = 1.0


def lost(options: ReaderOptions, text: str) -> None:
    """Raise `DataLossError`, or with ``failOnDataLoss=false`` log it."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{text}. To go on with what is left, set failOnDataLoss=false")
    logger.warning("%s; failOnDataLoss=false goes on with what is left", text)


def expired(options: ReaderOptions, queue: MessageQueue, start: int, end: int, first: int) -> None:
    """Report the messages from offset `start` up to `end`: the queue begins at offset `first` now."""
    lost(
        options,
        f"messages {start} to {end - 1} of {queue} are not there any more, the first one left is {first}: they "
        "expired (fileReservedTime), or the topic was made anew",
    )


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
