"""Java's hash codes, and the queue that one of them means: the same key must meet the same queue as from Java.

Rule 1: Python's own `hash` is never used: it is salted per process, and would break a key's order across Spark tasks.
Rule 2: what has no hash code that Java would compute alike is refused (``byte[]`` hashes by identity, floats and other
        objects are no keys).

Follows ``String.hashCode``, ``Integer.hashCode``, ``Long.hashCode``, ``Boolean.hashCode`` and
``SelectMessageQueueByHash.java`` as of 5.x (spec/producer.md section 11.3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    NumberT = TypeVar("NumberT", int, npt.NDArray[np.int64])

_TRUE: Final = 1231
_FALSE: Final = 1237


def java_hash(arg: object) -> int:
    """Return what ``arg.hashCode()`` is in Java, signed 32 bit.

    Parameters
    ----------
    arg : str, int or bool
        An int that fits 32 bits counts as ``Integer``, a longer one as ``Long``. The two differ only for a negative
        number that fits 32 bits: a ``Long`` of -1 hashes to 0. The hash of ``Long`` n is then that of ``~n``.

    Raises
    ------
    TypeError
        Anything else.
    ValueError
        An int of more than 64 bits.
    """
    if isinstance(arg, str):
        return string_hash(arg)
    if isinstance(arg, bool):
        return _TRUE if arg else _FALSE
    if isinstance(arg, int):
        if -(2**31) <= arg < 2**31:
            return arg
        if -(2**63) <= arg < 2**63:
            return _int32(arg ^ arg >> 32)
        raise ValueError(f"hashing {arg}: Java's largest integer has 64 bits; use its text as the key")
    raise TypeError(
        f"hashing a key of type {type(arg).__name__}: Java would hash it differently, or not by its value; "
        "allowed are str, int and bool: decode bytes, and write anything else as text"
    )


def string_hash(text: str) -> int:
    """Return Java's ``String.hashCode()``: over UTF-16 code units, signed 32 bit."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return _int32(value)


def queue_index(hash_code: NumberT, queues: NumberT) -> NumberT:
    """Return which of so many queues a hash code means: ``Math.abs(hash % queues)``, of one hash or of an array.

    Java's remainder has the sign of the hash, so its absolute value is the remainder of the absolute value. (64 bits
    hold that of the smallest 32-bit hash too.)
    """
    return abs(hash_code) % queues


def _int32(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - 0x100000000 if low & 0x80000000 else low
