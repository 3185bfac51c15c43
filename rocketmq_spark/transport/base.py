"""The interfaces of transports: what moves bytes, apart from what decides on rows, faults and retries.

A transport reports what happened to one attempt; it never retries a send. It translates foreign errors (OSError,
grpc.RpcError) into the package's own and keeps their cause. It opens nothing before the first request, and cannot be
pickled.

All timeouts are seconds, all methods are safe to call from any thread. Blocking calls raise a
:class:`~rocketmq_spark.errors.RocketMQError`: a child of ``RemotingException`` if the connection failed, an
``MQBrokerException`` if a server answered with an error code.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import EndTransaction, RecallMessage, TransactionCheck
from rocketmq_spark.protocol.remoting.response_bodies import TopicConfig

OnOutcome: TypeAlias = Callable[[SendOutcome], None]
OnCheckTransaction: TypeAlias = Callable[[TransactionCheck], None]
OnEnd: TypeAlias = Callable[[RocketMQError | None], None]
OnPulled: TypeAlias = Callable[[PullOutcome], None]


class Closes(Protocol):
    """A transport's end of life."""

    @property
    def closed(self) -> bool:
        """True if it takes no more requests: its owner closed it, or it failed. It never opens again."""

    def close(self) -> None:
        """Close every connection and end the transport's thread; what is in flight fails. Idempotent."""


class Routes(Protocol):
    """Finds the brokers of a topic."""

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Ask the name servers, one after the other, for a topic's route; `timeout` bounds all of them together.

        TopicRouteStaleException: the name server knows no such topic (code 17).
        """


class Sends(Protocol):
    """Sends messages and waits for their acknowledgement."""

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt and return at once.

        `on_outcome` is called exactly once, on the transport's own thread (never inside this call). It must neither
        block nor raise.

        `timeout` counts from the request's last byte written to the socket (over gRPC: from this call). A connection
        that accepts no byte for as long fails everything that waits on it. `within` bounds the whole attempt from this
        call: connecting, queueing, writing and the answer.
        """

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Register producer groups at a broker, or keep them registered."""

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Remove a producer group from a broker."""

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Send a cheap request about a queue to see whether the broker can be reached; raise if not."""


class Transactions(Protocol):
    """Ends half messages, and takes the broker's checks of them.

    `on_check_transaction` is called with every check that a broker sends, on the transport's own thread, so it must not
    block. None: checks are dropped, and the broker asks again later.
    """

    on_check_transaction: OnCheckTransaction | None

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message, and return at once.

        `on_end` is called as `on_outcome` of :meth:`Sends.send`: with None when the server has executed the request,
        else with the error. `timeout` bounds the whole attempt. The transport never repeats the request, because a
        broker delivers the message of a second commit again. After an error with `maybe_stored` the outcome is unknown;
        after any other error the request was not executed. In both cases the broker checks the transaction later.

        ValueError: the end is undecided (`TRANSACTION_NOT_TYPE`). Brokers do not answer that: use
        `end_transaction_oneway`.
        """

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Send the same without waiting for an answer. Brokers under load drop such requests, and check later."""

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Take a delayed message back before its delivery, and return its id (``recallMessageEnable=true``)."""


class Offsets(Protocol):
    """Answers questions about a queue's offsets."""

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get."""

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue."""

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset stored at `timestamp_ms` (epoch) or later; past the end, the max offset."""


class Configs(Protocol):
    """Reads the configuration of topics."""

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker.

        TopicRouteStaleException: the broker does not have the topic. RequestNotSupportedException: the server is a
        proxy, or a broker that is too old. MQBrokerException: the user has no right ``Get`` for the topic.
        """


class Admin(Configs, Protocol):
    """Creates topics, and reads single messages."""

    def create_topic(
        self, address: str, topic: str, queue_nums: int, perm: int, timeout: float, *, attributes: str = ""
    ) -> None:
        """Create or overwrite a topic on one broker, with `queue_nums` queues to write to and to read from.

        `perm` adds 4 (read), 2 (write) and 1 (inherit). `attributes` are such as ``+message.type=FIFO``.
        """

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return when the queue's oldest message was stored, epoch milliseconds; -1 if there is none."""

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at a commit-log offset, its body as stored; access control may need `topic`.

        MQClientException: no message begins there.
        """


class Pulls(Protocol):
    """Reads messages, and commits a group's offsets."""

    def topics(self, timeout: float) -> frozenset[str]:
        """Return the names of all topics that a name server knows, or of those in the namespace; also internal ones."""

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Have a broker parse a filter expression; raises if the broker rejects it."""

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start one pull and return at once.

        `on_pulled` is called exactly once, never inside this call, and must neither block nor raise. `poll` calls it,
        or the transport's own thread if it has one.
        """

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Pull and wait for the answer. A broker's error is in the outcome; other errors are raised."""

    def poll(self, timeout: float) -> None:
        """Send, receive and call back in the calling thread for at most `timeout` seconds, without a thread.

        This costs less for many small answers than handing each over between two threads.
        """

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Commit a group's offset at a broker; a broker that does not know the group ignores it."""

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Register a client as a reader of a group. The broker creates the group and keeps its offsets."""

    def consumers(self, group: str, address: str, timeout: float) -> Collection[str]:
        """Return the client ids that a broker knows in a group; empty for an unknown group."""


class ProxyTransport(Closes, Routes, Sends, Transactions, Protocol):
    """What brokers and proxies both support."""


class Transport(ProxyTransport, Offsets, Admin, Protocol):
    """What a producer uses. Over gRPC it must use `ProxyTransport` only: anything else raises MQClientException."""

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Send without an acknowledgement, and return when the socket has taken the last byte.

        The broker reports no error. A connection that breaks during the write is logged and not raised, as in Java.
        What was certainly not sent raises: no connection, too many one-way requests in flight, or no time left.
        """


class ReadTransport(Closes, Routes, Offsets, Configs, Pulls, Protocol):
    """What a reader uses. Only the remoting protocol supports it."""


def local_ip() -> str:
    """Return this host's IPv4 address as others see it, or loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # TEST-NET-1: connecting a datagram socket only asks the routing table for the interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
