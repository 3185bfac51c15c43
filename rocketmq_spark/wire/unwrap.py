"""Stored records as a reader sees them: inner batches taken apart, bodies unpacked, checksums held against them.

Rule 1: one message at a time and plainly: the oracle of the vectorised decoder, and its way out where a layout is rare.
Rule 2: what can't be read is an error that names queue and offset; nothing is ever left out.
Rule 3: one record is unpacked at a time, and none that lies outside of what is wanted: who reads a piece of a pull
        holds no more than that, and pays for no more.

Follows spec/remoting.md sections 6.5, 7 and 8, ``MessageDecoder.java`` and ``MessageClientExt.getMsgId``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from rocketmq_spark.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.errors import CompressionError, RemotingCommandException
from rocketmq_spark.message import Buffer, MessageQueue
from rocketmq_spark.message_const import UNIQ_KEY
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.wire.records import MAX_STORED_ROWS, decode_batch, iter_records

# Both bits: the body is a batch, and is to be taken apart.
INNER_BATCH: Final = 0xC0
# A broker stores the checksum without its top bit.
CRC_MASK: Final = 0x7FFFFFFF


def messages_of(body: Buffer, queue: MessageQueue, start: int, end: int) -> Iterator[MessageExt]:
    """Yield the messages of a pull's body from one offset up to another, as their sender had them.

    Parameters
    ----------
    body : bytes or memoryview
        Records (spec/remoting.md section 8).
    queue : MessageQueue
        Where they are from, for messages.
    start, end : int
        Offsets; a broker gives the whole of an inner batch, and more than was asked for where that fits.

    Raises
    ------
    RemotingCommandException
        A record is truncated, has an unknown magic, or a body that its checksum or its sysFlag contradicts.
    """
    for record in _records(body, queue, start):
        # The messages of an inner batch have the offsets from its own on.
        if start - MAX_STORED_ROWS < record.queue_offset < end:
            for message in _unpacked(record, queue):
                if start <= message.queue_offset < end:
                    yield message


def message_id(message: MessageExt) -> str:
    """Return the id that the Java consumer shows: the sender's, else the broker's own."""
    return message.properties.get(UNIQ_KEY) or message.offset_msg_id


def wrong_crc(queue: MessageQueue, offset: int, stored: int, found: int) -> RemotingCommandException:
    """Return the error of a body that is not what the broker was given."""
    return RemotingCommandException(
        f"reading {queue}: the body at offset {offset} has the checksum 0x{found:08X}, stored is 0x{stored:08X}: it "
        "was damaged in the broker's store or on the way. Read it again; if it stays so, read the ranges before and "
        "after it with startingOffsets and endingOffsets"
    )


def unpacked_body(body: Buffer, sys_flag: int, queue: MessageQueue, offset: int) -> bytes:
    """Return a body as its sender had it.

    Raises
    ------
    RemotingCommandException
        It is not what its sysFlag says.
    """
    try:
        return decompress(body, sys_flag)
    except CompressionError as exc:
        raise RemotingCommandException(f"reading {queue}, the message at offset {offset}: {exc}") from exc


def _records(body: Buffer, queue: MessageQueue, start: int) -> Iterator[MessageExt]:
    try:
        yield from iter_records(body)
    except RemotingCommandException as exc:
        raise RemotingCommandException(f"reading {queue} from offset {start} on: {exc}") from exc


def _unpacked(record: MessageExt, queue: MessageQueue) -> Iterator[MessageExt]:
    found = zlib.crc32(record.body) & CRC_MASK
    if found != record.body_crc:
        raise wrong_crc(queue, record.queue_offset, record.body_crc, found)
    body = unpacked_body(record.body, record.sys_flag, queue, record.queue_offset)
    whole = replace(record, body=body, sys_flag=record.sys_flag & ~COMPRESSED_FLAG)
    if record.sys_flag & INNER_BATCH != INNER_BATCH:
        yield whole
        return
    try:
        items = decode_batch(body)
    except RemotingCommandException as exc:
        raise RemotingCommandException(
            f"reading {queue}, the inner batch at offset {record.queue_offset}: {exc}"
        ) from exc
    for number, item in enumerate(items):
        yield replace(
            whole,
            queue_offset=record.queue_offset + number,
            flag=item.flag,
            body=item.body,
            properties=item.properties,
        )
