"""`rocketmq_spark.write` and `foreach_batch`, which need no data source; the only sink on PySpark 3.5."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark
from rocketmq_spark.errors import OptionError, SchemaError
from tests.support.cluster import SharedCluster, create_topic
from tests.support.reading import read_topic

pytestmark = [pytest.mark.spark, pytest.mark.integration]

LAST = 999


@pytest.fixture
def options(cluster: SharedCluster, topic: str) -> dict[str, str]:
    return {"nameServer": cluster.name_server, "topic": create_topic(cluster, topic, "NORMAL")}


@pytest.fixture
def stored(cluster: SharedCluster, topic: str) -> Callable[[int], Counter[bytes]]:
    """Return the bodies that are stored; wait until their number is reached."""
    return lambda rows: Counter(message.body for message in read_topic(cluster.name_server, topic, rows))


def numbers(spark: SparkSession, *, broken: bool = False) -> DataFrame:
    """Return 1,000 rows. If `broken`, the last one has a tag that no broker takes."""
    tag = f"if({int(broken)} = 1 and id = {LAST}, 'a|b', 'a')"
    return spark.range(0, LAST + 1, 1, 3).selectExpr("concat('row-', id) AS body", f"{tag} AS tags")


BODIES = Counter(f"row-{number}".encode() for number in range(LAST + 1))


def test_every_row_of_a_write_is_stored_and_counted(
    spark: SparkSession, options: dict[str, str], stored: Callable[[int], Counter[bytes]]
) -> None:
    written = rocketmq_spark.write(numbers(spark), batchBytes="16k", **options)
    assert sum(broker["rows"] for broker in written.to_dict().values()) == LAST + 1
    assert written.reports == 3
    assert stored(LAST + 1) == BODIES


def test_a_frame_without_rows_is_written(spark: SparkSession, options: dict[str, str]) -> None:
    assert rocketmq_spark.write(numbers(spark).where("false"), **options).to_dict() == {}


def test_errors_name_option_column_and_row(spark: SparkSession, options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="batchBites"):
        rocketmq_spark.write(numbers(spark), batchBites=1, **options)
    with pytest.raises(SchemaError, match="no column body"):
        rocketmq_spark.write(numbers(spark).drop("body"), **options)
    with pytest.raises(Exception, match=r"partition 2, row 333.*tags"):
        rocketmq_spark.write(numbers(spark, broken=True), **options)


def test_a_rate_is_shared_by_the_tasks(spark: SparkSession, options: dict[str, str]) -> None:
    written = rocketmq_spark.write(numbers(spark), maxRatePerSecond=100_000, **options)
    assert sum(broker["rows"] for broker in written.to_dict().values()) == LAST + 1


def test_exactly_once_write_is_committed(
    spark: SparkSession, options: dict[str, str], stored: Callable[[int], Counter[bytes]]
) -> None:
    once = {"delivery": "exactlyOnce", "transactionalId": f"job-{options['topic']}", "writeId": "monday"}
    for _ in range(2):
        rocketmq_spark.write(numbers(spark), **once, **options)
    assert stored(LAST + 1) == BODIES


@pytest.mark.parametrize("delivery", ["effectivelyOnce", "exactlyOnce"])
def test_foreach_batch_writes_each_micro_batch_once(
    spark: SparkSession,
    options: dict[str, str],
    stored: Callable[[int], Counter[bytes]],
    tmp_path: Path,
    delivery: str,
) -> None:
    (tmp_path / "in").mkdir()
    for file in range(2):
        lines = "\n".join(f"row-{number}" for number in range(file * 500, file * 500 + 500))
        (tmp_path / "in" / f"{file}.txt").write_text(lines)
    once = {"delivery": delivery, "transactionalId": f"job-{options['topic']}", "fenceMs": "100"}

    def stream() -> None:
        lines = spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).text(str(tmp_path / "in"))
        writer = lines.writeStream.foreachBatch(rocketmq_spark.foreach_batch(**once, **options))
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination(180)

    stream()
    # Spark repeats the last micro-batch if it was not noted as complete.
    for name in (tmp_path / "checkpoint" / "commits").glob("*1*"):
        name.unlink()
    stream()
    assert stored(LAST + 1) == BODIES
    # A query with a new checkpoint begins again with micro-batch 0, whose rows are not those of the log.
    write_batch = rocketmq_spark.foreach_batch(**once, **options)
    with pytest.raises(Exception, match="has micro-batch 1 already, so the checkpoint is an old copy"):
        write_batch(numbers(spark), 0)


def test_two_writes_of_a_micro_batch_with_one_transactional_id_are_refused(
    spark: SparkSession, options: dict[str, str], make_topic: Callable[..., str]
) -> None:
    once = {"delivery": "exactlyOnce", "transactionalId": f"job-{options['topic']}"}
    rocketmq_spark.foreach_batch(**once, **options)(numbers(spark), 0)
    other = {**options, "topic": make_topic("NORMAL", f"{options['topic']}-2")}
    with pytest.raises(Exception, match="Give each query its own transactionalId"):
        rocketmq_spark.foreach_batch(**once, **other)(numbers(spark), 0)


def test_a_micro_batch_without_partitions_is_completed(spark: SparkSession, options: dict[str, str]) -> None:
    once = {"delivery": "effectivelyOnce", "transactionalId": f"job-{options['topic']}"}
    write_batch = rocketmq_spark.foreach_batch(**once, **options)
    write_batch(numbers(spark).where("false"), 0)
    write_batch(numbers(spark), 1)
    with pytest.raises(Exception, match="has micro-batch 1 already"):
        write_batch(numbers(spark), 0)
