"""Checks the names of topics, producer groups and namespaces, and adds a namespace to a name or removes it.

A length counts UTF-16 units, as in Java. "Blank" is also Java's: U+3000 is blank, U+00A0 and U+0085 are not
(docs/internals/producer.md#validation). Follows ``TopicValidator.java``, ``Validators.java`` and
``MixAll.isSysConsumerGroup`` of 5.5.0.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from rocketmq_spark.errors import MQClientException

MAX_TOPIC_LENGTH: Final = 127
# 120 keeps the names %RETRY%group and %DLQ%group valid.
MAX_GROUP_LENGTH: Final = 120
DEFAULT_PRODUCER_GROUP: Final = "DEFAULT_PRODUCER"
DEFAULT_CONSUMER_GROUP: Final = "DEFAULT_CONSUMER"

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

# The template of the topics that a broker creates by itself (``TopicValidator``).
AUTO_CREATE_TOPIC: Final = "TBW102"

# Validators.isNotAllowedSendTopic; the two of RocksDB are 5.5.0's.
_FORBIDDEN: Final = (
    "SCHEDULE_TOPIC_XXXX RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC "
    "SELF_TEST_TOPIC OFFSET_MOVED_EVENT RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC"
)
FORBIDDEN_TOPICS: Final = frozenset(_FORBIDDEN.split(" "))
_SYSTEM: Final = FORBIDDEN_TOPICS | {AUTO_CREATE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC"}

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_JAVA_BLANK_CONTROLS: Final = frozenset("\t\n\x0b\f\r\x1c\x1d\x1e\x1f")
_UP_TO_SPACE: Final = "".join(map(chr, range(0x21)))
_NO_BREAK: Final = frozenset("\u00a0\u2007\u202f")


def is_legal(name: str) -> bool:
    """Return whether every character of `name` is an ASCII letter or digit, or one of ``% | _ -``; "" is not legal."""
    return _LEGAL.fullmatch(name) is not None


def trim(text: str) -> str:
    """Return `text` as Java's ``String.trim`` does, which removes only characters up to U+0020."""
    return text.strip(_UP_TO_SPACE)


def is_blank(text: str) -> bool:
    """Return whether `text` has nothing but white space, as Java defines it (``UtilAll.isBlank``)."""
    return all(
        character in _JAVA_BLANK_CONTROLS
        or (unicodedata.category(character) in ("Zs", "Zl", "Zp") and character not in _NO_BREAK)
        for character in text
    )


def java_length(text: str) -> int:
    """Return the length of `text` in UTF-16 units, as Java counts it."""
    return len(text) + sum(character > "\uffff" for character in text)


def java_order(text: str) -> bytes:
    """Return a sort key that orders texts as Java does, by UTF-16 units: U+1F600 comes before U+FFFD."""
    return text.encode("utf-16-be", "surrogatepass")


def is_system_topic(topic: str) -> bool:
    """Return whether the broker made `topic` for itself (``TopicValidator.isSystemTopic``)."""
    return topic in _SYSTEM or topic.startswith("rmq_sys_")


def is_internal_topic(topic: str) -> bool:
    """Return whether the broker made `topic` for itself, or for a consumer group's retries and dead letters."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def is_system_group(group: str) -> bool:
    """Return whether `group` belongs to RocketMQ's own clients (``MixAll.isSysConsumerGroup``)."""
    return group.startswith("CID_RMQ_SYS_")


_SEPARATOR: Final = "%"
_INSTANCE_ADDRESS: Final = re.compile(r"(?:\w+://)?(MQ_INST_\w+_\w+)\..*", re.ASCII)


def wrap(namespace: str | None, resource: str) -> str:
    """Return the broker's name for a topic or group; raise an MQClientException if the namespace holds ``%``."""
    if is_none(namespace) or not resource or is_system_topic(resource) or is_system_group(resource):
        return resource
    check_namespace(namespace)
    prefix, bare = _split(resource)
    own = f"{namespace}{_SEPARATOR}"
    return resource if bare.startswith(own) else prefix + own + bare


def unwrap(resource: str, namespace: str | None) -> str:
    """Return the user's name for a topic or group; one of another namespace, or of none, is returned unchanged."""
    if is_none(namespace):
        return resource
    check_namespace(namespace)
    prefix, bare = _split(resource)
    return prefix + bare.removeprefix(f"{namespace}{_SEPARATOR}")


def namespace_of(name_server_address: str) -> str | None:
    """Return the namespace in an address of the form ``[scheme://]MQ_INST_<w>_<w>.<rest>``, else None."""
    match = _INSTANCE_ADDRESS.fullmatch(name_server_address)
    return match[1] if match else None


def is_none(namespace: str | None) -> bool:
    """Return whether `namespace` means none."""
    return namespace is None or is_blank(namespace)


def check_namespace(namespace: str | None) -> None:
    """Raise an MQClientException for a namespace that holds ``%``."""
    if namespace is not None and _SEPARATOR in namespace:
        raise MQClientException(
            f"namespace {namespace!r} contains '%', which separates namespace and name: give a namespace without it"
        )


def _split(resource: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if resource.startswith(prefix):
            return prefix, resource.removeprefix(prefix)
    return "", resource


def check_group(group: str | None) -> None:
    """Raise an MQClientException for a blank, too long or illegal producer group, or ``DEFAULT_PRODUCER``."""
    _check_name("producer group", group, MAX_GROUP_LENGTH)
    if group == DEFAULT_PRODUCER_GROUP:
        raise MQClientException(f"producer group {group!r} is the shared default name: give a name of your own")


def check_topic(topic: str | None) -> None:
    """Raise an MQClientException for a blank, too long or illegal topic, or one of the broker's own."""
    _check_name("topic", topic, MAX_TOPIC_LENGTH)
    if topic in FORBIDDEN_TOPICS:
        raise MQClientException(f"topic {topic!r} belongs to the broker, clients may not send to it: use another topic")


def _check_name(kind: str, name: str | None, longest: int) -> None:
    if name is None or is_blank(name):
        raise MQClientException(f"{kind} {name!r} is blank: give a name of 1 to {longest} characters")
    if java_length(name) > longest:
        raise MQClientException(f"{kind} {name!r} has {java_length(name)} characters, at most {longest} are allowed")
    if not is_legal(name):
        raise MQClientException(f"{kind} {name!r} has an illegal character: letters, digits and % | _ - are allowed")
