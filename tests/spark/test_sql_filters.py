"""SQL filters of reads, which brokers evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark import read_arrow
from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import SharedCluster, create_topic
from tests.support.processes import wait_for
from tests.support.writes import messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture
def load(spark: SparkSession, tuned: SharedCluster, topic: str, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(**options: Any) -> DataFrame:
        return spark.read.format("rocketmq").options(nameServer=tuned.name_server, subscribe=topic, **options).load()

    return load_from


def send(tuned: SharedCluster, topic: str, columns: dict[str, Any]) -> None:
    with Producer("feed", name_server=tuned.name_server, compress_type="NONE") as producer:
        producer.send_arrow(pa.RecordBatch.from_pydict(columns), topic)


def test_sql_expression_filters_by_properties(tuned: SharedCluster, topic: str, load: Callable[..., DataFrame]) -> None:
    create_topic(tuned, topic, "NORMAL", 2)
    numbers = range(100)
    properties = pa.array(
        [[("n", str(n)), ("region", "grün" if n % 4 else "blå")] for n in numbers], pa.map_(pa.string(), pa.string())
    )
    tags = ["even" if n % 2 == 0 else "odd" for n in numbers]
    send(tuned, topic, {"body": [str(n) for n in numbers], "tags": tags, "properties": properties})
    wait_for(lambda: messages_in(tuned.name_server, topic) == 100)
    for expression, expected in (
        ("n BETWEEN 10 AND 19", set(range(10, 20))),
        ("region = 'grün' AND TAGS IN ('even')", {n for n in numbers if n % 2 == 0 and n % 4}),
        ("missing IS NOT NULL", set()),
        ("missing IS NULL OR n > 5", set(numbers)),
    ):
        for options in ({}, {"maxRecordsPerPartition": "7"}):
            frame = load(filterType="SQL92", subExpression=expression, **options)
            found = [int(bytes(row.body)) for row in frame.where("tags <> ''").collect()]
            assert sorted(found) == sorted(expected), expression
    with pytest.raises(
        PySparkException, match=r"filterType=SQL92: a broker can't parse it: .*SUBSCRIPTION_PARSE_FAILED"
    ):
        load(filterType="SQL92", subExpression="n > > 1").collect()


def test_brokers_evaluate_conditions_as_documented(tuned: SharedCluster, topic: str) -> None:
    """docs/reading.md#filters has a table of these conditions."""
    create_topic(tuned, topic, "NORMAL", 1)
    rows = [
        {"n": "1", "city": "Berlin", "b": "true"},
        {"n": "2", "city": "Bern", "b": "false"},
        {"n": "x", "b": "true"},
    ]
    properties = pa.array([[*row.items()] for row in rows], pa.map_(pa.string(), pa.string()))
    send(tuned, topic, {"body": ["0", "1", "2"], "tags": ["A", "B", "A"], "properties": properties})
    wait_for(lambda: messages_in(tuned.name_server, topic) == 3)

    def found(condition: str) -> str:
        options = {"nameServer": tuned.name_server, "filterType": "SQL92", "subExpression": condition}
        batches = read_arrow(topic, **options)
        return "".join(sorted(body.as_py().decode() for batch in batches for body in batch["body"]))

    for condition, bodies in (
        ("n = 2", "1"),
        ("n <> 2", "0"),
        ("b = TRUE", "02"),
        ("TAGS = 'A'", "02"),
        ("n >= 1", "01"),
        ("n BETWEEN 2 AND 5", "1"),
        ("city IN ('Bern', 'Paris')", "1"),
        ("city NOT IN ('Bern')", "0"),
        ("city CONTAINS 'rl'", "0"),
        ("city NOT CONTAINS 'rl'", "1"),
        ("city STARTSWITH 'Ber'", "01"),
        ("city ENDSWITH 'n'", "01"),
        ("city NOT ENDSWITH 'in'", "1"),
        ("city IS NULL", "2"),
        ("n > 1 OR b = TRUE AND city IS NOT NULL", "01"),
        ("NOT (city = 'Bern')", "0"),
        ("NOT city = 'Bern'", ""),
        ("n + 1 = 3", ""),
        ("lower(city) = 'bern'", ""),
        ("city", ""),
        ("city <> 'Paris'", "01"),
    ):
        assert found(condition) == bodies, condition
    for condition in ("n != 2", "city > 'Bern'", "n IN (1, 2)", "b IS TRUE"):
        with pytest.raises(OptionError, match="SUBSCRIPTION_PARSE_FAILED"):
            found(condition)
