"""Selects the queue of a send: in turn, at random, by machine room, by hash, or by a caller's selector.

The sink tells a `QueueSelector` which brokers have room for a batch. It does not ask the selector for a batch whose
queue is already fixed, by the rows' columns, ``shardingKey``, or a class as ``queueSelector``. `Producer` uses a
`ThreadLocalSelector` or the caller's selector. See docs/internals/routing.md#queue-selection.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeAlias

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.hashes import java_hash, queue_index
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.fault_strategy import FaultStrategy
from rocketmq_spark.routing.route_cache import TopicPublishInfo

Admits = Callable[[str], bool]

_INDEX_MASK: Final = 0x7FFFFFFF


class RoundRobinSelector:
    """Selects queues in turn, RocketMQ's default. Not safe for threads."""

    def __init__(self, faults: FaultStrategy, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self.reset()

    def reset(self) -> None:
        """Continue at a new random queue (``ThreadLocalIndex.reset``)."""
        self._index = self._rng.randrange(_INDEX_MASK)

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, admits: Admits, now: float
    ) -> MessageQueue | None:
        """Return the next queue of a preferred broker, or None if the caller should wait for a full window.

        `admits` returns whether the window of a broker has room. `last_broker_name` failed last. `now` is in seconds.
        """
        candidates = self._candidates(info, last_broker_name, now)
        admitted = frozenset(filter(admits, candidates))
        preferred = self._faults.prefer(candidates, last_broker_name, admitted, now)
        if not preferred:
            return None
        queues = info.queues
        for _ in queues:
            self._index = (self._index + 1) & _INDEX_MASK
            queue = queues[self._index % len(queues)]
            if queue.broker_name in preferred:
                return queue
        raise AssertionError(f"none of the {len(queues)} queues belongs to the brokers {sorted(preferred)}")

    def _candidates(self, info: TopicPublishInfo, last_broker_name: str | None, now: float) -> frozenset[str]:  # noqa: ARG002
        return info.broker_names


class MachineRoomSelector(RoundRobinSelector):
    """Selects queues in the given machine rooms in turn; others while each broker there is isolated or failed last."""

    # Java's ``SelectMessageQueueByMachineRoom`` is a stub that never returns a queue.

    def __init__(self, rooms: Collection[str], faults: FaultStrategy, rng: random.Random) -> None:
        super().__init__(faults, rng)
        self._rooms = machine_room_pattern(rooms)

    def _candidates(self, info: TopicPublishInfo, last_broker_name: str | None, now: float) -> frozenset[str]:
        in_room = frozenset(filter(self._rooms.search, info.broker_names))
        usable = (name for name in in_room - {last_broker_name} if self._faults.is_available(name, now))
        return in_room if any(usable) else info.broker_names


def machine_room_pattern(rooms: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for brokers in rooms: ``idc1`` has ``idc1-broker-a`` and ``broker.idc1``, not ``idc10-a``."""
    return re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, rooms))})(?![A-Za-z0-9])")


class RandomSelector:
    """Selects a random queue of a broker whose window has room (``SelectMessageQueueByRandom.java``)."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def reset(self) -> None:
        """Do nothing: each queue is a random one."""

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, admits: Admits, _now: float
    ) -> MessageQueue | None:
        """Return a random queue, preferably not of the broker that failed last."""
        candidates = [queue for queue in info.queues if admits(queue.broker_name)]
        others = [queue for queue in candidates if queue.broker_name != last_broker_name]
        return self._rng.choice(others or candidates) if candidates else None


QueueSelector: TypeAlias = RoundRobinSelector | RandomSelector


def selector_of(options: SinkOptions, faults: FaultStrategy, rng: random.Random) -> QueueSelector:
    """Return a new selector for the rows of one topic (``queueSelector``)."""
    if options.queue_selector == "random":
        return RandomSelector(rng)
    if options.queue_selector == "machineRoom":
        return MachineRoomSelector(options.machine_room, faults, rng)
    return RoundRobinSelector(faults, rng)


class ThreadLocalSelector:
    """Selects queues in turn; thread-safe, with an index for each thread, topic and route (``MQFaultStrategy``)."""

    def __init__(self, faults: FaultStrategy, rng: random.Random) -> None:
        self._faults = faults
        self._rng = rng
        self._of_thread = threading.local()

    def select(
        self, info: TopicPublishInfo, last_broker_name: str | None, now: float, *, reset_index: bool = False
    ) -> MessageQueue | None:
        """Return a queue or None; `reset_index` continues at a random queue if the fault strategy is enabled."""
        if not info.ok:
            return None
        selectors: dict[str, tuple[TopicPublishInfo, RoundRobinSelector]] = self._of_thread.__dict__
        previous_info, selector = selectors.get(info.topic, (None, None))
        if selector is None or previous_info is not info:
            selector = RoundRobinSelector(self._faults, self._rng)
            selectors[info.topic] = info, selector
        elif reset_index and self._faults.resets_index:
            selector.reset()
        return selector.select(info, last_broker_name, lambda _broker_name: True, now)


MessageQueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, object], "MessageQueue | None"]


class SelectMessageQueueByHash:
    """Selects the same queue as the Java client for an equal str, int or bool, by its Java hash code."""

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:  # noqa: ARG002
        """Return the queue."""
        return queues[queue_index(java_hash(arg), len(queues))]


class SelectMessageQueueByRandom:
    """Selects a random queue."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:  # noqa: ARG002
        """Return the queue."""
        return self._rng.choice(queues)


class SelectMessageQueueByMachineRoom:
    """Selects a random queue in the given machine rooms (``idc1`` for ``idc1-broker-a``); of all brokers if none is."""

    def __init__(self, rooms: Collection[str], rng: random.Random | None = None) -> None:
        if isinstance(rooms, str) or not rooms or not all(room.strip() for room in rooms):
            raise ValueError(f"machine rooms {rooms!r}: give a list of names that are not blank, such as ['idc1']")
        self._rooms = machine_room_pattern(rooms)
        self._rng = rng or random.Random()

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:  # noqa: ARG002
        """Return the queue."""
        in_room = [queue for queue in queues if self._rooms.search(queue.broker_name)]
        return self._rng.choice(in_room or queues)


def select_queue(
    selector: MessageQueueSelector, queues: Sequence[MessageQueue], message: Message, arg: object
) -> MessageQueue:
    """Return the selector's queue; raise ``MQClientException`` if the selector fails or returns no queue."""
    choosing = f"choosing the queue of a message of topic {message.topic}: the selector {selector!r}"
    try:
        queue = selector(queues, message, arg)
    except Exception as exc:
        raise MQClientException(f"{choosing} raised {type(exc).__name__}: {exc}") from exc
    if not isinstance(queue, MessageQueue):
        raise MQClientException(
            f"{choosing} returned {queue!r}; it must return one of the {len(queues)} queues it was given"
        )
    return queue
