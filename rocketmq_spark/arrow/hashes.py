"""Computes hashes of whole columns: Java's string hash, and those of ``SPARK_ROW_ID``.

`rocketmq_spark.model.hashes` has the same functions for one value, pyarrow has none of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    byte_column,
    byte_column_or_nulls,
    byte_strings,
    coded_column,
    decimals,
    filled,
    int_column,
    list_column,
    text_array,
    to_arrow,
    to_numpy,
    without_dictionary,
)
from rocketmq_spark.arrow.encoders import join_keys, property_strings
from rocketmq_spark.arrow.gather import Frame, Workspace, assemble, consecutive_decimals, hex_groups
from rocketmq_spark.arrow.kernel import Kernel, default_kernel
from rocketmq_spark.arrow.model import Property
from rocketmq_spark.arrow.numpy_hashes import Hashes, Strings
from rocketmq_spark.arrow.schema import is_list
from rocketmq_spark.model.hashes import BY_COLUMNS, BY_PLACE, NOT_HASHED, ROW_ID, STEP

_BASE: Final = 31
_INVERSE: Final = pow(_BASE, -1, 2**32)

# UTF-16 units that start at a byte of UTF-8: none at a continuation byte, two (a surrogate pair) at a 4-byte lead.
_UNITS: Final = np.array([1] * 0x80 + [0] * 0x40 + [1] * 0x30 + [2] * 0x10, np.uint8)

# Where Python replaces each byte of an encoded surrogate, Java replaces all of them by one character.
_SURROGATE: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")
_REPLACEMENT: Final = "\ufffd".encode()


def string_hashes(column: ByteColumn) -> npt.NDArray[np.int32]:
    """Return ``String.hashCode()`` of each row, any number for null. Invalid UTF-8 counts as Java's U+FFFD."""
    span = column.span
    ends = column.offsets - column.offsets[0]
    if span.max(initial=0) < 0x80:
        return _java_hashes(span, ends)
    if column.valid is not None:
        # The bytes of a null row may not be text, so null rows are removed before the column is decoded.
        hashes = np.zeros(len(column), np.int32)
        hashes[column.valid] = string_hashes(byte_column_or_nulls(column.to_arrow().drop_null()))
        return hashes
    try:
        text = span.tobytes().decode()
    except UnicodeDecodeError:
        # Only a column with ill-formed text needs this loop over its rows.
        texts = [_SURROGATE.sub(_REPLACEMENT, column.value(row) or b"") for row in range(len(column))]
        return string_hashes(byte_strings([text.decode("utf-8", "replace").encode() for text in texts]))
    units = np.frombuffer(text.encode("utf-16-le"), "<u2")
    starts = np.concatenate([[0], np.cumsum(_UNITS[span], dtype=np.int64)])
    return _java_hashes(units, starts[ends])


def _java_hashes(units: npt.NDArray[np.uint8] | npt.NDArray[np.uint16], ends: Ints) -> npt.NDArray[np.int32]:
    size = len(units)
    # The next power of two, so that blocks of about the same size share one table.
    powers, inverses = _powers(1 << max(size, 1).bit_length())
    prefix = np.zeros(size + 1, np.uint32)
    np.cumsum(inverses[:size] * units, dtype=np.uint32, out=prefix[1:])
    # `prefix` sums unit[i] * 31^-i. Times powers[end] = 31^(end-1), that is Java's sum of unit[i] * 31^(end-1-i).
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


# The four digits of a 16-bit number, at the index with the two bytes of this number swapped. `_property` swaps the
# bytes of a hash, so that its first digits come first in memory. This swaps each pair of bytes, too.
_LOWER_HEX4: Final = hex_groups(b"0123456789abcdef")[np.arange(0x10000, dtype=np.uint16).byteswap()]


@dataclass(frozen=True, slots=True)
class RowIds:
    """Makes the ``SPARK_ROW_ID`` of the rows of one partition."""

    write_id: str  # The same for every attempt of the write
    batch_id: int  # The micro-batch; -1 in a batch write
    partition_id: int
    columns: tuple[str, ...] | None = None  # The hashed columns. None: the whole row, and the id holds its place
    workspace: Workspace = field(default_factory=Workspace, repr=False, compare=False)
    kernel: Kernel = field(default_factory=default_kernel, repr=False, compare=False)

    def of_columns(self, columns: Mapping[str, pa.Array], rows: int) -> Property:
        """Return the ids of the rows of one batch by `columns`."""
        texts = {name: _texts(columns[name]) for name in self.columns or ()}
        strings = [Strings(of, f"{name}\x01".encode(), b"\x02") for name, of in texts.items() if of is not None]
        halves = (
            self.kernel.hash_sums(strings, self.workspace, (0, STEP)) if strings else np.zeros((2, rows), np.uint64)
        )
        return self._property([Frame(f"{self.write_id}/{self.batch_id}/".encode())], halves)

    def of_content(self, first_row: int, *content: Any) -> Property:
        """Return the ids of the rows from number `first_row` on; `content` is as of `content_hashes`."""
        hashes = content_hashes(self.kernel, self.workspace, *content)
        rows = len(hashes)
        numbers = consecutive_decimals(first_row, rows) or decimals(np.arange(first_row, first_row + rows))
        assert numbers is not None, "no rows"
        place = f"{self.write_id}/{self.batch_id}/{self.partition_id}/".encode()
        return self._property([Frame(place), numbers, Frame(b"/")], [hashes])

    def _property(self, parts: list[Frame | ByteColumn], hashes: Hashes | Sequence[Hashes]) -> Property:
        """Return the property whose value is `parts` and the digits of `hashes`."""
        for numbers in hashes:
            groups = _LOWER_HEX4[numbers.astype("<u8", copy=False).byteswap().view("<u2")]
            parts.append(Frame(bytes(16), ((0, "V16", groups.view("V16")),)))
        frames = [part for part in parts if isinstance(part, Frame)]
        if len(frames) == len(parts):
            return Property(ROW_ID, functools.reduce(Frame.then, frames), None)
        sizes = sum(part.sizes if isinstance(part, ByteColumn) else len(part.template) for part in parts)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        data = assemble(parts, len(hashes[0]), int(ends[-1]), None, self.workspace)
        return Property(ROW_ID, ByteColumn(ends, np.frombuffer(data, np.uint8)), None)


Sums: TypeAlias = "Callable[[Sequence[Strings]], Hashes]"
"""Returns the sum of the hashes of each row's strings; the last axis has the rows."""


def content_sums(
    sums: Sums,
    topics: Iterable[str],
    topic_codes: Ints | None,
    properties: Iterable[Property],
    user: ListColumn | None,
    body: ByteColumn,
    flags: Ints | None,
) -> Hashes:
    """Return the sum of the strings' hashes in each row's content.

    All of `properties` belong to the content. `user` has a property string for each entry.
    """
    strings = [Strings(body, b"\x02")]
    # Only flags that are set, so that hashes are the same with a column of zeros and without one.
    texts = None if flags is None else decimals(flags, flags != 0)
    if texts is not None:
        strings.append(Strings(texts, b"\x01\x01", b"\x02"))
    literals: Any = np.uint64(0)
    for prop in properties:
        head = prop.name.encode() + b"\x01" + prop.literal
        if prop.values is not None:
            strings.append(Strings(prop.column(len(body)), head, b"\x02"))
        else:
            literal = sums([Strings(byte_strings([b""]), head, b"\x02")])
            literals = literals + (literal if prop.valid is None else literal * prop.valid)
    hashes = sums(strings)
    hashes += literals
    names = byte_strings([topic.encode() for topic in topics])
    if len(names):
        of_names = sums([Strings(names, b"\x01", b"\x02")])
        # The last hash is for rows without a topic, whose code is -1.
        of_names = np.concatenate([of_names, np.zeros((*of_names.shape[:-1], 1), np.uint64)], axis=-1)
        hashes += of_names[..., [0] if topic_codes is None else topic_codes]
    if user is not None:
        of_entries = sums([Strings(user.values)])
        before = np.zeros((*of_entries.shape[:-1], len(user.values) + 1), np.uint64)
        np.cumsum(of_entries, axis=-1, out=before[..., 1:])
        # The sums may wrap: their differences do, too.
        hashes += before[..., user.offsets[1:]] - before[..., user.offsets[:-1]]
    return hashes


def content_hashes(kernel: Kernel, workspace: Workspace, *content: Any) -> Hashes:
    """Return the `rocketmq_spark.model.hashes.row_hash` of rows; `content` as of `content_sums`."""
    return content_sums(lambda strings: kernel.hash_sums(strings, workspace, (0,))[0], *content)


def repeatable(ids: pa.Array, topics: pa.Array, bodies: pa.Array, flags: pa.Array, properties: pa.Array) -> pa.Array:
    """Return which rows repeat others with their id, as `rocketmq_spark.model.hashes.is_repeatable` does.

    Spark's ``arrow_udf`` recognises a function of Arrow arrays by these annotations.
    """
    by_columns = filled(pc.match_substring_regex(ids, BY_COLUMNS), False)
    by_place = filled(pc.match_substring_regex(ids, BY_PLACE), False)
    places = to_numpy(by_place).nonzero()[0]
    digits = pc.utf8_slice_codeunits(ids.take(to_arrow(places)), -16).to_pylist()
    hashes_in_ids = np.frombuffer(bytes.fromhex("".join(digits)), ">u8")
    fits = to_numpy(by_columns).copy()
    fits[places] = hashes_in_ids == stored_hashes(topics, bodies, flags, properties)[places]
    for needed in (topics, bodies):
        fits &= to_numpy(needed.is_valid())
    return to_arrow(fits)


def stored_hashes(topics: pa.Array, bodies: pa.Array, flags: pa.Array, properties: pa.Array) -> Hashes:
    """Return the hashes of rows as a read returns them, whose properties are all in one map; see `content_hashes`."""
    codes, texts = coded_column(topics) or (np.full(len(topics), -1), [])
    return content_hashes(
        default_kernel(), Workspace(), texts, codes, (), *stored_content(bodies, flags, properties, NOT_HASHED)
    )


def stored_content(
    bodies: pa.Array, flags: pa.Array, properties: pa.Array, left_out: Iterable[str]
) -> tuple[ListColumn | None, ByteColumn, Ints | None]:
    """Return the last arguments of `content_sums` for stored messages; `left_out` are properties that do not count."""
    entries = list_column(properties)
    if entries is not None and entries.names is not None:
        names = entries.names.to_arrow()
        kept = ~to_numpy(pc.is_in(names, text_array(left_out, names.type)))
        entries = property_strings(entries.filter(kept)) if kept.any() else None
    numbers = int_column(flags)
    return entries, byte_column_or_nulls(bodies), None if numbers is None else numbers[0]


def _texts(array: pa.Array) -> ByteColumn | None:
    """Return the values of a column that `check_row_id` accepts as text; None if all are null."""
    if is_list(array.type):
        items = list_column(array)
        # Empty lists count as null in every batch, because a retry may cut its batches elsewhere.
        return None if items is None else join_keys(items).without_empty()
    array = without_dictionary(array)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        array = array.cast(pa.string())
    return byte_column(array)
