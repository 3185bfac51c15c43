"""Which queue a batch goes to that may go to any.

Rule 1: the index walks on by one with every queue looked at, from a random start (``ThreadLocalIndex.java``).
Rule 2: the broker that failed last is left alone while another one may take the batch just now.
Rule 3: with the fault strategy on, brokers in isolation come after those that are not: available first, then
        reachable, then any (``MQFaultStrategy.selectOneMessageQueue``; spec/producer.md section 5.4).
Rule 4: a broker whose window is full is passed over, and waited for only when no broker's window is open.

Rules 1 to 3 are RocketMQ's (spec/producer.md sections 5.1 to 5.4); rule 4 is the connector's: without it one slow
broker would hold up the rows that another could take.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.fault import LatencyFaultTolerance
from rocketmq_spark.producer.route_cache import TopicPublishInfo

Admits = Callable[[str], bool]

_INDEX_MASK = 0x7FFFFFFF


class QueueSelector(Protocol):
    """Picks a queue for rows that are bound to none."""

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, admits: Admits, now: float
    ) -> MessageQueue | None:
        """Return a queue, or None while no broker that may be used admits a request.

        Parameters
        ----------
        info : TopicPublishInfo
            With at least one queue.
        last_broker_name : str or None
            The broker that failed this batch last.
        admits : callable
            ``broker name -> bool``: its window has room.
        now : float
            Seconds.
        """
        ...


class RoundRobinSelector:
    """Round robin over the queues, RocketMQ's default selection.

    Parameters
    ----------
    faults : LatencyFaultTolerance
    rng : random.Random
        For the random start.
    """

    def __init__(self, faults: LatencyFaultTolerance, rng: random.Random) -> None:
        self._faults = faults
        self._index = rng.randrange(_INDEX_MASK)

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, admits: Admits, now: float
    ) -> MessageQueue | None:
        """Return the next queue by rules 1 to 4."""
        names = info.broker_names
        open_brokers = frozenset(filter(admits, names))
        preferred: frozenset[str] = names - {last_broker_name} or names
        available: frozenset[str] = names
        if self._faults.enabled:
            available = frozenset(name for name in names if self._faults.is_available(name, now))
            reachable = frozenset(name for name in preferred if self._faults.is_reachable(name))
            # A full window on an available broker is worth waiting for: an isolated one would be slower.
            preferred = preferred & available or reachable or preferred
        chosen = open_brokers & preferred or open_brokers & available & {last_broker_name}
        return self._next_on(info.queues, chosen) if chosen else None

    def _next_on(self, queues: Sequence[MessageQueue], brokers: frozenset[str]) -> MessageQueue:
        for _ in queues:
            self._index = (self._index + 1) & _INDEX_MASK
            queue = queues[self._index % len(queues)]
            if queue.broker_name in brokers:
                return queue
        raise AssertionError(f"no queue of {sorted(brokers)} among {len(queues)}")


class RandomSelector:
    """A queue at random (``SelectMessageQueueByRandom.java``), of those whose broker's window is open.

    Parameters
    ----------
    rng : random.Random
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def select(
        self,
        info: TopicPublishInfo,
        last_broker_name: str | None,
        admits: Admits,
        now: float,  # noqa: ARG002 - the protocol's face
    ) -> MessageQueue | None:
        """Return any queue whose broker admits a request, another broker than the one that failed if there is one."""
        candidates = [queue for queue in info.queues if admits(queue.broker_name)]
        others = [queue for queue in candidates if queue.broker_name != last_broker_name]
        return self._rng.choice(others or candidates) if candidates else None
