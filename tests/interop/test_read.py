"""`spark.read` against the official Java client: the same messages, and the same offsets at the same times."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster, create_topic
from tests.support.java import Java, Line, create_topics, send_every_kind
from tests.support.processes import wait_for
from tests.support.writes import messages_in

pytestmark = [pytest.mark.integration, pytest.mark.spark]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def load(spark: SparkSession, cluster: SharedCluster, **options: Any) -> DataFrame:
    return spark.read.format("rocketmq").options(nameServer=cluster.name_server, **options).load()


def shown(stamp: int) -> str:
    """Return an instant as Spark shows it in the time zone of the test below."""
    return f"{EPOCH + timedelta(milliseconds=stamp) + timedelta(hours=5, minutes=45):%Y-%m-%d %H:%M:%S.%f}"[:-3]


@pytest.fixture
def in_nepal(spark: SparkSession) -> Iterator[None]:
    """A session whose time zone is neither UTC nor a whole hour away."""
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    yield
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_read_equals_the_view_of_a_java_consumer_for_every_message_kind(
    spark: SparkSession, java: Java, cluster: SharedCluster, topic: str, metrics: Metrics, in_nepal: None
) -> None:
    topics = create_topics(cluster, topic)
    sent = send_every_kind(java, cluster.name_server, topics)
    known = sum(map(len, sent.values()))
    lines = {line["msgId"]: line for line in java.read_topics(cluster.name_server, topics, known)}
    assert len(lines) == known
    stamps = ("bornTimestamp", "storeTimestamp")
    frame = load(spark, cluster, subscribe=",".join(topics)).select(
        "*", *(F.date_format(name, "yyyy-MM-dd HH:mm:ss.SSS").alias(f"{name}Shown") for name in stamps)
    )
    rows = {row.msgId: row for row in frame.collect()}
    assert rows.keys() == lines.keys()
    same = ("topic", "properties", "flag", "brokerName", "queueId", "queueOffset", "bornHost", "reconsumeTimes")
    for unique_id, line in lines.items():
        row = rows[unique_id]
        # Java's client stores the broker that its last pull suggested.
        for name in ("MIN_OFFSET", "MAX_OFFSET"):
            line["properties"].pop(name, None)
        assert {name: row[name] for name in same} == {name: line[name] for name in same}
        assert bytes(row.body) == line["body"]
        assert (row.tags, row["keys"]) == (line["properties"].get("TAGS"), line["properties"].get("KEYS"))
        # A Java consumer has none for what it has taken out of a record.
        assert line["offsetMsgId"] in (row.offsetMsgId, None)
        assert [row[f"{name}Shown"] for name in stamps] == [shown(line[name]) for name in stamps]
    inner = [rows[message["msgId"]].offsetMsgId for message in sent["inner batch"]]
    assert inner == [message["offsetMsgId"] for message in sent["inner batch"]]


@pytest.fixture
def over_time(cluster: SharedCluster, topic: str) -> str:
    """A topic of four queues; each got three messages at three different times."""
    create_topic(cluster, topic, "NORMAL")
    places = [(broker.name, queue) for broker in cluster.brokers for queue in (0, 1)]

    def arrived(count: int) -> bool:
        return messages_in(cluster.name_server, topic) == count

    with Producer("over-time", name_server=cluster.name_server) as producer:
        for moment in range(3):
            for broker, queue in places:
                columns = {
                    "body": ["a", "b", "c"],
                    "brokerName": [broker] * 3,
                    "queueId": pa.array([queue] * 3, pa.int32()),
                }
                producer.send_arrow(pa.RecordBatch.from_pydict(columns), topic, queueSelector="column")
                time.sleep(0.02)
            wait_for(partial(arrived, 12 * (moment + 1)))
    return topic


def test_starting_timestamp_finds_the_offset_that_java_finds(
    spark: SparkSession, java: Java, cluster: SharedCluster, over_time: str, metrics: Metrics
) -> None:
    stored = load(spark, cluster, subscribe=over_time).select(
        "brokerName", "queueId", "queueOffset", F.unix_millis("storeTimestamp").alias("at")
    )
    times: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in stored.orderBy("queueOffset").collect():
        times[row.brokerName, row.queueId].append(row["at"])
    assert [len(of_queue) for of_queue in times.values()] == [9] * 4
    # Times before, at, between and after the stored messages.
    moments = {
        "before": {queue: found[0] - 10 for queue, found in times.items()},
        "first": {queue: found[0] for queue, found in times.items()},
        "middle": {queue: found[4] for queue, found in times.items()},
        "just after": {queue: found[5] + 1 for queue, found in times.items()},
        "last": {queue: found[8] for queue, found in times.items()},
    }
    asked: list[Line] = [
        {"topic": over_time, "brokerName": broker, "queueId": queue, "timestamp": stamp}
        for moment in moments.values()
        for (broker, queue), stamp in moment.items()
    ]
    answers = iter(java.run("Offsets", [{"nameServer": cluster.name_server}, *asked]))
    expected = {name: {queue: next(answers)["offset"] for queue in moment} for name, moment in moments.items()}

    def span(**options: str) -> dict[tuple[str, int], tuple[int, int]]:
        frame = load(spark, cluster, subscribe=over_time, **options).groupBy("brokerName", "queueId")
        rows = frame.agg(F.min("queueOffset").alias("first"), F.max("queueOffset").alias("last")).collect()
        return {(row.brokerName, row.queueId): (row["first"], row["last"] + 1) for row in rows}

    def by_queue(moment: dict[tuple[str, int], int]) -> str:
        brokers: dict[str, dict[str, int]] = defaultdict(dict)
        for (broker, queue), stamp in moment.items():
            brokers[broker][str(queue)] = stamp
        return json.dumps({over_time: brokers})

    for name, moment in moments.items():
        found = span(startingOffsetsByTimestamp=by_queue(moment))
        assert found == {queue: (offset, 9) for queue, offset in expected[name].items()}, name
        found = span(endingOffsetsByTimestamp=by_queue(moment))
        assert found == {queue: (0, offset) for queue, offset in expected[name].items() if offset}, name
    some = next(iter(times.values()))[4]
    in_all = span(startingTimestamp=str(some), endingTimestamp=str(some + 3_600_000))
    assert in_all == {
        queue: (sum(stamp < some for stamp in found), 9) for queue, found in times.items() if found[-1] >= some
    }
    latest = max(max(found) for found in times.values())
    with pytest.raises(
        PySparkException, match=rf"has no message stored at .* UTC \({latest + 1} ms since 1970\) or later"
    ):
        span(startingTimestamp=str(latest + 1))
    assert span(startingTimestamp=str(latest + 1), startingOffsetsByTimestampStrategy="latest") == {}
    assert span(endingTimestamp=str(latest + 1)) == dict.fromkeys(times, (0, 9))
