"""The values that travel between the layers. Frozen, slotted, without behaviour beyond their own arithmetic.

Nothing here knows bytes on a wire, sockets, Arrow or Spark. Field names are RocketMQ's
(``Message.java``, ``MessageQueue.java``, ``SendResult.java``, ``TopicRouteData.java``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from rocketmq_spark.errors import RocketMQError

Buffer: TypeAlias = "bytes | memoryview"

MASTER_ID: Final = 0

PERM_WRITE: Final = 2

# Validators.isNotAllowedSendTopic; the last two are 5.5.0's (spec/producer.md section 3.5).
FORBIDDEN_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
    }
)


class SendStatus(enum.Enum):
    """How safely a broker stored what it acknowledged (``SendStatus.java``); the value is the response code."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class Message:
    """One message as its sender sees it.

    Parameters
    ----------
    topic : str
    body : bytes
        As it goes on the wire (compressed already, if it is).
    flag : int, default 0
        The user's own 32-bit flag.
    properties : mapping of str to str
        System and user properties, in the order in which they are encoded.
    """

    topic: str
    body: bytes
    flag: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic on one broker (``MessageQueue.java``)."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


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
    """

    topic: str
    body: tuple[Buffer, ...]
    rows: int
    nbytes: int
    batch: bool = True
    properties: str = ""
    flag: int = 0
    sys_flag: int = 0


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
        The queue of the request; with a status, the queue id is the one the broker answered.
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


@dataclass(frozen=True, slots=True)
class TopicRouteData:
    """Where the queues of one topic are (``TopicRouteData.java``).

    Both tuples are sorted by broker name, so that two equal routes compare equal.
    """

    queue_datas: tuple[QueueData, ...]
    broker_datas: tuple[BrokerData, ...]
    order_topic_conf: str | None = None
    static_topic: bool = False
