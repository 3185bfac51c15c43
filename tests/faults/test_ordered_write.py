"""An ordered write while a broker goes and comes back: first occurrences of each key's rows stay in order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.conftest import QUICK_JVM
from tests.faults.test_write_under_faults import when_stored
from tests.reading import read_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

# At that rate the write takes eight seconds: whatever the machine, the restart falls into it.
ROWS, KEYS, ROWS_PER_SECOND = 40_000, 300, 5_000


@pytest.fixture
def two_brokers() -> Iterator[LocalCluster]:
    with LocalCluster(brokers=2, jvm_options=QUICK_JVM) as cluster:
        yield cluster


def keyed(spark: SparkSession) -> DataFrame:
    rows = spark.range(ROWS).withColumn("shardingKey", F.concat(F.lit("key-"), F.col("id") % KEYS))
    rows = rows.repartition(4, "shardingKey").sortWithinPartitions("id")
    return rows.select(F.rpad(F.col("id").cast("string"), 400, ".").alias("body"), "shardingKey")


def test_an_ordered_write_survives_the_restart_of_a_broker_with_every_keys_first_occurrences_in_order(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics
) -> None:
    victim = two_brokers.brokers[0]
    with RemotingTransport([two_brokers.name_server]) as transport:
        for broker in two_brokers.brokers:
            transport.create_topic(broker.address, topic, 4, 6, 5.0)

    def kill_and_restart() -> None:
        victim.kill()
        time.sleep(1.0)
        victim.restart()

    restarter = when_stored(two_brokers.name_server, topic, 5_000, kill_and_restart)
    writer = keyed(spark).write.format("rocketmq").option("nameServer", two_brokers.name_server)
    writer = writer.option("topic", topic).option("ordered", "true").option("maxRatePerSecond", ROWS_PER_SECOND)
    writer.option("batchBytes", "16k").save()
    restarter.join(60)
    messages = read_topic(two_brokers.name_server, topic, ROWS, key=lambda message: message.body)
    by_key: dict[str, list[int]] = defaultdict(list)
    queues: dict[str, set[tuple[object, int]]] = defaultdict(set)
    for message in messages:
        key = message.properties["__SHARDINGKEY"]
        by_key[key].append(int(message.body.rstrip(b".")))
        queues[key].add((message.store_host, message.queue_id))
    assert len(by_key) == KEYS
    for number in range(KEYS):
        assert list(dict.fromkeys(by_key[f"key-{number}"])) == list(range(number, ROWS, KEYS))
    assert {len(found) for found in queues.values()} == {1}
    assert metrics.to_dict()[victim.name]["retries"] > 0
