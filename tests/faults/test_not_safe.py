"""Brokers that store a message, but not safely: the slave is missing, or the flush times out.

A 5.x broker with a missing slave answers FLUSH_SLAVE_TIMEOUT. A 4.x broker answers SLAVE_NOT_AVAILABLE, which
tests/unit/sink/test_pipeline.py tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import Message, SendStatus
from rocketmq_spark.cli.doctor import examine
from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import DeliveryError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.producer.producer import Producer
from tests.support.auditor import Row, audit
from tests.support.cluster import Slave, set_config
from tests.support.java import Java
from tests.support.processes import wait_for
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


def test_doctor_says_what_a_row_survives_with_and_without_a_slave(two_brokers: LocalCluster, topic: str) -> None:
    make_topic(two_brokers, topic, queues=2)
    master, flushing = two_brokers.brokers
    at_master = MessageQueue(topic, master.name, 0)

    def said() -> dict[str, tuple[str, str]]:
        found = [check for check in examine(two_brokers.name_server, topic=topic) if check.check == "durability"]
        return {check.finding.partition(":")[0]: (check.state, check.finding) for check in found}

    with Producer("survives", name_server=two_brokers.name_server, send_msg_timeout=20_000) as producer:
        before = said()
        assert "survives a power failure, not the loss of its disk" in before[flushing.name][1]
        assert "survives the end of the broker's process, not a power failure" in before[master.name][1]
        try:
            # No slave exists, and none is waited for.
            set_config(master, brokerRole="SYNC_MASTER", inSyncReplicas=1)
            assert producer.send(Message.of(topic, b"alone"), queue=at_master).status is SendStatus.SEND_OK
            assert said()[master.name][0] == "warning"
            assert "inSyncReplicas=1: an acknowledged row survives the end of" in said()[master.name][1]
            set_config(master, inSyncReplicas=2)
            assert "needs 2 brokers for each row, and 1 are registered" in said()[master.name][1]
            slave = Slave(two_brokers, topic)
            try:
                slave.start()
                # The first row can be slower than slaveTimeout.
                both = Message.of(topic, b"both")
                wait_for(lambda: producer.send(both, queue=at_master).status is SendStatus.SEND_OK)
                assert "survives the loss of 1 of its 2 disks" in said()[master.name][1]
            finally:
                slave.end()
        finally:
            set_config(master, brokerRole="ASYNC_MASTER", inSyncReplicas=1)


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
    two_brokers: LocalCluster, topic: str, status: str, java: Java
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
    given = [Row(topic, key, b"body", keys=key, repeats=True) for key in sorted(keys_of(rows))]
    found = audit(java, two_brokers.name_server, given)
    found.check()
    assert found.most == 1 + retries + 1
