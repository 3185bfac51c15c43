"""Requests of the gRPC protocol other than sends, and their answers, as values of the model. Pure functions.

In a route an endpoint takes a broker's place, with one queue, because the proxy chooses broker and queue. Endpoints in
answers are ignored: behind a load balancer or a mapped port the proxy's own addresses are wrong.
"""

from __future__ import annotations

import ipaddress
import platform
from collections.abc import Iterable
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.route import (
    MASTER_ID,
    MAX_ADDRESSES,
    MAX_BROKERS,
    MAX_QUEUES,
    PERM_READ,
    PERM_WRITE,
    BrokerData,
    QueueData,
    TopicRouteData,
    parse_address,
)
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, EndTransaction, RecallMessage
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service

_WRITABLE: Final = (pb.WRITE, pb.READ_WRITE)


def endpoints_of(endpoint: str) -> pb.Endpoints:
    """Return the ``host:port`` by which the proxy is reached, as it is sent to the proxy."""
    host, port = parse_address(endpoint)
    try:
        scheme = pb.IPv4 if ipaddress.ip_address(host).version == 4 else pb.IPv6
    except ValueError:
        scheme = pb.DOMAIN_NAME
    return pb.Endpoints(scheme=scheme, addresses=[pb.Address(host=host, port=port)])


def route_request(topic: str, namespace: str, endpoint: str) -> service.QueryRouteRequest:
    """Return the request for a topic's route."""
    return service.QueryRouteRequest(
        topic=pb.Resource(resource_namespace=namespace, name=topic), endpoints=endpoints_of(endpoint)
    )


def route_of(reply: service.QueryRouteResponse, endpoints: Iterable[str]) -> TopicRouteData:
    """Return a topic's route: every endpoint, writable if any queue of the topic is, and the types it accepts.

    Raises a RemotingCommandException if it exceeds the bounds of a name server's route.
    """
    _check("queues", len(reply.message_queues), MAX_QUEUES)
    _check("brokers", len({queue.broker.name for queue in reply.message_queues}), MAX_BROKERS)
    for queue in reply.message_queues:
        _check("addresses of a broker", len(queue.broker.endpoints.addresses), MAX_ADDRESSES)
    candidates = [
        queue for queue in reply.message_queues if queue.permission in _WRITABLE and queue.broker.id == MASTER_ID
    ]
    # No row becomes a message of a type that this protocol version does not have.
    known = frozenset(pb.MessageType.values())
    types = {kind for queue in candidates for kind in queue.accept_message_types if kind in known}
    names = sorted(endpoints)
    return TopicRouteData(
        queue_datas=tuple(QueueData(name, 1, 1, PERM_READ | PERM_WRITE if candidates else PERM_READ) for name in names),
        broker_datas=tuple(BrokerData(name, {MASTER_ID: name}) for name in names),
        message_types=frozenset(map(pb.MessageType.Name, types)),
    )


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise RemotingCommandException(f"reading a topic route: {count} {what}, at most {most} are allowed")


def settings_of(endpoint: str, topics: Iterable[str], namespace: str, version: str) -> service.TelemetryCommand:
    """Return the settings that a producer sends when it opens its stream."""
    settings = pb.Settings(
        client_type=pb.PRODUCER,
        access_point=endpoints_of(endpoint),
        publishing=pb.Publishing(
            topics=[pb.Resource(resource_namespace=namespace, name=topic) for topic in topics],
            validate_message_type=True,
        ),
        user_agent=pb.UA(language=pb.PYTHON, version=version, platform=platform.platform(), hostname=platform.node()),
    )
    settings.request_timeout.FromSeconds(3)
    return service.TelemetryCommand(settings=settings)


def recall_message_request(request: RecallMessage, namespace: str) -> service.RecallMessageRequest:
    """Return the request to take a delayed message back."""
    topic = pb.Resource(resource_namespace=namespace, name=request.topic)
    return service.RecallMessageRequest(topic=topic, recall_handle=request.recall_handle)


def end_transaction_request(request: EndTransaction, namespace: str) -> service.EndTransactionRequest:
    """Return how a transaction ended; it must be committed or rolled back."""
    committed = request.commit_or_rollback == TRANSACTION_COMMIT_TYPE
    return service.EndTransactionRequest(
        topic=pb.Resource(resource_namespace=namespace, name=request.topic),
        message_id=request.msg_id,
        transaction_id=request.transaction_id,
        resolution=pb.COMMIT if committed else pb.ROLLBACK,
        source=pb.SOURCE_SERVER_CHECK if request.from_transaction_check else pb.SOURCE_CLIENT,
    )
