"""What a streaming query asks of a cluster, from one micro-batch to the next.

Rule 1: everything is asked anew each time; remembered is only what has been said already: which queues are silent, and
        since when, and which are gone.
Rule 2: one silent queue stops no other; a query that could not even begin says so at once.
Rule 3: a queue once known is never forgotten: one that comes back is read on where it was.

Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rocketmq_spark.consumer.bounds import Bounds, Offsets
from rocketmq_spark.consumer.ranges import OffsetRange
from rocketmq_spark.consumer.topic_queues import TopicQueues
from rocketmq_spark.errors import ReadError, RocketMQError, RouteNotFoundException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

_AT_ONCE: Final = 16
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
    """

    def __init__(
        self, options: ReaderOptions, transport: ReadTransport, clock: Callable[[], float], client_id: str = "spark"
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self._queues = TopicQueues(options, transport, clock)
        self._bounds = Bounds(options, transport, self._queues, clock)
        self._silent_since: dict[MessageQueue, float] = {}
        self._gone: set[MessageQueue] = set()
        self._client_id = client_id
        self._registered: dict[str, float] = {}

    def starts(self) -> Offsets:
        """Return where a new query begins."""
        return self._bounds.starts(self._queues.find())

    def latest(self) -> Offsets:
        """Return the ends of all queues there are."""
        return self._bounds.latest(self._queues.present())

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
        present = set(self._queues.present())
        gone = {queue for queue in known if queue not in present and self._queues.exists(queue) is False}
        for queue in sorted(gone - self._gone):
            self._bounds.lost(f"queue {queue} is gone: what was in it behind offset {known[queue]} can't be read")
        self._gone = gone
        asked = sorted((present | known.keys()) - gone)
        ends: Mapping[MessageQueue, int | RocketMQError]
        ends = self._bounds.latest_now(asked) if target is None else target
        found = dict(known)
        for queue in asked:
            end = ends.get(queue)
            if end is None:
                # It has come after the target, or its broker has gone before.
                continue
            if isinstance(end, RocketMQError):
                self._silent(queue, end)
            else:
                self._silent_since.pop(queue, None)
                found[queue] = self._not_before(queue, end, known.get(queue))
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

    def routes(self, queues: Iterable[MessageQueue]) -> dict[str, TopicRouteData]:
        """Return the routes of the topics of queues, as they are known."""
        return self._queues.routes(queues)

    def commit(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Tell the brokers how far the group has read. What fails is logged: the next commit says it again."""
        of_brokers: dict[str, list[MessageQueue]] = {}
        for queue in offsets:
            try:
                of_brokers.setdefault(self._queues.address(queue), []).append(queue)
            except RocketMQError as exc:
                logger.warning("commitOffsets: %s", exc)

        def tell(address: str) -> None:
            timeout, group = self._options.pull_timeout_ms / 1000, self._options.consumer_group
            try:
                self._register(address, timeout)
                for queue in of_brokers[address]:
                    wired = self._queues.on_wire(queue)
                    self._transport.update_consumer_offset(wired, group, offsets[queue], address, timeout)
            except RocketMQError as exc:
                logger.warning("commitOffsets: %s", exc)

        if of_brokers:
            with ThreadPoolExecutor(min(_AT_ONCE, len(of_brokers)), "rocketmq-spark-commit") as pool:
                list(pool.map(tell, of_brokers))

    def _register(self, address: str, timeout: float) -> None:
        """Have a broker know the group, and the tools that ask it: without a heart-beat there is no %RETRY% topic."""
        now, since = self._clock(), self._registered.get(address, -math.inf)
        if now - since > _HEART_BEAT:
            self._transport.register_consumer(self._client_id, self._options.consumer_group, address, timeout)
            self._registered[address] = now

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def _silent(self, queue: MessageQueue, error: RocketMQError) -> None:
        now = self._clock()
        if queue not in self._silent_since:
            self._silent_since[queue] = now
            logger.warning("queue %s waits for its broker, the others go on: %s", queue, error)
        options = self._options
        if options.fail_on_data_loss and now - self._silent_since[queue] > options.read_timeout_ms / 1000:
            raise ReadError(
                f"asking for the end of {queue}: nobody has answered for readTimeoutMs={options.read_timeout_ms}. The "
                f"last try: {error}. Bring its broker back, and the query goes on where it was; to go on without it, "
                "set failOnDataLoss=false"
            ) from error

    def _not_before(self, queue: MessageQueue, end: int, known: int | None) -> int:
        if known is None or end >= known:
            return end
        with contextlib.suppress(RouteNotFoundException):
            if not self._queues.is_master(queue, self._queues.address(queue)):
                # A slave is behind its master.
                return known
        self._bounds.lost(
            f"queue {queue} ends at offset {end}, and {known} was reached before: the topic was made anew, or its "
            "broker lost what it had"
        )
        return end
