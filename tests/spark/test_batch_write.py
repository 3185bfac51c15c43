"""`df.write` to real brokers: every row is stored once, unchanged, and counted."""

from __future__ import annotations

import re
import subprocess
import uuid
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.spark.register import register, unregister
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic

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


def create_topic(cluster: SharedCluster, topic: str) -> None:
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 4, 6, 5.0)


@dataclass(frozen=True)
class Written:
    """The messages, metrics and log of one write of `ROWS` numbered rows."""

    topic: str
    metrics: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def written(spark: SparkSession, cluster: SharedCluster) -> Written:
    metrics, topic = register(spark), f"two-hundred-thousand-{uuid.uuid4().hex[:8]}"
    frame = numbered(spark, ROWS)
    frame.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", topic).save()
    unregister()
    # A broker builds its queues in the background.
    wait_for(lambda: sum(queue.messages for queue in queue_offsets([cluster.name_server], topic)) == ROWS)
    return Written(topic, metrics.to_dict())


def body_of(number: int) -> bytes:
    return f"body-{number}".encode() + "é".encode() * 20


def test_all_200_000_rows_are_stored_once_each_on_both_brokers(cluster: SharedCluster, written: Written) -> None:
    messages = read_topic(cluster.name_server, written.topic, ROWS)
    assert Counter(message.properties["KEYS"] for message in messages) == Counter(f"k{n}" for n in range(ROWS))
    for message in messages:
        number = int(message.properties["n"])
        assert message.body == body_of(number)
        assert message.body_crc == zlib.crc32(message.body) & 0x7FFFFFFF
        assert message.flag == number % 100_000
        assert message.properties["TAGS"] == f"tag{number % 7}"
        assert message.properties["KEYS"] == f"k{number}"
        assert message.properties["ü"] == "ø"
    assert {message.store_host for message in messages} == {broker.address for broker in cluster.brokers}
    assert len({message.properties["UNIQ_KEY"] for message in messages}) == ROWS


def test_metrics_count_each_row_and_offset_of_the_queues(cluster: SharedCluster, written: Written) -> None:
    assert set(written.metrics) == {broker.name for broker in cluster.brokers}
    assert sum(facts["rows"] for facts in written.metrics.values()) == ROWS
    receipt = [queue for facts in written.metrics.values() for queue in facts["queues"][written.topic].values()]
    assert sum(queue["rows"] for queue in receipt) == ROWS
    assert all(queue["last_offset"] - queue["first_offset"] + 1 == queue["rows"] for queue in receipt)
    assert all(0 < facts["p50_ms"] <= facts["p99_ms"] <= facts["max_ms"] for facts in written.metrics.values())


# One line of mqadmin printMsg, as MessageExt.toString and Message.toString have it.
PRINTED = re.compile(
    r"^MSGID: (?P<id>[0-9A-F]{32}) .*? sysFlag=0,.*? bodyCRC=(?P<crc>\d+),.*? flag=(?P<flag>\d+), "
    r"properties=\{(?P<properties>.*?)\}, body="
)


def test_rocketmqs_own_tool_reads_the_same_rows(cluster: SharedCluster, written: Written, tmp_path: Path) -> None:
    java = find_java()
    classpath = ":".join(map(str, server_jars(lambda: java)))
    # Its log files go below user.home.
    command = [str(java), f"-Duser.home={tmp_path}", "-Dfile.encoding=UTF-8"]
    command += ["-cp", classpath, "org.apache.rocketmq.tools.command.MQAdminStartup"]
    command += ["printMsg", "-n", cluster.name_server, "-t", written.topic, "-d", "false"]
    printed = tmp_path / "printed"
    with printed.open("wb") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=PATIENCE)
    ids, numbers = set(), Counter[int]()
    with printed.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.startswith("MSGID:"):
                continue
            found = PRINTED.match(line)
            assert found is not None, line
            properties = dict(pair.split("=", 1) for pair in found["properties"].split(", "))
            number = int(properties["n"])
            numbers[number] += 1
            ids.add(found["id"])
            assert int(found["crc"]) == zlib.crc32(body_of(number)) & 0x7FFFFFFF
            assert int(found["flag"]) == number % 100_000
            assert (properties["KEYS"], properties["TAGS"]) == (f"k{number}", f"tag{number % 7}")
            assert (properties["ü"], properties["UNIQ_KEY"]) == ("ø", found["id"])
    assert numbers == Counter(range(ROWS))
    assert len(ids) == ROWS


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
    # While a topic is being made by its first messages, its queues are not the same for every task.
    create_topic(cluster, topic)
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


def test_rows_with_queue_columns_are_stored_in_their_queue(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    create_topic(cluster, topic)
    broker = cluster.brokers[1]
    frame = spark.range(0, 100, 1, 2).select(
        F.col("id").cast("string").alias("body"),
        (F.col("id") % 2 + 1).cast("int").alias("queueId"),
        F.lit(broker.name).alias("brokerName"),
    )
    save(frame, queueSelector="column")
    stored = read_topic(cluster.name_server, topic, 100)
    assert {(message.store_host, message.queue_id, int(message.body) % 2) for message in stored} == {
        (broker.address, 1, 0),
        (broker.address, 2, 1),
    }


@pytest.mark.parametrize(("room", "taken"), [("{0}", 1), ("{1}", 1), ("nowhere", 2)])
def test_rows_go_to_their_own_machine_room_where_there_is_one(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None], room: str, taken: int
) -> None:
    create_topic(cluster, topic)
    names = [broker.name for broker in cluster.brokers]
    room = room.format(*(name.rpartition("-")[2] for name in names))
    save(spark.range(0, 200, 1, 2).select(F.col("id").cast("string").alias("body")), batching=False,
         queueSelector="machineRoom", machineRoom=room)  # fmt: skip
    stored = read_topic(cluster.name_server, topic, 200)
    hosts = {message.store_host for message in stored}
    assert len(stored) == 200
    assert hosts <= {broker.address for broker in cluster.brokers if taken == 2 or broker.name.endswith(room)}
    assert len(hosts) == taken


def test_large_and_small_rows_are_stored_in_one_write(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    sizes = [4 * 1024 * 1024, 10, 4 * 1024 * 1024 - 5, 1024 * 1024, 1]
    save(spark.createDataFrame([(bytes(size),) for size in sizes], "body binary").coalesce(1), compressType="NONE")
    assert sorted(sizes) == sorted(len(message.body) for message in read_topic(cluster.name_server, topic, len(sizes)))


def test_delayed_rows_are_delivered_later_as_single_messages(
    spark: SparkSession, cluster: Any, topic: str, save: Callable[..., None]
) -> None:
    save(spark.createDataFrame([("now", None), ("later", 1)], "body string, delayTimeLevel int"))
    stored = read_topic(cluster.name_server, topic, 2)
    assert {message.body for message in stored} == {b"now", b"later"}
    assert {message.properties.get("DELAY") for message in stored} == {None, "1"}


def test_repeated_writes_are_stored_without_retries(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    frame = spark.createDataFrame([("x",)], "body string")
    for _ in range(5):
        save(frame)
    assert len(read_topic(cluster.name_server, topic, 5)) == 5
    assert sum(facts["retries"] for facts in metrics.to_dict().values()) == 0
