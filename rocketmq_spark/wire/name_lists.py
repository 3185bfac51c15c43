"""Answers that are a list of names: GET_ALL_TOPIC_LIST_FROM_NAMESERVER and GET_CONSUMER_LIST_BY_GROUP, both JSON.

Follows ``TopicList.java`` and ``GetConsumerListByGroupResponseBody.java``.
"""

from __future__ import annotations

import reprlib
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.wire.route import loads_lenient

# A frame of 16 MiB has room for 5 million empty names. 200,000 names of 25 characters have 6 MB.
_MAX_NAMES: Final = 200_000


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
    # Checked before any object is built. Servers accept no name with a comma.
    if body.count(b",") > _MAX_NAMES:
        raise RemotingCommandException(f"{doing}: more than {_MAX_NAMES} {kind}")
    told = loads_lenient(body)
    names = told.get(field) if isinstance(told, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(told)} has no {field} of {kind}")
    return names
