"""Decodes the stored records of a pull to messages: verifies checksums, decompresses bodies and splits inner batches.

Instead of a record or message that cannot be read, the result has an `Unreadable` with one or more offsets. Messages
outside the requested offsets are left out. The vectorised decoder (`rocketmq_spark.arrow.decode`) calls this module for
pulls that it cannot decode itself. Inner batches: docs/internals/messages.md#inner-batches.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.errors import CompressionError, RemotingCommandException, escaped
from rocketmq_spark.model.message import Buffer, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.protocol.remoting import records

INNER_BATCH: Final = records.INNER_BATCH
# A broker stores the checksum without its top bit.
CRC_MASK: Final = 0x7FFFFFFF
# Java's largest short.
_MOST_COUNTED: Final = 32_767
# A number as brokers parse it (`Short.parseShort`).
_SHORT: Final = re.compile(r"[+-]?0*\d{1,5}")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One unreadable message, or several with consecutive offsets."""

    queue: MessageQueue  # Its topic is without a namespace
    start: int
    end: int  # The offset after the last
    reason: str
    body: bytes  # As stored; without `record`, all bytes of the record
    record: MessageExt | None = None  # None if it cannot be decoded
    properties_known: bool = True  # False: the properties of `record` are incomplete or wrong

    def __str__(self) -> str:
        single = self.end - self.start == 1
        messages = f"the message at offset {self.start}" if single else f"the messages {self.start} to {self.end - 1}"
        return f"{self.queue}, {messages} cannot be read: {self.reason}"

    @property
    def explanation(self) -> str:
        """The reason, and the offsets if there are several."""
        offsets = f"messages {self.start} to {self.end - 1}: " if self.end - self.start > 1 else ""
        return offsets + self.reason


def messages_of(
    body: Buffer, queue: MessageQueue, start: int, end: int, *, decompressed: bool = True, parsed: bool = True
) -> Iterator[MessageExt | Unreadable]:
    """Yield the messages of a pull's body from offset `start` up to `end`; a broker may return more.

    If not `decompressed`, bodies stay compressed, except those of inner batches. If not `parsed`, a message is readable
    even if its properties cannot be parsed.
    """
    data, at, following = memoryview(body), 0, start
    while at < len(data):
        size, record = _record_at(data, at, queue, following, end, parsed=parsed)
        messages: Iterable[MessageExt | Unreadable] = ()
        if isinstance(record, Unreadable):
            messages = (record,)
        # The first message of an inner batch has the offset of the batch.
        elif start - records.MAX_STORED_ROWS < record.queue_offset < end:
            messages = _unpacked(record, queue, decompressed=decompressed, parsed=parsed)
        else:
            following = record.queue_offset + 1
        for message in messages:
            if isinstance(message, Unreadable):
                following = message.end
                if message.start < end and message.end > start:
                    yield replace(message, start=max(message.start, start), end=min(message.end, end))
            else:
                following = message.queue_offset + 1
                if start <= message.queue_offset < end:
                    yield message
        at += size


def _record_at(
    data: memoryview, at: int, queue: MessageQueue, following: int, end: int, *, parsed: bool
) -> tuple[int, MessageExt | Unreadable]:
    """Return the length and the message of a record; `following` is its offset if it cannot be decoded."""
    try:
        record = records.record_at(data, at)
    except RemotingCommandException as exc:
        reason = f"{exc}; no later message of the broker's answer can be located"
        return len(data) - at, Unreadable(queue, following, end, reason, bytes(data[at:]))
    try:
        message, topic, properties = records.decode_record_with_text(record, at)
    except RemotingCommandException as exc:
        offset = records.claimed_offset(record)
        offset = following if offset is None else offset
        return len(record), Unreadable(queue, offset, offset + 1, str(exc), bytes(record))
    # The properties of an inner batch itself are not delivered.
    properties_fault = _properties_fault(properties) if parsed and not _is_inner_batch(message) else None
    fault = _text_fault(topic, "the topic") or properties_fault
    if fault is None:
        return len(record), message
    offset, known = message.queue_offset, properties_fault is None
    return len(record), Unreadable(queue, offset, offset + offsets_of(message), fault, message.body, message, known)


def _text_fault(data: Buffer, name: str) -> str | None:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError as exc:
        return f"{name} is not valid UTF-8: {exc.reason} at byte {exc.start} of {len(data)}"
    return None


def _properties_fault(data: Buffer) -> str | None:
    """Return why a property string cannot be parsed; entries that the Java client skips are no reason."""
    if fault := _text_fault(data, "the property string"):
        return fault
    for entry in str(data, "utf-8").split(PROPERTY_SEPARATOR):
        if entry and NAME_VALUE_SEPARATOR not in entry:
            text = escaped(entry, 100)
            return f"the property string has an entry without the separator 0x01 of name and value: '{text}'"
    return None


def _is_inner_batch(record: MessageExt) -> bool:
    return record.sys_flag & INNER_BATCH == INNER_BATCH


def offsets_of(record: MessageExt) -> int:
    """Return how many offsets a broker gave a record."""
    return offsets_counted(record.properties) if record.sys_flag & records.COUNTED_BY_SENDER else 1


def offsets_counted(properties: Mapping[str, str]) -> int:
    """Return how many offsets a broker gave an inner batch with these properties. The sender chooses ``INNER_NUM``."""
    text = properties.get("INNER_NUM", "")
    number = int(text) if _SHORT.fullmatch(text) else 1
    return number if 1 <= number <= _MOST_COUNTED else 1


def _unpacked(
    record: MessageExt, queue: MessageQueue, *, decompressed: bool, parsed: bool
) -> Iterator[MessageExt | Unreadable]:
    first = record.queue_offset

    def unreadable(offset: int, reason: str) -> Unreadable:
        end = max(first + offsets_of(record), offset + 1)
        return Unreadable(queue, offset, end, reason, record.body, record)

    crc = zlib.crc32(record.body) & CRC_MASK
    if crc != record.body_crc:
        yield unreadable(
            first,
            f"the body has the checksum 0x{crc:08X}, stored is 0x{record.body_crc:08X}: it was damaged in the broker's "
            "store or on the network",
        )
        return
    message, inner = record, _is_inner_batch(record)
    if not inner and offsets_of(record) > 1:
        yield unreadable(first, f"one message has {offsets_of(record)} offsets: its sender has given it INNER_NUM")
        return
    if inner or decompressed:
        try:
            body = decompress(record.body, record.sys_flag)
        except CompressionError as exc:
            yield unreadable(first, str(exc))
            return
        message = replace(record, body=body, sys_flag=record.sys_flag & ~COMPRESSED_FLAG)
    if not inner:
        yield message
        return
    offset, stop = first, first + offsets_of(record)
    items = records.iter_batch_with_properties(message.body)
    try:
        for item, properties in items:
            # Further messages would have the offsets of the next records. A broker returns them to some requests only.
            if offset == stop - 1 and next(items, None) is not None:
                yield unreadable(
                    offset,
                    f"the inner batch at offset {first} has more messages than offsets, which are {stop - first}",
                )
                return
            row = replace(message, queue_offset=offset, flag=item.flag, body=item.body, properties=item.properties)
            fault = _properties_fault(properties) if parsed else None
            if fault is None:
                yield row
            else:
                reason = f"message {offset - first} of the inner batch at offset {first}: {fault}"
                yield Unreadable(queue, offset, offset + 1, reason, row.body, row, properties_known=False)
            offset += 1
    except RemotingCommandException as exc:
        yield unreadable(offset, f"message {offset - first} of the inner batch at offset {first}: {exc}")
        return
    if offset == first:
        yield unreadable(first, "the inner batch has no messages")
    elif offset < stop:
        count = f"{offset - first} messages and {stop - first} offsets"
        yield unreadable(offset, f"the inner batch at offset {first} has {count}")
