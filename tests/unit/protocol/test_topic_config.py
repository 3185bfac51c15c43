"""The configuration of a topic, as brokers send it."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.remoting.responses import TopicConfig, decode_topic_config

# Answers of real servers of 5.5.0, and one of a broker without attributes.
COMPACTED = (
    b'{"attributes":{"message.type":"FIFO","cleanup.policy":"COMPACTION"},"order":false,"perm":6,"readQueueNums":2,'
    b'"topicFilterType":"SINGLE_TAG","topicName":"comp","topicSysFlag":0,"writeQueueNums":2}'
)


@pytest.mark.parametrize(
    ("body", "config"),
    [
        (COMPACTED, TopicConfig("FIFO", "SimpleCQ", "COMPACTION")),
        (b'{"attributes":{"queue.type":"BatchCQ"},"perm":6}', TopicConfig(queue_type="BatchCQ")),
        (b'{"attributes":{},"order":true,"perm":4}', TopicConfig(order=True, perm=4)),
        (b'{"order":false,"perm":6}', TopicConfig()),
    ],
)
def test_missing_attributes_of_a_topic_have_default_values(body: bytes, config: TopicConfig) -> None:
    assert decode_topic_config(body) == config


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"attributes":[]}',
        b'{"attributes":{"queue.type":1}}',
        b'{"attributes":{},"perm":"6"}',
        b'{"attributes":{},"order":1}',
        b"\xff",
    ],
)
def test_malformed_topic_configuration_is_an_error(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="reading a"):
        decode_topic_config(body)
