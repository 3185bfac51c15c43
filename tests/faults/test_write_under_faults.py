"""A write while something breaks: every key is found afterwards, by an independent reader."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.spark.report import Metrics
from tests.conftest import QUICK_JVM
from tests.links import slow_cluster
from tests.reading import read_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]


def numbered(spark: SparkSession, rows: int, nbytes: int) -> DataFrame:
    return spark.range(0, rows, 1, 4).select(
        F.rpad(F.col("id").cast("string"), nbytes, ".").alias("body"), F.concat(F.lit("k"), F.col("id")).alias("keys")
    )


def write(frame: DataFrame, name_server: str, topic: str, **options: Any) -> None:
    writer = frame.write.format("rocketmq").option("nameServer", name_server).option("topic", topic)
    writer.options(**options).save()


def keys(name_server: str, topic: str, rows: int) -> Counter[str]:
    messages = read_topic(name_server, topic, rows, key=lambda message: message.properties["KEYS"])
    return Counter(message.properties["KEYS"] for message in messages)


def when_stored(name_server: str, topic: str, messages: int, then: Callable[[], None]) -> threading.Thread:
    """Call `then` once a topic holds so many messages."""

    def watch() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if sum(offsets.messages for offsets in queue_offsets([name_server], topic)) >= messages:
                    then()
                    return
            except RocketMQError:
                pass  # The topic is not there yet.
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def two_brokers() -> Iterator[LocalCluster]:
    with LocalCluster(brokers=2, jvm_options=QUICK_JVM) as cluster:
        yield cluster


def test_a_broker_that_is_killed_in_mid_write_loses_no_row(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics
) -> None:
    rows, victim = 150_000, two_brokers.brokers[0]
    # The topic is made first, so that the kill falls into the write and not into its creation.
    write(numbered(spark, 10, 10), two_brokers.name_server, topic)
    metrics.reset()
    killer = when_stored(two_brokers.name_server, topic, 20_000, victim.kill)
    write(numbered(spark, rows, 400), two_brokers.name_server, topic)
    killer.join(60)
    assert not victim.is_alive
    retries = metrics.to_dict()[victim.name]["retries"]
    victim.restart()
    found = keys(two_brokers.name_server, topic, rows)
    assert set(found) == {f"k{number}" for number in range(rows)}
    assert retries > 0


def test_constant_flow_control_loses_no_row(spark: SparkSession, topic: str, metrics: Metrics) -> None:
    rows = 100_000
    with LocalCluster(
        brokers=2, broker_properties=[{"waitTimeMillsInSendQueue": 5}, {}], jvm_options=QUICK_JVM
    ) as cluster:
        write(numbered(spark, rows, 100), cluster.name_server, topic)
        found = keys(cluster.name_server, topic, rows)
    assert set(found) == {f"k{number}" for number in range(rows)}
    assert metrics.to_dict()["broker-0"]["rows"] > 0


def test_a_slow_link_causes_no_storm_of_repeats(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics
) -> None:
    rows, ten_megabit = 40_000, 10_000_000 / 8
    with slow_cluster(cluster.name_server, [broker.address for broker in cluster.brokers], ten_megabit) as name_server:
        write(numbered(spark, rows, 300), name_server, topic)
    found = keys(cluster.name_server, topic, rows)
    assert set(found) == {f"k{number}" for number in range(rows)}
    assert found.total() <= rows * 1.05
