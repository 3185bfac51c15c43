"""Message properties as bytes: system properties, property strings, user properties, and ``keys`` given as arrays.

Entries of a list or map column are encoded back to back. A row's part of a property string, or of a gRPC message, is
then a slice and not a copy. A property that a row does not have takes no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask, byte_strings, rows_with_repeats, to_numpy
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Varints, Workspace, assemble
from rocketmq_spark.arrow.schema import COLUMNS
from rocketmq_spark.arrow.validate import Rule, Violation, check_text, violations
from rocketmq_spark.model.properties import INNER_PROPERTIES, RESERVED_PROPERTIES, ROW_ID

if TYPE_CHECKING:
    from rocketmq_spark.arrow.ids import UniqueIds
    from rocketmq_spark.arrow.split import Chunk

UNIQ_KEY: Final = b"UNIQ_KEY"
_END: Final = b"\x02"

# Up to this many different names in a block, a name is one bit of a 64-bit number; the other bits hold a sum's carry.
_BITS: Final = 40


@dataclass(frozen=True, slots=True)
class Property:
    """One system property of the rows of a block."""

    name: str  # ASCII
    values: ByteColumn | None  # None: every row that has the property has `literal` as its value
    valid: Mask | None  # Which rows have it; None: all
    literal: bytes = b""

    def there(self, rows: int) -> Mask:
        """Return which of all rows have the property."""
        return np.ones(rows, np.bool_) if self.valid is None else self.valid

    def sizes(self, rows: int) -> Ints:
        """Return how many bytes the property takes in each row's property string."""
        fixed = len(self.name) + 2
        if self.values is None:
            return self.there(rows) * (fixed + len(self.literal))
        return self.values.sizes + fixed if self.valid is None else self.values.sizes + self.valid * fixed


def property_parts(chunk: Chunk, ids: UniqueIds) -> list[Part]:
    """Return the parts of the property strings of a chunk's rows, in the order of `MessageBlock.properties`."""
    block, start, stop = chunk.block, chunk.start, chunk.stop
    parts: list[Part] = []
    # Which rows have a property already, one value for all where it is the same: 0x02 stands between two properties.
    # It could end each of them instead, but that would be one more part after every value.
    before: Mask | bool = False
    for prop in block.properties:
        name = prop.name.encode() + b"\x01" + prop.literal
        if prop.valid is None:
            parts.append(_lead(name, before))
            before = True
        else:
            there = chunk.picked(prop.valid[start:stop])
            parts.append(Choice((b"", name, _END + name), there * (1 + np.asarray(before, np.int8))))
            before = there | np.asarray(before)
        if prop.values is not None:
            parts.append(prop.values.slice(start, stop))
    parts.append(_lead(UNIQ_KEY + b"\x01", before))
    parts.append(unique_id_frame(chunk, ids).then(Frame(_END)))
    if block.user is not None:
        parts.append(block.user.slice(start, stop))
    return parts


def _lead(name: bytes, before: Mask | bool) -> Part:
    if isinstance(before, bool):
        return Frame(_END + name if before else name)
    return Choice((name, _END + name), before.view(np.int8))


def unique_id_frame(chunk: Chunk, ids: UniqueIds) -> Frame:
    """Return the unique ids of a chunk's rows, in hex."""
    template = bytearray(ids.prefix.hex().upper().encode())
    fields: list[tuple[int, str, npt.NDArray[Any]]] = []
    for digits in ids.digits(chunk.first_id, chunk.numbers):
        if isinstance(digits, np.ndarray):
            fields.append((len(template), "=u4", digits))
        template += bytes(4) if isinstance(digits, np.ndarray) else digits
    return Frame(bytes(template), tuple(fields))


def encode_properties(chunk: Chunk, ids: UniqueIds, workspace: Workspace) -> list[str]:
    """Return the property strings of single messages.

    Bytes that are not UTF-8 become U+FFFD, because a request header is text. A Java consumer does the same to such
    bytes in a batch, which stores them unchanged.
    """
    sizes = chunk.picked(chunk.block.property_sizes[chunk.start : chunk.stop])
    data = assemble(property_parts(chunk, ids), len(sizes), int(sizes.sum()), chunk.rows, workspace)
    ends = np.cumsum(sizes).tolist()
    return [str(data[begin:end], "utf-8", "replace") for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def join_keys(items: ListColumn) -> ByteColumn:
    """Return each row's items joined by one space (``Message.setKeys(Collection)``); a row without items is empty."""
    first = np.zeros(len(items.values) + 1, np.int8)
    first[items.offsets[:-1]] = 1
    joined = _assembled(items, [Choice((b" ", b""), first[:-1]), items.values], items.values.sizes + 1 - first[:-1])
    return joined.joined()


def is_blank(text: str) -> bool:
    """Return whether no character of `text` is above U+0020, so that Java's ``String.trim`` makes it empty."""
    return not any(character > " " for character in text)


def reserved_names(columns: Iterable[str], *, row_id: bool) -> frozenset[str]:
    """Return the names that a user property may not have in a write of these columns."""
    made = {COLUMNS[name].makes for name in columns if name in COLUMNS}
    return (RESERVED_PROPERTIES | INNER_PROPERTIES | made | ({ROW_ID} if row_id else set())) - {""}


def user_properties(
    entries: ListColumn, *, reserved: frozenset[str], dropped: frozenset[str]
) -> tuple[ListColumn, list[Violation]]:
    """Check a map column, and return it without the entries whose names are `dropped`.

    Names in `reserved` are violations unless they are dropped. The values of dropped entries are not checked.
    """
    broken: list[Violation] = []
    names, codes, is_special = _named(entries, reserved | dropped)
    if is_special.any():
        entries = entries.filter(~_named(entries, dropped)[2][codes])
        names, codes, is_reserved = _named(entries, reserved)
        broken += _check_reserved(entries, names, np.flatnonzero(is_reserved[codes]))
    broken += check_text("the name of a property", names, blank=True, entries=entries)
    broken += check_text("the value of a property", entries.values, blank=True, entries=entries)
    broken += _check_nulls(entries)
    broken += _check_duplicates(entries, codes, len(is_special))
    return entries, broken


def property_strings(entries: ListColumn) -> ListColumn:
    """Return ``name 0x01 value 0x02`` of each entry."""
    names = _names_of(entries)
    parts: list[Part] = [names, Frame(b"\x01"), entries.values, Frame(_END)]
    return _assembled(entries, parts, names.sizes + entries.values.sizes + 2)


def property_fields(entries: ListColumn) -> ListColumn:
    """Return the field ``user_properties`` of a gRPC message for each entry."""
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
    values = byte_strings([name.encode() for name in sorted(reserved)]).to_arrow().cast(encoded.dictionary.type)
    return names, to_numpy(encoded.indices), to_numpy(pc.is_in(encoded.dictionary, values))


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
    rows = entries.rows_of(hits)
    yield from violations(rule, np.unique(rows), None, lambda row: names.text(int(hits[np.searchsorted(rows, row)])))


def _check_nulls(entries: ListColumn) -> Iterator[Violation]:
    if entries.values.valid is not None:
        rule = Rule("the value of a property is null", "every property has a value", "leave the entry out of the map")
        yield from violations(rule, np.flatnonzero(~entries.values.valid), entries)


def _check_duplicates(entries: ListColumn, codes: Ints, names: int) -> Iterator[Violation]:
    """Check that a name occurs once in a row. Spark's maps guarantee that, Arrow's do not."""
    counts = entries.offsets[1:] - entries.offsets[:-1]
    if counts.max(initial=0) < 2:
        return
    if names <= _BITS:
        twice = rows_with_repeats(codes, entries.offsets)
    else:
        pairs = np.sort(np.repeat(np.arange(len(counts)), counts) * names + codes)
        twice = np.unique(pairs[1:][pairs[1:] == pairs[:-1]] // names)
    rule = Rule("a name occurs twice among the properties", "a name occurs once in a message", "merge the values")
    yield from violations(rule, twice)
