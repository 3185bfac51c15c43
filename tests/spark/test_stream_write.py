"""`df.writeStream` to real brokers: stop, restart from the checkpoint, and nothing is missing."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rocketmq_spark.spark.report import Metrics
from tests.reading import read_topic
from tests.streams import run_until, start

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_a_query_that_is_stopped_and_restarted_sends_every_row(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, tmp_path: Path
) -> None:
    sent = sum(run_until(start(spark, topic, tmp_path, nameServer=cluster.name_server), 2) for _ in range(2))
    messages = read_topic(cluster.name_server, topic, sent, key=attrgetter("body"))
    bodies = [int(message.body) for message in messages]
    # The rate source counts on from its checkpoint. A micro-batch that the stop cut short is sent again by the restart;
    # of the last one, some rows may be there, beyond those that were reported.
    assert set(bodies) >= set(range(sent))
    reported = sum(facts["rows"] for facts in metrics.to_dict().values())
    assert reported >= sent


def test_available_now_sends_what_there_is_once(
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
