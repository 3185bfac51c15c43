"""RocketMQ's own Java client works with the fake cluster, and sees there what it sees on a real one."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.cluster import SharedCluster, create_topic
from tests.support.java import Java, line_of

pytestmark = pytest.mark.integration

QUEUES = 4


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
    """Return what does not depend on time and place, of the results of sends and of the messages."""
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
            sorted(message["properties"].keys() - {"TIMER_OUT_MS", "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS"}),
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
