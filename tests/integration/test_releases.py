"""Every feature against real servers of every release of RocketMQ: what is stored and read, or why the driver refuses.

docs/compatibility.md has the results, the table of `tests/support/releases.py`. DLedger and RocksDB are other stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from rocketmq_spark import Producer
from rocketmq_spark.admin import Admin, queue_offsets
from rocketmq_spark.cluster.config import pick_port
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.auditor import SHARDING_KEY, Row, audit, numbered_rows
from tests.support.by_time import check_reads_by_time
from tests.support.cluster import EVERY_TYPE, SHORT_DEADLINES, commit_log, create_topic, forget, started
from tests.support.committed import check_committed_offsets
from tests.support.java import Java
from tests.support.processes import PATIENCE, PROGRAMS, Submission, at_most, wait_for
from tests.support.releases import ERROR, RELEASES, SERVERS, YES, Account, ReleaseCluster, of
from tests.support.streams import Feed, Kept
from tests.support.two_phase import WRITE, Driver
from tests.support.writes import WIDTH, make_topic, messages_in, numbered, rows, write

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.integration]

PROPERTIES = {
    **EVERY_TYPE,
    **SHORT_DEADLINES,
    "enablePropertyFilter": "true",
    # Many small files: 4 MiB batches fit, and queues of a thousand messages have several.
    "mappedFileSizeCommitLog": str(8 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 400),
}
ROWS = 3_000
MIB = 1024 * 1024


@pytest.fixture(scope="module", params=SERVERS)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def servers(release: str) -> Iterator[ReleaseCluster]:
    """A name server and two brokers of the release. The last test of a release deletes messages."""
    forget_logs()
    forget_checks()
    with started(stored_in(*release.split())) as cluster:
        assert isinstance(cluster, ReleaseCluster)
        yield cluster


def leave_out(feature: str, release: str) -> None:
    """Skip the test of a feature that a release does not have, and that the driver does not refuse."""
    if (found := of(feature, release)) not in (YES, ERROR):
        pytest.skip(f"{feature} on {release}: {found}")


def stored_in(release: str, store: str = "") -> ReleaseCluster:
    """Return a cluster of a release whose brokers have another store."""
    each = [dict(PROPERTIES) for _ in range(2)]
    for number, properties in enumerate(each):
        if store == "RocksDB":
            properties["storeType"] = "defaultRocksDB"
        if store == "DLedger":
            peers = f"n0-127.0.0.1:{pick_port(())}"
            group = {"dLegerGroup": f"broker-{number}", "dLegerPeers": peers, "dLegerSelfId": "n0"}
            properties |= {"enableDLegerCommitLog": "true", **group}
    return ReleaseCluster(release, proxy=False, brokers=2, broker_properties=each)


Make = Callable[..., str]


@pytest.fixture
def make(servers: ReleaseCluster, topic: str) -> Make:
    """Create a topic of this test, whose name has a suffix, and return its name."""

    def create(suffix: str = "", message_type: str = "NORMAL", queues: int = 2) -> str:
        name = re.sub("[^A-Za-z0-9_-]", "-", topic)[-60:] + suffix
        return create_topic(servers, name, message_type, queues)

    return create


@pytest.fixture
def load(spark: SparkSession, servers: ReleaseCluster, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(subscribe: str, **options: Any) -> DataFrame:
        given = {"nameServer": servers.name_server, "subscribe": subscribe, **options}
        return spark.read.format("rocketmq").options(**given).load()

    return load_from


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


def await_messages(servers: ReleaseCluster, topic: str, count: int) -> None:
    """Wait until a topic has so many messages."""
    wait_for(lambda: messages_in(servers.name_server, topic) >= count)


def test_rows_are_stored_and_read_with_all_columns(
    spark: SparkSession, servers: ReleaseCluster, make: Make, load: Callable[..., DataFrame], java: Java
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
        await_messages(servers, topic, len(numbers))
        assert read_rows(load(topic)) == [row_of(number) for number in numbers]
        accepted = () if "ordered" in options else ("order",)
        audit(java, servers.name_server, expected(topic, numbers)).check(*accepted)


def test_large_batches_and_bodies_are_stored_once(
    spark: SparkSession, servers: ReleaseCluster, make: Make, load: Callable[..., DataFrame], java: Java
) -> None:
    count, topic = 100_000, make()
    frame = numbered(spark, count, 12, partitions=1)
    write(frame, servers.name_server, topic, batchBytes="4m", uniqueKey="false")
    await_messages(servers, topic, count)
    audit(java, servers.name_server, numbered_rows(topic, range(count), 12)).check()
    assert load(topic).select("keys").distinct().count() == load(topic).count() == count
    bodies = make("-bodies")
    large = [random.Random(number).randbytes(size) for number, size in enumerate((4_190_000, 1, 3_000_000, 2_000_000))]
    rows = [(body, f"k{number}") for number, body in enumerate(large)]
    write(spark.createDataFrame(rows, "body binary, keys string").coalesce(1), servers.name_server, bodies)
    await_messages(servers, bodies, len(large))
    audit(java, servers.name_server, (Row(bodies, key, body, keys=key) for body, key in rows)).check()
    assert sorted((bytes(row.body), row["keys"]) for row in load(bodies).collect()) == sorted(rows)


# Offsets and times


def test_reads_by_offsets_return_exactly_their_ranges(
    spark: SparkSession, servers: ReleaseCluster, make: Make, load: Callable[..., DataFrame]
) -> None:
    topic = make()
    write(frame_of(spark, range(ROWS)), servers.name_server, topic)
    await_messages(servers, topic, ROWS)
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
    check_reads_by_time(servers.name_server, topic[-50:].strip("_-"), {})


# Streams


def test_a_restarted_stream_copies_each_message_once(
    spark: SparkSession, servers: ReleaseCluster, make: Make, metrics: Metrics, java: Java, tmp_path: Path
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
            await_messages(servers, source, part.stop)
        assert copy() == len(part)
    await_messages(servers, target, ROWS)
    audit(java, servers.name_server, expected(target, range(ROWS), order=None)).check()


# Filters

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


def test_filters_return_exactly_the_rows_that_match(
    spark: SparkSession, servers: ReleaseCluster, make: Make, load: Callable[..., DataFrame]
) -> None:
    topic, numbers = make(), range(1_000)
    write(frame_of(spark, numbers), servers.name_server, topic)
    await_messages(servers, topic, len(numbers))
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


# Delays


def check_delays(
    servers: ReleaseCluster, topic: str, java: Java, load: Callable[..., DataFrame], delays: Sequence[int | None]
) -> None:
    """Compare rows of delays (ms) with what is stored: each once, and none before its time."""
    await_messages(servers, topic, len(delays))
    rows = (Row(topic, f"k{number}", f"{number}".encode(), keys=f"k{number}") for number in range(len(delays)))
    audit(java, servers.name_server, rows, ignored=("SPARK_ROW_ID",)).check()
    for row in load(topic).collect():
        waited = (row.storeTimestamp - row.bornTimestamp).total_seconds() * 1000
        # Brokers deliver at whole seconds of their timers.
        assert waited >= (delays[int(row["keys"][1:])] or 0) - 1_000, row


def test_delay_levels_are_obeyed(
    spark: SparkSession, servers: ReleaseCluster, make: Make, load: Callable[..., DataFrame], java: Java
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
    make: Make,
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


# Compaction topics


def test_compaction_topics_keep_the_newest_message_of_each_key(
    spark: SparkSession, servers: ReleaseCluster, release: str, topic: str, load: Callable[..., DataFrame]
) -> None:
    leave_out("COMPACTION", release)
    name = topic[-60:].strip("_-")
    with Admin(servers.name_server, timeout=PATIENCE) as admin:
        if of("COMPACTION", release) == ERROR:
            with pytest.raises(MQClientException, match=r"which ignores the attributes \+cleanup\.policy=COMPACTION"):
                admin.create_topic(name, 1, compaction=True)
            return
        admin.create_topic(name, 1, compaction=True)
    for round_ in range(3):
        frame = spark.range(0, 500, 1, 1).selectExpr(
            f"concat(id, ' of ', {round_}) AS body", "concat('k', id) AS keys", "concat('k', id) AS shardingKey"
        )
        write(frame, servers.name_server, name)
    newest = {f"k{number}": f"{number} of 2".encode() for number in range(500)}

    def found() -> dict[str, bytes]:
        rows = load(name).select("keys", "body", "brokerName", "queueOffset").collect()
        places = [(row.brokerName, row.queueOffset) for row in rows]
        assert len(set(places)) == len(places)
        last: dict[str, tuple[int, bytes]] = {}
        for row in rows:
            last[row["keys"]] = max(last.get(row["keys"], (-1, b"")), (row.queueOffset, bytes(row.body)))
        return {key: body for key, (_, body) in last.items()}

    wait_for(lambda: found() == newest)
    with pytest.raises(PySparkException, match="keys"):
        write(spark.range(2).selectExpr("'x' AS body"), servers.name_server, name)


# Committed offsets


def test_committed_offsets_of_a_stream_begin_a_read(
    spark: SparkSession,
    servers: ReleaseCluster,
    make: Make,
    load: Callable[..., DataFrame],
    tmp_path: Path,
) -> None:
    topic = make()
    group = f"group-{topic[-40:].strip('_-')}"
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
    await_messages(servers, topic, 1_000)
    assert read_stream(stop_after=1_000) == 1_000
    write(frame_of(spark, range(1_000, 1_400)), servers.name_server, topic)
    await_messages(servers, topic, 1_400)
    rows = load(topic, consumerGroup=group, startingOffsets="committed").select("keys").collect()
    assert sorted(int(row["keys"][1:]) for row in rows) == list(range(1_000, 1_400))
    assert read_stream(stop_after=1_400) == 400
    assert load(topic, consumerGroup=group, startingOffsets="committed").count() == 0


def test_committed_0_differs_from_a_group_without_offsets(servers: ReleaseCluster, make: Make) -> None:
    topic, broker = make("", queues=3), servers.brokers[0]
    check_committed_offsets([servers.name_server], broker.name, broker.address, topic)


# Once-deliveries


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
    await_messages(servers, topic, count)
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
            await_messages(servers, topic, 1)
        else:
            assert messages_in(servers.name_server, topic) == 0
    for _ in range(2):
        write(pieces(spark, count, broken=False), servers.name_server, topic, **options)
        check_once(servers, topic, java, count)


def check_killed_stream(servers: ReleaseCluster, make: Make, java: Java, folder: Path, delivery: str) -> None:
    """Kill the driver of a stream from topic to topic in a micro-batch, and start it again."""
    source, target, count = make("-source"), make("-target"), 4_000
    with Producer("feed", name_server=servers.name_server) as producer:
        producer.send_arrow(rows(count), source)
    await_messages(servers, source, count)
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
    await_messages(servers, target, count)
    audit(java, servers.name_server, numbered_rows(target, range(count), WIDTH)).check()


def test_effectively_once_write_is_repeated_without_a_repeat_or_loss(
    spark: SparkSession, servers: ReleaseCluster, make: Make, metrics: Metrics, java: Java
) -> None:
    check_repeated_write(spark, servers, make(), java, "effectivelyOnce", visible=True)
    assert metrics.recovered_rows()["recovered"] > 0


def test_effectively_once_stream_survives_the_kill_of_its_driver(
    servers: ReleaseCluster, make: Make, java: Java, tmp_path: Path
) -> None:
    check_killed_stream(servers, make, java, tmp_path, "effectivelyOnce")


def test_exactly_once_write_is_repeated_without_a_repeat_or_loss_or_refused(
    spark: SparkSession, servers: ReleaseCluster, release: str, make: Make, metrics: Metrics, java: Java
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
    spark: SparkSession, servers: ReleaseCluster, release: str, make: Make, java: Java, tmp_path: Path
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
    servers: ReleaseCluster, release: str, make: Make, java: Java
) -> None:
    if of("`exactlyOnce`", release) == ERROR:
        return
    topic, bodies = make(), [f"row-{number}" for number in range(200)]
    with contextlib.closing(Driver(servers.name_server, topic=topic, transactionTopic=f"log-{topic}")) as dead:
        dead.options = dead.brokers.options = replace(dead.options, transaction_timeout_ms=10_000)
        dead.open().decide_and_crash(bodies, 70)
    with contextlib.closing(Driver(servers.name_server, topic=topic, transactionTopic=f"log-{topic}")) as job:
        job.open().two_phase.finish(WRITE)
    await_messages(servers, topic, len(bodies))
    given = (Row(topic, body, body.encode()) for body in bodies)
    audit(java, servers.name_server, given, identity=(":(row-.*)",)).check("addedProperty")


# Access control

RIGHT, WRONG = ("writer-1", "the-right-secret"), ("writer-1", "another-secret")
UNKNOWN, NOBODY = ("writer-2", "the-right-secret"), None
REFUSALS = {WRONG: "[Cc]heck signature failed", UNKNOWN: "No acl config for|is not found"}
NO_RIGHT = r"(?i)no (default )?permission"
REFUSALS_OF_NOBODY = "No accessKey is configured|username cannot be null"


def secured(release: str) -> ReleaseCluster:
    """Return a cluster whose user may write to and read ``allowed``."""
    if of("access control", release) == "ACL 2":
        return ReleaseCluster(release, proxy=False, auth=True)
    user = Account(*RIGHT, {"allowed": "PUB|SUB"}, {"spark-rocketmq-source": "SUB"})
    return ReleaseCluster(release, proxy=False, broker_properties={"aclEnable": "true"}, accounts=[user])


@pytest.mark.parametrize("name", [name for name in RELEASES if of("access control", name).startswith("ACL")])
def test_only_the_right_key_writes_and_reads(spark: SparkSession, metrics: Metrics, name: str) -> None:
    count = 1_000
    frame = spark.range(0, count, 1, 2).selectExpr("cast(id AS string) AS body", "concat('k', id) AS keys")
    with started(secured(name)) as cluster:
        administrator = {key: value for key, value in cluster.client_options.items() if key != "name_server"}
        with Admin(cluster.name_server, **administrator, timeout=PATIENCE) as admin:
            for topic in ("allowed", "forbidden"):
                admin.create_topic(topic, 2)
        if of("access control", name) == "ACL 2":
            groups = ["spark-rocketmq-source"]
            cluster.create_user(*RIGHT, publish=["allowed"], subscribe=["allowed"], groups=groups)

        def options(user: tuple[str, str] | None) -> dict[str, str]:
            keys = {} if user is None else {"accessKey": user[0], "secretKey": user[1]}
            return {"nameServer": cluster.name_server, **keys}

        def save(user: tuple[str, str] | None, topic: str, **more: str) -> None:
            frame.write.format("rocketmq").options(**options(user), topic=topic, **more).save()

        def read(user: tuple[str, str] | None, topic: str) -> Counter[str]:
            found = spark.read.format("rocketmq").options(**options(user)).load(topic).select("keys").collect()
            return Counter(row["keys"] for row in found)

        expected_keys = Counter(f"k{number}" for number in range(count))
        save(RIGHT, "allowed")
        wait_for(lambda: read(RIGHT, "allowed").total() >= count)
        assert read(RIGHT, "allowed") == expected_keys
        for user in (WRONG, UNKNOWN, NOBODY):
            refusal = REFUSALS_OF_NOBODY if user is None else REFUSALS[user]
            for batching in ("true", "false"):
                with pytest.raises(PySparkException, match=refusal):
                    save(user, "allowed", batching=batching)
            with pytest.raises(PySparkException, match=refusal):
                read(user, "allowed")
        with pytest.raises(PySparkException, match=NO_RIGHT):
            save(RIGHT, "forbidden", batching="false")
        with pytest.raises(PySparkException, match=NO_RIGHT):
            read(RIGHT, "forbidden")
        forbidden = 0
        if name.startswith("4."):
            # These brokers check no right on the topic of a batch.
            save(RIGHT, "forbidden")
            forbidden = count
        else:
            with pytest.raises(PySparkException, match=NO_RIGHT):
                save(RIGHT, "forbidden")
        everything = {
            topic: spark.read.format("rocketmq").options(**cluster.options).load(topic)
            for topic in ("allowed", "forbidden")
        }
        assert Counter(row["keys"] for row in everything["allowed"].select("keys").collect()) == expected_keys
        wait_for(lambda: everything["forbidden"].count() == forbidden)


# Expired messages


def test_expired_messages_fail_a_read_unless_data_loss_is_allowed(
    spark: SparkSession,
    servers: ReleaseCluster,
    release: str,
    topic: str,
    load: Callable[..., DataFrame],
    tmp_path: Path,
) -> None:
    leave_out("expired messages", release)
    broker, name = servers.brokers[0], topic[-60:].strip("_-")
    make_topic(servers, name, queues=1, on=[broker])
    before = len(commit_log(broker))

    def read_available(**options: Any) -> list[str]:
        given = {"nameServer": servers.name_server, "startingOffsets": "earliest", **options}
        frame, kept = spark.readStream.format("rocketmq").options(**given).load(name), Kept()
        writer = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(int(PATIENCE))
        return sorted(kept.keys.elements())

    with Producer("feed", name_server=servers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, servers.name_server, name)
        keys = [key for _ in range(5) for key in feed(1, nbytes=MIB)]
        assert read_available() == sorted(keys)
        keys += [key for _ in range(35) for key in feed(1, nbytes=MIB)]
    stamps = {
        row.queueOffset: row.storeTimestamp for row in load(name).select("queueOffset", "storeTimestamp").collect()
    }
    forget(broker, files=before + 1)

    def state() -> tuple[int, int]:
        (found,) = queue_offsets([servers.name_server], name)
        return found.min_offset, found.max_offset

    # A broker that has lost files corrects the first offsets of its queues a moment after its start.
    wait_for(lambda: state()[0] > 5)
    left, end = state()
    assert left < 40
    assert end == 40
    starts = json.dumps({name: {broker.name: {"0": 5}}})
    gone = rf"messages 5 to {left - 1} of .* are not there any more.*failOnDataLoss"
    with pytest.raises(PySparkException, match=gone):
        load(name, startingOffsets=starts).collect()
    with pytest.raises(PySparkException, match=gone):
        read_available()
    assert read_available(failOnDataLoss="false", **at_most(4)) == sorted(keys[left:])

    def offsets(**options: str) -> list[int]:
        found = load(name, **options).select("keys", "queueOffset").collect()
        assert all(row["keys"] == keys[row.queueOffset] for row in found)
        return sorted(row.queueOffset for row in found)

    assert offsets() == list(range(left, 40))
    assert offsets(startingOffsets=starts, failOnDataLoss="false") == list(range(left, 40))
    stop = json.dumps({name: {broker.name: {"0": 8}}})
    assert offsets(startingOffsets=starts, endingOffsets=stop, failOnDataLoss="false") == []
    with pytest.raises(PySparkException, match=r"messages 5 to 7 of .* are not there any more"):
        load(name, startingOffsets=starts, endingOffsets=stop).collect()
    for offset in (5, left - 1, left, left + 1, 39):
        time_ms = int(stamps[offset].replace(tzinfo=timezone.utc).timestamp() * 1000)
        first = min(place for place, stamp in stamps.items() if stamp >= stamps[offset])
        assert offsets(startingTimestamp=str(time_ms)) == list(range(max(first, left), 40))
        assert offsets(endingTimestamp=str(time_ms)) == list(range(left, max(first, left)))
