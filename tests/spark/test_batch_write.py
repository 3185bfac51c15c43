"""`df.write` to real brokers: every row once, whole, and counted."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from reading import read_topic
from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = 200_000


def numbered(spark: SparkSession, rows: int, partitions: int = 4) -> Any:
    return spark.range(0, rows, 1, partitions).select(
        F.concat(F.lit("body-"), F.col("id").cast("string"), F.repeat(F.lit("é"), 20)).alias("body"),
        F.concat(F.lit("tag"), (F.col("id") % 7).cast("string")).alias("tags"),
        F.concat(F.lit("k"), F.col("id").cast("string")).alias("keys"),
        (F.col("id") % 100_000).cast("int").alias("flag"),
        F.create_map(F.lit("n"), F.col("id").cast("string"), F.lit("ü"), F.lit("ø")).alias("properties"),
    )


def test_two_hundred_thousand_rows_arrive_once_each_and_whole_on_both_brokers(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    save(numbered(spark, ROWS))
    stored = read_topic(cluster.name_server, topic, ROWS)
    assert len(stored) == ROWS
    assert Counter(message.properties["KEYS"] for message in stored) == Counter(f"k{n}" for n in range(ROWS))
    for message in stored:
        number = int(message.properties["n"])
        body = f"body-{number}".encode() + "é".encode() * 20
        assert message.body == body
        assert message.body_crc == zlib.crc32(body) & 0x7FFFFFFF
        assert message.flag == number % 100_000
        assert message.properties["TAGS"] == f"tag{number % 7}"
        assert message.properties["KEYS"] == f"k{number}"
        assert message.properties["ü"] == "ø"
    assert len({message.store_host for message in stored}) == 2
    assert len({message.properties["UNIQ_KEY"] for message in stored}) == ROWS
    reported = metrics.to_dict()
    assert set(reported) == {broker.name for broker in cluster.brokers}
    assert sum(facts["rows"] for facts in reported.values()) == ROWS
    receipt = sum(queue["rows"] for facts in reported.values() for queue in facts["queues"].values())
    assert receipt == ROWS


def test_save_needs_no_mode_after_register(spark: SparkSession, cluster: Any, topic: str, metrics: Metrics) -> None:
    frame = spark.createDataFrame([("a",), ("b",)], "body string")
    frame.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", topic).save()
    frame.write.option("nameServer", cluster.name_server).save(topic, format="rocketmq")
    frame.write.format("RocketMQ").mode("append").option("namesrvAddr", cluster.name_server).save(topic)
    assert len(read_topic(cluster.name_server, topic, 6)) == 6
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 6


def test_an_empty_frame_is_written_without_any_connection(
    spark: SparkSession, metrics: Metrics, save: Callable[..., None]
) -> None:
    save(spark.createDataFrame([], "body string"))
    assert metrics.to_dict() == {}


def test_a_topic_column_sends_rows_to_their_topics(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics
) -> None:
    frame = spark.range(0, 1000, 1, 2).select(
        F.col("id").cast("string").alias("body"), F.concat(F.lit(f"{topic}-"), F.col("id") % 3).alias("topic")
    )
    frame.write.format("rocketmq").mode("append").option("nameServer", cluster.name_server).save()
    counts = [len(read_topic(cluster.name_server, f"{topic}-{n}", 333)) for n in range(3)]
    assert counts == [334, 333, 333]


def test_a_sharding_key_keeps_its_rows_on_one_queue(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    frame = spark.range(0, 5000, 1, 2).select(
        F.col("id").cast("string").alias("body"), F.concat(F.lit("s"), F.col("id") % 20).alias("shardingKey")
    )
    save(frame)
    stored = read_topic(cluster.name_server, topic, 5000)
    places: dict[str, set[tuple[str, int]]] = {}
    for message in stored:
        places.setdefault(message.properties["__SHARDINGKEY"], set()).add((message.store_host, message.queue_id))
    assert len(stored) == 5000
    assert len(places) == 20
    assert {len(found) for found in places.values()} == {1}
    assert len({place for found in places.values() for place in found}) > 1


def test_rows_named_for_a_queue_go_there(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    save(spark.createDataFrame([("warm up",)], "body string"))
    read_topic(cluster.name_server, topic, 1)
    broker = cluster.brokers[1]
    frame = spark.range(0, 100, 1, 2).select(
        F.col("id").cast("string").alias("body"),
        (F.col("id") % 2 + 1).cast("int").alias("queueId"),
        F.lit(broker.name).alias("brokerName"),
    )
    save(frame, queueSelector="column")
    stored = [message for message in read_topic(cluster.name_server, topic, 101) if message.body != b"warm up"]
    assert {(message.store_host, message.queue_id, int(message.body) % 2) for message in stored} == {
        (broker.address, 1, 0),
        (broker.address, 2, 1),
    }


def test_a_large_row_goes_beside_small_ones(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    sizes = [4 * 1024 * 1024, 10, 4 * 1024 * 1024 - 5, 1024 * 1024, 1]
    save(spark.createDataFrame([(bytes(size),) for size in sizes], "body binary").coalesce(1))
    assert sorted(sizes) == sorted(len(message.body) for message in read_topic(cluster.name_server, topic, len(sizes)))


def test_delayed_rows_are_delivered_later_as_single_messages(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    save(spark.createDataFrame([("now", None), ("later", 1)], "body string, delayTimeLevel int"))
    stored = read_topic(cluster.name_server, topic, 2)
    assert {message.body for message in stored} == {b"now", b"later"}
    assert {message.properties.get("DELAY") for message in stored} == {None, "1"}


def test_the_driver_warms_no_connection_and_tasks_keep_theirs(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    frame = spark.createDataFrame([("x",)], "body string")
    for _ in range(5):
        save(frame)
    assert len(read_topic(cluster.name_server, topic, 5)) == 5
    assert sum(facts["retries"] for facts in metrics.to_dict().values()) == 0
