"""Encodes and decodes messages one at a time: batch items, stored records, and property strings; formats message ids.

`Producer`, the trace and the splitting of batches use it. For the rows of Spark, vectorised encoders and decoders do
this work, except in special cases; tests compare both. Bodies are neither compressed nor decompressed here. Layouts:
docs/internals/messages.md#batch, docs/internals/messages.md#stored-record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import MQClientException, RemotingCommandException
from rocketmq_spark.model.message import Buffer, EncodedBatch, Message
from rocketmq_spark.model.message_ext import MessageExt, format_host, pack_host
from rocketmq_spark.model.properties import NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR
from rocketmq_spark.protocol.remoting.codes import ResponseCode

# A broker acknowledges a batch of more than 32,767 items, and then its queue is corrupt.
MAX_BATCH_ROWS: Final = 32_000
# The limit of a batch that another client stored.
MAX_STORED_ROWS: Final = 65_535
MAX_BODY: Final = 4 * 1024 * 1024
"""The largest body of a batch: the brokers' default maxMessageSize."""
LARGEST_BODY: Final = 16 * 1024 * 1024 - 128 * 1024
"""The most bytes of a message's (compressed) body. A pull returns it in one frame, with properties and headers."""
MAX_PROPERTIES: Final = 32_767

# Batch item: total size, magic, CRC, flag, body length.
_ITEM_HEAD: Final = struct.Struct(">iiiii")
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
ITEM_OVERHEAD: Final = _ITEM_HEAD.size + _SHORT.size

# Stored record: total size, magic, body CRC, queue id, flag, queue offset, physical offset, sys flag, born timestamp.
_RECORD_HEAD: Final = struct.Struct(">iIIiiqqiq")
_LONG: Final = struct.Struct(">q")
# Reconsume times, prepared transaction offset, body length.
_RECORD_TAIL: Final = struct.Struct(">iqi")
_BYTE: Final = struct.Struct(">b")
# IPv4 hosts; empty body, topic and properties.
_SMALLEST_RECORD: Final = _RECORD_HEAD.size + 8 + _LONG.size + 8 + _RECORD_TAIL.size + _BYTE.size + _SHORT.size

MESSAGE_MAGIC_V1: Final = 0xDAA320A7
MESSAGE_MAGIC_V2: Final = 0xDAA320AB
_TOPIC_LENGTH: Final = {MESSAGE_MAGIC_V1: _BYTE, MESSAGE_MAGIC_V2: _SHORT}

SYS_FLAG_BORN_HOST_V6: Final = 0x10
SYS_FLAG_STORE_HOST_V6: Final = 0x20
# With both bits the body is a batch that consumers split. With the first one, brokers count offsets by ``INNER_NUM``.
COUNTED_BY_SENDER: Final = 0x80
INNER_BATCH: Final = 0xC0


def encode_properties(properties: Mapping[str, str | None]) -> bytes:
    """Return the property string of the entries whose value is not None, in their order.

    MQClientException with code 13: 0x01, 0x02 or invalid Unicode in a text, or more than 32,767 bytes.
    """
    pieces: list[str] = []
    for name, value in properties.items():
        if value is not None:
            pieces += (name, NAME_VALUE_SEPARATOR, value, PROPERTY_SEPARATOR)
    text = "".join(pieces)
    # Without other separators each entry has one of each.
    if not text.count(NAME_VALUE_SEPARATOR) == text.count(PROPERTY_SEPARATOR) == len(pieces) // 4:
        raise _illegal(
            f"property {_offending(properties)!r} holds 0x01 or 0x02, which separate properties; remove them"
        )
    try:
        data = text.encode()
    except UnicodeEncodeError as exc:
        raise _illegal(f"properties {sorted(properties)} are not valid Unicode: {exc.reason}; replace them") from exc
    if len(data) > MAX_PROPERTIES:
        raise _illegal(f"properties are {len(data)} bytes together, at most {MAX_PROPERTIES} fit one message")
    return data


def _offending(properties: Mapping[str, str | None]) -> str:
    """Return the name of the first entry with a separator in its name or value."""
    separators = {NAME_VALUE_SEPARATOR, PROPERTY_SEPARATOR}
    return next(name for name, value in properties.items() if separators.intersection(f"{name}{value}"))


def decode_properties(data: Buffer) -> dict[str, str]:
    """Return the entries of a property string (docs/internals/messages.md#properties). Bad UTF-8 becomes U+FFFD."""
    properties: dict[str, str] = {}
    for entry in str(data, "utf-8", "replace").split(PROPERTY_SEPARATOR):
        name, _, value = entry.partition(NAME_VALUE_SEPARATOR)
        if name and value:
            properties[name] = value
    return properties


def encode_single(message: Message, sys_flag: int = 0) -> EncodedBatch:
    """Return one message for SEND_MESSAGE; raises as `encode_properties`."""
    return EncodedBatch(
        message.topic,
        (message.body,),
        1,
        len(message.body),
        batch=False,
        properties=encode_properties(message.properties).decode(),
        flag=message.flag,
        sys_flag=sys_flag,
    )


def encode_batch(messages: Iterable[Message]) -> bytes:
    """Return the body of SEND_BATCH_MESSAGE; raises as `encode_items` and `encode_properties`."""
    batch = list(messages)
    topics = {message.topic for message in batch}
    if len(topics) > 1:
        raise _illegal(f"a batch of messages for {sorted(topics)}; all messages of a batch must have the same topic")
    return encode_items(batch, [encode_properties(message.properties) for message in batch])


def encode_items(messages: Sequence[Message], properties: Iterable[bytes]) -> bytes:
    """Return the body of SEND_BATCH_MESSAGE with messages, but with these property strings.

    Raises an MQClientException (13) for a flag of more than 32 bits, or too many messages.
    """
    if not 1 <= len(messages) <= MAX_BATCH_ROWS:
        raise _illegal(f"a batch of {len(messages)} messages; 1 to {MAX_BATCH_ROWS} are allowed")
    pieces: list[bytes] = []
    # Most messages of a batch have heads in common.
    heads: dict[tuple[int, int, int], tuple[bytes, bytes]] = {}
    for message, text in zip(messages, properties, strict=True):
        key = len(message.body), len(text), message.flag
        if key not in heads:
            size, length, flag = key
            try:
                head = _ITEM_HEAD.pack(ITEM_OVERHEAD + size + length, 0, 0, flag, size)
            except struct.error as exc:
                raise _illegal(f"flag {flag} and body of {size} bytes must fit 32 bits: {exc}") from exc
            heads[key] = head, _SHORT.pack(length)
        head, tail = heads[key]
        pieces += (head, message.body, tail, text)
    return b"".join(pieces)


def messages_in(batch: EncodedBatch) -> list[Message]:
    """Return the messages of a batch that has the remoting encoding."""
    body = b"".join(batch.body)
    if batch.batch:
        return decode_batch(body, batch.topic)
    return [Message(batch.topic, body, batch.flag, decode_properties(batch.properties.encode()))]


def decode_batch(body: Buffer, topic: str = "") -> list[Message]:
    """Return the messages of a batch body or of a stored inner batch; raises as `iter_batch_with_properties`."""
    return [message for message, _ in iter_batch_with_properties(body, topic)]


def iter_batch_with_properties(body: Buffer, topic: str = "") -> Iterator[tuple[Message, memoryview]]:
    """Yield each message of a batch body, with `topic`, and its property string; raise for a damaged item."""
    cursor = _Cursor(memoryview(body), "a batch body")
    count = 0
    while cursor.left:
        if count == MAX_STORED_ROWS:
            raise cursor.error(f"more than {MAX_STORED_ROWS} messages, the most that a batch can have")
        # Total size, magic and CRC are ignored, as by the broker.
        _, _, _, flag, body_length = cursor.unpack(_ITEM_HEAD)
        message_body = bytes(cursor.take(body_length))
        (properties_length,) = cursor.unpack(_SHORT)
        properties = cursor.take(properties_length)
        yield Message(topic, message_body, flag, decode_properties(properties)), properties
        count += 1


def decode_records(body: Buffer) -> list[MessageExt]:
    """Return the messages in the answer to a pull or to VIEW_MESSAGE_BY_ID."""
    # A damaged record raises a RemotingCommandException, because skipping it would lose messages.
    messages, data, at = [], memoryview(body), 0
    while at < len(data):
        record = record_at(data, at)
        messages.append(decode_record_with_text(record, at)[0])
        at += len(record)
    return messages


def record_at(data: memoryview, at: int) -> memoryview:
    """Return the bytes of the record at `at`; raise a RemotingCommandException for an invalid length."""
    cursor = _Cursor(data, "stored records", at)
    (total_size,) = cursor.unpack(_INT)
    cursor.at = at
    if 0 <= total_size < _SMALLEST_RECORD:
        raise cursor.error(f"a record of {total_size} bytes, the smallest has {_SMALLEST_RECORD}")
    return cursor.take(total_size)


def claimed_offset(record: memoryview) -> int | None:
    """Return the queue offset in the head of a record; None for an unknown magic, whose layout is unknown."""
    _, magic, _, _, _, queue_offset, *_ = _RECORD_HEAD.unpack_from(record)
    return queue_offset if magic in _TOPIC_LENGTH else None


def first_queue_offset(body: Buffer) -> int | None:
    """Return the queue offset of a pull's first record; None if its head is incomplete or unknown."""
    return claimed_offset(memoryview(body)) if len(body) >= _RECORD_HEAD.size else None


def last_queue_offset(body: Buffer) -> int | None:
    """Return the queue offset of the last record of a pull's body; None if a record cannot be located."""
    data, at, last = memoryview(body), 0, None
    try:
        while at < len(data):
            record = record_at(data, at)
            last = claimed_offset(record)
            at += len(record)
    except RemotingCommandException:
        return None
    return last


# Size, magic code, queue offset and sysFlag of a record.
_PLACE: Final = struct.Struct(">iI12xq8xi")


def place_of(body: Buffer, queue_offset: int) -> int | None:
    """Return the place in a pull's body of the first record at or after a queue offset, or the body's end.

    None if a record cannot be located or may hold messages of several offsets, or if the offsets do not ascend.
    """
    at, last, smallest, unpack = 0, len(body) - _PLACE.size, _RECORD_HEAD.size, _PLACE.unpack_from
    place, newest = len(body), -1
    while at <= last:
        size, _, offset, sys_flag = unpack(body, at)
        if size < smallest or offset <= newest or sys_flag & COUNTED_BY_SENDER:
            return None
        if newest < queue_offset <= offset:
            place = at
        newest = offset
        at += size
    return place if at == len(body) else None


def has_each_offset(body: Buffer, start: int, end: int) -> bool:
    """Return whether a pull's body has one record for each offset, in order, and none may hold several messages."""
    at, due, unpack = 0, start, _PLACE.unpack_from
    while at + _PLACE.size <= len(body):
        size, magic, offset, sys_flag = unpack(body, at)
        known = magic in (MESSAGE_MAGIC_V2, MESSAGE_MAGIC_V1) and not sys_flag & COUNTED_BY_SENDER
        if offset != due or size < _PLACE.size or not known:
            return False
        due += 1
        at += size
    return at == len(body) and due == end


def encode_record(message: MessageExt) -> bytes:
    """Return one message as brokers store it, with the second magic code."""
    topic, properties = message.topic.encode(), encode_properties(message.properties)
    hosts = pack_host(message.born_host), pack_host(message.store_host)
    after_body = b"".join((_SHORT.pack(len(topic)), topic, _SHORT.pack(len(properties)), properties))
    fixed = _RECORD_HEAD.size + _LONG.size + _RECORD_TAIL.size
    total_size = fixed + sum(map(len, hosts)) + len(message.body) + len(after_body)
    head = _RECORD_HEAD.pack(
        total_size,
        MESSAGE_MAGIC_V2,
        message.body_crc,
        message.queue_id,
        message.flag,
        message.queue_offset,
        message.physical_offset,
        message.sys_flag,
        message.born_timestamp,
    )
    tail = _RECORD_TAIL.pack(message.reconsume_times, message.prepared_transaction_offset, len(message.body))
    return b"".join((head, hosts[0], _LONG.pack(message.store_timestamp), hosts[1], tail, message.body, after_body))


def decode_record_with_text(data: memoryview, at: int) -> tuple[MessageExt, memoryview, memoryview]:
    """Return the message of the record `data`, with its topic and property string as stored; `at` is for errors."""
    record = _Cursor(data, f"the stored record at byte {at}")
    head = record.unpack(_RECORD_HEAD)
    _, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp = head
    if magic not in _TOPIC_LENGTH:
        raise record.error(f"magic 0x{magic:08X}, known are 0xDAA320A7 and 0xDAA320AB")
    born_host = format_host(bytes(record.take(20 if sys_flag & SYS_FLAG_BORN_HOST_V6 else 8)))
    (store_timestamp,) = record.unpack(_LONG)
    store_host = format_host(bytes(record.take(20 if sys_flag & SYS_FLAG_STORE_HOST_V6 else 8)))
    reconsume_times, prepared_transaction_offset, body_length = record.unpack(_RECORD_TAIL)
    body = bytes(record.take(body_length))
    (topic_length,) = record.unpack(_TOPIC_LENGTH[magic])
    topic = record.take(topic_length)
    (properties_length,) = record.unpack(_SHORT)
    properties = record.take(properties_length)
    message = MessageExt(
        topic=str(topic, "utf-8", "replace"),
        queue_id=queue_id,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp=born_timestamp,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        body_crc=body_crc,
        body=body,
        properties=decode_properties(properties),
    )
    return message, topic, properties


def unique_id_prefix(ip: bytes, pid: int, loader: int) -> bytes:
    """Return the prefix of client message ids, 10 or 22 bytes; `loader` is random (Java: hash of the class loader)."""
    if len(ip) not in (4, 16):
        raise ValueError(f"ip must be 4 or 16 address bytes, got {len(ip)}")
    return ip + struct.pack(">HI", pid & 0xFFFF, loader & 0xFFFFFFFF)


def unique_id(prefix: bytes, sequence: int) -> str:
    """Return a client message id: hex of the prefix and 6 bytes of sequence, counted from ``ms of the month << 16``."""
    return (prefix + (sequence & 0xFFFFFFFFFFFF).to_bytes(6, "big")).hex().upper()


@dataclass(slots=True)
class _Cursor:
    """Reads forward through bytes, and raises an error at their end."""

    data: memoryview
    what: str
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise self.error(f"{size} bytes claimed, {self.left} left")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def error(self, reason: str) -> RemotingCommandException:
        return RemotingCommandException(f"decoding {self.what}, byte {self.at} of {len(self.data)}: {reason}")


def _illegal(reason: str) -> MQClientException:
    return MQClientException(f"encoding a message: {reason}", ResponseCode.MESSAGE_ILLEGAL)
