"""A write fails if a broker has lost rows that it had acknowledged, as far as the offsets of later rows show it."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.testing import BrokerSettings, FakeCluster
from tests.support.processes import wait_for

TOPIC = "T"


def rows(first: int, count: int = 10) -> pa.RecordBatch:
    bodies = [f"row-{number}" for number in range(first, first + count)]
    return pa.record_batch({"body": bodies, "shardingKey": ["s"] * count})


def losing(cluster: FakeCluster) -> Iterator[pa.RecordBatch]:
    """Yield rows of a queue that has one request in flight. Before the last ones, the broker loses all others."""
    for first in (0, 10):
        yield rows(first)
        wait_for(lambda: len(cluster.messages(TOPIC)) == first + 10)  # noqa: B023 - it is called at once
    cluster.kill("broker-0", lose_unflushed=True)
    cluster.restart("broker-0")
    yield rows(20)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    # A power failure takes all messages of the test.
    with FakeCluster(topics={TOPIC: 1}, settings=lambda: BrokerSettings(flush_interval=3600.0)) as cluster:
        yield cluster


def test_a_write_fails_if_a_queue_has_lost_acknowledged_rows(cluster: FakeCluster) -> None:
    with (
        Producer("pg", name_server=cluster.name_server) as producer,
        pytest.raises(
            DeliveryError, match=r"queue T/broker-0/0 ended at offset \d+ before, and ends at 0 now"
        ) as raised,
    ):
        producer.send_arrow(losing(cluster), TOPIC, ordered="true")
    assert "A retry of the task sends all of its rows again" in str(raised.value)


def test_with_require_store_ok_false_rows_may_be_lost(cluster: FakeCluster) -> None:
    with Producer("pg", name_server=cluster.name_server) as producer:
        producer.send_arrow(losing(cluster), TOPIC, ordered="true", requireStoreOk="false")
    assert "row-29" in {message.body.decode() for message in cluster.messages(TOPIC)}
