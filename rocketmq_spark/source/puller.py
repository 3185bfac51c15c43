"""Pulls the messages of a task's offset ranges, with many requests in flight (docs/internals/reads.md#pulls).

Results of a queue come in offset order. An empty body means that the messages were deleted. An answer that
waits for an earlier one, and exceeds the memory bound, is dropped and pulled again.

With a filter, an answer does not show whether skipped messages were deleted or rejected. So the first is pulled without
the filter, except in compaction topics. If it exists, none was deleted, because brokers delete the oldest first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark.errors import BrokerOutcomeUnknownException, ReadError, RocketMQError
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.records import first_queue_offset, last_queue_offset
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.ranges import OffsetRange, lost
from rocketmq_spark.transport.base import ReadTransport

# The most requests in flight and answers waiting, of a task and of one queue.
WINDOW: Final = 64
_PER_QUEUE: Final = 32
# The most bytes of requested answers. Answers that wait have at most twice as many.
_MOST_BYTES: Final = 32 * 1024 * 1024
# An answer's bytes before the first one has come: the limit of brokers with settings for fast reads.
_LARGEST: Final = 4 * 1024 * 1024
# How long a broker may hold a request for messages that must come (ms), and the waits between failures (s).
_SUSPEND_MS: Final = 5_000
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
# Seconds from one check of a filtered read to the next.
_CHECK_EVERY: Final = 1.0
# Brokers drop such messages, but count them in the maximum offset (docs/internals/reads.md#compaction-topics).
_COMPACTED: Final = "the last messages of this compacted topic have no keys, and the broker has dropped them"


@dataclass(slots=True, eq=False)
class _Segment:
    """The part of a range that one request covers (`stop` None: up to the answer's end); a `check` has no filter."""

    fetch: _QueueFetch
    start: int
    stop: int | None = None
    check: bool = False
    outcome: PullOutcome | None = None
    address: str = ""
    flying: bool = False


class _QueueFetch:
    """The state of one range."""

    def __init__(self, offsets: OffsetRange, target: PullTarget, now: float, *, filtered: bool) -> None:
        self.range = offsets
        self.queue = offsets.queue
        self.target = target
        self.planned = offsets.start
        self.filtered = filtered
        self.contiguous = not filtered and not offsets.compacted
        # The offset up to which a filtered read has missed nothing, and the time of the next check.
        self.checked = offsets.start if filtered and not offsets.compacted else offsets.end
        self.check_at = now + _CHECK_EVERY
        self.segments: deque[_Segment] = deque()
        # The number of offsets that the last answer covered.
        self.stride: int | None = None
        self.failures = 0
        # The time of the first failure since the last answer.
        self.failing_since: float | None = None
        # A slave does not have the next messages, and the master has not answered yet.
        self.doubted = False
        self.waits_until = -math.inf
        self.suspend = False

    @property
    def done(self) -> bool:
        return not self.segments and min(self.planned, self.checked) >= self.range.end

    def is_check_due(self, now: float) -> bool:
        """Return whether to check now if the messages that a filtered read has skipped still exist."""
        is_time = now >= self.check_at or self.planned >= self.range.end
        return is_time and not self.segments and self.checked < self.planned

    def first_left(self, segment: _Segment, outcome: PullOutcome) -> int:
        """Return the segment's first offset that is not missing; messages that the broker's filter rejects are not."""
        unfiltered = not self.filtered or segment.check
        if outcome.status is PullStatus.FOUND and unfiltered:
            first = first_queue_offset(outcome.body)
            return segment.start if first is None else min(max(first, segment.start), outcome.next_begin_offset)
        missing = outcome.status is PullStatus.OFFSET_ILLEGAL
        if missing or (outcome.status is PullStatus.NO_MATCHED_MSG and unfiltered):
            return outcome.next_begin_offset
        return segment.start

    def is_being_written(self, segment: _Segment, outcome: PullOutcome) -> bool:
        """Return whether a skipped message is in the index, not yet in the log (`CompactionLog.getMessage`).

        Messages that compaction removed are not in the index.
        """
        removing = self.range.compacted and outcome.status is PullStatus.OFFSET_ILLEGAL
        return removing and outcome.next_begin_offset > max(segment.start, outcome.min_offset)


@dataclass(eq=False, repr=False)
class Puller:
    """Pulls ranges; `window` bounds the requests in flight and the answers waiting, over all queues.

    Answers in flight have about `most_bytes` bytes together. Answers that wait have twice as many bytes, and one more
    answer for each queue. `clock` runs only in `ReadTransport.poll`: the consumer's time is no silence of a broker.
    """

    options: SourceOptions
    transport: ReadTransport
    brokers: BrokerChoice
    clock: Callable[[], float]
    window: int = WINDOW
    most_bytes: int = _MOST_BYTES
    _arrived: deque[tuple[_Segment, PullOutcome]] = field(default_factory=deque, init=False)
    _in_flight: int = field(default=0, init=False)
    # Bytes of the answers that wait, and of the largest one lately.
    _waiting: int = field(default=0, init=False)
    _largest: int = field(default=_LARGEST, init=False)

    def __post_init__(self) -> None:
        self._filtered = self.options.sub_expression != "*"
        self._patience = self.options.read_timeout_ms / 1000

    def pull(self, ranges: Sequence[OffsetRange]) -> Iterator[Pulled]:
        """Yield the records of ranges of different queues, in the order of each queue.

        Raises a ReadError if a queue returns nothing for ``readTimeoutMs``, or its broker refuses.
        """
        options, now = self.options, self.clock()
        settings = options.consumer_group, options.pull_batch_size, options.sub_expression, options.filter_type
        fetches = [
            _QueueFetch(offsets, PullTarget(offsets.queue, *settings), now, filtered=self._filtered)
            for offsets in ranges
            if offsets.size > 0
        ]
        while fetches:
            self._issue(fetches)
            self._await_outcomes(fetches)
            for fetch in fetches:
                yield from self._ready(fetch)
            fetches = [fetch for fetch in fetches if not fetch.done]

    def _issue(self, fetches: Sequence[_QueueFetch]) -> None:
        """Send the requests that may be sent now, taking turns between queues."""
        now = self.clock()
        room = max(1, min(self.window, self.most_bytes // self._largest))
        # A segment that waits for its next try does not count.
        used = sum(segment.flying or segment.outcome is not None for fetch in fetches for segment in fetch.segments)
        ready = [fetch for fetch in fetches if fetch.waits_until <= now]
        for fetch in ready:
            for segment in fetch.segments:
                if segment.flying or segment.outcome is not None:
                    continue
                # The answers that fill the window may all be waiting for the oldest segment of their queue.
                if used < room or (not self._in_flight and segment is fetch.segments[0]):
                    self._send(segment)
                    used += 1
        # The queue with the fewest segments comes first, or the first queues would take all the room.
        planning = sorted(ready, key=lambda fetch: len(fetch.segments))
        while planning and used < room:
            planned = []
            for fetch in planning:
                if used < room and self._plan(fetch):
                    used += 1
                    planned.append(fetch)
            planning = planned

    def _plan(self, fetch: _QueueFetch) -> bool:
        """Send the next segment of a queue, if one may be sent now, and return whether it was."""
        if fetch.is_check_due(self.clock()):
            segment = _Segment(fetch, fetch.checked, fetch.planned, check=True)
        else:
            if fetch.planned >= fetch.range.end:
                return False
            stop = None
            if fetch.stride is not None and fetch.stride <= self.options.pull_batch_size and not self._filtered:
                stop = min(fetch.planned + fetch.stride, fetch.range.end)
            if fetch.segments and (stop is None or len(fetch.segments) >= _PER_QUEUE):
                return False
            segment = _Segment(fetch, fetch.planned, stop)
            fetch.planned = fetch.range.end if stop is None else stop
        fetch.segments.append(segment)
        self._send(segment)
        return True

    def _send(self, segment: _Segment) -> None:
        fetch = segment.fetch
        segment.flying, segment.address = True, ""
        try:
            segment.address = self.brokers.address(fetch.queue)
            suspend_ms = min(_SUSPEND_MS, self.options.read_timeout_ms) if fetch.suspend else 0
            target = fetch.target
            if segment.check:
                target = replace(target, max_msg_nums=1, sub_expression="*", expression_type="TAG")
            request = PullRequest(target, segment.address, segment.start, suspend_ms)
            arrived = self._arrived
            self.transport.pull(request, self.brokers.timeout, lambda outcome: arrived.append((segment, outcome)))
        except RocketMQError as exc:
            if not exc.retriable:
                raise
            self._arrived.append((segment, PullOutcome(None, error=exc)))
        self._in_flight += 1

    def _await_outcomes(self, fetches: Sequence[_QueueFetch]) -> None:
        """Wait for an outcome, or for the first queue that may try again, and handle all outcomes."""
        now = self.clock()
        wait = min((fetch.waits_until - now for fetch in fetches if fetch.waits_until > now), default=1.0)
        self.transport.poll(0.0 if self._arrived else max(0.01, wait))
        while self._arrived:
            self._in_flight -= 1
            self._judge(*self._arrived.popleft())

    def _judge(self, segment: _Segment, outcome: PullOutcome) -> None:
        """Keep an outcome that advances the segment; otherwise the segment is pulled again."""
        fetch = segment.fetch
        segment.flying = False
        if outcome.error is not None:
            # A broker without enablePropertyFilter answers SYSTEM_ERROR to SQL92.
            sql = self.options.filter_type == "SQL92" and isinstance(outcome.error, BrokerOutcomeUnknownException)
            if sql or not outcome.error.retriable:
                advice = "; filterType=SQL92 needs brokers with enablePropertyFilter=true" if sql else ""
                where = f"reading {fetch.queue} from offset {fetch.range.start} to {fetch.range.end - 1}"
                raise ReadError(f"{where}: {outcome.error}{advice}") from outcome.error
            self._wait(fetch, outcome.error)
            # A slave without slaveReadEnable always answers that it is busy.
            if not outcome.error.flow_control or not self.brokers.is_master(fetch.queue, segment.address):
                self.brokers.failed(fetch.queue, segment.address)
            return
        self.brokers.answered(fetch.queue, segment.address)
        if outcome.status is PullStatus.OFFSET_ILLEGAL and outcome.min_offset > outcome.next_begin_offset:
            # A slave returns the requested offset (DefaultMessageStore.nextOffsetCorrection).
            outcome = replace(outcome, next_begin_offset=outcome.min_offset)
        if fetch.range.compacted and outcome.status is PullStatus.FOUND:
            # After its last message the broker may have skipped one that `is_being_written`.
            last = last_queue_offset(outcome.body)
            if last is not None and segment.start <= last < outcome.next_begin_offset:
                outcome = replace(outcome, next_begin_offset=last + 1)
        left = fetch.first_left(segment, outcome)
        if outcome.status is PullStatus.NO_NEW_MSG or outcome.next_begin_offset <= segment.start:
            self._nothing_yet(fetch, segment, outcome)
        elif left > segment.start and not self.brokers.trusts(fetch.queue, segment.address):
            # The slave may have been added later than the messages: the next request goes to the master.
            fetch.doubted = True
            text = f"the slave {segment.address} of {fetch.queue} has no messages {segment.start} to {left - 1}"
            self._wait(fetch, ReadError(f"{text}, and its master does not answer"))
            self.brokers.failed(fetch.queue, segment.address)
        elif fetch.is_being_written(segment, outcome):
            self._nothing_yet(fetch, segment, outcome)
        else:
            fetch.failures, fetch.failing_since, fetch.suspend, fetch.doubted = 0, None, False, False
            self._largest = max(len(outcome.body), self._largest * 7 // 8, 1)
            # The window was sized by smaller answers. A queue's oldest answer is always kept: it is yielded next.
            if segment is fetch.segments[0] or self._waiting + len(outcome.body) <= 2 * self.most_bytes:
                segment.outcome = outcome
                self._waiting += len(outcome.body)

    def _nothing_yet(self, fetch: _QueueFetch, segment: _Segment, outcome: PullOutcome) -> None:
        """Wait for messages after the end that a broker reports: it is building the queue, or is a slave behind."""
        fetch.suspend = outcome.status is PullStatus.NO_NEW_MSG and segment is fetch.segments[0]
        address = segment.address
        text = f"{fetch.queue} ends before offset {fetch.range.end - 1}: "
        text += f"{address} reports minOffset={outcome.min_offset} and maxOffset={outcome.max_offset}"
        end, cause = fetch.range.end, _COMPACTED
        if fetch.is_being_written(segment, outcome):
            end, cause = outcome.next_begin_offset, f"{address} lists messages there that it does not return"
            text = f"{fetch.queue} at offset {segment.start}: {cause}"
        waited = 0.0 if fetch.failing_since is None else self.clock() - fetch.failing_since
        may_skip = fetch.range.compacted and not self.options.fail_on_data_loss
        if may_skip and waited > self._patience and self.brokers.trusts(fetch.queue, address):
            lost(self.options, f"{fetch.queue} has no messages {segment.start} to {end - 1}: {cause}")
            segment.outcome = PullOutcome(PullStatus.NO_MATCHED_MSG, end)
            return
        self._wait(fetch, ReadError(text))
        if not self.brokers.is_master(fetch.queue, address):
            self.brokers.failed(fetch.queue, address)

    def _ready(self, fetch: _QueueFetch) -> Iterator[Pulled]:
        """Yield the answers of a queue in order, and pull again the part that an answer lacks."""
        while fetch.segments and (outcome := fetch.segments[0].outcome) is not None:
            segment = fetch.segments[0]
            self._waiting -= len(outcome.body)
            stop = fetch.range.end if segment.stop is None else segment.stop
            end = min(outcome.next_begin_offset, stop)
            if segment.check:
                yield from self._checked(fetch, segment, outcome, stop)
                continue
            if outcome.status is PullStatus.FOUND:
                yield Pulled(fetch.queue, segment.start, end, outcome.body, fetch.contiguous)
                fetch.stride = outcome.next_begin_offset - segment.start
            elif fetch.first_left(segment, outcome) > segment.start and not fetch.range.compacted:
                yield Pulled(fetch.queue, segment.start, end, b"", contiguous=True)
            if end < stop and segment.stop is not None:
                # The answer is shorter than the one before: its rest comes before all later segments.
                segment.start, segment.outcome = end, None
                self._send(segment)
                return
            fetch.segments.popleft()
            if segment.stop is None:
                fetch.planned = end

    def _checked(self, fetch: _QueueFetch, segment: _Segment, outcome: PullOutcome, stop: int) -> Iterator[Pulled]:
        """Yield the messages that expired while a filtered read skipped them."""
        fetch.segments.popleft()
        left = min(fetch.first_left(segment, outcome), stop)
        if left > segment.start:
            yield Pulled(fetch.queue, segment.start, left, b"", contiguous=True)
        fetch.checked, fetch.check_at = stop, self.clock() + _CHECK_EVERY
        if outcome.status is not PullStatus.FOUND:
            # The broker may have deleted more messages than one answer shows: the rest is checked next.
            fetch.checked, fetch.check_at = left, -math.inf

    def _wait(self, fetch: _QueueFetch, error: RocketMQError) -> None:
        """Delay the queue's next try; raise a ReadError if it has returned nothing for too long."""
        now = self.clock()
        if fetch.waits_until > now:
            # Requests that fail together count as one failure.
            return
        # A slave's answer counts after `_patience`. The last request to the master delays it by up to its timeout.
        patience = self._patience + (2 * (self.brokers.timeout + _LONGEST_WAIT) if fetch.doubted else 0.0)
        if fetch.failing_since is None:
            fetch.failing_since = now
        elif now - fetch.failing_since > patience:
            at = fetch.segments[0].start if fetch.segments else fetch.planned
            raise ReadError(
                f"reading {fetch.queue} up to offset {fetch.range.end - 1}: nothing came from offset {at} on for "
                f"readTimeoutMs={self.options.read_timeout_ms}. The last try: {error}. Start the broker if it is down, "
                "raise readTimeoutMs, or choose other offsets to read the stored messages"
                + (f". Or {_COMPACTED}: then set failOnDataLoss=false" if fetch.range.compacted else "")
            ) from error
        fetch.waits_until = now + min(_FIRST_WAIT * 2**fetch.failures, _LONGEST_WAIT)
        fetch.failures = min(fetch.failures + 1, 16)
