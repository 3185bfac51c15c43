"""`delivery=effectivelyOnce` on real brokers: failed writes that are repeated, streams, and `foreachBatch`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr, rand

import rocketmq_spark
from rocketmq_spark import Producer
from rocketmq_spark.errors import InputChangedError, OptionError
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.processes import wait_for
from tests.support.streams import write_files

pytestmark = [pytest.mark.spark, pytest.mark.integration]

PARTITION = 20_000
ROWS = [f"row-{number}" for number in range(3 * PARTITION)]


@pytest.fixture(autouse=True)
def queues(make_topic: Callable[..., str]) -> None:
    make_topic("NORMAL")


@pytest.fixture
def once(topic: str) -> dict[str, str]:
    key = {"transactionalKey": "a-key-of-these-tests"}
    return {
        **key,
        "delivery": "effectivelyOnce",
        "transactionalId": f"job-{topic}",
        "fenceMs": "100",
        "batchBytes": "4096",
    }


@pytest.fixture
def visible(load: Callable[..., DataFrame]) -> Callable[[], Counter[str]]:
    """Return the rows that consumers see, with the number of their copies."""
    return lambda: Counter(bytes(row.body).decode() for row in load().select("body").collect())


def rows(spark: SparkSession, *, broken: bool) -> DataFrame:
    """Return the rows in three partitions. If `broken`, the last row of each has a tag that no broker takes."""
    last = f"{int(broken)} = 1 and id % {PARTITION} = {PARTITION - 1}"
    return spark.range(0, len(ROWS), 1, 3).selectExpr("concat('row-', id) as body", f"if({last}, 'a|b', 'a') as tags")


def test_a_failed_write_is_continued(
    spark: SparkSession,
    save: Callable[..., None],
    once: dict[str, str],
    metrics: Metrics,
    load: Callable[..., DataFrame],
    visible: Callable[[], Counter[str]],
) -> None:
    for _ in range(2):
        with pytest.raises(PySparkException, match="tags"):
            save(rows(spark, broken=True), writeId="monday", **once)
    save(rows(spark, broken=False), writeId="monday", **once)
    assert visible() == Counter(ROWS)
    assert metrics.recovered_rows()["recovered"] > 0
    # Also rows that were found stored are in the receipt of the write.
    by_receipt = load(startingOffsets=json.dumps(metrics.to_dict())).select("body").collect()
    assert Counter(bytes(row.body).decode() for row in by_receipt) == Counter(ROWS)
    # The write is complete, so it is not read again.
    save(rows(spark, broken=False), writeId="monday", **once)
    save(rows(spark, broken=False), writeId="tuesday", **once)
    assert visible() == Counter(ROWS * 2)


def test_changed_input_fails_with_the_row(spark: SparkSession, save: Callable[..., None], once: dict[str, str]) -> None:
    with pytest.raises(PySparkException, match="tags"):
        save(rows(spark, broken=True), writeId="monday", **once)
    changed = rows(spark, broken=False).selectExpr("upper(body) as body", "tags")
    with pytest.raises(
        PySparkException, match=r"partition \d: .* stored \d+ rows that the partition does not have now"
    ):
        save(changed, writeId="monday", **once)


def shuffled(spark: SparkSession, seed: int, *, broken: bool, partitions: int | None = None) -> DataFrame:
    """Return rows, 100 of them equal, in shuffled partitions with an order of their own.

    If `broken`, the last row of each partition has a tag that no broker takes. Without `partitions`, adaptive execution
    chooses their number.
    """
    last = "number < 8"
    frame = spark.range(0, len(ROWS), 1, 4).selectExpr(
        "id as number", f"if(id % {len(ROWS) // 100} = 9, 'same', concat('row-', id)) as body"
    )
    frame = frame.selectExpr("*", f"if({int(broken)} = 1 and {last}, 'a|b', 'a') as tags", "'key' as shardingKey")
    by = frame["number"] % 8
    frame = frame.repartition(by) if partitions is None else frame.repartition(partitions, by)
    return frame.sortWithinPartitions(expr(last), rand(seed)).drop("number")


EXPECTED = Counter("same" if number % (len(ROWS) // 100) == 9 else row for number, row in enumerate(ROWS))


@pytest.mark.parametrize("partitions", [3, pytest.param(None, marks=pytest.mark.long)], ids=["repartition", "adaptive"])
def test_rows_that_a_shuffle_returns_in_another_order_are_stored_once(
    spark: SparkSession,
    save: Callable[..., None],
    once: dict[str, str],
    metrics: Metrics,
    visible: Callable[[], Counter[str]],
    partitions: int | None,
) -> None:
    with pytest.raises(PySparkException, match="tags"):
        save(shuffled(spark, 1, broken=True, partitions=partitions), writeId="monday", **once)
    assert sum(visible().values()) > 0
    save(shuffled(spark, 2, broken=False, partitions=partitions).drop("shardingKey"), writeId="tuesday", **once)
    assert not EXPECTED - visible()
    save(shuffled(spark, 3, broken=False, partitions=partitions), writeId="monday", **once)
    assert visible() == EXPECTED + EXPECTED
    recovered = metrics.recovered_rows()
    assert recovered["recovered"] > 0
    assert recovered["repeated"] == 0
    assert EXPECTED["same"] == 100


def test_an_ordered_write_needs_the_same_order(
    spark: SparkSession, save: Callable[..., None], once: dict[str, str], visible: Callable[[], Counter[str]]
) -> None:
    with pytest.raises(PySparkException, match="tags"):
        save(shuffled(spark, 1, broken=True, partitions=3), writeId="monday", ordered="true", **once)
    save(shuffled(spark, 1, broken=False, partitions=3), writeId="monday", ordered="true", **once)
    assert visible() == EXPECTED
    with pytest.raises(PySparkException, match="tags"):
        save(shuffled(spark, 1, broken=True, partitions=3), writeId="tuesday", ordered="true", **once)
    with pytest.raises(PySparkException, match="no row has its content with its number"):
        save(shuffled(spark, 2, broken=False, partitions=3), writeId="tuesday", ordered="true", **once)


def test_a_copy_of_a_topic_has_no_tokens_of_the_first_write(
    spark: SparkSession,
    save: Callable[..., None],
    once: dict[str, str],
    make_topic: Callable[..., str],
    load: Callable[..., DataFrame],
    visible: Callable[[], Counter[str]],
) -> None:
    save(rows(spark, broken=False).limit(100), writeId="monday", **once)
    first = load().cache()
    (tokens,) = {len({row.properties["SPARK_ATTEMPT"] for row in first.select("properties").collect()})}
    assert tokens == 1
    save(first.drop("topic"), writeId="tuesday", **once)
    again = load().select("properties").collect()
    assert len({row.properties["SPARK_ATTEMPT"] for row in again}) == 2
    save(first.drop("topic"))
    assert sum("SPARK_ATTEMPT" in row.properties for row in load().select("properties").collect()) == 200
    assert sum(visible().values()) == 300


def files(folder: Path, number: int) -> None:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / f"{number}.txt").write_text("\n".join(ROWS[number * 500 : number * 500 + 500]))


def test_a_repeated_micro_batch_is_stored_once(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    once: dict[str, str],
    metrics: Metrics,
    visible: Callable[[], Counter[str]],
    tmp_path: Path,
) -> None:
    def stream() -> None:
        write_files(spark, cluster.name_server, topic, tmp_path, "checkpoint", **once)

    for number in range(4):
        files(tmp_path, number)
        if number % 2:
            stream()
    assert metrics.recovered_rows()["recovered"] == 0
    # Spark repeats the last micro-batch if it was not noted as complete.
    for name in (tmp_path / "checkpoint" / "commits").glob("*3*"):
        name.unlink()
    stream()
    assert visible() == Counter(ROWS[:2_000])
    assert metrics.recovered_rows() == {"recovered": 500, "repeated": 0}


@pytest.mark.parametrize(
    "by_function", [True, pytest.param(False, marks=pytest.mark.long)], ids=["foreach_batch", "writeId"]
)
def test_foreach_batch_stores_a_repeated_micro_batch_once_from_any_thread(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    once: dict[str, str],
    save: Callable[..., None],
    visible: Callable[[], Counter[str]],
    tmp_path: Path,
    *,
    by_function: bool,
) -> None:
    failures = [0, 2]
    write_batch = rocketmq_spark.foreach_batch(nameServer=cluster.name_server, topic=topic, **once)

    def write_as_named(frame: DataFrame, batch_id: int) -> None:
        save(frame, writeId=f"query-1-{batch_id}", **once)

    def write(frame: DataFrame, batch_id: int) -> None:
        # A thread of the user's has none of the local properties that name query and micro-batch.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(write_batch if by_function else write_as_named, frame, batch_id).result()
        if batch_id in failures:
            failures.remove(batch_id)
            raise ValueError("the function failed after the write")

    def stream() -> None:
        query = (
            spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).text(str(tmp_path / "in"))
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )  # fmt: skip
        query.awaitTermination(180)

    for number in range(3):
        files(tmp_path, number)
    for _ in range(2):
        with pytest.raises(PySparkException, match="the function failed"):
            stream()
    stream()
    assert visible() == Counter(ROWS[:1_500])


def test_a_write_without_an_identity_is_refused(
    spark: SparkSession, cluster: SharedCluster, topic: str, save: Callable[..., None], once: dict[str, str]
) -> None:
    frame, where = spark.range(1).selectExpr("'x' as body"), {"nameServer": cluster.name_server, "topic": topic}
    why = "requires writeId, by which a repetition of the write is recognised: .*foreach_batch"
    for delivery in ("effectivelyOnce", "exactlyOnce"):
        options = {**once, "delivery": delivery}
        with pytest.raises(PySparkException, match=why):
            save(frame, **options)
        with pytest.raises(OptionError, match=why):
            rocketmq_spark.write(frame, **where, **options)
        with pytest.raises(OptionError, match="foreach_batch identifies each micro-batch by transactionalId"):
            rocketmq_spark.foreach_batch(writeId="monday", **where, **options)(frame, 0)
    with Producer("anonymous", name_server=cluster.name_server) as producer, pytest.raises(OptionError, match=why):
        producer.send_arrow(pa.table({"body": ["x"]}), topic=topic, **once)


def test_send_arrow_continues_a_write(
    cluster: SharedCluster, topic: str, once: dict[str, str], visible: Callable[[], Counter[str]], metrics: Metrics
) -> None:
    table = pa.table({"body": pa.array([row.encode() for row in ROWS])})
    stored = 0

    def dying() -> Iterator[pa.RecordBatch]:
        yield from table.slice(0, 20_000).to_batches()
        wait_for(lambda: visible().total() > stored)
        raise ValueError("broken input")

    with Producer("effectively-once", name_server=cluster.name_server) as producer:
        options: dict[str, Any] = {**once, "writeId": "monday"}
        with pytest.raises(ValueError, match="broken input"):
            producer.send_arrow(dying(), topic=topic, **options)
        summary = producer.send_arrow(table, topic=topic, **options)
        assert summary.recovered_rows()["recovered"] > 0
        assert visible() == Counter(ROWS)
        stored = len(ROWS)
        with pytest.raises(ValueError, match="broken input"):
            producer.send_arrow(dying(), topic=topic, **{**options, "writeId": "tuesday"})
        changed = table.set_column(0, "body", pa.array([b"other"] * len(ROWS)))
        with pytest.raises(
            InputChangedError,
            match=r"partition 0: an earlier attempt at this write stored \d+ rows that the partition does",
        ):
            producer.send_arrow(changed, topic=topic, **{**options, "writeId": "tuesday"})
