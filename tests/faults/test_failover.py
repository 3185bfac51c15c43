"""A broker's master is killed, and a replica becomes the master: no row is lost, in a write and in a read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import ClusterError, RocketMQError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.auditor import ROW_ID, audit, numbered_rows
from tests.support.cluster import started
from tests.support.java import Java
from tests.support.processes import NEEDS_LIMITS, PATIENCE, wait_for
from tests.support.streams import Kept, once
from tests.support.writes import SMALL, Account, in_mid_write, messages_in, numbered, retries_of, write

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

ROWS, PER_SECOND = 16_000, 2_000


@pytest.fixture(scope="module")
def _replicated() -> Iterator[LocalCluster]:
    # A controller replaces a master from which it has heard nothing for as long.
    properties = {"controllerHeartBeatTimeoutMills": 3000}
    cluster = LocalCluster(
        controller=True, replicas=2, name_servers=3, broker_properties=properties, start_timeout=PATIENCE
    )
    with started(cluster):
        yield cluster


@pytest.fixture
def replicated(_replicated: LocalCluster) -> Iterator[LocalCluster]:
    """A broker with two replicas, and three name servers with a controller each; all run and are in sync."""
    yield _replicated
    for server in _replicated.servers:
        if not server.is_alive:
            server.start()
    for server in _replicated.servers:
        server.await_ready(time.monotonic() + PATIENCE)


@contextmanager
def timed(name_server: str, topic: str) -> Iterator[list[float]]:
    """Yield a list that gets the longest time without a new message, seconds, from the first message to the last."""
    longest, over = [0.0], threading.Event()

    def watch() -> None:
        known, since = 0, None
        while not over.wait(0.05):
            now = messages_in(name_server, topic)
            if now > known:
                if since is not None:
                    longest[0] = max(longest[0], time.monotonic() - since)
                known, since = now, time.monotonic()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()


def failed_over(cluster: LocalCluster, victim: Broker) -> None:
    """Wait until another process is the master."""

    def has_other_master() -> bool:
        try:
            return cluster.master() is not victim
        except (ClusterError, RocketMQError):
            return False

    wait_for(has_other_master)


with_name_servers = pytest.mark.parametrize(
    "lost_name_server", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "name server gone"]
)


@pytest.fixture
def replicated_topic(replicated: LocalCluster, topic: str) -> str:
    """A topic of four queues."""
    with Admin(replicated.name_server, timeout=PATIENCE) as admin:
        admin.create_topic(topic, 4)
    return topic


@with_name_servers
def test_no_row_is_lost_if_the_master_is_killed_during_a_write(
    spark: SparkSession,
    metrics: Metrics,
    replicated: LocalCluster,
    replicated_topic: str,
    java: Java,
    record_property: Any,
    *,
    lost_name_server: bool,
) -> None:
    topic = replicated_topic
    if lost_name_server:
        replicated.servers[0].kill()
    victim = replicated.master()
    # The watch asks a name server that runs.
    asked = replicated.servers[1].address
    options = {"maxRatePerSecond": PER_SECOND, "rowId": True, **SMALL}
    with timed(asked, topic) as longest, in_mid_write(asked, topic, ROWS // 10, victim.kill):
        write(numbered(spark, ROWS, 100), replicated.name_server, topic, **options)
    assert replicated.master() is not victim
    found = audit(java, asked, numbered_rows(topic, range(ROWS), 100, repeats=True), marks=[ROW_ID])
    found.check()
    retries = retries_of(metrics.to_dict())
    fault = "master killed, replica takes over" + (", one of three name servers gone" if lost_name_server else "")
    account = Account(fault, ROWS, found.messages, found.repeats, retries, longest[0], found.most)
    record_property("account", list(account))


def batch(start: int, stop: int) -> pa.Table:
    """Return numbered rows as an Arrow table."""
    numbers = range(start, stop)
    return pa.table({"body": [f"{number}" for number in numbers], "keys": [f"k{number}" for number in numbers]})


@NEEDS_LIMITS
@with_name_servers
def test_a_stream_reads_every_row_once_although_the_master_is_killed(
    spark: SparkSession,
    metrics: Metrics,
    replicated: LocalCluster,
    replicated_topic: str,
    tmp_path: Path,
    *,
    lost_name_server: bool,
) -> None:
    topic = replicated_topic
    kept, victim = Kept(), replicated.master()
    options = {"nameServer": replicated.name_server, "subscribe": topic, "startingOffsets": "earliest"}
    limits = {"pullTimeoutMs": "1000", "maxOffsetsPerTrigger": "500"}
    with Producer("failover", name_server=replicated.name_server) as producer:
        producer.send_arrow(batch(0, 4_000), topic)
        frame = spark.readStream.format("rocketmq").options(**options, **limits).load()
        query = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path)).start()
        try:
            wait_for(lambda: len(kept.batches) >= 2)
            if lost_name_server:
                replicated.servers[0].kill()
            victim.kill()
            producer.send_arrow(batch(4_000, 5_000), topic)
            failed_over(replicated, victim)
            expected = once(f"k{number}" for number in range(5_000))
            wait_for(lambda: kept.keys.total() >= 5_000 or query.exception() is not None)
            assert query.exception() is None
            assert kept.keys == expected
        finally:
            query.stop()
