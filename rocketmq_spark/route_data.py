"""What a name server says of a topic: its brokers and its queues. Frozen values without behaviour.

Field names are RocketMQ's (``BrokerData.java``, ``QueueData.java``, ``TopicRouteData.java``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MASTER_ID: Final = 0

PERM_WRITE: Final = 2
PERM_READ: Final = 4


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of one broker, by broker id; id 0 is the master (``BrokerData.java``)."""

    broker_name: str
    broker_addrs: Mapping[int, str]
    cluster: str = ""

    @property
    def master(self) -> str | None:
        """``host:port`` of the master, or None while there is none."""
        return self.broker_addrs.get(MASTER_ID)


@dataclass(frozen=True, slots=True)
class QueueData:
    """How many queues of a topic one broker has, and what they are open for (``QueueData.java``)."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0

    @property
    def writable(self) -> bool:
        """True if producers may send there."""
        return bool(self.perm & PERM_WRITE)

    @property
    def readable(self) -> bool:
        """True if consumers may pull there."""
        return bool(self.perm & PERM_READ)


@dataclass(frozen=True, slots=True)
class TopicRouteData:
    """Where the queues of one topic are (``TopicRouteData.java``).

    Both tuples are sorted by broker name, so that two equal routes compare equal.

    Over gRPC a proxy takes a broker's place: its ``host:port`` is the broker's name and its address, with one queue.
    `message_types` are the types of message that the topic accepts then (``NORMAL``, ``FIFO``, ``DELAY``,
    ``TRANSACTION``); a name server does not tell them.
    """

    queue_datas: tuple[QueueData, ...]
    broker_datas: tuple[BrokerData, ...]
    order_topic_conf: str | None = None
    static_topic: bool = False
    message_types: frozenset[str] = frozenset()
