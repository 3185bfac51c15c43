"""Brokers that store a message, but not safely: the slave is missing, or the flush times out.

A 5.x broker with a missing slave answers FLUSH_SLAVE_TIMEOUT. A 4.x broker answers SLAVE_NOT_AVAILABLE, which
tests/unit/sink/test_pipeline.py tests.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import set_config
from tests.support.reading import read_topic
from tests.support.writes import SMALL, Trial, keys_of, make_topic

pytestmark = [pytest.mark.faults, pytest.mark.integration]

# Broker properties that cause each status, and properties that end it.
UNSAFE: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "FLUSH_SLAVE_TIMEOUT": (
        {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "slaveTimeout": 20},
        {"brokerRole": "ASYNC_MASTER", "inSyncReplicas": 1, "slaveTimeout": 3000},
    ),
    "FLUSH_DISK_TIMEOUT": ({"syncFlushTimeout": 1}, {"syncFlushTimeout": 5000}),
}
EITHER = pytest.mark.parametrize(
    "status", ["FLUSH_SLAVE_TIMEOUT", pytest.param("FLUSH_DISK_TIMEOUT", marks=pytest.mark.long)]
)


@contextlib.contextmanager
def unsafe(broker: Broker, status: str) -> Iterator[None]:
    """Make a broker answer with a status during the block."""
    ill, well = UNSAFE[status]
    set_config(broker, **ill)
    try:
        yield
    finally:
        set_config(broker, **well)


@EITHER
@pytest.mark.long
@pytest.mark.spark
def test_unsafe_rows_of_one_broker_are_stored_safely_by_another(trial: Trial, status: str) -> None:
    broker, retries = trial.cluster.brokers[1], 2
    options: dict[str, Any] = {"retryAnotherBrokerWhenNotStoreOK": True, "retryTimesWhenSendFailed": retries}
    with unsafe(broker, status):
        trial.write(10_000, per_second=10_000, **options)
    reasons = trial.metrics.to_dict()[broker.name]["retries_by_reason"]
    account = trial.settle(f"{status} of one broker, the other is tried")
    assert reasons.keys() == {status}
    assert account.repeats > 0
    assert account.most <= 1 + retries


@EITHER
@pytest.mark.long
@pytest.mark.spark
def test_temporarily_unsafe_rows_are_stored_safely_in_the_end(trial: Trial, status: str) -> None:
    # With the default backoff, this number of retries takes more than twice as long as the fault.
    broker, retries = trial.cluster.brokers[1], 12

    def for_a_while() -> None:
        with unsafe(broker, status):
            time.sleep(5.0)

    trial.write(20_000, for_a_while, per_second=3_000, retryTimesWhenSendFailed=retries)
    account = trial.settle(f"{status} of one broker for 5 s, retryTimesWhenSendFailed={retries}")
    assert account.repeats > 0
    assert account.most <= 1 + retries


def producer_with(cluster: LocalCluster, retries: int) -> Producer:
    return Producer("pg", name_server=cluster.name_server, retry_times_when_send_failed=retries)


@EITHER
def test_unsafe_rows_are_resent_at_most_retry_times_then_write_fails(
    two_brokers: LocalCluster, topic: str, status: str
) -> None:
    broker, rows, retries = two_brokers.brokers[1], 500, 2
    make_topic(two_brokers, topic, on=[broker])
    columns = {"body": ["body"] * rows, "keys": [f"k{number}" for number in range(rows)]}
    with unsafe(broker, status), producer_with(two_brokers, retries) as producer:
        with pytest.raises(DeliveryError, match=rf"{broker.name} .*{status}.*requireStoreOk=false") as raised:
            producer.send_arrow(pa.table(columns), topic, **SMALL)
        # With requireStoreOk=false the user accepts this.
        accepted = producer.send_arrow(pa.table(columns), topic, requireStoreOk="false", **SMALL)
    assert f"outcome unknown: {rows}" in str(raised.value)
    assert accepted.to_dict()[broker.name]["rows"] == rows
    times = Counter(message.keys for message in read_topic(two_brokers.name_server, topic, rows))
    assert set(times) == keys_of(rows)
    assert max(times.values()) == 1 + retries + 1
