"""The fake cluster and a real one have the same outcome classes."""

from __future__ import annotations

import pytest

from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import conformance, conformance_grpc
from tests.support.cluster import SharedCluster, create_topic

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("scenario", conformance.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_fake_cluster_has_the_outcomes_of_a_real_one(
    cluster: SharedCluster, topic: str, scenario: conformance.Scenario
) -> None:
    create_topic(cluster, topic, "NORMAL", 4)
    with RemotingTransport([cluster.name_server]) as transport:
        real = conformance.run(scenario, transport, topic)
    brokers = len(cluster.brokers)
    with FakeCluster(brokers, topics={topic: 4}) as fake, RemotingTransport([fake.name_server]) as transport:
        assert conformance.run(scenario, transport, topic) == real


@pytest.mark.parametrize("scenario", conformance_grpc.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_fake_proxy_has_the_outcomes_of_a_real_one(
    cluster: SharedCluster, topic: str, scenario: conformance_grpc.Scenario
) -> None:
    topics = {kind: f"{topic}-{kind}" for kind in conformance_grpc.TYPES}
    for kind, name in topics.items():
        create_topic(cluster, name, kind, 4)
    real = conformance_grpc.run(scenario, cluster.endpoints, cluster.name_server, topics)
    with FakeCluster(len(cluster.brokers), proxy=True) as fake:
        for kind, name in topics.items():
            fake.create_topic(name, attributes={"message.type": kind})
        assert conformance_grpc.run(scenario, fake.endpoints, fake.name_server, topics) == real
