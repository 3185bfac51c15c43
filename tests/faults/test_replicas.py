"""Replicas that are lost during an exactly-once commit. A broker acknowledges what two replicas have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import RocketMQError
from tests.support.cluster import FAST_FAILOVER, SHORT_DEADLINES, started
from tests.support.java import Java
from tests.support.once import check_once, committing
from tests.support.processes import PATIENCE, wait_for
from tests.support.two_phase import WRITE
from tests.support.writes import messages_in

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.long]

ROWS = [f"row-{number:04}" for number in range(6_000)]


@pytest.fixture(scope="module")
def _replicated() -> Iterator[LocalCluster]:
    properties = {**SHORT_DEADLINES, **FAST_FAILOVER, "minInSyncReplicas": 2}
    cluster = LocalCluster(controller=True, replicas=2, broker_properties=properties, start_timeout=PATIENCE)
    with started(cluster):
        yield cluster


@pytest.fixture
def replicated(_replicated: LocalCluster) -> Iterator[LocalCluster]:
    """A broker with two replicas, both in sync. It stores nothing without one of them."""
    yield _replicated
    restart(_replicated)


def restart(cluster: LocalCluster) -> None:
    for broker in cluster.brokers:
        if not broker.is_alive:
            broker.start()
    for broker in cluster.brokers:
        broker.await_ready(time.monotonic() + PATIENCE)


@pytest.mark.parametrize("paused", [False, True], ids=["killed", "paused"])
@pytest.mark.parametrize("victim", ["slave", "master", "both"])
def test_a_replica_lost_in_a_commit_costs_no_row(
    replicated: LocalCluster, topic: str, java: Java, *, victim: str, paused: bool
) -> None:
    with Admin(replicated.name_server, timeout=PATIENCE) as admin:
        admin.create_topic(topic, 2)
    master = replicated.master()
    (slave,) = (broker for broker in replicated.brokers if broker is not master)
    lost = {"slave": [slave], "master": [master], "both": [slave, master]}[victim]
    with committing(replicated, topic, timeout_ms=30_000) as job, ThreadPoolExecutor(1) as pool:
        running = pool.submit(job.two_phase.commit, WRITE, *job.prepare(ROWS))
        wait_for(lambda: messages_in(replicated.name_server, topic) > 0 or running.done())
        for broker in lost:
            broker.pause() if paused else broker.kill()
        # Longer than the time after which a slave is out of sync, and a master is replaced.
        time.sleep(8.0)
        for broker in lost:
            if paused:
                broker.resume()
        restart(replicated)
        # The driver of a master that is replaced may give up.
        with suppress(RocketMQError):
            running.result(PATIENCE)
    with committing(replicated, topic) as job:
        job.two_phase.finish(WRITE)
    check_once(java, replicated.name_server, topic, ROWS)
