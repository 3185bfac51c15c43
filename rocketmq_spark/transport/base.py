"""The seam between what decides (producer) and what moves bytes (a transport).

Rule 1: a transport knows no rows, no fault rules and no retry of a send; it reports what happened to one attempt.
Rule 2: it translates every foreign error (OSError, grpc.RpcError) into ours, keeping the cause.
Rule 3: nothing is opened before the first request, and nothing live is ever pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.pull import PullOutcome, PullRequest
from rocketmq_spark.recall import RecallMessage
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transaction import EndTransaction, TransactionCheck
from rocketmq_spark.wire.topic_config import TopicConfig

OnOutcome: TypeAlias = Callable[[SendOutcome], None]
OnCheckTransaction: TypeAlias = Callable[[TransactionCheck], None]
OnEnd: TypeAlias = Callable[[RocketMQError | None], None]
OnPulled: TypeAlias = Callable[[PullOutcome], None]


class Transport(Protocol):
    """What the producer needs of a transport. Every method is safe to call from any thread.

    All timeouts are seconds. Blocking calls raise a :class:`~rocketmq_spark.errors.RocketMQError`:
    ``RemotingConnectException``, ``RemotingSendRequestException``, ``RemotingTimeoutException`` for what happened
    on the way, an ``MQBrokerException`` (or a child of it) for an error code that a server answered.

    Attributes
    ----------
    on_check_transaction : callable or None
        Called with every check of a transaction that a broker sends, on the transport's own thread: it must not block,
        and hand over to a thread of its own what takes time. None: checks are dropped, and the broker asks again later.
    """

    on_check_transaction: OnCheckTransaction | None

    @property
    def closed(self) -> bool:
        """True once it takes no more requests: closed by its owner, or broken down. It never opens again."""
        ...

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Ask the name servers (one after the other, at most `timeout` seconds in all) for a topic's route.

        Raises
        ------
        TopicRouteStaleException
            The name server knows no such topic (code 17).
        """
        ...

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt and return at once.

        `on_outcome` is called exactly once, on the transport's own thread (never inside this call), and must neither
        block nor raise. `timeout` counts from the moment the request's last byte was handed to the socket; a
        connection that accepts no byte for as long fails everything that is waiting on it. (gRPC does not tell that
        moment: there it counts from this call on.) `within` bounds the whole attempt, from this call on: connecting,
        waiting behind others, writing, and the answer. Where too many sends are
        under way already, the outcome is a ``RemotingTooMuchRequestException``.
        """
        ...

    def send_oneway(self, request: SendRequest, timeout: float) -> None:
        """Send without an acknowledgement, and return when the socket has taken the last byte.

        Nothing is known of what becomes of it then: a broker does not answer, not even with an error. A connection that
        breaks while the request is being written is logged and not raised (Java; spec/producer.md section 10.5). What
        certainly was not sent raises: no connection (as 4.x does), too many oneway requests under way, no time left.
        """
        ...

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Tell a broker that these producer groups live (HEART_BEAT)."""
        ...

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Tell a broker that this producer group is gone (UNREGISTER_CLIENT)."""
        ...

    def probe(self, queue: MessageQueue, address: str, timeout: float) -> None:
        """Ask a broker something cheap about a queue of its own, to see whether it can be reached; raise if not."""
        ...

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get (GET_MAX_OFFSET)."""
        ...

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue (GET_MIN_OFFSET)."""
        ...

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset that was stored at `timestamp_ms` (epoch) or later; past the end, the max offset.

        SEARCH_OFFSET_BY_TIMESTAMP.
        """
        ...

    def earliest_msg_store_time(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return when the queue's oldest message was stored, epoch milliseconds; -1 if there is none.

        GET_EARLIEST_MSG_STORETIME.
        """
        ...

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return what a broker stored at a commit-log offset (VIEW_MESSAGE_BY_ID); its body as it was stored.

        Parameters
        ----------
        address : str
        physical_offset : int
            From :func:`~rocketmq_spark.message_ext.decode_message_id`.
        timeout : float
        topic : str, default ""
            A broker with access control wants to know it.

        Raises
        ------
        MQClientException
            No message begins there.
        """
        ...

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker (GET_TOPIC_CONFIG).

        Raises
        ------
        TopicRouteStaleException
            The broker does not have the topic.
        RequestNotSupportedException
            The server is a proxy, or a broker that is too old.
        MQBrokerException
            The user has no right ``Get`` for the topic.
        """
        ...

    def create_topic(
        self,
        address: str,
        topic: str,
        queue_nums: int,
        perm: int,
        timeout: float,
        *,
        read_queue_nums: int | None = None,
        topic_sys_flag: int = 0,
        order: bool = False,
        attributes: str = "",
    ) -> None:
        """Create or overwrite a topic on one broker (UPDATE_AND_CREATE_TOPIC).

        Parameters
        ----------
        address, topic : str
        queue_nums : int
            To write to; to read from as many, unless `read_queue_nums` says otherwise.
        perm : int
            4 read, 2 write, 1 inherit.
        timeout : float
        read_queue_nums : int, optional
        topic_sys_flag : int, default 0
        order : bool, default False
        attributes : str, default ""
            Such as ``+message.type=FIFO``.
        """
        ...

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        """Start to commit or roll back a half message (END_TRANSACTION), and return at once.

        Any number of ends may be in flight. `on_end` is called as `on_outcome` is by :meth:`send`: with None when the
        server has executed the end, else with the error. `timeout` bounds the whole attempt. A broker delivers the
        message of a second commit again, so an end is never sent again by itself. After an error with `maybe_stored`
        the outcome is unknown. After any other error the end was not executed. In both cases the broker asks back.

        Raises
        ------
        ValueError
            The end is undecided (`TRANSACTION_NOT_TYPE`): brokers do not answer that; send it one-way.
        """
        ...

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Send END_TRANSACTION without waiting for an answer: return when it is written.

        Under load, brokers drop such requests without a trace, and ask back later.
        """
        ...

    def recall_message(self, address: str, request: RecallMessage, timeout: float) -> str:
        """Take a delayed message back before it is delivered, and return its id (RECALL_MESSAGE).

        Brokers allow it with ``recallMessageEnable=true``.
        """
        ...

    def close(self) -> None:
        """Close every connection and end the transport's thread; what is in flight fails. Idempotent."""
        ...


class ReadTransport(Protocol):
    """What a reader needs of a transport: the remoting protocol alone can go back in a queue.

    Threads, timeouts and errors are as in `Transport`, and so is what both have.
    """

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Ask the name servers for a topic's route."""
        ...

    def topics(self, timeout: float) -> frozenset[str]:
        """Ask a name server for the names of all topics, its own and the brokers' among them."""
        ...

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get."""
        ...

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue."""
        ...

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset that was stored at a time or later; past the end, the max offset."""
        ...

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return a topic's configuration on one broker; raises as `Transport.topic_config`."""
        ...

    def check_filter(
        self, address: str, topic: str, group: str, expression: str, expression_type: str, timeout: float
    ) -> None:
        """Have a broker look at an expression; raises if it can't read it."""
        ...

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start one request for messages and return at once.

        `on_pulled` is called exactly once, never inside this call, and must neither block nor raise: by `poll`, or on
        the transport's own thread if it has one.
        """
        ...

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Request messages and wait for the answer; the outcome has the error of a broker, other errors are raised."""
        ...

    def poll(self, timeout: float) -> None:
        """Send, receive and call back in the calling thread, for so many seconds at most, of a transport without one.

        Many small answers cost less this way than if two threads hand them over.
        """
        ...

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Tell a broker how far a group has read (UPDATE_CONSUMER_OFFSET), if it knows the group."""
        ...

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Tell a broker that a client reads for this group (HEART_BEAT), for which it keeps offsets from then on."""
        ...

    def consumers(self, group: str, address: str, timeout: float) -> Collection[str]:
        """Return the client ids that a broker knows in a group, if any (GET_CONSUMER_LIST_BY_GROUP)."""
        ...

    def close(self) -> None:
        """Close every connection and end the transport's thread; what is in flight fails. Idempotent."""
        ...
