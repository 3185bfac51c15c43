"""`spark.read` from a broker that soon forgets what it has, and that takes SQL as a filter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.admin import QueueOffsets, queue_offsets
from rocketmq_spark.client.producer import Producer
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.spark.report import Metrics
from tests.conftest import QUICK_READS, started
from tests.waiting import wait_for
from tests.writes import make_topic, messages_in, set_config

pytestmark = [pytest.mark.spark, pytest.mark.integration]

MIB = 1024 * 1024
FORGETFUL = {
    "mappedFileSizeCommitLog": 8 * MIB,
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
    "cleanResourceInterval": 200,
    "deleteCommitLogFilesInterval": 1,
    "deleteConsumeQueueFilesInterval": 1,
    "enablePropertyFilter": True,
}


@pytest.fixture(scope="module")
def own() -> Iterator[LocalCluster]:
    with started(LocalCluster(broker_properties={**QUICK_READS, **FORGETFUL})) as cluster:
        yield cluster


@pytest.fixture
def load(spark: SparkSession, own: LocalCluster, topic: str, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(**options: Any) -> DataFrame:
        return spark.read.format("rocketmq").options(nameServer=own.name_server, subscribe=topic, **options).load()

    return load_from


def send(own: LocalCluster, topic: str, columns: dict[str, Any]) -> None:
    with Producer("own", name_server=own.name_server, compress_type="NONE") as producer:
        producer.send_arrow(pa.RecordBatch.from_pydict(columns), topic)


def test_sql_chooses_by_properties(own: LocalCluster, topic: str, load: Callable[..., DataFrame]) -> None:
    make_topic(own, topic, queues=2)
    numbers = range(100)
    properties = pa.array(
        [[("n", str(n)), ("region", "grün" if n % 4 else "blå")] for n in numbers], pa.map_(pa.string(), pa.string())
    )
    tags = ["even" if n % 2 == 0 else "odd" for n in numbers]
    send(own, topic, {"body": [str(n) for n in numbers], "tags": tags, "properties": properties})
    wait_for(lambda: messages_in(own.name_server, topic) == 100)
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
    with pytest.raises(PySparkException, match=r"subExpression='n > > 1' .*SUBSCRIPTION_PARSE_FAILED"):
        load(filterType="SQL92", subExpression="n > > 1").collect()


def test_expired_messages_fail_the_read_unless_they_may_be_gone(
    own: LocalCluster, topic: str, load: Callable[..., DataFrame]
) -> None:
    make_topic(own, topic, queues=1)
    for first in range(0, 30, 10):
        send(own, topic, {"body": [f"{number} ".ljust(MIB, "x") for number in range(first, first + 10)]})
    wait_for(lambda: messages_in(own.name_server, topic) == 30)
    broker = own.brokers[0]
    set_config(broker, fileReservedTime=0)

    def state() -> QueueOffsets:
        (found,) = queue_offsets([own.name_server], topic)
        return found

    wait_for(lambda: state().min_offset > 10)
    set_config(broker, fileReservedTime=72)
    left = state().min_offset
    assert state().max_offset == 30
    starts = json.dumps({topic: {broker.name: {"0": 5}}})
    with pytest.raises(
        PySparkException, match=rf"messages 5 to {left - 1} of .* are not there any more.*failOnDataLoss"
    ):
        load(startingOffsets=starts).collect()

    def offsets(**options: str) -> list[int]:
        rows = load(**options).select("body", "queueOffset").collect()
        assert all(bytes(row.body).startswith(b"%d " % row.queueOffset) for row in rows)
        return sorted(row.queueOffset for row in rows)

    assert offsets() == list(range(left, 30))
    assert offsets(startingOffsets=starts, failOnDataLoss="false") == list(range(left, 30))
    gone = json.dumps({topic: {broker.name: {"0": 8}}})
    assert offsets(startingOffsets=starts, endingOffsets=gone, failOnDataLoss="false") == []
    with pytest.raises(PySparkException, match=r"messages 5 to 7 of .* are not there any more"):
        load(startingOffsets=starts, endingOffsets=gone).collect()
