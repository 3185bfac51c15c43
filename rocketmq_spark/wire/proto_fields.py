"""Fields of an encoded Protocol Buffers message, read without the protobuf package: a remoting client may not have it.

Nothing is copied. `delimited_fields` reads requests that this package encoded. `check_parts` reads replies of servers.

Follows the Protocol Buffers encoding: a field is a tag (number << 3 | type) and, by its type, a varint or a length and
so many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rocketmq_spark.errors import RemotingCommandException

_VARINT: Final = 0
_DELIMITED: Final = 2
# Bytes of the types fixed64 and fixed32. Groups (3 and 4) are in no reply.
_FIXED: Final[Mapping[int, int]] = {1: 8, 5: 4}
# A varint has at most 64 bits, 7 in each byte.
_LONGEST_VARINT: Final = 10
REPEATED: Final = "repeated"
"""Stands in a schema of `check_parts` for a field of several texts or numbers."""


def read_varint(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where the next thing begins.

    Raises
    ------
    RemotingCommandException
        The bytes end within it, or it has more than 10 of them.
    """
    number = shift = 0
    for end in range(at, min(len(data), at + _LONGEST_VARINT)):
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


def check_parts(data: bytes, fields: Mapping[int, Any], most: int) -> None:
    """Check, before a message is parsed, that it has at most `most` parts for which a parser allocates an object.

    A parser needs up to 64 bytes for a part of 2 bytes, and Python 1,000 more for each that it looks at.

    Parameters
    ----------
    data : bytes
    fields : mapping of int to mapping, REPEATED or None
        By field number: the fields of an inner message, or None for a single value, which is no part. An inner message
        or unknown field is one part. A repeated value is as many as it has bytes, because several may be packed.
    most : int
        Twice as many single values are allowed: more occur only if a message repeats them, and each takes time.

    Raises
    ------
    RemotingCommandException
        There are more, or the bytes are no message.
    """
    parts = singles = at = 0
    # The messages around `at`, the innermost last: where each ends, and its fields.
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
            # The length itself may be missing.
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
