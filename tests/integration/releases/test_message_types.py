"""Delayed messages and compaction topics on every release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException

from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import MQClientException
from tests.support.auditor import Row, audit
from tests.support.java import Java
from tests.support.processes import PATIENCE, wait_for
from tests.support.releases import ERROR, ReleaseCluster, leave_out, of
from tests.support.writes import await_messages, messages_in, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]


def check_delays(
    servers: ReleaseCluster, topic: str, java: Java, load: Callable[..., DataFrame], delays: Sequence[int | None]
) -> None:
    """Compare rows of delays (ms) with what is stored: each once, and none before its time."""
    await_messages(servers.name_server, topic, len(delays))
    rows = (Row(topic, f"k{number}", f"{number}".encode(), keys=f"k{number}") for number in range(len(delays)))
    audit(java, servers.name_server, rows, ignored=("SPARK_ROW_ID",)).check()
    for row in load(topic).collect():
        waited = (row.storeTimestamp - row.bornTimestamp).total_seconds() * 1000
        # Brokers deliver at whole seconds of their timers.
        assert waited >= (delays[int(row["keys"][1:])] or 0) - 1_000, row


def test_delay_levels_are_obeyed(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], load: Callable[..., DataFrame], java: Java
) -> None:
    topic, levels = make(), [None, 1, 2, None, 1] * 20
    rows = [(str(number), f"k{number}", level) for number, level in enumerate(levels)]
    frame = spark.createDataFrame(rows, "body string, keys string, delayTimeLevel int")
    write(frame, servers.name_server, topic)
    check_delays(servers, topic, java, load, [{None: 0, 1: 1_000, 2: 5_000}[level] for level in levels])


@pytest.mark.parametrize("column", ["delayMs", "deliverTime"])
@pytest.mark.parametrize("named", ["option topic", "column topic"])
def test_times_of_delivery_are_obeyed_or_refused(
    spark: SparkSession,
    servers: ReleaseCluster,
    release: str,
    make: Callable[..., str],
    load: Callable[..., DataFrame],
    java: Java,
    column: str,
    named: str,
) -> None:
    refused = of("`delayMs`, `deliverTime`", release) == ERROR
    topic, delays = make("", "NORMAL" if refused else "MIXED" if release >= "5.3" else "DELAY"), [3_000] * 50
    value = "3000L" if column == "delayMs" else "current_timestamp() + INTERVAL 4 SECONDS"
    frame = spark.range(0, len(delays), 1, 2).selectExpr(
        "cast(id AS string) AS body", "concat('k', id) AS keys", f"{value} AS {column}", f"'{topic}' AS topic"
    )
    options = {"nameServer": servers.name_server}
    if named == "option topic":
        frame, options = frame.drop("topic"), {**options, "topic": topic}
    writer = frame.write.format("rocketmq").options(**options)
    if refused:
        with pytest.raises(PySparkException, match=f"column {column}: broker .* ignores times of delivery"):
            writer.save()
        assert messages_in(servers.name_server, topic) == 0
        with pytest.raises(MQClientException, match=r"which ignores the attributes \+message\.type=DELAY"):
            make("-delay", "DELAY")
    else:
        writer.save()
        check_delays(servers, topic, java, load, delays)


def test_compaction_topics_keep_the_newest_message_of_each_key(
    spark: SparkSession, servers: ReleaseCluster, release: str, topic: str, load: Callable[..., DataFrame]
) -> None:
    leave_out("COMPACTION", release)
    with Admin(servers.name_server, timeout=PATIENCE) as admin:
        if of("COMPACTION", release) == ERROR:
            with pytest.raises(MQClientException, match=r"which ignores the attributes \+cleanup\.policy=COMPACTION"):
                admin.create_topic(topic, 1, compaction=True)
            return
        admin.create_topic(topic, 1, compaction=True)
    for round_ in range(3):
        frame = spark.range(0, 500, 1, 1).selectExpr(
            f"concat(id, ' of ', {round_}) AS body", "concat('k', id) AS keys", "concat('k', id) AS shardingKey"
        )
        write(frame, servers.name_server, topic)
    newest = {f"k{number}": f"{number} of 2".encode() for number in range(500)}

    def found() -> dict[str, bytes]:
        rows = load(topic).select("keys", "body", "brokerName", "queueOffset").collect()
        places = [(row.brokerName, row.queueOffset) for row in rows]
        assert len(set(places)) == len(places)
        last: dict[str, tuple[int, bytes]] = {}
        for row in rows:
            last[row["keys"]] = max(last.get(row["keys"], (-1, b"")), (row.queueOffset, bytes(row.body)))
        return {key: body for key, (_, body) in last.items()}

    wait_for(lambda: found() == newest)
    with pytest.raises(PySparkException, match="keys"):
        write(spark.range(2).selectExpr("'x' AS body"), servers.name_server, topic)
