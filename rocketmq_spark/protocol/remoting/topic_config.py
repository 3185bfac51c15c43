"""The configuration of topics: the answers to GET_TOPIC_CONFIG and GET_ALL_TOPIC_CONFIG, both JSON.

Attributes have a leading ``+`` in the request that creates a topic, and none in these answers (5.5.0). Brokers before
5.0 send no attributes. Follows ``TopicConfig.java`` and ``TopicAttributes.java``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.route import PERM_READ, PERM_WRITE
from rocketmq_spark.protocol.remoting.route import loads_lenient

# Attributes; those that were not set are missing.
MESSAGE_TYPE: Final = "message.type"
QUEUE_TYPE: Final = "queue.type"
CLEANUP_POLICY: Final = "cleanup.policy"

BATCH_CQ: Final = "BatchCQ"
"""The queue type of queues that hold batches as units (inner batches)."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configuration of a topic on one broker (``TopicConfig.java``).

    The defaults are those of a topic that a broker creates with its first message. Proxies reject messages of another
    type than `message_type`; brokers do not.
    """

    message_type: str = "NORMAL"  # Or ``FIFO``, ``DELAY``, ``TRANSACTION``, ``MIXED``
    queue_type: str = "SimpleCQ"  # Or `BATCH_CQ`
    cleanup_policy: str = "DELETE"  # Or ``COMPACTION``
    order: bool = False  # The flag of ``mqadmin updateTopic -o``; name servers' order configurations do not need it
    perm: int = PERM_READ | PERM_WRITE

    @classmethod
    def of_attributes(
        cls, attributes: Mapping[str, str], *, order: bool = False, perm: int = PERM_READ | PERM_WRITE
    ) -> TopicConfig:
        """Return the configuration that a broker's attributes describe; missing attributes have their defaults."""
        return cls(
            attributes.get(MESSAGE_TYPE, "NORMAL"),
            attributes.get(QUEUE_TYPE, "SimpleCQ"),
            attributes.get(CLEANUP_POLICY, "DELETE"),
            order,
            perm,
        )

    @property
    def compacted(self) -> bool:
        """True if the broker keeps only the newest message of each key, and drops messages without keys."""
        return self.cleanup_policy == "COMPACTION"

    @property
    def holds_batches(self) -> bool:
        """True if a queue entry can be a whole batch (``batchType=inner``)."""
        return self.queue_type == BATCH_CQ


def decode_topic_config(body: bytes) -> TopicConfig:
    """Decode the body of a GET_TOPIC_CONFIG answer."""
    config = loads_lenient(body)
    attributes = _attributes(config) or {}
    order, perm = config.get("order", False), config.get("perm", PERM_READ | PERM_WRITE)
    if not isinstance(order, bool) or type(perm) is not int:
        raise RemotingCommandException(
            f"reading a topic's configuration: order is {reprlib.repr(order)} and perm {reprlib.repr(perm)}; a boolean "
            "and an integer are required"
        )
    return TopicConfig.of_attributes(attributes, order=order, perm=perm)


def decode_all_topic_attributes(body: bytes) -> Mapping[str, Mapping[str, str] | None]:
    """Decode the attributes of every topic in a GET_ALL_TOPIC_CONFIG answer; None from a broker before 5.0."""
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
