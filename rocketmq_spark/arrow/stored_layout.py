"""Where everything is in the stored records of one or many pulls: positions in one buffer, as numpy arrays.

Rule 1: positions only; what is found there is the affair of `rocketmq_spark.arrow.decode`.
Rule 2: every length is held against the end of its record before anything is read by it. What does not fit, or is rare,
        is `Irregular`: it is read row by row, which knows what is wrong with it.

The one loop over records reads their sizes: where the next one begins only the one before tells. All else is arithmetic
on arrays. A row is a record, or an item of an inner batch.

Follows spec/remoting.md sections 6.1, 6.5 and 8.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, Ints, Octets, byte_column, to_arrow
from rocketmq_spark.compression import COMPRESSED_FLAG
from rocketmq_spark.message import Buffer
from rocketmq_spark.wire.records import (
    MAX_STORED_ROWS,
    MESSAGE_MAGIC_V1,
    MESSAGE_MAGIC_V2,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
)
from rocketmq_spark.wire.unwrap import INNER_BATCH

_SIZE: Final = struct.Struct(">i")
# How many offsets a broker gave an inner batch.
_INNER_NUM: Final = re.compile(rb"INNER_NUM\x01([0-9]{1,5})")
_HEAD: Final = (
    ("size", ">i4"),
    ("magic", ">u4"),
    ("crc", ">u4"),
    ("queue_id", ">i4"),
    ("flag", ">i4"),
    ("queue_offset", ">i8"),
    ("physical_offset", ">i8"),
    ("sys_flag", ">i4"),
    ("born_timestamp", ">i8"),
    ("born_host", "V8"),
    ("store_timestamp", ">i8"),
    ("store_host", "V8"),
    ("reconsume_times", ">i4"),
    ("prepared_transaction_offset", ">i8"),
    ("body_length", ">i4"),
)
_ITEM_HEAD: Final = np.dtype(
    [("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body_length", ">i4")]
)
_SYS_FLAG_AT: Final = 36
# An empty topic and no properties: the lengths alone.
_AFTER_BODY: Final = 3


class Irregular(Exception):
    """Bytes that this way of reading does not take."""


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a buffer, n of them.

    Parameters
    ----------
    data : uint8 array
    heads : structured array, shape (n,)
        What comes before the body, by the names of spec/remoting.md section 8.
    starts, bodies, body_ends, properties, ends : int arrays, shape (n,)
        Positions; the properties end where the record does.
    """

    data: Octets
    heads: npt.NDArray[Any]
    starts: Ints
    bodies: Ints
    body_ends: Ints
    properties: Ints
    ends: Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """The messages of records.

    Parameters
    ----------
    record : int array, shape (rows,)
        The record of each.
    queue_offset, flag, bodies, body_ends, properties, ends : int arrays, shape (rows,)
    """

    record: Ints
    queue_offset: Ints
    flag: Ints
    bodies: Ints
    body_ends: Ints
    properties: Ints
    ends: Ints

    def select(self, rows: Ints) -> Rows:
        """Return some of them, by their numbers."""
        return Rows(*(getattr(self, name)[rows] for name in Rows.__slots__))


def cells(data: Octets, starts: Ints, ends: Ints) -> pa.BinaryArray:
    """Return copies of spans of a buffer, which come in its order."""
    # Wanted and unwanted spans by turns make the buffer a column; a take copies the wanted ones.
    borders = np.empty(2 * len(starts) + 1, np.int32)
    borders[:-1:2], borders[1::2], borders[-1] = starts, ends, len(data)
    wanted = np.arange(0, 2 * len(starts), 2, dtype=np.int32)
    return ByteColumn(borders, data).to_arrow().take(to_arrow(wanted))


def records_of(body: Buffer) -> Records:
    """Return where everything is in the records that `body` is made of.

    Raises
    ------
    Irregular
        A record is truncated, has an unknown magic, or more in it than the layout says; a topic is not UTF-8; some
        hosts are IPv6, and some are not.
    """
    data = np.frombuffer(body, np.uint8)
    kind = _head_of(data)
    starts, ends = _spans(body, 0, len(data), kind.itemsize + _AFTER_BODY)
    heads = _heads(data, starts, kind)
    magic, sys_flag = heads["magic"], heads["sys_flag"]
    _fit(np.isin(magic, (MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2)))
    _fit((sys_flag ^ sys_flag[:1]) & (SYS_FLAG_BORN_HOST_V6 | SYS_FLAG_STORE_HOST_V6) == 0)
    wide = magic == MESSAGE_MAGIC_V2
    lengths = heads["body_length"].astype(np.int64)
    bodies = starts + kind.itemsize
    body_ends = bodies + lengths
    # What is read by a length that is wrong would lie beyond its record, or even the buffer: looked at first.
    _fit((lengths >= 0) & (body_ends + _AFTER_BODY + wide <= ends))
    topic_lengths = data[body_ends].astype(np.int64)
    if wide.any():
        topic_lengths = np.where(wide, topic_lengths << 8 | data[body_ends + wide], topic_lengths)
    topics = body_ends + 1 + wide
    properties = _properties(data, topics + topic_lengths, ends)
    try:
        cells(data, topics, topics + topic_lengths).cast(pa.string())
    except pa.ArrowInvalid as exc:
        raise Irregular from exc
    return Records(data, heads, starts, bodies, body_ends, properties, ends)


def rows_of(records: Records, body: Buffer) -> Rows:
    """Return the messages of the records, in their order.

    Raises
    ------
    Irregular
        An inner batch is compressed as a whole, has fewer messages than offsets, or an item does not fit into it.
    """
    heads = records.heads
    numbers = np.arange(len(heads))
    sys_flag = heads["sys_flag"]
    whole = Rows(
        numbers,
        heads["queue_offset"].astype(np.int64),
        heads["flag"].astype(np.int32),
        records.bodies,
        records.body_ends,
        records.properties,
        records.ends,
    )
    inner = np.flatnonzero(sys_flag & INNER_BATCH == INNER_BATCH)
    if not len(inner):
        return whole
    _fit(sys_flag[inner] & COMPRESSED_FLAG == 0)
    taken_apart = [_items(records, body, int(number)) for number in inner]
    plain = whole.select(np.flatnonzero(sys_flag & INNER_BATCH != INNER_BATCH))
    together = _joined([plain, *taken_apart])
    return together.select(np.argsort(together.record, kind="stable"))


def _items(records: Records, body: Buffer, number: int) -> Rows:
    data = records.data
    start, end = int(records.bodies[number]), int(records.body_ends[number])
    starts, ends = _spans(body, start, end, _ITEM_HEAD.itemsize + 2)
    if not 1 <= len(starts) <= MAX_STORED_ROWS:
        raise Irregular
    offsets = _INNER_NUM.search(body, int(records.properties[number]), int(records.ends[number]))
    if offsets is not None and int(offsets[1]) > len(starts):
        raise Irregular
    heads = _heads(data, starts, _ITEM_HEAD)
    lengths = heads["body_length"].astype(np.int64)
    bodies = starts + _ITEM_HEAD.itemsize
    body_ends = bodies + lengths
    _fit((lengths >= 0) & (body_ends + 2 <= ends))
    first = int(records.heads["queue_offset"][number])
    return Rows(
        np.full(len(starts), number),
        first + np.arange(len(starts)),
        heads["flag"].astype(np.int32),
        bodies,
        body_ends,
        _properties(data, body_ends, ends),
        ends,
    )


def _head_of(data: Octets) -> np.dtype[Any]:
    """Return the layout of a record's head: that of the first one counts for all."""
    if len(data) < _SYS_FLAG_AT + 4:
        return np.dtype(list(_HEAD))
    flags = int(data[_SYS_FLAG_AT + 3])
    v6 = {"born_host": flags & SYS_FLAG_BORN_HOST_V6, "store_host": flags & SYS_FLAG_STORE_HOST_V6}
    return np.dtype([(name, "V20" if v6.get(name) else kind) for name, kind in _HEAD])


def _heads(data: Octets, starts: Ints, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    copied = byte_column(cells(data, starts, starts + kind.itemsize))
    octets = np.empty(0, np.uint8) if copied is None else copied.span
    found: npt.NDArray[Any] = octets.view(kind)
    return found


def _properties(data: Octets, at: Ints, ends: Ints) -> Ints:
    """Return where the properties begin whose length stands at a place; they must end where their record does."""
    _fit(at + 2 <= ends)
    lengths = data[at].astype(np.int64) << 8 | data[at + 1]
    _fit(at + 2 + lengths == ends)
    return at + 2


def _joined(parts: Sequence[Rows]) -> Rows:
    return Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in Rows.__slots__))


def _spans(body: Buffer, at: int, end: int, smallest: int) -> tuple[Ints, Ints]:
    """Return where each of the things that begin with their size begins and ends."""
    starts: list[int] = []
    add, unpack = starts.append, _SIZE.unpack_from
    while at + smallest <= end:
        add(at)
        (size,) = unpack(body, at)
        if size < smallest:
            raise Irregular
        at += size
    if at != end:
        raise Irregular
    borders = np.array([*starts, end], np.int64)
    return borders[:-1], borders[1:]


def _fit(fits: npt.NDArray[np.bool_]) -> None:
    if not fits.all():
        raise Irregular
