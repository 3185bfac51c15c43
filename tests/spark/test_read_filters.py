"""Filters of a read, by the user's options and by Spark: the resulting rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import SharedCluster, create_topic
from tests.support.processes import wait_for
from tests.support.writes import messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Load = Callable[..., DataFrame]

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"

# Two of them have the same hash in Java; brokers strip others of what Java takes for blanks.
TAGS = ("AaAa", "BBBB", "AaBB", None, "grün", "\u3000AaAa", "\u00a0AaAa", "a b")


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


SEED = 0
PLACE = ("topic", "brokerName", "queueId", "queueOffset")


def places(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return the position and tag of each row of a frame, sorted."""
    rows = frame.select(*PLACE, "tags").collect()
    return sorted(map(tuple, rows), key=repr)


@pytest.fixture(scope="module")
def table(
    spark: SparkSession, cluster: SharedCluster, topics: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> DataFrame:
    """Return a table with the rows of the topics: Spark alone evaluates its plans."""
    files = str(tmp_path_factory.mktemp("table"))
    source = spark.read.format("rocketmq").option("nameServer", cluster.name_server)
    source.option("subscribe", ",".join(topics)).load().coalesce(1).write.mode("overwrite").parquet(files)
    rows = spark.read.parquet(files)
    assert rows.count() == 8 * len(TAGS) * 5
    return rows


@pytest.fixture(params=["false", "true"])
def push_down(request: pytest.FixtureRequest, spark: SparkSession) -> Iterator[None]:
    """Spark offers its conditions to Python sources, or not (PySpark 4.0 has no such setting)."""
    spark.conf.set(PUSH_DOWN, request.param)
    yield
    spark.conf.unset(PUSH_DOWN)


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
    "tags = '\\u3000AaAa'",
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


@pytest.fixture(scope="module")
def conditions(table: DataFrame) -> tuple[str, ...]:
    """`CONDITIONS`, and some on the times of the topics' messages."""
    times = sorted({str(row.at) for row in table.selectExpr("string(storeTimestamp) AS at").distinct().collect()})
    return (
        *CONDITIONS,
        f"storeTimestamp = TIMESTAMP '{times[0]}'",
        f"storeTimestamp IN (TIMESTAMP '{times[0]}', TIMESTAMP '{times[-1]}')",
        f"storeTimestamp > TIMESTAMP '{times[0]}' AND storeTimestamp <= TIMESTAMP '{times[-1]}'",
    )


@pytest.fixture
def everything(load: Load, topics: tuple[str, str]) -> DataFrame:
    """Return the rows of both topics. All plans of a test share this read."""
    return load(subscribe=",".join(topics))


@pytest.mark.parametrize("push_down", ["true"], indirect=True)
def test_one_read_with_many_conditions_returns_the_rows_of_each(
    everything: DataFrame, table: DataFrame, conditions: Sequence[str], push_down: None
) -> None:
    passes = [f"coalesce({condition}, false) AS passes{number}" for number, condition in enumerate(conditions)]
    expected = sorted(map(tuple, table.selectExpr(*PLACE, "tags", *passes).collect()), key=repr)
    for number, condition in enumerate(conditions, len(PLACE) + 1):
        assert places(everything.where(condition)) == [row[: len(PLACE) + 1] for row in expected if row[number]], (
            condition
        )
    assert everything.count() == len(expected)


def test_a_condition_narrows_no_other_plan_of_the_read(everything: DataFrame, push_down: None) -> None:
    first, second = everything.where("queueId = 0"), everything.where("queueId = 1")
    assert (first.count(), everything.count(), first.union(second).count()) == (160, 320, 320)
    # A row of queue 0 is at the place of one row of queue 1.
    same = ["topic", "brokerName", "queueOffset"]
    assert first.join(second, same).count() == 160
    assert first.cache().count() == 160
    first.unpersist()


def planned(kind: str, one: DataFrame, two: DataFrame, conditions: Sequence[str]) -> DataFrame:
    """Return a plan of two frames."""
    left, right = one.where(conditions[0]), two.where(conditions[1])
    if kind == "union":
        return left.unionByName(right)
    if kind == "semi-join":
        return left.join(right.select(*PLACE), [*PLACE], "left_semi")
    if kind == "cache":
        return left.cache()
    return left.orderBy(*PLACE).limit(50) if kind == "limit" else left


def test_random_plans_of_one_read_return_the_rows_of_a_table(
    spark: SparkSession, everything: DataFrame, table: DataFrame, conditions: Sequence[str], push_down: None
) -> None:
    random = Random(SEED)
    # The same plans of the read and of the table. Each uses earlier ones.
    plans, said = [(everything, table)], list[str]()
    for kind in random.sample(["where", "where", "union", "semi-join", "cache", "limit"], k=6):
        used, chosen = random.choices(range(len(plans)), k=2), random.sample(conditions, 2)
        said.append(f"{kind} of {used}: {chosen}")
        (one, expected_one), (two, expected_two) = (plans[number] for number in used)
        frame, expected = planned(kind, one, two, chosen), planned(kind, expected_one, expected_two, chosen)
        plans.append((frame, expected))
        assert places(frame) == places(expected), said
        assert (frame.count(), everything.count()) == (expected.count(), 8 * len(TAGS) * 5), said
    spark.catalog.clearCache()


@pytest.mark.parametrize("place", [0, 1])
def test_an_expression_of_tags_is_exact_though_brokers_compare_hashes(
    load: Load, topics: tuple[str, str], push_down: None, place: int
) -> None:
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
