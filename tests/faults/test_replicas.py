"""Replicas that are lost during an exactly-once commit. A broker acknowledges what two replicas have."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.servers import Broker
from rocketmq_spark.errors import ClusterError, RocketMQError
from tests.support.cluster import FAST_FAILOVER, SHORT_DEADLINES, create_topic, start_all, started
from tests.support.java import Java
from tests.support.once import MANY_BODIES, check_once, committing
from tests.support.processes import PATIENCE, wait_for
from tests.support.two_phase import WRITE
from tests.support.writes import messages_in

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.long]


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
    start_all(_replicated.brokers)


def knows(broker: Broker, *topics: str) -> bool:
    """Return whether a broker has the configuration of topics. A slave asks its master for it every ten seconds."""
    # The broker deletes the file before it renames the next one.
    with suppress(FileNotFoundError):
        stored = json.loads((broker.folder / "store" / "config" / "topics.json").read_text())
        return set(topics).issubset(stored["topicConfigTable"])
    return False


def is_master(cluster: LocalCluster, broker: Broker) -> bool:
    with suppress(ClusterError):
        return cluster.master() is broker
    return False


def slave_of(cluster: LocalCluster) -> Broker:
    """Return the replica that is no master."""
    (slave,) = (broker for broker in cluster.brokers if broker is not cluster.master())
    return slave


@pytest.mark.parametrize("paused", [False, True], ids=["killed", "paused"])
@pytest.mark.parametrize("victim", ["slave", "master", "both"])
def test_a_replica_lost_in_a_commit_costs_no_row(
    replicated: LocalCluster, topic: str, java: Java, *, victim: str, paused: bool
) -> None:
    create_topic(replicated, topic, "NORMAL")
    master, slave = replicated.master(), slave_of(replicated)
    lost = {"slave": [slave], "master": [master], "both": [slave, master]}[victim]
    with committing(replicated, topic, timeout_ms=30_000) as job, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: knows(slave, topic, job.log.topic))
        running = pool.submit(job.two_phase.commit, WRITE, *job.prepare(MANY_BODIES))
        wait_for(lambda: messages_in(replicated.name_server, topic) > 0 or running.done())
        for broker in lost:
            broker.pause() if paused else broker.kill()
        # Longer than the time after which a slave is out of sync, and a master is replaced.
        time.sleep(8.0)
        for broker in lost:
            if paused:
                broker.resume()
        start_all(replicated.brokers)
        # The driver of a master that is replaced may give up.
        with suppress(RocketMQError):
            running.result(PATIENCE)
    with committing(replicated, topic) as job:
        job.two_phase.finish(WRITE)
    check_once(java, replicated.name_server, topic, MANY_BODIES)


def lost_before_slave_knows(cluster: LocalCluster, earlier: str, rows: str) -> str | None:
    """Kill the master in a commit to a new topic, and let the slave replace it.

    Returns the topic of the decision log, or None if the slave had learnt one of both topics meanwhile.
    """
    master, slave = cluster.master(), slave_of(cluster)
    create_topic(cluster, earlier, "NORMAL")
    wait_for(lambda: knows(slave, earlier))
    # The slave asks again in ten seconds.
    create_topic(cluster, rows, "NORMAL")
    with committing(cluster, rows, deliveryTimeoutMs="20000") as job, ThreadPoolExecutor(1) as pool:
        running = pool.submit(job.two_phase.commit, WRITE, *job.prepare(MANY_BODIES))
        wait_for(lambda: messages_in(cluster.name_server, rows) > 0 or running.done())
        master.kill()
        wait_for(lambda: is_master(cluster, slave))
        with suppress(RocketMQError):
            running.result(PATIENCE)
        log = job.log.topic
    found = knows(slave, rows) or knows(slave, log)
    start_all(cluster.brokers)
    return None if found else log


def test_a_new_master_without_the_topics_is_an_error_until_they_are_created(
    replicated: LocalCluster, topic: str, java: Java
) -> None:
    names = (f"{topic}-{number}" for number in itertools.count())
    lost = ((rows, lost_before_slave_knows(replicated, next(names), rows)) for rows in names)
    rows, log = next((rows, log) for rows, log in lost if log)
    with pytest.raises(RocketMQError, match=rf"{log}.*TOPIC_NOT_EXIST"), committing(replicated, rows):
        pass
    for name in (rows, log):
        create_topic(replicated, name, "NORMAL")
    with committing(replicated, rows) as job:
        job.two_phase.finish(WRITE)
    check_once(java, replicated.name_server, rows, MANY_BODIES)
