"""Stored messages -> record batches of a read's columns, vectorised; the row-by-row way is its oracle and its way out.

Rule 1: what comes out is what `decode_rows` makes of the same bytes; whatever this module can't tell apart as columns
        (an inner batch compressed as a whole, properties with repeats or empty values, an unreadable message)
        it hands there.
Rule 2: only the columns asked for are made; what no column needs is neither decompressed nor parsed.
Rule 3: bytes are copied twice: the answers are joined, because numpy wants one buffer, and Arrow takes each column out.

Follows spec/remoting.md section 8; the columns are those of design.md section 8.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import ByteColumn, Ints, byte_strings, to_arrow, to_numpy
from rocketmq_spark.arrow.stored_layout import Irregular, Records, Rows, cells, records_of, rows_of
from rocketmq_spark.arrow.stored_properties import Properties, split_properties
from rocketmq_spark.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.errors import CompressionError, RemotingCommandException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.message_const import KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.message_ext import MessageExt, encode_message_id, format_host
from rocketmq_spark.pull import Pulled
from rocketmq_spark.wire.unwrap import CRC_MASK, INNER_BATCH, Unreadable, message_id, messages_of

_FROM_PROPERTIES: Final = {"tags": TAGS, "keys": KEYS, "msgId": UNIQ_KEY}
_PROPERTY_COLUMNS: Final = ("properties", *_FROM_PROPERTIES)
_US_PER_MS: Final = 1000
# A sender may claim any time; what a timestamp can't hold, milliseconds beyond this, is null.
_LAST_TIME: Final = (2**63 - 1) // _US_PER_MS
# The two digits of each byte.
_HEX: Final = np.array([f"{value:02X}" for value in range(256)], np.bytes_).view(np.uint16)

# What the bodies of one record batch may unpack to together, bytes.
_MOST_UNPACKED: Final = 64 * 1024 * 1024

# What a message, and a property of it, count for beside its body where each is an object of Python's, bytes.
_MESSAGE_COST: Final = 500
_PROPERTY_COST: Final = 200


# The column of a read that says why a message is unreadable, null in all other rows.
UNREADABLE: Final = "unreadable"

OnUnreadable: TypeAlias = Callable[[Unreadable], bool]
"""Called once for each unreadable message; returns whether it becomes a row with the stored bytes as body."""


class TooMuchError(Exception):
    """Several messages unpack to more than a record batch is to hold."""


def fail(message: Unreadable) -> bool:
    """Raise a RemotingCommandException: what a read does unless ``onUnreadable`` says otherwise."""
    raise RemotingCommandException(
        f"reading {message}. To leave such messages out set onUnreadable=skip; to get their stored bytes set "
        "onUnreadable=raw"
    )


def batches_of(
    pulls: Sequence[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None = None,
    on_unreadable: OnUnreadable = fail,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of several answers: one record batch, or more where the bodies unpack to very much.

    There may be none. Parameters, and what is raised, as of `decode`. Several messages of one offset that unpack to
    very much become a record batch each: a sender of inner batches can claim the offset of another message.
    """
    try:
        batch = decode(pulls, schema, tags, _MOST_UNPACKED, on_unreadable)
    except TooMuchError:
        batch = None
    # Outside the except block: the error holds what was unpacked so far, and so would every level of this recursion.
    if batch is None:
        halves = _halves(pulls)
        for half in halves:
            yield from batches_of(half, schema, tags, on_unreadable)
        if not halves:
            yield from _one_by_one(pulls[0], schema, tags, on_unreadable)
    elif batch.num_rows:
        yield batch


def _halves(pulls: Sequence[Pulled]) -> tuple[Sequence[Pulled], ...]:
    """Return the answers in two parts; none if they are of one offset."""
    if len(pulls) > 1:
        middle = len(pulls) // 2
        return pulls[:middle], pulls[middle:]
    (pull,) = pulls
    if pull.end - pull.start <= 1:
        return ()
    border = (pull.start + pull.end) // 2
    return [replace(pull, end=border)], [replace(pull, start=border)]


def _one_by_one(
    pull: Pulled, schema: pa.Schema, tags: frozenset[str] | None, on_unreadable: OnUnreadable
) -> Iterator[pa.RecordBatch]:
    for message in _messages_of(pull, schema, tags):
        if tags is None or _has_tag(message, tags):
            batch = _batch_of([(pull.queue, message)], schema, on_unreadable)
            if batch.num_rows:
                yield batch


def decode(
    pulls: Sequence[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None = None,
    most: float = math.inf,
    on_unreadable: OnUnreadable = fail,
) -> pa.RecordBatch:
    """Return the messages of several answers, in their order, as one record batch.

    Parameters
    ----------
    pulls : sequence of Pulled
    schema : pyarrow.Schema
        Some or all of the columns of a read, with their types.
    tags : frozenset of str or None, default None
        Only messages with one of these; None: all. (A broker looks at the hash of a tag only.)
    most : float, default inf
        Bytes that several messages may unpack to together; a single one may have more.
    on_unreadable : callable, default `fail`
        Called for the unreadable messages of a batch that does not raise `TooMuchError`, in their order.

    Raises
    ------
    TooMuchError
        They unpack to more. Each way counts what it has to unpack, so one of them may raise where the other does not.
    RemotingCommandException
        A message is unreadable, unless `on_unreadable` returns.
    """
    body = pulls[0].body if len(pulls) == 1 else b"".join(pull.body for pull in pulls)
    try:
        records = records_of(body)
        rows, pull_of = _wanted(pulls, records, rows_of(records, body))
        _check_crc(records)
        return _Columns(pulls, records, rows, pull_of, most).batch(schema, tags)
    except (Irregular, pa.ArrowInvalid):
        return decode_rows(pulls, schema, tags, most, on_unreadable)


def decode_rows(
    pulls: Sequence[Pulled],
    schema: pa.Schema,
    tags: frozenset[str] | None = None,
    most: float = math.inf,
    on_unreadable: OnUnreadable = fail,
) -> pa.RecordBatch:
    """Return what `decode` does, one message at a time; see there."""
    found = []
    room = most
    for pull in pulls:
        for message in _messages_of(pull, schema, tags):
            if tags is None or _has_tag(message, tags):
                found.append((pull.queue, message))
                properties = 0 if isinstance(message, Unreadable) else len(message.properties)
                room -= len(message.body) + _MESSAGE_COST + _PROPERTY_COST * properties
                if room < 0 and len(found) > 1:
                    raise TooMuchError
    return _batch_of(found, schema, on_unreadable)


def _batch_of(
    messages: Sequence[tuple[MessageQueue, MessageExt | Unreadable]], schema: pa.Schema, on_unreadable: OnUnreadable
) -> pa.RecordBatch:
    rows = [(queue, one) for queue, one in messages if not isinstance(one, Unreadable) or on_unreadable(one)]
    columns = [pa.array([_value(name, *row) for row in rows], schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _messages_of(pull: Pulled, schema: pa.Schema, tags: frozenset[str] | None) -> Iterator[MessageExt | Unreadable]:
    names = {*schema.names}
    decompressed = not names.isdisjoint(("body", UNREADABLE))
    parsed = tags is not None or not names.isdisjoint((*_PROPERTY_COLUMNS, UNREADABLE))
    return messages_of(pull.body, pull.queue, pull.start, pull.end, decompressed=decompressed, parsed=parsed)


def _has_tag(message: MessageExt | Unreadable, tags: frozenset[str]) -> bool:
    """Return whether a message has one of the tags; one whose tag cannot be known counts as having it."""
    record = message.record if isinstance(message, Unreadable) else message
    if record is None:
        return True
    if isinstance(message, Unreadable) and (
        not message.properties_known or record.sys_flag & INNER_BATCH == INNER_BATCH
    ):
        return True
    return record.properties.get(TAGS) in tags


def _value(name: str, queue: MessageQueue, message: MessageExt | Unreadable) -> Any:
    if isinstance(message, Unreadable):
        own = {"body": message.body, "queueOffset": message.start, UNREADABLE: message.explanation}
        if name in own:
            return own[name]
        if message.record is None:
            # The queue is known without the record.
            return _VALUES[name](queue, message) if name in ("topic", "brokerName", "queueId") else None
        if name in _PROPERTY_COLUMNS and not message.properties_known:
            return None
        message = message.record
    return _VALUES[name](queue, message)


def missing_offsets(pull: Pulled) -> list[tuple[int, int]]:
    """Return the gaps between the start of a pull and its end: the first offset of each gap, and the one after it.

    An unreadable message is not missing.
    """
    if not pull.body:
        return [(pull.start, pull.end)]
    try:
        records = records_of(pull.body)
        starts = rows_of(records, pull.body).queue_offset
        starts = starts[(starts >= pull.start) & (starts < pull.end)]
        ends = starts + 1
    except (Irregular, pa.ArrowInvalid):
        messages = messages_of(pull.body, pull.queue, pull.start, pull.end, decompressed=False, parsed=False)
        spans = [
            (message.start, message.end)
            if isinstance(message, Unreadable)
            else (message.queue_offset, message.queue_offset + 1)
            for message in messages
        ]
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
    order = np.argsort(starts, kind="stable")
    before, after = np.append(pull.start, np.maximum.accumulate(ends[order])), np.append(starts[order], pull.end)
    return [(int(before[gap]), int(after[gap])) for gap in np.flatnonzero(after > before)]


def _instant(time: int) -> int | None:
    return time * _US_PER_MS if abs(time) <= _LAST_TIME else None


# What each column holds of one message; properties and times as Arrow's own constructor takes them.
_VALUES: Final[dict[str, Any]] = {
    "topic": lambda queue, _: queue.topic,
    "body": lambda _, message: message.body,
    "tags": lambda _, message: message.properties.get(TAGS),
    "keys": lambda _, message: message.properties.get(KEYS),
    "properties": lambda _, message: list(message.properties.items()),
    "flag": lambda _, message: message.flag,
    "brokerName": lambda queue, _: queue.broker_name,
    "queueId": lambda queue, _: queue.queue_id,
    "queueOffset": lambda _, message: message.queue_offset,
    "msgId": lambda _, message: message_id(message),
    "offsetMsgId": lambda _, message: message.offset_msg_id,
    "bornTimestamp": lambda _, message: _instant(message.born_timestamp),
    "storeTimestamp": lambda _, message: _instant(message.store_timestamp),
    "bornHost": lambda _, message: message.born_host,
    "reconsumeTimes": lambda _, message: message.reconsume_times,
    UNREADABLE: lambda *_: None,
}


def _wanted(pulls: Sequence[Pulled], records: Records, rows: Rows) -> tuple[Rows, Ints]:
    """Return the rows whose offsets lie between start and end of their pull, and the number of that pull."""
    borders = np.cumsum([len(pull.body) for pull in pulls])
    pull_of = np.searchsorted(borders, records.starts, side="right")[rows.record]
    starts = np.array([pull.start for pull in pulls], np.int64)[pull_of]
    ends = np.array([pull.end for pull in pulls], np.int64)[pull_of]
    keep = (rows.queue_offset >= starts) & (rows.queue_offset < ends)
    if keep.all():
        return rows, pull_of
    wanted = np.flatnonzero(keep)
    return rows.select(wanted), pull_of[wanted]


def _check_crc(records: Records) -> None:
    # The one thing that has to look at each body by itself. As Python's bytes they are at hand faster than as slices.
    bodies = cells(records.data, records.bodies, records.body_ends).to_pylist()
    found = np.fromiter(map(zlib.crc32, bodies), np.uint32, len(bodies))
    if not np.array_equal(found & CRC_MASK, records.heads["crc"]):
        raise Irregular


def _strings(texts: Sequence[str]) -> pa.StringArray:
    return byte_strings([text.encode() for text in texts]).to_arrow().cast(pa.string())


class _Columns:
    """Makes the columns of rows, each when it is asked for."""

    def __init__(self, pulls: Sequence[Pulled], records: Records, rows: Rows, pull_of: Ints, most: float) -> None:
        self._pulls = pulls
        self._records = records
        self._rows = rows
        self._pull_of = pull_of
        self._most = most
        self._properties: Properties | None = None

    def batch(self, schema: pa.Schema, tags: frozenset[str] | None) -> pa.RecordBatch:
        if UNREADABLE in schema.names:
            # Null means that the whole message is readable, not only the columns asked for.
            self._split()
            if "body" not in schema.names:
                self._bodies()
        columns = [self._column(field) for field in schema]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        if tags is None:
            return batch
        return batch.filter(pc.is_in(self._tagged(TAGS), value_set=_strings(sorted(tags))))

    def _column(self, field: pa.Field) -> pa.Array:
        name, kind = field.name, field.type
        records, rows = self._records, self._rows
        if name in _FROM_PROPERTIES:
            found = self._tagged(_FROM_PROPERTIES[name])
            return pc.coalesce(found, self._offset_ids()) if name == "msgId" and found.null_count else found
        if name == "body":
            return self._bodies()
        if name == "properties":
            return self._split().as_maps(kind)
        if name == "topic":
            return self._of_pull([pull.queue.topic for pull in self._pulls])
        if name == "brokerName":
            return self._of_pull([pull.queue.broker_name for pull in self._pulls])
        if name == "offsetMsgId":
            return self._offset_ids()
        if name == "bornHost":
            return self._hosts()
        if name == "queueOffset":
            return to_arrow(rows.queue_offset)
        if name == "flag":
            return to_arrow(rows.flag)
        if name == "queueId":
            ids = np.array([pull.queue.queue_id for pull in self._pulls], np.int32)
            return to_arrow(ids[self._pull_of])
        if name == UNREADABLE:
            return pa.nulls(len(rows.record), kind)
        if name == "reconsumeTimes":
            return to_arrow(records.heads["reconsume_times"].astype(np.int32)[rows.record])
        times = records.heads["born_timestamp" if name == "bornTimestamp" else "store_timestamp"].astype(np.int64)
        if np.any((times > _LAST_TIME) | (times < -_LAST_TIME)):
            raise Irregular
        return to_arrow(times[rows.record] * _US_PER_MS).cast(kind)

    def _split(self) -> Properties:
        if self._properties is None:
            self._properties = split_properties(self._cells(self._rows.properties, self._rows.ends))
            if self._properties is None:
                raise Irregular
        return self._properties

    def _tagged(self, name: str) -> pa.StringArray:
        return self._split().value_of(name)

    def _bodies(self) -> pa.BinaryArray:
        rows = self._rows
        bodies = self._cells(rows.bodies, rows.body_ends)
        sys_flag = self._records.heads["sys_flag"][rows.record]
        packed = sys_flag & COMPRESSED_FLAG != 0
        if not packed.any():
            return bodies
        unpacked: list[bytes] = []
        room = self._most
        for row in np.flatnonzero(packed).tolist():
            try:
                unpacked.append(decompress(bodies[row].as_py(), int(sys_flag[row])))
            except CompressionError as exc:
                raise Irregular from exc
            room -= len(unpacked[-1])
            if room < 0 and len(bodies) > 1:
                raise TooMuchError
        return pc.replace_with_mask(bodies, to_arrow(packed), byte_strings(unpacked).to_arrow().cast(pa.binary()))

    def _of_pull(self, texts: list[str]) -> pa.StringArray:
        return _strings(texts).take(to_arrow(self._pull_of))

    def _hosts(self) -> pa.StringArray:
        # A queue's messages come from few hosts: each is written out once.
        hosts = self._opaque("born_host").dictionary_encode()
        texts = _strings([format_host(host) for host in hosts.dictionary.to_pylist()])
        return texts.take(hosts.indices).take(to_arrow(self._rows.record))

    def _offset_ids(self) -> pa.StringArray:
        heads = self._records.heads
        hosts = self._opaque("store_host").dictionary_encode()
        known = [format_host(host) for host in hosts.dictionary.to_pylist()]
        # All hosts are IPv4, or all are IPv6: all ids have one width.
        prefixes = np.array([encode_message_id(host, 0)[:-16] for host in known], np.bytes_)[to_numpy(hosts.indices)]
        offsets = np.ascontiguousarray(heads["physical_offset"]).view(np.uint8).reshape(-1, 8)
        prefixes = prefixes.view(np.uint8).reshape(-1, prefixes.itemsize)
        ids = np.concatenate([prefixes, _HEX[offsets].view(np.uint8)], axis=1)[self._rows.record]
        ends = np.arange(len(ids) + 1, dtype=np.int32) * ids.shape[1]
        return ByteColumn(ends, ids.ravel()).to_arrow().view(pa.string())

    def _opaque(self, name: str) -> pa.BinaryArray:
        """Return the bytes of a field of the heads."""
        values = np.ascontiguousarray(self._records.heads[name])
        kind = pa.binary(values.dtype.itemsize)
        found = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.view(np.uint8))])
        return found.cast(pa.binary())

    def _cells(self, starts: Ints, ends: Ints) -> pa.BinaryArray:
        return cells(self._records.data, starts, ends)
