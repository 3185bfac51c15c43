"""What newer releases of Spark add: names of streaming sources, and the profiler of data sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster
from tests.support.processes import PYSPARK

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.usefixtures("metrics"),
]

EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
PROFILER = "spark.sql.pyspark.dataSource.profiler"


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Set a setting of the session for this test."""
    names = []

    def put(name: str, value: str) -> None:
        names.append(name)
        spark.conf.set(name, value)

    yield put
    for name in names:
        spark.conf.unset(name)


@pytest.fixture
def send(spark: SparkSession, cluster: SharedCluster) -> Callable[..., None]:
    def send_text(topic: str, *texts: str) -> None:
        rows = spark.createDataFrame([(text,) for text in texts], "body string").coalesce(1)
        rows.write.format("rocketmq").options(nameServer=cluster.name_server, topic=topic).save()

    return send_text


@pytest.mark.skipif(PYSPARK < (4, 3), reason="PySpark before 4.3 keeps the offsets of sources by their order only")
def test_named_sources_keep_their_offsets_when_others_come_and_go(
    spark: SparkSession,
    cluster: SharedCluster,
    topic: str,
    settings: Callable[[str, str], None],
    send: Callable[..., None],
    tmp_path: Path,
) -> None:
    settings(EVOLUTION, "true")
    topics = {name: f"{topic}-{name}" for name in ("shop", "phone", "web")}

    def source(name: str) -> DataFrame:
        reader: Any = spark.readStream.format("rocketmq").option("nameServer", cluster.name_server)
        stream: DataFrame = reader.option("startingOffsets", "earliest").name(name).load(topics[name])
        return stream.selectExpr("cast(body AS string) AS body")

    def run(rows: DataFrame) -> set[str]:
        writer = rows.writeStream.format("json").option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.option("path", str(tmp_path / "rows")).trigger(availableNow=True).start()
        query.awaitTermination()
        found = [row.body for row in spark.read.schema("body string").json(str(tmp_path / "rows")).collect()]
        assert len(found) == len(set(found))
        return set(found)

    for name in topics:
        send(topics[name], f"{name} 1")
    assert run(source("shop").union(source("phone"))) == {"shop 1", "phone 1"}
    send(topics["shop"], "shop 2")
    added = run(source("web").union(source("phone")).union(source("shop")))
    assert added == {"shop 1", "shop 2", "phone 1", "web 1"}
    send(topics["phone"], "phone 2")
    send(topics["web"], "web 2")
    assert run(source("shop").union(source("web"))) == {*added, "web 2"}


@pytest.mark.skipif(PYSPARK < (4, 2), reason="PySpark before 4.2 has no profiler of data sources")
def test_the_profiler_of_data_sources_shows_planning_tasks_and_commit(
    spark: SparkSession,
    metrics: Metrics,
    topic: str,
    settings: Callable[[str, str], None],
    send: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings(PROFILER, "perf")
    send(topic, "a", "b")
    spark.profile.show(type="perf")
    shown = capsys.readouterr().out
    spark.profile.clear(type="perf")
    assert "Profile of write_into_data_source" in shown
    assert "Profile of commit_data_source_write" in shown
    assert "(write_partition)" in shown
    assert sum(broker["rows"] for broker in metrics.to_dict().values()) == 2
