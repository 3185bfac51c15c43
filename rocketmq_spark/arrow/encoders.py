"""Encodes rows of a `MessageBlock` as items of batches, and makes the property strings of single messages.

Encoding a batch creates no Python object per row; compression does, because it compresses each body by itself.
`encode_remoting` follows docs/internals/messages.md#batch, `encode_grpc` docs/internals/grpc-messages.md#messages.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Varints, Workspace, assemble, hex_groups, varint
from rocketmq_spark.arrow.model import MessageBlock, Property
from rocketmq_spark.model.properties import CARRIED, KEYS, TAGS, Carried
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType, compress
from rocketmq_spark.protocol.remoting.records import ITEM_OVERHEAD, unique_id_prefix
from rocketmq_spark.protocol.unique_id import message_id_prefix, message_id_sequence, milliseconds_of_month

_ScalarT = TypeVar("_ScalarT", bound="np.generic[Any]")

UNIQ_KEY: Final = b"UNIQ_KEY"
_END: Final = b"\x02"

_IDENTITY: Final = b"\x28\x01"
_GZIP: Final = b"\x28\x02"
_NORMAL: Final = b"\x30\x01"

# Protobuf tags of the system properties that hold message properties with a field of their own (`Carried.FIELD`).
_FIELDS: Final = {TAGS: b"\x0a", KEYS: b"\x12"}

_HEX4: Final = hex_groups(b"0123456789ABCDEF")


class UniqueIds:
    """Hands out ids to a task (docs/internals/messages.md#message-ids); without IPv4, `ip` is any 4 bytes."""

    LENGTH: ClassVar[int] = 32

    def __init__(self, *, ip: bytes, pid: int, wall_clock: Callable[[], float], rng: random.Random) -> None:
        if len(ip) != 4:
            raise ValueError(f"ip must be the 4 bytes of an IPv4 address, got {len(ip)} bytes")
        self.prefix = unique_id_prefix(ip, pid, rng.getrandbits(32))
        self._next = milliseconds_of_month(wall_clock()) << 16

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix.hex().upper()} next={self._next:012X}>"

    def reserve(self, count: int) -> int:
        """Reserve `count` ids and return the sequence number of the first."""
        first = self._next
        self._next += count
        return first

    def frame(self, first: int, rows: Ints) -> Frame:
        """Return, as hex digits, the ids of some `rows` of a range that begins at `first`."""
        head = self.prefix.hex().upper()
        bits = 4 * (self.LENGTH - len(head))
        low: npt.NDArray[Any] = rows + (first & 0xFFFF)
        carry, high = low >> 16, first >> 16
        if carry.any():
            numbers = carry + high
            groups = [numbers >> shift & 0xFFFF for shift in range(bits - 32, -1, -16)] + [low & 0xFFFF]
        else:
            head += f"{high & (1 << bits - 16) - 1:0{bits // 4 - 4}X}"
            groups = [low]
        fields = tuple((len(head) + 4 * place, "=u4", _HEX4[group]) for place, group in enumerate(groups))
        return Frame(head.encode() + bytes(4 * len(groups)), fields)


class MessageIds(UniqueIds):
    """Unique ids for gRPC (docs/internals/grpc-messages.md#ids)."""

    LENGTH = 34

    def __init__(self, *, pid: int, wall_clock: Callable[[], float], rng: random.Random) -> None:
        self.prefix = message_id_prefix(pid, rng)
        self._next = message_id_sequence(wall_clock())


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a block that are encoded together: some of the range from `start` to `stop`."""

    block: MessageBlock
    start: int
    stop: int
    rows: Ints | None  # At least one, counted from `start`, in the order of the result. None: the whole range
    compressed: ByteColumn | None  # Compressed bodies of the range; null where a row is not compressed
    first_id: int  # The id of the block's first row; row k has the k-th id after it

    def __len__(self) -> int:
        return self.stop - self.start if self.rows is None else len(self.rows)

    @property
    def numbers(self) -> Ints:
        """The rows' numbers within the block."""
        return np.arange(self.start, self.stop) if self.rows is None else self.rows + self.start

    def picked(self, values: npt.NDArray[_ScalarT]) -> npt.NDArray[_ScalarT]:
        """Return values of the range in the order of the result."""
        return values if self.rows is None else values[self.rows]

    def bodies(self) -> tuple[list[ByteColumn], Ints]:
        """Return columns that together hold one body per row, null in the others, and the bodies' sizes."""
        bodies = self.block.body.slice(self.start, self.stop)
        if self.compressed is None or self.compressed.valid is None:
            return [bodies], bodies.sizes
        is_plain = ~self.compressed.valid
        # Bytes under a null body belong to no row.
        plain = replace(bodies, valid=is_plain if bodies.valid is None else is_plain & bodies.valid)
        return [plain, self.compressed], plain.sizes + self.compressed.sizes


def compress_bodies(
    bodies: ByteColumn, good: Mask | None, kind: CompressionType, options: SinkOptions
) -> ByteColumn | None:
    """Return those of the `good` bodies that are smaller compressed, null in all other rows; None if none is."""
    long = bodies.sizes >= max(1, options.compress_msg_body_over_howmuch)
    if not long.any():
        return None
    packed_sizes = np.zeros(len(bodies), np.int64)
    pieces: list[bytes] = []
    # Each row's body is compressed by itself.
    for row in np.flatnonzero(long if good is None else long & good).tolist():
        body = bodies.data[int(bodies.offsets[row]) : int(bodies.offsets[row + 1])].data
        piece = compress(body, kind, options.compress_level)
        if len(piece) < len(body):
            packed_sizes[row] = len(piece)
            pieces.append(piece)
    if not pieces:
        return None
    ends = np.concatenate([[0], np.cumsum(packed_sizes)])
    return ByteColumn(ends, np.frombuffer(b"".join(pieces), np.uint8), packed_sizes > 0)


def join_keys(items: ListColumn) -> ByteColumn:
    """Return each row's items joined by one space (``Message.setKeys(Collection)``); a row without items is empty."""
    first = np.zeros(len(items.values) + 1, np.int8)
    first[items.offsets[:-1]] = 1
    parts: list[Part] = [Choice((b" ", b""), first[:-1]), items.values]
    return _entries(items, parts, items.values.sizes + 1 - first[:-1]).joined()


def property_strings(entries: ListColumn) -> ListColumn:
    """Return ``name 0x01 value 0x02`` of each entry."""
    names, values = entries.names, entries.values
    assert names is not None
    return _entries(entries, [names, Frame(b"\x01"), values, Frame(_END)], names.sizes + values.sizes + 2)


def property_fields(entries: ListColumn) -> ListColumn:
    """Return the field ``user_properties`` of a gRPC message for each entry."""
    names, values = entries.names, entries.values
    assert names is not None
    name_size, value_size = Varints.of(names.sizes), Varints.of(values.sizes)
    sizes = 2 + name_size.width + value_size.width + names.sizes + values.sizes
    size = Varints.of(sizes)
    head = size.after(Frame(b"\x12")).then(name_size.after(Frame(b"\x0a")))
    parts: list[Part] = [head, names, value_size.after(Frame(b"\x12")), values]
    return _entries(entries, parts, sizes + 1 + size.width)


def _entries(items: ListColumn, parts: list[Part], sizes: Ints) -> ListColumn:
    """Return a list column with one string per entry of `items`, assembled from `parts` and `sizes` long."""
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    data = assemble(parts, len(sizes), int(ends[-1])) if ends[-1] else b""
    return ListColumn(items.offsets, ByteColumn(ends, np.frombuffer(data, np.uint8)))


# The rows of a chunk back to back, and where each begins and the last one ends.
Items = tuple[memoryview, npt.NDArray[np.int64]]


def encode_remoting(chunk: Chunk, ids: UniqueIds, workspace: Workspace) -> Items:
    """Return the rows of a chunk as items of batches for brokers."""
    block, start, stop = chunk.block, chunk.start, chunk.stop
    bodies, body_sizes = chunk.bodies()
    body_sizes = chunk.picked(body_sizes)
    property_sizes = chunk.picked(block.property_sizes[start:stop])
    item_sizes = property_sizes + body_sizes + ITEM_OVERHEAD
    head = Frame(bytes(20), ((0, ">i4", item_sizes), (16, ">i4", body_sizes)))
    if block.flags is not None:
        head = Frame(head.template, (*head.fields, (12, ">i4", chunk.picked(block.flags[start:stop]))))
    parts = [head, *bodies, Frame(bytes(2), ((0, ">i2", property_sizes),)), *_property_parts(chunk, ids)]
    return _items(chunk, parts, item_sizes, workspace)


def encode_properties(chunk: Chunk, ids: UniqueIds, workspace: Workspace) -> list[str]:
    """Return the property strings of single messages.

    Bytes that are not UTF-8 become U+FFFD, because a header is text. A batch stores them; Java consumers replace them.
    """
    sizes = chunk.picked(chunk.block.property_sizes[chunk.start : chunk.stop])
    parts = _property_parts(chunk, ids)
    if not parts:
        return [""] * len(chunk)
    data, ends = _items(chunk, parts, sizes, workspace)
    borders = ends.tolist()
    return [str(data[begin:end], "utf-8", "replace") for begin, end in itertools.pairwise(borders)]


def encode_grpc(
    chunk: Chunk, ids: UniqueIds, workspace: Workspace, *, namespace: bytes, born_timestamp: int, born_host: bytes
) -> Items:
    """Return the rows of a chunk as messages for proxies; `namespace` and `born_host` are encoded fields."""
    block, start, stop = chunk.block, chunk.start, chunk.stop
    bodies, body_sizes = chunk.bodies()
    topic, topic_size = _topic(chunk, namespace)
    user: list[Part] = [] if block.user_fields is None else [block.user_fields.slice(start, stop)]
    user_size: Ints | int = 0 if block.user_fields is None else block.user_fields.sizes[start:stop]
    system: list[Part] = []
    seconds, milliseconds = divmod(born_timestamp, 1000)
    born = b"\x08" + varint(seconds) + b"\x10" + varint(milliseconds * 1_000_000)
    # The last fields of the system properties have one length in every row.
    tail = Frame(b"\x1a" + varint(ids.LENGTH)).then(ids.frame(chunk.first_id, chunk.numbers))
    tail = tail.then(Frame(_NORMAL + delimited(b"\x3a", born) + born_host))
    system_size: Ints | int = len(tail.template) + len(_IDENTITY)
    for prop in block.properties:
        match CARRIED[prop.name].grpc:
            case Carried.PROPERTY:
                parts, size = _user_property(chunk, prop)
                user += parts
                user_size = user_size + size
            case Carried.FIELD:
                parts, size = _field(chunk, _FIELDS[prop.name], prop)
                system += parts
                system_size = system_size + size
            case Carried.ALONE:
                pass  # The transport encodes such rows as single messages.
            case other:
                raise ValueError(f"batches over gRPC carry the property {prop.name} {other.value}")
    if chunk.compressed is None or chunk.compressed.valid is None:
        system.append(Frame(_IDENTITY))
    else:
        system.append(Choice((_IDENTITY, _GZIP), chunk.picked(chunk.compressed.valid).view(np.int8)))
    system_sizes = np.broadcast_to(system_size, stop - start)
    body_length, system_length = Varints.of(body_sizes), Varints.of(system_sizes)
    lengths = topic_size + user_size + system_sizes + body_sizes + 2 + body_length.width + system_length.width
    lengths = chunk.picked(lengths)
    length = Varints.of(lengths)
    body_head = _picked(chunk, body_length.after(Frame(b"\x22")))
    system_head = _picked(chunk, system_length.after(Frame(b"\x1a")))
    parts = [length.after(Frame(b"\x0a")), topic, body_head, *bodies, *user, system_head, *system, tail]
    return _items(chunk, parts, lengths + 1 + length.width, workspace)


def _items(chunk: Chunk, parts: list[Part], sizes: Ints, workspace: Workspace) -> Items:
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return assemble(parts, len(sizes), int(ends[-1]), chunk.rows, workspace), ends


def _property_parts(chunk: Chunk, ids: UniqueIds) -> list[Part]:
    """Return the parts of the property strings of a chunk's rows, in the order of `MessageBlock.properties`."""
    block, start, stop = chunk.block, chunk.start, chunk.stop
    parts: list[Part] = []
    # Which rows have a property already; a bool if all rows are equal. 0x02 separates two properties. To end each one
    # with it would need one more part after every value.
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
        if isinstance(prop.values, Frame):
            parts.append(_picked(chunk, prop.values.slice(start, stop)))
        elif prop.values is not None:
            parts.append(prop.values.slice(start, stop))
    if block.unique_key:
        parts.append(_lead(UNIQ_KEY + b"\x01", before))
        parts.append(ids.frame(chunk.first_id, chunk.numbers).then(Frame(_END)))
    elif before is not False:
        parts.append(_lead(b"", before))
    if block.user is not None:
        parts.append(block.user.slice(start, stop))
    return parts


def _lead(name: bytes, before: Mask | bool) -> Part:
    if isinstance(before, bool):
        return Frame(_END + name if before else name)
    return Choice((name, _END + name), before.view(np.int8))


def _topic(chunk: Chunk, namespace: bytes) -> tuple[Part, Ints | int]:
    block = chunk.block
    literals = [delimited(b"\x0a", namespace + delimited(b"\x12", name.encode())) for name in block.topics]
    if block.topic_codes is None:
        return Frame(literals[0]), len(literals[0])
    codes = block.topic_codes[chunk.start : chunk.stop]
    return Choice(tuple(literals), chunk.picked(codes)), np.array([*map(len, literals), 0])[codes]


def _field(chunk: Chunk, tag: bytes, prop: Property) -> tuple[list[Part], Ints | int]:
    """Return the parts of a property's own field, and its size in each row of the range."""
    if prop.values is None:
        literal = delimited(tag, prop.literal)
        if prop.valid is None:
            return [Frame(literal)], len(literal)
        there = prop.valid[chunk.start : chunk.stop]
        return [Choice((b"", literal), chunk.picked(there).view(np.int8))], there * len(literal)
    assert isinstance(prop.values, ByteColumn)
    values = prop.values.slice(chunk.start, chunk.stop)
    return _headed(chunk, Varints.of(values.sizes).after(Frame(tag)), values)


def _user_property(chunk: Chunk, prop: Property) -> tuple[list[Part], Ints | int]:
    """Return the parts of a property that goes among the user's, and its size in each row of the range."""
    name = delimited(b"\x0a", prop.name.encode())
    if isinstance(prop.values, Frame):
        frame = Frame(name + b"\x12" + varint(len(prop.values.template))).then(prop.values)
        frame = Frame(b"\x12" + varint(len(frame.template))).then(frame)
        return [_picked(chunk, frame.slice(chunk.start, chunk.stop))], len(frame.template)
    assert prop.values is not None
    values = prop.values.slice(chunk.start, chunk.stop)
    length = Varints.of(values.sizes)
    whole = Varints.of(values.sizes + len(name) + 1 + length.width)
    return _headed(chunk, whole.after(Frame(b"\x12")).then(length.after(Frame(name + b"\x12"))), values)


def _headed(chunk: Chunk, head: Frame, values: ByteColumn) -> tuple[list[Part], Ints]:
    """Return the parts of values of the range, with a head before each, and their size in each row."""
    width, count = len(head.template), len(values)
    sizes = values.sizes + width
    if values.valid is None:
        return [_picked(chunk, head), values], sizes
    data = np.frombuffer(head.rows(count), np.uint8)
    return [ByteColumn(np.arange(count + 1) * width, data, values.valid), values], sizes * values.valid


def _picked(chunk: Chunk, frame: Frame) -> Frame:
    """Return a frame of the range in the order of the result."""
    return Frame(frame.template, tuple((at, dtype, chunk.picked(values)) for at, dtype, values in frame.fields))


def delimited(tag: bytes, value: bytes) -> bytes:
    """Return a protobuf field of bytes."""
    return tag + varint(len(value)) + value
