"""Finds the fields of stored records (docs/internals/messages.md#stored-record), as positions in one buffer.

Every length is compared with the end of its record before it is used. The sizes of records and items are read in a
loop, because a position depends on all sizes before it. Each record makes one row, but an inner batch makes one per
item. Malformed records and rare layouts are left to `messages_of`, which decodes one message at a time.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import (
    ByteColumn,
    Ints,
    ListColumn,
    Mask,
    Octets,
    byte_column_or_nulls,
    byte_strings,
    rows_with_repeats,
    to_arrow,
    to_numpy,
)
from rocketmq_spark.arrow.messages import Irregular
from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.model.message_ext import Pulled
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG
from rocketmq_spark.protocol.remoting.records import (
    COUNTED_BY_SENDER,
    MAX_PROPERTIES,
    MESSAGE_MAGIC_V1,
    MESSAGE_MAGIC_V2,
    SYS_FLAG_BORN_HOST_V6,
    SYS_FLAG_STORE_HOST_V6,
    claimed_offset,
    decode_properties,
    decode_record_with_text,
    record_at,
)
from rocketmq_spark.protocol.remoting.unwrap import INNER_BATCH, Unreadable, messages_of, offsets_counted, offsets_of

_SIZE: Final = struct.Struct(">i")
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
# The part whose layout does not depend on the kind of addresses.
_HEAD_START: Final = np.dtype(list(_HEAD[:8]))
_ITEM_HEAD: Final = np.dtype([(name, ">i4") for name in ("size", "magic", "crc", "flag", "body_length")])
_SYS_FLAG_AT: Final = 36
# Bytes of an empty topic and no properties: only their lengths.
_AFTER_BODY: Final = 3


@dataclass(frozen=True, slots=True)
class Rows:
    """The messages of records, one element per message, with positions in the buffer."""

    record: Ints  # The number of the record
    queue_offset: Ints
    flag: Ints
    bodies: Ints
    body_ends: Ints
    properties: Ints
    ends: Ints  # Of the properties, where the record or the item ends as well

    def select(self, rows: Ints) -> Rows:
        """Return the rows with these numbers."""
        return Rows(*(getattr(self, name)[rows] for name in Rows.__slots__))


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a buffer."""

    data: Octets
    heads: npt.NDArray[Any]  # What comes before the body
    starts: Ints
    whole: Rows  # Each record as one row, also an inner batch


def cells(data: Octets, starts: Ints, ends: Ints) -> pa.BinaryArray:
    """Return copies of spans of a buffer; the spans are in ascending order."""
    # The spans and the gaps between them make the buffer a column. A take copies every second element, the spans.
    borders = np.empty(2 * len(starts) + 1, np.int32)
    borders[:-1:2], borders[1::2], borders[-1] = starts, ends, len(data)
    spans = np.arange(0, 2 * len(starts), 2, dtype=np.int32)
    return ByteColumn(borders, data).to_arrow().take(to_arrow(spans))


def records_of(body: Buffer) -> Records:
    """Return the positions of everything in the records of `body`; they must not mix IPv4 and IPv6 hosts."""
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
    # A wrong length could point beyond the record or the buffer, so it is checked before it is used.
    _fit((lengths >= 0) & (body_ends + _AFTER_BODY + wide <= ends))
    topic_lengths = data[body_ends].astype(np.int64)
    if wide.any():
        topic_lengths = np.where(wide, topic_lengths << 8 | data[body_ends + wide], topic_lengths)
    _fit(topic_lengths <= np.where(wide, 0x7FFF, 0x7F))  # Java reads a length as a signed number.
    topics = body_ends + 1 + wide
    properties = _properties(data, topics + topic_lengths, ends)
    try:
        cells(data, topics, topics + topic_lengths).cast(pa.string())
    except pa.ArrowInvalid as exc:
        raise Irregular from exc
    offsets, flags = heads["queue_offset"].astype(np.int64), heads["flag"].astype(np.int32)
    whole = Rows(np.arange(len(heads)), offsets, flags, bodies, body_ends, properties, ends)
    return Records(data, heads, starts, whole)


def rows_of(records: Records, body: Buffer) -> Rows:
    """Return the messages of the records, in their order; an inner batch must not be compressed as a whole."""
    sys_flag, whole = records.heads["sys_flag"], records.whole
    is_inner = sys_flag & COUNTED_BY_SENDER != 0
    if not is_inner.any():
        return whole
    _fit(sys_flag[is_inner] & (INNER_BATCH | COMPRESSED_FLAG) == INNER_BATCH)
    parts = [_items(records, body, int(number)) for number in np.flatnonzero(is_inner)]
    parts.append(whole.select(np.flatnonzero(~is_inner)))
    together = Rows(*(np.concatenate([getattr(part, name) for part in parts]) for name in Rows.__slots__))
    return together.select(np.argsort(together.record, kind="stable"))


def _items(records: Records, body: Buffer, number: int) -> Rows:
    data, whole = records.data, records.whole
    start, end = int(whole.bodies[number]), int(whole.body_ends[number])
    starts, ends = _spans(body, start, end, _ITEM_HEAD.itemsize + 2)
    first = int(whole.queue_offset[number])
    if len(starts) != _offsets_counted(whole, body, number) or first > 2**63 - 1 - len(starts):
        raise Irregular
    heads = _heads(data, starts, _ITEM_HEAD)
    lengths = heads["body_length"].astype(np.int64)
    bodies = starts + _ITEM_HEAD.itemsize
    body_ends = bodies + lengths
    _fit((lengths >= 0) & (body_ends + 2 <= ends))
    queue_offsets = first + np.arange(len(starts))
    flags, properties = heads["flag"].astype(np.int32), _properties(data, body_ends, ends)
    return Rows(np.full(len(starts), number), queue_offsets, flags, bodies, body_ends, properties, ends)


def _offsets_counted(whole: Rows, body: Buffer, number: int) -> int:
    """Return how many offsets a broker gave an inner batch."""
    properties = memoryview(body)[int(whole.properties[number]) : int(whole.ends[number])]
    return offsets_counted(decode_properties(properties))


def _head_of(data: Octets) -> np.dtype[Any]:
    """Return the layout of all records' heads, which is that of the first one."""
    if len(data) < _SYS_FLAG_AT + 4:
        return np.dtype(list(_HEAD))
    flags = int(data[_SYS_FLAG_AT + 3])
    v6 = {"born_host": flags & SYS_FLAG_BORN_HOST_V6, "store_host": flags & SYS_FLAG_STORE_HOST_V6}
    return np.dtype([(name, "V20" if v6.get(name) else kind) for name, kind in _HEAD])


def _heads(data: Octets, starts: Ints, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    heads: npt.NDArray[Any] = byte_column_or_nulls(cells(data, starts, starts + kind.itemsize)).span.view(kind)
    return heads


def _properties(data: Octets, at: Ints, ends: Ints) -> Ints:
    """Return where properties begin, whose lengths are at `at`; they must end where their record does."""
    _fit(at + 2 <= ends)
    lengths = data[at].astype(np.int64) << 8 | data[at + 1]
    _fit((lengths <= MAX_PROPERTIES) & (at + 2 + lengths == ends))
    return at + 2


def _spans(body: Buffer, at: int, end: int, smallest: int) -> tuple[Ints, Ints]:
    """Return where each size-prefixed element of a range begins and ends."""
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


def _fit(fits: Mask) -> None:
    if not fits.all():
        raise Irregular


def missing_offsets(pull: Pulled) -> list[tuple[int, int]]:
    """Return the first offset of each gap in a pull, and the one after it. An unreadable message is not missing."""
    if not pull.body:
        return [(pull.start, pull.end)]
    try:
        records = records_of(pull.body)
        starts = rows_of(records, pull.body).queue_offset
        starts = starts[(starts >= pull.start) & (starts < pull.end)]
        ends = starts + 1
    except (Irregular, pa.ArrowInvalid):
        spans = [
            (message.start, message.end)
            if isinstance(message, Unreadable)
            else (message.queue_offset, message.queue_offset + 1)
            for message in messages_of(pull.body, pull.queue, pull.start, pull.end, decompressed=False, parsed=False)
        ]
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    return _gaps(pull, starts, ends)


def missing_records(pull: Pulled) -> list[tuple[int, int]]:
    """Return what `missing_offsets` does, but unpack no inner batch: each has the offsets that its broker counted.

    Records that cannot be located are not missing.
    """
    try:
        borders, _ = _spans(pull.body, 0, len(pull.body), _HEAD_START.itemsize)
        heads = _heads(np.frombuffer(pull.body, np.uint8), borders, _HEAD_START)
        _fit(np.isin(heads["magic"], (MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2)))
        starts = heads["queue_offset"].astype(np.int64)
        ends = starts + 1
        inner = np.flatnonzero(heads["sys_flag"] & COUNTED_BY_SENDER).tolist()
        whole = records_of(pull.body).whole if inner else None
    except (Irregular, pa.ArrowInvalid):
        return _gaps(pull, *_spans_of_records(pull))
    for number in inner:
        assert whole is not None
        ends[number] += _offsets_counted(whole, pull.body, number) - 1
    return _gaps(pull, starts, ends)


def _spans_of_records(pull: Pulled) -> tuple[Ints, Ints]:
    """Return the first offset of each record, and the one after its last, reading one record at a time."""
    data, at = memoryview(pull.body), 0
    spans: list[tuple[int, int]] = []
    while at < len(data):
        try:
            record = record_at(data, at)
        except RemotingCommandException:
            spans.append((spans[-1][1] if spans else pull.start, pull.end))
            break
        claimed, counted = claimed_offset(record), 1
        if record[_SYS_FLAG_AT + 3] & COUNTED_BY_SENDER:
            with contextlib.suppress(RemotingCommandException):
                counted = offsets_of(decode_record_with_text(record, at)[0])
        first = (spans[-1][1] if spans else pull.start) if claimed is None else claimed
        spans.append((first, first + counted))
        at += len(record)
    starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    return starts, ends


def _gaps(pull: Pulled, starts: Ints, ends: Ints) -> list[tuple[int, int]]:
    order = np.argsort(starts, kind="stable")
    before = np.append(pull.start, np.maximum(np.maximum.accumulate(ends[order]), pull.start))
    after = np.append(np.minimum(starts[order], pull.end), pull.end)
    return [(int(before[gap]), int(after[gap])) for gap in np.flatnonzero(after > before)]


_NAME_END: Final = 1
_VALUE_END: Final = 2
# Up to this many different names in a batch, a name is one bit of a number.
_MOST_NAMES: Final = 32


@dataclass(frozen=True, slots=True)
class Properties:
    """The entries of all rows, in their order; row k owns the entries ``offsets[k]`` up to ``offsets[k + 1]``."""

    offsets: Ints
    names: pa.DictionaryArray
    values: pa.StringArray

    def value_of(self, name: str) -> pa.StringArray:
        """Return the value of one name in every row, null where it is missing."""
        places = np.full(len(self.offsets) - 1, -1, np.int64)
        known = self.names.dictionary.to_pylist()
        if name in known:
            entries = np.flatnonzero(to_numpy(self.names.indices) == known.index(name))
            places[np.searchsorted(self.offsets, entries, side="right") - 1] = entries
        return self.values.take(to_arrow(places, places >= 0))

    def as_maps(self, kind: pa.MapType) -> pa.MapArray:
        """Return all entries of every row."""
        names = self.names.dictionary_decode()
        entries = pa.StructArray.from_arrays([names, self.values], fields=[kind.key_field, kind.item_field])
        offsets = pa.py_buffer(self.offsets.astype(np.int32))
        return pa.Array.from_buffers(kind, len(self.offsets) - 1, [None, offsets], children=[entries])


def split_properties(texts: pa.BinaryArray) -> Properties | None:
    """Return the entries of the rows' property strings, which are not null; None if a string is not regular."""
    column = byte_column_or_nulls(_closed(texts))
    data = column.span
    borders = column.offsets - column.offsets[0]
    marks = np.flatnonzero(data <= _VALUE_END)
    name_ends, value_ends = marks[::2], marks[1::2]
    if len(marks) % 2 or (data[name_ends] != _NAME_END).any() or (data[value_ends] != _VALUE_END).any():
        return None
    name_starts = np.concatenate([[0], value_ends + 1])[:-1]
    if not ((name_starts < name_ends) & (name_ends + 1 < value_ends)).all():
        return None
    starts = borders[:-1][column.sizes > 0]
    # A row must not begin with a continuation byte: with the row before it would be read as one character.
    if (data[starts] & 0xC0 == 0x80).any():
        return None
    # Cells of the text: a name and its end, its value, and the value's end.
    cells = np.stack([name_starts, name_ends + 1, value_ends], axis=1).ravel()
    text = ByteColumn(np.append(cells, len(data)).astype(column.offsets.dtype), data).to_arrow()
    first = np.arange(0, len(cells), 3, dtype=np.int64)
    offsets = np.searchsorted(value_ends, borders)
    try:
        names = _coded(text.take(to_arrow(first)), offsets)
        values = text.take(to_arrow(first + 1)).cast(pa.string())
    except pa.ArrowInvalid:
        return None
    return None if names is None else Properties(offsets, names, values)


def _coded(names: pa.BinaryArray, offsets: Ints) -> pa.DictionaryArray | None:
    """Return names as numbers; None if a name occurs twice in a row, or there are too many names to check.

    Each name includes its end mark, so the joined names of two different rows differ.
    """
    if ListColumn(offsets, byte_column_or_nulls(names)).joined().common_value() is not None:
        # The usual case: every row has the names of the first row.
        known = names[: int(offsets[1])].dictionary_encode()
        indices = np.tile(to_numpy(known.indices), len(offsets) - 1)
        repeats = len(known.dictionary) < len(known)
    else:
        known = names.dictionary_encode()
        indices = to_numpy(known.indices)
        repeats = len(known.dictionary) > _MOST_NAMES or len(rows_with_repeats(indices, offsets)) > 0
    if repeats:
        return None
    texts = byte_strings([name[:-1] for name in known.dictionary.to_pylist()]).to_arrow().cast(pa.string())
    return pa.DictionaryArray.from_arrays(to_arrow(indices), texts)


def _closed(texts: pa.BinaryArray) -> pa.Array:
    """Return the texts with a separator at the end of each that is not empty."""
    column = byte_column_or_nulls(texts)
    filled = column.sizes > 0
    closed = ~filled
    closed[filled] = column.data[column.offsets[1:][filled] - 1] == _VALUE_END
    if closed.all():
        return texts
    choice = byte_strings([b"", bytes([_VALUE_END])]).to_arrow().cast(pa.binary())
    return pc.binary_join_element_wise(texts, choice.take(to_arrow((~closed).astype(np.int8))), choice[0])
