"""`dedupe`: what it drops, and above all what it does not; no server is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark import dedupe
from rocketmq_spark.errors import OptionError, SchemaError
from rocketmq_spark.model.hashes import STEP, row_hash

pytestmark = pytest.mark.spark

READ = "topic string, body string, flag int, properties map<string,string>"


def id_of(body: str, place: str = "w/0/0/1", topic: str = "orders", **properties: str) -> dict[str, str]:
    """Return the properties of a row, including its row id."""
    return {"SPARK_ROW_ID": f"{place}/{row_hash(topic, body.encode(), properties, 7)}", **properties}


# Body and properties.
ROWS = [
    ("twice", {**id_of("twice", TAGS="t", n="1"), "UNIQ_KEY": "1"}),
    ("twice", {**id_of("twice", TAGS="t", n="1"), "UNIQ_KEY": "2"}),
    ("other batch", id_of("other batch", "w/1/0/1")),
    ("no id", {"UNIQ_KEY": "3"}),
    ("no id", {"UNIQ_KEY": "3"}),
    ("empty id", {"SPARK_ROW_ID": ""}),
    ("empty id", {"SPARK_ROW_ID": ""}),
    ("no properties", None),
    ("no properties", None),
    # Ids of changed rows and of rows of other topics, and texts that are not row ids.
    ("changed", id_of("original")),
    ("changed", id_of("original")),
    ("copied", id_of("copied", topic="source")),
    ("copied", id_of("copied", topic="source")),
    ("one more property", {**id_of("one more property"), "n": "1"}),
    ("one more property", {**id_of("one more property"), "n": "1"}),
    ("no hash", {"SPARK_ROW_ID": "w/0/0/1/aa"}),
    ("no hash", {"SPARK_ROW_ID": "w/0/0/1/aa"}),
    # By columns: nothing to verify.
    ("by columns", {"SPARK_ROW_ID": f"w/0/{'a' * 32}"}),
    ("by columns", {"SPARK_ROW_ID": f"w/0/{'a' * 32}", "UNIQ_KEY": "4"}),
    ("also by columns", {"SPARK_ROW_ID": f"w/0/{'a' * 32}"}),
    ("also by columns", {"SPARK_ROW_ID": f"w/0/{'a' * 32}", "TAGS": "t"}),
]
ONCE = Counter(body for body, _ in ROWS)
ONCE.update({"twice": -1, "by columns": -1})
WITH_ID = {"twice", "other batch", "by columns", "also by columns"}


def forged_body(body: bytes) -> bytes:
    """Return another body with the same 64-bit hash: a mix of a sum of mixed words, and a mix has an inverse."""
    entry = b"\x02" + body
    padded = entry + bytes(-len(entry) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    changed = [*words]
    changed[1] ^= 1
    difference = sum(mixed(word + place * STEP) for place, word in enumerate(words, 1))
    difference -= sum(mixed(word + place * STEP) for place, word in enumerate(changed, 1))
    wanted = mixed(changed[2] + 3 * STEP) + difference
    changed[2] = unmixed(wanted % 2**64) - 3 * STEP
    return b"".join((word % 2**64).to_bytes(8, "little") for word in changed)[1 : len(entry)]


def mixed(word: int) -> int:
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def unmixed(word: int) -> int:
    """Return the word that `mixed` makes `word` of."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        word ^= word >> shift ^ word >> 2 * shift
        word = word * pow(factor, -1, 2**64) % 2**64
    return word


def as_read(spark: SparkSession, rows: list[tuple[str, dict[str, str] | None]]) -> DataFrame:
    return spark.createDataFrame([("orders", body, 7, properties) for body, properties in rows], READ)


@pytest.fixture
def read(spark: SparkSession) -> DataFrame:
    return as_read(spark, ROWS).selectExpr("*", "current_timestamp() AS storeTimestamp")


def bodies(frame: DataFrame) -> Counter[str]:
    return Counter(row.body for row in frame.select("body").collect())


def test_duplicate_row_ids_are_dropped_and_rows_without_id_kept(read: DataFrame) -> None:
    once = dedupe(read)
    assert bodies(once) == ONCE
    assert once.schema == read.schema


def test_a_forged_row_with_the_hash_of_a_real_one_makes_none_disappear(spark: SparkSession) -> None:
    real = b"the real row, with a body of some length"
    properties = {"TAGS": "t", "n": "1"}
    row_id = f"w/0/0/1/{row_hash('orders', real, properties, 7)}"
    forged = forged_body(real)
    assert forged != real
    assert row_id.endswith(row_hash("orders", forged, properties, 7))
    rows = [
        ("orders", body, 7, {"SPARK_ROW_ID": row_id, **properties, "UNIQ_KEY": str(number)})
        for number, body in enumerate([forged, real, forged, real])
    ]
    frame = spark.createDataFrame(rows, READ.replace("body string", "body binary"))
    assert sorted(bytes(row.body) for row in dedupe(frame).collect()) == sorted([forged, real])


def test_rows_derived_from_one_row_are_all_kept(spark: SparkSession) -> None:
    frame = as_read(spark, [("a,b,b", id_of("a,b,b")), ("a,b,b", id_of("a,b,b"))])
    assert dedupe(frame).count() == 1
    exploded = frame.limit(1).selectExpr("topic", "explode(split(body, ',')) AS body", "flag", "properties")
    assert bodies(dedupe(exploded)) == Counter({"a": 1, "b": 2})


def test_row_id_of_a_copy_is_verified_with_its_original_topic(read: DataFrame) -> None:
    assert bodies(dedupe(read, topic="source"))["copied"] == 1
    assert bodies(dedupe(read, topic="source"))["twice"] == 2


def test_row_id_column_is_preferred_to_the_properties(spark: SparkSession) -> None:
    first, second = (id_of("a", place)["SPARK_ROW_ID"] for place in ("w/0/0/1", "w/0/0/2"))
    rows = [("orders", "a", 7, name, {"SPARK_ROW_ID": "x"}) for name in (first, first, second, None, None)]
    frame = spark.createDataFrame(rows, READ.replace("properties", "SPARK_ROW_ID string, properties"))
    assert dedupe(frame).count() == 4


def test_a_missing_column_is_an_error_that_names_it(spark: SparkSession, read: DataFrame) -> None:
    with pytest.raises(
        SchemaError, match=r"no column SPARK_ROW_ID, nor a column properties .* The columns are id; keep"
    ):
        dedupe(spark.range(1))
    with pytest.raises(SchemaError, match=r"no column body and no column flag: .* fit the hash in its id"):
        dedupe(read.drop("body", "flag"))


@pytest.fixture
def stream(spark: SparkSession, read: DataFrame, tmp_path: Path) -> DataFrame:
    """The same rows in each of two files, one per micro-batch."""
    for _ in range(2):
        read.coalesce(1).write.mode("append").json(str(tmp_path / "in"))
    return (
        spark.readStream.schema(f"{READ}, storeTimestamp timestamp")
        .option("maxFilesPerTrigger", 1)
        .json(str(tmp_path / "in"))
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[[DataFrame], StreamingQuery]:
    """Run a query over all present rows, into the table `deduped`."""

    def all_available(frame: DataFrame) -> StreamingQuery:
        query = (
            frame.writeStream.format("memory")
            .queryName("deduped")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        return query

    return all_available


def test_stream_state_holds_only_digests_and_spans_micro_batches(
    spark: SparkSession, stream: DataFrame, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    query = run(dedupe(stream, within="1 hour"))
    without = Counter({body: count for body, count in ONCE.items() if body not in WITH_ID})
    assert bodies(spark.table("deduped")) == ONCE + without
    assert [batch.stateOperators[0].numRowsTotal for batch in query.recentProgress if batch.numInputRows] == [5, 5]


def test_row_stored_long_ago_is_not_dropped_as_late(
    spark: SparkSession, tmp_path: Path, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    folder = str(tmp_path / "in")
    for days in (0, 0, 30):
        row = spark.range(1).selectExpr(
            "'orders' AS topic",
            f"'stored {days} days ago' AS body",
            "7 AS flag",
            "map('SPARK_ROW_ID', concat('w/0/', replace(uuid(), '-', ''))) AS properties",
            f"current_timestamp() - make_interval(0, 0, 0, {days}) AS storeTimestamp",
        )
        row.write.mode("append").json(folder)
    # Files come in the order of their writing: a watermark on storeTimestamp would have passed the last row.
    stream = spark.readStream.schema(f"{READ}, storeTimestamp timestamp").option("maxFilesPerTrigger", 1).json(folder)
    run(dedupe(stream, within="1 second"))
    assert bodies(spark.table("deduped")) == Counter({"stored 0 days ago": 2, "stored 30 days ago": 1})


def test_aggregation_can_follow_dedupe_on_its_watermark_column(
    stream: DataFrame, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    once = dedupe(stream, within="1 day", event_time="storeTimestamp")
    query = run(once.groupBy("storeTimestamp", "body").count())
    kept = {operator.operatorName: operator.numRowsTotal for operator in query.recentProgress[-1].stateOperators}
    assert kept["dedupeWithinWatermark"] == 5


def test_a_stream_without_within_or_with_a_watermark_is_refused(stream: DataFrame) -> None:
    with pytest.raises(OptionError, match="requires within"):
        dedupe(stream)
    with pytest.raises(OptionError, match="event_time='storeTimestamp'"):
        dedupe(stream.withWatermark("storeTimestamp", "1 hour"), within="1 hour")
