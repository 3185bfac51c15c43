"""What servers say of topics: the JSON of GET_TOPIC_CONFIG and of GET_ALL_TOPIC_LIST_FROM_NAMESERVER.

Follows spec/remoting.md section 14 and ``TopicConfig.java``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.wire.route import loads_lenient

QUEUE_TYPE: Final = "queue.type"
"""The attribute that says what a topic's consume queues are: `BATCH_CQ`, or ``SimpleCQ`` where it is missing."""

BATCH_CQ: Final = "BatchCQ"
"""Queues that hold batches as units (inner batches)."""


def decode_topic_attributes(body: bytes) -> Mapping[str, str]:
    """Decode the attributes in the body of a GET_TOPIC_CONFIG answer; brokers before 5.0 have none.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    config = loads_lenient(body)
    attributes = config.get("attributes") if isinstance(config, dict) else body
    if attributes is None:
        return {}
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise RemotingCommandException(
            f"reading a topic's configuration: attributes are {str(attributes)[:60]!r}, an object of strings is needed"
        )
    return attributes


def decode_topic_list(body: bytes) -> frozenset[str]:
    """Decode the names in the body of a GET_ALL_TOPIC_LIST_FROM_NAMESERVER answer.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    told = loads_lenient(body)
    topics = told.get("topicList") if isinstance(told, dict) else None
    if not isinstance(topics, list) or not all(isinstance(topic, str) for topic in topics):
        raise RemotingCommandException(f"reading the list of topics: {str(told)[:60]!r} has no topicList of names")
    return frozenset(topics)
