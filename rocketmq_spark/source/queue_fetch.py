"""The state of one queue of a task: its requests, the answers that wait for earlier ones, and the results of its turns.

With a filter, an answer does not show whether skipped messages were deleted or rejected. So the first is pulled without
the filter, from the same broker, except in compaction topics. If it exists, none was deleted, because brokers delete
the oldest first. A slave may have deleted more than its master. So its answer is held until this slave has returned the
first message.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullStatus, PullTarget
from rocketmq_spark.protocol.remoting.command import MAX_FRAME
from rocketmq_spark.protocol.remoting.records import first_queue_offset, place_of
from rocketmq_spark.source.ranges import OffsetRange

TURN: Final = 1024
"""The offsets of a queue's turn: as many as the largest answer. Other turns change the order of the rows of a range.

All queues advance together, because a broker's commit log has their messages side by side.
"""

PER_QUEUE: Final = 32
"""The most requests and answers of one queue."""

# By what the number of messages of a request is divided after an answer above the limit of a frame.
_SHRINK: Final = 4
# Bytes of an answer that show that no more messages should be asked for: half of the limit of a frame.
_LONG_ANSWER: Final = MAX_FRAME // 2

# Seconds from one check of a filtered read to the next.
CHECK_EVERY: Final = 1.0


@dataclass(slots=True, eq=False)
class Segment:
    """The part of a range that one request covers (`stop` None: up to the answer's end); a `check` has no filter.

    `later`: the request was sent for a later turn than the present one. `asked`: the most messages it asked for.
    `held`: a slave's answer to the filtered request; the next request has no filter, and goes to the same `address`.
    """

    fetch: QueueFetch
    start: int
    stop: int | None = None
    check: bool = False
    later: bool = False
    outcome: PullOutcome | None = None
    address: str = ""
    asked: int = 0
    held: PullOutcome | None = None

    @property
    def unfiltered(self) -> bool:
        """Whether the request asks for the first message, of any tags."""
        return self.check or self.held is not None


class QueueFetch:
    """The state of one range."""

    def __init__(self, offsets: OffsetRange, target: PullTarget, turn: int, now: float, *, filtered: bool) -> None:
        self.range = offsets
        self.queue = offsets.queue
        self.target = target
        self._most = target.max_msg_nums
        self.turn = turn
        self.planned = offsets.start
        self.filtered = filtered
        self.contiguous = not filtered and not offsets.compacted
        # The offset up to which a filtered read has missed nothing, and the time of the next check.
        self.checked = offsets.start if filtered and not offsets.compacted else offsets.end
        self.check_at = now + CHECK_EVERY
        # The masters that have passed over messages since `checked`: each one gets the check. Another copy of the
        # queue does not show what they had.
        self.unchecked: list[str] = []
        # Requests without an answer, and answers that wait for an earlier one.
        self.segments: deque[Segment] = deque()
        # Requests to send again, by offset, and the number of those in flight.
        self.unsent: list[Segment] = []
        self.flying = 0
        # Results that wait for the queue's turn, the offset after them, and the end of that turn.
        self.ready: deque[Pulled] = deque()
        self.received = offsets.start
        self.border = offsets.begin + turn
        self.alone = False
        # The number of offsets that the last answer covered.
        self.stride: int | None = None
        self.failures = 0
        # The time of the first failure since the last answer.
        self.failing_since: float | None = None
        # A slave does not have the next messages, and the master has not answered yet.
        self.doubted = False
        self.waits_until = -math.inf
        self.suspend = False
        # The broker was busy: it gets one request until it answers.
        self.busy = False

    @property
    def done(self) -> bool:
        """Whether all results were taken."""
        return not self.ready and not self.segments and min(self.planned, self.checked) >= self.range.end

    @property
    def is_turn_over(self) -> bool:
        """Whether the next result is of a later turn. The last turn also waits for the last check."""
        at = self.ready[0].start if self.ready else self.received
        return self.border <= at < self.range.end

    def may_send(self, most: int) -> bool:
        """Return whether the queue may have another request, with `most` requests in flight."""
        if self.unsent:
            return True
        segments = len(self.segments)
        if segments and (self.filtered or self.stride is None):
            # The answer shows where the next request begins.
            return False
        if segments >= most or segments + len(self.ready) >= PER_QUEUE:
            return False
        return self.planned < self.range.end or (not segments and self.checked < self.planned)

    def is_alone(self) -> None:
        """End the turns: no other queue is left."""
        self.alone, self.border = True, self.range.end

    def next_stop(self, most: int) -> int | None:
        """Return where the next request stops, or None if only its answer shows that."""
        stride = self.stride
        if self.filtered or stride is None or stride > most:
            return None
        if not self.alone and self.turn % stride == 0:
            # A turn then has a whole number of answers. Others have to be divided.
            stride -= (self.planned - self.border) % stride
        return min(self.planned + stride, self.range.end)

    def ask_for_less(self, asked: int) -> bool:
        """Ask for fewer messages from now on than `asked`, whose answer was too long; False for a single message."""
        if asked > 1:
            self._ask_for(min(self.target.max_msg_nums, asked // _SHRINK))
        return asked > 1

    def ask_for_more(self, segment: Segment, outcome: PullOutcome) -> None:
        """Ask for twice as many messages after an answer that shows that they fit, up to ``pullBatchSize``."""
        asked = self.target.max_msg_nums
        if asked < self._most and segment.asked == asked and len(outcome.body) * 2 <= _LONG_ANSWER:
            self._ask_for(min(asked * 2, self._most))

    def _ask_for(self, messages: int) -> None:
        self.target = replace(self.target, max_msg_nums=max(messages, 1))

    def again(self, segment: Segment) -> None:
        """Send a segment's request again when possible."""
        bisect.insort(self.unsent, segment, key=lambda other: other.start)

    def is_check_due(self, now: float) -> bool:
        """Return whether to check now if the messages that a filtered read has skipped still exist."""
        is_time = now >= self.check_at or self.planned >= self.range.end
        return is_time and not self.segments and self.checked < self.planned

    def first_left(self, segment: Segment, outcome: PullOutcome) -> int:
        """Return the segment's first offset that is not missing; messages that the broker's filter rejects are not."""
        unfiltered = not self.filtered or segment.unfiltered
        if outcome.status is PullStatus.FOUND and unfiltered:
            first = first_queue_offset(outcome.body)
            return segment.start if first is None else min(max(first, segment.start), outcome.next_begin_offset)
        missing = outcome.status is PullStatus.OFFSET_ILLEGAL
        if missing or (outcome.status is PullStatus.NO_MATCHED_MSG and unfiltered):
            return outcome.next_begin_offset
        return segment.start

    def passes_over(self, segment: Segment, outcome: PullOutcome) -> bool:
        """Return whether a filtered answer lacks the segment's first message, which was rejected or deleted."""
        if not self.filtered or segment.unfiltered:
            return False
        return outcome.status is not PullStatus.FOUND or first_queue_offset(outcome.body) != segment.start

    def is_being_written(self, segment: Segment, outcome: PullOutcome) -> bool:
        """Return whether a skipped message is in the index, not yet in the log (`CompactionLog.getMessage`).

        Messages that compaction removed are not in the index.
        """
        removing = self.range.compacted and outcome.status is PullStatus.OFFSET_ILLEGAL
        return removing and outcome.next_begin_offset > max(segment.start, outcome.min_offset)


def divided(pulled: Pulled, offset: int) -> tuple[Pulled, Pulled]:
    """Return the parts of a result before and from an offset on."""
    at = place_of(pulled.body, offset)
    if at is None:
        # Both parts have all records, and the offsets select the messages.
        return replace(pulled, end=offset), replace(pulled, start=offset)
    body = pulled.body
    return replace(pulled, end=offset, body=body[:at]), replace(pulled, start=offset, body=body[at:])
