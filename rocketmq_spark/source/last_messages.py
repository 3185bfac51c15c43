"""Detects queues whose messages were replaced after a streaming query had read them.

This happens if a topic is deleted and created again, or a broker loses its last messages. Then other messages get the
same offsets. Brokers do not change the store time of a message, and replicas have the same. So the query keeps, with
each offset, the store time of the message before it (docs/internals/reads.md#replaced-messages).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import utc
from rocketmq_spark.source.offset_resolver import OffsetResolver, Offsets
from rocketmq_spark.source.ranges import lost

logger = logging.getLogger("rocketmq_spark.source")

# Store times (epoch, ms).
Times: TypeAlias = "Mapping[MessageQueue, int]"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Where a micro-batch starts and ends, and the store times of the messages before these offsets, if known."""

    starts: Offsets
    ends: Offsets
    times: Times
    end_times: Times

    @property
    def filled(self) -> set[MessageQueue]:
        """The queues with messages."""
        return {queue for queue, end in self.ends.items() if self.starts[queue] < end}

    @property
    def begun_again(self) -> set[MessageQueue]:
        """The queues that end before the start, or at the start again; the query has reported them."""
        return {
            queue
            for queue in self.ends.keys() & self.times.keys() - self.filled
            if self.starts[queue] > self.ends[queue]
            or self.end_times.get(queue, self.times[queue]) != self.times[queue]
        }


@dataclass(slots=True, eq=False, repr=False)
class LastMessages:
    """Returns and compares the store times of the last messages that a query has read."""

    resolver: OffsetResolver
    # An offset of each queue, and when the message before it was stored; None if no broker has returned it.
    _stored: dict[MessageQueue, tuple[int, int | None]] = field(default_factory=dict)

    def begun(self, starts: Offsets) -> tuple[Offsets, Offsets]:
        """Return where a new query begins, and `times` of these offsets.

        A queue that ends before its start is lost data. Without ``failOnDataLoss`` it begins at its end.
        """
        return self._at_most(starts, {}, {}, "the query begins")

    def ended(self, ends: Offsets, known: Offsets, times: Times) -> tuple[Offsets, Offsets]:
        """Return where a micro-batch ends, and `times` of these offsets; raises as `times`.

        A queue that ends before its end, which a broker has just reported, is lost data. Without ``failOnDataLoss`` the
        micro-batch ends at the queue's end.
        """
        return self._at_most(ends, known, times, "the micro-batch ends")

    def _at_most(self, ends: Offsets, known: Offsets, times: Times, where: str) -> tuple[Offsets, Offsets]:
        stored = self.times(ends, known, times)
        unknown = {queue: end for queue, end in ends.items() if end > known.get(queue, 0) and queue not in stored}
        if not unknown:
            return ends, stored
        ends = ends | self._shorter(unknown, where)
        for queue in unknown:
            # The others have grown meanwhile, or the messages before these offsets have expired.
            del self._stored[queue]
        return ends, self.times(ends, known, times)

    def times(self, ends: Mapping[MessageQueue, int], known: Mapping[MessageQueue, int], times: Times) -> Offsets:
        """Return when the messages before `ends` were stored, as far as brokers return these messages.

        `times` are those before `known`, the offsets read so far. For queues without new messages, the first call
        compares them, and raises as `continued`. For queues with new messages, it raises a ReadError if no broker
        answers, because the micro-batch needs the broker.
        """
        reads = self.resolver.options.reads
        for queue in [queue for queue, end in ends.items() if end == 0]:
            # Its topic was created again: another message will be at the offset that is kept.
            self._stored.pop(queue, None)
        wanted = {
            queue: end
            for queue, end in ends.items()
            if end > 0 and reads(queue) and self._stored.get(queue, (None,))[0] != end
        }
        idle = {queue: end for queue, end in wanted.items() if end == known.get(queue)}
        answers = self.resolver.stored_before(idle, patiently=False)
        self._replaced(idle, answers, times)
        # A broker that did not answer gets no second request before there are new messages.
        answers = {queue: times.get(queue) if stored is None else stored for queue, stored in answers.items()}
        answers |= self.resolver.stored_before({queue: end for queue, end in wanted.items() if queue not in idle})
        self._stored |= {queue: (wanted[queue], stored) for queue, stored in answers.items()}
        last = {queue: self._stored.get(queue, (None, None)) for queue in ends}
        # A query that selects a queue again later compares its last message then.
        left_out = {queue: time for queue, time in times.items() if not reads(queue)}
        return left_out | {
            queue: stored for queue, (at, stored) in last.items() if stored is not None and at == ends[queue]
        }

    def continued(self, batch: MicroBatch) -> tuple[Offsets, Offsets, set[MessageQueue]]:
        """Return where a micro-batch starts and ends, and the queues that still have the message before the start.

        If a queue has another message there, it raises a DataLossError. Without ``failOnDataLoss`` the query continues
        with the first message stored later.
        """
        # For its own micro-batch, this run has just requested the last messages.
        repeated = {
            queue
            for queue in batch.filled | batch.begun_again
            # A message that the broker did not return was perhaps deleted with its topic just then.
            if queue not in batch.end_times or self._stored.get(queue) != (batch.ends[queue], batch.end_times[queue])
        }
        # The ends first, because that may wait for messages: the present messages are compared.
        cut, short = self._compare_ends(batch, repeated)
        replaced, complete = self._compare_starts(batch)
        # Perhaps these messages were replaced after this run has requested the last ones.
        cut_later, shorter = self._compare_ends(batch, replaced - repeated)
        cut, short = cut | cut_later, short | shorter
        replaced |= {queue for queue, end in short.items() if end < batch.starts[queue]} & batch.times.keys()
        starts, ends = batch.starts, batch.ends | short
        for queue in sorted(queue for queue, end in ends.items() if end < starts[queue] and queue not in batch.times):
            logger.warning(
                "queue %s continues at its end, offset %d, and may skip new messages before it: the query's offsets "
                "have no store time of the last message that was read",
                *(queue, ends[queue]),
            )
        for queue in sorted(short.keys() - batch.end_times.keys()):
            logger.warning(
                "queue %s continues at offset %d, where the micro-batch ends, and may skip new messages before it: the "
                "query's offsets have no store time of the last message of the micro-batch",
                *(queue, batch.ends[queue]),
            )
        return (
            starts | self._stored_after(batch.times, replaced, ends),
            ends | self._stored_after(batch.end_times, cut, ends, at_start=False),
            complete,
        )

    def first_starts(self, batch: MicroBatch) -> Offsets:
        """Return where a first micro-batch starts. Its `times` are those before the start where the query has begun.

        A queue whose message before its start was replaced meanwhile starts as in `continued`, and raises as there. A
        repeated first micro-batch can't compare this message, because the query's offsets have no time of a beginning.
        """
        replaced, _ = self._compare_starts(batch)
        return batch.starts | self._stored_after(batch.times, replaced, batch.ends)

    def _compare_starts(self, batch: MicroBatch) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Return the queues whose message before the start was replaced, and the queues that still have it."""
        starts, times = batch.starts, batch.times
        before = {queue: starts[queue] for queue in sorted(batch.filled) if queue in times and starts[queue] > 0}
        answers = self.resolver.stored_before(before)
        replaced = self._replaced(before, answers, times) | batch.begun_again
        return replaced, {queue for queue, stored in answers.items() if stored == times[queue]}

    def _compare_ends(self, batch: MicroBatch, queues: Iterable[MessageQueue]) -> tuple[set[MessageQueue], Offsets]:
        """Compare the last messages of a micro-batch.

        Return the queues whose message before the end was replaced, and the ends of the queues that end earlier.
        """
        repeated = {queue: batch.ends[queue] for queue in sorted(queues) if batch.ends[queue] > 0}
        answers = self.resolver.stored_before(repeated)
        unknown = {queue: batch.ends[queue] for queue, stored in answers.items() if stored is None}
        short = self._shorter(unknown, "the micro-batch ends")
        # These have grown meanwhile, or their last messages have expired.
        answers |= self.resolver.stored_before({queue: end for queue, end in unknown.items() if queue not in short})
        return self._replaced(repeated, answers, batch.end_times) | (short.keys() & batch.end_times.keys()), short

    def _shorter(self, ends: Offsets, where: str) -> Offsets:
        """Report and return the ends of the queues that end before `ends`. A task would wait for their messages."""

        def request(queue: MessageQueue, address: str, timeout: float) -> tuple[int, str]:
            return self.resolver.transport.max_offset(queue, address, timeout), address

        short = {}
        for queue, (end, address) in self.resolver.requests.each(self.resolver.await_ends(ends), request).items():
            # A slave is behind its master.
            if end < ends[queue] and self.resolver.requests.brokers.is_master(queue, address):
                short[queue] = end
                lost(
                    self.resolver.options,
                    f"queue {queue} ends at offset {end}, before {ends[queue]}, where {where}: the topic was deleted "
                    "and created again, or its broker lost messages",
                )
        return short

    def _replaced(
        self, offsets: Offsets, answers: Mapping[MessageQueue, int | None], times: Times
    ) -> set[MessageQueue]:
        """Report and return the queues whose message before an offset was stored at another time than in `times`."""
        replaced = set()
        for queue, stored in sorted(answers.items()):
            if stored is not None and stored != times.get(queue, stored):
                replaced.add(queue)
                lost(
                    self.resolver.options,
                    f"queue {queue} has another message at offset {offsets[queue] - 1} than the query has read: it was "
                    f"stored at {utc(stored)}, and the one that was read at {utc(times[queue])}. The topic was deleted "
                    "and created again, or its broker lost messages",
                )
        return replaced

    def _stored_after(
        self, times: Times, queues: Iterable[MessageQueue], ends: Offsets, *, at_start: bool = True
    ) -> Offsets:
        """Return the first offset of each queue that was stored after its time in `times`, at most its end.

        With `at_start`, a queue whose messages before this offset were deleted is lost data: some may have been new.
        """
        after = {queue: times[queue] + 1 for queue in sorted(queues)}
        if not after:
            return {}
        first, older = self.resolver.at_and_older(after, {queue: ends[queue] for queue in after})
        offsets = {queue: min(first.get(queue, ends[queue]), ends[queue]) for queue in after}
        for queue, offset in sorted(offsets.items()):
            if at_start and offset > 0 and queue not in older:
                lost(
                    self.resolver.options,
                    f"queue {queue} has no messages before offset {offset} any more, and the query may not have read "
                    "them all: the topic was deleted and created again, or its broker lost messages, and later "
                    "messages expired (fileReservedTime)",
                )
            logger.warning(
                "queue %s continues at offset %d, the first stored after %s", queue, offset, utc(times[queue])
            )
        return offsets
