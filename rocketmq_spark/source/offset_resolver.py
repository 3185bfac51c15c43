"""Resolves the options' offsets and times to the offsets where a read begins and ends. The driver of a query uses it.

A broker may report a minimum offset that is too low (docs/internals/reads.md#offsets). So for a read from the oldest
message or from a time, messages are pulled to find the first one that exists. This is not done for compaction topics.
The choice of offsets follows ``KafkaOffsetReaderAdmin.scala``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullStatus, utc
from rocketmq_spark.options.offsets import COMMITTED, EARLIEST, LATEST, OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.records import first_queue_offset
from rocketmq_spark.routing.retries import Retries
from rocketmq_spark.source.queue_requests import WAIT, QueueRequests
from rocketmq_spark.source.ranges import Gap, OffsetRange, expired, lost
from rocketmq_spark.source.time_search import PULLED, UNKNOWN, Border, Stored, search_border, stored_records
from rocketmq_spark.source.topic_queues import UNROUTED, TopicQueues, place
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.source")

Offsets: TypeAlias = "dict[MessageQueue, int]"


@dataclass(slots=True, eq=False, repr=False)
class OffsetResolver:
    """Resolves the offsets of many queues at once."""

    requests: QueueRequests
    queues: TopicQueues = field(init=False)
    options: SourceOptions = field(init=False)
    transport: ReadTransport = field(init=False)
    # Logged topics and brokers whose configuration the user may not read.
    _unknown: set[tuple[str, str]] = field(default_factory=set, init=False)
    _warned_of_clocks: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.queues = self.requests.queues
        self.options, self.transport = self.queues.options, self.queues.transport

    def earliest(self, queues: Iterable[MessageQueue]) -> Offsets:
        """Return each queue's oldest offset; 0 for a compacted topic (docs/internals/reads.md#compaction-topics)."""
        queues = [*queues]
        compacted = self._compacted(queues)
        plain = [queue for queue in queues if queue not in compacted]
        return dict.fromkeys(queues, 0) | self._first_left(self.requests.each(plain, self.transport.min_offset))

    def _first_left(self, offsets: Mapping[MessageQueue, int]) -> Offsets:
        """Return the first offset of each queue, from the given one on, whose message the broker still has."""

        def pull(queue: MessageQueue, address: str, _: float) -> int:
            # An empty queue of the type BatchCQ has the minimum offset -1.
            offset = max(0, offsets[queue])
            while True:
                try:
                    outcome = self.requests.pull(queue, offset, address, 1)
                except errors.BrokerBusyException:
                    # The task waits for the broker. A slave without slaveReadEnable is always busy.
                    return offset
                if outcome.status is PullStatus.FOUND:
                    return max(offset, first_queue_offset(outcome.body) or 0)
                if outcome.status is PullStatus.NO_NEW_MSG or outcome.next_begin_offset <= offset:
                    return offset
                offset = outcome.next_begin_offset

        return self.requests.each(offsets, pull)

    def _compacted(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Return the queues of compacted topics. Without the right to see the configuration a topic counts as plain."""

        def request(queue: MessageQueue) -> bool:
            try:
                return self.requests.until_answered(
                    queue, lambda _, address, __: self.queues.config(queue, address).compacted, trusted=False
                )
            except errors.MQBrokerException as exc:
                if place(queue) not in self._unknown:
                    self._unknown.add(place(queue))
                    logger.warning(
                        "reading %s: unknown if the topic is a compaction topic, so missing offsets count as lost "
                        "data. If it is one, set failOnDataLoss=false: %s",
                        *(queue, exc),
                    )
                return False

        return {queue for queue, compacted in self.queues.by_topic(queues, request).items() if compacted}

    def stored_before(
        self, offsets: Mapping[MessageQueue, int], *, patiently: bool = True
    ) -> dict[MessageQueue, int | None]:
        """Return when the message before each offset was stored (epoch, ms); None if the broker does not return it.

        It raises a ReadError if no broker answers, or with `patiently` False returns None.
        """

        def pull(queue: MessageQueue, address: str, _: float) -> int | None:
            before = offsets[queue] - 1
            records = stored_records(self.requests.pull(queue, before, address, 1).body)
            times = [record.time for record in records if record.start <= before < record.end and record.time >= 0]
            return times[0] if times else None

        if not patiently:
            answers, _ = self.requests.once([*offsets], pull, trusted=True)
            return {queue: answers[queue][0] if queue in answers else None for queue in offsets}
        # A slave may still have the message if its master has another one.
        return self.requests.each(offsets, pull)

    def latest(self, queues: Iterable[MessageQueue]) -> Offsets:
        """Return the offset that the next message of each queue will get."""
        return self.requests.each(queues, self.transport.max_offset)

    def at(self, times: Mapping[MessageQueue, int], latest: Offsets) -> Offsets:
        """Return the first offset stored at a time (epoch, ms) or later, of each queue that has such a message.

        `latest` are the offsets where the queues end. If store times are not in order, only the message directly before
        the offset is known to be older.
        """
        return _found(self._borders(times, latest))

    def at_and_older(self, times: Mapping[MessageQueue, int], latest: Offsets) -> tuple[Offsets, set[MessageQueue]]:
        """Return the offsets of `at`, and the queues that have an older message or may lack some by compaction."""
        borders = self._borders(times, latest)
        return _found(borders), {queue for queue, border in borders.items() if border.older}

    def _borders(self, times: Mapping[MessageQueue, int], latest: Offsets) -> dict[MessageQueue, Border]:
        compacted = self._compacted(times)
        # A broker reports the minimum before compaction.
        oldest = self.requests.each([queue for queue in times if queue not in compacted], self.transport.min_offset)

        def search(queue: MessageQueue, address: str, timeout: float) -> Border:
            first, end = max(0, oldest.get(queue, 0)), latest[queue]
            if first >= end:
                # A broker fails to search an empty queue of the type BatchCQ, whose minimum offset is -1.
                return Border()
            guess = self.transport.search_offset(queue, times[queue], address, timeout)
            border = search_border(
                times[queue], first, end, guess, lambda offset: self._records_from(queue, offset, address)
            )
            return replace(border, older=True) if queue in compacted else border

        borders = self.requests.each(times, search)
        self._warn_of_clocks(borders)
        return borders

    def _records_from(self, queue: MessageQueue, offset: int, address: str) -> Sequence[Stored]:
        """Return the next records whose store time is known. The first one's offset is that of an undecodable one."""
        start = None
        while True:
            outcome = self.requests.pull(queue, offset, address, PULLED)
            if outcome.status is PullStatus.FOUND:
                if start is None:
                    claimed = first_queue_offset(outcome.body)
                    start = offset if claimed is None else claimed
                if records := stored_records(outcome.body):
                    return [replace(records[0], start=start), *records[1:]]
            if outcome.status is PullStatus.NO_NEW_MSG or outcome.next_begin_offset <= offset:
                return [] if start is None else [Stored(start, start + 1, UNKNOWN)]
            offset = outcome.next_begin_offset

    def _warn_of_clocks(self, borders: Mapping[MessageQueue, Border]) -> None:
        pairs = {queue: border.set_back for queue, border in borders.items() if border.set_back is not None}
        if not pairs or self._warned_of_clocks:
            return
        self._warned_of_clocks = True
        queue, (before, after) = next(iter(pairs.items()))
        logger.warning(
            "reading %s by time: the message at offset %d was stored %d ms earlier than the one at offset %d. The "
            "broker's clock was set back, or the clock of a new master is behind (queues where this was seen: %d). "
            "The read may skip messages of the time, or return older ones. To read all, begin earlier and end later, "
            "each by as much as clocks were set back, and filter the rows by storeTimestamp",
            *(queue, after.start, before.time - after.time, before.start, len(pairs)),
        )

    def starts(self, queues: Sequence[MessageQueue]) -> Offsets:
        """Return the first offset to read of each queue.

        Raises an OptionError if the options do not name a queue, or no message is as new as a starting timestamp.
        """
        options = self.options
        times = _times(queues, options.starting_timestamp, options.starting_offsets_by_timestamp, "starting")
        if times is None:
            return self._specific(queues, options.starting_offsets, "startingOffsets")
        # A queue without such a message begins where it ended before the search, so no later message is skipped.
        latest = self.latest(times)
        borders = self._borders(times, latest)
        # The other queues without such a message are empty, and begin at their end.
        older = {
            queue: border.last for queue, border in borders.items() if border.offset is None and border.last is not None
        }
        if older and options.starting_offsets_by_timestamp_strategy == "error":
            queue, last = next(iter(older.items()))
            raise errors.OptionError(
                f"queue {queue} has no message stored at the starting time {utc(times[queue])} ({times[queue]} ms "
                f"since 1970) or later: its last message is of {utc(last)} (queues with only older "
                f"messages: {len(older)}). Give an earlier time, or set startingOffsetsByTimestampStrategy=latest to "
                "begin at the end of such queues"
            )
        return latest | _found(borders)

    def ends(self, queues: Sequence[MessageQueue]) -> Offsets:
        """Return the offset of each queue at which a batch stops; raises as `starts`."""
        options = self.options
        times = _times(queues, options.ending_timestamp, options.ending_offsets_by_timestamp, "ending")
        if times is None:
            return self._specific(queues, options.ending_offsets, "endingOffsets")
        latest = self.latest(times)
        return latest | self.at(times, latest)

    def ranges(self, queues: Sequence[MessageQueue]) -> list[OffsetRange]:
        """Return the range that a batch reads of each queue; raises as `starts` and `ranges_between`."""
        starts, ends = self.starts(queues), self.ends(queues)
        backwards = {queue: start for queue, start in starts.items() if start > ends[queue]}
        for queue, end in self.await_ends(backwards).items():
            lost(
                self.options,
                f"queue {queue} ends at offset {end}, before {starts[queue]}, where the read begins: the topic was "
                "deleted and created again, its broker lost messages, or the offset is of another queue",
            )
        return self.ranges_between(starts, ends, self._begun_at_oldest(queues))

    def _begun_at_oldest(self, queues: Sequence[MessageQueue]) -> set[MessageQueue]:
        """Return the queues whose first offset is that of their oldest message, by the options."""
        options = self.options
        if options.starting_timestamp is not None or options.starting_offsets_by_timestamp:
            return set()
        spec = options.starting_offsets
        return (
            set(queues) if spec.word == "earliest" else {queue for queue, offset in spec.offsets if offset == EARLIEST}
        )

    def ranges_between(
        self,
        starts: Mapping[MessageQueue, int],
        ends: Mapping[MessageQueue, int],
        complete: Collection[MessageQueue] = (),
    ) -> list[OffsetRange]:
        """Return the ranges from `starts` to `ends`; expired messages are skipped, or are a DataLossError.

        Brokers get no request about the queues of `complete`, which have the messages from `starts` on.
        """
        filled = [queue for queue in ends if starts[queue] < ends[queue]]
        compacted = self._compacted(filled)
        plain = [queue for queue in filled if queue not in compacted and queue not in complete]
        # One request is enough, because a task also reports missing offsets. An absent master delays no other queue.
        answers, failures = self.requests.once(plain, self.transport.min_offset, trusted=True)
        for error in failures.values():
            if not error.retriable:
                raise error
        earliest = {queue: offset for queue, (offset, _) in answers.items()}
        ranges, gaps = [], []
        for queue, end in ends.items():
            start = max(starts[queue], earliest.get(queue, 0))
            if start > starts[queue]:
                gaps.append(Gap(queue, starts[queue], min(start, end), start))
            begin, start = min(starts[queue], end), min(start, end)
            ranges.append(OffsetRange(queue, start, end, queue in compacted, expired=start - begin))
        expired(self.options, gaps)
        return ranges

    def await_ends(self, starts: Offsets) -> Offsets:
        """Return the ends of the queues that do not reach `starts` within ``pullTimeoutMs``.

        It takes at most half of the time until the planning deadline: the caller then reports these queues.
        """
        requests, now = self.requests, self.requests.clock()
        gives_up = now + min(requests.brokers.timeout, (requests.deadline.at - now) / 2)
        short: Offsets = {}
        for _ in Retries(gives_up, lambda _: WAIT, requests.clock, requests.sleep):
            short = {queue: end for queue, end in self.latest(starts).items() if end < starts[queue]}
            if not short:
                break
        return short

    def _specific(self, queues: Sequence[MessageQueue], spec: OffsetSpec, option: str) -> Offsets:
        if spec.word == COMMITTED:
            return self._committed(queues)
        if spec.word is not None:
            return self._of_word(spec.word, queues)
        # A receipt may name queues that the options do not select.
        selected = {queue: offset for queue, offset in spec.offsets if self.options.reads(queue)}
        offsets = _covering(queues, selected, option)
        earliest = self.earliest(queue for queue, offset in offsets.items() if offset == EARLIEST)
        latest = self.latest(queue for queue, offset in offsets.items() if offset == LATEST)
        return {**offsets, **earliest, **latest}

    def _of_word(self, word: str, queues: Iterable[MessageQueue]) -> Offsets:
        return self.earliest(queues) if word == "earliest" else self.latest(queues)

    def _committed(self, queues: Sequence[MessageQueue]) -> Offsets:
        """Return the offsets that the consumer group committed, and those of ``startingOffsetsFallback``."""
        options = self.options

        def request(queue: MessageQueue, address: str, timeout: float) -> int | None:
            offset = self.transport.consumer_offset(queue, options.consumer_group, address, timeout)
            if offset is None and not self.queues.brokers.is_master(queue, address):
                # A slave copies the offsets of groups from time to time.
                raise errors.RouteNotFoundException(
                    f"the slave {address} has no offset of {queue} that consumerGroup={options.consumer_group} "
                    "committed, and its master may have one"
                )
            return offset

        answers = self.requests.each(queues, request)
        committed = {queue: offset for queue, offset in answers.items() if offset is not None}
        # A queue without messages has nothing that the group did not read.
        ends = self.latest(queue for queue in queues if queue not in committed)
        new = {queue: 0 for queue, end in ends.items() if end == 0}
        missing = [queue for queue in ends if queue not in new]
        if missing and options.starting_offsets_fallback == "error":
            raise errors.OptionError(
                f"startingOffsets=committed: consumerGroup={options.consumer_group} has no committed offset of queue "
                f"{missing[0]} (queues with messages and without an offset: {len(missing)} of {len(queues)}). Check "
                "the name of the group. Consumers with MessageModel.BROADCASTING commit no offsets. Or set "
                "startingOffsetsFallback=earliest or latest for such queues"
            )
        return {**committed, **new, **self._of_word(options.starting_offsets_fallback, missing)}


def _times(
    queues: Sequence[MessageQueue], of_all: int | None, of_each: tuple[tuple[MessageQueue, int], ...], which: str
) -> Offsets | None:
    if of_all is not None:
        return dict.fromkeys(queues, of_all)
    return _covering(queues, dict(of_each), f"{which}OffsetsByTimestamp") if of_each else None


def _found(borders: Mapping[MessageQueue, Border]) -> Offsets:
    return {queue: border.offset for queue, border in borders.items() if border.offset is not None}


def _covering(queues: Sequence[MessageQueue], values: Mapping[MessageQueue, int], option: str) -> Offsets:
    """Return the values of an option for `queues`; it must name all of them, as in Kafka's source."""
    missing = [queue for queue in queues if queue not in values]
    if missing:
        numbers = "" if option.endswith("ByTimestamp") else " (-2 is the earliest offset, -1 the latest)"
        raise errors.OptionError(
            f"{option} names some queues and not {', '.join(map(str, missing[:5]))}"
            f"{' and others' if len(missing) > 5 else ''}: name every queue{numbers}, or select queues with assign"
        )
    gone = sorted(values.keys() - set(queues))
    if gone:
        raise errors.OptionError(f"{option} names {', '.join(map(str, gone[:5]))}, which can't be read: {UNROUTED}")
    return {queue: values[queue] for queue in queues}
