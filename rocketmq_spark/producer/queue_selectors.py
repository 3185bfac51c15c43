"""Selectors with which a caller picks the queue of one message: by a key's hash, at random, by machine room.

Rule 1: a selector is a callable ``(queues, message, arg) -> queue``; what it raises, or None, fails the send.
Rule 2: the selectors here are safe for many threads.

Follows ``SelectMessageQueueByHash.java`` (5.x) and ``SelectMessageQueueByRandom.java`` (spec/producer.md sections 11.2
and 11.3). ``SelectMessageQueueByMachineRoom.java`` is a stub that returns null always: ours does what its name says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.java_hash import java_hash, queue_index
from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.producer.selector import machine_room_pattern

MessageQueueSelector: TypeAlias = Callable[[Sequence[MessageQueue], Message, object], "MessageQueue | None"]


class SelectMessageQueueByHash:
    """The queue that Java's hash code of the argument means: equal arguments meet the same queue as from Java.

    The argument is a str, int or bool; an int counts as ``Integer`` if it fits 32 bits. See
    :func:`rocketmq_spark.java_hash.java_hash`.
    """

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:  # noqa: ARG002
        """Return the queue."""
        return queues[queue_index(java_hash(arg), len(queues))]


class SelectMessageQueueByRandom:
    """Any queue.

    Parameters
    ----------
    rng : random.Random, optional
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def __call__(self, queues: Sequence[MessageQueue], message: Message, arg: object) -> MessageQueue:  # noqa: ARG002
        """Return the queue."""
        return self._rng.choice(queues)


class SelectMessageQueueByMachineRoom:
    """Any queue of the brokers that have one of the rooms as a part of their name, as ``idc1`` in ``idc1-broker-a``.

    Any queue at all if there is no such broker.

    Parameters
    ----------
    rooms : collection of str
        At least one.
    rng : random.Random, optional

    Raises
    ------
    ValueError
        There is no room, or one that is blank.
    """

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
    """Ask a selector for a message's queue.

    Parameters
    ----------
    selector : callable
    queues : sequence of MessageQueue
        At least one; topics without a namespace, as in `message`.
    message : Message
    arg : object
        Whatever the selector wants.

    Raises
    ------
    MQClientException
        The selector raised (the cause), or returned something else than a queue.
    """
    try:
        queue = selector(queues, message, arg)
    except Exception as exc:
        raise MQClientException(
            f"choosing the queue of a message of topic {message.topic}: the selector {selector!r} raised "
            f"{type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(queue, MessageQueue):
        raise MQClientException(
            f"choosing the queue of a message of topic {message.topic}: the selector {selector!r} returned {queue!r}; "
            f"it must return one of the {len(queues)} queues it was given"
        )
    return queue
