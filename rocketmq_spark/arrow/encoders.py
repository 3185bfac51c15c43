"""The batchers of both protocols, which encode columns as request bodies without a Python object per row.

`RemotingBatcher` follows ``MessageDecoder.encodeMessages``; the tests compare it with `protocol.remoting.records`. An
item of its batches:

    4  total size      22 + body + properties
    4  magic           0
    4  body CRC        0
    4  flag
    4  body length
       body
    2  properties length
       properties      in the order of `MessageBlock.properties`

`GrpcBatcher` encodes the field ``messages`` of a SendMessageRequest; the tests compare it with
`protocol.grpc.messages`. The fields of a message may come in any order, so those of a fixed length stand where they
form one frame. A message:

    0A  message
        0A  topic               { 0A namespace, 12 name }
        22  body
        12  user property       { 0A name, 12 value }                              any number
        1A  system properties
            0A  tag                                                                if the row has one
            12  keys                                                               if the row has any
            1A  message id      34 digits
            28  body encoding   1 identity, 2 GZIP
            30  message type    1 NORMAL
            3A  born timestamp  { 08 seconds, 10 nanoseconds }                     of the record batch
            42  born host
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.batcher import ArrowBatcher, Group
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Varints, assemble, varint
from rocketmq_spark.arrow.ids import MessageIds
from rocketmq_spark.arrow.properties import Property, property_parts, unique_id_frame
from rocketmq_spark.arrow.split import Chunk
from rocketmq_spark.model.message import EncodedBatch, Encoding
from rocketmq_spark.model.properties import CARRIED, KEYS, TAGS, Carried
from rocketmq_spark.options.connection import GRPC
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import ITEM_OVERHEAD, unique_id

__all__ = ["GrpcBatcher", "RemotingBatcher"]

# The header of a batch may carry this, and the UNIQ_KEY that asks for an inner batch. Brokers reject any other property
# there, or lose messages.
_NO_WAIT: Final = "WAIT\x01false\x02"

_IDENTITY: Final = b"\x28\x01"
_GZIP: Final = b"\x28\x02"
_NORMAL: Final = b"\x30\x01"

# Protobuf tags of the system properties that hold message properties with a field of their own (`Carried.FIELD`).
_FIELDS: Final = {TAGS: b"\x0a", KEYS: b"\x12"}


class RemotingBatcher(ArrowBatcher):
    """Fills batches for brokers; parameters as of `ArrowBatcher`."""

    def _encode_items(self, chunk: Chunk, now: float) -> tuple[memoryview, npt.NDArray[np.int64]]:  # noqa: ARG002
        block, start, stop = chunk.block, chunk.start, chunk.stop
        bodies, body_sizes = chunk.bodies()
        body_sizes = chunk.picked(body_sizes)
        property_sizes = chunk.picked(block.property_sizes[start:stop])
        item_sizes = property_sizes + body_sizes + ITEM_OVERHEAD
        head = Frame(bytes(20), ((0, ">i4", item_sizes), (16, ">i4", body_sizes)))
        if block.flags is not None:
            head = Frame(head.template, (*head.fields, (12, ">i4", chunk.picked(block.flags[start:stop]))))
        parts = [head, *bodies, Frame(bytes(2), ((0, ">i2", property_sizes),)), *property_parts(chunk, self._ids)]
        ends = np.zeros(len(item_sizes) + 1, np.int64)
        np.cumsum(item_sizes, out=ends[1:])
        return assemble(parts, len(item_sizes), int(ends[-1]), chunk.rows, self._workspace), ends

    def _batch(self, group: Group) -> EncodedBatch:
        properties = "" if group.key.wait_store_msg_ok else _NO_WAIT
        if self._options.batch_type == "inner":
            properties += f"UNIQ_KEY\x01{unique_id(self._ids.prefix, self._ids.take(1))}\x02"
        return EncodedBatch(
            group.key.topic, group.body, group.rows, group.nbytes, properties=properties, sys_flag=group.key.sys_flag
        )


class GrpcBatcher(ArrowBatcher):
    """Fills batches for proxies, which choose the queues; other parameters as of `ArrowBatcher`.

    Parameters
    ----------
    namespace : str
        Empty for none.
    born_host : str
    epoch_offset : float
        Epoch time minus monotonic time, seconds.
    """

    def __init__(
        self, options: SinkOptions, *, namespace: str = "", born_host: str, epoch_offset: float, **parameters: Any
    ) -> None:
        super().__init__(
            replace(
                options,
                connection=replace(options.connection, transport=GRPC),
                queue_selector="roundRobin",
                batch_type="plain",
            ),
            **parameters,
        )
        self._namespace = _delimited(b"\x0a", namespace.encode()) if namespace else b""
        self._born_host = _delimited(b"\x42", born_host.encode())
        self._epoch_offset = epoch_offset

    def _born_timestamp(self, now: float) -> int:
        return int((now + self._epoch_offset) * 1000)

    def _encode_items(self, chunk: Chunk, now: float) -> tuple[memoryview, npt.NDArray[np.int64]]:
        block, start, stop, packed = chunk.block, chunk.start, chunk.stop, chunk.packed
        bodies, body_sizes = chunk.bodies()
        topic, topic_size = self._topic(chunk)
        user: list[Part] = [] if block.user_fields is None else [block.user_fields.slice(start, stop)]
        user_size: Ints | int = 0 if block.user_fields is None else block.user_fields.sizes[start:stop]
        system: list[Part] = []
        tail = self._tail(chunk, now)
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
                    # Rows that have it go as single messages, which the transport encodes.
                    pass
                case other:
                    raise ValueError(f"batches over gRPC carry the property {prop.name} {other.value}")
        system_sizes = np.broadcast_to(system_size, stop - start)
        body_length, system_length = Varints.of(body_sizes), Varints.of(system_sizes)
        lengths = topic_size + user_size + system_sizes + body_sizes + 2 + body_length.width + system_length.width
        lengths = chunk.picked(lengths)
        length = Varints.of(lengths)
        encodings: list[Part] = [Frame(_IDENTITY)]
        if packed is not None and packed.valid is not None:
            encodings = [Choice((_IDENTITY, _GZIP), chunk.picked(packed.valid).view(np.int8))]
        parts = [
            length.after(Frame(b"\x0a")),
            topic,
            _length(chunk, b"\x22", body_length),
            *bodies,
            *user,
            _length(chunk, b"\x1a", system_length),
            *system,
            *encodings,
            tail,
        ]
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths + 1 + length.width, out=ends[1:])
        return assemble(parts, len(lengths), int(ends[-1]), chunk.rows, self._workspace), ends

    def _batch(self, group: Group) -> EncodedBatch:
        return EncodedBatch(
            group.key.topic,
            group.body,
            group.rows,
            group.nbytes,
            sys_flag=group.key.sys_flag,
            encoding=Encoding.GRPC,
            # A transport that sends much later puts a new timestamp in.
            born_timestamp=self._born_timestamp(group.since),
        )

    def _topic(self, chunk: Chunk) -> tuple[Part, Ints | int]:
        block = chunk.block
        literals = [_delimited(b"\x0a", self._namespace + _delimited(b"\x12", name.encode())) for name in block.topics]
        if block.topic_codes is None:
            return Frame(literals[0]), len(literals[0])
        codes = block.topic_codes[chunk.start : chunk.stop]
        return Choice(tuple(literals), chunk.picked(codes)), np.array([*map(len, literals), 0])[codes]

    def _tail(self, chunk: Chunk, now: float) -> Frame:
        """Return the last fields of the system properties, of one length in every row."""
        seconds, milliseconds = divmod(self._born_timestamp(now), 1000)
        born = b"\x08" + varint(seconds) + b"\x10" + varint(milliseconds * 1_000_000)
        message_id = Frame(b"\x1a" + varint(MessageIds.LENGTH)).then(unique_id_frame(chunk, self._ids))
        return message_id.then(Frame(_NORMAL + _delimited(b"\x3a", born) + self._born_host))


def _length(chunk: Chunk, tag: bytes, length: Varints) -> Frame:
    """Return the tag and the length of a field that every row has."""
    return Varints(length.width, chunk.picked(length.values)).after(Frame(tag))


def _field(chunk: Chunk, tag: bytes, prop: Property) -> tuple[list[Part], Ints | int]:
    """Return the parts of a property's own field, and its size in each row of the range."""
    if prop.values is None:
        literal = _delimited(tag, prop.literal)
        if prop.valid is None:
            return [Frame(literal)], len(literal)
        there = prop.valid[chunk.start : chunk.stop]
        return [Choice((b"", literal), chunk.picked(there).view(np.int8))], there * len(literal)
    values = prop.values.slice(chunk.start, chunk.stop)
    length = Varints.of(values.sizes)
    width = len(tag) + length.width
    if values.valid is None:
        return [_length(chunk, tag, length), values], values.sizes + width
    return [_sparse_frames(length.after(Frame(tag)), values.valid), values], values.sizes + values.valid * width


def _user_property(chunk: Chunk, prop: Property) -> tuple[list[Part], Ints | int]:
    """Return the parts of a property that goes among the user's, and its size in each row of the range."""
    assert prop.values is not None
    values = prop.values.slice(chunk.start, chunk.stop)
    length = Varints.of(values.sizes)
    name = _delimited(b"\x0a", prop.name.encode())
    inner = values.sizes + len(name) + 1 + length.width
    whole = Varints.of(inner)
    head = whole.after(Frame(b"\x12")).then(length.after(Frame(name + b"\x12")))
    sizes = inner + 1 + whole.width
    if values.valid is not None:
        return [_sparse_frames(head, values.valid), values], sizes * values.valid
    fields = tuple((at, dtype, chunk.picked(numbers)) for at, dtype, numbers in head.fields)
    return [Frame(head.template, fields), values], sizes


def _sparse_frames(frame: Frame, valid: Mask) -> ByteColumn:
    """Return a frame of every row of a range as a column with nulls where `valid` is False."""
    width, count = len(frame.template), len(valid)
    data = np.frombuffer(bytearray(frame.template * count), np.uint8)
    for at, dtype, values in frame.fields:
        np.ndarray(count, dtype, data, at, (width,))[:] = values
    return ByteColumn(np.arange(count + 1) * width, data, valid)


def _delimited(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value
