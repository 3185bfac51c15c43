"""Whether a group, a topic or a message may be sent, asked before any network use.

Rule 1: the first rule broken decides; the order is Java's, so that the same mistake gets the same code.
Rule 2: a refusal is never retried; it names the value and the limit.

Lengths and blanks are Java's. Follows ``Validators.java`` and ``DefaultMQProducerImpl.checkConfig`` of 5.5.0
(spec/producer.md sections 1.2 and 3.5). That properties fit their property string is checked where they are encoded.
"""

from __future__ import annotations

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.message import Message
from rocketmq_spark.message_const import INNER_MULTI_DISPATCH
from rocketmq_spark.names import (
    DEFAULT_PRODUCER_GROUP,
    FORBIDDEN_TOPICS,
    MAX_GROUP_LENGTH,
    MAX_TOPIC_LENGTH,
    is_blank,
    is_legal,
    java_length,
)
from rocketmq_spark.wire.codes import ResponseCode

_ALPHABET = "letters, digits and % | _ - are allowed"


def check_group(group: str | None) -> None:
    """Refuse a producer group that no broker should know producers under.

    Raises
    ------
    MQClientException
        Code -1: it is None or blank, longer than 120, has an illegal character, or is ``DEFAULT_PRODUCER``.
    """
    _check_name("producer group", group, MAX_GROUP_LENGTH)
    if group == DEFAULT_PRODUCER_GROUP:
        raise MQClientException(f"producer group {group!r} is every producer's default: name one of your own")


def check_topic(topic: str | None) -> None:
    """Refuse a topic that messages can't be sent to.

    Raises
    ------
    MQClientException
        Code -1: it is None or blank, longer than 127, has an illegal character, or is one of the broker's own.
    """
    _check_name("topic", topic, MAX_TOPIC_LENGTH)
    if topic in FORBIDDEN_TOPICS:
        raise MQClientException(f"topic {topic!r} is the broker's own and clients may not send to it: use one of yours")


def check_message(message: Message | None, max_message_size: int) -> None:
    """Refuse a message that no broker would store as it is.

    Parameters
    ----------
    message : Message or None
        With its topic as it goes on the wire, namespace included.
    max_message_size : int
        Bytes that a body may have, compressed or not: the body here is not compressed yet.

    Raises
    ------
    MQClientException
        Code 13 for what is wrong with the message, -1 for what is wrong with its topic.
    """
    if message is None:
        raise MQClientException("sending a message: there is none, it is None", ResponseCode.MESSAGE_ILLEGAL)
    check_topic(message.topic)
    body = message.body
    if not isinstance(body, bytes):
        raise _illegal(message, f"its body must be bytes, got {type(body).__name__}")
    if not body:
        raise _illegal(message, "its body is empty; it needs at least one byte")
    if len(body) > max_message_size:
        raise _illegal(
            message,
            f"its body has {len(body)} bytes, maxMessageSize allows {max_message_size}; send less, or raise it here "
            "and on every broker",
        )
    dispatch = message.properties.get(INNER_MULTI_DISPATCH, "")
    if "/" in dispatch:
        raise _illegal(message, f"its property {INNER_MULTI_DISPATCH} is {dispatch!r}; queue names must not hold '/'")


def _check_name(what: str, name: str | None, longest: int) -> None:
    if name is None or is_blank(name):
        raise MQClientException(f"{what} {name!r} is blank: name one, of 1 to {longest} characters")
    if java_length(name) > longest:
        raise MQClientException(f"{what} {name!r} has {java_length(name)} characters, at most {longest} are allowed")
    if not is_legal(name):
        raise MQClientException(f"{what} {name!r} has an illegal character: {_ALPHABET}")


def _illegal(message: Message, reason: str) -> MQClientException:
    return MQClientException(f"sending a message to topic {message.topic!r}: {reason}", ResponseCode.MESSAGE_ILLEGAL)
