"""`df.writeStream` to real brokers: no row is missing after a stop and a restart from the checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark import OptionError, dedupe
from rocketmq_spark.model.hashes import ROW_ID
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.spark.register import unregister
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.spark.spark_api import STREAM_ARROW_WRITER
from tests.support.cluster import SharedCluster, create_topic
from tests.support.links import TcpProxy, linked_cluster
from tests.support.processes import wait_for
from tests.support.reading import read_topic
from tests.support.streams import numbers, run_until, start
from tests.support.writes import messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def row_id(message: MessageExt) -> str:
    return message.properties[ROW_ID]


def test_a_query_that_is_stopped_and_restarted_sends_every_row(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    sent = sum(run_until(start(spark, topic, tmp_path, nameServer=cluster.name_server), 2) for _ in range(2))
    messages = read_topic(cluster.name_server, topic, sent, key=attrgetter("body"))
    bodies = [int(message.body) for message in messages]
    # The rate source continues from its checkpoint. The restart resends a micro-batch that the stop interrupted. Some
    # rows of the last, interrupted micro-batch may be stored besides the reported ones.
    assert set(bodies) >= set(range(sent))
    reported = sum(facts["rows"] for facts in metrics.to_dict().values())
    assert reported >= sent


def test_available_now_sends_each_row_once(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    spark.range(1000).selectExpr("cast(id as string) as body").write.parquet(str(tmp_path / "in"))
    query = (
        spark.readStream.schema("body string").parquet(str(tmp_path / "in"))
        .writeStream.format("rocketmq")
        .option("nameServer", cluster.name_server)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(topic)
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert sorted(int(message.body) for message in read_topic(cluster.name_server, topic, 1000)) == list(range(1000))


def held_up(gate: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Pass all rows on; a partition ends only when the gate exists."""

    def passed_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        wait_for(gate.exists)

    return passed_on


@pytest.mark.parametrize("partitions", [2, 3], ids=["the same parallelism", "another parallelism"])
def test_interrupted_micro_batch_is_resent_and_dedupe_drops_only_repeats(
    spark: SparkSession,
    small_record_batches: None,
    cluster: SharedCluster,
    topic: str,
    metrics: Metrics,
    tmp_path: Path,
    partitions: int,
) -> None:
    # Several equal rows of each kind: only their position distinguishes them. On PySpark 4.0 the sink sends the first
    # rows of a partition once it has 10,000.
    rows, kinds, gate = 24_000 if STREAM_ARROW_WRITER is None else 8_000, 2_000, tmp_path / "gate"
    create_topic(cluster, topic, "NORMAL")

    def body(kind: Any) -> str:
        return f"{kind}{'.' * 100}"

    def send(name_server: str, partitions: int) -> Any:
        frame = numbers(spark, rows, partitions).selectExpr(f"concat(value % {kinds}, repeat('.', 100)) as body")
        return (
            frame.mapInArrow(held_up(gate), frame.schema)
            .writeStream.format("rocketmq")
            .options(nameServer=name_server, topic=topic, rowId="true", batchBytes="16k")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(once=True)
            .start()
        )

    brokers = [broker.address for broker in cluster.brokers]
    with linked_cluster(cluster.name_server, brokers) as (name_server, _):
        query = send(name_server, 2)
        try:
            wait_for(lambda: messages_in(cluster.name_server, topic) > 0)
        finally:
            query.stop()
        assert query.exception() is None
        assert query.recentProgress == []
    # The closed links let no request of the first run pass any more.
    gate.touch()
    again = send(cluster.name_server, partitions)
    assert again.awaitTermination(120)
    assert [(batch.batchId, batch.numInputRows) for batch in again.recentProgress] == [(0, rows)]
    assert again.id == query.id

    stored = read_topic(cluster.name_server, topic, rows, key=row_id)
    places = {tuple(row_id(message).split("/")[:2]) for message in stored}
    assert places == {(query.id, "0")}
    read = spark.read.format("rocketmq").option("nameServer", cluster.name_server).load(topic)
    kept = Counter(bytes(row.body).decode() for row in dedupe(read).collect())
    sent = Counter({body(kind): rows // kinds for kind in range(kinds)})
    assert len(stored) > rows
    if partitions == 2:
        assert kept == sent
    else:
        # Rows have other positions, and so other ids, in the second run: repeats remain, and no row is missing.
        assert sent <= kept <= Counter(message.body.decode() for message in stored)
        assert kept.total() > rows


def test_connections_and_routes_are_reused_by_micro_batches(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    create_topic(cluster, topic, "NORMAL")
    batches = 8
    with (
        linked_cluster(cluster.name_server, [broker.address for broker in cluster.brokers]) as (address, links),
        TcpProxy(address) as name_server,
    ):
        # With `ordered` the driver looks up a route for every micro-batch, and again for its commit.
        query = (
            numbers(spark, 100).selectExpr("cast(value as string) as body", "'k' || value as shardingKey")
            .writeStream.format("rocketmq")
            .options(nameServer=name_server.address, topic=topic, ordered="true")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )  # fmt: skip
        sent = run_until(query, batches)
        # At most four Python workers run tasks in this session, and two processes of the driver look up routes.
        assert max(link.accepted for link in links) <= 6
        assert name_server.accepted <= 6 < 2 * batches
    found = Counter(int(message.body) for message in read_topic(cluster.name_server, topic, sent))
    assert set(found) >= set(range(sent))


def by_changes(counts: DataFrame, options: dict[str, str]) -> Any:
    def write(changed: DataFrame, batch_id: int) -> None:
        body = f"concat({batch_id}, ': ', body) as body"
        changed.selectExpr(body).write.format("rocketmq").options(**options).save()

    return counts.writeStream.outputMode("update").foreachBatch(write)


def as_a_whole(counts: DataFrame, options: dict[str, str]) -> Any:
    return counts.writeStream.outputMode("complete").format("rocketmq").options(**options)


@pytest.mark.parametrize(
    ("write", "second"),
    [
        (as_a_whole, ["0 x 8", "1 x 10", "2 x 2"]),
        (by_changes, ["1: 1 x 10", "1: 2 x 2"]),
    ],
    ids=["complete", "foreachBatch"],
)
def test_complete_mode_sends_whole_result_and_foreach_batch_changed_rows(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    metrics: Metrics,
    tmp_path: Path,
    write: Callable[[DataFrame, dict[str, str]], Any],
    second: list[str],
) -> None:
    first = ["0 x 8", "1 x 2"] if write is as_a_whole else ["0: 0 x 8", "0: 1 x 2"]
    counts = numbers(spark, 10).selectExpr("cast((value + 2) div 10 as int) as kind").groupBy("kind").count()
    bodies = counts.selectExpr("concat(kind, ' x ', count) as body")
    options = {"nameServer": cluster.name_server, "topic": topic}
    for _ in range(2):
        query = write(bodies, options).option("checkpointLocation", str(tmp_path)).trigger(once=True).start()
        assert query.awaitTermination(120)
    stored = read_topic(cluster.name_server, topic, len(first + second))
    assert Counter(message.body.decode() for message in stored) == Counter(first + second)
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == len(stored)


def test_writes_within_foreach_batch_name_their_query_and_micro_batch(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    path = tmp_path / "sink.jsonl"
    sink = {"nameServer": cluster.name_server, "topic": topic, "metricsPath": str(path)}
    errors: list[str] = []

    def write(batch: DataFrame, batch_id: int) -> None:
        for body in ("'a' || value", "'b' || value"):
            batch.selectExpr(f"{body} as body").write.format("rocketmq").options(**sink).save()
        try:
            batch.selectExpr("cast(null as string) as body").write.format("rocketmq").options(**sink).save()
        except PySparkException as exc:
            errors.append(str(exc))

    query = (
        numbers(spark, 10).writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(once=True)
        .start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert query.exception() is None
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [(line["write_id"], line["batch_id"]) for line in lines] == [(query.id, 0)] * 2
    assert [sum(numbers["rows"] for numbers in line["brokers"].values()) for line in lines] == [10, 10]
    assert len({line["save_id"] for line in lines} - {query.id, None}) == 2
    [error] = errors
    assert f"InvalidRowError: micro-batch 0 of query {query.id}: " in error


def test_update_mode_is_refused_by_spark(
    spark: SparkSession, cluster: SharedCluster, topic: str, tmp_path: Path
) -> None:
    counts = numbers(spark, 10).groupBy("value").count().selectExpr("cast(value as string) as body")
    writer = counts.writeStream.format("rocketmq").options(nameServer=cluster.name_server, topic=topic)
    with pytest.raises(PySparkException, match="does not support Update mode"):
        writer.outputMode("update").option("checkpointLocation", str(tmp_path)).start().awaitTermination(60)


def test_continuous_trigger_is_refused(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    """Spark passes no row to a Python sink with this trigger, and only logs an error of its commit."""
    rows = spark.readStream.format("rate").load().selectExpr("cast(value as string) as body")
    writer = rows.writeStream.option("checkpointLocation", str(tmp_path)).trigger(continuous="100 milliseconds")
    writer = writer.options(nameServer=cluster.name_server, topic=topic, metricsPath=str(tmp_path / "metrics"))
    for begin in (lambda: writer.format("rocketmq").start(), lambda: writer.start(format="RocketMQ")):
        with pytest.raises(OptionError, match="passes no row to a sink in Python"):
            begin()
    # A session that is not registered, or a program in Scala, has no such check. There no epoch is committed.
    unregister()
    query = writer.format("rocketmq").start()
    wait_for(lambda: len(list((tmp_path / "offsets").glob("[0-9]*"))) >= 3 or query.exception() is not None)
    query.stop()
    assert list((tmp_path / "commits").glob("[0-9]*")) == []
    assert not (tmp_path / "metrics").exists()


def test_other_triggers_and_formats_start_after_a_continuous_trigger(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("cast(value as string) as body")
    noop = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "noop"))
    query = noop.trigger(continuous="1 second").start()
    # A stop before the tasks run can wait forever.
    wait_for(lambda: any((tmp_path / "noop" / "offsets").glob("[0-9]*")) or query.exception() is not None)
    query.stop()
    writer = rows.writeStream.format("rocketmq").options(nameServer=cluster.name_server, topic=topic)
    writer = writer.option("checkpointLocation", str(tmp_path / "sink")).trigger(continuous="1 second")
    writer.trigger(once=True).start().awaitTermination(60)
