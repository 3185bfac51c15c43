"""What servers say of topics: GET_TOPIC_CONFIG and GET_ALL_TOPIC_CONFIG, both JSON.

Follows spec/remoting.md section 14 and ``TopicConfig.java``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.wire.route import loads_lenient

MESSAGE_TYPE: Final = "message.type"
"""The attribute that says which messages a topic is for; proxies refuse others. ``NORMAL`` where it is missing."""

QUEUE_TYPE: Final = "queue.type"
"""The attribute that says what a topic's consume queues are: `BATCH_CQ`, or ``SimpleCQ`` where it is missing."""

BATCH_CQ: Final = "BatchCQ"
"""Queues that hold batches as units (inner batches)."""


def message_type_of(attributes: Mapping[str, str]) -> str:
    """Return which messages a topic of these attributes is for (``TopicConfig.java``)."""
    return attributes.get(MESSAGE_TYPE, "NORMAL")


def queue_type_of(attributes: Mapping[str, str]) -> str:
    """Return what the consume queues of a topic of these attributes are (``QueueTypeUtils.java``)."""
    return attributes.get(QUEUE_TYPE, "SimpleCQ")


def decode_topic_attributes(body: bytes) -> Mapping[str, str]:
    """Decode the attributes in the body of a GET_TOPIC_CONFIG answer; brokers before 5.0 have none.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    return _attributes(loads_lenient(body)) or {}


def decode_all_topic_attributes(body: bytes) -> Mapping[str, Mapping[str, str] | None]:
    """Decode the attributes of every topic in the body of a GET_ALL_TOPIC_CONFIG answer.

    Returns
    -------
    mapping of str to mapping or None
        By topic; None of a broker before 5.0, which knows no attributes.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    told = loads_lenient(body)
    configs = told.get("topicConfigTable") if isinstance(told, dict) else None
    if not isinstance(configs, dict):
        raise RemotingCommandException(f"reading a broker's topics: {reprlib.repr(told)} has no topicConfigTable")
    return {topic: _attributes(config) for topic, config in configs.items()}


def _attributes(config: object) -> Mapping[str, str] | None:
    attributes = config.get("attributes") if isinstance(config, dict) else config
    if attributes is None and config is not None:
        return None
    if not isinstance(attributes, dict) or not all(isinstance(value, str) for value in attributes.values()):
        raise RemotingCommandException(
            f"reading a topic's configuration: attributes are {reprlib.repr(attributes)}, an object of strings is "
            "needed"
        )
    return attributes
