"""The hash in ``SPARK_ROW_ID``, plainly: for readers that check it, and the oracle of the vectorised one.

Rule 1: a message's hash is the sum, modulo 2^64, of the hashes of its entries, so that their order does not count.
Rule 2: entries are the topic (``0x01 topic 0x02``), the body (``0x02 body``, not compressed), a flag other than 0
        (``0x01 0x01 flag 0x02``, decimal), and each property as it stands in the property string (``name 0x01 value
        0x02``): KEYS, TAGS, __SHARDINGKEY, the delay (DELAY, TIMER_DELAY_MS or TIMER_DELIVER_MS) and the user's own.
        Other names that RocketMQ reserves do not count (brokers add some), nor does ``SPARK_ROW_ID`` itself.
Rule 3: the hash of an entry: padded with zeros to whole 64-bit little-endian words w1, w2, ..., it is
        ``mix(length + mix(w1 + STEP) + mix(w2 + 2 * STEP) + ...)``, all modulo 2^64; ``mix`` is SplitMix64's finaliser.
Rule 4: ``waitStoreMsgOK``, ``queueId`` and ``brokerName`` do not count: they say how and where a row goes, not what
        it says.

The delay counts as the row has it. Brokers of 5.5 deliver it so (over remoting); a proxy makes a time of delivery of
each, and other servers may take it out. A reader of delayed rows who gets no such property, or another one, can work
the hash out only if it knows the delay, and puts it among `properties`.

Follows design.md section 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import rocketmq_spark.message_const as const
from rocketmq_spark.message_const import RESERVED_PROPERTIES, SHARDING_KEY

ROW_ID: Final = const.ROW_ID

# 2^64 divided by the golden ratio, odd: SplitMix64's own step.
STEP: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1

# Ids by place (``rowId=true``) and by columns. Spark and Arrow use these patterns, too: no syntax that only Python has.
BY_PLACE: Final = r"^[^/]+/-?[0-9]+/[0-9]+/[0-9]+/[0-9a-f]{16}$"
BY_COLUMNS: Final = r"^[^/]+/-?[0-9]+/[0-9a-f]{32}$"

HASHED: Final = frozenset({"KEYS", "TAGS", SHARDING_KEY, "DELAY", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"})
"""The properties of RocketMQ's own that count."""

# Brokers add INNER_BASE and INNER_NUM in topics for inner batches; no row can have any of the three.
NOT_HASHED: Final = (RESERVED_PROPERTIES | {ROW_ID, "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH"}) - HASHED
"""The properties that do not count."""


def row_hash(topic: str, body: bytes, properties: Mapping[str, str], flag: int = 0) -> str:
    """Return the last part of a message's ``SPARK_ROW_ID`` (``rowId=true``), 16 hex digits.

    Parameters
    ----------
    topic : str
    body : bytes
        As its sender had it: decompressed.
    properties : mapping of str to str
        All of the message, as a reader gets them (of a delayed one, as its sender gave them).
    flag : int, default 0
    """
    entries = [b"\x01" + topic.encode() + b"\x02", b"\x02" + body]
    if flag:
        entries.append(b"\x01\x01%d\x02" % flag)
    entries += [f"{name}\x01{value}\x02".encode() for name, value in properties.items() if name not in NOT_HASHED]
    return f"{sum(map(entry_hash, entries)) & _MASK:016x}"


def is_repeatable(
    row_id: str | None, topic: str | None, body: bytes | None, flag: int | None, properties: Mapping[str, str] | None
) -> bool:
    """Return whether a row counts as a repeat of others with its id: the hash in the id fits the row.

    An id by columns is not verified, because a message does not say which columns were hashed.

    Parameters
    ----------
    row_id : str or None
    topic : str or None
        The topic that the row was first written to.
    body, flag, properties
        As a read returns them.
    """
    if row_id is None or topic is None or body is None:
        return False
    if re.match(BY_COLUMNS, row_id):
        return True
    found = re.match(BY_PLACE, row_id)
    return found is not None and row_id[-16:] == row_hash(topic, bytes(body), properties or {}, flag or 0)


def entry_hash(entry: bytes, seed: int = 0) -> int:
    """Return the 64-bit hash of one entry; a seed is xor-ed to the words before they are mixed."""
    padded = entry + bytes(-len(entry) % 8)
    words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
    return _mix(len(entry) + sum(_mix(word + place * STEP, seed) for place, word in enumerate(words, 1)))


def _mix(number: int, seed: int = 0) -> int:
    number = (number & _MASK) ^ seed
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
