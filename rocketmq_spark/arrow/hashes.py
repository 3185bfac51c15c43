"""Computes hashes of whole columns: Java's string hash, and those of ``SPARK_ROW_ID``.

`rocketmq_spark.model.hashes` has the same hash functions for one value, pyarrow has none of them. In ``SPARK_ROW_ID``,
an id by place ends with one hash of 64 bits, an id by columns with two (docs/delivery.md#row-ids-and-deduplication).
Such a hash reads a string as 8-byte words, padded with zeros, so that numpy hashes many strings at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.block import Property
from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    byte_cells,
    byte_column,
    byte_strings,
    coded_column,
    decimals,
    int_column,
    list_column,
    text_array,
    to_arrow,
    to_numpy,
)
from rocketmq_spark.arrow.encoders import join_keys, property_strings
from rocketmq_spark.arrow.gather import Choice, Frame, Workspace, assemble, chunks
from rocketmq_spark.model.hashes import BY_COLUMNS, BY_PLACE, NOT_HASHED, ROW_ID, STEP
from rocketmq_spark.model.properties import CARRIED

Hashes = npt.NDArray[np.uint64]

_STEP: Final = np.uint64(STEP)
_ROUNDS: Final = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_PADS: Final = tuple(bytes(count) for count in range(8))

# Words are hashed in pieces of about this size, bytes: they fit a processor's cache, and memory is bounded.
_PIECE: Final = 256 * 1024


def byte_hashes(
    column: ByteColumn, head: bytes, tail: bytes, seed: int = 0, workspace: Workspace | None = None
) -> Hashes:
    """Return the hash of ``head + string + tail`` (not empty) for each string of a column, 0 where it is null."""
    hashes = np.zeros(len(column), np.uint64)
    workspace = workspace or Workspace()
    for start, stop in chunks(column.sizes.astype(np.int64) + len(head) + len(tail), _PIECE, None):
        hashes[start:stop] = _hashes(column.slice(start, stop), head, tail, seed, workspace)
    return hashes if column.valid is None else hashes * column.valid


def _hashes(column: ByteColumn, head: bytes, tail: bytes, seed: int, workspace: Workspace) -> Hashes:
    sizes = column.sizes.astype(np.int64) + (len(head) + len(tail))
    pads = -sizes & 7
    counts = (sizes + pads) >> 3
    ends = np.cumsum(counts)
    total = int(ends[-1])
    starts = ends - counts
    data = assemble([Frame(head), column, Frame(tail), Choice(_PADS, pads)], len(sizes), total * 8, None, workspace)
    # STEP, 2 * STEP, ... in each string: a running sum that falls back where a string begins.
    words = workspace.array("words", total, np.uint64)
    words[:] = _STEP
    words[starts[1:]] -= counts[:-1].astype(np.uint64) * _STEP
    np.cumsum(words, out=words)
    words += np.frombuffer(data, "<u8")
    words ^= np.uint64(seed)
    _mix(words, workspace.array("shifted", total, np.uint64))
    sums: Hashes = np.add.reduceat(words, starts)
    sums += sizes.astype(np.uint64)
    _mix(sums, np.empty_like(sums))
    return sums


def _mix(words: Hashes, shifted: Hashes) -> None:
    """Mix each word in place (the finaliser of SplitMix64); `shifted` is memory of the same size."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=shifted)
        words ^= shifted
        words *= factor
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted


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
        hashes[column.valid] = string_hashes(byte_cells(column.to_arrow().drop_null()))
        return hashes
    try:
        text = span.tobytes().decode()
    except UnicodeDecodeError:
        # A loop over rows, for blocks that hold ill-formed text only.
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


_LOW: Final = np.uint64(0xFFFF)
# "0000" to "ffff", each read as one 32-bit number.
_LOWER_HEX4: Final = np.frombuffer("".join(f"{number:04x}" for number in range(0x10000)).encode("ascii"), np.uint32)


@dataclass(frozen=True, slots=True)
class RowIds:
    """Makes the ``SPARK_ROW_ID`` of the rows of one partition."""

    write_id: str  # The same for every attempt of the write
    batch_id: int  # The micro-batch; -1 in a batch write
    partition_id: int
    columns: tuple[str, ...] | None = None  # The hashed columns. None: the whole row, and the id holds its place
    workspace: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    def of_columns(self, columns: Mapping[str, pa.Array], rows: int) -> Property:
        """Return the ids of the rows of one batch by `columns`."""
        halves = [np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)]
        for name in self.columns or ():
            texts = _texts(columns[name])
            if texts is not None:
                for half, seed in zip(halves, (0, STEP), strict=True):
                    half += byte_hashes(texts, f"{name}\x01".encode(), b"\x02", seed, self.workspace)
        return _property([Frame(f"{self.write_id}/{self.batch_id}/".encode())], halves)

    def of_content(self, first_row: int, *content: Any) -> Property:
        """Return the ids of the rows from number `first_row` on, with the hashes of their `content`."""
        hashes = content_hashes(self.workspace, *content)
        numbers = decimals(np.arange(first_row, first_row + len(hashes)))
        assert numbers is not None, "no rows"
        place = f"{self.write_id}/{self.batch_id}/{self.partition_id}/".encode()
        return _property([Frame(place), numbers, Frame(b"/")], [hashes])


def content_hashes(
    workspace: Workspace,
    topics: Iterable[str],
    topic_codes: Ints | None,
    properties: Iterable[Property],
    user: ListColumn | None,
    body: ByteColumn,
    flags: Ints | None,
) -> Hashes:
    """Return the `rocketmq_spark.model.hashes.row_hash` of rows; `user` has a property string for each entry."""
    hashes = byte_hashes(body, b"\x02", b"", 0, workspace)
    names = byte_strings([topic.encode() for topic in topics])
    if len(names):
        # The last hash is for rows without a topic, whose code is -1.
        of_topics = np.append(byte_hashes(names, b"\x01", b"\x02"), np.uint64(0))
        hashes += of_topics[0 if topic_codes is None else topic_codes]
    # Only flags that are set, so that ids are the same with a column of zeros and without one.
    texts = None if flags is None else decimals(flags, flags != 0)
    if texts is not None:
        hashes += byte_hashes(texts, b"\x01\x01", b"\x02", 0, workspace)
    for prop in properties:
        if not CARRIED[prop.name].hashed:
            continue
        head = prop.name.encode() + b"\x01" + prop.literal
        if prop.values is not None:
            hashes += byte_hashes(prop.values, head, b"\x02", 0, workspace)
        else:
            literal = byte_hashes(byte_strings([b""]), head, b"\x02")
            hashes += literal if prop.valid is None else literal * prop.valid
    if user is not None:
        sums = np.zeros(len(user.values) + 1, np.uint64)
        np.cumsum(byte_hashes(user.values, b"", b"", 0, workspace), out=sums[1:])
        # The sums may wrap: their differences do, too.
        hashes += sums[user.offsets[1:]] - sums[user.offsets[:-1]]
    return hashes


def repeatable(ids: pa.Array, topics: pa.Array, bodies: pa.Array, flags: pa.Array, properties: pa.Array) -> pa.Array:
    """Return which rows count as repeats of others with their id, as `rocketmq_spark.model.hashes.is_repeatable` does.

    Spark reads the annotations, which say that this is a function of Arrow arrays.
    """
    by_columns = pc.fill_null(pc.match_substring_regex(ids, BY_COLUMNS), False)
    by_place = pc.fill_null(pc.match_substring_regex(ids, BY_PLACE), False)
    places = to_numpy(by_place).nonzero()[0]
    digits = pc.utf8_slice_codeunits(ids.take(to_arrow(places)), -16).to_pylist()
    claimed = np.frombuffer(bytes.fromhex("".join(digits)), ">u8")
    fits = to_numpy(by_columns).copy()
    fits[places] = claimed == _stored_hashes(topics, bodies, flags, properties)[places]
    for needed in (topics, bodies):
        fits &= to_numpy(needed.is_valid())
    return to_arrow(fits)


def _stored_hashes(topics: pa.Array, bodies: pa.Array, flags: pa.Array, properties: pa.Array) -> Hashes:
    """Return the hashes of rows as a read returns them, whose properties are all in one map."""
    codes, texts = coded_column(topics) or (np.full(len(topics), -1), [])
    entries = list_column(properties)
    if entries is not None and entries.names is not None:
        names = entries.names.to_arrow()
        left_out = pc.is_in(names, text_array(NOT_HASHED, names.type))
        entries = property_strings(entries.filter(~to_numpy(left_out)))
    numbers = int_column(flags)
    set_flags = None if numbers is None else numbers[0]
    return content_hashes(Workspace(), texts, codes, (), entries, byte_cells(bodies), set_flags)


def _property(parts: list[Frame | ByteColumn], hashes: Iterable[Hashes]) -> Property:
    """Return the property whose value is `parts` and the digits of `hashes`."""
    fields, digits = [], 0
    for numbers in hashes:
        for shift in (48, 32, 16, 0):
            fields.append((digits, "=u4", _LOWER_HEX4[numbers >> np.uint64(shift) & _LOW]))
            digits += 4
    rows = len(fields[0][2])
    sizes = np.full(rows, digits, np.int64)
    for part in parts:
        sizes += part.sizes if isinstance(part, ByteColumn) else len(part.template)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    data = assemble([*parts, Frame(bytes(digits), tuple(fields))], rows, int(ends[-1]))
    return Property(ROW_ID, ByteColumn(ends, np.frombuffer(data, np.uint8)), None)


def _texts(array: pa.Array) -> ByteColumn | None:
    """Return the values of a column that `check_row_id` accepts as text; None if all are null."""
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        items = list_column(array)
        # No items are none, whatever the other rows of the batch have: a retry may cut its batches elsewhere.
        return None if items is None else join_keys(items).without_empty()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        array = array.cast(pa.string())
    return byte_column(array)
