"""Messages of an asyncio producer that must not share a request with others.

A compaction topic drops messages without keys from a shared request, silently. gRPC cannot carry some messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark import aio
from rocketmq_spark.errors import MQBrokerException, MQClientException
from rocketmq_spark.model.message import Message
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.processes import PATIENCE

PATIENT = {"send_msg_timeout": 60_000}


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(topics={"plain": 1}, proxy=True) as running:
        running.create_topic("latest", 1, attributes={"message.type": "NORMAL", "cleanup.policy": "COMPACTION"})
        yield running


def outcomes(messages: list[Message], **servers: Any) -> list[Any]:
    """Return the result or the error of each message; all are sent at the same time."""

    async def send() -> list[Any]:
        async with aio.Producer("pg", **PATIENT, **servers) as producer:
            sends = asyncio.gather(*map(producer.send, messages), return_exceptions=True)
            return await asyncio.wait_for(sends, PATIENCE)

    return asyncio.run(send())


def bodies(cluster: FakeCluster, topic: str) -> list[bytes]:
    return sorted(message.body for message in cluster.messages(topic))


def batches(cluster: FakeCluster) -> int:
    """Return the number of shared requests that the broker has received."""
    return sum(one.code == RequestCode.SEND_BATCH_MESSAGE for one in cluster.brokers["broker-0"].requests)


def hide_configurations(cluster: FakeCluster, code: ResponseCode) -> None:
    cluster.brokers["broker-0"].always[RequestCode.GET_TOPIC_CONFIG] = Reply.code(code, "not for you")


def check_keyless_are_rejected(cluster: FakeCluster, **servers: Any) -> None:
    keys = [None, "", "k", None, "k"]
    messages = [Message.of("latest", b"%d" % number, keys=key) for number, key in enumerate(keys)]
    results = outcomes(messages, **servers)
    rejected = [isinstance(result, MQBrokerException) and result.invalid_message for result in results]
    assert rejected == [True, True, False, True, False]
    assert bodies(cluster, "latest") == [b"2", b"4"]


def test_keyless_messages_to_a_compaction_topic_are_rejected_over_grpc(cluster: FakeCluster) -> None:
    check_keyless_are_rejected(cluster, endpoints=cluster.endpoints)


@pytest.mark.parametrize("code", [ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED])
def test_keyless_messages_to_an_unknown_topic_are_rejected_if_compacted(
    cluster: FakeCluster, code: ResponseCode
) -> None:
    hide_configurations(cluster, code)
    check_keyless_are_rejected(cluster, name_server=cluster.name_server)


@pytest.mark.parametrize("code", [ResponseCode.NO_PERMISSION, ResponseCode.REQUEST_CODE_NOT_SUPPORTED])
def test_one_keyless_message_is_sent_to_an_unknown_topic(cluster: FakeCluster, code: ResponseCode) -> None:
    hide_configurations(cluster, code)
    for topic, is_stored in {"plain": True, "latest": False}.items():
        (result,) = outcomes([Message.of(topic, b"1")], name_server=cluster.name_server)
        assert isinstance(result, MQBrokerException) is not is_stored
        assert bodies(cluster, topic) == [b"1"] * is_stored


def test_only_messages_with_keys_share_a_request_over_grpc(cluster: FakeCluster) -> None:
    assert cluster.proxy is not None
    messages = [Message.of("plain", b"%d" % number, keys="k" if number < 5 else None) for number in range(8)]
    assert not any(isinstance(result, Exception) for result in outcomes(messages, endpoints=cluster.endpoints))
    assert bodies(cluster, "plain") == [b"%d" % number for number in range(8)]
    assert len(cluster.proxy.requests("SendMessage")) == 4


def test_keyless_messages_of_a_plain_topic_share_a_request(cluster: FakeCluster) -> None:
    messages = [Message.of("plain", b"%d" % number) for number in range(8)]
    outcomes(messages, name_server=cluster.name_server)
    assert (batches(cluster), len(cluster.messages("plain"))) == (1, 8)


def test_keyless_messages_share_a_request_on_brokers_without_compaction(cluster: FakeCluster) -> None:
    hide_configurations(cluster, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
    cluster.brokers["broker-0"].figures["brokerVersionDesc"] = "V4_9_7"
    messages = [Message.of("plain", b"%d" % number) for number in range(8)]
    outcomes(messages, name_server=cluster.name_server)
    assert (batches(cluster), len(cluster.messages("plain"))) == (1, 8)


def test_a_message_that_grpc_cannot_carry_fails_alone(cluster: FakeCluster) -> None:
    messages = [Message.of("plain", b"%d" % number, keys="k") for number in range(4)]
    messages[1] = replace(messages[1], flag=7)
    results = outcomes(messages, endpoints=cluster.endpoints)
    assert [isinstance(result, Exception) for result in results] == [False, True, False, False]
    assert isinstance(results[1], MQClientException)
    assert (results[1].response_code, results[1].invalid_message) == (13, True)
    assert bodies(cluster, "plain") == [b"0", b"2", b"3"]
