"""Fields of an encoded Protocol Buffers message, read without the protobuf package: who writes to brokers has none.

Rule 1: nothing is copied, and nothing inside a field is looked at.
Rule 2: only what the gRPC protocol's requests are made of: varints, and fields that say their length.

Follows the Protocol Buffers encoding: a field is a tag (number << 3 | type) and, by its type, a varint or a length and
so many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rocketmq_spark.errors import RemotingCommandException

_VARINT: Final = 0
_DELIMITED: Final = 2


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where the next thing begins.

    Raises
    ------
    RemotingCommandException
        The bytes end within it.
    """
    number = shift = 0
    for end in range(at, len(data)):
        number |= (data[end] & 0x7F) << shift
        if data[end] < 0x80:
            return number, end + 1
        shift += 7
    raise RemotingCommandException(f"byte {at} of {len(data)}: a number that does not end")


def delimited_fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field that says its length; pass over the others.

    Raises
    ------
    RemotingCommandException
        A field reaches beyond the message, or is of a type that no request has.
    """
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
