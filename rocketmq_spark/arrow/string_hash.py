"""Java's ``String.hashCode`` of a whole column: the same key must meet the same queue as from a Java producer.

Over the UTF-16 code units u of a string, ``h = u[0] * 31^(n-1) + ... + u[n-1]`` modulo 2^32. For strings that lie back
to back, row ``s..e`` is ``31^(e-1) * (P[e] - P[s])`` with the prefix sums ``P[k] = sum of u[i] * 31^-i``: 31 is odd, so
it has an inverse modulo 2^32, and one pass over all units replaces a loop over each string.
"""

from __future__ import annotations

import functools
import re
from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, Ints, byte_column, byte_strings

_BASE: Final = 31
_INVERSE: Final = pow(_BASE, -1, 2**32)

# UTF-16 units that start at a byte of UTF-8: none at a continuation byte, two (a surrogate pair) at a 4-byte lead.
_UNITS: Final = np.array([1] * 0x80 + [0] * 0x40 + [1] * 0x30 + [2] * 0x10, np.uint8)

# Where Python replaces each byte of an encoded surrogate, Java replaces all of them by one character.
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()


def string_hashes(column: ByteColumn) -> npt.NDArray[np.int32]:
    """Return ``String.hashCode()`` of each row; of a null row, some number.

    Bytes that are not UTF-8 count as the replacement characters that Java reads.
    """
    span = column.span
    ends = column.offsets - column.offsets[0]
    if span.max(initial=0) < 0x80:
        return _hashes(span, ends)
    if column.valid is not None:
        # What lies under a null may not even be text: it goes before anything is decoded.
        return _scattered(column)
    try:
        text = span.tobytes().decode()
    except UnicodeDecodeError:
        return string_hashes(_with_replacements(column))
    units = np.frombuffer(text.encode("utf-16-le"), "<u2")
    starts = np.concatenate([[0], np.cumsum(_UNITS[span], dtype=np.int64)])
    return _hashes(units, starts[ends])


def _hashes(units: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], ends: Ints) -> npt.NDArray[np.int32]:
    size = len(units)
    # The next power of two, so that blocks of about the same size share one table.
    powers, inverses = _powers(1 << max(size, 1).bit_length())
    prefix = np.zeros(size + 1, np.uint32)
    np.cumsum(inverses[:size] * units, dtype=np.uint32, out=prefix[1:])
    # powers[k] is 31^(k-1); what an empty string multiplies is 0.
    hashes: npt.NDArray[np.uint32] = (prefix[ends[1:]] - prefix[ends[:-1]]) * powers[ends[1:]]
    return hashes.view(np.int32)


@functools.lru_cache(maxsize=2)
def _powers(size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return 31^(k-1) and 31^-k modulo 2^32, for k from 0 to `size`."""
    powers = np.full(size + 1, _BASE, np.uint32)
    powers[0] = _INVERSE
    inverses = np.full(size + 1, _INVERSE, np.uint32)
    inverses[0] = 1
    return np.cumprod(powers, dtype=np.uint32), np.cumprod(inverses, dtype=np.uint32)


def _scattered(column: ByteColumn) -> npt.NDArray[np.int32]:
    hashes = np.zeros(len(column), np.int32)
    there = byte_column(column.to_arrow().drop_null())
    if there is not None:
        hashes[column.valid] = string_hashes(there)
    return hashes


def _with_replacements(column: ByteColumn) -> ByteColumn:
    # A loop over rows, for blocks that hold ill-formed text only.
    texts = [_SURROGATE.sub(_REPLACEMENT, column.value(row) or b"") for row in range(len(column))]
    return byte_strings([text.decode("utf-8", "replace").encode() for text in texts])
