"""Java's hash codes, which select a queue by a key as Java producers do, and the hashes in ``SPARK_ROW_ID``.

``SPARK_ROW_ID`` is the message property with the id of a row (option ``rowId``). With ``rowId=true`` its last part is a
hash of the message, so that a reader can verify the id. With ``rowId=columns:...`` it is two hashes of these columns,
which a reader cannot verify, because the message does not say which columns these are. Selection of queues:
docs/internals/routing.md#selectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import rocketmq_spark.model.properties as const

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    NumberT = TypeVar("NumberT", int, npt.NDArray[np.int64])


def java_hash(arg: object) -> int:
    """Return Java's ``arg.hashCode()`` of a str, int or bool, signed 32 bit.

    An int that fits 32 bits counts as ``Integer``, a longer one as ``Long``. The two differ only for a negative number
    that fits 32 bits: the hash of ``Long`` n is then that of ``~n``. TypeError: another type, which Java hashes
    differently (``byte[]`` by identity). ValueError: an int of more than 64 bits.
    """
    if isinstance(arg, str):
        return string_hash(arg)
    if isinstance(arg, bool):
        return 1231 if arg else 1237
    if isinstance(arg, int):
        if -(2**31) <= arg < 2**31:
            return arg
        if -(2**63) <= arg < 2**63:
            return _int32(arg ^ arg >> 32)
        raise ValueError(f"cannot hash the key {arg}: Java's largest integer has 64 bits. Give the number as text")
    text = f"cannot hash a key of type {type(arg).__name__} as Java does: allowed are str, int and bool"
    raise TypeError(f"{text}. Decode bytes, and convert other values to str")


def string_hash(text: str) -> int:
    """Return Java's ``String.hashCode()``: over UTF-16 code units, signed 32 bit."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return _int32(value)


def queue_index(hash_code: NumberT, queues: NumberT) -> NumberT:
    """Return the queue that a hash code, or each of an array, selects: ``Math.abs(hash % queues)``."""
    # Java's remainder has the sign of the hash. So its absolute value is the remainder of the absolute value.
    return abs(hash_code) % queues


def consistent_hash(key: str, buckets: int) -> int:
    """Return the bucket of a key: Guava's ``Hashing.consistentHash`` of Java's hash code.

    Proxies choose the queue of a message group or a lite topic so, and brokers know the broker of a lite topic by it.
    """
    state, candidate = string_hash(key) & _MASK, 0
    while True:
        state = (2862933555777941757 * state + 1) & _MASK
        drawn = (state >> 33) + 1
        # In Java the largest number overflows, and so ends the search.
        following = buckets if drawn == 0x80000000 else int((candidate + 1) / (drawn / 0x80000000))
        if following >= buckets:
            return candidate
        candidate = following


def _int32(bits: int) -> int:
    low = bits & 0xFFFFFFFF
    return low - 0x100000000 if low & 0x80000000 else low


ROW_ID: Final = const.ROW_ID

# 2^64 divided by the golden ratio, odd: the step of SplitMix64.
STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1

# Ids by place (``rowId=true``) and by columns. Spark and Arrow also use these patterns, so they have no Python syntax.
BY_PLACE: Final = r"^[^/]+/-?[0-9]+/[0-9]+/[0-9]+/[0-9a-f]{16}$"
BY_COLUMNS: Final = r"^[^/]+/-?[0-9]+/[0-9a-f]{32}$"

# The properties of a message that are not its content. All others are those of its sender.
NOT_CONTENT: Final = (const.RESERVED_PROPERTIES | const.INNER_PROPERTIES | {const.ATTEMPT}) - {
    name for name, how in const.CARRIED.items() if how.hashed
}
# The properties that the hash leaves out; it covers all user properties.
NOT_HASHED: Final = NOT_CONTENT | {ROW_ID}


def row_hash(topic: str, body: bytes, properties: Mapping[str, str], flag: int = 0) -> str:
    """Return the last part of a message's ``SPARK_ROW_ID`` (``rowId=true``), 16 hex digits; `body` is decompressed.

    `properties` are all properties that a reader receives; for a delayed message, those of its sender.
    """
    entries = [b"\x01" + topic.encode() + b"\x02", b"\x02" + body]
    if flag:
        entries.append(b"\x01\x01%d\x02" % flag)
    entries += [f"{name}\x01{value}\x02".encode() for name, value in properties.items() if name not in NOT_HASHED]
    return f"{sum(map(entry_hash, entries)) & _MASK:016x}"


def is_repeatable(
    row_id: str | None, topic: str | None, body: bytes | None, flag: int | None, properties: Mapping[str, str] | None
) -> bool:
    """Return whether a row repeats other rows with its id, because the row that was read matches the hash in the id.

    `topic` is the first topic that the row was written to. An id by columns is not verified, because a message does not
    contain which columns were hashed.
    """
    if row_id is None or topic is None or body is None:
        return False
    if re.match(BY_PLACE, row_id):
        return row_id[-16:] == row_hash(topic, bytes(body), properties or {}, flag or 0)
    return re.match(BY_COLUMNS, row_id) is not None


def entry_hash(entry: bytes, seed: int = 0) -> int:
    """Return the 64-bit hash of one entry; words are xor-ed with the seed before they are mixed."""
    padded = entry + bytes(-len(entry) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    return _mix(len(entry) + sum(_mix(word + place * STEP, seed) for place, word in enumerate(words, 1)))


def _mix(number: int, seed: int = 0) -> int:
    number = (number & _MASK) ^ seed
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
