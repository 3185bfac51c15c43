"""`df.write` and `df.writeStream` over gRPC on a real proxy: every row is stored once and unchanged."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.model.hashes import row_hash
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.reading import read_topic
from tests.support.streams import run_until, start

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = 20_000

Save = Callable[..., None]
MakeTopic = Callable[..., str]


@pytest.fixture
def save(cluster: SharedCluster, metrics: Metrics) -> Save:
    """Save a DataFrame to a topic; keyword arguments are options."""

    def save_to_topic(frame: DataFrame, topic: str, **options: Any) -> None:
        frame.write.format("rocketmq").options(endpoints=cluster.endpoints, topic=topic, **options).save()

    return save_to_topic


def bodies(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(0, rows, 1, 2).select(F.col("id").cast("string").alias("body"))


def stored(cluster: SharedCluster, topic: str, rows: int) -> list[MessageExt]:
    return read_topic(cluster.name_server, topic, rows, key=attrgetter("body"))


def test_rows_are_stored_once_each_and_counted_per_proxy(
    spark: SparkSession, cluster: SharedCluster, make_topic: MakeTopic, metrics: Metrics, save: Save
) -> None:
    topic = make_topic("NORMAL")
    frame = spark.range(0, ROWS, 1, 4).select(
        F.concat(F.lit("body-"), F.col("id")).alias("body"),
        F.concat(F.lit("tag"), F.col("id") % 7).alias("tags"),
        F.array(F.concat(F.lit("k"), F.col("id")), F.lit("of-all")).alias("keys"),
        F.create_map(F.lit("n"), F.col("id").cast("string"), F.lit("ü"), F.lit("ø")).alias("properties"),
    )
    save(frame, topic, rowId="true", namespace="spaces")
    messages = stored(cluster, topic, ROWS)
    # The topic's own name: over gRPC the namespace goes beside it.
    assert Counter(message.body for message in messages) == Counter(b"body-%d" % number for number in range(ROWS))
    for message in messages:
        number = message.properties["n"]
        assert message.body == f"body-{number}".encode()
        assert message.properties["TAGS"] == f"tag{int(number) % 7}"
        assert message.properties["KEYS"] == f"k{number} of-all"
        assert message.properties["ü"] == "ø"
        assert 0 <= message.store_timestamp - message.born_timestamp < 60_000
        *_, row, found = message.properties["SPARK_ROW_ID"].split("/")
        assert int(row) == int(number) % (ROWS // 4)
        assert found == row_hash(topic, message.body, message.properties)
    assert {message.store_host for message in messages} == {broker.address for broker in cluster.brokers}
    for name in ("UNIQ_KEY", "SPARK_ROW_ID"):
        assert len({message.properties[name] for message in messages}) == ROWS
    [(proxy, facts)] = metrics.to_dict().items()
    assert (proxy, facts["rows"]) == (cluster.endpoints, ROWS)
    assert 0 < facts["p50_ms"] <= facts["p99_ms"] <= facts["max_ms"]
    # A proxy does not report where it stored rows, so there is no receipt.
    assert facts["queues"] == {}
    shown = io.StringIO()
    metrics.show(shown)
    assert cluster.endpoints in shown.getvalue()
    assert f"{ROWS:,}" in shown.getvalue()


def test_rows_of_one_sharding_key_stay_in_order_in_one_queue(
    spark: SparkSession, cluster: SharedCluster, make_topic: MakeTopic, save: Save
) -> None:
    topic, rows, keys = make_topic("FIFO"), 1_000, 20
    frame = bodies(spark, rows).withColumn("shardingKey", F.concat(F.lit("s"), F.col("body").cast("int") % keys))
    save(frame.repartition(2, "shardingKey").sortWithinPartitions(F.col("body").cast("int")), topic)
    found: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for message in stored(cluster, topic, rows):
        place = (message.store_host, message.queue_id)
        found[message.properties["__SHARDINGKEY"]][place].append(int(message.body))
    assert {key: list(places.values()) for key, places in found.items()} == {
        f"s{key}": [list(range(key, rows, keys))] for key in range(keys)
    }


def test_delayed_rows_arrive_when_due(
    spark: SparkSession, cluster: SharedCluster, make_topic: MakeTopic, save: Save
) -> None:
    topic, rows = make_topic("DELAY"), 40
    save(bodies(spark, rows).withColumn("delayMs", F.lit(2500).cast("long")), topic)
    messages = stored(cluster, topic, rows)
    assert sorted(int(message.body) for message in messages) == list(range(rows))
    # A broker's clock of delays has steps of a second, and it rounds down.
    assert all(message.store_timestamp - message.born_timestamp >= 1500 for message in messages)


def test_a_query_over_grpc_that_is_stopped_and_restarted_sends_every_row(
    spark: SparkSession, cluster: SharedCluster, make_topic: MakeTopic, metrics: Metrics, tmp_path: Path
) -> None:
    topic = make_topic("NORMAL")
    sent = sum(run_until(start(spark, topic, tmp_path, endpoints=cluster.endpoints), 2) for _ in range(2))
    # A micro-batch that the stop cut short is sent again by the restart, and of the last one some rows may be there.
    assert {int(message.body) for message in stored(cluster, topic, sent)} >= set(range(sent))
    assert set(metrics.to_dict()) == {cluster.endpoints}
    assert metrics.to_dict()[cluster.endpoints]["rows"] >= sent


def test_rows_that_a_proxy_would_refuse_become_dead_letters_that_it_takes(
    spark: SparkSession, cluster: SharedCluster, make_topic: MakeTopic, topic: str, metrics: Metrics, save: Save
) -> None:
    dead = make_topic("NORMAL", f"{topic[:100]}-dead")
    number = F.col("body").cast("int")
    frame = bodies(spark, 1_000).select(
        F.when(number % 10 != 3, F.col("body")).alias("body"),
        F.concat(F.lit("k"), number).alias("keys"),
        F.create_map(F.lit("note"), F.when(number % 10 == 7, "two\nlines").otherwise("one line")).alias("properties"),
    )
    save(frame, make_topic("NORMAL"), onError="deadLetter", deadLetterTopic=dead)
    good = {n for n in range(1_000) if n % 10 not in (3, 7)}
    assert Counter(int(message.body) for message in stored(cluster, topic, 800)) == Counter(good)
    letters = read_topic(cluster.name_server, dead, 200, key=attrgetter("keys"))
    assert Counter(
        (letter.body, letter.keys, letter.properties["DEAD_LETTER_rule"], letter.properties["note"])
        for letter in letters
    ) == Counter(
        (b"(null)", f"k{n}", "body is null", "one line")
        if n % 10 == 3
        else (b"%d" % n, f"k{n}", "the value of a property holds a control character", "two\ufffdlines")
        for n in set(range(1_000)) - good
    )
    assert metrics.invalid_rows()["dead_lettered"] == 200


@pytest.mark.parametrize("columns", ["cast(id as string) as body", "'x' as body, 's' as shardingKey"])
def test_rows_that_the_topic_does_not_accept_are_rejected_on_the_driver(
    spark: SparkSession, make_topic: MakeTopic, topic: str, metrics: Metrics, save: Save, columns: str
) -> None:
    text = rf"the proxy does not know it.*create it first .*-t {topic} "
    if "shardingKey" in columns:
        text = "column shardingKey makes FIFO messages"
        make_topic("NORMAL")
    with pytest.raises(PySparkException, match=text) as caught:
        save(spark.range(10).selectExpr(*columns.split(", ")), topic, sendMsgTimeout="500", deliveryTimeoutMs="1500")
    assert type(caught.value).__name__ == "AnalysisException"
    assert metrics.to_dict() == {}
