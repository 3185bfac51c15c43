"""The fake cluster's proxy for tests of gRPC clients, each with a separate broker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.testing import FakeCluster, ProxySettings
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status
from rocketmq_spark.testing.store import HALF_TOPIC


@contextlib.contextmanager
def running_proxy(topics: dict[str, str] | None = None, **settings: Any) -> Iterator[FakeProxy]:
    """Start a proxy and its broker. `topics` has the types of topics with one queue; by default `orders` is NORMAL."""
    with FakeCluster(proxy=ProxySettings(**settings)) as cluster:
        for topic, message_type in (topics or {"orders": "NORMAL"}).items():
            cluster.create_topic(topic, 1, attributes={"message.type": message_type})
        assert cluster.proxy is not None
        yield cluster.proxy


def stored(proxy: FakeProxy) -> list[MessageExt]:
    """Return the stored messages in their order, without half messages."""
    (broker,) = proxy.cluster.brokers.values()
    return [entry.read for entry in tuple(broker.storage.store.log) if entry.stored_in.topic != HALF_TOPIC]


def ends_at(proxy: FakeProxy) -> list[service.EndTransactionRequest]:
    """Return the commits and rollbacks that the proxy received."""
    return [service.EndTransactionRequest.FromString(call.request) for call in proxy.requests("EndTransaction")]


def route_reply(
    *types: int, permission: int = pb.READ_WRITE, broker_id: int = 0, host: str = "10.9.9.9"
) -> service.QueryRouteResponse:
    """Return the route of a proxy. Its broker address is unreachable: a client must never connect to it."""
    address = pb.Endpoints(scheme=pb.IPv4, addresses=[pb.Address(host=host, port=1)] if host else [])
    queues = [
        pb.MessageQueue(
            id=number,
            permission=permission,  # type: ignore[arg-type]
            broker=pb.Broker(name="broker-0", id=broker_id, endpoints=address),
            accept_message_types=types,  # type: ignore[arg-type]
        )
        for number in range(4)
    ]
    return service.QueryRouteResponse(status=status(), message_queues=queues)
