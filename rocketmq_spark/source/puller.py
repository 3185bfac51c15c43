"""Pulls the messages of a task's offset ranges, with many requests in flight (docs/internals/reads.md#pulls).

The queues take turns. The order of the results depends only on the ranges: each turn of a queue is `TURN` offsets.
Requests run ahead of the turns. An empty body means that the messages were deleted. An answer that must wait, and
exceeds the memory bound, is dropped and pulled again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark.errors import (
    BrokerOutcomeUnknownException,
    ColdReadException,
    ReadError,
    RocketMQError,
    TooLongFrameException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.command import MAX_FRAME
from rocketmq_spark.protocol.remoting.records import last_queue_offset
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.queue_fetch import CHECK_EVERY, PER_QUEUE, TURN, QueueFetch, Segment, divided
from rocketmq_spark.source.ranges import OffsetRange, lost
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.source")

# The most requests in flight, of a task. The most requests and answers of one queue, and its fewest.
WINDOW: Final = 64
_FEWEST: Final = 8
# The most bytes of results from one look at the sockets to the next, and what a result costs besides its bytes. With
# less, few answers come at a time, and each costs more processor time.
_RESULTS: Final = 8 * 1024 * 1024
_RESULT: Final = 8 * 1024
# The most bytes of requested answers. Together with answers that wait, they have at most twice as many.
_MOST_BYTES: Final = 32 * 1024 * 1024
# An answer's bytes before the first one has come: the limit of brokers with settings for fast reads.
_LARGEST: Final = 4 * 1024 * 1024
# How long a broker may hold a request for messages that must come (ms), and the waits between failures (s).
_SUSPEND_MS: Final = 5_000
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
# Brokers drop such messages, but count them in the maximum offset (docs/internals/reads.md#compaction-topics).
_COMPACTED: Final = "the last messages of this compacted topic have no keys, and the broker has dropped them"


@dataclass(eq=False, repr=False)
class Puller:
    """Pulls ranges; `window` bounds the requests in flight and the answers waiting, over all queues.

    Answers in flight have about `most_bytes` bytes together. With answers that wait, they have twice as many, and one
    more answer. `clock` runs only in `ReadTransport.poll`: the consumer's time is no silence of a broker.
    """

    options: SourceOptions
    transport: ReadTransport
    brokers: BrokerChoice
    clock: Callable[[], float]
    window: int = WINDOW
    most_bytes: int = _MOST_BYTES
    turn: int = TURN
    # Requests about these queues go only to brokers that `BrokerChoice.trusts`.
    trusted: Collection[MessageQueue] = ()
    # The queues whose last answer came from a master.
    of_masters: set[MessageQueue] = field(default_factory=set, init=False)
    _arrived: deque[tuple[Segment, PullOutcome]] = field(default_factory=deque, init=False)
    # The queues in the order of their next turns.
    _turns: deque[QueueFetch] = field(default_factory=deque, init=False)
    # Requests in flight, and those of them that were sent for a later turn.
    _in_flight: int = field(default=0, init=False)
    _in_flight_later: int = field(default=0, init=False)
    # Bytes of the answers that wait, and of the largest one lately.
    _waiting: int = field(default=0, init=False)
    _largest: int = field(default=_LARGEST, init=False)
    # Whether a warning has reported a limit of cold reads.
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._filtered = self.options.sub_expression != "*"
        self._patience = self.options.read_timeout_ms / 1000

    def pull(self, ranges: Sequence[OffsetRange]) -> Iterator[Pulled]:
        """Yield the records of ranges of different queues: the next `turn` offsets of each queue, and so on.

        Raises a ReadError if a queue returns nothing for ``readTimeoutMs``, or its broker refuses.
        """
        options, now = self.options, self.clock()
        settings = options.consumer_group, options.pull_batch_size, options.sub_expression, options.filter_type
        self._turns = turns = deque(
            QueueFetch(offsets, PullTarget(offsets.queue, *settings), self.turn, now, filtered=self._filtered)
            for offsets in ranges
            if offsets.size > 0
        )
        for fetch in turns:
            fetch.doubted = fetch.queue in self.trusted
        given = 0
        while turns:
            if len(turns) == 1:
                turns[0].is_alone()
            self._issue()
            # Results may wait that were not yielded, because requests had to be sent first.
            self._await_outcomes(0.0 if given >= _RESULTS else 1.0)
            given = 0
            while turns and given < _RESULTS:
                fetch = turns[0]
                ready, border = fetch.ready, fetch.border
                while ready and ready[0].start < border:
                    pulled = ready.popleft()
                    if pulled.end > border and pulled.body:
                        self._waiting -= len(pulled.body)
                        pulled, rest = divided(pulled, border)
                        ready.appendleft(rest)
                        self._waiting += len(pulled.body) + len(rest.body)
                    self._waiting -= len(pulled.body)
                    given += _RESULT + len(pulled.body)
                    yield pulled
                if fetch.done:
                    turns.popleft()
                elif fetch.is_turn_over:
                    fetch.border += self.turn
                    turns.rotate(-1)
                else:
                    break

    def _issue(self) -> None:
        """Send the requests that may be sent now: first up to the end of each queue's next turn, then those beyond.

        Only those of the turn itself may use all the room.
        """
        now, turns = self.clock(), self._turns
        room = max(1, min(self.window, self.most_bytes // self._largest))
        room_now = min(room, (2 * self.most_bytes - self._waiting) // self._largest)
        room_later = min(room, (self.most_bytes * 3 // 2 - self._waiting) // self._largest)
        most = 1 if self._filtered else min(PER_QUEUE, max(_FEWEST, self.window // len(turns)))
        # The rest is kept for the queue in turn.
        most_later = room - max(1, min(most, room // 4))
        first = turns[0]
        fetches = turns if self._in_flight < room_later and self._in_flight_later < most_later else (first,)
        ready = [fetch for fetch in fetches if fetch.waits_until <= now and fetch.may_send(most)]
        for beyond in (False, True):
            for fetch in ready:
                if beyond or fetch is not first:
                    free = min(room_later - self._in_flight, most_later - self._in_flight_later)
                else:
                    # Results that wait for other turns never stop this one.
                    free = max(room_now - self._in_flight, not fetch.flying and self._in_flight < self.window)
                if free > 0:
                    self._send_some(fetch, free, most, later=beyond or fetch is not first, beyond=beyond)

    def _send_some(self, fetch: QueueFetch, free: int, most: int, *, later: bool, beyond: bool) -> None:
        """Send at most `free` requests of a queue, with at most `most` in flight.

        Not `beyond`, only requests up to the end of the queue's next turn are sent.
        """
        if fetch.busy:
            free = min(free, 1 - fetch.flying)
        while fetch.unsent and free > 0 and (beyond or fetch.unsent[0].start < fetch.border):
            self._send(fetch.unsent.pop(0), later=later)
            free -= 1
        if free > 0 and fetch.checked < fetch.planned and fetch.is_check_due(self.clock()):
            fetch.segments.append(Segment(fetch, fetch.checked, fetch.planned, check=True))
            self._send(fetch.segments[-1], later=later)
            return
        segments, end = fetch.segments, fetch.range.end if beyond else min(fetch.border, fetch.range.end)
        free = min(free, most - len(segments), PER_QUEUE - len(segments) - len(fetch.ready))
        while free > 0 and fetch.planned < end:
            stop = fetch.next_stop(self.options.pull_batch_size)
            if stop is None and segments:
                return
            segment = Segment(fetch, fetch.planned, stop)
            fetch.planned = fetch.range.end if stop is None else stop
            segments.append(segment)
            self._send(segment, later=later)
            free -= 1

    def _send(self, segment: Segment, *, later: bool) -> None:
        fetch, segment.later = segment.fetch, later
        if fetch.failing_since is not None and not fetch.flying:
            # While other queues had all the room, this one was not asked, and so was not silent.
            fetch.failing_since += max(0.0, self.clock() - fetch.waits_until)
        fetch.flying += 1
        address, segment.address = segment.address, ""
        try:
            if segment.check and fetch.unchecked:
                address = fetch.unchecked[0]
            elif segment.held is None:
                address = self.brokers.address(fetch.queue, trusted=fetch.queue in self.trusted)
            segment.address = address
            suspend_ms = min(_SUSPEND_MS, self.options.read_timeout_ms) if fetch.suspend else 0
            target = fetch.target
            if segment.unfiltered:
                target = replace(target, max_msg_nums=1, sub_expression="*", expression_type="TAG")
            segment.asked = target.max_msg_nums
            request = PullRequest(target, segment.address, segment.start, suspend_ms)
            arrived = self._arrived
            self.transport.pull(request, self.brokers.timeout, lambda outcome: arrived.append((segment, outcome)))
        except RocketMQError as exc:
            if not exc.retriable:
                raise
            self._arrived.append((segment, PullOutcome(None, error=exc)))
        self._in_flight += 1
        self._in_flight_later += later

    def _await_outcomes(self, longest: float) -> None:
        """Wait for an outcome, or for the first queue that may try again, and handle all outcomes."""
        if longest:
            now = self.clock()
            waits = (fetch.waits_until - now for fetch in self._turns if fetch.waits_until > now)
            longest = 0.0 if self._arrived else max(0.01, min(waits, default=longest))
        self.transport.poll(longest)
        while self._arrived:
            self._in_flight -= 1
            self._in_flight_later -= self._arrived[0][0].later
            self._judge(*self._arrived.popleft())

    def _judge(self, segment: Segment, outcome: PullOutcome) -> None:
        """Keep an outcome that advances the segment; otherwise the segment is pulled again."""
        fetch = segment.fetch
        fetch.flying -= 1
        held = segment.held
        self._examine(fetch, segment, outcome)
        if held is not None:
            self._waiting -= len(held.body)
            segment.held = None
        if segment.outcome is None:
            fetch.again(segment)
        else:
            self._advance(fetch)

    def _examine(self, fetch: QueueFetch, segment: Segment, outcome: PullOutcome) -> None:
        if isinstance(outcome.error, TooLongFrameException) and fetch.ask_for_less(segment.asked):
            # Fewer requests are in flight until shorter answers come. No wait: each try asks for less than the last.
            self._largest = MAX_FRAME
            return
        if outcome.error is not None:
            # A broker without enablePropertyFilter answers SYSTEM_ERROR to SQL92.
            sql = self.options.filter_type == "SQL92" and isinstance(outcome.error, BrokerOutcomeUnknownException)
            if sql or not outcome.error.retriable:
                advice = "; filterType=SQL92 needs brokers with enablePropertyFilter=true" if sql else ""
                where = f"reading {fetch.queue} from offset {fetch.range.start} to {fetch.range.end - 1}"
                raise ReadError(f"{where}: {outcome.error}{advice}") from outcome.error
            fetch.busy = outcome.error.flow_control
            if isinstance(outcome.error, ColdReadException) and not self._warned:
                self._warned = True
                logger.warning("the read is slow: %s", outcome.error)
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
        elif fetch.passes_over(segment, outcome) and not self.brokers.is_master(fetch.queue, segment.address):
            segment.held = outcome
            self._waiting += len(outcome.body)
        else:
            if segment.held is not None:
                # Messages that a trusted slave lacks are lost.
                lacks = left > segment.start
                outcome = PullOutcome(PullStatus.OFFSET_ILLEGAL, left) if lacks else segment.held
            fetch.failures, fetch.failing_since = 0, None
            fetch.suspend = fetch.doubted = fetch.busy = False
            if not segment.check:
                fetch.ask_for_more(segment, outcome)
            if self.brokers.is_master(fetch.queue, segment.address):
                self.of_masters.add(fetch.queue)
            else:
                self.of_masters.discard(fetch.queue)
            if fetch.passes_over(segment, outcome) and segment.address not in fetch.unchecked:
                fetch.unchecked.append(segment.address)
            self._largest = max(len(outcome.body), self._largest * 7 // 8, 1)
            # The window was sized by smaller answers. The answer that is yielded next is always kept.
            first = fetch is self._turns[0]
            most = self.most_bytes * (4 if first else 3) // 2
            if (first and segment is fetch.segments[0]) or self._waiting + len(outcome.body) <= most:
                segment.outcome = outcome
                self._waiting += len(outcome.body)

    def _nothing_yet(self, fetch: QueueFetch, segment: Segment, outcome: PullOutcome) -> None:
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

    def _advance(self, fetch: QueueFetch) -> None:
        """Make the answers of a queue ready, in order, and pull again the part that an answer lacks."""
        while fetch.segments and (outcome := fetch.segments[0].outcome) is not None:
            segment = fetch.segments[0]
            stop = fetch.range.end if segment.stop is None else segment.stop
            if segment.check:
                self._checked(fetch, segment, outcome, stop)
                continue
            end = min(outcome.next_begin_offset, stop)
            if outcome.status is PullStatus.FOUND:
                fetch.ready.append(Pulled(fetch.queue, segment.start, end, outcome.body, fetch.contiguous))
                fetch.stride = outcome.next_begin_offset - segment.start
            elif fetch.first_left(segment, outcome) > segment.start and not fetch.range.compacted:
                # A filtered read reports these messages now, so the next check begins after them.
                start = min(fetch.checked, segment.start)
                fetch.checked = max(fetch.checked, end)
                fetch.ready.append(Pulled(fetch.queue, start, end, b"", contiguous=True))
            fetch.received = end
            if end < stop and segment.stop is not None:
                # The answer is shorter than the one before: its rest comes before all later segments.
                segment.start, segment.outcome = end, None
                fetch.again(segment)
                return
            fetch.segments.popleft()
            if segment.stop is None:
                fetch.planned = end

    def _checked(self, fetch: QueueFetch, segment: Segment, outcome: PullOutcome, stop: int) -> None:
        """Note the messages that expired while a filtered read skipped them."""
        self._waiting -= len(outcome.body)
        fetch.segments.popleft()
        left = min(fetch.first_left(segment, outcome), stop)
        if left > segment.start:
            fetch.ready.append(Pulled(fetch.queue, segment.start, left, b"", contiguous=True))
        if outcome.status is PullStatus.FOUND:
            del fetch.unchecked[:1]
        if outcome.status is PullStatus.FOUND and not fetch.unchecked:
            fetch.checked, fetch.check_at = stop, self.clock() + CHECK_EVERY
        else:
            # The broker may have deleted more messages than one answer shows: the rest is checked next.
            fetch.checked, fetch.check_at = left, -math.inf

    def _wait(self, fetch: QueueFetch, error: RocketMQError) -> None:
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
        # Tries come more often than those of the master, so that others go to slaves.
        longest = min(_LONGEST_WAIT, self.brokers.timeout / 2)
        fetch.waits_until = now + min(_FIRST_WAIT * 2**fetch.failures, longest)
        fetch.failures = min(fetch.failures + 1, 16)
