"""`onUnreadable`: messages that brokers store and that no client can read, in batches and streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.arrow.read_columns import column_names, spark_schema_of
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.reading import fill, send
from tests.support.streams import Kept

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Load = Callable[..., DataFrame]


def test_unreadable_messages_fail_a_batch_unless_an_option_skips_them(
    cluster: SharedCluster, topic: str, metrics: Metrics, load: Load
) -> None:
    stored = fill(cluster, topic)
    readable = [(offset, body) for offset, (body, sys_flag) in enumerate(stored) if not sys_flag]
    place = f"{topic}/{cluster.brokers[0].name}/0, the message at offset 1 cannot be read"
    for options in ({}, {"failOnDataLoss": "false"}):
        frame = load(**options)
        assert (
            frame.schema.simpleString()
            == f"struct<{spark_schema_of(column_names()).replace(', ', ',').replace(' ', ':')}>"
        )
        with pytest.raises(PythonException, match=f"{place}.*onUnreadable=skip.*onUnreadable=raw"):
            frame.collect()
    frame = load(onUnreadable="skip")
    assert frame.columns == load().columns
    assert sorted((row.queueOffset, bytes(row.body)) for row in frame.collect()) == readable
    assert metrics.skipped_by_reads() == {topic: len(stored) - len(readable)}
    assert any(topic in note for note in metrics.summary.notes())
    assert metrics.writes() == []


def test_raw_delivers_stored_bytes_with_the_reason(
    cluster: SharedCluster, topic: str, metrics: Metrics, load: Load
) -> None:
    stored = fill(cluster, topic, inner=True)
    rows = sorted(load(onUnreadable="raw").collect(), key=lambda row: row.queueOffset)
    assert [bytes(row.body) for row in rows] == [body for body, _ in stored]
    assert [row.unreadable is not None for row in rows] == [sys_flag != 0 for _, sys_flag in stored]
    reasons = [row.unreadable for row in rows if row.unreadable]
    for reason, words in zip(reasons, ("ZLIB", "compression type 7", "67108864", "inner batch"), strict=True):
        assert words in reason
    assert {row.tags for row in rows} == {"a"}
    assert metrics.skipped_by_reads() == {}


def test_restart_with_skip_reads_past_an_unreadable_message(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    other, broker = f"{topic}-other", cluster.brokers[0].name
    queues = [MessageQueue(name, broker, 0) for name in (topic, other)]
    for queue in queues:
        fill(cluster, queue.topic)
    kept = Kept()

    def run(**options: Any) -> None:
        given = {"nameServer": cluster.name_server, "subscribe": f"{topic},{other}", "startingOffsets": "earliest"}
        frame = spark.readStream.format("rocketmq").options(**given, **options).load()
        query = (
            frame.selectExpr("concat(topic, '/', queueOffset) AS keys", "brokerName", "queueId", "body")
            .writeStream.foreachBatch(kept)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)

    # Also after a restart, and failOnDataLoss has no influence.
    for options in ({}, {"failOnDataLoss": "false"}):
        with pytest.raises(StreamingQueryException, match="the message at offset 1 cannot be read"):
            run(**options)
    assert kept.keys == {}
    run(onUnreadable="skip")
    for queue in queues:
        send(cluster, queue, [(b"type seven", 0x701), (b"readable", 0)])
    run(onUnreadable="skip")
    assert kept.keys == {f"{name}/{offset}": 1 for name in (topic, other) for offset in (0, 2, 4, 6, 8)}
    assert metrics.skipped_by_reads() == {topic: 4, other: 4}
