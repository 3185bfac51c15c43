"""Reads from a real broker that limits cold reads, or that answers pulls with more bytes than a frame may have."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rocketmq_spark import Admin, read_arrow
from rocketmq_spark.cli.doctor import examine
from rocketmq_spark.errors import ReadError
from rocketmq_spark.producer.producer import Producer
from tests.support.cluster import SharedCluster, mqadmin

pytestmark = pytest.mark.integration

_BODY = 1024


@pytest.fixture
def cold(tuned: SharedCluster, topic: str, tmp_path: Path) -> Callable[[int], str]:
    """Store 400 messages in one queue, and return a function that limits a new group to some bytes in 5 s."""
    with Admin(tuned.name_server) as admin, Producer("cold", name_server=tuned.name_server) as producer:
        admin.create_topic(topic, 1)
        producer.send_arrow(pa.table({"body": [os.urandom(_BODY) for _ in range(400)]}), topic=topic)

    def limited(nbytes: int) -> str:
        group, address = f"cold-{topic}", tuned.brokers[0].address
        mqadmin(tmp_path, "updateColdDataFlowCtrGroupConfig", "-b", address, "-g", group, "-v", str(nbytes))
        return group

    return limited


def read(tuned: SharedCluster, topic: str, **options: str) -> pa.Table:
    return read_arrow(topic, nameServer=tuned.name_server, columns=["queueOffset", "body"], **options).read_all()


def test_read_of_a_group_without_members_continues_after_the_limit(
    tuned: SharedCluster, topic: str, cold: Callable[[int], str], caplog: pytest.LogCaptureFixture
) -> None:
    group = cold(250 * _BODY)
    rows = read(tuned, topic, consumerGroup=group, pullBatchSize="8")
    assert rows["queueOffset"].to_pylist() == [*range(400)]
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "coldDataFlow" in text]
    assert warning.startswith(f"the read is slow: pulling from {topic}/{tuned.brokers[0].name}/0 for the group {group}")


def test_read_without_progress_names_the_limit_and_the_command(
    tuned: SharedCluster, topic: str, cold: Callable[[int], str]
) -> None:
    group, broker = cold(1), tuned.brokers[0]
    with pytest.raises(ReadError) as failed:
        read(tuned, topic, consumerGroup=group, pullBatchSize="8", readTimeoutMs="1500")
    text = str(failed.value)
    assert text.startswith(f"reading {topic}/{broker.name}/0 up to offset 399: nothing came from offset ")
    assert f"for the group {group}: {broker.address} answered 1 SYSTEM_ERROR: java.lang.NullPointerException (" in text
    assert f"updateColdDataFlowCtrGroupConfig -b {broker.address} -g GROUP -v BYTES" in text


def test_doctor_reports_a_limit_of_cold_reads(tuned: SharedCluster) -> None:
    (found,) = [check for check in examine(tuned.name_server) if check.check == "cold reads"]
    name = tuned.brokers[0].name
    assert found.state == "warning"
    assert found.finding.startswith(f"{name} let a consumer group read 3,145,728 bytes of messages outside of memory")


def test_answers_above_16_mib_are_read_with_fewer_messages(tuned: SharedCluster, topic: str) -> None:
    bodies = [os.urandom(3_000_000) for _ in range(7)]
    with Admin(tuned.name_server) as admin, Producer("large", name_server=tuned.name_server) as producer:
        admin.create_topic(topic, 1)
        for body in bodies:
            producer.send_arrow(pa.table({"body": [body]}), topic=topic)
    # A group of RocketMQ, which has no limit of cold reads.
    rows = read(tuned, topic, consumerGroup="TOOLS_CONSUMER")
    assert rows["body"].to_pylist() == bodies
