"""An ordered write while a broker is killed and restarted: the first occurrences of a key's rows stay in order."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.auditor import BY_NUMBER, audit, numbered_rows
from tests.support.java import Java
from tests.support.processes import wait_for
from tests.support.reading import read_topic
from tests.support.streams import numbers, run_until
from tests.support.writes import in_mid_write, make_topic

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

KEYS = 300


def keyed(spark: SparkSession, count: int) -> DataFrame:
    rows = spark.range(count).withColumn("shardingKey", F.concat(F.lit("group-"), F.col("id") % KEYS))
    rows = rows.repartition(4, "shardingKey").sortWithinPartitions("id")
    return rows.select(F.rpad(F.col("id").cast("string"), 400, ".").alias("body"), "shardingKey")


def test_ordered_write_keeps_key_order_over_broker_restart(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics, java: Java, *, full: bool
) -> None:
    count, victim = 40_000 if full else 10_000, two_brokers.brokers[0]
    make_topic(two_brokers, topic)

    def kill_and_restart() -> None:
        victim.kill()
        victim.restart()

    writer = keyed(spark, count).write.format("rocketmq").option("nameServer", two_brokers.name_server)
    # At this rate the write lasts seconds on any machine, so the kill falls into it.
    writer = writer.option("topic", topic).option("ordered", "true").option("maxRatePerSecond", 5_000)
    with in_mid_write(two_brokers.name_server, topic, count // 10, kill_and_restart):
        writer.option("batchBytes", "16k").save()
    given = numbered_rows(topic, range(count), 400, groups=KEYS, keyed=False, repeats=True)
    audit(java, two_brokers.name_server, given, identity=BY_NUMBER).check()
    assert metrics.to_dict()[victim.name]["retries"] > 0


def test_stream_keeps_keys_on_their_queues_while_a_broker_is_down(
    spark: SparkSession, two_brokers: LocalCluster, topic: str, tmp_path: Path
) -> None:
    victim = two_brokers.brokers[1]
    make_topic(two_brokers, topic)

    def start(**options: str) -> StreamingQuery:
        rows = numbers(spark, 300).selectExpr(
            "cast(value as string) AS body", "concat('key-', value % 50) AS shardingKey"
        )
        return (
            rows.repartition(2, "shardingKey")
            .writeStream.format("rocketmq")
            .options(nameServer=two_brokers.name_server, topic=topic, ordered="true", **options)
            .option("checkpointLocation", str(tmp_path))
            .trigger(processingTime="200 milliseconds")
            .start()
        )

    run_until(start(), 1)
    victim.kill()
    with closing(RemotingTransport([two_brokers.name_server])) as transport:
        wait_for(lambda: len(transport.query_route(topic, 5.0).queue_datas) == 1)
    query = start(sendMsgTimeout="1000", deliveryTimeoutMs="3000")
    with pytest.raises(
        StreamingQueryException, match=rf"lists a master of broker {victim.name}|{topic}/{victim.name}/"
    ):
        query.awaitTermination(timeout=60)
    victim.restart()
    run_until(start(), 1)
    queues: dict[str, set[tuple[object, int]]] = defaultdict(set)
    for message in read_topic(two_brokers.name_server, topic):
        queues[message.properties["__SHARDINGKEY"]].add((message.store_host, message.queue_id))
    assert len(queues) == 50
    assert {len(of_key) for of_key in queues.values()} == {1}
    assert len(set.union(*queues.values())) > 4
