"""Answers about consumer groups. The bodies are those of brokers of 4.9.7 and 5.5.0."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.groups import (
    ConsumerConnection,
    ConsumeStats,
    decode_committed_offset,
    decode_consume_stats,
    decode_consumer_connections,
)

STATS = (
    '{"consumeTps":0.0,"offsetTable":{{"brokerName":"broker-0","queueId":0,"topic":"T"}:{"brokerOffset":3,'
    '"consumerOffset":1,"lastTimestamp":1795855524185,"pullOffset":0},{"brokerName":"broker-0","queueId":1,'
    '"topic":"%RETRY%g"}:{"brokerOffset":0,"consumerOffset":0,"lastTimestamp":0}}}'
)
CONNECTIONS = (
    '{"connectionSet":[{"clientAddr":"127.0.0.1:44438","clientId":"1.2.3.4@spark#1","language":"PYTHON",'
    '"version":493}],"consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET","consumeType":"CONSUME_ACTIVELY",'
    '"messageModel":"CLUSTERING","subscriptionTable":{}}'
)


def test_offsets_of_a_group_are_read_for_each_queue() -> None:
    assert decode_consume_stats(STATS.encode()) == (
        ConsumeStats(MessageQueue("T", "broker-0", 0), 1, 3, 1795855524185),
        ConsumeStats(MessageQueue("%RETRY%g", "broker-0", 1), 0, 0, 0),
    )
    assert decode_consume_stats(b'{"consumeTps":0.0,"offsetTable":{}}') == ()


def test_keys_that_are_texts_are_read_too() -> None:
    body = STATS.replace('{{"', r'{"{\"').replace('{"brokerName":"broker-0","queueId":1', r'"x')
    with pytest.raises(RemotingCommandException):
        decode_consume_stats(body.encode())
    key = r'"{\"brokerName\":\"b\",\"queueId\":2,\"topic\":\"T\"}"'
    body = f'{{"offsetTable":{{{key}:{{"brokerOffset":3,"consumerOffset":1,"lastTimestamp":0}}}}}}'
    assert decode_consume_stats(body.encode()) == (ConsumeStats(MessageQueue("T", "b", 2), 1, 3, 0),)


def test_members_of_a_group_are_read() -> None:
    expected = ConsumerConnection("1.2.3.4@spark#1", "127.0.0.1:44438", "PYTHON")
    assert decode_consumer_connections(CONNECTIONS.encode()) == (expected,)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        STATS[:-1],
        STATS.replace('"topic":"T"', '"topic":7'),
        STATS.replace('"queueId":0', '"queueId":"0"'),
        STATS.replace('"brokerOffset":3', '"brokerOffset":true'),
        STATS.replace('"consumerOffset":1', '"consumerOffset":null'),
        STATS.replace('"brokerName"', '"broker"'),
        '{"offsetTable":{"no JSON":{"brokerOffset":3,"consumerOffset":1,"lastTimestamp":0}}}',
        '{"offsetTable":' * 50_000,
    ],
)
def test_invalid_offsets_of_a_group_are_an_error(body: str) -> None:
    with pytest.raises(RemotingCommandException):
        decode_consume_stats(body.encode())


@pytest.mark.parametrize(
    "body",
    ["", "{}", '{"connectionSet":{}}', '{"connectionSet":[7]}', CONNECTIONS.replace('"127.0.0.1:44438"', "null")],
)
def test_invalid_members_of_a_group_are_an_error(body: str) -> None:
    with pytest.raises(RemotingCommandException):
        decode_consumer_connections(body.encode())


def test_offset_of_one_group_is_found_among_all() -> None:
    body = b'{"offsetTable":{"T@g":{0:7,1:0},"T@other":{2:9}}}'
    assert [decode_committed_offset(body, "T", "g", queue_id) for queue_id in range(3)] == [7, 0, None]
    assert decode_committed_offset(body, "T", "another", 0) is None
