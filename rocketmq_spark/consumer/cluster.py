"""What a streaming query asks of a cluster, from one micro-batch to the next.

Rule 1: everything is asked anew each time; remembered is only since when a queue has been silent.
Rule 2: one silent queue stops no other; a query that could not even begin says so at once.

Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from rocketmq_spark.consumer.bounds import Bounds, Offsets
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
    """

    def __init__(self, options: ReaderOptions, transport: ReadTransport, clock: Callable[[], float]) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self._queues = TopicQueues(options, transport, clock)
        self._bounds = Bounds(options, transport, self._queues, clock)
        # Since when nobody has answered for a queue, and how often in a row.
        self._silent: dict[MessageQueue, tuple[float, int]] = {}

    def starts(self) -> Offsets:
        """Return where a new query begins."""
        return self._bounds.starts(self._queues.find())

    def latest(self) -> Offsets:
        """Return the ends of all queues there are."""
        return self._bounds.latest(self._queues.find())

    def available(self, known: Mapping[MessageQueue, int]) -> Offsets:
        """Return how far can be read now: the ends of the queues of `known` and of those that are new.

        Raises
        ------
        DataLossError
            A queue is gone, or ends before what was read of it, with ``failOnDataLoss``.
        ReadError
            For ``readTimeoutMs`` nobody has answered for a queue.
        """
        queues = self._queues.find()
        found = dict(known)
        before, self._silent = self._silent, {}
        for queue, answer in self._bounds.once([*dict.fromkeys([*known, *queues])], self._end).items():
            if queue in known and queue not in queues and self._queues.exists(queue) is False:
                self._bounds.lost(f"queue {queue} is gone: what was in it behind offset {known[queue]} can't be read")
                del found[queue]
            elif isinstance(answer, RocketMQError):
                self._is_silent(queue, answer, *before.get(queue, (self._clock(), 0)))
            else:
                found[queue] = self._not_before(queue, *answer, known.get(queue))
        return found

    def begun(self, known: Mapping[MessageQueue, int], available: Mapping[MessageQueue, int]) -> Offsets:
        """Return where the queues of `available` begin: those that are new with their earliest message."""
        new = [queue for queue in available if queue not in known]
        if new and known:
            logger.info("new queues, read from their earliest message on: %s", ", ".join(map(str, new)))
        earliest = self._bounds.earliest(new)
        return {queue: known[queue] if queue in known else earliest[queue] for queue in available}

    def ranges(self, starts: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> list[OffsetRange]:
        """Return what a micro-batch reads; raises as `Bounds.checked`."""
        return self._bounds.checked(self.begun(starts, ends), ends)

    def may_hold_inner_batches(self, queues: Iterable[MessageQueue]) -> bool:
        """See `TopicQueues.may_hold_inner_batches`."""
        return self._queues.may_hold_inner_batches(queues)

    def check_filter(self, queues: Iterable[MessageQueue]) -> None:
        """See `TopicQueues.check_filter`."""
        self._queues.check_filter(queues)

    def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Tell the brokers how far the group has read. What fails is logged: the next commit says it again."""
        options, timeout = self._options, self._options.pull_timeout_ms / 1000

        def tell(queue: MessageQueue, address: str) -> None:
            on_wire = self._queues.on_wire(queue)
            self._transport.update_consumer_offset(on_wire, options.consumer_group, offsets[queue], address, timeout)

        for queue, answer in self._bounds.once([*offsets], tell).items():
            if isinstance(answer, RocketMQError):
                logger.warning("commitOffsets: %s: %s", queue, answer)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _end(self, queue: MessageQueue, address: str) -> int:
        return self._transport.max_offset(self._queues.on_wire(queue), address, self._options.pull_timeout_ms / 1000)

    def _is_silent(self, queue: MessageQueue, error: RocketMQError, since: float, tries: int) -> None:
        if not error.retriable:
            raise error
        self._silent[queue] = since, tries + 1
        if tries + 1 >= _TRIES and self._clock() - since > self._options.read_timeout_ms / 1000:
            raise ReadError(
                f"asking for the end of {queue}: nobody has answered for readTimeoutMs="
                f"{self._options.read_timeout_ms}. The last try: {error}. Bring its broker back; "
                "the query then goes on where it was"
            ) from error
        logger.warning("queue %s waits for its broker, the others go on: %s", queue, error)

    def _not_before(self, queue: MessageQueue, end: int, address: str, known: int | None) -> int:
        if known is None or end >= known:
            return end
        if not self._queues.is_master(queue, address):
            # A slave is behind its master.
            return known
        self._bounds.lost(
            f"queue {queue} ends at offset {end}, and {known} was reached before: the topic was made anew, or its "
            "broker lost what it had"
        )
        return end
