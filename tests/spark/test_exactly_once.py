"""`delivery=exactlyOnce` on real brokers: batch writes, streams, failures, and drivers that died."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.streams import write_files
from tests.support.two_phase import Driver

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROWS = [f"row-{number}" for number in range(3_000)]


@pytest.fixture(autouse=True)
def queues(make_topic: Callable[..., str]) -> None:
    make_topic("NORMAL")


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    return spark.range(len(ROWS)).repartition(3).selectExpr("concat('row-', id) as body")


@pytest.fixture
def once(topic: str) -> dict[str, Any]:
    key = {"transactionalKey": "a-key-of-these-tests"}
    return {**key, "delivery": "exactlyOnce", "transactionalId": f"job-{topic}", "transactionTimeoutMs": "20000"}


@pytest.fixture
def visible(load: Callable[..., DataFrame]) -> Callable[[], Counter[str]]:
    """Return the rows that consumers see, with the number of their copies."""
    return lambda: Counter(bytes(row.body).decode() for row in load().select("body").collect())


@pytest.fixture
def dead_driver(cluster: SharedCluster, topic: str, once: dict[str, Any]) -> Iterator[Driver]:
    driver = Driver(cluster.name_server, topic=topic, **once)
    yield driver.open()
    driver.close()


def test_a_batch_write_is_visible_once(
    rows: DataFrame, save: Callable[..., None], once: dict[str, str], visible: Callable[[], Counter[str]]
) -> None:
    save(rows, writeId="monday", **once)
    assert visible() == Counter(ROWS)


@pytest.mark.parametrize("delivery", ["exactlyOnce", "effectivelyOnce"])
def test_a_write_id_is_written_once_and_its_repetition_is_warned_of(
    rows: DataFrame,
    cluster: SharedCluster,
    topic: str,
    save: Callable[..., None],
    once: dict[str, str],
    metrics: Metrics,
    visible: Callable[[], Counter[str]],
    caplog: pytest.LogCaptureFixture,
    delivery: str,
) -> None:
    options = {**once, "delivery": delivery}
    for write_id in ("monday", "monday", "tuesday"):
        save(rows, writeId=write_id, **options)
    assert visible() == Counter(ROWS * 2)
    assert metrics.skipped_writes() == ["write monday"]
    assert "write monday was completed or decided before: its rows were not written." in metrics.notes()
    # The planner of `save` is another process, that of this function is not.
    where = {"nameServer": cluster.name_server, "topic": topic}
    written = rocketmq_spark.write(rows.limit(7), **where, **options, writeId="tuesday")
    assert written.skipped_writes() == ["write tuesday"]
    [warning] = [record.getMessage() for record in caplog.records if "of this save" in record.getMessage()]
    now = datetime.now(timezone.utc)
    completed = re.fullmatch(
        r"write tuesday was completed at (.*) UTC: the rows of this save are not written. If they are other rows, "
        "write them with another writeId",
        warning,
    )
    assert completed is not None, warning
    age = now - datetime.strptime(completed[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
    assert timedelta(0) <= age < timedelta(hours=1)


def test_no_row_of_a_failed_write_is_visible(
    spark: SparkSession, save: Callable[..., None], once: dict[str, str], visible: Callable[[], Counter[str]]
) -> None:
    rows = spark.range(0, 2_000, 1, 2).selectExpr("if(id = 1999, null, concat('row-', id)) as body", "'a|b' as tags")
    with pytest.raises(PySparkException, match="tags"):
        save(rows, writeId="monday", **once)
    assert visible() == Counter()


def test_a_write_whose_driver_died_in_its_commit_is_completed(
    rows: DataFrame,
    save: Callable[..., None],
    once: dict[str, str],
    visible: Callable[[], Counter[str]],
    dead_driver: Driver,
) -> None:
    decided = [f"decided-{number}" for number in range(500)]
    dead_driver.decide_and_crash(decided, 200, Write("monday"))
    save(rows, writeId="monday", **once)
    assert visible() == Counter(decided)


def test_a_stream_writes_each_micro_batch_once(
    spark: SparkSession,
    cluster: Any,
    topic: str,
    once: dict[str, str],
    metrics: Metrics,
    visible: Callable[[], Counter[str]],
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    for file in range(4):
        (tmp_path / "in" / f"{file}.txt").write_text("\n".join(ROWS[file * 500 : file * 500 + 500]))
        if file % 2:
            write_files(spark, cluster.name_server, topic, tmp_path, "checkpoint", **once)
    assert visible() == Counter(ROWS[:2_000])
    # Spark repeats the last micro-batch if it was not noted as complete.
    for name in (tmp_path / "checkpoint" / "commits").glob("*3*"):
        name.unlink()
    write_files(spark, cluster.name_server, topic, tmp_path, "checkpoint", **once)
    assert visible() == Counter(ROWS[:2_000])


def test_a_stream_with_another_checkpoint_is_refused(
    spark: SparkSession,
    cluster: Any,
    topic: str,
    once: dict[str, str],
    metrics: Metrics,
    visible: Callable[[], Counter[str]],
    tmp_path: Path,
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.txt").write_text("\n".join(ROWS))
    write_files(spark, cluster.name_server, topic, tmp_path, "first", **once)
    with pytest.raises(
        PySparkException, match=r"checkpoint .*second: .*belongs to query .*, which has another checkpoint"
    ):
        write_files(spark, cluster.name_server, topic, tmp_path, "second", **once)
    assert visible() == Counter(ROWS)
    write_files(spark, cluster.name_server, topic, tmp_path, "third", startAnew="true", **once)
    assert visible() == Counter(ROWS * 2)


@pytest.mark.parametrize(
    ("columns", "options", "why"),
    [
        (("'x' as body", "1000L as delayMs"), {}, "column delayMs: not available with delivery=exactlyOnce"),
        (("'x' as body", "false as waitStoreMsgOK"), {}, "column waitStoreMsgOK: not available"),
        (("'x' as body",), {"transactionalId": "two words"}, "transactionalId"),
        (("'x' as body",), {"topic": "missing", "writeId": "w"}, "topic missing does not exist, .* create it first"),
        (("'x' as body",), {"delivery": "effectivelyOnce", "writeId": ""}, "writeId"),
    ],
)
def test_writes_that_cannot_be_exactly_once_are_refused(
    spark: SparkSession,
    save: Callable[..., None],
    once: dict[str, str],
    columns: tuple[str, ...],
    options: dict[str, str],
    why: str,
) -> None:
    with pytest.raises(PySparkException, match=why):
        save(spark.range(1).selectExpr(*columns), **{**once, "writeId": "monday", **options})
