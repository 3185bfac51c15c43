"""What a streaming query asks of a cluster, from one micro-batch to the next.

Rule 1: everything is asked anew each time; remembered is only what has been said already: which queues are silent, and
        since when, and which are gone.
Rule 2: one silent queue stops no other; a query that could not even begin says so at once.
Rule 3: a queue once known is never forgotten: one that comes back is read on where it was.

Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rocketmq_spark.consumer.bounds import Bounds, Offsets
from rocketmq_spark.consumer.data_loss import lost
from rocketmq_spark.consumer.group_offsets import GroupOffsets
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import ReadError, RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

# A queue is not given up before so many tries: between two of them a whole micro-batch may lie.
_TRIES: Final = 3


class SourceCluster:
    """The cluster of one streaming query.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
        Closed with this object.
    clock : callable
        Seconds, monotonic.
    client_id : str, default "spark"
        What brokers, and the tools that ask them, call this member of the group.
    sleep : callable, default time.sleep

    Attributes
    ----------
    queues : TopicQueues
        What is known of the topics.
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        client_id: str = "spark",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self.queues = TopicQueues(options, transport, clock)
        self._bounds = Bounds(options, transport, self.queues, clock, sleep)
        # Since when nobody has answered for a queue, and how often in a row.
        self._silent: dict[MessageQueue, tuple[float, int]] = {}
        self._gone: set[MessageQueue] = set()
        self._group = GroupOffsets(options, transport, self.queues, self._bounds, clock, client_id)

    def starts(self) -> Offsets:
        """Return where a new query begins."""
        return self._bounds.starts(self.queues.find())

    def latest(self) -> Offsets:
        """Return the ends of all queues there are."""
        self.queues.deadline.restart()
        return self._bounds.latest(self.queues.present())

    def target(self) -> Offsets:
        """Return the same for `available`; without ``failOnDataLoss`` of the queues that somebody answers for."""
        self.queues.deadline.restart()
        if self._options.fail_on_data_loss:
            return self.latest()
        return {queue: end for queue, (end, _) in self._ends(self.queues.present()).items()}

    def completed(self, target: Mapping[MessageQueue, int], known: Mapping[MessageQueue, int]) -> Offsets:
        """Return `target` with the queues of `known` that it lacks, because their brokers were in no route.

        With ``failOnDataLoss`` this waits for these brokers. Otherwise such queues stay at their offsets.

        Raises
        ------
        ReadError
            A broker was in no route for ``readTimeoutMs``, with ``failOnDataLoss``.
        """
        self.queues.deadline.restart()
        missing = {queue: known[queue] for queue in known if queue not in target and self._options.reads(queue)}
        absent = sorted(queue for queue in missing if self.queues.exists(queue) is not False)
        if not absent:
            return {**target, **missing}
        if not self._options.fail_on_data_loss:
            logger.warning("%s; failOnDataLoss=false goes on without these queues", _absent(absent))
            return {**target, **missing}
        try:
            return {**target, **missing, **self._bounds.latest(absent)}
        except ReadError as exc:
            absent = [queue for queue in absent if self.queues.exists(queue) is None]
            if not absent:
                raise
            raise ReadError(
                f"planning Trigger.AvailableNow: {_absent(absent)}. The driver waited "
                f"readTimeoutMs={self._options.read_timeout_ms}. Start the broker, or set failOnDataLoss=false to read "
                "without it"
            ) from exc

    def available(self, known: Mapping[MessageQueue, int], target: Mapping[MessageQueue, int] | None = None) -> Offsets:
        """Return how far can be read now: the ends of the queues of `known` and of those that are new.

        Parameters
        ----------
        known : mapping of MessageQueue to int
            How far has been read. A queue that the options do not ask for (any more) stays where it is.
        target : mapping of MessageQueue to int, optional
            What `target` has said; what came after that is not read.

        Raises
        ------
        DataLossError
            A queue is gone, or ends before what was read of it, with ``failOnDataLoss``.
        ReadError
            For ``readTimeoutMs`` nobody has answered for a queue.
        """
        self.queues.deadline.restart()
        present = set(self.queues.present())
        wanted = present | set(filter(self._options.reads, known))
        gone = {queue for queue in wanted - present if self.queues.exists(queue) is False}
        for queue in sorted(gone - self._gone):
            lost(self._options, f"queue {queue} is gone: what was in it behind offset {known[queue]} can't be read")
        self._gone = gone
        asked, found = sorted(wanted - gone), dict(known)
        if target is not None:
            # What is not in it came later, or its broker had gone before.
            found |= {queue: max(target[queue], known.get(queue, 0)) for queue in asked if queue in target}
            # A slave has told it, or messages are lost: who answers now decides.
            asked = [queue for queue in asked if queue in target and target[queue] < known.get(queue, 0)]
        for queue, (end, address) in self._ends(asked).items():
            end = self._not_before(queue, end, address, known)
            found[queue] = end if target is None else min(end, known[queue])
        return found

    def begun(self, known: Mapping[MessageQueue, int], available: Mapping[MessageQueue, int]) -> Offsets:
        """Return where the queues of `available` begin: those that are new with their earliest message."""
        new = [queue for queue in available if queue not in known]
        if new and known:
            logger.info("new queues, read from their earliest message on: %s", ", ".join(map(str, new)))
        earliest = self._bounds.earliest(new)
        for queue, offset in earliest.items():
            if known and offset:
                logger.warning(
                    "new queue %s begins at offset %d: earlier messages had expired when it was found", queue, offset
                )
        return {queue: known[queue] if queue in known else earliest[queue] for queue in available}

    def ranges(self, starts: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> list[OffsetRange]:
        """Return what a micro-batch reads; raises as `Bounds.checked`."""
        self.queues.deadline.restart()
        return self._bounds.checked(self.begun(starts, ends), ends)

    def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Tell the brokers how far the group has read; see `GroupOffsets.tell`."""
        self._group.tell(offsets)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _end(self, queue: MessageQueue, address: str) -> int:
        return self._transport.max_offset(self.queues.on_wire(queue), address, self._options.pull_timeout_ms / 1000)

    def _ends(self, queues: Sequence[MessageQueue]) -> dict[MessageQueue, tuple[int, str]]:
        """Return the ends of the queues that somebody answers for, and who it is; raises as `available`."""
        found: dict[MessageQueue, tuple[int, str]] = {}
        before, self._silent = self._silent, {}
        for queue, answer in self._bounds.once(queues, self._end).items():
            if isinstance(answer, RocketMQError):
                self._is_silent(queue, answer, *before.get(queue, (self._clock(), 0)))
            else:
                found[queue] = answer
        return found

    def _is_silent(self, queue: MessageQueue, error: RocketMQError, since: float, tries: int) -> None:
        if not error.retriable:
            raise error
        self._silent[queue] = since, tries + 1
        options = self._options
        enough = tries + 1 >= _TRIES and self._clock() - since > options.read_timeout_ms / 1000
        if enough and options.fail_on_data_loss:
            raise ReadError(
                f"asking for the end of {queue}: nobody has answered for readTimeoutMs={options.read_timeout_ms}. The "
                f"last try: {error}. Bring its broker back, and the query goes on where it was; to go on without it, "
                "set failOnDataLoss=false"
            ) from error
        if not tries:
            logger.warning("queue %s waits for its broker, the others go on: %s", queue, error)

    def _not_before(self, queue: MessageQueue, end: int, address: str, start: Mapping[MessageQueue, int]) -> int:
        """Return an end that whoever has this address has told just now."""
        known = start.get(queue)
        if known is None or end >= known:
            return end
        if not self.queues.is_master(queue, address):
            # A slave is behind its master.
            return known
        lost(
            self._options,
            f"queue {queue} ends at offset {end}, and {known} was reached before: the topic was deleted or made "
            "anew, or its broker lost what it had",
        )
        return end


def _absent(queues: Sequence[MessageQueue]) -> str:
    brokers = sorted({queue.broker_name for queue in queues})
    are = "broker {} is" if len(brokers) == 1 else "brokers {} are"
    text = ", ".join(map(str, queues[:5])) + (" and others" if len(queues) > 5 else "")
    return f"{are.format(', '.join(brokers))} in no route, and the checkpoint has offsets of {text}"
