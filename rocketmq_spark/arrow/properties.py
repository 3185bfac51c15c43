"""Lists and maps of a block as bytes a row: user properties, and ``keys`` given as arrays.

Rule 1: entries are encoded back to back, so a row's part of a property string, or of a gRPC message, is a slice and
        not a copy.
Rule 2: what the broker or this connector writes itself is no user property; a copy job drops it, any other is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask, byte_strings, to_numpy
from rocketmq_spark.arrow.gather import Choice, Frame, Part, assemble
from rocketmq_spark.arrow.validate import Rule, Violation, check_text, violations
from rocketmq_spark.arrow.varint import Varints
from rocketmq_spark.message_const import RESERVED_PROPERTIES, SHARDING_KEY
from rocketmq_spark.wire.row_hash import ROW_ID

# Java leaves these to the user, but the broker refuses or misreads a message that has them (spec/remoting.md 19.5).
_INNER: Final = frozenset({"INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH"})

# Up to so many different names in a block, a name is one bit of a 64-bit number; the rest holds what a sum carries.
_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class Property:
    """One system property of the rows of a block.

    Parameters
    ----------
    name : bytes
    values : ByteColumn or None
        None: every row that has the property has `literal` as its value.
    valid : bool array or None
        Which rows have it; None: all.
    """

    name: bytes
    values: ByteColumn | None
    valid: Mask | None
    literal: bytes = b""

    def sizes(self, rows: int) -> Ints:
        """Return how many bytes the property takes in each row."""
        fixed = len(self.name) + 2
        if self.values is None:
            there = np.ones(rows, np.bool_) if self.valid is None else self.valid
            return there * (fixed + len(self.literal))
        return self.values.sizes + fixed if self.valid is None else self.values.sizes + self.valid * fixed


def join_keys(items: ListColumn) -> ByteColumn:
    """Return each row's items joined by one space (``Message.setKeys(Collection)``); a row without items is empty."""
    first = np.zeros(len(items.values) + 1, np.int8)
    first[items.offsets[:-1]] = 1
    joined = _assembled(items, [Choice((b" ", b""), first[:-1]), items.values], items.values.sizes + 1 - first[:-1])
    return joined.joined()


def is_blank(text: str) -> bool:
    """Return whether all of `text` goes away in Java's ``String.trim``: nothing above U+0020 in it."""
    return not any(character > " " for character in text)


def reserved_names(*, sharding_key: bool, row_id: bool) -> frozenset[str]:
    """Return the names a user property may not have: those that the connector writes among them, where it does."""
    written = {SHARDING_KEY: sharding_key, ROW_ID: row_id}
    return RESERVED_PROPERTIES | _INNER | {name for name, does in written.items() if does}


def user_properties(
    entries: ListColumn, *, reserved: frozenset[str], dropped: frozenset[str]
) -> tuple[ListColumn, list[Violation]]:
    """Check a map column, and leave out what is to be left out.

    Parameters
    ----------
    entries : ListColumn
        With names.
    reserved : frozenset of str
        Names that are errors, unless they are dropped.
    dropped : frozenset of str
        Names that are left out, together with all that may be wrong with their values.

    Returns
    -------
    tuple of ListColumn and list of Violation
        The entries, in the order of the map.
    """
    found: list[Violation] = []
    names, codes, is_special = _named(entries, reserved | dropped)
    if is_special.any():
        entries = entries.filter(~_named(entries, dropped)[2][codes])
        names, codes, is_reserved = _named(entries, reserved)
        found += _check_reserved(entries, names, np.flatnonzero(is_reserved[codes]))
    found += check_text("the name of a property", names, blank=True, entries=entries)
    found += check_text("the value of a property", entries.values, blank=True, entries=entries)
    found += _check_nulls(entries)
    found += _check_duplicates(entries, codes, len(is_special))
    return entries, found


def property_strings(entries: ListColumn) -> ListColumn:
    """Return ``name 0x01 value 0x02`` of each entry (spec/remoting.md section 5)."""
    names = _names_of(entries)
    parts: list[Part] = [names, Frame(b"\x01"), entries.values, Frame(b"\x02")]
    return _assembled(entries, parts, names.sizes + entries.values.sizes + 2)


def property_fields(entries: ListColumn) -> ListColumn:
    """Return the field ``user_properties`` of a gRPC message for each entry (spec/grpc.md section 7)."""
    names, values = _names_of(entries), entries.values
    name_size, value_size = Varints.of(names.sizes), Varints.of(values.sizes)
    sizes = 2 + name_size.width + value_size.width + names.sizes + values.sizes
    size = Varints.of(sizes)
    head = size.after(Frame(b"\x12")).then(name_size.after(Frame(b"\x0a")))
    parts: list[Part] = [head, names, value_size.after(Frame(b"\x12")), values]
    return _assembled(entries, parts, sizes + 1 + size.width)


def _names_of(entries: ListColumn) -> ByteColumn:
    if entries.names is None:
        raise TypeError("user properties are a map, not a list")
    return entries.names


def _named(entries: ListColumn, reserved: frozenset[str]) -> tuple[ByteColumn, Ints, Mask]:
    """Return the names of `entries`, a number for each, and which numbers are reserved names."""
    names = _names_of(entries)
    encoded = names.to_arrow().dictionary_encode()
    wanted = byte_strings([name.encode() for name in sorted(reserved)]).to_arrow().cast(encoded.dictionary.type)
    return names, to_numpy(encoded.indices), to_numpy(pc.is_in(encoded.dictionary, wanted))


def _assembled(items: ListColumn, parts: Sequence[Part], sizes: Ints) -> ListColumn:
    """Return a list column with one string per entry of `items`, assembled from `parts` and `sizes` long."""
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if ends[-1] == 0:
        return ListColumn(items.offsets, ByteColumn(ends, np.empty(0, np.uint8)))
    data = assemble(parts, len(sizes), int(ends[-1]))
    return ListColumn(items.offsets, ByteColumn(ends, np.frombuffer(data, np.uint8)))


def _check_reserved(entries: ListColumn, names: ByteColumn, hits: Ints) -> Iterator[Violation]:
    rule = Rule(
        "the name of a property is reserved",
        "names that RocketMQ or the connector writes itself are not allowed",
        "use the column meant for it (keys, tags, shardingKey, delayTimeLevel, ...) or another name",
    )
    if len(hits):
        rows = entries.rows_of(hits)
        yield Violation(rule, np.unique(rows), lambda row: names.text(int(hits[np.searchsorted(rows, row)])))


def _check_nulls(entries: ListColumn) -> Iterator[Violation]:
    if entries.values.valid is not None:
        rule = Rule("the value of a property is null", "every property has a value", "leave the entry out of the map")
        yield from violations(rule, np.flatnonzero(~entries.values.valid), entries)


def _check_duplicates(entries: ListColumn, codes: Ints, names: int) -> Iterator[Violation]:
    """A name occurs once in a row. Spark's maps keep that by themselves, Arrow's need not."""
    counts = entries.offsets[1:] - entries.offsets[:-1]
    if counts.max(initial=0) < 2:
        return
    filled = np.flatnonzero(counts)
    if names <= _BITS:
        # The sum of a row's bits equals their union exactly if none occurs twice.
        bits = np.left_shift(np.int64(1), codes, dtype=np.int64)
        starts = entries.offsets[:-1][filled]
        twice = filled[np.add.reduceat(bits, starts) != np.bitwise_or.reduceat(bits, starts)]
    else:
        pairs = np.sort(np.repeat(np.arange(len(counts)), counts) * names + codes)
        twice = np.unique(pairs[1:][pairs[1:] == pairs[:-1]] // names)
    rule = Rule("a name occurs twice among the properties", "a name occurs once in a message", "merge the values")
    yield from violations(rule, twice)
