"""The property ``SPARK_ROW_ID``: what a consumer, or a later read, tells a repeated row by.

Rule 1: ``rowId=true``: ``write id/batch id/partition/row number/hash``, the hash of all that the row says
        (`rocketmq_spark.wire.row_hash`). A retried task gives its rows the same ids as long as its input has the same
        order; where the order changed the hash differs, too, so a row is never taken for another one.
Rule 2: ``rowId=columns:a,b``: ``write id/batch id/hash``, the hash of these columns, whatever the row's place. It has
        128 bits, as it alone tells rows apart: to whoever removes repeats, rows equal in these columns are one.
Rule 3: nothing here is drawn or counted: the write's place comes in, the row number is the row's own.

Follows design.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.byte_hash import Hashes, byte_hashes
from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    byte_column,
    byte_strings,
    coded_column,
    int_column,
    list_column,
    to_arrow,
    to_numpy,
)
from rocketmq_spark.arrow.gather import Frame, Part, Workspace, assemble
from rocketmq_spark.arrow.properties import Property, join_keys, property_strings
from rocketmq_spark.wire.row_hash import BY_COLUMNS, BY_PLACE, NOT_HASHED, ROW_ID, STEP

_LOW: Final = np.uint64(0xFFFF)
# "0000" to "ffff", each read as one 32-bit number.
_HEX4: Final = np.frombuffer("".join(f"{number:04x}" for number in range(0x10000)).encode("ascii"), np.uint32)


@dataclass(frozen=True, slots=True)
class RowIds:
    """Gives the rows of one partition their ids.

    Parameters
    ----------
    write_id : str
        The same for every attempt of the write.
    batch_id : int
        The micro-batch; -1 in a batch write.
    partition_id : int
    columns : tuple of str or None, default None
        The columns that are hashed; None: the whole row, and its place counts.
    workspace : Workspace
        Memory for the hashes, kept from one batch to the next.
    """

    write_id: str
    batch_id: int
    partition_id: int
    columns: tuple[str, ...] | None = None
    workspace: Workspace = field(default_factory=Workspace, repr=False, compare=False)

    def of_columns(self, columns: Mapping[str, pa.Array], rows: int) -> Property:
        """Return the ids of the rows of one batch by the columns asked for (rule 2)."""
        halves = [np.zeros(rows, np.uint64), np.zeros(rows, np.uint64)]
        for name in self.columns or ():
            texts = _texts(columns[name])
            if texts is not None:
                for half, seed in zip(halves, (0, STEP), strict=True):
                    half += byte_hashes(texts, f"{name}\x01".encode(), b"\x02", seed, self.workspace)
        return _property([Frame(f"{self.write_id}/{self.batch_id}/".encode())], halves)

    def of_rows(self, hashes: Hashes, first_row: int) -> Property:
        """Return the ids of the rows from number `first_row` on, whose content has `hashes` (rule 1)."""
        numbers = byte_column(to_arrow(np.arange(first_row, first_row + len(hashes))).cast(pa.string()))
        if numbers is None:
            return _property([], [hashes])
        place = f"{self.write_id}/{self.batch_id}/{self.partition_id}/".encode()
        return _property([Frame(place), numbers, Frame(b"/")], [hashes])


def content_hashes(
    topics: Iterable[str],
    topic_codes: Ints | None,
    properties: Iterable[Property],
    user: ListColumn | None,
    body: ByteColumn,
    flags: ByteColumn | None,
    workspace: Workspace,
) -> Hashes:
    """Return the hashes of all that rows say (wire/row_hash.py, rule 2).

    Parameters
    ----------
    topics : iterable of str
    topic_codes : int array or None
        Which of `topics` each row has, -1 where null; None: all have the only one.
    properties : iterable of Property
    user : ListColumn or None
        The user's properties, entry by entry.
    body : ByteColumn
    flags : ByteColumn or None
        Decimal, null where a flag is 0; None: all are.
    workspace : Workspace
    """
    hashes = byte_hashes(body, b"\x02", b"", 0, workspace)
    texts = byte_strings([topic.encode() for topic in topics])
    if len(texts):
        of_topics = byte_hashes(texts, b"\x01", b"\x02")
        hashes += (
            of_topics[0] if topic_codes is None else np.where(topic_codes < 0, np.uint64(0), of_topics[topic_codes])
        )
    if flags is not None:
        hashes += byte_hashes(flags, b"\x01\x01", b"\x02", 0, workspace)
    for one in properties:
        head = one.name + b"\x01" + one.literal
        if one.values is not None:
            hashes += byte_hashes(one.values, head, b"\x02", 0, workspace)
        else:
            literal = byte_hashes(ByteColumn(np.zeros(2, np.int32), np.empty(0, np.uint8)), head, b"\x02")
            hashes += literal if one.valid is None else literal * one.valid
    if user is not None:
        sums = np.zeros(len(user.values) + 1, np.uint64)
        np.cumsum(byte_hashes(user.values, b"", b"", 0, workspace), out=sums[1:])
        # Entries that are left out of no row: sums wrap, and so do their differences.
        hashes += sums[user.offsets[1:]] - sums[user.offsets[:-1]]
    return hashes


def repeatable(ids: pa.Array, topics: pa.Array, bodies: pa.Array, flags: pa.Array, properties: pa.Array) -> pa.Array:
    """Return which rows count as repeats of others with their id; see `rocketmq_spark.wire.row_hash.is_repeatable`.

    Spark knows by the annotations that this is a function of Arrow arrays.
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
    rows = len(topics)
    codes, texts = coded_column(topics) or (np.full(rows, -1), [])
    entries = list_column(properties)
    if entries is not None and entries.names is not None:
        names = entries.names.to_arrow()
        counts = pc.invert(
            pc.is_in(names, byte_strings([name.encode() for name in NOT_HASHED]).to_arrow().cast(names.type))
        )
        entries = property_strings(entries.filter(to_numpy(counts)))
    numbers = int_column(flags)
    decimals = None if numbers is None else byte_column(to_arrow(numbers[0], numbers[0] != 0).cast(pa.string()))
    body = byte_column(bodies) or ByteColumn(np.zeros(rows + 1, np.int32), np.empty(0, np.uint8))
    return content_hashes(texts, codes, (), entries, body, decimals, Workspace())


def _property(parts: list[Part], hashes: Iterable[Hashes]) -> Property:
    """Return the property whose value is `parts` and the digits of `hashes`."""
    fields, digits = [], 0
    for numbers in hashes:
        for shift in (48, 32, 16, 0):
            fields.append((digits, "=u4", _HEX4[numbers >> np.uint64(shift) & _LOW]))
            digits += 4
    rows = len(fields[0][2])
    sizes = np.full(rows, digits, np.int64)
    for part in parts:
        sizes += part.sizes if isinstance(part, ByteColumn) else len(part.template) if isinstance(part, Frame) else 0
    ends = np.concatenate([[0], np.cumsum(sizes)])
    data = assemble([*parts, Frame(bytes(digits), tuple(fields))], rows, int(ends[-1])) if rows else b""
    return Property(ROW_ID.encode(), ByteColumn(ends, np.frombuffer(data, np.uint8)), None)


def _texts(array: pa.Array) -> ByteColumn | None:
    """Return the values of any column that `check_row_id` has let through as text; None if all are null."""
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
