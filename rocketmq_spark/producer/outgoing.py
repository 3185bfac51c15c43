"""From what the caller hands in to what goes on the wire, once per send: all attempts send the same bytes.

Rule 1: the caller's message is never touched: topic, body and properties of the copy are what Java sets in place and
        takes back afterwards.
Rule 2: everything wrong with a message is said here, before any network use, and is never retried.
Rule 3: a batch is never compressed.

Follows ``DefaultMQProducerImpl.sendKernelImpl`` steps 4 to 7, ``MessageBatch.java`` (spec/producer.md sections 3, 7,
16).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.compression import CompressionType, compress
from rocketmq_spark.errors import CompressionError, MQClientException
from rocketmq_spark.message import EncodedBatch, Message
from rocketmq_spark.message_const import INSTANCE_ID, MAX_RECONSUME_TIMES, RECONSUME_TIME, TRAN_MSG, UNIQ_KEY
from rocketmq_spark.names import RETRY_PREFIX
from rocketmq_spark.namespace import unwrap, wrap
from rocketmq_spark.producer.message_batch import encode_message_batch
from rocketmq_spark.producer.validators import check_message
from rocketmq_spark.wire.codes import ResponseCode
from rocketmq_spark.wire.records import decode_properties, encode_single

logger = logging.getLogger("rocketmq_spark.producer")

# sysFlag (spec/remoting.md section 7).
_TRANSACTION_PREPARED: Final = 0x4


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message, or a batch of them, as every attempt sends it.

    Parameters
    ----------
    message : Message
        The copy that goes on the wire: topic with namespace, body compressed if it is, all properties.
    topic : str
        Without the namespace.
    encoded : EncodedBatch
        The request's body and what its header says of it.
    msg_id : str
        ``UNIQ_KEY``; of a batch, those of its members joined by commas.
    reconsume_times : int, default 0
    max_reconsume_times : int or None, default None
        Both for a retry topic, from the message's properties.
    """

    message: Message
    topic: str
    encoded: EncodedBatch
    msg_id: str
    reconsume_times: int = 0
    max_reconsume_times: int | None = None


@dataclass(frozen=True, slots=True)
class Packing:
    """How one producer packs.

    Parameters
    ----------
    namespace : str
        Empty for none.
    max_message_size : int
        Longest body before compression, bytes.
    compress_over : int
        A body of so many bytes or more is compressed.
    compression : CompressionType or None
    compress_level : int
    next_id : callable
        Returns a new ``UNIQ_KEY``.
    """

    namespace: str
    max_message_size: int
    compress_over: int
    compression: CompressionType | None
    compress_level: int
    next_id: Callable[[], str]

    def pack(self, message: Message) -> Outgoing:
        """Return a single message as it goes out.

        Raises
        ------
        MQClientException
            What no broker would store (spec/producer.md section 3.5), with its code.
        """
        # The check sees the name that brokers know: its limit of 127 includes the namespace.
        named = self.namespace and message is not None
        wrapped = replace(message, topic=wrap(self.namespace, message.topic)) if named else message
        check_message(wrapped, self.max_message_size)
        properties = dict(wrapped.properties)
        unique_id = properties.get(UNIQ_KEY) or self.next_id()
        properties[UNIQ_KEY] = unique_id
        if self.namespace:
            properties[INSTANCE_ID] = self.namespace
        body, sys_flag = self._compressed(wrapped)
        if properties.get(TRAN_MSG, "").lower() == "true":
            sys_flag |= _TRANSACTION_PREPARED
        wire = replace(wrapped, body=body, properties=properties)
        encoded = encode_single(wire, sys_flag)
        # Read once, and not taken out of the message: Java's second attempt finds neither (spec/producer.md 16.7).
        retry = wire.topic.startswith(RETRY_PREFIX)
        times = _number(properties, RECONSUME_TIME) if retry else None
        most = _number(properties, MAX_RECONSUME_TIMES) if retry else None
        return Outgoing(wire, unwrap(wire.topic, self.namespace), encoded, unique_id, times or 0, most)

    def pack_batch(self, messages: Iterable[Message]) -> Outgoing:
        """Return several messages of one topic as one request (spec/producer.md section 3.8).

        Raises
        ------
        MQClientException
            They don't go together, or one of them can't be stored; the cause says which rule.
        """
        batch = encode_message_batch(
            messages, max_message_size=self.max_message_size, next_id=self.next_id, namespace=self.namespace
        )
        encoded = batch.encoded
        properties = decode_properties(encoded.properties.encode())
        message = Message(encoded.topic, b"".join(encoded.body), properties=properties)
        return Outgoing(message, unwrap(encoded.topic, self.namespace), encoded, batch.msg_id(""))

    def _compressed(self, message: Message) -> tuple[bytes, int]:
        if self.compression is None or len(message.body) < self.compress_over:
            return message.body, 0
        try:
            return compress(message.body, self.compression, self.compress_level), self.compression.sys_flag
        except CompressionError:
            logger.warning(
                "a message of topic %s goes uncompressed, %d bytes", message.topic, len(message.body), exc_info=True
            )
            return message.body, 0


def _number(properties: Mapping[str, str], name: str) -> int | None:
    text = properties.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise MQClientException(
            f"sending to a retry topic: property {name} is {text!r}, a number is needed", ResponseCode.MESSAGE_ILLEGAL
        ) from None
