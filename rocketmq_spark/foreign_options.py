"""What the options of other connectors are called here: Spark's Kafka connector, and the old rocketmq-spark.

Rule 1: docs/migrating.md has every name of `NAMES`, and more to say of it. What people try without having read it has a
        table of its own.
Rule 2: only names that nothing here has: what is spelt as here is an option, or a misspelt one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_KAFKAS: Final = "kafka."

_OF_BOTH: Final[Mapping[str, str]] = {
    "kafka.bootstrap.servers": "nameServer",
    "kafka.client.id": "instanceName",
    "kafka.security.protocol": "accessKey and secretKey, or useTls",
    "kafka.ssl.truststore.location": "useTls and tlsCaFile",
    "nameserver.addr": "nameServer",
}
_OF_A_READ: Final[Mapping[str, str]] = {
    "group": "consumerGroup",
    "consumer.group": "consumerGroup",
    "kafka.group.id": "consumerGroup",
    "consumer.topic": "subscribe",
    "consumer.tag": "subExpression",
    "consumer.offset.reset.to": "startingOffsets",
    "kafka.auto.offset.reset": "startingOffsets",
    "includeheaders": "includeProperties",
    "pull.max.speed.per.partition": "maxOffsetsPerTrigger",
    "pull.max.batch.size": "pullBatchSize",
    "kafka.max.poll.records": "pullBatchSize",
    "pull.timeout.ms": "pullTimeoutMs",
    "kafkaconsumer.polltimeoutms": "pullTimeoutMs",
    "commitasync": "commitOffsets",
}
_OF_A_WRITE: Final[Mapping[str, str]] = {
    "group": "producerGroup",
    "kafka.acks": "sendMode",
    "kafka.delivery.timeout.ms": "deliveryTimeoutMs",
    "kafka.request.timeout.ms": "sendMsgTimeout",
    "kafka.retries": "deliveryTimeoutMs",
    "kafka.retry.backoff.ms": "retryBackoffMs",
    "kafka.retry.backoff.max.ms": "retryBackoffMaxMs",
    "kafka.batch.size": "batchBytes",
    "kafka.buffer.memory": "maxInFlightBytes",
    "kafka.max.in.flight.requests.per.connection": "maxInFlight",
    "kafka.max.request.size": "maxMessageSize",
    "kafka.compression.type": "compressType",
    "kafka.enable.idempotence": "rowId",
    "kafka.partitioner.class": "queueSelector",
}

NAMES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {"read": {**_OF_BOTH, **_OF_A_READ}, "write": {**_OF_BOTH, **_OF_A_WRITE}}
)
"""By use, then by the other connector's name in lower case: what it is called here."""

_TRIED: Final[Mapping[str, str]] = {
    "bootstrap.servers": "nameServer",
    "brokers": "nameServer",
    "user": "accessKey",
    "username": "accessKey",
    "password": "secretKey",
}


def name_here(key: str, use: str) -> str:
    """Return a hint for another connector's option, or one that people try, "" if it is nobody's that we know.

    Parameters
    ----------
    key : str
        In any case.
    use : {"write", "read"}
    """
    known = NAMES[use].get(key.lower()) or _TRIED.get(key.lower())
    if known is not None:
        return f"here: {known}"
    # By what stands before it alone: Kafka's clients have hundreds.
    is_kafkas = key.lower().startswith(_KAFKAS)
    return "an option of Kafka's clients; docs/migrating.md has the names here" if is_kafkas else ""
