"""The requests of a client instance to real brokers: heart-beats, unregistrations, probes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.protocol.remoting.responses import loads_lenient
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.fault_strategy import FaultSite
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for

pytestmark = pytest.mark.integration

# mqadmin producerConnection asks this of a broker (RequestCode.java).
GET_PRODUCER_CONNECTION_LIST = 204


@pytest.fixture
def group() -> str:
    return f"pg-{uuid.uuid4().hex}"


@pytest.fixture
def admin(cluster: SharedCluster) -> Iterator[RemotingTransport]:
    with RemotingTransport([cluster.name_server]) as admin:
        yield admin


def options_of(cluster: SharedCluster) -> ConnectionOptions:
    # Long intervals: no periodic task runs within the test.
    return ConnectionOptions(
        name_server=(cluster.name_server,),
        heartbeat_broker_interval=600_000,
        send_latency_fault_enable=True,
        start_detector_enable=True,
        detect_timeout=3000,
    )


@pytest.fixture
def instance(cluster: SharedCluster) -> Iterator[ClientInstance]:
    instance = ClientInstance(
        f"127.0.0.1@{uuid.uuid4().hex}", RemotingTransport([cluster.name_server]), options_of(cluster)
    )
    yield instance
    instance.close()


def clients(admin: RemotingTransport, address: str, group: str) -> set[str]:
    """Return the client ids that a broker knows of a producer group."""
    fields = {"producerGroup": group}
    answer = admin.client.invoke(address, GET_PRODUCER_CONNECTION_LIST, fields, (), PATIENCE)
    if answer.code != 0:
        # A broker that knows no such group answers with an error.
        assert "not exist" in (answer.remark or "")
        return set()
    return {connection["clientId"] for connection in loads_lenient(bytes(answer.body))["connectionSet"]}


def test_broker_knows_group_from_first_route_until_unregistration(
    cluster: SharedCluster, instance: ClientInstance, admin: RemotingTransport, group: str, topic: str
) -> None:
    addresses = [broker.address for broker in cluster.brokers]
    instance.register(group)
    # The first heart-beat, one second after the start, happens before the instance knows a broker.
    instance.run_due(time.monotonic() + 2)
    instance.start()
    instance.routes.look_up(topic, PATIENCE)
    for address in addresses:
        wait_for(lambda: clients(admin, address, group) == {instance.client_id})  # noqa: B023 - used at once
    instance.forget(group)
    assert [clients(admin, address, group) for address in addresses] == [set(), set()]


def test_detector_marks_running_brokers_reachable_without_their_topic(
    cluster: SharedCluster, instance: ClientInstance, topic: str
) -> None:
    instance.routes.look_up(topic, PATIENCE)
    names = [broker.name for broker in cluster.brokers]
    for name in (*names, "gone"):
        instance.faults.update(FaultSite.REMOTING_FAILED, name, 1.0, time.monotonic())
    assert not any(map(instance.faults.table.is_reachable, names))
    instance.detect_due(time.monotonic() + 3)
    assert sorted(instance.faults.table.items()) == names
    assert all(map(instance.faults.table.is_reachable, names))
