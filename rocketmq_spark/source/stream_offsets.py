"""Looks up the offsets of a streaming query for each micro-batch, and writes them to its consumer group on request.

If a broker does not answer, `StreamOffsets.available` keeps the offsets of its queues, so that the micro-batch reads
the others. With ``failOnDataLoss``, it raises after ``readTimeoutMs`` and at least three tries. The start of a new
query may wait for every broker. Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rocketmq_spark.errors import ReadError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullStatus
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.records import first_queue_offset
from rocketmq_spark.source.group_offsets import GroupOffsets
from rocketmq_spark.source.last_messages import LastMessages, MicroBatch
from rocketmq_spark.source.offset_resolver import OffsetResolver, Offsets
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.ranges import OffsetRange, lost
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.source")

# The most queues whose messages are sampled for a micro-batch, and messages of a sample.
_SAMPLED: Final = 64
_SAMPLE: Final = 32
# The fewest tries before a queue counts as unavailable: a whole micro-batch may pass between two of them.
_TRIES: Final = 3


class StreamOffsets:
    """The offsets of one streaming query, which is the member `client_id` of its group. It closes the transport."""

    def __init__(
        self,
        options: SourceOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        client_id: str = "spark",
        sleep: Callable[[float], None] = time.sleep,
        *,
        runtime: Runtime = PROCESS,
    ) -> None:
        self._options = options
        self._transport = transport
        self.clock = clock
        self.queues = TopicQueues(options, transport, clock, runtime=runtime)
        self.requests = QueueRequests(self.queues, clock, sleep)
        self._resolver = OffsetResolver(self.requests)
        # Since when no broker has answered for a queue, and for how many tries.
        self._silent: dict[MessageQueue, tuple[float, int]] = {}
        self._reported_gone: set[MessageQueue] = set()
        # Of the messages sampled last. Unknown, it is infinite: no answer must not turn the limit off.
        self._mean_size = math.inf
        self._group = GroupOffsets(self.requests, client_id)
        # Detects messages that were replaced after the query had read them.
        self.last_messages = LastMessages(self._resolver)

    def starts(self) -> Offsets:
        """Return the offsets at which a new query begins."""
        return self._resolver.starts(self.queues.look_up())

    def latest(self) -> Offsets:
        """Return the ends of all queues."""
        self.queues.deadline.restart()
        return self._resolver.latest(self.queues.present())

    def stored_bytes(self, starts: Offsets, ends: Offsets) -> float:
        """Return about how many bytes the messages between these offsets have in the brokers' logs, at least 1.

        It pulls the next messages of at most `_SAMPLED` queues, those with the most messages. Other queues, and those
        whose brokers do not answer, count with the mean size of the newest sample. Without one the result is infinite.
        """
        waiting = {queue: ends[queue] - starts[queue] for queue in ends if ends[queue] > starts[queue]}
        sampled = sorted(waiting, key=lambda queue: -waiting[queue])[:_SAMPLED]

        def pull(queue: MessageQueue, address: str, _: float) -> tuple[int, int]:
            offset = starts[queue]
            while True:
                outcome = self.requests.pull(queue, offset, address, _SAMPLE)
                if outcome.status is PullStatus.FOUND:
                    first = max(offset, first_queue_offset(outcome.body) or 0)
                    return len(outcome.body), outcome.next_begin_offset - first
                if outcome.status is PullStatus.NO_NEW_MSG or outcome.next_begin_offset <= offset:
                    return 0, 0
                # The messages before this offset have expired.
                offset = outcome.next_begin_offset

        answers, _ = self.requests.once(sampled, pull)
        sizes = {queue: nbytes / messages for queue, ((nbytes, messages), _) in answers.items() if messages > 0}
        if sizes:
            self._mean_size = sum(sizes.values()) / len(sizes)
        return max(1.0, sum(messages * sizes.get(queue, self._mean_size) for queue, messages in waiting.items()))

    def target(self) -> Offsets:
        """Return where Trigger.AvailableNow stops; without ``failOnDataLoss`` only for brokers that answer."""
        if self._options.fail_on_data_loss:
            return self.latest()
        self.queues.deadline.restart()
        return {queue: end for queue, (end, _) in self._ends(self.queues.present()).items()}

    def completed(self, target: Offsets, known: Offsets) -> Offsets:
        """Return `target` with the queues of `known` that it lacks, because no route had their brokers.

        With ``failOnDataLoss`` it waits for the brokers until ``readTimeoutMs``. Otherwise the offsets stay.
        """
        self.queues.deadline.restart()
        missing = {queue: known[queue] for queue in known if queue not in target and self._options.reads(queue)}
        absent = sorted(missing.keys() - self._gone(missing))
        if absent and not self._options.fail_on_data_loss:
            text = "%s; the query continues without these queues (failOnDataLoss=false)"
            logger.warning(text, _absent(absent, "in no route or did not answer"))
        if not absent or not self._options.fail_on_data_loss:
            return {**target, **missing}
        try:
            return {**target, **missing, **self._resolver.latest(absent)}
        except ReadError as exc:
            absent = [queue for queue in absent if not self.queues.exists(queue)]
            if not absent:
                raise
            raise ReadError(
                f"planning Trigger.AvailableNow: {_absent(absent)}. The driver waited "
                f"readTimeoutMs={self._options.read_timeout_ms}. Start the broker, or set failOnDataLoss=false to read "
                "without it"
            ) from exc

    def available(self, known: Offsets, target: Offsets | None = None) -> Offsets:
        """Return the ends of the queues of `known`, and of new queues, not after `target` (Trigger.AvailableNow).

        `known` are the offsets read so far. A queue that the options do not select any more keeps its offset.
        With ``failOnDataLoss`` it raises a DataLossError for a queue that is gone, unless its topic exists and all its
        messages were read, and for a queue that ends before its known offset. Raises a ReadError if no broker has
        answered for a queue for ``readTimeoutMs``.
        """
        self.queues.deadline.restart()
        present = set(self.queues.present())
        selected = present.union(filter(self._options.reads, known))
        gone = self._gone(selected - present)
        # Their topics exist, and a broker still returns the end of a queue that its topic does not list any more.
        removed = {queue for queue in gone if self.queues.routes([queue])}
        self._report_gone(gone - removed, known)
        requested, ends = sorted(selected - gone), dict(known)
        if target is not None:
            # A queue that is not in the target was created later, or its broker was down.
            ends |= {queue: max(target[queue], known.get(queue, 0)) for queue in requested if queue in target}
            # A target before the known offset came from a slave, or messages are lost. These ends are requested again.
            requested = [queue for queue in requested if queue in target and target[queue] < known.get(queue, 0)]
        answers = self._ends([*requested, *sorted(removed)])
        is_master = self.queues.brokers.is_master
        unread = {
            queue
            for queue, (end, address) in answers.items()
            if queue in removed and (end > known[queue] or (end < known[queue] and is_master(queue, address)))
        }
        removed -= unread - self._confirmed(unread)
        self._report_gone(unread & removed, known)
        for queue, (end, address) in answers.items():
            if queue not in removed:
                end = self._not_before(queue, end, address, known)
                ends[queue] = end if target is None else min(end, max(target.get(queue, 0), known[queue]))
        self._reported_gone &= gone
        return ends

    def _gone(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Return those queues that are gone from the route, and those of topics without one that are `_confirmed`."""
        gone = {queue for queue in sorted(queues) if self.queues.exists(queue) is False}
        unrouted = {queue for queue in gone if not self.queues.routes([queue])}
        return gone - unrouted | self._confirmed(unrouted)

    def _confirmed(self, gone: set[MessageQueue]) -> set[MessageQueue]:
        """Return those queues that were reported as gone, or that `QueueRequests.confirmed` finds so."""
        return gone & self._reported_gone | self.requests.confirmed(gone - self._reported_gone)

    def _report_gone(self, queues: set[MessageQueue], known: Offsets) -> None:
        """Report the queues that are not reported yet; raises as `lost`."""
        for queue in sorted(queues - self._reported_gone):
            lost(
                self._options,
                f"queue {queue} is gone: its messages from offset {known.get(queue, 0)} on can't be read, because the "
                "topic was deleted or has fewer read queues now. If it has fewer, restore them (mqadmin updateTopic "
                "-r)",
            )
        self._reported_gone |= queues

    def begun(self, known: Offsets, available: Offsets) -> Offsets:
        """Return where each queue of `available` begins; a new queue begins with its earliest message."""
        new = [queue for queue in available if queue not in known]
        if new and known:
            logger.info("reading new queues from their earliest message: %s", ", ".join(map(str, new)))
        earliest = self._resolver.earliest(new)
        for queue, offset in earliest.items():
            if known and offset:
                text = "new queue %s begins at offset %d: earlier messages expired before the query read them"
                logger.warning(text, queue, offset)
        return {queue: known[queue] if queue in known else earliest[queue] for queue in available}

    def ranges(
        self,
        starts: Offsets,
        ends: Offsets,
        times: Offsets | None = None,
        end_times: Offsets | None = None,
    ) -> list[OffsetRange]:
        """Return the ranges of a micro-batch without queues that are gone; a DataLossError with ``failOnDataLoss``.

        Raises as `LastMessages.continued` and `OffsetResolver.ranges_between`.

        `times` and `end_times` are what `last_messages.times` has returned for `starts` and `ends`.
        """
        self.queues.deadline.restart()
        # A queue without messages begins at 0, also if it is gone.
        starts = {queue: 0 for queue, end in ends.items() if end == 0} | starts
        # A query that is restarted repeats its last micro-batch. Queues may be gone since then.
        was, becomes = times or {}, end_times or {}
        changed = [
            queue for queue, end in ends.items() if (starts.get(queue, 0), was.get(queue)) != (end, becomes.get(queue))
        ]
        gone = self.requests.await_listed(changed)
        self._report_gone(gone, starts)
        ends = {queue: end for queue, end in ends.items() if queue not in gone}
        batch = MicroBatch(self.begun(starts, ends), ends, was, becomes)
        return self._resolver.ranges_between(*self.last_messages.continued(batch))

    def commit(self, offsets: Offsets) -> None:
        """Write the group's offsets to the brokers; see `GroupOffsets.write`."""
        self._group.write(offsets)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _ends(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, tuple[int, str]]:
        """Return the ends of the queues and the addresses of the brokers that report them; raises as `available`."""
        ends, errors = self.requests.once(queues, self._transport.max_offset)
        before, self._silent = self._silent, {}
        options = self._options
        for queue, error in errors.items():
            if not error.retriable:
                raise error
            since, tries = before.get(queue, (self.clock(), 0))
            self._silent[queue] = since, tries + 1
            enough = tries + 1 >= _TRIES and self.clock() - since > options.read_timeout_ms / 1000
            if enough and options.fail_on_data_loss:
                raise ReadError(
                    f"requesting the end of {queue}: no broker has answered for readTimeoutMs="
                    f"{options.read_timeout_ms}. The last try: {error}. Start the broker, then the query, which "
                    "resumes where it stopped; or set failOnDataLoss=false to read the other queues meanwhile"
                ) from error
            if not tries:
                logger.warning("queue %s waits for its broker, other queues are read: %s", queue, error)
        return ends

    def _not_before(self, queue: MessageQueue, end: int, address: str, known: Offsets) -> int:
        """Return the end that a broker reports. If a master's end is before the known offset, data is lost."""
        offset = known.get(queue)
        if offset is None or end >= offset:
            return end
        if not self.queues.brokers.is_master(queue, address):
            # A slave is behind its master.
            return offset
        lost(
            self._options,
            f"queue {queue} ends at offset {end}, but the query has read up to offset {offset}: the topic was deleted, "
            "or deleted and created again, or its broker lost messages",
        )
        return end


def _absent(queues: Sequence[MessageQueue], state: str = "in no route") -> str:
    brokers = sorted({queue.broker_name for queue in queues})
    are = "broker {} is" if len(brokers) == 1 else "brokers {} are"
    text = ", ".join(map(str, queues[:5])) + (" and others" if len(queues) > 5 else "")
    return f"{are.format(', '.join(brokers))} {state}, and the checkpoint has offsets of {text}"
