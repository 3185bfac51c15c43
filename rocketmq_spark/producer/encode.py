"""Checks a `Producer`'s messages, adds properties such as missing ids, and encodes them for remoting, once per send.

Single messages are compressed as the options say, batches never. All attempts get the same `EncodedMessage`; over gRPC
the transport converts it at each attempt. See docs/internals/producer.md#validation, docs/internals/producer.md#batches
and docs/internals/messages.md#single-message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Final, SupportsIndex

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import BatchRefusedException, CompressionError, MQClientException
from rocketmq_spark.model.message import EncodedBatch, Message, SendOutcome
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.names import RETRY_PREFIX, check_topic, is_none, wrap
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE, SendResult
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG, CompressionType, compress, decompress
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import (
    LARGEST_BODY,
    MAX_PROPERTIES,
    encode_items,
    encode_properties,
    encode_single,
)

logger = logging.getLogger("rocketmq_spark.producer")

# The properties of most messages.
ONLY_WAITS: Final = {const.WAIT: "true"}
_ONLY_WAITS_TEXT: Final = "WAIT\x01true\x02"
# The rest of `MAX_PROPERTIES` is for the id.
_SHORT_PROPERTIES: Final = MAX_PROPERTIES - 128
NEVER_SHARED: Final = (const.RESERVED_PROPERTIES | const.INNER_PROPERTIES) - {const.KEYS, const.TAGS, const.WAIT}
"""Properties with which a message needs checks of its own, or cannot share a batch."""


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message, or a batch of messages, as the transport gets it in every attempt."""

    message: Message  # The copy that is sent
    encoded: EncodedBatch
    msg_id: str  # Its ``UNIQ_KEY``, or those of a batch's messages, joined by commas
    reconsume_times: int = 0
    max_reconsume_times: int | None = None

    def result_of(self, outcome: SendOutcome) -> SendResult:
        """Return the result of an attempt, or raise its error (``MQClientAPIImpl.processSendResponse``)."""
        if outcome.error is not None:
            raise outcome.error
        assert outcome.status is not None
        return SendResult(
            status=outcome.status,
            msg_id=outcome.batch_uniq_id or self.msg_id,
            message_queue=outcome.queue,
            queue_offset=outcome.queue_offset,
            offset_msg_id=outcome.offset_msg_id,
            transaction_id=outcome.transaction_id,
            region_id=outcome.region_id or "DefaultRegion",
            trace_on=outcome.trace_on,
            recall_handle=outcome.recall_handle,
        )


class MessageEncoder:
    """Encodes the messages of one producer; `next_id` returns a new ``UNIQ_KEY``, and `next_ids` several."""

    def __init__(
        self,
        options: ProducerOptions,
        next_id: Callable[[], str],
        next_ids: Callable[[int], list[str]] | None = None,
    ) -> None:
        self._options = options
        self._namespace = None if options.over_grpc else options.connection.namespace
        self._compression = None if options.compress_type == "NONE" else CompressionType.parse(options.compress_type)
        self._next_id = next_id
        self._next_ids = next_ids or (lambda count: [next_id() for _ in range(count)])

    def encode(self, message: Message) -> EncodedMessage:
        """Encode a single message; raises as `check_message`."""
        check_message(message, self._options.max_message_size, self._namespace)
        properties = dict(message.properties)
        unique_id = properties.get(const.UNIQ_KEY) or self._next_id()
        properties[const.UNIQ_KEY] = unique_id
        if self._namespace:
            properties[const.INSTANCE_ID] = self._namespace
        body, sys_flag = self._compressed(message)
        _check_frame(message.topic, body)
        if message.is_half_message:
            sys_flag |= TRANSACTION_PREPARED_TYPE
        sent = replace(message, body=body, properties=properties)
        encoded = encode_single(sent, sys_flag)
        if not sent.topic.startswith(RETRY_PREFIX):
            return EncodedMessage(sent, encoded, unique_id)
        # The properties stay in the message. Java removes them, so that its second attempt finds neither.
        reconsume_times = _number(properties, const.RECONSUME_TIME) or 0
        max_reconsume_times = _number(properties, const.MAX_RECONSUME_TIMES)
        return EncodedMessage(sent, encoded, unique_id, reconsume_times, max_reconsume_times)

    def encode_batch(self, messages: Iterable[Message]) -> EncodedMessage:
        """Return messages as one request.

        Raises ``MQClientException``: 13 if the whole body is larger than ``maxMessageSize``, -1 for any other reason.
        """
        namespace, limit, next_id = self._namespace, self._options.max_message_size, self._next_id
        try:
            members = list(messages)
            usual = _usual_properties(members, limit)
            if usual is not None:
                check_message(members[0], limit)
                ids = self._next_ids(len(members))
                texts = [
                    f"{text}UNIQ_KEY\x01{unique_id}\x02".encode() for text, unique_id in zip(usual, ids, strict=True)
                ]
            else:
                _check_members(members)
                for member in members:
                    check_message(member, limit)
                ids = [member.properties.get(const.UNIQ_KEY) or next_id() for member in members]
                texts = [
                    encode_properties({**member.properties, const.UNIQ_KEY: unique_id})
                    for member, unique_id in zip(members, ids, strict=True)
                ]
            body = encode_items(members, texts)
        except (MQClientException, ValueError, TypeError) as exc:
            raise BatchRefusedException(f"making a batch of messages: {exc}") from exc
        topic = members[0].topic
        properties = {const.WAIT: str(members[0].wait_store_msg_ok).lower(), const.UNIQ_KEY: next_id()}
        if not is_none(namespace):
            properties[const.INSTANCE_ID] = str(namespace)
        # As in Java, the limits of one message also apply to the topic with its namespace and to the whole body.
        message = Message(topic, body, properties=properties)
        check_message(message, limit, namespace)
        _check_frame(topic, body)
        text = encode_properties(properties).decode()
        encoded = EncodedBatch(topic, (body,), len(members), len(body), properties=text)
        return EncodedMessage(message, encoded, ",".join(ids))

    def _compressed(self, message: Message) -> tuple[bytes, int]:
        """Return the body to send, and the flag of its compression."""
        if self._compression is None or len(message.body) < self._options.compress_msg_body_over_howmuch:
            return message.body, 0
        try:
            return compress(message.body, self._compression, self._options.compress_level), self._compression.sys_flag
        except CompressionError:
            text = "compressing a message to topic %s failed; it is sent uncompressed, with %d bytes"
            logger.warning(text, message.topic, len(message.body), exc_info=True)
            return message.body, 0


def check_message(message: Message | None, max_message_size: int, namespace: str | None = None) -> None:
    """Raise ``MQClientException`` if brokers would not store the message (docs/internals/producer.md#validation)."""
    if message is None:
        raise _illegal("sending a message: got None; pass a Message")
    check_topic(wrap(namespace, message.topic))
    sending = f"sending a message to topic {message.topic!r}"
    body = message.body
    if not isinstance(body, bytes):
        raise _illegal(f"{sending}: its body must be bytes, got {type(body).__name__}")
    if not body:
        raise _illegal(f"{sending}: its body is empty; it needs at least one byte")
    if len(body) > max_message_size:
        raise _illegal(
            f"{sending}: its body has {len(body)} bytes, max_message_size allows {max_message_size}; send less, or "
            "raise it here, and maxMessageSize on every broker"
        )
    if not _fits_32_bits(message.flag):
        raise _illegal(f"{sending}: its flag {message.flag!r} must fit 32 bits")
    dispatch = message.properties.get(const.INNER_MULTI_DISPATCH, "")
    if "/" in dispatch:
        raise _illegal(
            f"{sending}: its property {const.INNER_MULTI_DISPATCH} is {dispatch!r}; queue names must not hold '/'"
        )


def _fits_32_bits(flag: SupportsIndex) -> bool:
    try:
        return -(2**31) <= index(flag) < 2**31
    except TypeError:
        return False


def _check_frame(topic: str, body: bytes) -> None:
    if len(body) > LARGEST_BODY:
        raise _illegal(
            f"sending a message to topic {topic!r}: its compressed body has {len(body)} bytes, a frame has room "
            f"for {LARGEST_BODY}; send a smaller body"
        )


def _usual_properties(members: Sequence[Message], limit: int) -> list[str] | None:
    """Return the property strings of messages that can certainly share a batch; None to check each of them."""
    topic = getattr(members[0], "topic", None) if members else None
    if type(topic) is not str or topic.startswith(RETRY_PREFIX):
        return None
    texts, entries = [], 0
    wait = members[0].properties.get(const.WAIT) if type(members[0]) is Message else None
    for member in members:
        if type(member) is not Message or member.topic != topic or type(member.body) is not bytes:
            return None
        properties = member.properties
        if not 0 < len(member.body) <= limit or properties.get(const.WAIT) != wait:
            return None
        if properties == ONLY_WAITS:
            texts.append(_ONLY_WAITS_TEXT)
            entries += 1
            continue
        if not properties or not NEVER_SHARED.isdisjoint(properties):
            return None
        try:
            texts.append(const.PROPERTY_SEPARATOR.join([*map(const.NAME_VALUE_SEPARATOR.join, properties.items()), ""]))
        except TypeError:
            return None
        entries += len(properties)
    # The checks of `encode_properties`. A character has at most 4 bytes.
    every = "".join(texts)
    if not every.count(const.NAME_VALUE_SEPARATOR) == every.count(const.PROPERTY_SEPARATOR) == entries:
        return None
    if 4 * max(map(len, texts)) > _SHORT_PROPERTIES or not (every.isascii() or _is_valid(every)):
        return None
    return texts


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_members(members: list[Message]) -> None:
    """Raise for messages that cannot share a batch (``MessageBatch.generateFromList``)."""
    if not members:
        raise _illegal("the batch is empty; pass at least one message")
    for number, member in enumerate(members):
        if member is None:
            raise _illegal(f"message {number} is None; pass only Message objects")
        if max(member.delay_time_level, member.delay_ms, member.delay_sec, member.deliver_ms) > 0:
            raise _illegal(f"message {number} has a delay, which batches do not support; send it alone")
        if member.priority is not None or member.lite_topic:
            raise _illegal(
                f"message {number} has a priority or a lite topic, which brokers ignore in batches; send it alone"
            )
        if member.is_half_message:
            raise _illegal(f"message {number} is a half message, and brokers deliver a batch at once; send it alone")
        if member.topic is not None and member.topic.startswith(RETRY_PREFIX):
            raise _illegal(f"message {number} is for retry topic {member.topic!r}, which accepts no batches")
        if member.topic != members[0].topic:
            raise _illegal(
                f"message {number} is for topic {member.topic!r}, message 0 for {members[0].topic!r}; make one batch "
                "for each topic"
            )
        if member.wait_store_msg_ok != members[0].wait_store_msg_ok:
            raise _illegal(f"messages 0 and {number} differ in waitStoreMsgOK; make one batch for each")


def decompressed(message: MessageExt) -> MessageExt:
    """Return a stored message with its body decompressed; raise a ``CompressionError`` if that fails."""
    body = decompress(message.body, message.sys_flag)
    return replace(message, body=body, sys_flag=message.sys_flag & ~COMPRESSED_FLAG)


def _number(properties: Mapping[str, str], name: str) -> int | None:
    text = properties.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise _illegal(f"sending to a retry topic: property {name} is {text!r}, a number is needed") from None


def _illegal(reason: str) -> MQClientException:
    return MQClientException(reason, ResponseCode.MESSAGE_ILLEGAL)
