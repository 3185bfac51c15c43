"""Messages, queues, encoded batches, and the request and outcome of one attempt to send.

All layers use these values, so they do not depend on sockets, Arrow or Spark. Nothing changes them. Those that each
request needs are not frozen, because Python creates a frozen dataclass four times as slowly. Follows ``Message.java``,
``MessageQueue.java`` and ``SendResult.java``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Final, TypeAlias

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import RocketMQError

Buffer: TypeAlias = "bytes | memoryview"
_BYTES: Final = (bytes, bytearray, memoryview)
_NO_DELAY: Final = 0


class SendStatus(enum.Enum):
    """How safely a broker stored an acknowledged message (``SendStatus.java``); the value is the response code."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class Message:
    """One message before it is sent. `Message.of` creates one and checks its arguments."""

    topic: str
    body: bytes
    flag: int = 0  # Chosen by the user, 32 bits with a sign
    properties: Mapping[str, str] = field(default_factory=dict)  # The system's and the user's, in encoding order

    @classmethod
    def of(
        cls,
        topic: str,
        body: bytes,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        flag: int = 0,
        wait_store_msg_ok: bool = True,
        sharding_key: str | None = None,
        delay_time_level: int = 0,
        delay_ms: int = 0,
        delay_sec: int = 0,
        deliver_ms: int = 0,
        priority: int | None = None,
        lite_topic: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Message:
        """Return a message with the system properties that the arguments set.

        `tags` is the one tag that consumers filter by. `keys` are for searches: an iterable, or joined by one space.
        With `wait_store_msg_ok=False` the broker acknowledges before it has flushed or replicated. The `sharding_key`
        is only stored; the selector chooses the queue. `delay_time_level` counts the broker's levels from 1,
        `deliver_ms` is the time of the delivery in epoch milliseconds. `priority` is for topics of the type PRIORITY,
        `lite_topic` for topics of the type LITE (RocketMQ 5.5).

        Raises a ValueError for a number below 0, and for a key or tag that could not be read back unchanged. It raises
        one for two delays, and for a priority or lite topic beside each other, a delay or a sharding key. A user
        property raises the errors of `put_user_property`.
        """
        if not isinstance(body, _BYTES):
            raise TypeError(f"the body of a message for {topic!r} must be bytes, got {type(body).__name__}; encode it")
        system: dict[str, str] = {}
        if keys is not None and (joined := _joined_keys(keys)):
            system[const.KEYS] = joined
        if tags:
            system[const.TAGS] = tags
        system[const.WAIT] = "true" if wait_store_msg_ok else "false"
        if sharding_key:
            system[const.SHARDING_KEY] = sharding_key
        # Anything else, also another zero, is checked.
        if not (delay_time_level is delay_ms is delay_sec is deliver_ms is _NO_DELAY):
            system.update(_delay(topic, delay_time_level, delay_ms, delay_sec, deliver_ms))
        if priority is not None or lite_topic is not None:
            system.update(_own_type(topic, priority, lite_topic, system))
        if len(system) > 1:
            for name, text in system.items():
                const.check_property_text(f"message for {topic!r}: {name}", text)
        if properties:
            for name, value in properties.items():
                const.check_user_property(name, value)
            system |= properties
        return cls(topic, bytes(body), flag, system)

    @property
    def tags(self) -> str | None:
        """The tag, None without one."""
        return self.properties.get(const.TAGS)

    @property
    def keys(self) -> str | None:
        """The keys as stored, joined by one space; None without one."""
        return self.properties.get(const.KEYS)

    @property
    def wait_store_msg_ok(self) -> bool:
        """Whether the broker acknowledges only after it has flushed or replicated."""
        return self.properties.get(const.WAIT, "true").lower() == "true"

    @property
    def delay_time_level(self) -> int:
        """The broker's delay level, 0 without one."""
        return self._number(const.DELAY)

    @property
    def delay_sec(self) -> int:
        """The delay of the delivery in seconds, 0 if not set."""
        return self._number(const.TIMER_DELAY_SEC)

    @property
    def delay_ms(self) -> int:
        """The delay of the delivery in milliseconds, 0 if not set."""
        return self._number(const.TIMER_DELAY_MS)

    @property
    def deliver_ms(self) -> int:
        """The time of the delivery, epoch milliseconds; 0 if not set."""
        return self._number(const.TIMER_DELIVER_MS)

    @property
    def unique_id(self) -> str | None:
        """The id that the producer sets and all retries keep; None before the message is sent."""
        return self.properties.get(const.UNIQ_KEY)

    @property
    def sharding_key(self) -> str | None:
        """The key whose messages stay in order, None without one."""
        return self.properties.get(const.SHARDING_KEY)

    @property
    def priority(self) -> int | None:
        """The priority, 0 or higher; None without one."""
        return self._number(const.PRIORITY) if const.PRIORITY in self.properties else None

    @property
    def lite_topic(self) -> str | None:
        """The lite topic within the topic, None without one."""
        return self.properties.get(const.LITE_TOPIC)

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction of a half message, None without one."""
        return self.properties.get(const.TRANSACTION_ID)

    @property
    def is_half_message(self) -> bool:
        """Whether the message is invisible until its producer commits it."""
        return self.properties.get(const.TRAN_MSG, "").lower() == "true"

    @property
    def is_reply(self) -> bool:
        """Whether the message answers a request of another client."""
        return self.properties.get(const.MSG_TYPE) == "reply"

    @property
    def user_properties(self) -> dict[str, str]:
        """The properties whose names RocketMQ does not reserve, in their order."""
        return {name: text for name, text in self.properties.items() if name not in const.RESERVED_PROPERTIES}

    def put_user_property(self, name: str, value: str) -> Message:
        """Return the message with a user property added or replaced.

        ReservedPropertyError: RocketMQ itself uses the name. ValueError: the name or the value is missing or blank
        (``String.trim``), or contains 0x01 or 0x02.
        """
        const.check_user_property(name, value)
        return self.with_properties({name: value})

    def with_properties(self, properties: Mapping[str, str]) -> Message:
        """Return the message with these properties added, unchecked."""
        return replace(self, properties={**self.properties, **properties})

    def without_properties(self, *names: str) -> Message:
        """Return the message without the properties of these names."""
        return replace(self, properties={name: text for name, text in self.properties.items() if name not in names})

    def _number(self, name: str) -> int:
        text = self.properties.get(name, "0")
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"property {name} of a message for {self.topic!r} is {text!r}, not a number") from None


def _delay(topic: str, level: int, ms: int, sec: int, deliver_ms: int) -> dict[str, str]:
    """Return the property of a delay."""
    delays = {
        const.DELAY: index(level),
        const.TIMER_DELAY_MS: index(ms),
        const.TIMER_DELAY_SEC: index(sec),
        const.TIMER_DELIVER_MS: index(deliver_ms),
    }
    text = f"delays of a message for {topic!r}"
    text = f"{text} (delay_time_level={level!s}, delay_ms={ms!s}, delay_sec={sec!s}, deliver_ms={deliver_ms!s})"
    # With several delays, a broker uses one of them without an error.
    if min(delays.values()) < 0 or sum(map(bool, delays.values())) > 1:
        raise ValueError(f"{text}: give at most one of them, and none below 0")
    longest = max(delays[const.TIMER_DELAY_MS], delays[const.TIMER_DELAY_SEC] * 1000)
    if longest > const.MAX_DELAY_MS or delays[const.TIMER_DELIVER_MS] >= 2**63:
        raise ValueError(f"{text}: a delay may have at most {const.MAX_DELAY_MS} ms, and a time must be below 2^63")
    return {name: str(delay) for name, delay in delays.items() if delay}


def _own_type(topic: str, priority: int | None, lite_topic: str | None, others: Mapping[str, str]) -> dict[str, str]:
    """Return the property of a priority or of a lite topic."""
    numbers = {} if priority is None else {const.PRIORITY: str(index(priority))}
    made = numbers if lite_topic is None else {**numbers, const.LITE_TOPIC: lite_topic}
    text = f"a message for {topic!r} with priority={priority!r}, lite_topic={lite_topic!r}"
    if (priority is not None and priority < 0) or lite_topic == "":
        raise ValueError(f"{text}: give a priority from 0 on, and a lite topic of at least one character")
    if len(made) > 1 or others.keys() - {const.KEYS, const.TAGS, const.WAIT}:
        raise ValueError(f"{text}: give one of priority, lite_topic, sharding_key and a delay; brokers ignore others")
    return made


def _joined_keys(keys: str | Iterable[str]) -> str:
    if isinstance(keys, str):
        return keys
    items = list(keys)
    for item in items:
        const.check_property_text("an item of keys", item)
        # The broker indexes the texts between spaces.
        if not item or " " in item:
            raise ValueError(f"an item of keys is {item!r}: give one key of at least one character, without a space")
    return " ".join(items)


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker (``MessageQueue.java``)."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


class Encoding(enum.Enum):
    """The protocol whose layout the body of an `EncodedBatch` has."""

    REMOTING = "remoting"  # Batch items, or the plain body of one message, whose properties are a separate field
    GRPC = "grpc"  # The fields ``messages`` of a SendMessageRequest: each is a tag, a length and a Message


@dataclass(slots=True)
class EncodedBatch:
    """The body of one send request, encoded once and resent unchanged."""

    topic: str
    body: tuple[Buffer, ...]  # The pieces of the request's body: slices of larger buffers, never joined
    rows: int
    nbytes: int  # The length of all pieces together
    batch: bool = True  # The body is batch items, else one message's plain body
    properties: str = ""  # Property string in the request header, of a single message, or ``WAIT=false`` of a batch
    flag: int = 0  # The user's flag of a single message; a batch has flags in its items
    sys_flag: int = 0  # Compression and transaction bits (``MessageSysFlag.java``)
    encoding: Encoding = Encoding.REMOTING  # Always used for a single message, which gRPC translates
    born_timestamp: int = 0  # In a `GRPC` body, epoch milliseconds; otherwise it is in the request
    message_group: str = ""  # A message of a group is sent when the last one is stored (FIFO topics over gRPC)
    messages: tuple[EncodedBatch, ...] = ()  # Instead of a body: single messages, each sent in a request of its own
    row: int = -1  # The row's number in its partition, of a single message that an Arrow batcher made
    uncarried: Any = None  # A record batch: those columns of the row whose values the message may not have


Ready: TypeAlias = "tuple[EncodedBatch, MessageQueue | None]"
"""A batch to send, and the only queue that it may go to; None: any queue of its topic."""


@dataclass(slots=True)
class SendRequest:
    """One attempt to send a batch: the batch, and the other fields of the request's header."""

    batch: EncodedBatch
    queue: MessageQueue
    address: str  # ``host:port`` of the broker (the endpoint, over gRPC)
    producer_group: str
    default_topic: str  # ``createTopicKey``: the template that a broker creates an unknown topic from
    default_topic_queue_nums: int
    born_timestamp: int  # Epoch milliseconds
    unit_mode: bool = False
    reconsume_times: int = 0  # For a message to a retry topic
    max_reconsume_times: int | None = None  # For a message to a retry topic; None: not in the header
    reply: bool = False  # The message answers another message (SEND_REPLY_MESSAGE_V2); remoting only
    # No byte is written from this time on, seconds on the clock of the transport; remoting only.
    write_by: float = math.inf


@dataclass(slots=True)
class SendOutcome:
    """The result of one attempt. Exactly one of `status` and `error` is set."""

    queue: MessageQueue  # The queue of the request, but with a status the queue id of the answer, -1 over gRPC
    status: SendStatus | None
    error: RocketMQError | None
    latency_ms: float  # From the request's last byte written to its answer or failure; 0 if never written
    queue_offset: int = -1  # Offset of the batch's first message in its queue
    offset_msg_id: str = ""  # The broker's own message ids, comma-separated for a batch
    transaction_id: str = ""
    region_id: str = ""
    trace_on: bool = True
    batch_uniq_id: str = ""  # The id of an inner batch
    recall_handle: str = ""  # The handle that recalls a timer message
