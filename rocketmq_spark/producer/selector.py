"""Which queue a message or batch goes to that may go to any.

Rule 1: the index walks on by one with every queue looked at, from a random start (``ThreadLocalIndex.java``). (Old 4.x
        moved it by one per selection: the queues behind an avoided broker then got that broker's share.)
Rule 2: which brokers come first is the fault strategy's to say: it avoids the broker that failed last and, switched on,
        those in isolation.
Rule 3: a broker whose window is full is passed over, and waited for only when no other one that is as good is open.
Rule 4: a queue whose broker has no master just now is passed over while there are others.

Rules 1 and 2 are RocketMQ's (``MQFaultStrategy.selectOneMessageQueue``; spec/producer.md sections 5.1 to 5.5); rules 3
and 4 are the connector's: without them one slow or missing broker would hold up the rows that another could take.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.fault_strategy import FaultStrategy
from rocketmq_spark.producer.route_cache import TopicPublishInfo

Admits = Callable[[str], bool]

_INDEX_MASK: Final = 0x7FFFFFFF


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
    """Round robin over the queues, RocketMQ's default selection. Not safe for threads.

    Parameters
    ----------
    faults : FaultStrategy
    rng : random.Random
        For the random start.
    """

    def __init__(self, faults: FaultStrategy, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self.reset()

    def reset(self) -> None:
        """Go on from a new random queue (``ThreadLocalIndex.reset``)."""
        self._index = self._rng.randrange(_INDEX_MASK)

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, admits: Admits, now: float
    ) -> MessageQueue | None:
        """Return the next queue by rules 1 to 4."""
        candidates = self._candidates(info, last_broker_name, now)
        admitted = frozenset(filter(admits, candidates))
        chosen = self._faults.prefer(candidates, last_broker_name, admitted, now)
        return self._next_on(info.queues, chosen) if chosen else None

    def _candidates(
        self,
        info: TopicPublishInfo,
        last_broker_name: str | None,  # noqa: ARG002 - other selectors ask for it
        now: float,  # noqa: ARG002
    ) -> frozenset[str]:
        return info.broker_names

    def _next_on(self, queues: Sequence[MessageQueue], brokers: frozenset[str]) -> MessageQueue:
        for _ in queues:
            self._index = (self._index + 1) & _INDEX_MASK
            queue = queues[self._index % len(queues)]
            if queue.broker_name in brokers:
                return queue
        raise AssertionError(f"no queue of {sorted(brokers)} among {len(queues)}")


class MachineRoomSelector(RoundRobinSelector):
    """Round robin over the queues of one's own machine rooms, and over all while no broker there is any good.

    A broker there is any good if it did not fail last and is not in isolation; a full window there is waited for.
    (Java's ``SelectMessageQueueByMachineRoom`` is a stub: it never returns a queue.)

    Parameters
    ----------
    rooms : collection of str
    faults : FaultStrategy
    rng : random.Random
    """

    def __init__(self, rooms: Collection[str], faults: FaultStrategy, rng: random.Random) -> None:
        super().__init__(faults, rng)
        self._rooms = machine_room_pattern(rooms)

    def _candidates(self, info: TopicPublishInfo, last_broker_name: str | None, now: float) -> frozenset[str]:
        in_room = frozenset(filter(self._rooms.search, info.broker_names))
        good = (name for name in in_room - {last_broker_name} if self._faults.is_available(name, now))
        return in_room if any(good) else info.broker_names


def machine_room_pattern(rooms: Collection[str]) -> re.Pattern[str]:
    """Return what is found in the name of a broker that stands in one of the rooms.

    The room is a whole part of the name: ``idc1`` is in ``idc1-broker-a``, ``idc1@a`` and ``broker.idc1``, and not in
    ``idc10-a``.
    """
    return re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, rooms))})(?![A-Za-z0-9])")


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


def selector_of(options: SinkOptions, faults: FaultStrategy, rng: random.Random) -> QueueSelector:
    """Return a new selector for the rows of one topic that are bound to no queue, as ``queueSelector`` says."""
    if options.queue_selector == "random":
        return RandomSelector(rng)
    if options.queue_selector == "machineRoom":
        return MachineRoomSelector(options.machine_room, faults, rng)
    return RoundRobinSelector(faults, rng)


class ThreadLocalSelector:
    """Round robin with an index for each thread and publish info; safe for many threads (``MQFaultStrategy.java``).

    An info that replaces another one starts anew at random.

    Parameters
    ----------
    faults : FaultStrategy
    rng : random.Random
    """

    def __init__(self, faults: FaultStrategy, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self._of_thread = threading.local()

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, now: float, *, reset_index: bool = False
    ) -> MessageQueue | None:
        """Return a queue, or None if the topic has none (``selectOneMessageQueue``).

        Parameters
        ----------
        info : TopicPublishInfo
        last_broker_name : str or None
            The broker of the attempt before this one.
        now : float
            Seconds.
        reset_index : bool, default False
            This is a retry: with the fault strategy on, go on from a new random queue.
        """
        if not info.ok:
            return None
        selectors: dict[str, tuple[TopicPublishInfo, RoundRobinSelector]] = self._of_thread.__dict__
        known, selector = selectors.get(info.topic, (None, None))
        if selector is None or known is not info:
            selector = RoundRobinSelector(self._faults, self._rng)
            selectors[info.topic] = info, selector
        elif reset_index and self._faults.resets_index:
            selector.reset()
        return selector.select(info, last_broker_name, lambda _broker_name: True, now)
