"""Invalid rows, and row ids, on a real broker."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

import rocketmq_spark
from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.model.hashes import row_hash
from rocketmq_spark.model.message import Message
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.compression import decompress
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY, decode_batch
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import set_config
from tests.support.processes import wait_for
from tests.support.reading import read_topic
from tests.support.writes import failing_late, messages_in, numbered

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Save = Callable[..., None]


def every_tenth_is_bad(spark: SparkSession, rows: int = 1_000) -> Any:
    """Return numbered rows. The body is null if the number ends in 3, and too long if it ends in 7."""
    last, text = F.col("id") % 10, F.concat(F.lit("body-"), F.col("id").cast("string"))
    body = F.when(last == 3, F.lit(None)).when(last == 7, F.repeat(F.lit("x"), 300)).otherwise(text)
    return spark.range(0, rows, 1, 2).select(body.alias("body"), F.concat(F.lit("k"), F.col("id")).alias("keys"))


def test_on_error_skip_skips_invalid_rows_and_counts_them(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Save
) -> None:
    save(every_tenth_is_bad(spark), onError="skip", maxMessageSize="200")
    stored = read_topic(cluster.name_server, topic, 800)
    assert {message.properties["KEYS"] for message in stored} == {f"k{n}" for n in range(1_000) if n % 10 not in (3, 7)}
    assert len(stored) == 800
    assert metrics.invalid_rows() == {
        "skipped": 200,
        "skipped_by_rule": {"body is null": 100, "body is longer than maxMessageSize": 100},
        "dead_lettered": 0,
        "dead_lettered_by_rule": {},
    }
    shown = io.StringIO()
    metrics.show(shown)
    assert "200 invalid rows skipped: 100 body is" in shown.getvalue()
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 800


def test_dead_letters_are_stored_before_the_write_returns(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Save
) -> None:
    dead = f"{topic[:100]}-dead"
    save(every_tenth_is_bad(spark), onError="deadLetter", deadLetterTopic=dead, maxMessageSize="200")
    assert len(read_topic(cluster.name_server, topic, 800)) == 800
    letters = {message.properties["KEYS"]: message for message in read_topic(cluster.name_server, dead, 200)}
    assert set(letters) == {f"k{n}" for n in range(1_000) if n % 10 in (3, 7)}
    null, long = letters["k3"], letters["k7"]
    assert (null.body, null.properties["DEAD_LETTER_rule"]) == (b"(null)", "body is null")
    assert (long.body, long.properties["DEAD_LETTER_bodySize"]) == (b"x" * 200, "300")
    # Two partitions of 500 rows.
    assert {
        (k, m.properties["DEAD_LETTER_partition"], m.properties["DEAD_LETTER_row"]) for k, m in letters.items()
    } == {(f"k{n}", str(n // 500), str(n % 500)) for n in range(1_000) if n % 10 in (3, 7)}
    assert {message.properties["DEAD_LETTER_topic"] for message in letters.values()} == {topic}
    assert {message.properties["DEAD_LETTER_writeId"] for message in letters.values()} == {metrics.writes()[0][0]}
    assert metrics.invalid_rows()["dead_lettered_by_rule"] == {
        "body is null": 100,
        "body is longer than maxMessageSize": 100,
    }
    assert sum(facts["rows"] for facts in metrics.to_dict().values()) == 1_000


@pytest.mark.parametrize("on_error", ["skip", "deadLetter"])
def test_a_row_beyond_the_delay_limit_of_the_broker_follows_on_error(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Save, on_error: str
) -> None:
    dead = f"{topic[:100]}-dead"
    delay = F.when(F.col("id") % 10 == 3, F.lit(4 * 24 * 3600 * 1000)).when(F.col("id") == 5, F.lit(1))
    frame = spark.range(0, 100, 1, 2).select(
        F.rpad(F.col("id").cast("string"), 5_000, ".").alias("body"),
        F.concat(F.lit("k"), F.col("id")).alias("keys"),
        F.lit("t").alias("tags"),
        delay.cast("long").alias("delayMs"),
        F.create_map(F.lit("colour"), F.lit("red")).alias("properties"),
    )
    save(frame, onError=on_error, rowId="true", **({"deadLetterTopic": dead} if on_error == "deadLetter" else {}))
    refused = {f"k{n}" for n in range(100) if n % 10 == 3}
    stored = read_topic(cluster.name_server, topic, 90, key=lambda message: message.properties["KEYS"])
    assert {message.properties["KEYS"] for message in stored} == {f"k{n}" for n in range(100)} - refused
    assert len(stored) == 90
    count = metrics.invalid_rows()["skipped" if on_error == "skip" else "dead_lettered_by_rule"]
    rule = "the delay is longer than the server allows"
    assert count == (10 if on_error == "skip" else {rule: 10})
    if on_error == "skip":
        return
    letters = {message.properties["KEYS"]: message for message in read_topic(cluster.name_server, dead, 10)}
    assert letters.keys() == refused
    letter = letters["k63"]
    assert decompress(letter.body, letter.sys_flag) == b"63".ljust(5_000, b".")
    assert letter.properties.items() >= {
        ("TAGS", "t"),
        ("colour", "red"),
        ("DEAD_LETTER_rule", rule),
        ("DEAD_LETTER_delayMs", "345600000"),
        ("DEAD_LETTER_partition", "1"),
        ("DEAD_LETTER_row", "13"),
        ("DEAD_LETTER_topic", topic),
        ("DEAD_LETTER_bodySize", "5000"),
    }
    assert "/1/13/" in letter.properties["SPARK_ROW_ID"]


def test_large_bodies_are_written_and_read(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, save: Save
) -> None:
    dead = f"{topic[:100]}-dead"
    noise = "aes_encrypt(repeat('x', {}), '0123456789abcdef', 'CBC')"
    bodies = {"zeros": "binary(repeat('x', 33554432))", "noise": noise.format(12 * MIB), "long": noise.format(17 * MIB)}
    rows = (f"struct('{key}' AS keys, {body} AS body)" for key, body in bodies.items())
    frame = spark.range(1).selectExpr(f"explode(array({', '.join(rows)})) AS row")
    with contextlib.ExitStack() as stack:
        for broker in cluster.brokers:
            set_config(broker, maxMessageSize=64 * MIB)
            stack.callback(set_config, broker, maxMessageSize=4 * MIB)
        save(frame.select("row.*"), maxMessageSize="64m", onError="deadLetter", deadLetterTopic=dead)
        with Producer("large", name_server=cluster.name_server, max_message_size=32 * MIB) as producer:
            producer.send(Message.of(topic, bytes(32 * MIB), keys="sent"))
    wait_for(lambda: messages_in(cluster.name_server, topic) == 3)
    assert metrics.invalid_rows()["dead_lettered_by_rule"] == {"body is too long for a frame": 1}
    expected = {"zeros": 32 * MIB, "noise": 12 * MIB + 32, "sent": 32 * MIB}
    read = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
    sizes = read.load(topic).selectExpr("keys", "length(body) AS size").collect()
    assert {row["keys"]: row["size"] for row in sizes} == expected
    table = rocketmq_spark.read_arrow(topic, nameServer=cluster.name_server, columns=["keys", "body"]).read_all()
    assert {row["keys"]: len(row["body"]) for row in table.to_pylist()} == expected
    (letter,) = read_topic(cluster.name_server, dead, 1)
    assert (len(letter.body), letter.properties["DEAD_LETTER_bodySize"]) == (LARGEST_BODY, str(17 * MIB + 32))


def test_a_dead_letter_topic_is_checked_before_any_task(spark: SparkSession, save: Save) -> None:
    with pytest.raises(PySparkException, match="onError=deadLetter requires the option deadLetterTopic"):
        save(every_tenth_is_bad(spark), onError="deadLetter")


def test_a_column_that_makes_no_row_id_is_refused_before_any_task(spark: SparkSession, save: Save) -> None:
    with pytest.raises(PySparkException, match="rowId=columns:order: there is no column order"):
        save(every_tenth_is_bad(spark), rowId="columns:order")


@pytest.mark.parametrize("row_id", ["true", "columns:keys"])
def test_a_retried_task_gives_its_rows_the_same_ids(
    spark: SparkSession, small_record_batches: None, cluster: Any, topic: str, save: Save, row_id: str
) -> None:
    rows = 8_000
    frame = numbered(spark, rows, 100, partitions=2)
    # More than the other partition's rows, so some rows of this partition are stored.
    late = failing_late(frame, cluster.name_server, topic, rows // 2)
    save(late, rowId=row_id, batchBytes="16k")
    stored = read_topic(cluster.name_server, topic, rows, key=lambda message: message.properties["KEYS"])
    assert len(stored) > rows
    ids = {(message.properties["KEYS"], message.properties["SPARK_ROW_ID"]) for message in stored}
    assert len(ids) == len({key for key, _ in ids}) == len({row for _, row in ids}) == rows
    if row_id == "true":
        for message in stored[::20]:
            *_, row, found = message.properties["SPARK_ROW_ID"].split("/")
            assert int(row) == int(message.properties["KEYS"][1:]) % (rows // 2)
            assert found == row_hash(topic, message.body, message.properties)


def test_row_ids_of_a_stream_start_with_its_query_id(
    spark: SparkSession, cluster: Any, topic: str, tmp_path: Any
) -> None:
    source = tmp_path / "in"
    spark.range(0, 100, 1, 1).select(F.col("id").cast("string").alias("value")).write.text(str(source))
    query = (
        spark.readStream.text(str(source))
        .writeStream.format("rocketmq")
        .options(
            nameServer=cluster.name_server, topic=topic, rowId="true", checkpointLocation=str(tmp_path / "checkpoint")
        )
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(60)
    stored = read_topic(cluster.name_server, topic, 100)
    assert {tuple(message.properties["SPARK_ROW_ID"].split("/")[:2]) for message in stored} == {(query.id, "0")}
    assert len({message.properties["SPARK_ROW_ID"] for message in stored}) == 100


@pytest.mark.parametrize(("kind", "sys_flag"), [("ZLIB", 0x301), ("lz4", 0x101), ("ZSTD", 0x201)])
def test_long_bodies_are_stored_compressed_and_round_trip(
    spark: SparkSession, cluster: Any, topic: str, save: Save, kind: str, sys_flag: int
) -> None:
    text = F.repeat(F.concat(F.lit("line "), F.col("id"), F.lit("; ")), 600)
    long = F.col("id") % 3 == 0
    frame = spark.range(0, 300, 1, 2).select(
        F.when(long, text).otherwise(F.col("id").cast("string")).alias("body"),
        F.concat(F.lit("k"), F.col("id")).alias("keys"),
        F.when(F.col("id") % 30 == 0, 1).alias("delayTimeLevel"),
        (F.col("id") % 2).cast("int").alias("flag"),
    )
    save(frame, compressType=kind, rowId="true")
    stored = read_topic(cluster.name_server, topic, 300)
    assert len(stored) == 300
    for message in stored:
        number = int(message.properties["KEYS"][1:])
        long_row = number % 3 == 0
        assert message.sys_flag & 0x701 == (sys_flag if long_row else 0)
        expected = (f"line {number}; " * 600 if long_row else str(number)).encode()
        assert decompress(message.body, message.sys_flag) == expected
        # A 5.5.0 broker delivers the property of a delay level unchanged.
        assert message.properties["SPARK_ROW_ID"].endswith(row_hash(topic, expected, message.properties, number % 2))
        assert len(message.body) < 1_000


def test_delayed_rows_have_row_ids_that_readers_can_verify(
    spark: SparkSession, cluster: Any, topic: str, save: Save
) -> None:
    soon = "current_timestamp() + interval 1 second"
    save(
        spark.range(2).selectExpr(
            "cast(id as string) as body",
            "if(id = 0, 1000L, null) as delayMs",
            f"if(id = 1, {soon}, null) as deliverTime",
        ),
        rowId="true",
    )
    stored = read_topic(cluster.name_server, topic, 2)
    assert sorted(message.body for message in stored) == [b"0", b"1"]
    for message in stored:
        # A 5.5.0 broker delivers the property of a delay unchanged.
        assert ("TIMER_DELAY_MS" in message.properties) == (message.body == b"0")
        assert message.properties["SPARK_ROW_ID"].endswith(row_hash(topic, message.body, message.properties))


def test_compress_type_none_stores_bodies_unchanged(spark: SparkSession, cluster: Any, topic: str, save: Save) -> None:
    save(spark.createDataFrame([("x" * 10_000,)], "body string"), compressType="none")
    (message,) = read_topic(cluster.name_server, topic, 1)
    assert (message.body, message.sys_flag & 0x701) == (b"x" * 10_000, 0)


SELECTOR = """
import pyarrow.compute as pc


class ByRegion:
    def select(self, queues, rows):
        return pc.if_else(pc.equal(rows["tags"], "eu"), 0, len(queues) - 1)
"""


def test_a_class_of_the_users_chooses_the_queues(
    spark: SparkSession, cluster: Any, topic: str, save: Save, tmp_path: Any
) -> None:
    module = tmp_path / "region_selector_of_a_test.py"
    module.write_text(SELECTOR)
    spark.sparkContext.addPyFile(str(module))
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 4, 6, 5.0)
    frame = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS body", "if(id % 2 = 0, 'eu', 'us') AS tags")
    save(frame, queueSelector="region_selector_of_a_test:ByRegion")
    places: dict[str, set[tuple[str, int]]] = {}
    for message in read_topic(cluster.name_server, topic, 100):
        places.setdefault(message.properties["TAGS"], set()).add((message.store_host, message.queue_id))
    first, last = cluster.brokers[0], cluster.brokers[-1]
    assert places == {"eu": {(first.address, 0)}, "us": {(last.address, 3)}}
    with pytest.raises(PySparkException, match="has no class ByCountry with a method select"):
        save(frame, queueSelector="region_selector_of_a_test:ByCountry")


def test_inner_batch_is_stored_as_one_record(spark: SparkSession, cluster: Any, topic: str, save: Save) -> None:
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 2, 6, 5.0, attributes="+queue.type=BatchCQ")
    frame = spark.range(0, 500, 1, 2).selectExpr("concat('body-', id) AS body")
    save(frame, batchType="inner")
    # A pull from the middle of an inner batch gives the whole of it again.
    stored = read_topic(cluster.name_server, topic, 2, key=lambda record: record.properties["UNIQ_KEY"])
    records = {record.properties["UNIQ_KEY"]: record for record in stored}.values()
    # Bits 6 and 7: to be taken apart.
    assert {record.sys_flag & 0xC0 for record in records} == {0xC0}
    assert sum(int(record.properties["INNER_NUM"]) for record in records) == 500
    found = [item.body for record in records for item in decode_batch(record.body)]
    assert sorted(found) == sorted(f"body-{n}".encode() for n in range(500))


def test_dead_letters_of_inner_batches_go_to_a_plain_topic(
    spark: SparkSession, cluster: Any, topic: str, save: Save
) -> None:
    dead = f"{topic[:100]}-dead"
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 2, 6, 5.0, attributes="+queue.type=BatchCQ")
            transport.create_topic(broker.address, dead, 2, 6, 5.0)
    frame = every_tenth_is_bad(spark, 100)
    save(frame, batchType="inner", onError="deadLetter", deadLetterTopic=dead, maxMessageSize="200")
    letters = read_topic(cluster.name_server, dead, 20)
    assert {letter.properties["KEYS"] for letter in letters} == {f"k{n}" for n in range(100) if n % 10 in (3, 7)}


def test_inner_batches_are_refused_where_the_topic_is_of_another_type(
    spark: SparkSession, cluster: Any, topic: str, save: Save
) -> None:
    frame = spark.range(0, 5, 1, 2).selectExpr("concat('body-', id) AS body")
    with pytest.raises(PySparkException, match=rf"topic {topic} does not exist, .* create one with that type"):
        save(frame, batchType="inner")
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 2, 6, 5.0)
    with pytest.raises(PySparkException, match=rf"topic {topic} is of the type SimpleCQ on .* -a \+queue.type=BatchCQ"):
        save(frame, batchType="inner")
    assert sum(offsets.messages for offsets in queue_offsets([cluster.name_server], topic)) == 0
