"""The contract of the transports (rocketmq_spark/transport/base.py), tested for both on real clusters.

One cluster is open; the other requires TLS and signed requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.transport.base import ProxyTransport
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import ANYBODY, SharedCluster, create_topic
from tests.support.contract import Promises, ReadPromises, Seam
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration


class Real(Seam):
    """Each transport; the tests read the stored messages back from the brokers."""

    def __init__(
        self,
        cluster: SharedCluster,
        settings: dict[str, Any],
        transport: ProxyTransport,
        queue: MessageQueue,
        address: str,
    ) -> None:
        super().__init__(transport, queue, address)
        self.cluster = cluster
        self.settings = settings

    def stored(self, count: int) -> Sequence[Message]:
        return read_topic(self.cluster.name_server, self.topic, count, **self.cluster.transport_settings)


class Remoting(Real):
    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue(self.topic, "elsewhere", 0), address

    def another(self, address: str) -> ProxyTransport:
        return self.stack.enter_context(RemotingTransport([address], **self.settings))


class Grpc(Real):
    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue(self.topic, address, 0), address

    def another(self, address: str) -> ProxyTransport:
        return self.stack.enter_context(GrpcTransport([address], client_id="another", **self.settings))


@pytest.fixture(params=["remoting", "grpc", "remoting-secured", "grpc-secured"])
def seam(request: pytest.FixtureRequest, topic: str) -> Iterator[Seam]:
    protocol, _, secured = request.param.partition("-")
    cluster: SharedCluster = request.getfixturevalue("secured" if secured else "cluster")
    settings: dict[str, Any] = {"credentials": ANYBODY, "tls": cluster.tls} if secured else {}
    create_topic(cluster, topic, "NORMAL")
    real: Real
    if protocol == "grpc":
        grpc = GrpcTransport([cluster.endpoints], client_id="test", **settings)
        queue = MessageQueue(topic, cluster.endpoints, 0)
        real = Grpc(cluster, settings, grpc, queue, cluster.endpoints)
    else:
        broker = cluster.brokers[0]
        remoting = RemotingTransport([cluster.name_server], **settings)
        real = Remoting(cluster, settings, remoting, MessageQueue(topic, broker.name, 0), broker.address)
    with real.stack:
        yield real
    real.transport.close()


class TestPromises(Promises):
    """The contract of both transports."""


@pytest.mark.parametrize("seam", ["remoting", "remoting-secured"], indirect=True)
class TestReadPromises(ReadPromises):
    """The contract of the remoting transport, which can read."""
