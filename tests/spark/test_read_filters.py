"""Filters of a read, by the user and pushed down by Spark: the resulting rows, and the pulled messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import SharedCluster, create_topic
from tests.support.processes import PYSPARK, wait_for
from tests.support.writes import messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Load = Callable[..., DataFrame]

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
NEEDS_PUSH_DOWN = pytest.mark.skipif(PYSPARK < (4, 1), reason="PySpark 4.1 and newer push filters down")

# Two of them have the same hash in Java; brokers strip others of what Java takes for blanks.
TAGS = ("AaAa", "BBBB", "AaBB", None, "grün", "\tAaAa", "\u00a0AaAa", "a b")


@pytest.fixture
def push_down(spark: SparkSession) -> Iterator[None]:
    spark.conf.set(PUSH_DOWN, "true")
    yield
    spark.conf.unset(PUSH_DOWN)


@pytest.fixture(scope="module")
def topics(cluster: SharedCluster) -> tuple[str, str]:
    """A topic of two queues per broker, and one of inner batches. Each queue has every tag five times."""
    plain = create_topic(cluster, "read-filters", "NORMAL")
    inner = create_topic(cluster, "read-filters-inner", "NORMAL", inner=True)
    tags = TAGS * 5
    with Producer("read-filters", name_server=cluster.name_server) as producer:
        for broker in cluster.brokers:
            for queue in (0, 1):
                columns: dict[str, Any] = {
                    "body": [f"{broker.name} {queue} {number}" for number in range(len(tags))],
                    "tags": pa.array(tags, pa.string()),
                    "brokerName": [broker.name] * len(tags),
                    "queueId": pa.array([queue] * len(tags), pa.int32()),
                    "flag": pa.array(range(len(tags)), pa.int32()),
                }
                rows = pa.RecordBatch.from_pydict(columns)
                producer.send_arrow(rows, plain, queueSelector="column")
                producer.send_arrow(rows, inner, queueSelector="column", batchType="inner")
    wait_for(lambda: messages_in(cluster.name_server, plain) + messages_in(cluster.name_server, inner) == 8 * len(tags))
    return plain, inner


def places(frame: DataFrame) -> set[tuple[Any, ...]]:
    """Return the messages of a frame; each must be there once."""
    rows = frame.select("topic", "brokerName", "queueId", "queueOffset", "tags").collect()
    assert len(set(rows)) == len(rows)
    return {tuple(row) for row in rows}


@pytest.fixture
def everything(load: Load, topics: tuple[str, str]) -> Iterator[DataFrame]:
    frame = load(subscribe=",".join(topics)).cache()
    assert frame.count() == 8 * len(TAGS) * 5
    yield frame
    frame.unpersist()


CONDITIONS = (
    "queueId > 0",
    "queueId <= 0",
    "queueId = 1 AND brokerName IN ('broker-0', 'broker-a')",
    "queueId IN (1, 7)",
    "queueId <> 1",
    "NOT queueId IN (1)",
    "topic = 'read-filters'",
    "topic > 'read-filters'",
    "topic LIKE '%inner'",
    "brokerName >= 'broker'",
    "queueOffset > 3 AND queueOffset <= 20",
    "queueOffset BETWEEN 7 AND 7",
    "queueOffset IN (1, 5, 39)",
    "queueOffset <> 2 AND queueOffset >= -5",
    "queueOffset < -1",
    "queueOffset > 9223372036854775806",
    "queueOffset = 4 OR queueId = 0",
    "tags = 'AaAa'",
    "tags = 'AaAa' AND tags IN ('AaAa', 'BBBB')",
    "tags IN ('BBBB', 'grün', NULL)",
    "tags IN ('AaBB', 'grün')",
    "tags > 'AaAa'",
    "tags <= 'AaBB'",
    "tags <> 'AaAa'",
    "tags LIKE 'Aa%'",
    "tags IS NULL",
    "tags <=> 'AaAa'",
    "tags = '\\tAaAa'",
    "tags = '\\u00a0AaAa'",
    "tags = 'a b'",
    "tags = 'a||b'",
    "storeTimestamp > TIMESTAMP '2001-01-01 00:00:00'",
    "storeTimestamp < TIMESTAMP '2001-01-01 00:00:00'",
    "storeTimestamp < TIMESTAMP '1961-01-01 00:00:00'",
    "storeTimestamp >= TIMESTAMP '2101-01-01 00:00:00'",
    "storeTimestamp IN (TIMESTAMP '2001-01-01 00:00:00', TIMESTAMP '2101-01-01 00:00:00')",
    "flag = 3 AND queueOffset < 10",
    "properties['TAGS'] = 'BBBB'",
)


@NEEDS_PUSH_DOWN
def test_filters_that_are_pushed_down_change_no_row(
    load: Load, topics: tuple[str, str], everything: DataFrame, push_down: None
) -> None:
    for condition in CONDITIONS:
        expected = places(everything.where(condition))
        assert places(load(subscribe=",".join(topics)).where(condition)) == expected, condition


@NEEDS_PUSH_DOWN
def test_conditions_on_store_timestamp_find_their_rows(
    load: Load, topics: tuple[str, str], everything: DataFrame, push_down: None
) -> None:
    times = sorted(row.at for row in everything.selectExpr("string(storeTimestamp) AS at").distinct().collect())
    for condition in (
        f"storeTimestamp = TIMESTAMP '{times[0]}'",
        f"storeTimestamp IN (TIMESTAMP '{times[0]}', TIMESTAMP '{times[-1]}')",
        f"storeTimestamp > TIMESTAMP '{times[0]}' AND storeTimestamp <= TIMESTAMP '{times[-1]}'",
    ):
        expected = places(everything.where(condition))
        assert expected
        assert places(load(subscribe=",".join(topics)).where(condition)) == expected, condition


@NEEDS_PUSH_DOWN
@pytest.mark.parametrize(
    ("condition", "offsets"),
    [
        ("queueId = 1", 80),
        ("brokerName = '{broker}' AND queueId IN (0)", 40),
        ("queueOffset >= 10 AND queueOffset < 13", 12),
        ("topic = 'another'", 1),
        ("storeTimestamp > TIMESTAMP '2101-01-01 00:00:00'", 1),
        ("storeTimestamp < TIMESTAMP '2001-01-01 00:00:00'", 1),
        ("storeTimestamp >= TIMESTAMP '2001-01-01 00:00:00'", 160),
    ],
)
def test_filtered_out_offsets_are_not_planned(
    spark: SparkSession,
    cluster: SharedCluster,
    load: Load,
    topics: tuple[str, str],
    push_down: None,
    condition: str,
    offsets: int,
) -> None:
    # One partition per offset, and one for an empty range.
    text = condition.format(broker=cluster.brokers[0].name)
    planned = load(subscribe=topics[0], maxRecordsPerPartition="1").where(text).rdd.getNumPartitions()
    spark.conf.set(PUSH_DOWN, "false")
    without = load(subscribe=topics[0], maxRecordsPerPartition="1").where(text).rdd.getNumPartitions()
    assert (planned, without) == (offsets, 160)


def scanned(frame: DataFrame) -> int:
    """Collect a frame, and return the number of rows that its source returned to Spark."""
    frame.collect()
    leaf = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
    return int(leaf.metrics().get("numOutputRows").get().value())


@NEEDS_PUSH_DOWN
def test_pushed_down_tag_is_filtered_by_the_brokers(load: Load, topics: tuple[str, str], push_down: None) -> None:
    assert scanned(load(subscribe=topics[0]).where("tags = 'AaAa'")) == 20
    assert scanned(load(subscribe=topics[0]).where("tags > 'AaAa'")) == 160


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("enabled", ["false", "true"])
def test_an_expression_of_tags_is_exact_though_brokers_compare_hashes(
    spark: SparkSession, load: Load, topics: tuple[str, str], push_down: None, place: int, enabled: str
) -> None:
    spark.conf.set(PUSH_DOWN, enabled)

    def found(expression: str, condition: str = "true") -> dict[str, int]:
        rows = (
            load(subscribe=topics[place], subExpression=expression).where(condition).groupBy("tags").count().collect()
        )
        return {row.tags: row["count"] for row in rows}

    assert found("AaAa") == {"AaAa": 20}
    assert found(" BBBB  ||grün|| none") == {"BBBB": 20, "grün": 20}
    assert found("AaAa || BBBB", "tags = 'BBBB'") == {"BBBB": 20}
    assert found("\u00a0AaAa || none") == {"\u00a0AaAa": 20}
    assert found("AaAa", "tags = 'grün'") == {}
    assert found("*", "tags = 'AaBB'") == {"AaBB": 20}


def test_task_ends_if_no_remaining_message_passes_the_filter(load: Load, topics: tuple[str, str]) -> None:
    rows = load(subscribe=topics[0], subExpression="grün", maxRecordsPerPartition="3").collect()
    assert len(rows) == 20
    assert load(subscribe=topics[0], subExpression="nobody has this").collect() == []


def test_sql_filter_that_brokers_do_not_support_is_an_error_with_advice(load: Load, topics: tuple[str, str]) -> None:
    with pytest.raises(PySparkException, match="enablePropertyFilter"):
        load(subscribe=topics[0], filterType="SQL92", subExpression="a > 1", readTimeoutMs="60000").collect()


def test_a_tag_of_a_single_message_is_found(
    spark: SparkSession, cluster: SharedCluster, topic: str, load: Load
) -> None:
    with Producer("one-tag", name_server=cluster.name_server) as producer:
        for tag in ("AaAa", "BBBB"):
            producer.send(Message.of(topic, tag.encode(), tags=tag))
    wait_for(lambda: messages_in(cluster.name_server, topic) == 2)
    assert [bytes(row.body) for row in load(subExpression="BBBB").collect()] == [b"BBBB"]
