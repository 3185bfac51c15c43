"""What a streaming query asks of a cluster, from one micro-batch to the next.

Rule 1: everything is asked anew each time; remembered is only what has been said already: which queues are silent, and
        since when, and which are gone.
Rule 2: one silent queue stops no other; a query that could not even begin says so at once.
Rule 3: a queue once known is never forgotten: one that comes back is read on where it was.

Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Final

from rocketmq_spark.consumer.bounds import Bounds, Offsets
from rocketmq_spark.consumer.data_loss import lost
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import ReadError, RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

# A queue is not given up before so many tries: between two of them a whole micro-batch may lie.
_TRIES: Final = 3
# Seconds from one heart-beat to the next (heartbeatBrokerInterval); a broker forgets a client after four of them.
_HEART_BEAT: Final = 30.0


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

    Attributes
    ----------
    queues : TopicQueues
        What is known of the topics.
    """

    def __init__(
        self, options: ReaderOptions, transport: ReadTransport, clock: Callable[[], float], client_id: str = "spark"
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self.queues = TopicQueues(options, transport, clock)
        self._bounds = Bounds(options, transport, self.queues, clock)
        # Since when nobody has answered for a queue, and how often in a row.
        self._silent: dict[MessageQueue, tuple[float, int]] = {}
        self._gone: set[MessageQueue] = set()
        self._client_id = client_id
        self._registered: dict[str, float] = {}
        self._lock = threading.Lock()

    def starts(self) -> Offsets:
        """Return where a new query begins."""
        return self._bounds.starts(self.queues.find())

    def latest(self) -> Offsets:
        """Return the ends of all queues there are."""
        return self._bounds.latest(self.queues.present())

    def available(self, known: Mapping[MessageQueue, int], target: Mapping[MessageQueue, int] | None = None) -> Offsets:
        """Return how far can be read now: the ends of the queues of `known` and of those that are new.

        Parameters
        ----------
        known : mapping of MessageQueue to int
            How far has been read.
        target : mapping of MessageQueue to int, optional
            What `latest` has said; what came after that is not read.

        Raises
        ------
        DataLossError
            A queue is gone, or ends before what was read of it, with ``failOnDataLoss``.
        ReadError
            For ``readTimeoutMs`` nobody has answered for a queue.
        """
        present = set(self.queues.present())
        gone = {queue for queue in known if queue not in present and self.queues.exists(queue) is False}
        for queue in sorted(gone - self._gone):
            lost(self._options, f"queue {queue} is gone: what was in it behind offset {known[queue]} can't be read")
        self._gone = gone
        asked = sorted((present | known.keys()) - gone)
        if target is not None:
            # What is not in it came later, or its broker has gone before.
            ends = {queue: self._not_before(queue, target[queue], None, known) for queue in asked if queue in target}
            return {**known, **ends}
        found = dict(known)
        before, self._silent = self._silent, {}
        for queue, answer in self._bounds.once(asked, self._end).items():
            if isinstance(answer, RocketMQError):
                self._is_silent(queue, answer, *before.get(queue, (self._clock(), 0)))
            else:
                found[queue] = self._not_before(queue, *answer, known)
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

    def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Tell the brokers how far the group has read. What fails is logged: the next commit says it again."""
        options, timeout = self._options, self._options.pull_timeout_ms / 1000

        def tell(queue: MessageQueue, address: str) -> None:
            self._register(address, timeout)
            on_wire = self.queues.on_wire(queue)
            self._transport.update_consumer_offset(on_wire, options.consumer_group, offsets[queue], address, timeout)

        for queue, answer in self._bounds.once([*offsets], tell).items():
            if isinstance(answer, RocketMQError):
                logger.warning("commitOffsets: %s: %s", queue, answer)

    def _register(self, address: str, timeout: float) -> None:
        """Have a broker know the group, and the tools that ask it: without a heart-beat there is no %RETRY% topic."""
        with self._lock:
            now, since = self._clock(), self._registered.get(address, -math.inf)
            if now - since > _HEART_BEAT:
                self._transport.register_consumer(self._client_id, self._options.consumer_group, address, timeout)
                self._registered[address] = now

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _end(self, queue: MessageQueue, address: str) -> int:
        return self._transport.max_offset(self.queues.on_wire(queue), address, self._options.pull_timeout_ms / 1000)

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

    def _not_before(self, queue: MessageQueue, end: int, address: str | None, start: Mapping[MessageQueue, int]) -> int:
        """Return an end that nobody, or whoever has this address, has told just now."""
        known = start.get(queue)
        if known is None or end >= known:
            return end
        if address is not None and not self.queues.is_master(queue, address):
            # A slave is behind its master.
            return known
        lost(
            self._options,
            f"queue {queue} ends at offset {end}, and {known} was reached before: the topic was made anew, or its "
            "broker lost what it had",
        )
        return end
