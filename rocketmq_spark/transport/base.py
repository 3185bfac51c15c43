"""The interfaces of the two transports, remoting (TCP) and gRPC, which send requests to servers and return answers.

A send or pull is one attempt at a given address; callers choose brokers and retry. Only the remoting transport may
repeat it, once after GO_AWAY, which means that the server executed nothing. A transport cannot be pickled. All timeouts
are seconds. Any thread may call any method, unless the caller polls the transport (`Pulls.poll`). Most errors are a
``RemotingException`` (the connection failed) or an ``MQBrokerException`` (the server answered with an error code).
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn, Protocol, TypeAlias, TypeVar

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import EndTransaction, RecallMessage, TransactionCheck
from rocketmq_spark.protocol.remoting.responses import ClusterInfo, TopicConfig

OnOutcome: TypeAlias = Callable[[SendOutcome], None]
OnCheckTransaction: TypeAlias = Callable[[TransactionCheck], None]
OnEnd: TypeAlias = Callable[[RocketMQError | None], None]
OnPulled: TypeAlias = Callable[[PullOutcome], None]
SelfT = TypeVar("SelfT")


def thread_failed(exc: Exception) -> RocketMQError:
    """Return the error of a transport whose thread can't start, or that gets no descriptors for it."""
    limits = "ulimit -n, ulimit -u, the container's pids"
    return RocketMQError(f"starting the transport's thread failed: {exc}; raise the process limits ({limits})")


class Closes(Protocol):
    """Ends a transport, also as a context manager."""

    @property
    def closed(self) -> bool:
        """True if it accepts no more requests: its owner closed it, or it failed. It never opens again."""

    def close(self) -> None:
        """Close every connection and end the transport's thread; requests in flight fail. Idempotent."""

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds connections and can't be pickled: pickle its options instead")


class Routes(Protocol):
    """Finds the brokers of a topic."""

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route; `timeout` bounds all servers. TopicRouteStaleException: unknown topic."""


class Sends(Protocol):
    """Sends messages and waits for their acknowledgement."""

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt and return at once.

        `on_outcome` is called exactly once, on the transport's own thread, and must not block or raise. `timeout`
        counts from the last byte written to the socket (over gRPC: from this call). If a connection accepts no byte for
        that time, all its requests fail. `within` bounds the whole attempt from this call, with connect and queue.
        """

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Register producer groups at a broker, or keep them registered."""

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Remove a producer group from a broker."""

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Send a cheap request about a queue; raise if the broker cannot be reached."""


class Transactions(Protocol):
    """Ends half messages, and receives the broker's checks of them.

    `on_check_transaction` is called with every check, on the transport's own thread, so it must not block. If it is
    None, the transport drops checks, and the broker repeats them later.
    """

    on_check_transaction: OnCheckTransaction | None

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message, and return at once.

        `on_end` is called like `on_outcome` of :meth:`Sends.send`, with None if the server executed the request, else
        with the error. Unless it has `maybe_stored`, the request was not executed. The transport never repeats the
        request (docs/internals/messages.md#end_transaction). ValueError: `TRANSACTION_NOT_TYPE`; use
        `end_transaction_oneway`.
        """

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Commit or roll back without an answer. Brokers under load drop such requests, and check later."""

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Cancel the delivery of a delayed message, and return its id (``recallMessageEnable=true``)."""


class Offsets(Protocol):
    """Finds a queue's offsets (docs/internals/reads.md#offsets)."""

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get."""

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue."""

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the broker's answer: the first offset stored at `timestamp_ms` (epoch) or later, or the max offset.

        Brokers of 4.9.7 answer with an offset near it (docs/internals/reads.md#search-by-time).
        """


class Configs(Protocol):
    """Reads the configuration of topics, and the releases of brokers."""

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker; TopicRouteStaleException if it does not have the topic.

        RequestNotSupportedException: the server is a proxy or an old broker. MQBrokerException: no right ``Get``.
        """

    def runtime_info(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's metrics by name, its release among them."""


class Admin(Configs, Protocol):
    """Creates topics, and reads single messages and brokers' settings."""

    def broker_config(self, address: str, timeout: float) -> Mapping[str, str]:
        """Return a broker's settings by name, which may include secrets; MQBrokerException: no right to read them."""

    def all_topic_attributes(self, address: str, timeout: float) -> Mapping[str, Mapping[str, str] | None]:
        """Return the attributes of all topics of a broker; those of brokers before 5.0 are None."""

    def create_topic(
        self, address: str, topic: str, queue_nums: int, perm: int, timeout: float, *, attributes: str = ""
    ) -> None:
        """Create or overwrite a topic with `queue_nums` queues on one broker; `attributes` like ``+message.type=FIFO``.

        `perm` is the sum of 4 (read), 2 (write) and 1 (inherit).
        """

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the time at which the queue's oldest message was stored, epoch milliseconds; -1 for an empty queue."""

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset; MQClientException without one. Access control may need `topic`."""


class Pulls(Protocol):
    """Reads messages, and commits a group's offsets."""

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the names of all topics of a name server, also internal ones, or of those in the namespace."""

    def topics_at(self, name_server: str, timeout: float) -> frozenset[str]:
        """Return the result of `topics` of one name server."""

    def route_at(self, name_server: str, topic: str, timeout: float) -> TopicRouteData:
        """Return the topic's route of one name server."""

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """Return all brokers that a name server knows, and their clusters."""

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Let a broker parse a filter expression; raise if the broker rejects it."""

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start one pull; `poll` or the transport's thread calls `on_pulled` once. It must not block or raise."""

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Pull and wait for the answer. A broker's error is in the outcome; other errors are raised."""

    def poll(self, timeout: float) -> None:
        """Send, receive and call back in the calling thread, for at most `timeout` seconds; see `IoLoop`."""

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Commit a group's offset at a broker, which rejects or ignores it for an unknown group."""

    def consumer_offset(self, queue: MessageQueue, group: str, address: str, timeout: float) -> int | None:
        """Return the offset that a group committed at a broker; None without one."""

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Register a client as a reader of a group. The broker creates the group and keeps its offsets."""

    def consumers(self, group: str, address: str, timeout: float) -> Collection[str]:
        """Return the client ids that a broker knows in a group; empty for an unknown group."""


class ProxyTransport(Closes, Routes, Sends, Transactions, Protocol):
    """The requests that both brokers and proxies support."""


class Transport(ProxyTransport, Offsets, Admin, Protocol):
    """The requests of a producer. Over gRPC those outside of `ProxyTransport` raise MQClientException."""

    def open(self) -> None:
        """Start the thread of this process now, because from Python 3.12 on an ending process can't. Idempotent."""

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Send without an acknowledgement, and return when the socket has taken the last byte.

        Raises if nothing was sent: no connection, no permit or no time left (docs/internals/producer.md#one-way-sends).
        """


class ReadTransport(Closes, Routes, Offsets, Configs, Pulls, Protocol):
    """The requests of a reader, which only the remoting protocol supports."""


def local_ip() -> str:
    """Return this host's IPv4 address in the network, or loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # TEST-NET-1: to connect a datagram socket only looks up the interface in the routing table.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
