"""The values that travel between the layers. Frozen, slotted, without behaviour beyond their own arithmetic.

Nothing here knows bytes on a wire, sockets, Arrow or Spark. Field names are RocketMQ's
(``Message.java``, ``MessageQueue.java``, ``SendResult.java``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, TypeAlias

import rocketmq_spark.message_const as const

if TYPE_CHECKING:
    from rocketmq_spark.errors import RocketMQError

Buffer: TypeAlias = "bytes | memoryview"


class SendStatus(enum.Enum):
    """How safely a broker stored what it acknowledged (``SendStatus.java``); the value is the response code."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class Message:
    """One message as its sender sees it. Make one with `Message.of`, which checks what it is given.

    Parameters
    ----------
    topic : str
    body : bytes
    flag : int, default 0
        The user's own 32-bit flag.
    properties : mapping of str to str
        System and user properties, in the order in which they are encoded.
    """

    topic: str
    body: bytes
    flag: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)

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
        properties: Mapping[str, str] | None = None,
    ) -> Message:
        """Return a message with the system properties that the arguments stand for.

        Parameters
        ----------
        topic : str
        body : bytes
            Bytes of any kind; text is encoded by the caller, who alone knows how its readers decode it.
        tags : str, optional
            The one tag that consumers filter by.
        keys : str or iterable of str, optional
            What `query message by key` finds the message by: several as an iterable, or joined by one space.
        flag : int, default 0
            The user's own, 32 bits with a sign.
        wait_store_msg_ok : bool, default True
            False: the broker acknowledges before it has flushed or replicated.
        sharding_key : str, optional
            Stored with the message; which queue it goes to is the selector's choice.
        delay_time_level : int, default 0
            The broker's delay levels, from 1; 0 is no delay.
        delay_ms, delay_sec : int, default 0
            Deliver that much later, milliseconds or seconds.
        deliver_ms : int, default 0
            Deliver at that time, epoch milliseconds.
        properties : mapping of str to str, optional
            The user's own, held to the rules of `put_user_property`.

        Raises
        ------
        ValueError
            More than one kind of delay, or a negative one; a key or tag that would not be read back as it is.
        ReservedPropertyError
            A user property has a name that RocketMQ uses itself.
        TypeError
            An argument of another type.
        """
        if not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError(f"the body of a message for {topic!r} must be bytes, got {type(body).__name__}; encode it")
        delays = {
            const.DELAY: index(delay_time_level),
            const.TIMER_DELAY_MS: index(delay_ms),
            const.TIMER_DELAY_SEC: index(delay_sec),
            const.TIMER_DELIVER_MS: index(deliver_ms),
        }
        # A broker takes one of several without a word, so the caller says which one.
        if min(delays.values()) < 0 or sum(map(bool, delays.values())) > 1:
            raise ValueError(
                f"message for {topic!r}: delay_time_level={delay_time_level}, delay_ms={delay_ms}, "
                f"delay_sec={delay_sec}, deliver_ms={deliver_ms}: give at most one of them, and none below 0"
            )
        found = {
            const.KEYS: _joined_keys(keys),
            const.TAGS: tags,
            const.WAIT: "true" if wait_store_msg_ok else "false",
            const.SHARDING_KEY: sharding_key,
            **{name: str(delay) for name, delay in delays.items() if delay},
        }
        system = {name: text for name, text in found.items() if text}
        for name, text in system.items():
            const.check_property_text(f"message for {topic!r}: {name}", text)
        for name, value in (properties or {}).items():
            const.check_user_property(name, value)
        return cls(topic, bytes(body), flag, {**system, **(properties or {})})

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
        """Whether the broker answers only when it has flushed or replicated; True where nothing is said."""
        return self.properties.get(const.WAIT, "true").lower() == "true"

    @property
    def delay_time_level(self) -> int:
        """The broker's delay level, 0 without one."""
        return self._number(const.DELAY)

    @property
    def delay_sec(self) -> int:
        """By how many seconds delivery is delayed, 0 if that isn't said."""
        return self._number(const.TIMER_DELAY_SEC)

    @property
    def delay_ms(self) -> int:
        """By how many milliseconds delivery is delayed, 0 if that isn't said."""
        return self._number(const.TIMER_DELAY_MS)

    @property
    def deliver_ms(self) -> int:
        """When the message is delivered, epoch milliseconds; 0 if that isn't said."""
        return self._number(const.TIMER_DELIVER_MS)

    @property
    def unique_id(self) -> str | None:
        """The id that the producer gave it, which no retry changes; None before it is sent."""
        return self.properties.get(const.UNIQ_KEY)

    @property
    def sharding_key(self) -> str | None:
        """The key whose messages belong in one order, None without one."""
        return self.properties.get(const.SHARDING_KEY)

    @property
    def transaction_id(self) -> str | None:
        """The id of the transaction that it is a half message of, None without one."""
        return self.properties.get(const.TRANSACTION_ID)

    @property
    def is_half_message(self) -> bool:
        """Whether it stays invisible until its producer commits it."""
        return self.properties.get(const.TRAN_MSG, "").lower() == "true"

    @property
    def is_reply(self) -> bool:
        """Whether it answers a request of another client."""
        return self.properties.get(const.MSG_TYPE) == "reply"

    @property
    def user_properties(self) -> dict[str, str]:
        """Those whose names RocketMQ doesn't use itself, in their order."""
        return {name: text for name, text in self.properties.items() if name not in const.RESERVED_PROPERTIES}

    def put_user_property(self, name: str, value: str) -> Message:
        """Return the message with one more user property, which replaces one of the same name.

        Raises
        ------
        ReservedPropertyError
            RocketMQ itself uses the name.
        ValueError
            Name or value is None or blank (``String.trim``), or holds 0x01 or 0x02.
        """
        const.check_user_property(name, value)
        return self.with_properties({name: value})

    def with_properties(self, properties: Mapping[str, str]) -> Message:
        """Return the message with these properties too, unchecked: what a producer writes into its own copy."""
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


def _joined_keys(keys: str | Iterable[str] | None) -> str | None:
    if keys is None or isinstance(keys, str):
        return keys
    items = list(keys)
    for item in items:
        const.check_property_text("an item of keys", item)
        # The broker indexes what stands between two spaces.
        if not item or " " in item:
            raise ValueError(f"an item of keys is {item!r}: each is one key of at least one character, without a space")
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
    """Whose layout the body of an `EncodedBatch` has."""

    # Batch items (spec/remoting.md section 6.1), or one message's plain body with its property string beside it.
    REMOTING = "remoting"
    # Fields ``messages`` of a SendMessageRequest, back to back: each is a tag, a length and a Message (spec/grpc.md 7).
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The body of one send request, encoded once and sent as often as it takes.

    Parameters
    ----------
    topic : str
    body : tuple of buffers
        The pieces that together are the request's body: slices of larger buffers, never joined.
    rows : int
        How many messages the body holds.
    nbytes : int
        The length of all pieces together, bytes.
    batch : bool, default True
        The body is batch items (spec/remoting.md section 6.1); False: it is one message's plain body.
    properties : str, default ""
        Property string of the request header: a single message's own, or ``WAIT=false`` of a batch.
    flag : int, default 0
        The user's flag of a single message; a batch carries it per item.
    sys_flag : int, default 0
        Compression and transaction bits (spec/remoting.md section 7).
    encoding : Encoding, default REMOTING
        A single message is always `REMOTING`: a transport that speaks another protocol translates it.
    born_timestamp : int, default 0
        When the messages of a `GRPC` body say that they were born, epoch milliseconds; of others the request says it.
    message_group : str, default ""
        Messages of one group keep their order (FIFO topics of gRPC): one goes when the one before it is stored.
    """

    topic: str
    body: tuple[Buffer, ...]
    rows: int
    nbytes: int
    batch: bool = True
    properties: str = ""
    flag: int = 0
    sys_flag: int = 0
    encoding: Encoding = Encoding.REMOTING
    born_timestamp: int = 0
    message_group: str = ""


@dataclass(frozen=True, slots=True)
class SendRequest:
    """One attempt at sending one batch: what goes into the request's header beside the batch's own facts.

    Parameters
    ----------
    batch : EncodedBatch
    queue : MessageQueue
    address : str
        ``host:port`` of the broker (the endpoint, over gRPC).
    producer_group : str
    default_topic : str
        ``createTopicKey``: the template that a broker creates an unknown topic from.
    default_topic_queue_nums : int
    born_timestamp : int
        Wall clock, epoch milliseconds.
    unit_mode : bool, default False
    reconsume_times : int, default 0
        Of a message to a retry topic.
    max_reconsume_times : int or None, default None
        Of a message to a retry topic; None: the header does not say.
    reply : bool, default False
        The message answers another one (SEND_REPLY_MESSAGE_V2); remoting only.
    """

    batch: EncodedBatch
    queue: MessageQueue
    address: str
    producer_group: str
    default_topic: str
    default_topic_queue_nums: int
    born_timestamp: int
    unit_mode: bool = False
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    reply: bool = False


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """What became of one attempt. Exactly one of `status` and `error` is set.

    Parameters
    ----------
    queue : MessageQueue
        The queue of the request; with a status, the queue id is the one the broker answered, -1 where that is not
        told (gRPC).
    status : SendStatus or None
    error : RocketMQError or None
    latency_ms : float
        From the request's last byte written to its answer (or failure), milliseconds; 0 if never written.
    queue_offset : int, default -1
        Offset of the batch's first message in its queue.
    offset_msg_id : str, default ""
        The broker's own message ids, comma-separated for a batch.
    transaction_id, region_id : str, default ""
    trace_on : bool, default True
    batch_uniq_id : str, default ""
        The one id of an inner batch.
    recall_handle : str, default ""
        What a timer message can be recalled with.
    """

    queue: MessageQueue
    status: SendStatus | None
    error: RocketMQError | None
    latency_ms: float
    queue_offset: int = -1
    offset_msg_id: str = ""
    transaction_id: str = ""
    region_id: str = ""
    trace_on: bool = True
    batch_uniq_id: str = ""
    recall_handle: str = ""
