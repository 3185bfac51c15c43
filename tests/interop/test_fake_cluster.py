"""RocketMQ's own clients work with the fake cluster, and see there what they see on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.cluster import SharedCluster, create_topic
from tests.support.conformance_grpc import SOMETIMES
from tests.support.java import Java, line_of
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

QUEUES = 4
KINDS = ("NORMAL", "FIFO", "DELAY", "TRANSACTION")
OFFICIAL_SENDS = Path(__file__).parents[1] / "programs" / "official_sends.py"


def requests_of(topic: str) -> list[dict[str, Any]]:
    """Sends of each kind."""
    large = b"a message of many words " * 4000
    return [
        {"messages": [line_of(topic, b"single", {"KEYS": "k1 k2", "TAGS": "a", "mine": "yours"}, flag=7)]},
        {"messages": [line_of(topic, b"batch-%d" % number) for number in range(5)], "batch": True},
        {"messages": [line_of(topic, b"hashed")], "hashKey": "key-1"},
        *({"messages": [line_of(topic, large)], "compressType": kind} for kind in ("ZLIB", "LZ4", "ZSTD")),
        {"messages": [line_of(topic, b"committed")], "transaction": "COMMIT_MESSAGE"},
        {"messages": [line_of(topic, b"rolled back")], "transaction": "ROLLBACK_MESSAGE"},
        {"messages": [line_of(topic, b"later", {"DELAY": "1"})]},
        {"messages": [line_of(topic, b"timer")], "deliverInMs": 1000},
    ]


def seen_by_java(java: Java, name_server: str, topic: str) -> tuple[list[Any], list[Any]]:
    """Return the parts of send results and messages that are the same in every run and cluster."""
    results = java.send(name_server, requests_of(topic))
    sent = [
        (
            result["status"],
            result["topic"],
            len(result["uniqKeys"]),
            result["msgId"] == ",".join(result["uniqKeys"]),
            bool(result["transactionId"]),
            result["regionId"],
            result["traceOn"],
        )
        for result in results
    ]
    read = [
        (
            message["body"],
            message["flag"],
            message["sysFlag"],
            sorted(message["properties"].keys() - SOMETIMES),
            message["reconsumeTimes"],
        )
        for message in java.read_topic(name_server, topic, 13)
    ]
    return sent, sorted(read)


def test_java_client_sees_the_same_on_both_clusters(java: Java, cluster: SharedCluster, topic: str) -> None:
    create_topic(cluster, topic, "NORMAL", QUEUES)
    real = seen_by_java(java, cluster.name_server, topic)
    with FakeCluster(len(cluster.brokers), topics={topic: QUEUES}) as fake:
        sent, read = seen_by_java(java, fake.name_server, topic)
    assert sent == real[0]
    assert read == real[1]
    assert len(read) == 13


def test_java_producer_retries_what_the_fake_cluster_rejects(java: Java, topic: str) -> None:
    with FakeCluster(2, topics={topic: QUEUES}) as fake:
        fake.brokers["broker-0"].play(Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"))
        fake.brokers["broker-1"].play(Reply(closes=True, stored=True))
        results = java.send(fake.name_server, [{"messages": [line_of(topic, b"x")]}] * 4)
        assert {result["status"] for result in results} == {"SEND_OK"}
        assert fake.brokers["broker-0"].played == {"code 2 before storing": 1}
        assert fake.brokers["broker-1"].played == {"connection closed after storing": 1}
        assert len(fake.messages(topic)) == 5


def stored_by_python(home: Path, endpoints: str, name_server: str, topics: Mapping[str, str]) -> list[Any]:
    """Return the messages that Python's client for proxies has sent; `home` is where it may write."""
    arguments = json.dumps({"endpoints": endpoints, **topics})
    command = [sys.executable, str(OFFICIAL_SENDS), arguments]
    environment = {**os.environ, "HOME": str(home)}
    subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return [
        (message.body, message.tags, message.keys, message.sys_flag, sorted(message.properties.keys() - SOMETIMES))
        for topic in topics.values()
        for message in read_topic(name_server, topic, 1)
    ]


def test_python_client_for_proxies_stores_the_same_on_both(cluster: SharedCluster, topic: str, tmp_path: Path) -> None:
    topics = {kind: create_topic(cluster, f"{topic}-{kind}", kind, QUEUES) for kind in KINDS}
    real = stored_by_python(tmp_path, cluster.endpoints, cluster.name_server, topics)
    with FakeCluster(len(cluster.brokers), proxy=True) as fake:
        for kind, name in topics.items():
            fake.create_topic(name, QUEUES, attributes={"message.type": kind})
        assert stored_by_python(tmp_path, fake.endpoints, fake.name_server, topics) == real
    assert [body for body, *_ in real] == [b"NORMAL", b"FIFO", b"DELAY", b"committed"]
