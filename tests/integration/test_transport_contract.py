"""The promises of the seam (transport/base.py), kept alike by both transports on a real cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.grpc import GrpcTransport
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.contract import Promises, ReadPromises, Seam
from tests.reading import read_topic
from tests.sharing import SharedCluster

pytestmark = pytest.mark.integration


class Real(Seam):
    """Either transport; what it has sent is read back from the brokers."""

    def __init__(self, cluster: SharedCluster, transport: Transport, queue: MessageQueue, address: str) -> None:
        super().__init__(transport, queue, address)
        self.cluster = cluster

    def stored(self, count: int) -> Sequence[Message]:
        return read_topic(self.cluster.name_server, self.topic, count)


class Remoting(Real):
    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue(self.topic, "elsewhere", 0), address

    def another(self, address: str) -> Transport:
        return self.stack.enter_context(RemotingTransport([address]))


class Grpc(Real):
    def elsewhere(self, address: str) -> tuple[MessageQueue, str]:
        return MessageQueue(self.topic, address, 0), address

    def another(self, address: str) -> Transport:
        return self.stack.enter_context(GrpcTransport([address], client_id="another"))


@pytest.fixture(params=["remoting", "grpc"])
def seam(request: pytest.FixtureRequest, cluster: SharedCluster, make_topic: Callable[..., str]) -> Iterator[Seam]:
    topic = make_topic("NORMAL")
    made: Real
    if request.param == "grpc":
        grpc = GrpcTransport([cluster.endpoints], client_id="test")
        made = Grpc(cluster, grpc, MessageQueue(topic, cluster.endpoints, 0), cluster.endpoints)
    else:
        broker = cluster.brokers[0]
        remoting = RemotingTransport([cluster.name_server])
        made = Remoting(cluster, remoting, MessageQueue(topic, broker.name, 0), broker.address)
    with made.stack:
        yield made
    made.transport.close()


class TestPromises(Promises):
    """Of both transports."""


@pytest.mark.parametrize("seam", ["remoting"], indirect=True)
class TestReadPromises(ReadPromises):
    """Of the one that can go back in a queue."""
