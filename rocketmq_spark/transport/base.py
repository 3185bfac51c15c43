"""The seam between what decides (producer) and what moves bytes (a transport).

Rule 1: a transport knows no rows, no fault rules and no retry of a send; it reports what happened to one attempt.
Rule 2: it translates every foreign error (OSError, grpc.RpcError) into ours, keeping the cause.
Rule 3: nothing is opened before the first request, and nothing live is ever pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol, TypeAlias

from rocketmq_spark.message import MessageQueue, SendOutcome, SendRequest, TopicRouteData

OnOutcome: TypeAlias = Callable[[SendOutcome], None]


class Transport(Protocol):
    """What the producer needs of a transport. Every method is safe to call from any thread.

    All timeouts are seconds. Blocking calls raise a :class:`~rocketmq_spark.errors.RocketMQError`:
    ``RemotingConnectException``, ``RemotingSendRequestException``, ``RemotingTimeoutException`` for what happened
    on the way, an ``MQBrokerException`` (or a child of it) for an error code that a server answered.
    """

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
        connection that accepts no byte for as long fails everything that is waiting on it. `within` bounds the whole
        attempt, from this call on: connecting, waiting behind others, writing, and the answer.
        """
        ...

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Tell a broker that these producer groups live (HEART_BEAT)."""
        ...

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Tell a broker that this producer group is gone (UNREGISTER_CLIENT)."""
        ...

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get (GET_MAX_OFFSET)."""
        ...

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of the oldest message still in the queue (GET_MIN_OFFSET)."""
        ...

    def create_topic(self, address: str, topic: str, queue_nums: int, perm: int, timeout: float) -> None:
        """Create or overwrite a topic on one broker (UPDATE_AND_CREATE_TOPIC)."""
        ...

    def close(self) -> None:
        """Close every connection and end the transport's thread; what is in flight fails. Idempotent."""
        ...
