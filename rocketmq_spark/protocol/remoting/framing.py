"""Collects received bytes and returns the commands in them, however the bytes were cut.

After a broken frame the buffer stays broken, because the place of the next frame is unknown. Every byte is copied a
bounded number of times. Follows ``NettyDecoder.java`` (a ``LengthFieldBasedFrameDecoder``).
"""

from __future__ import annotations

import struct
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.command import RemotingCommand, decode_command

MAX_FRAME: Final = 16_777_216
"""``com.rocketmq.remoting.frameMaxLength``: the largest frame, its first length word included, bytes."""

_LENGTH: Final = struct.Struct(">i")
_MIN_LENGTH: Final = 4  # the header length word


class FrameBuffer:
    """Collects received bytes and gives back the commands in them.

    Parameters
    ----------
    max_frame : int, default 16777216
        The largest frame accepted, bytes, its first length word included.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._max_length = max_frame - _LENGTH.size
        self._data = bytearray()

    def __repr__(self) -> str:
        return f"<FrameBuffer waiting={len(self._data)} bytes max_frame={self._max_length + _LENGTH.size}>"

    @property
    def pending(self) -> int:
        """Bytes of a command that is not whole yet."""
        return len(self._data)

    def feed(self, data: Buffer) -> None:
        """Add bytes as they were received; `data` may be reused afterwards."""
        self._data += data

    def take(self) -> RemotingCommand | None:
        """Return the next whole command, or None until more bytes have come.

        The body of the command is a slice of the frame's own copy: it stays valid, and keeps that copy alive.

        Raises
        ------
        RemotingCommandException
            The length is negative or over the limit, or the header can't be decoded; again on every later call.
        """
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if not _MIN_LENGTH <= length <= self._max_length:
            raise RemotingCommandException(
                f"receiving a frame: length {length}, allowed are {_MIN_LENGTH} to {self._max_length};"
                " the other side speaks another protocol, or TLS, or its frameMaxLength is higher than ours"
            )
        end = _LENGTH.size + length
        if len(self._data) < end:
            return None
        # One copy, so that the body outlives the buffer. Slicing a bytearray directly would make a second one.
        with memoryview(self._data) as received:
            frame = bytes(received[_LENGTH.size : end])
        command = decode_command(memoryview(frame))
        # Cutting off the front moves the bytearray's start; it copies only once half of its memory is free.
        del self._data[:end]
        return command
