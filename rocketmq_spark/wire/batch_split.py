"""An encoded batch in two halves, to find the one message that a server refuses, or in single messages.

Rule 1: halves are slices: messages are neither decoded nor copied one by one, only their lengths are read.
Rule 2: a single message has the bytes, the flag and the properties of its batch item, and the batch's WAIT.

Follows spec/remoting.md section 6.1 (a batch item begins with its size) and the Protocol Buffers encoding (a field
``messages`` begins with its tag and its length as a varint).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rocketmq_spark.message import EncodedBatch, Encoding
from rocketmq_spark.message_const import WAIT
from rocketmq_spark.wire.proto_fields import read_varint
from rocketmq_spark.wire.records import decode_batch, decode_properties, encode_single

# Field 1 of SendMessageRequest, length-delimited.
MESSAGES_TAG: Final = 0x0A


def split_batch(batch: EncodedBatch) -> tuple[EncodedBatch, EncodedBatch] | None:
    """Return the first and the second half of a batch; None of one message alone."""
    if not batch.batch or batch.rows < 2:
        return None
    body = memoryview(b"".join(batch.body))
    end_of = _ENDS[batch.encoding]
    rows, border = batch.rows // 2, 0
    for _ in range(rows):
        border = end_of(body, border)
    first, second = body[:border], body[border:]
    return (
        replace(batch, body=(first,), rows=rows, nbytes=len(first)),
        replace(batch, body=(second,), rows=batch.rows - rows, nbytes=len(second)),
    )


def singles_of(batch: EncodedBatch) -> list[EncodedBatch] | None:
    """Return the messages of a batch as requests of their own, in their order; None of what is no batch of items."""
    if not batch.batch or batch.encoding is not Encoding.REMOTING:
        return None
    wait = decode_properties(batch.properties.encode()).get(WAIT)
    shared = {} if wait is None else {WAIT: wait}
    return [
        encode_single(replace(message, properties={**shared, **message.properties}), batch.sys_flag)
        for message in decode_batch(b"".join(batch.body), batch.topic)
    ]


def _end_of_item(body: memoryview, at: int) -> int:
    return at + int.from_bytes(body[at : at + 4], "big")


def _end_of_field(body: memoryview, at: int) -> int:
    if body[at] != MESSAGES_TAG:
        raise ValueError(f"byte {at} of a gRPC batch is {body[at]:#04x}, the tag of a message is {MESSAGES_TAG:#04x}")
    length, start = read_varint(body, at + 1)
    return start + length


_ENDS: Final[dict[Encoding, Callable[[memoryview, int], int]]] = {
    Encoding.REMOTING: _end_of_item,
    Encoding.GRPC: _end_of_field,
}
