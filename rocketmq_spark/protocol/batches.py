"""Splits encoded batches into parts or single messages, and rejects gRPC replies that are malformed or too costly.

The sink splits a batch after some errors (docs/internals/sink.md#batch-splitting). A reply is too costly if it has too
many parts. The protobuf package is optional, so this module reads gRPC batches itself. A field is a tag (number << 3 |
type) and, in batches, a varint, or a length and that many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import rocketmq_spark.model.properties as const
from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message
from rocketmq_spark.model.properties import WAIT
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_single, messages_in

_VARINT: Final = 0
_DELIMITED: Final = 2
# Sizes of the types fixed64 and fixed32. No reply has groups (types 3 and 4).
_FIXED: Final[Mapping[int, int]] = {1: 8, 5: 4}
# A varint has at most 64 bits, 7 in each byte.
_LONGEST_VARINT: Final = 10
REPEATED: Final = "repeated"
"""Marks a field of several texts or numbers in a schema of `check_parts`."""


def read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it."""
    number = shift = 0
    for end in range(at, min(len(data), at + _LONGEST_VARINT)):
        number |= (data[end] & 0x7F) << shift
        if data[end] < 0x80:
            return number, end + 1
        shift += 7
    raise RemotingCommandException(f"byte {at} of {len(data)}: a number that does not end")


def delimited_fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field with a length; skip varints, and raise for other types."""
    at = 0
    while at < len(data):
        start = at
        tag, at = read_varint(data, at)
        number, at = read_varint(data, at)
        if tag & 7 == _VARINT:
            continue
        if tag & 7 != _DELIMITED or at + number > len(data):
            raise RemotingCommandException(f"byte {start} of {len(data)}: a field of {number} bytes, type {tag & 7}")
        yield tag >> 3, data[at : at + number]
        at += number


def check_parts(data: bytes, fields: Mapping[int, Any], most: int) -> None:
    """Raise a RemotingCommandException if a server's message is malformed, or a parser would make too many objects.

    A parser needs up to 64 bytes for a part of 2 bytes, and Python 1,000 more for each part that it reads. `fields`
    has, by number, the fields of an inner message, `REPEATED`, or None for a single value. An inner message or unknown
    field is one part. A repeated value counts one part per byte, because values may be packed. The message may have
    `most` parts, and twice as many single values: only repeated values exceed that.
    """
    parts = singles = at = 0
    # The end and the fields of each message around `at`, the innermost last.
    around = [(len(data), fields)]
    while around:
        end, known = around[-1]
        if at == end:
            around.pop()
            continue
        start = at
        tag, at = (data[at], at + 1) if data[at] < 0x80 else read_varint(data, at)
        kind, inner = tag & 7, known.get(tag >> 3, "unknown")
        if kind == _DELIMITED:
            # At the end of the data the length is missing.
            size, at = (data[at], at + 1) if at < end and data[at] < 0x80 else read_varint(data, at)
            if isinstance(inner, dict) and at + size <= end:
                around.append((at + size, inner))
            else:
                at += size
            if inner is REPEATED:
                parts += size
        elif kind == _VARINT:
            _, at = read_varint(data, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise RemotingCommandException(f"byte {start} of {len(data)}: a field of type {kind}")
        if at > end:
            raise RemotingCommandException(f"byte {start} of {len(data)}: a field ends beyond its message")
        if inner is None:
            singles += 1
            if singles > 2 * most:
                raise RemotingCommandException(f"more than {2 * most} single values in {len(data)} bytes")
        else:
            parts += 1
            if parts > most:
                raise RemotingCommandException(f"more than {most} parts in {len(data)} bytes")


# Fields of SendMessageRequest, Message and SystemProperties (definition.proto).
_MESSAGES: Final = 1
_BODY: Final = 4
_SYSTEM: Final = 3
_PROPERTIES: Final = {1: const.TAGS, 2: const.KEYS, 3: const.UNIQ_KEY}
_MESSAGES_TAG: Final = _MESSAGES << 3 | _DELIMITED


def split_batch(batch: EncodedBatch, count: int = 2) -> list[EncodedBatch] | None:
    """Return `count` parts of a batch, fewer if it has fewer rows (docs/internals/sink.md#batch-splitting).

    Single messages have no parts: None.
    """
    if not batch.batch or batch.rows < 2 or batch.messages:
        return None
    body = memoryview(b"".join(batch.body))
    end_of = _end_of_field if batch.encoding is Encoding.GRPC else _end_of_item
    count = min(count, batch.rows)
    rows_before = [batch.rows * number // count for number in range(count + 1)]
    parts: list[EncodedBatch] = []
    end = 0
    for first, last in pairwise(rows_before):
        begin = end
        for _ in range(last - first):
            end = end_of(body, end)
        parts.append(replace(batch, body=(body[begin:end],), rows=last - first, nbytes=end - begin))
    return parts


def singles_of(batch: EncodedBatch) -> list[EncodedBatch] | None:
    """Return a request for each message of a remoting batch, in order; None for any other batch."""
    if batch.messages:
        return list(batch.messages)
    if not batch.batch or batch.encoding is not Encoding.REMOTING:
        return None
    wait = decode_properties(batch.properties.encode()).get(WAIT)
    shared = {} if wait is None else {WAIT: wait}
    return [
        encode_single(replace(message, properties={**shared, **message.properties}), batch.sys_flag)
        for message in messages_in(batch)
    ]


def _end_of_item(body: memoryview, at: int) -> int:
    return at + int.from_bytes(body[at : at + 4], "big")


def _end_of_field(body: memoryview, at: int) -> int:
    if body[at] != _MESSAGES_TAG:
        raise ValueError(f"byte {at} of a gRPC batch is {body[at]:#04x}, the tag of a message is {_MESSAGES_TAG:#04x}")
    length, start = read_varint(body, at + 1)
    return start + length


def lone_message(batch: EncodedBatch) -> Message | None:
    """Return the message of a batch of one, with tags, keys and id as properties; None for more messages."""
    if batch.rows != 1:
        return None
    if batch.encoding is Encoding.REMOTING:
        messages = messages_in(batch)
    else:
        body = memoryview(b"".join(batch.body))
        messages = [_message(data, batch.topic) for number, data in delimited_fields(body) if number == _MESSAGES]
    return messages[0] if messages else None


def _message(data: memoryview, topic: str) -> Message:
    fields = dict(delimited_fields(data))
    properties = {
        _PROPERTIES[number]: str(text, "utf-8", "replace")
        for number, text in delimited_fields(fields.get(_SYSTEM, memoryview(b"")))
        if number in _PROPERTIES
    }
    return Message(topic, bytes(fields.get(_BODY, b"")), properties=properties)
