"""Batch and streaming reads from a broker that has deleted its oldest messages, and that supports SQL filters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark import read_arrow
from rocketmq_spark.admin import QueueOffsets, queue_offsets
from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from tests.support.cluster import started
from tests.support.processes import PATIENCE, at_most, wait_for
from tests.support.streams import Feed, Kept
from tests.support.writes import make_topic, messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]

MIB = 1024 * 1024
PROPERTIES = {"mappedFileSizeCommitLog": 8 * MIB, "enablePropertyFilter": True}


@pytest.fixture(scope="module")
def servers() -> Iterator[LocalCluster]:
    with started(LocalCluster(broker_properties=PROPERTIES, start_timeout=PATIENCE)) as cluster:
        yield cluster


@pytest.fixture
def load(spark: SparkSession, servers: LocalCluster, topic: str, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(**options: Any) -> DataFrame:
        return spark.read.format("rocketmq").options(nameServer=servers.name_server, subscribe=topic, **options).load()

    return load_from


def send(servers: LocalCluster, topic: str, columns: dict[str, Any]) -> None:
    with Producer("own", name_server=servers.name_server, compress_type="NONE") as producer:
        producer.send_arrow(pa.RecordBatch.from_pydict(columns), topic)


def test_sql_expression_filters_by_properties(
    servers: LocalCluster, topic: str, load: Callable[..., DataFrame]
) -> None:
    make_topic(servers, topic, queues=2)
    numbers = range(100)
    properties = pa.array(
        [[("n", str(n)), ("region", "grün" if n % 4 else "blå")] for n in numbers], pa.map_(pa.string(), pa.string())
    )
    tags = ["even" if n % 2 == 0 else "odd" for n in numbers]
    send(servers, topic, {"body": [str(n) for n in numbers], "tags": tags, "properties": properties})
    wait_for(lambda: messages_in(servers.name_server, topic) == 100)
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


def test_brokers_evaluate_conditions_as_documented(servers: LocalCluster, topic: str) -> None:
    """docs/reading.md#filters has a table of these conditions."""
    make_topic(servers, topic, queues=1)
    rows = [
        {"n": "1", "city": "Berlin", "b": "true"},
        {"n": "2", "city": "Bern", "b": "false"},
        {"n": "x", "b": "true"},
    ]
    properties = pa.array([[*row.items()] for row in rows], pa.map_(pa.string(), pa.string()))
    send(servers, topic, {"body": ["0", "1", "2"], "tags": ["A", "B", "A"], "properties": properties})
    wait_for(lambda: messages_in(servers.name_server, topic) == 3)

    def found(condition: str) -> str:
        options = {"nameServer": servers.name_server, "filterType": "SQL92", "subExpression": condition}
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


@pytest.fixture
def read_available(
    spark: SparkSession, servers: LocalCluster, topic: str, metrics: Metrics, tmp_path: Path
) -> Callable[..., list[str]]:
    """Run a stream with the test's checkpoint until it has read all present messages; return the sorted keys."""

    def run(**options: str) -> list[str]:
        given = {"nameServer": servers.name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
        frame, kept = spark.readStream.format("rocketmq").options(**given).load(), Kept()
        writer = frame.writeStream.foreachBatch(kept).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return sorted(kept.keys.elements())

    return run


def forget(broker: Broker, files: int) -> None:
    """Make a broker delete its oldest files as if they had expired; it does so from a minute after its start on."""
    broker.kill()
    for file in sorted((broker.folder / "store" / "commitlog").iterdir())[:files]:
        file.unlink()
    broker.restart()


def test_expired_messages_fail_a_read_unless_data_loss_is_allowed(
    servers: LocalCluster, topic: str, load: Callable[..., DataFrame], read_available: Callable[..., list[str]]
) -> None:
    make_topic(servers, topic, queues=1)
    broker = servers.brokers[0]
    with Producer("own", name_server=servers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, servers.name_server, topic)
        # One at a time: requests that are in flight together may be stored in another order.
        keys = [key for _ in range(5) for key in feed(1, nbytes=MIB)]
        assert read_available() == sorted(keys)
        keys += [key for _ in range(25) for key in feed(1, nbytes=MIB)]
    forget(broker, files=2)

    def state() -> QueueOffsets:
        (found,) = queue_offsets([servers.name_server], topic)
        return found

    left = state().min_offset
    assert 5 < left < 30
    assert state().max_offset == 30
    starts = json.dumps({topic: {broker.name: {"0": 5}}})
    gone = rf"messages 5 to {left - 1} of .* are not there any more.*failOnDataLoss"
    with pytest.raises(PySparkException, match=gone):
        load(startingOffsets=starts).collect()
    with pytest.raises(PySparkException, match=gone):
        read_available()
    # Some micro-batches have only deleted messages.
    assert read_available(failOnDataLoss="false", **at_most(4)) == sorted(keys[left:])

    def offsets(**options: str) -> list[int]:
        rows = load(**options).select("keys", "queueOffset").collect()
        assert all(row["keys"] == keys[row.queueOffset] for row in rows)
        return sorted(row.queueOffset for row in rows)

    assert offsets() == list(range(left, 30))
    assert offsets(startingOffsets=starts, failOnDataLoss="false") == list(range(left, 30))
    before = json.dumps({topic: {broker.name: {"0": 8}}})
    assert offsets(startingOffsets=starts, endingOffsets=before, failOnDataLoss="false") == []
    with pytest.raises(PySparkException, match=r"messages 5 to 7 of .* are not there any more"):
        load(startingOffsets=starts, endingOffsets=before).collect()


def test_rerun_of_a_micro_batch_reports_expired_messages_of_new_queues(
    spark: SparkSession, metrics: Metrics, servers: LocalCluster, topic: str, tmp_path: Path
) -> None:
    broker, kept = servers.brokers[0], Kept()

    def run(checkpoint: str, into: Callable[[DataFrame, int], None], **options: str) -> None:
        given = {"nameServer": servers.name_server, "subscribe": topic, "startingOffsets": "earliest", **options}
        writer = spark.readStream.format("rocketmq").options(**given).load().writeStream.foreachBatch(into)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()

    def fail(frame: DataFrame, batch_id: int) -> None:
        raise RuntimeError("the sink is full")

    with Producer("own", name_server=servers.name_server, compress_type="NONE") as producer:
        make_topic(servers, topic, queues=1)
        Feed(producer, servers.name_server, topic)(1)
    run("running", kept)
    make_topic(servers, topic, queues=2)
    with Producer("own-again", name_server=servers.name_server, compress_type="NONE") as producer:
        feed = Feed(producer, servers.name_server, topic)
        # One at a time: requests that are in flight together may be stored in another order.
        keys = [key for _ in range(20) for key in feed(1, nbytes=MIB, to=(broker.name, 1))]
    # A new query meets both queues in the micro-batch that fails, the running query only the second one.
    for checkpoint in ("running", "new"):
        with pytest.raises(StreamingQueryException, match="the sink is full"):
            run(checkpoint, fail)
    forget(broker, files=len(list((broker.folder / "store" / "commitlog").iterdir())) - 2)
    left = queue_offsets([servers.name_server], topic)[1].min_offset
    assert 0 < left < 20
    for checkpoint, lost in (("running", rf"{left - 1} of {topic}/{broker.name}/1"), ("new", r"\d+ of .*")):
        kept.batches.clear()
        gone = f"messages 0 to {lost} are not there any more.*failOnDataLoss"
        with pytest.raises(StreamingQueryException, match=gone):
            run(checkpoint, kept)
        run(checkpoint, kept, failOnDataLoss="false")
        assert sorted(kept.keys.elements()) == sorted(keys[left:])
