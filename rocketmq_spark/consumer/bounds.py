"""Where queues begin and end, by number or by time: what the driver asks before anything is read.

Rule 1: every queue is asked, many at once, and asked again elsewhere until ``readTimeoutMs`` is over.
Rule 2: what was asked for by number is held against what is there: an offset that expired is data lost, and so is a
        start that a queue does not reach; an end that it does not reach yet is waited for by who reads it.

Follows spec/remoting.md section 13.2 and ``KafkaOffsetReaderAdmin.scala`` for the meaning of the options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, TypeAlias, TypeVar

from rocketmq_spark.consumer.data_loss import expired, lost
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import (
    OptionError,
    ReadError,
    RemotingException,
    RemotingTooMuchRequestException,
    RocketMQError,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.offset_json import EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.parallel import in_parallel
from rocketmq_spark.pull import PullOutcome, PullRequest, PullStatus, PullTarget
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.wire.records import decode_records

Offsets: TypeAlias = "dict[MessageQueue, int]"
_Ask: TypeAlias = Callable[[MessageQueue, str, float], int]
_T = TypeVar("_T")

_WAIT: Final = 0.2


class Bounds:
    """Asks brokers for offsets.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
    queues : TopicQueues
    clock : callable
        Seconds, monotonic.
    sleep : callable, default time.sleep
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        queues: TopicQueues,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._transport = transport
        self._queues = queues
        self._clock = clock
        self._sleep = sleep
        self._timeout = options.pull_timeout_ms / 1000

    def earliest(self, queues: Iterable[MessageQueue]) -> Offsets:
        """Return the offset of the oldest message that each queue still has."""
        # An empty queue of the type BatchCQ answers -1.
        return {queue: max(0, offset) for queue, offset in self._of_all(queues, self._transport.min_offset).items()}

    def latest(self, queues: Iterable[MessageQueue]) -> Offsets:
        """Return the offset that the next message of each queue will get."""
        return self._of_all(queues, self._transport.max_offset)

    def once(
        self, queues: Sequence[MessageQueue], ask: Callable[[MessageQueue, str], _T]
    ) -> dict[MessageQueue, tuple[_T, str] | RocketMQError]:
        """Ask once about each queue (as the user knows it): return the answer and whose it is, or why there is none.

        Who did not answer for one queue is not waited for again for the next; after ``readTimeoutMs`` nobody is asked.
        """
        silent: dict[str, RocketMQError] = {}
        gives_up = min(self._clock() + self._options.read_timeout_ms / 1000, self._queues.deadline.at)

        def one(queue: MessageQueue) -> tuple[_T, str] | RocketMQError:
            address = ""
            if self._clock() > gives_up:
                return RemotingTooMuchRequestException(
                    f"{queue}: not asked, the others took {self._options.read_timeout_ms / 1000:g} s"
                )
            try:
                address = self._queues.address(queue)
                return silent[address] if address in silent else (ask(queue, address), address)
            except RocketMQError as exc:
                if isinstance(exc, RemotingException):
                    silent[address] = exc
                if exc.retriable and not exc.flow_control:
                    self._queues.failed(queue, address)
                return exc

        return in_parallel(queues, one)

    def at(self, times: Mapping[MessageQueue, int]) -> dict[MessageQueue, int | None]:
        """Return the first offset stored at a time (epoch, ms) or later; None where there is no such message."""

        def search(queue: MessageQueue, address: str, timeout: float) -> int:
            return self._transport.search_offset(queue, wanted[queue], address, timeout)

        earliest, latest = self.earliest(times), self.latest(times)
        # A broker fails at the question where a queue of the type BatchCQ is empty.
        filled = [queue for queue in times if earliest[queue] < latest[queue]]
        wanted = {self._queues.on_wire(queue): times[queue] for queue in filled}
        found = self._of_all(filled, search)
        # Past the end a broker answers with the end; of the type BatchCQ with its last batch, however old that is.
        ends = self.latest(filled)
        found = {queue: offset for queue, offset in found.items() if offset < ends[queue]}
        places = {(queue.topic, queue.broker_name): queue for queue in found}
        plain = self._queues.deadline.in_parallel(places.values(), self._queues.is_plain, "types of topics")
        doubtful = {
            queue: offset for queue, offset in found.items() if not plain[places[queue.topic, queue.broker_name]]
        }
        older = [queue for queue, stamp in self._stored_at(doubtful).items() if stamp < times[queue]]
        return {queue: None if queue in older else found.get(queue) for queue in times}

    def _stored_at(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return when the messages at some offsets were stored; of one that is gone by now, a time to come."""

        def pull(queue: MessageQueue, address: str, timeout: float) -> int:
            target = PullTarget(queue, self._options.consumer_group, 1, "*", "TAG")
            answer: Future[PullOutcome] = Future()
            self._transport.pull(PullRequest(target, address, wanted[queue]), timeout, answer.set_result)
            # The transport answers by then, with an error if there is nothing else.
            outcome = answer.result(2 * timeout)
            if outcome.error is not None:
                raise outcome.error
            if outcome.status is not PullStatus.FOUND:
                return sys.maxsize
            return next(iter(decode_records(outcome.body))).store_timestamp

        wanted = {self._queues.on_wire(queue): offset for queue, offset in offsets.items()}
        return self._of_all(offsets, pull)

    def starts(self, queues: Sequence[MessageQueue]) -> Offsets:
        """Return where to begin.

        Raises
        ------
        OptionError
            The options name offsets and leave out a queue; or no message is as young as a starting timestamp.
        DataLossError
            An offset has expired, with ``failOnDataLoss``.
        """
        options = self._options
        times = self._times(queues, options.starting_timestamp, options.starting_offsets_by_timestamp, "starting")
        if times is None:
            return self._specific(queues, options.starting_offsets, "startingOffsets")
        found = self.at(times)
        missing = [queue for queue, offset in found.items() if offset is None]
        if missing and options.starting_offsets_by_timestamp_strategy == "error":
            raise OptionError(
                f"no message is as young as the starting timestamp {times[missing[0]]} in {missing[0]} and "
                f"{len(missing) - 1} other queues: give an earlier one, or begin at the end of such queues with "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return self._or_latest(found)

    def ends(self, queues: Sequence[MessageQueue]) -> Offsets:
        """Return where to stop in a batch: the first offset that is not read any more; raises as `starts`."""
        options = self._options
        times = self._times(queues, options.ending_timestamp, options.ending_offsets_by_timestamp, "ending")
        if times is None:
            return self._specific(queues, options.ending_offsets, "endingOffsets")
        return self._or_latest(self.at(times))

    def ranges(self, queues: Sequence[MessageQueue]) -> list[OffsetRange]:
        """Return what a batch reads of each queue; raises as `starts`, and as `checked`."""
        starts, ends = self.starts(queues), self.ends(queues)
        backwards = {queue: start for queue, start in starts.items() if start > ends[queue]}
        for queue, end in self._short_of(backwards).items():
            lost(
                self._options,
                f"queue {queue} ends at offset {end}, before {starts[queue]}, where the read begins: the topic was "
                "made anew, its broker lost what it had, or the offset is of another queue",
            )
        return self.checked(starts, ends)

    def checked(self, starts: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> list[OffsetRange]:
        """Return the ranges from `starts` to `ends`, without what has expired.

        Raises
        ------
        DataLossError
            Something has, with ``failOnDataLoss``.
        """
        earliest = self.earliest(queue for queue in ends if starts[queue] < ends[queue])
        ranges = []
        for queue, end in ends.items():
            start = max(starts[queue], earliest.get(queue, 0))
            if start > starts[queue]:
                expired(self._options, queue, starts[queue], min(start, end), start)
            ranges.append(OffsetRange(queue, min(start, end), end))
        return ranges

    def _short_of(self, starts: Offsets) -> Offsets:
        """Return the ends of the queues that do not reach `starts`; what was stored a moment ago is waited for."""
        gives_up = self._clock() + self._timeout
        while True:
            short = {queue: end for queue, end in self.latest(starts).items() if end < starts[queue]}
            if not short or self._clock() > gives_up:
                return short
            self._sleep(_WAIT)

    def _times(
        self,
        queues: Sequence[MessageQueue],
        of_all: int | None,
        of_each: tuple[tuple[MessageQueue, int], ...],
        which: str,
    ) -> dict[MessageQueue, int] | None:
        if of_all is not None:
            return dict.fromkeys(queues, of_all)
        if not of_each:
            return None
        return _covering(queues, dict(of_each), f"{which}OffsetsByTimestamp")

    def _specific(self, queues: Sequence[MessageQueue], spec: OffsetSpec, option: str) -> Offsets:
        if spec.word is not None:
            return self.earliest(queues) if spec.word == "earliest" else self.latest(queues)
        # A receipt may tell of queues that nobody asked for.
        wanted = {queue: offset for queue, offset in spec.offsets if self._options.reads(queue)}
        given = _covering(queues, wanted, option)
        earliest = self.earliest(queue for queue, offset in given.items() if offset == EARLIEST)
        latest = self.latest(queue for queue, offset in given.items() if offset == LATEST)
        return {**given, **earliest, **latest}

    def _or_latest(self, found: Mapping[MessageQueue, int | None]) -> Offsets:
        latest = self.latest(queue for queue, offset in found.items() if offset is None)
        return {queue: latest[queue] if offset is None else offset for queue, offset in found.items()}

    def _of_all(self, queues: Iterable[MessageQueue], ask: _Ask) -> Offsets:
        deadline = self._queues.deadline
        return deadline.in_parallel(queues, lambda queue: self._patiently(queue, ask), "offsets of queues")

    def _patiently(self, queue: MessageQueue, ask: _Ask) -> int:
        options = self._options
        gives_up = min(self._clock() + options.read_timeout_ms / 1000, self._queues.deadline.at)
        while True:
            address = ""
            try:
                address = self._queues.address(queue)
                return ask(self._queues.on_wire(queue), address, self._queues.deadline.limit(self._timeout))
            except RocketMQError as exc:
                if not exc.retriable:
                    raise
                if self._clock() > gives_up:
                    raise ReadError(
                        f"asking for the offsets of {queue}: no broker answered within "
                        f"readTimeoutMs={options.read_timeout_ms}. The last try: {exc}"
                    ) from exc
                if not exc.flow_control:
                    self._queues.failed(queue, address)
            self._sleep(_WAIT)


def _covering(queues: Sequence[MessageQueue], given: Mapping[MessageQueue, int], option: str) -> Offsets:
    """Return the numbers of `queues`, all of which an option has to name, as Kafka's source demands."""
    missing = [queue for queue in queues if queue not in given]
    if missing:
        numbers = "" if option.endswith("ByTimestamp") else " (-2 is the earliest offset, -1 the latest)"
        raise OptionError(
            f"{option} names some queues and not {', '.join(map(str, missing[:5]))}"
            f"{' and others' if len(missing) > 5 else ''}: name every queue{numbers}, or say with assign which are to "
            "be read"
        )
    gone = sorted(given.keys() - set(queues))
    if gone:
        raise OptionError(
            f"{option} names {', '.join(map(str, gone[:5]))}, which can't be read: no such queue is in the routes of "
            "the topics now: it does not exist, or its broker is down"
        )
    return {queue: given[queue] for queue in queues}
