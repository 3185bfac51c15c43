"""The one message of a request, as far as it is needed to say which one it was.

Follows spec/remoting.md section 6.1 and spec/grpc.md section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import rocketmq_spark.message_const as const
from rocketmq_spark.message import EncodedBatch, Encoding, Message
from rocketmq_spark.wire.proto_fields import delimited_fields
from rocketmq_spark.wire.records import decode_batch, decode_properties

# Fields of SendMessageRequest, Message and SystemProperties (definition.proto).
_MESSAGES: Final = 1
_BODY: Final = 4
_SYSTEM: Final = 3
_PROPERTIES: Final = {1: const.TAGS, 2: const.KEYS, 3: const.UNIQ_KEY}


def lone_message(batch: EncodedBatch) -> Message | None:
    """Return the message of a batch of one, with its tags, keys and id among its properties; None of more.

    Raises
    ------
    RemotingCommandException
        The batch can't be read.
    """
    if batch.rows != 1:
        return None
    body = memoryview(b"".join(batch.body))
    if not batch.batch:
        return Message(batch.topic, bytes(body), batch.flag, decode_properties(batch.properties.encode()))
    return next(iter(_MESSAGES_OF[batch.encoding](body, batch.topic)), None)


def _of_proxy(body: memoryview, topic: str) -> list[Message]:
    return [_message(data, topic) for number, data in delimited_fields(body) if number == _MESSAGES]


def _message(data: memoryview, topic: str) -> Message:
    fields = dict(delimited_fields(data))
    properties = {
        _PROPERTIES[number]: str(text, "utf-8", "replace")
        for number, text in delimited_fields(fields.get(_SYSTEM, memoryview(b"")))
        if number in _PROPERTIES
    }
    return Message(topic, bytes(fields.get(_BODY, b"")), properties=properties)


_MESSAGES_OF: Final[dict[Encoding, Callable[[memoryview, str], list[Message]]]] = {
    Encoding.REMOTING: decode_batch,
    Encoding.GRPC: _of_proxy,
}
