"""What a topic, a producer group or a namespace may be called.

Rule 1: one alphabet for all of them, and lengths in UTF-16 units, as Java counts.
Rule 2: "blank" is Java's ``Character.isWhitespace``: U+3000 is blank, U+00A0 and U+0085 are not.

Follows ``TopicValidator.java``, ``Validators.java`` and ``MixAll.isSysConsumerGroup`` of 5.5.0 (spec/producer.md
sections 1.2, 3.5 and 3.6).
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

MAX_TOPIC_LENGTH: Final = 127
# 120 keeps the names %RETRY%group and %DLQ%group valid.
MAX_GROUP_LENGTH: Final = 120
DEFAULT_PRODUCER_GROUP: Final = "DEFAULT_PRODUCER"
DEFAULT_CONSUMER_GROUP: Final = "DEFAULT_CONSUMER"

RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

AUTO_CREATE_TOPIC: Final = "TBW102"
"""On every broker that creates topics itself, by this one's example (``TopicValidator``)."""

# Validators.isNotAllowedSendTopic; the last two are 5.5.0's.
FORBIDDEN_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
    }
)
_SYSTEM_TOPICS: Final = FORBIDDEN_TOPICS | {
    AUTO_CREATE_TOPIC,
    "BenchmarkTest",
    "RMQ_SYS_TRACE_TOPIC",
    "CHECKPOINT_TOPIC",
}
_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_JAVA_BLANK_CONTROLS: Final = frozenset("\t\n\x0b\f\r\x1c\x1d\x1e\x1f")
_NO_BREAK: Final = frozenset("\u00a0\u2007\u202f")


def is_legal(name: str) -> bool:
    """Return whether every character of `name` is a letter or digit of ASCII, or one of ``% | _ -``; "" isn't legal."""
    return _LEGAL.fullmatch(name) is not None


def is_blank(text: str) -> bool:
    """Return whether `text` is empty or all of it is white space to Java (``UtilAll.isBlank``)."""
    return all(
        character in _JAVA_BLANK_CONTROLS
        or (unicodedata.category(character) in ("Zs", "Zl", "Zp") and character not in _NO_BREAK)
        for character in text
    )


def java_length(text: str) -> int:
    """Return the length of `text` as Java counts it, in UTF-16 units."""
    return len(text) + sum(character > "\uffff" for character in text)


def java_order(text: str) -> bytes:
    """Return what sorts texts as Java does, by UTF-16 units: U+FFFD comes behind U+1F600 there."""
    return text.encode("utf-16-be", "surrogatepass")


def is_system_topic(topic: str) -> bool:
    """Return whether the broker made `topic` for itself (``TopicValidator.isSystemTopic``)."""
    return topic in _SYSTEM_TOPICS or topic.startswith(_SYSTEM_TOPIC_PREFIX)


def is_internal_topic(topic: str) -> bool:
    """Return whether the broker made `topic` for itself, or for a consumer group's retries and dead letters."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX))


def is_system_group(group: str) -> bool:
    """Return whether `group` belongs to RocketMQ's own clients (``MixAll.isSysConsumerGroup``)."""
    return group.startswith(_SYSTEM_GROUP_PREFIX)
