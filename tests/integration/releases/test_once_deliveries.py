"""Writes with `effectivelyOnce` and `exactlyOnce` on every release, also if they fail or their driver is killed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from rocketmq_spark import Producer
from tests.support.auditor import Row, audit, numbered_rows
from tests.support.java import Java
from tests.support.processes import PATIENCE, PROGRAMS, Submission, wait_for
from tests.support.releases import ERROR, YES, ReleaseCluster, of
from tests.support.two_phase import WRITE, Driver
from tests.support.writes import WIDTH, await_messages, messages_in, rows, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]


def pieces(spark: SparkSession, count: int, *, broken: bool) -> DataFrame:
    """Return rows of `numbered_rows` in two partitions. If `broken`, no broker takes the tag of the last of each."""
    last = f"id % {count // 2} = {count // 2 - 1} AND {broken}"
    return spark.range(0, count, 1, 2).selectExpr(
        "rpad(cast(id AS string), 30, '.') AS body", "concat('k', id) AS keys", f"if({last}, 'a|b', 'a') AS tags"
    )


def once(job: str, **options: str) -> dict[str, str]:
    """Return the options of a once-delivery with its own log."""
    return {"transactionalId": f"job-{job}", "transactionTopic": f"log-{job}", "fenceMs": "1000", **options}


def check_once(servers: ReleaseCluster, topic: str, java: Java, count: int, tag: str | None = "a") -> None:
    """Fail unless each numbered row is stored once, in full."""
    await_messages(servers.name_server, topic, count)
    audit(java, servers.name_server, numbered_rows(topic, range(count), 30, tag=tag)).check()


def check_repeated_write(
    spark: SparkSession, servers: ReleaseCluster, topic: str, java: Java, delivery: str, visible: bool
) -> None:
    """Let a write fail twice in the middle, and repeat it twice; `visible`: rows of a failed write can be seen."""
    # Spark passes the rows of a partition in batches of 10,000.
    count, options = 40_000, once(topic, delivery=delivery, writeId="monday", batchBytes="4096")
    if delivery == "exactlyOnce":
        count = 24_000
    for _ in range(2):
        with pytest.raises(PySparkException, match="tags"):
            write(pieces(spark, count, broken=True), servers.name_server, topic, **options)
        if visible:
            await_messages(servers.name_server, topic, 1)
        else:
            assert messages_in(servers.name_server, topic) == 0
    for _ in range(2):
        write(pieces(spark, count, broken=False), servers.name_server, topic, **options)
        check_once(servers, topic, java, count)


def check_killed_stream(
    servers: ReleaseCluster, make: Callable[..., str], java: Java, folder: Path, delivery: str
) -> None:
    """Kill the driver of a stream from topic to topic in a micro-batch, and start it again."""
    source, target, count = make("-source"), make("-target"), 4_000
    with Producer("feed", name_server=servers.name_server) as producer:
        producer.send_arrow(rows(count), source)
    await_messages(servers.name_server, source, count)
    options = once(target, delivery=delivery, nameServer=servers.name_server, topic=target, batchBytes="4k")
    options |= {"checkpointLocation": str(folder / "checkpoint"), "transactionTimeoutMs": "30000"}

    def start(**more: str) -> Submission:
        reading = {"nameServer": servers.name_server, "subscribe": source, "startingOffsets": "earliest"}
        arguments = {"master": "local[2]", "source": reading, "options": {**options, **more}}
        program = str(PROGRAMS / "copy_stream.py")
        return Submission([sys.executable, program, json.dumps(arguments)], os.environ, folder)

    def begun() -> bool:
        # Half messages are in a system topic; the first record of the log comes before the first row.
        return messages_in(servers.name_server, f"log-{target}" if delivery == "exactlyOnce" else target) > 0

    # At this rate a micro-batch lasts seconds on any machine, so the kill falls into it.
    driver = start(maxRatePerSecond="400", maxRateTasks="1")
    wait_for(lambda: begun() or not driver.is_alive)
    driver.kill()
    assert messages_in(servers.name_server, target) < count
    assert sum(start().result(within=PATIENCE)) == count
    await_messages(servers.name_server, target, count)
    audit(java, servers.name_server, numbered_rows(target, range(count), WIDTH)).check()


def test_effectively_once_write_is_repeated_without_a_repeat_or_loss(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], metrics: Metrics, java: Java
) -> None:
    check_repeated_write(spark, servers, make(), java, "effectivelyOnce", visible=True)
    assert metrics.recovered_rows()["recovered"] > 0


def test_effectively_once_stream_survives_the_kill_of_its_driver(
    servers: ReleaseCluster, make: Callable[..., str], java: Java, tmp_path: Path
) -> None:
    check_killed_stream(servers, make, java, tmp_path, "effectivelyOnce")


def test_exactly_once_write_is_repeated_without_a_repeat_or_loss_or_refused(
    spark: SparkSession, servers: ReleaseCluster, release: str, make: Callable[..., str], metrics: Metrics, java: Java
) -> None:
    topic = make()
    if of("`exactlyOnce`", release) == YES:
        check_repeated_write(spark, servers, topic, java, "exactlyOnce", visible=False)
        return
    options = once(topic, delivery="exactlyOnce", writeId="monday")
    for _ in range(2):
        with pytest.raises(PySparkException, match="delivery=exactlyOnce is not possible with broker broker-"):
            write(pieces(spark, 100, broken=False), servers.name_server, topic, **options)
    assert messages_in(servers.name_server, topic) == 0


def test_exactly_once_stream_survives_the_kill_of_its_driver_or_is_refused(
    spark: SparkSession, servers: ReleaseCluster, release: str, make: Callable[..., str], java: Java, tmp_path: Path
) -> None:
    if of("`exactlyOnce`", release) == YES:
        check_killed_stream(servers, make, java, tmp_path, "exactlyOnce")
        return
    topic = make()
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    writer = frame.selectExpr("cast(value AS string) AS body").writeStream.format("rocketmq")
    options = once(topic, delivery="exactlyOnce", nameServer=servers.name_server, topic=topic)
    query = writer.options(**options, checkpointLocation=str(tmp_path / "refused")).start()
    with pytest.raises(StreamingQueryException, match="delivery=exactlyOnce is not possible with broker broker-"):
        query.awaitTermination(int(PATIENCE))
    assert messages_in(servers.name_server, topic) == 0


def test_a_crash_in_the_middle_of_a_commit_repeats_and_loses_no_row(
    servers: ReleaseCluster, release: str, make: Callable[..., str], java: Java
) -> None:
    if of("`exactlyOnce`", release) == ERROR:
        return
    topic, bodies = make(), [f"row-{number}" for number in range(200)]
    with contextlib.closing(Driver(servers.name_server, topic=topic, transactionTopic=f"log-{topic}")) as dead:
        dead.options = dead.brokers.options = replace(dead.options, transaction_timeout_ms=10_000)
        dead.open().decide_and_crash(bodies, 70)
    with contextlib.closing(Driver(servers.name_server, topic=topic, transactionTopic=f"log-{topic}")) as job:
        job.open().two_phase.finish(WRITE)
    await_messages(servers.name_server, topic, len(bodies))
    given = (Row(topic, body, body.encode()) for body in bodies)
    audit(java, servers.name_server, given, identity=(":(row-.*)",)).check("addedProperty")
