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

pytestmark = pytest.mark.spark

READ = "body string, properties map<string,string>, storeTimestamp timestamp"

# Body, and how often it stays: by ids, in a map or in none.
ROWS = [
    ("twice", {"SPARK_ROW_ID": "w/0/0/1/aa", "UNIQ_KEY": "1"}),
    ("twice", {"SPARK_ROW_ID": "w/0/0/1/aa", "UNIQ_KEY": "2"}),
    ("other batch", {"SPARK_ROW_ID": "w/1/0/1/aa"}),
    ("no id", {"UNIQ_KEY": "3"}),
    ("no id", {"UNIQ_KEY": "3"}),
    ("empty id", {"SPARK_ROW_ID": ""}),
    ("empty id", {"SPARK_ROW_ID": ""}),
    ("no properties", None),
    ("no properties", None),
]
ONCE = Counter({"twice": 1, "other batch": 1, "no id": 2, "empty id": 2, "no properties": 2})


@pytest.fixture
def read(spark: SparkSession) -> DataFrame:
    frame = spark.createDataFrame(ROWS, "body string, properties map<string,string>")
    return frame.selectExpr("*", "current_timestamp() AS storeTimestamp")


def bodies(frame: DataFrame) -> Counter[str]:
    return Counter(row.body for row in frame.select("body").collect())


def test_of_rows_with_one_id_one_stays_and_of_rows_without_all(read: DataFrame) -> None:
    once = dedupe(read)
    assert bodies(once) == ONCE
    assert once.schema == read.schema


def test_a_column_of_that_name_goes_before_the_properties(spark: SparkSession) -> None:
    rows = [("a", "1", {"SPARK_ROW_ID": "x"}), ("a", "1", {}), ("b", "2", {"SPARK_ROW_ID": "x"}), ("c", None, {})]
    frame = spark.createDataFrame(rows, "body string, SPARK_ROW_ID string, properties map<string,string>")
    assert bodies(dedupe(frame)) == Counter("abc")
    assert bodies(dedupe(frame.drop("properties"))) == Counter("abc")


def test_without_a_column_for_ids_there_is_an_error_that_names_those_there_are(spark: SparkSession) -> None:
    with pytest.raises(SchemaError, match=r"no column SPARK_ROW_ID, nor a column properties .* there are id: keep"):
        dedupe(spark.range(1))


@pytest.fixture
def stream(spark: SparkSession, read: DataFrame, tmp_path: Path) -> DataFrame:
    """The same rows in each of two files, one per micro-batch."""
    for _ in range(2):
        read.coalesce(1).write.mode("append").json(str(tmp_path / "in"))
    return spark.readStream.schema(READ).option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[DataFrame], StreamingQuery]:
    """Run a query over all there is, into the table `deduped`."""

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


def test_a_stream_remembers_ids_from_one_micro_batch_to_the_next_and_only_them(
    spark: SparkSession, stream: DataFrame, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    query = run(dedupe(stream, within="1 hour"))
    without = Counter({body: count for body, count in ONCE.items() if count == 2})
    assert bodies(spark.table("deduped")) == ONCE + without
    assert [batch.stateOperators[0].numRowsTotal for batch in query.recentProgress if batch.numInputRows] == [2, 2]


def test_a_row_that_was_stored_long_ago_is_not_late(
    spark: SparkSession, tmp_path: Path, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    folder = str(tmp_path / "in")
    for days in (0, 0, 30):
        row = spark.range(1).selectExpr(
            f"'stored {days} days ago' AS body",
            "map('SPARK_ROW_ID', uuid()) AS properties",
            f"current_timestamp() - make_interval(0, 0, 0, {days}) AS storeTimestamp",
        )
        row.write.mode("append").json(folder)
    # Files come in the order of their writing: a watermark on storeTimestamp would have passed the last row.
    stream = spark.readStream.schema(READ).option("maxFilesPerTrigger", 1).json(folder)
    run(dedupe(stream, within="1 second"))
    assert bodies(spark.table("deduped")) == Counter({"stored 0 days ago": 2, "stored 30 days ago": 1})


def test_an_aggregation_may_follow_on_the_column_that_dedupe_has_set_its_watermark_on(
    stream: DataFrame, run: Callable[[DataFrame], StreamingQuery]
) -> None:
    once = dedupe(stream, within="1 day", event_time="storeTimestamp")
    query = run(once.groupBy("storeTimestamp", "body").count())
    kept = {operator.operatorName: operator.numRowsTotal for operator in query.recentProgress[-1].stateOperators}
    assert kept["dedupeWithinWatermark"] == 2


def test_a_stream_without_within_or_with_a_watermark_is_refused(stream: DataFrame) -> None:
    with pytest.raises(OptionError, match="needs within"):
        dedupe(stream)
    with pytest.raises(OptionError, match="event_time='storeTimestamp'"):
        dedupe(stream.withWatermark("storeTimestamp", "1 hour"), within="1 hour")
