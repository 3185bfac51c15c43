"""The rows that methods of `Admin` return in a `Table`.

`Admin.route` and `Admin.create_topic` return a `TopicRouteData` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from rocketmq_spark.display.row_table import Table
from rocketmq_spark.model.message import MessageQueue


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic."""

    SPARE: ClassVar[tuple[str, ...]] = ("queue_type", "permission", "message_type")

    topic: str
    message_type: str | None  # NORMAL, FIFO, DELAY or TRANSACTION, checked by 5.x proxies. None if not reported (4.x)
    queue_type: str | None  # SimpleCQ or BatchCQ. A BatchCQ queue may store a batch as one record
    brokers: tuple[str, ...]  # The names of the brokers that have it
    queues: int  # Sum over all brokers
    permission: str  # rw, r, w or -. Several with a slash between them if brokers differ


@dataclass(frozen=True, slots=True)
class OfQueue:
    """A row about one queue."""

    queue: MessageQueue

    @property
    def topic(self) -> str:
        """The queue's topic."""
        return self.queue.topic

    @property
    def broker_name(self) -> str:
        """The queue's broker."""
        return self.queue.broker_name

    @property
    def queue_id(self) -> int:
        """The queue's number on that broker."""
        return self.queue.queue_id


@dataclass(frozen=True, slots=True)
class QueueOffsets(OfQueue):
    """The offsets of one queue: `min_offset` of its oldest message, `max_offset` of the next new message."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("broker_name", "queue_id", "min_offset", "max_offset", "messages")
    SPARE: ClassVar[tuple[str, ...]] = ("min_offset", "max_offset")

    min_offset: int
    max_offset: int

    @property
    def messages(self) -> int:
        """The number of messages in the queue, 0 also if its broker reports a minimum above the maximum."""
        return max(0, self.max_offset - self.min_offset)


@dataclass(frozen=True, slots=True)
class QueueLag(OfQueue):
    """How far a consumer group or a streaming query is behind in one queue."""

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "topic", "broker_name", "queue_id", "read_offset", "max_offset", "messages", "read_until",
    )  # fmt: skip
    SPARE: ClassVar[tuple[str, ...]] = ("read_offset", "max_offset", "read_until")
    RARE: ClassVar[tuple[str, ...]] = ("read_until",)

    read_offset: int | None  # Of the next message to read. None if a group has committed none
    max_offset: int  # Of the next message that the queue gets
    read_until: datetime | None = None  # When the last message read by a group was stored. None for queries

    @property
    def messages(self) -> int:
        """The number of messages that are not read, from offset 0 on without a `read_offset`."""
        return max(0, self.max_offset - (self.read_offset or 0))


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A running consumer of a group."""

    client_id: str
    address: str  # host:port, as the broker sees it
    language: str
    brokers: tuple[str, ...]  # The names of the brokers that know it


@dataclass(frozen=True, slots=True, repr=False)
class Group:
    """A consumer group: how far it is in each queue, and who its members are."""

    name: str
    queues: Table[QueueLag]
    members: Table[GroupMember]

    def __repr__(self) -> str:
        return f"{self.queues!r}\n\n{self.members!r}"

    def _repr_html_(self) -> str:
        return self.queues._repr_html_() + self.members._repr_html_()


@dataclass(frozen=True, slots=True)
class OffsetReset(OfQueue):
    """A group's offset of one queue, before and after `Admin.reset_offsets`."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("broker_name", "queue_id", "before", "after")

    before: int | None  # None if the group had committed none
    after: int


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A stored message."""

    SPARE: ClassVar[tuple[str, ...]] = ("properties", "queue_offset", "queue_id", "broker_name")
    RARE: ClassVar[tuple[str, ...]] = ("unreadable",)  # A column only if a row has a value

    store_time: datetime | None  # When its broker stored it, UTC. None if the record cannot be decoded
    broker_name: str
    queue_id: int
    queue_offset: int
    tags: str | None
    keys: str | None
    properties: Mapping[str, str]  # Without RocketMQ's own properties
    body: bytes  # Decompressed. The stored bytes if the message is unreadable
    unreadable: str | None = None  # Why the message cannot be read


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker. Values that its release does not report are None."""

    SPARE: ClassVar[tuple[str, ...]] = (
        "running_since", "cluster", "permission", "broker_id", "messages_out_today", "messages_in_today", "version",
    )  # fmt: skip

    broker_name: str
    broker_id: int  # 0 is the master
    cluster: str
    address: str  # host:port, as the broker registered it (brokerIP1)
    version: str | None
    permission: str | None  # rw, or less by its settings. None also if the user may not see its settings
    disk_used_percent: float | None  # Of the disk with its commit log
    messages_in_today: int | None  # Since midnight by its clock
    messages_out_today: int | None
    running_since: datetime | None
