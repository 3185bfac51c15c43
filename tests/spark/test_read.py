"""`spark.read` from real brokers: a read returns the rows that were written."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark import dedupe
from rocketmq_spark.arrow.read_columns import arrow_schema_of, column_names, spark_schema_of
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.spark.spark_api import arrow_schema
from tests.support.cluster import SharedCluster, create_topic
from tests.support.processes import wait_for
from tests.support.reading import read_topic
from tests.support.writes import failing_late, messages_in, numbered

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Save = Callable[..., None]
Load = Callable[..., DataFrame]
Make = Callable[..., str]

MIB = 1024 * 1024
COLUMNS = (
    "body binary, tags string, keys array<string>, properties map<string,string>, flag int, shardingKey string, "
    "delayTimeLevel int"
)
# Each column at its edges; `a=b` and the like must not be taken for separators.
ODD_ROWS: list[tuple[Any, ...]] = [
    (b"plain", None, None, None, None, None, None),
    (b"\0", "t", ["k"], {"n": "1"}, 0, None, None),
    (b"\0\x01\x02\xff" * 3, "grün", ["ключ", "\U0001f511"], {"größe": "\U0001f600 groß"}, -1, None, None),
    (
        "naïve ☃".encode(),
        "TagA",
        ["a", "b", "c"],
        {"a=b": "c;d", "line": "x\ny\tz", "quote": "'\""},
        2**31 - 1,
        "s",
        None,
    ),
    (b"empty map", None, [], {}, -(2**31), "s", None),
    (b"many", None, None, {f"name-{n}": "v" * n for n in range(1, 60)}, 1, None, None),
    (b"long value", None, None, {"v": "\u00e9" * 15_000}, 1, None, None),
    (b"delayed", "later", ["d1"], {"n": "2"}, 3, None, 1),
    (b"x" * (4 * MIB), "huge", None, None, None, None, None),
]


def user_properties(properties: dict[str, str]) -> dict[str, str]:
    """Return the columns that the user wrote."""
    return {name: value for name, value in properties.items() if name not in RESERVED_PROPERTIES}


def receipt(metrics: Metrics) -> str:
    """Return the offsets of the session's last write as the text of an option."""
    return json.dumps(metrics.to_dict(metrics.writes()[-1][0]))


def as_read(message: MessageExt, broker: str) -> tuple[Any, ...]:
    """Return the row of a stored message, with times in ms."""
    properties = message.properties
    return (
        message.topic,
        message.body,
        properties.get("TAGS"),
        properties.get("KEYS"),
        dict(properties),
        message.flag,
        broker,
        message.queue_id,
        message.queue_offset,
        properties["UNIQ_KEY"],
        message.offset_msg_id,
        message.born_timestamp,
        message.store_timestamp,
        message.born_host,
        message.reconsume_times,
    )


def read_rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return rows with their times in ms."""
    in_ms = {name: F.unix_millis(name).alias(name) for name in ("bornTimestamp", "storeTimestamp")}
    return [tuple(row) for row in frame.select([in_ms.get(name, F.col(name)) for name in frame.columns]).collect()]


def test_every_column_of_a_write_is_read_back_as_it_was_written(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Save, load: Load
) -> None:
    create_topic(cluster, topic, "NORMAL")
    save(spark.createDataFrame(ODD_ROWS, COLUMNS), compressType="none", maxMessageSize=str(4 * MIB))
    stored = read_topic(cluster.name_server, topic, len(ODD_ROWS))
    frame = load()
    assert arrow_schema(frame.schema) == arrow_schema_of(column_names())
    assert (
        frame.schema.simpleString() == f"struct<{spark_schema_of(column_names()).replace(', ', ',').replace(' ', ':')}>"
    )
    found = read_rows(frame)
    brokers = {broker.address: broker.name for broker in cluster.brokers}
    expected = [as_read(message, brokers[message.store_host]) for message in stored]
    key = lambda row: (row[6], row[7], row[8])  # noqa: E731 - broker, queue and offset
    assert sorted(found, key=key) == sorted(expected, key=key)
    by_body = {bytes(row[1]): row for row in found}
    for body, tags, keys, properties, flag, sharding_key, _ in ODD_ROWS:
        row = by_body[body]
        assert (row[2], row[3], row[5]) == (tags, " ".join(keys) if keys else None, flag or 0)
        properties_of_user = user_properties(row[4])
        assert properties_of_user.pop("__SHARDINGKEY", None) == sharding_key
        assert properties_of_user == (properties or {})


@pytest.mark.parametrize("kind", ["ZLIB", "LZ4", "ZSTD"])
def test_compressed_bodies_are_read_as_they_were(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Save, load: Load, kind: str
) -> None:
    text = F.repeat(F.concat(F.lit("línea "), F.col("id"), F.lit("; ")), 600)
    body = F.when(F.col("id") % 3 == 0, text).otherwise(F.col("id").cast("string"))
    save(
        spark.range(0, 300, 1, 2).select(body.alias("body"), F.col("id").cast("string").alias("keys")),
        compressType=kind,
    )
    found = {row.keys: bytes(row.body).decode() for row in load(startingOffsets=receipt(metrics)).collect()}
    assert found == {str(n): f"línea {n}; " * 600 if n % 3 == 0 else str(n) for n in range(300)}


def test_inner_batches_are_read_as_rows_and_offsets_may_split_them(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Save, load: Load
) -> None:
    create_topic(cluster, topic, "NORMAL", inner=True)
    save(
        spark.range(0, 500, 1, 2).selectExpr(
            "concat('body-', id) AS body",
            "concat('tag', id % 3) AS tags",
            "map('n', string(id)) AS properties",
            "int(id) AS flag",
        ),
        batchType="inner",
    )
    rows = load(startingOffsets=receipt(metrics)).collect()
    found = {(bytes(row.body).decode(), row.tags, row.properties["n"], row.flag) for row in rows}
    assert found == {(f"body-{n}", f"tag{n % 3}", str(n), n) for n in range(500)}
    assert len({(row.brokerName, row.queueId, row.queueOffset) for row in rows}) == len(rows) == 500
    queue = (rows[0].brokerName, rows[0].queueId)
    of_queue = {row.queueOffset: bytes(row.body) for row in rows if (row.brokerName, row.queueId) == queue}
    first, last = min(of_queue) + 3, max(of_queue) - 3

    def between(start: int, end: int) -> DataFrame:
        starts, ends = ({topic: {queue[0]: {str(queue[1]): offset}}} for offset in (start, end))
        chosen = json.dumps({topic: {queue[0]: [queue[1]]}})
        return load(assign=chosen, startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends))

    part = {row.queueOffset: bytes(row.body) for row in between(first, last).collect()}
    assert part == {offset: body for offset, body in of_queue.items() if first <= offset < last}
    # A broker is asked for the first row of a later time, and names one of the last batch.
    tomorrow = str(int(time.time() * 1000) + 24 * 3_600_000)
    wait_for(lambda: messages_in(cluster.name_server, topic) == 500)
    assert (
        load(endingTimestamp=tomorrow).count()
        == load(startingTimestamp="1", startingOffsetsByTimestampStrategy="latest").count()
        == 500
    )
    assert load(startingTimestamp=tomorrow, startingOffsetsByTimestampStrategy="latest").count() == 0
    split = load(startingOffsets=receipt(metrics), maxRecordsPerPartition="70")
    assert Counter(bytes(row.body).decode() for row in split.collect()) == Counter(f"body-{n}" for n in range(500))


def test_names_of_a_namespace_are_read_without_it(
    spark: SparkSession, topic: str, metrics: Metrics, save: Save, load: Load
) -> None:
    save(spark.range(3).selectExpr("string(id) AS body"), namespace="ns1")
    rows = load(startingOffsets=receipt(metrics), namespace="ns1").collect()
    assert sorted((row.topic, bytes(row.body)) for row in rows) == [(topic, b"0"), (topic, b"1"), (topic, b"2")]


def kept(frame: DataFrame) -> Counter[Any]:
    """Return the columns that a copy of a topic keeps."""
    return Counter(
        (bytes(row.body), row.tags, row["keys"], row.flag, tuple(sorted(user_properties(row.properties).items())))
        for row in frame.collect()
    )


def test_a_copy_and_its_copy_keep_body_tags_keys_flag_and_properties(
    spark: SparkSession, topic: str, metrics: Metrics, save: Save, load: Load
) -> None:
    save(spark.createDataFrame(ODD_ROWS[:-2], COLUMNS), rowId="true")
    original = load(startingOffsets=receipt(metrics))
    copies = []
    source = original
    for number in (1, 2):
        name = f"{topic}-copy-{number}"
        save(source, topic=name, keepRowId="true")
        copies.append(source := load(startingOffsets=receipt(metrics)))
        assert {row.topic for row in source.select("topic").collect()} == {name}
    assert kept(original) == kept(copies[0]) == kept(copies[1])
    assert len(kept(original)) == len(ODD_ROWS) - 2


def test_rows_that_a_retry_has_stored_twice_are_read_once_by_dedupe(
    spark: SparkSession, small_record_batches: None, cluster: SharedCluster, topic: str, save: Save, load: Load
) -> None:
    rows = 8_000
    frame = numbered(spark, rows, 100, partitions=2)
    late = failing_late(frame, cluster.name_server, topic, rows // 2)
    save(late, rowId="true", batchBytes="16k")
    read_topic(cluster.name_server, topic, rows, key=lambda message: message.properties["KEYS"])
    read = load()
    once = dedupe(read).groupBy().agg(F.count("*"), F.count_distinct("keys")).first()
    assert once is not None
    assert read.count() > rows
    assert tuple(once) == (rows, rows)
