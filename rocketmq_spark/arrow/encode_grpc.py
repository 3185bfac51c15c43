"""Batches of the gRPC protocol: fields ``messages`` of a SendMessageRequest, made from columns.

Rule 1: no object is built for a message: a request's bytes are literals, lengths and columns, as batch items are.
Rule 2: the fields of a message come in any order, so those of fixed length stand where they fuse into one frame.
Rule 3: a row with a message group or a delivery time goes as a single message, which the transport translates.
Rule 4: born timestamps are those of the record batch; a transport that sends much later puts new ones in.

Follows spec/grpc.md sections 5 and 7; held against `rocketmq_spark.transport.grpc_messages`. One message:

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
            3A  born timestamp  { 08 seconds, 10 nanoseconds }
            42  born host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.batcher import ArrowBatcher, Group
from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask
from rocketmq_spark.arrow.gather import Choice, Frame, Part, assemble
from rocketmq_spark.arrow.invalid import InvalidRows
from rocketmq_spark.arrow.properties import Property
from rocketmq_spark.arrow.row_id import RowIds
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.arrow.unique_id import UniqueIds
from rocketmq_spark.arrow.validate_keys import KeyCheck
from rocketmq_spark.arrow.varint import Varints, varint
from rocketmq_spark.message import EncodedBatch, Encoding, MessageQueue
from rocketmq_spark.message_const import CARRIED, Carried

_IDENTITY: Final = b"\x28\x01"
_GZIP: Final = b"\x28\x02"
_NORMAL: Final = b"\x30\x01"

# Protobuf tags of the fields that hold these properties.
_FIELDS: Final = {b"TAGS": b"\x0a", b"KEYS": b"\x12"}


class GrpcBatcher(ArrowBatcher):
    """Fills batches for proxies; parameters as of `ArrowBatcher`, and:

    Parameters
    ----------
    namespace : str
        Empty for none.
    born_host : str
    epoch_offset : float
        What makes an epoch time of a monotonic one, seconds.
    """

    def __init__(
        self,
        settings: BatchSettings,
        *,
        partition_id: int,
        queues_of: Callable[[str], Sequence[MessageQueue]],
        unique_ids: UniqueIds,
        on_invalid: Callable[[InvalidRows], None] | None = None,
        row_ids: RowIds | None = None,
        check_keys: KeyCheck | None = None,
        namespace: str = "",
        born_host: str,
        epoch_offset: float,
    ) -> None:
        super().__init__(
            # The proxy chooses the queue.
            replace(settings, encoding=Encoding.GRPC, queue_selector="roundRobin", inner_batches=False),
            partition_id=partition_id,
            queues_of=queues_of,
            unique_ids=unique_ids,
            on_invalid=on_invalid,
            row_ids=row_ids,
            check_keys=check_keys,
        )
        self._namespace = _delimited(b"\x0a", namespace.encode()) if namespace else b""
        self._born_host = _delimited(b"\x42", born_host.encode())
        self._epoch_offset = epoch_offset

    def _born_timestamp(self, now: float) -> int:
        return int((now + self._epoch_offset) * 1000)

    def _encode_items(
        self,
        block: MessageBlock,
        start: int,
        stop: int,
        rows: Ints | None,
        first_id: int,
        packed: ByteColumn | None,
        now: float,
    ) -> tuple[memoryview, npt.NDArray[np.int64]]:
        chunk = _Chunk(start, stop, rows)
        bodies = [block.body.slice(start, stop)]
        body_sizes = bodies[0].sizes
        if packed is not None and packed.valid is not None:
            # One of the two is null in each row, and gives nothing.
            bodies = [replace(bodies[0], valid=~packed.valid), packed]
            body_sizes = bodies[0].sizes + packed.sizes
        topic, topic_size = self._topic(block, chunk)
        user: list[Part] = [] if block.user_fields is None else [block.user_fields.slice(start, stop)]
        user_size: Ints | int = 0 if block.user_fields is None else block.user_fields.sizes[start:stop]
        system: list[Part] = []
        tail = self._tail(chunk, first_id, now)
        system_size: Ints | int = len(tail.template) + len(_IDENTITY)
        for one in block.properties:
            carried = CARRIED[one.name.decode()].grpc
            if carried is Carried.PROPERTY:
                parts, size = chunk.user_property(one)
                user += parts
                user_size = user_size + size
            elif carried is not Carried.ALONE:
                # A KeyError stops a property that batches have no field for: its values would be lost silently.
                parts, size = chunk.field(_FIELDS[one.name], one)
                system += parts
                system_size = system_size + size
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
            chunk.lead(b"\x22", body_length),
            *bodies,
            *user,
            chunk.lead(b"\x1a", system_length),
            *system,
            *encodings,
            tail,
        ]
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths + 1 + length.width, out=ends[1:])
        return assemble(parts, len(lengths), int(ends[-1]), rows, self._workspace), ends

    def _batch(self, group: Group) -> EncodedBatch:
        return EncodedBatch(
            group.key.topic,
            group.body,
            group.rows,
            group.nbytes,
            sys_flag=group.key.sys_flag,
            encoding=Encoding.GRPC,
            born_timestamp=self._born_timestamp(group.since),
        )

    def _topic(self, block: MessageBlock, chunk: _Chunk) -> tuple[Part, Ints | int]:
        literals = [_delimited(b"\x0a", self._namespace + _delimited(b"\x12", name.encode())) for name in block.topics]
        if block.topic_codes is None:
            return Frame(literals[0]), len(literals[0])
        codes = block.topic_codes[chunk.start : chunk.stop]
        return Choice(tuple(literals), chunk.picked(codes)), np.array([*map(len, literals), 0])[codes]

    def _tail(self, chunk: _Chunk, first_id: int, now: float) -> Frame:
        """Return the last fields of the system properties, of one length in every row."""
        seconds, milliseconds = divmod(self._born_timestamp(now), 1000)
        born = b"\x08" + varint(seconds) + b"\x10" + varint(milliseconds * 1_000_000)
        template = bytearray(
            b"\x1a" + varint(self._settings.unique_id_length) + self._ids.prefix.hex().upper().encode()
        )
        fields: list[tuple[int, str, npt.NDArray[Any]]] = []
        numbers = np.arange(chunk.start, chunk.stop) if chunk.rows is None else chunk.rows + chunk.start
        for digits in self._ids.digits(first_id, numbers):
            if isinstance(digits, np.ndarray):
                fields.append((len(template), "=u4", digits))
            template += bytes(4) if isinstance(digits, np.ndarray) else digits
        template += _NORMAL + _delimited(b"\x3a", born) + self._born_host
        return Frame(bytes(template), tuple(fields))


class _Chunk:
    """A range of a block's rows, and which of them, in which order, are encoded (None: all of them)."""

    def __init__(self, start: int, stop: int, rows: Ints | None) -> None:
        self.start = start
        self.stop = stop
        self.rows = rows

    def picked(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return values of the range in the order of the result."""
        return values if self.rows is None else values[self.rows]

    def lead(self, tag: bytes, length: Varints) -> Frame:
        """Return the tag and the length that stand before a field of every row."""
        return Varints(length.width, self.picked(length.values)).after(Frame(tag))

    def field(self, tag: bytes, one: Property) -> tuple[list[Part], Ints | int]:
        """Return the parts of a property's own field, and its size in each row of the range."""
        if one.values is None:
            literal = _delimited(tag, one.literal)
            if one.valid is None:
                return [Frame(literal)], len(literal)
            there = one.valid[self.start : self.stop]
            return [Choice((b"", literal), self.picked(there).view(np.int8))], there * len(literal)
        values = one.values.slice(self.start, self.stop)
        length = Varints.of(values.sizes)
        width = len(tag) + length.width
        if values.valid is None:
            return [self.lead(tag, length), values], values.sizes + width
        return [_sparse_lead(length.after(Frame(tag)), values.valid), values], values.sizes + values.valid * width

    def user_property(self, one: Property) -> tuple[list[Part], Ints | int]:
        """Return the parts of a property that goes among the user's, and its size in each row of the range."""
        assert one.values is not None
        values = one.values.slice(self.start, self.stop)
        length = Varints.of(values.sizes)
        name = _delimited(b"\x0a", one.name)
        inner = values.sizes + len(name) + 1 + length.width
        whole = Varints.of(inner)
        head = whole.after(Frame(b"\x12")).then(length.after(Frame(name + b"\x12")))
        sizes = inner + 1 + whole.width
        if values.valid is not None:
            return [_sparse_lead(head, values.valid), values], sizes * values.valid
        fields = tuple((at, dtype, self.picked(numbers)) for at, dtype, numbers in head.fields)
        return [Frame(head.template, fields), values], sizes


def _sparse_lead(frame: Frame, valid: Mask) -> ByteColumn:
    """Return a frame of every row of a range as a column that has it in some."""
    width, count = len(frame.template), len(valid)
    data = np.frombuffer(bytearray(frame.template * count), np.uint8)
    for at, dtype, values in frame.fields:
        np.ndarray(count, dtype, data, at, (width,))[:] = values
    return ByteColumn(np.arange(count + 1) * width, data, valid)


def _delimited(tag: bytes, value: bytes) -> bytes:
    return tag + varint(len(value)) + value
