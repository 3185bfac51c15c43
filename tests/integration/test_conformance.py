"""The fake cluster and a real one have the same outcome classes."""

from __future__ import annotations

import pytest

from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import conformance
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
