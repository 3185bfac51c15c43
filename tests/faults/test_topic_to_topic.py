"""A stream from one topic to another whose driver is killed within a micro-batch: each row gets the same id again."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import rocketmq_spark
from rocketmq_spark import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.auditor import ROW_ID, audit, numbered_rows
from tests.support.cluster import SharedCluster
from tests.support.java import Java
from tests.support.processes import PROGRAMS, Submission, wait_for
from tests.support.writes import WIDTH, await_messages, keys_of, messages_in, rows

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

ROWS = 20_000


@pytest.mark.long
def test_dedupe_finds_every_repeat_of_a_killed_stream(
    cluster: SharedCluster,
    spark: SparkSession,
    metrics: Metrics,
    topic: str,
    make_topic: Callable[..., str],
    java: Java,
    tmp_path: Path,
) -> None:
    # One task reads all queues, which are on two brokers.
    source = {"nameServer": cluster.name_server, "subscribe": make_topic("NORMAL", f"{topic}-source", queues=8)}
    target = make_topic("NORMAL", queues=4)
    with Producer("feed", name_server=cluster.name_server) as producer:
        producer.send_arrow(rows(ROWS), source["subscribe"])
    wait_for(lambda: messages_in(cluster.name_server, source["subscribe"]) == ROWS)

    def start(cores: int, **options: str) -> Submission:
        arguments: dict[str, Any] = {
            "master": f"local[{cores}]",
            "source": {**source, "startingOffsets": "earliest"},
            "options": {
                "nameServer": cluster.name_server,
                "topic": target,
                "rowId": "true",
                "checkpointLocation": str(tmp_path / "checkpoint"),
                **options,
            },
        }
        program = PROGRAMS / "copy_stream.py"
        return Submission([sys.executable, str(program), json.dumps(arguments)], os.environ, tmp_path)

    # At this rate a micro-batch lasts seconds on any machine, so the kill falls into it.
    driver = start(2, maxRatePerSecond="5000", maxRateTasks="1", batchBytes="16k")
    await_messages(cluster.name_server, target, ROWS // 4)
    driver.kill()
    before = messages_in(cluster.name_server, target)
    assert before < ROWS
    # Other cores, and other batches.
    assert sum(start(1).result()) == ROWS
    read = spark.read.format("rocketmq").option("nameServer", cluster.name_server).load(target)
    assert read.count() > ROWS
    audit(java, cluster.name_server, numbered_rows(target, range(ROWS), WIDTH, repeats=True), marks=[ROW_ID]).check()
    once = Counter(row.keys for row in rocketmq_spark.dedupe(read).select("keys").collect())
    assert once == Counter(keys_of(ROWS))
