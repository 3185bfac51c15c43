"""The visible effect of each delivery option on real brokers."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.reading import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = 2_000


def numbered(spark: SparkSession, rows: int = ROWS, partitions: int = 2) -> DataFrame:
    return spark.range(0, rows, 1, partitions).select(F.col("id").cast("string").alias("body"))


def create_topic(cluster: SharedCluster, topic: str) -> None:
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 4, 6, 5.0)


def bodies(cluster: SharedCluster, topic: str, rows: int = ROWS) -> Counter[int]:
    messages = read_topic(cluster.name_server, topic, rows, key=lambda message: message.body)
    return Counter(int(message.body) for message in messages)


def total(metrics: Metrics, name: str) -> int:
    return sum(numbers[name] for numbers in metrics.to_dict().values())


def refusal(save: Callable[..., None], frame: DataFrame, **options: Any) -> str:
    with pytest.raises(PySparkException) as caught:
        save(frame, **options)
    return str(caught.value)


def test_oneway_rows_arrive_and_count_as_sent_but_not_as_stored(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    metrics: Metrics,
    save: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_topic(cluster, topic)
    save(numbered(spark), sendMode="oneway")
    assert set(bodies(cluster, topic)) == set(range(ROWS))
    assert (total(metrics, "rows"), total(metrics, "sent_rows")) == (0, ROWS)
    metrics.show()
    assert f"{ROWS} rows were sent with sendMode=oneway" in capsys.readouterr().out


def test_sync_rows_arrive_once_each(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    save(numbered(spark), sendMode="sync", batchBytes="4k")
    assert bodies(cluster, topic) == Counter(range(ROWS))
    assert total(metrics, "rows") == ROWS


def test_rows_in_a_namespace_are_stored_in_its_topic_through_vip_port(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    options = {"namespace": "ns1", "unitName": "u1", "unitMode": "true", "vipChannelEnabled": "true"}
    save(numbered(spark), **options)
    assert bodies(cluster, f"ns1%{topic}") == Counter(range(ROWS))
    assert {name for numbers in metrics.to_dict().values() for name in numbers["queues"]} == {topic}


def test_rate_limit_applies_to_the_whole_job(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    rate = 500
    save(numbered(spark, partitions=5), maxRatePerSecond=rate)
    assert bodies(cluster, topic) == Counter(range(ROWS))
    by_second: Counter[int] = Counter()
    for row in metrics.timeline():
        by_second[row["second"]] += row["rows"]
    # A second may take the turn of the one before it, as far as that was not used.
    assert max(by_second.values()) <= 2 * rate
    assert max(by_second) - min(by_second) >= ROWS / rate - 2


def test_each_write_appends_a_line_to_metrics_path(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    metrics: Metrics,
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    path = tmp_path / "sink.jsonl"
    save(numbered(spark), metricsPath=str(path))
    spark.range(7).selectExpr("cast(id as string) as body").write.parquet(str(tmp_path / "in"))
    query = (
        spark.readStream.schema("body string").parquet(str(tmp_path / "in"))
        .writeStream.format("rocketmq")
        .option("nameServer", cluster.name_server)
        .option("metricsPath", path.as_uri())
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(topic)
    )  # fmt: skip
    assert query.awaitTermination(120)
    written, streamed = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(line["write_id"], line["batch_id"]) for line in (written, streamed)] == metrics.writes()
    assert (written["batch_id"], streamed["batch_id"], streamed["write_id"]) == (-1, 0, query.id)
    assert sum(numbers["rows"] for numbers in written["brokers"].values()) == ROWS
    assert sum(numbers["rows"] for numbers in streamed["brokers"].values()) == 7
    assert all(numbers["p99_ms"] > 0 for numbers in written["brokers"].values())


def test_a_metrics_path_that_can_not_be_written_fails_no_write(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None]
) -> None:
    save(numbered(spark), metricsPath="/proc/no/such/place.jsonl")
    assert bodies(cluster, topic) == Counter(range(ROWS))


def test_ordered_rows_of_a_key_are_in_one_queue_in_their_order(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    create_topic(cluster, topic)
    keyed = spark.range(ROWS).withColumn("shardingKey", (F.col("id") % 50).cast("string"))
    keyed = keyed.repartition(3, "shardingKey").sortWithinPartitions("id")
    save(keyed.select(F.col("id").cast("string").alias("body"), "shardingKey"), ordered="true", batchBytes="1k")
    found: dict[str, list[int]] = defaultdict(list)
    for message in read_topic(cluster.name_server, topic, ROWS):
        found[message.properties["__SHARDINGKEY"]].append(int(message.body))
    assert found == {str(key): list(range(key, ROWS, 50)) for key in range(50)}


def test_ordered_stream_uses_the_queues_of_the_driver(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    create_topic(cluster, topic)
    rows = spark.range(100).selectExpr("cast(id as string) as body", "cast(id % 5 as string) as shardingKey")
    rows.coalesce(1).write.parquet(str(tmp_path / "in"))
    query = (
        spark.readStream.schema("body string, shardingKey string").parquet(str(tmp_path / "in"))
        .writeStream.format("rocketmq")
        .option("nameServer", cluster.name_server)
        .option("ordered", "true")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(topic)
    )  # fmt: skip
    assert query.awaitTermination(120)
    found: dict[str, list[int]] = defaultdict(list)
    for message in read_topic(cluster.name_server, topic, 100):
        found[message.properties["__SHARDINGKEY"]].append(int(message.body))
    assert found == {str(key): list(range(key, 100, 5)) for key in range(5)}


def test_ordered_write_requires_key_column_key_values_and_existing_topic(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Callable[..., None]
) -> None:
    rows = numbered(spark, 10)
    keyed = rows.withColumn("shardingKey", F.col("body"))
    assert "ordered=true keeps the order of rows of one shardingKey" in refusal(save, rows, ordered="true")
    assert f"topic {topic} for an ordered write: the topic does not exist" in refusal(save, keyed, ordered="true")
    create_topic(cluster, topic)
    some = rows.withColumn("shardingKey", F.when(F.col("body") != "7", F.col("body")))
    assert "row 2 (topic" in refusal(save, some, ordered="true")


def test_rate_limit_with_unknown_number_of_tasks_is_rejected_on_driver(
    spark: SparkSession, cluster: SharedCluster, topic: str
) -> None:
    options = {"nameServer": cluster.name_server, "topic": topic, "maxRatePerSecond": "10"}
    with pytest.raises(OptionError, match=r"register\(spark\).*maxRateTasks"):
        RocketMQDataSource(options).writer(numbered(spark, 1).schema, overwrite=False)
