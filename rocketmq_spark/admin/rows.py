"""The rows of the tables: one frozen dataclass for each kind of answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from rocketmq_spark.message import MessageQueue


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic.

    Parameters
    ----------
    topic : str
    message_type : str or None
        What a 5.x proxy lets in: ``NORMAL``, ``FIFO``, ``DELAY``, ``TRANSACTION``; None where no broker tells (4.x).
    queue_type : str or None
        ``SimpleCQ``, or ``BatchCQ``: a batch may be stored there as one record.
    brokers : tuple of str
        The names of those that have it.
    queues : int
        On all of them together.
    permission : str
        ``rw``, ``r``, ``w`` or ``-``; with a slash between them where brokers differ.
    """

    SPARE: ClassVar[tuple[str, ...]] = ("queue_type", "permission", "message_type")

    topic: str
    message_type: str | None
    queue_type: str | None
    brokers: tuple[str, ...]
    queues: int
    permission: str


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    """What one queue holds.

    Parameters
    ----------
    queue : MessageQueue
    min_offset : int
        Of the oldest message still there.
    max_offset : int
        Of the next message to come.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = ("broker_name", "queue_id", "min_offset", "max_offset", "messages")
    SPARE: ClassVar[tuple[str, ...]] = ("min_offset", "max_offset")

    queue: MessageQueue
    min_offset: int
    max_offset: int

    @property
    def broker_name(self) -> str:
        """Whose queue it is."""
        return self.queue.broker_name

    @property
    def queue_id(self) -> int:
        """Its number on that broker."""
        return self.queue.queue_id

    @property
    def messages(self) -> int:
        """How many messages are in the queue now."""
        return self.max_offset - self.min_offset


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A stored message, as far as one wants to see it at a glance.

    Parameters
    ----------
    store_time : datetime or None
        When its broker stored it, UTC; None if the record cannot be decoded.
    broker_name : str
    queue_id, queue_offset : int
    tags, keys : str or None
    properties : mapping of str to str
        The user's own.
    body : bytes
        Decompressed if it was compressed; of an unreadable message the bytes as stored.
    unreadable : str or None, default None
        Why the message cannot be read.
    """

    SPARE: ClassVar[tuple[str, ...]] = ("properties", "queue_offset", "queue_id", "broker_name")
    # Tables have it only if there is such a message.
    RARE: ClassVar[tuple[str, ...]] = ("unreadable",)

    store_time: datetime | None
    broker_name: str
    queue_id: int
    queue_offset: int
    tags: str | None
    keys: str | None
    properties: Mapping[str, str]
    body: bytes
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker, by what it says of itself; what its release does not tell is None.

    Parameters
    ----------
    broker_name : str
    broker_id : int
        0 is the master.
    cluster : str
    address : str
        ``host:port``, as it has registered itself (``brokerIP1``).
    version : str or None
        Such as ``5.5.0``.
    permission : str or None
        ``rw``, or less if its settings say so; None also where the user may not see its settings.
    disk_used_percent : float or None
        Of the disk with its commit log, all users of the disk together.
    messages_in_today, messages_out_today : int or None
        Since midnight, by its clock.
    running_since : datetime or None
    """

    SPARE: ClassVar[tuple[str, ...]] = (
        "running_since", "cluster", "permission", "broker_id", "messages_out_today", "messages_in_today", "version",
    )  # fmt: skip

    broker_name: str
    broker_id: int
    cluster: str
    address: str
    version: str | None
    permission: str | None
    disk_used_percent: float | None
    messages_in_today: int | None
    messages_out_today: int | None
    running_since: datetime | None
