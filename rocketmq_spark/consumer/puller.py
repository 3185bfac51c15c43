"""Messages of offset ranges, in the order of each queue, with many requests under way: a broker gives 32 at a time.

    plan segments -> pull -> outcome -> records of the oldest segment of a queue -> out

Rule 1: one thread does everything: it decides, and has the transport send and receive while it waits.
Rule 2: what comes out covers the range from its start to its end. Messages that are gone come out as an empty body, and
        the body of an unfiltered read must be contiguous. A queue that gives nothing for ``readTimeoutMs`` is an error.
Rule 3: segments in memory are bounded by their number, which is lowered where answers are large; an answer that would
        wait behind others and is too much beside those is dropped, and pulled again.
Rule 4: requests go ahead of each other only where the last answer tells what the next will hold: not with a filter, and
        not where a broker gives whole batches. Those queues take one at a time.
Rule 5: a broker passes over deleted messages as over those that a filter rejects. So in a filtered read the first
        message of what was passed over is pulled again without the filter, once a second and at the end of the range:
        a broker deletes the oldest messages first, so if this one is there, none was missed.

Follows spec/remoting.md section 13.1 and ``DefaultMQPushConsumerImpl.pullMessage``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.consumer.data_loss import lost
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import BrokerOutcomeUnknownException, ReadError, RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.pull import Pulled, PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.wire.records import first_queue_offset, last_queue_offset

# Requests under way, and answers not yet taken, of a task; and of one queue.
WINDOW: Final = 64
_PER_QUEUE: Final = 32
# What the answers that wait may hold together, bytes.
_MOST_BYTES: Final = 32 * 1024 * 1024
_MOST_WAITING: Final = 2 * _MOST_BYTES
# How long a broker may hold a request for messages that must come, and the waits between failures, seconds.
_SUSPEND_MS: Final = 5_000
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
# How much of a filtered read one check covers, seconds.
_CHECK_EVERY: Final = 1.0
# A broker of 5.5.0 drops them at once, and counts them in the queue's maximum offset.
_COMPACTED: Final = "the last messages of this compacted topic have no keys, and the broker has dropped them"


@dataclass(slots=True, eq=False)
class _Segment:
    """Part of a range that one request is to bring; `stop` None: as far as it goes.

    A check pulls without the filter, to see whether the broker still has the messages.
    """

    lane: _Lane
    start: int
    stop: int | None = None
    check: bool = False
    outcome: PullOutcome | None = None
    address: str = ""
    flying: bool = False


class _Lane:
    """One range on its way."""

    def __init__(self, wanted: OffsetRange, target: PullTarget, now: float, *, filtered: bool) -> None:
        self.range = wanted
        self.queue = wanted.queue
        self.target = target
        self.planned = wanted.start
        self.filtered = filtered
        self.contiguous = not filtered and not wanted.compacted
        # Up to where it is known that a filtered read has missed nothing, and when the next part is checked.
        self.checked = wanted.start if filtered and not wanted.compacted else wanted.end
        self.check_at = now + _CHECK_EVERY
        self.segments: deque[_Segment] = deque()
        # Offsets that an answer covers, once one has told.
        self.stride: int | None = None
        self.failures = 0
        # Since when nothing has come but failures.
        self.failing_since: float | None = None
        # A slave does not have the next messages, and it is not known yet whether the master has them.
        self.doubted = False
        self.waits_until = -math.inf
        self.suspend = False

    @property
    def done(self) -> bool:
        return not self.segments and self.planned >= self.range.end and self.checked >= self.range.end

    def is_check_due(self, now: float) -> bool:
        """Return whether the messages that a filtered read has passed over are to be checked now."""
        waits = now < self.check_at and self.planned < self.range.end
        return not self.segments and self.checked < self.planned and not waits

    def first_left(self, segment: _Segment, outcome: PullOutcome) -> int:
        """Return the first offset from the segment's start on that an answer has; the offset behind it if it has none.

        What a broker leaves out of a filtered read is not missing.
        """
        unfiltered = not self.filtered or segment.check
        if outcome.status is PullStatus.FOUND and unfiltered:
            first = first_queue_offset(outcome.body)
            return segment.start if first is None else min(max(first, segment.start), outcome.next_begin_offset)
        missing = outcome.status is PullStatus.OFFSET_ILLEGAL
        if missing or (outcome.status is PullStatus.NO_MATCHED_MSG and unfiltered):
            return outcome.next_begin_offset
        return segment.start

    def is_being_written(self, segment: _Segment, outcome: PullOutcome) -> bool:
        """Return whether a broker has passed over a message of a compacted topic that is not in its log yet.

        It adds a message to the queue's index before the log's end includes it (CompactionLog.getMessage). What was
        removed by compaction is not in the index.
        """
        removing = self.range.compacted and outcome.status is PullStatus.OFFSET_ILLEGAL
        return removing and outcome.next_begin_offset > max(segment.start, outcome.min_offset)


class Puller:
    """Pulls ranges.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
    queues : TopicQueues
    clock : callable
        Seconds, monotonic.
    window : int, default 64
        Requests under way and answers waiting, over all queues.
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        queues: TopicQueues,
        clock: Callable[[], float],
        window: int = WINDOW,
    ) -> None:
        self._options = options
        self._transport = transport
        self._queues = queues
        self._clock = clock
        self._window = window
        self._filtered = options.sub_expression != "*"
        self._timeout = options.pull_timeout_ms / 1000
        self._patience = options.read_timeout_ms / 1000
        self._arrived: deque[tuple[_Segment, PullOutcome]] = deque()
        # How long the consumer had what came out, over all.
        self._away = 0.0
        self._in_flight = 0
        # Bytes of the answers that wait.
        self._waiting = 0
        self._largest = 1

    def pull(self, ranges: Sequence[OffsetRange]) -> Iterator[Pulled]:
        """Yield the records of ranges of different queues, those of each queue in their order.

        Raises
        ------
        ReadError
            A queue has given nothing for ``readTimeoutMs``, or its broker refuses.
        """
        now, filtered = self._now(), self._filtered
        lanes = [_Lane(one, self._target(one.queue), now, filtered=filtered) for one in ranges if one.size > 0]
        while lanes:
            self._issue(lanes)
            self._take(lanes)
            for lane in lanes:
                for pulled in self._ready(lane):
                    left = self._clock()
                    yield pulled
                    self._away += self._clock() - left
            lanes = [lane for lane in lanes if not lane.done]

    def _now(self) -> float:
        """Return the time, which stands still while the consumer is at work: no broker is silent then."""
        return self._clock() - self._away

    def _target(self, queue: MessageQueue) -> PullTarget:
        options = self._options
        return PullTarget(
            self._queues.on_wire(queue),
            options.consumer_group,
            options.pull_batch_size,
            options.sub_expression,
            options.filter_type,
        )

    def _issue(self, lanes: Sequence[_Lane]) -> None:
        """Send what may be sent now, the queues by turns."""
        now = self._now()
        room = max(1, min(self._window, _MOST_BYTES // self._largest))
        # What waits for its next try takes no room from others.
        used = sum(one.flying or one.outcome is not None for lane in lanes for one in lane.segments)
        ready = [lane for lane in lanes if lane.waits_until <= now]
        for lane in ready:
            for segment in lane.segments:
                if segment.flying or segment.outcome is not None:
                    continue
                # The answers that take the room may all be waiting for the oldest segment of their queue.
                if used < room or (not self._in_flight and segment is lane.segments[0]):
                    self._send(segment)
                    used += 1
        # Who has least under way comes first, or the first queues would take the room of all others.
        planning = sorted(ready, key=lambda lane: len(lane.segments))
        while planning and used < room:
            still = []
            for lane in planning:
                if used < room and self._plan(lane):
                    used += 1
                    still.append(lane)
            planning = still

    def _plan(self, lane: _Lane) -> bool:
        """Send the next segment of a queue, if there is one that may go now."""
        if lane.is_check_due(self._now()):
            segment = _Segment(lane, lane.checked, lane.planned, check=True)
            lane.segments.append(segment)
            self._send(segment)
            return True
        if lane.planned >= lane.range.end:
            return False
        stride = lane.stride
        ahead = stride is not None and stride <= self._options.pull_batch_size and not self._filtered
        if lane.segments and (not ahead or len(lane.segments) >= _PER_QUEUE):
            return False
        segment = _Segment(lane, lane.planned)
        if ahead and stride is not None:
            segment.stop = min(lane.planned + stride, lane.range.end)
        lane.planned = segment.stop if segment.stop is not None else lane.range.end
        lane.segments.append(segment)
        self._send(segment)
        return True

    def _send(self, segment: _Segment) -> None:
        lane = segment.lane
        segment.flying, segment.address = True, ""
        try:
            segment.address = self._queues.address(lane.queue)
            suspend_ms = min(_SUSPEND_MS, self._options.read_timeout_ms) if lane.suspend else 0
            target = lane.target
            if segment.check:
                target = replace(target, max_msg_nums=1, sub_expression="*", expression_type="TAG")
            request = PullRequest(target, segment.address, segment.start, suspend_ms)
            arrived = self._arrived
            self._transport.pull(request, self._timeout, lambda outcome: arrived.append((segment, outcome)))
        except RocketMQError as exc:
            if not exc.retriable:
                raise
            self._arrived.append((segment, PullOutcome(None, error=exc)))
        self._in_flight += 1

    def _take(self, lanes: Sequence[_Lane]) -> None:
        """Wait for an outcome, or for the first queue that may try again, and look at all that are there."""
        now = self._now()
        wait = min((lane.waits_until - now for lane in lanes if lane.waits_until > now), default=1.0)
        self._transport.poll(0.0 if self._arrived else max(0.01, wait))
        while self._arrived:
            self._in_flight -= 1
            self._judge(*self._arrived.popleft())

    def _judge(self, segment: _Segment, outcome: PullOutcome) -> None:
        """Keep an outcome that brings the segment further, or have the segment pulled again."""
        lane = segment.lane
        segment.flying = False
        if outcome.error is not None:
            self._refused(lane, outcome.error)
            self._wait(lane, outcome.error)
            # A slave that may not be read from (slaveReadEnable) says that it is busy, for ever.
            if not outcome.error.flow_control or not self._queues.is_master(lane.queue, segment.address):
                self._queues.failed(lane.queue, segment.address)
            return
        self._queues.answered(lane.queue, segment.address)
        if outcome.status is PullStatus.OFFSET_ILLEGAL and outcome.min_offset > outcome.next_begin_offset:
            # A slave sends the requested offset back (DefaultMessageStore.nextOffsetCorrection).
            outcome = replace(outcome, next_begin_offset=outcome.min_offset)
        if lane.range.compacted and outcome.status is PullStatus.FOUND:
            # Behind its last message the broker may have passed over one that `is_being_written`.
            last = last_queue_offset(outcome.body)
            if last is not None and segment.start <= last < outcome.next_begin_offset:
                outcome = replace(outcome, next_begin_offset=last + 1)
        if outcome.status is PullStatus.NO_NEW_MSG or outcome.next_begin_offset <= segment.start:
            self._nothing_yet(lane, segment, outcome)
        elif lane.first_left(segment, outcome) > segment.start and not self._queues.trusts(lane.queue, segment.address):
            self._doubt(lane, segment, outcome)
        elif lane.is_being_written(segment, outcome):
            self._nothing_yet(lane, segment, outcome)
        else:
            lane.failures, lane.failing_since, lane.suspend, lane.doubted = 0, None, False, False
            self._largest = max(len(outcome.body), self._largest * 7 // 8, 1)
            # The window was sized by smaller answers. The oldest of a queue is taken in any case: it goes out next.
            if segment is lane.segments[0] or self._waiting + len(outcome.body) <= _MOST_WAITING:
                segment.outcome = outcome
                self._waiting += len(outcome.body)

    def _nothing_yet(self, lane: _Lane, segment: _Segment, outcome: PullOutcome) -> None:
        """A queue ends before the segment: its broker is still building it, or is a slave behind, or is another one."""
        lane.suspend = outcome.status is PullStatus.NO_NEW_MSG and segment is lane.segments[0]
        address = segment.address
        what = f"{lane.queue} ends before offset {lane.range.end - 1}: "
        what += f"{address} has offsets {outcome.min_offset} to {outcome.max_offset} of it"
        end, why = lane.range.end, _COMPACTED
        if lane.is_being_written(segment, outcome):
            end, why = outcome.next_begin_offset, f"{address} lists messages there that it does not return"
            what = f"{lane.queue} at offset {segment.start}: {why}"
        if self._may_pass_over(lane, address):
            lost(self._options, f"{lane.queue} has no messages {segment.start} to {end - 1}: {why}")
            segment.outcome = PullOutcome(PullStatus.NO_MATCHED_MSG, end)
            return
        self._wait(lane, ReadError(what))
        if not self._queues.is_master(lane.queue, address):
            self._queues.failed(lane.queue, address)

    def _may_pass_over(self, lane: _Lane, address: str) -> bool:
        """Return whether a read without ``failOnDataLoss`` has waited long enough for messages of a compacted queue."""
        waited = 0.0 if lane.failing_since is None else self._now() - lane.failing_since
        may_end = lane.range.compacted and not self._options.fail_on_data_loss
        return may_end and waited > self._patience and self._queues.trusts(lane.queue, address)

    def _doubt(self, lane: _Lane, segment: _Segment, outcome: PullOutcome) -> None:
        """Ask the master for messages that a slave does not have: the slave may have been added later."""
        lane.doubted = True
        text = f"the slave {segment.address} of {lane.queue} has no messages {segment.start} to "
        self._wait(lane, ReadError(f"{text}{lane.first_left(segment, outcome) - 1}, and its master does not answer"))
        self._queues.failed(lane.queue, segment.address)

    def _ready(self, lane: _Lane) -> Iterator[Pulled]:
        """Yield what has come in, in its order, and plan anew what an answer has left over."""
        while lane.segments and (outcome := lane.segments[0].outcome) is not None:
            segment = lane.segments[0]
            self._waiting -= len(outcome.body)
            stop = lane.range.end if segment.stop is None else segment.stop
            end = min(outcome.next_begin_offset, stop)
            if segment.check:
                yield from self._checked(lane, segment, outcome, stop)
                continue
            if outcome.status is PullStatus.FOUND:
                yield Pulled(lane.queue, segment.start, end, outcome.body, lane.contiguous)
                lane.stride = outcome.next_begin_offset - segment.start
            elif lane.first_left(segment, outcome) > segment.start and not lane.range.compacted:
                yield Pulled(lane.queue, segment.start, end, b"", contiguous=True)
            if end < stop and segment.stop is not None:
                # Less than the answer before: what is left of it comes before all that is planned already.
                segment.start, segment.outcome = end, None
                self._send(segment)
                return
            lane.segments.popleft()
            if segment.stop is None:
                lane.planned = end

    def _checked(self, lane: _Lane, segment: _Segment, outcome: PullOutcome, stop: int) -> Iterator[Pulled]:
        """Yield what has expired while a filtered read passed over it."""
        lane.segments.popleft()
        left = min(lane.first_left(segment, outcome), stop)
        if left > segment.start:
            yield Pulled(lane.queue, segment.start, left, b"", contiguous=True)
        lane.checked, lane.check_at = stop, self._now() + _CHECK_EVERY
        if outcome.status is not PullStatus.FOUND:
            # The broker may have deleted more than one answer says: the rest is checked next.
            lane.checked, lane.check_at = left, -math.inf

    def _wait(self, lane: _Lane, error: RocketMQError) -> None:
        """Let a queue wait before its next try; raise once it has given nothing for too long."""
        now = self._now()
        if lane.waits_until > now:
            # Of many requests that fail together the first one counts.
            return
        if lane.failing_since is None:
            lane.failing_since = now
        elif now - lane.failing_since > self._patience + (2 * (self._timeout + _LONGEST_WAIT) if lane.doubted else 0.0):
            # A slave's answer counts after `_patience`. The last request to the master delays it by up to `_timeout`.
            raise self._gives_nothing(lane, error) from error
        lane.waits_until = now + min(_FIRST_WAIT * 2**lane.failures, _LONGEST_WAIT)
        lane.failures = min(lane.failures + 1, 16)

    def _refused(self, lane: _Lane, error: RocketMQError) -> None:
        """Raise what trying again will not mend."""
        # A broker without enablePropertyFilter answers SYSTEM_ERROR to SQL92.
        filtered = self._options.filter_type == "SQL92" and isinstance(error, BrokerOutcomeUnknownException)
        if not error.retriable or filtered:
            advice = "; filterType=SQL92 needs brokers with enablePropertyFilter=true" if filtered else ""
            raise ReadError(
                f"reading {lane.queue} from offset {lane.range.start} to {lane.range.end - 1}: {error}{advice}"
            ) from error

    def _gives_nothing(self, lane: _Lane, error: RocketMQError) -> ReadError:
        at = lane.segments[0].start if lane.segments else lane.planned
        return ReadError(
            f"reading {lane.queue} up to offset {lane.range.end - 1}: nothing came from offset {at} on for "
            f"readTimeoutMs={self._options.read_timeout_ms}. The last try: {error}. Bring the broker back if it is "
            "down, wait longer with readTimeoutMs, or read what is there with other offsets"
            + (f". Or {_COMPACTED}: then set failOnDataLoss=false" if lane.range.compacted else "")
        )
