"""Answers that are a list of names: GET_ALL_TOPIC_LIST_FROM_NAMESERVER and GET_CONSUMER_LIST_BY_GROUP, both JSON.

Follows ``TopicList.java`` and ``GetConsumerListByGroupResponseBody.java``.
"""

from __future__ import annotations

import reprlib

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.wire.route import loads_lenient


def decode_topic_list(body: bytes) -> frozenset[str]:
    """Decode the names in the body of a GET_ALL_TOPIC_LIST_FROM_NAMESERVER answer.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    return frozenset(_names(body, "topicList", "reading the list of topics", "names"))


def decode_consumer_list(body: bytes) -> tuple[str, ...]:
    """Decode the client ids in the body of a GET_CONSUMER_LIST_BY_GROUP answer.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    return tuple(_names(body, "consumerIdList", "reading who is in a group", "ids"))


def _names(body: bytes, field: str, doing: str, kind: str) -> list[str]:
    told = loads_lenient(body)
    names = told.get(field) if isinstance(told, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(told)} has no {field} of {kind}")
    return names
