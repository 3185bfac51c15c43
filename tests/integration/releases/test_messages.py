"""What is stored and read on every release: columns, batches, offsets, times, streams, filters, committed offsets."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.auditor import SHARDING_KEY, Row, audit, numbered_rows
from tests.support.by_time import check_reads_by_time
from tests.support.committed import check_committed_offsets
from tests.support.java import Java
from tests.support.processes import PATIENCE, at_most, wait_for
from tests.support.releases import ReleaseCluster
from tests.support.writes import await_messages, numbered, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]

ROWS = 3_000


# Rows with every column


def row_of(number: int) -> dict[str, Any]:
    """Return the columns of a row: short and long bodies, texts of several alphabets, and missing values."""
    body = f"body {number} \u00fc \U0001f600".encode()
    if number % 100 == 50:
        body = random.Random(number).randbytes(20_000)
    elif number % 100 == 51:
        body *= 1_000
    properties = {"number": str(number), "gr\u00fc\u00df": "dich \U0001f600", "lines": "a\nb", "mod": str(number % 10)}
    return {
        "body": body,
        "keys": f"k{number}",
        "tags": ("AaAa", "BBBB", "t-3", None, "gr\u00fcn")[number % 5],
        "properties": properties if number % 3 else None,
        "shardingKey": f"group-{number % 7}" if number % 2 else None,
        "flag": number - 5,
    }


COLUMNS = "body binary, keys string, tags string, properties map<string,string>, shardingKey string, flag int"


def frame_of(spark: SparkSession, numbers: Sequence[int], partitions: int = 2) -> DataFrame:
    """Return rows of `row_of` as a frame."""
    rows = [tuple(row_of(number).values()) for number in numbers]
    return spark.createDataFrame(rows, COLUMNS).coalesce(partitions)


def expected(topic: str, numbers: Sequence[int], **fields: Any) -> Iterator[Row]:
    """Yield rows of `row_of` as the auditor takes them."""
    for number in numbers:
        row = row_of(number)
        key = row["shardingKey"]
        properties = {**(row["properties"] or {}), **({SHARDING_KEY: key} if key else {})}
        name = str(row["keys"])
        yield Row(topic, name, row["body"], row["tags"], name, properties or None, **{"order": key, **fields})


def read_rows(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the columns of `row_of` of each message of a read, and check the others."""
    found, places = [], defaultdict[tuple[str, str, int], list[int]](list)
    for message in frame.collect():
        places[message.topic, message.brokerName, message.queueId].append(message.queueOffset)
        users = {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}
        key = users.pop(SHARDING_KEY, None)
        found.append(
            {
                "body": bytes(message.body),
                "keys": message["keys"],
                "tags": message.tags,
                "properties": users or None,
                "shardingKey": key,
                "flag": message.flag,
            }
        )
        assert message.properties["UNIQ_KEY"] == message.msgId
        assert message.bornHost.partition(":")[0] == "127.0.0.1"
        assert message.storeTimestamp >= message.bornTimestamp
    for queue, offsets in places.items():
        assert sorted(offsets) == list(range(min(offsets), min(offsets) + len(offsets))), queue
    return sorted(found, key=lambda row: int(row["keys"][1:]))


def test_rows_are_stored_and_read_with_all_columns(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], load: Callable[..., DataFrame], java: Java
) -> None:
    cases: list[tuple[str, Sequence[int], dict[str, str]]] = [
        ("-batch", range(ROWS), {}),
        # Rows with a sharding key.
        ("-ordered", range(1, ROWS, 2), {"ordered": "true"}),
        ("-single", range(300), {"batching": "false"}),
    ]
    for suffix, numbers, options in cases:
        topic = make(suffix)
        write(frame_of(spark, numbers, 1), servers.name_server, topic, **options)
        await_messages(servers.name_server, topic, len(numbers))
        assert read_rows(load(topic)) == [row_of(number) for number in numbers]
        accepted = () if "ordered" in options else ("order",)
        audit(java, servers.name_server, expected(topic, numbers)).check(*accepted)


def test_large_batches_and_bodies_are_stored_once(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], load: Callable[..., DataFrame], java: Java
) -> None:
    count, topic = 100_000, make()
    frame = numbered(spark, count, 12, partitions=1)
    write(frame, servers.name_server, topic, batchBytes="4m", uniqueKey="false")
    await_messages(servers.name_server, topic, count)
    audit(java, servers.name_server, numbered_rows(topic, range(count), 12)).check()
    assert load(topic).select("keys").distinct().count() == load(topic).count() == count
    bodies = make("-bodies")
    large = [random.Random(number).randbytes(size) for number, size in enumerate((4_190_000, 1, 3_000_000, 2_000_000))]
    rows = [(body, f"k{number}") for number, body in enumerate(large)]
    write(spark.createDataFrame(rows, "body binary, keys string").coalesce(1), servers.name_server, bodies)
    await_messages(servers.name_server, bodies, len(large))
    audit(java, servers.name_server, (Row(bodies, key, body, keys=key) for body, key in rows)).check()
    assert sorted((bytes(row.body), row["keys"]) for row in load(bodies).collect()) == sorted(rows)


# Offsets and times


def test_reads_by_offsets_return_exactly_their_ranges(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], load: Callable[..., DataFrame]
) -> None:
    topic = make()
    write(frame_of(spark, range(ROWS)), servers.name_server, topic)
    await_messages(servers.name_server, topic, ROWS)
    whole = {(row.brokerName, row.queueId, row.queueOffset): row["keys"] for row in load(topic).collect()}
    assert Counter(whole.values()) == Counter(f"k{number}" for number in range(ROWS))
    ends = Counter((broker, queue) for broker, queue, _ in whole)
    assert len(ends) == 4
    spans = [(max(0, end // 3 - 1), min(end, end // 2 + 401)) for end in ends.values()]
    spans[0], spans[1] = (0, 0), (spans[1][1], spans[1][1])
    for spans_of in (spans, [(0, end) for end in ends.values()], [(end - 1, end) for end in ends.values()]):
        ranges = dict(zip(ends, spans_of, strict=True))
        texts = []
        for place in (0, 1):
            named = defaultdict[str, dict[str, int]](dict)
            for (broker, queue), span in ranges.items():
                named[broker][str(queue)] = span[place]
            texts.append(json.dumps({topic: named}))
        read = load(topic, startingOffsets=texts[0], endingOffsets=texts[1], minPartitions=7)
        found = {(row.brokerName, row.queueId, row.queueOffset): row["keys"] for row in read.collect()}
        assert found == {place: key for place, key in whole.items() if place[2] in range(*ranges[place[0], place[1]])}


def test_reads_by_time_return_exactly_the_messages_of_the_span(servers: ReleaseCluster, topic: str) -> None:
    check_reads_by_time(servers.name_server, topic, {})


# Streams


def test_a_restarted_stream_copies_each_message_once(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], metrics: Metrics, java: Java, tmp_path: Path
) -> None:
    source, target = make("-source"), make("-target")

    def copy() -> int:
        given = {"nameServer": servers.name_server, "startingOffsets": "earliest", **at_most(700)}
        frame = spark.readStream.format("rocketmq").options(**given).load(source)
        query = (
            frame.drop("topic")
            .writeStream.format("rocketmq")
            .options(nameServer=servers.name_server, topic=target, checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(int(PATIENCE))
        return sum(progress.numInputRows for progress in query.recentProgress)

    for part in (range(ROWS // 2), range(ROWS // 2, ROWS), range(0)):
        if part:
            write(frame_of(spark, part), servers.name_server, source)
            await_messages(servers.name_server, source, part.stop)
        assert copy() == len(part)
    await_messages(servers.name_server, target, ROWS)
    audit(java, servers.name_server, expected(target, range(ROWS), order=None)).check()


# Filters

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


def test_filters_return_exactly_the_rows_that_match(
    spark: SparkSession, servers: ReleaseCluster, make: Callable[..., str], load: Callable[..., DataFrame]
) -> None:
    topic, numbers = make(), range(1_000)
    write(frame_of(spark, numbers), servers.name_server, topic)
    await_messages(servers.name_server, topic, len(numbers))
    rows = [row_of(number) for number in numbers]
    cases: list[tuple[dict[str, str], Callable[[dict[str, Any]], bool]]] = [
        # The hashes of these two tags are equal.
        ({"subExpression": "AaAa"}, lambda row: row["tags"] == "AaAa"),
        ({"subExpression": "BBBB || gr\u00fcn"}, lambda row: row["tags"] in ("BBBB", "gr\u00fcn")),
        ({"subExpression": "none"}, lambda row: False),
        (
            {"subExpression": "mod > 6", "filterType": "SQL92"},
            lambda row: row["properties"] is not None and int(row["properties"]["mod"]) > 6,
        ),
        (
            {"subExpression": "TAGS = 'AaAa' AND number BETWEEN 100 AND 200", "filterType": "SQL92"},
            lambda row: (
                row["tags"] == "AaAa"
                and row["properties"] is not None
                and 100 <= int(row["properties"]["number"]) <= 200
            ),
        ),
        ({"subExpression": "mod IS NULL", "filterType": "SQL92"}, lambda row: row["properties"] is None),
    ]
    for options, matches in cases:
        found = sorted(row["keys"] for row in load(topic, **options).select("keys").collect())
        assert found == sorted(row["keys"] for row in rows if matches(row)), options
    spark.conf.set(PUSH_DOWN, "true")
    try:
        for condition, matches in {
            "tags = 'AaAa'": lambda row: row["tags"] == "AaAa",
            "tags IN ('BBBB', 'gr\u00fcn') AND queueOffset >= 0": lambda row: row["tags"] in ("BBBB", "gr\u00fcn"),
            "tags IS NULL": lambda row: row["tags"] is None,
        }.items():
            found = sorted(row["keys"] for row in load(topic).where(condition).select("keys").collect())
            assert found == sorted(row["keys"] for row in rows if matches(row)), condition
    finally:
        spark.conf.unset(PUSH_DOWN)


# Committed offsets


def test_committed_offsets_of_a_stream_begin_a_read(
    spark: SparkSession,
    servers: ReleaseCluster,
    make: Callable[..., str],
    load: Callable[..., DataFrame],
    tmp_path: Path,
) -> None:
    topic = make()
    group = f"group-{topic}"
    own = {"nameServer": servers.name_server, "consumerGroup": group}

    def read_stream(*, stop_after: int) -> int:
        frame = spark.readStream.format("rocketmq").options(
            **own, startingOffsets="committed", startingOffsetsFallback="earliest", commitOffsets="true"
        )
        counted = frame.load(topic).writeStream.format("noop").option("checkpointLocation", str(tmp_path / "committed"))
        # Spark reports a micro-batch as finished when the next one is planned.
        query = counted.trigger(processingTime="1 second").start()

        def is_committed() -> bool:
            assert query.exception() is None
            return committed() == stop_after

        wait_for(is_committed)
        query.stop()
        return sum(progress.numInputRows for progress in query.recentProgress)

    def committed() -> int:
        with RemotingTransport([servers.name_server]) as transport:
            queues = {MessageQueue(topic, broker.name, queue): broker for broker in servers.brokers for queue in (0, 1)}
            found = [transport.consumer_offset(queue, group, at.address, 5.0) for queue, at in queues.items()]
        return sum(offset or 0 for offset in found)

    write(frame_of(spark, range(1_000)), servers.name_server, topic)
    await_messages(servers.name_server, topic, 1_000)
    assert read_stream(stop_after=1_000) == 1_000
    write(frame_of(spark, range(1_000, 1_400)), servers.name_server, topic)
    await_messages(servers.name_server, topic, 1_400)
    rows = load(topic, consumerGroup=group, startingOffsets="committed").select("keys").collect()
    assert sorted(int(row["keys"][1:]) for row in rows) == list(range(1_000, 1_400))
    assert read_stream(stop_after=1_400) == 400
    assert load(topic, consumerGroup=group, startingOffsets="committed").count() == 0


def test_committed_0_differs_from_a_group_without_offsets(servers: ReleaseCluster, make: Callable[..., str]) -> None:
    topic, broker = make("", queues=3), servers.brokers[0]
    check_committed_offsets([servers.name_server], broker.name, broker.address, topic)
