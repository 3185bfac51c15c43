"""Frames with either kind of header: the package sends JSON, a server may send both (``SerializeType.java``)."""

from __future__ import annotations

import enum
import struct

from rocketmq_spark.protocol.remoting import command as protocol
from rocketmq_spark.protocol.remoting.command import LANGUAGES, RemotingCommand


class SerializeType(enum.IntEnum):
    """How the header of one frame is written."""

    JSON = 0
    ROCKETMQ = 1


def encode_head(
    command: RemotingCommand, body_length: int, serialize_type: SerializeType = SerializeType.JSON
) -> bytes:
    """Encode both length words and the header."""
    if serialize_type is SerializeType.JSON:
        return protocol.encode_head(command, body_length)
    header = _binary_header(command)
    return struct.pack(">iI", 4 + len(header) + body_length, serialize_type << 24 | len(header)) + header


def encode_command(command: RemotingCommand, serialize_type: SerializeType = SerializeType.JSON) -> bytes:
    """Encode a whole frame."""
    return encode_head(command, len(command.body), serialize_type) + bytes(command.body)


def _binary_header(command: RemotingCommand) -> bytes:
    language = LANGUAGES.index(command.language if command.language in LANGUAGES else "OTHER")
    remark = command.remark.encode()
    ext = b""
    for name, value in command.ext_fields.items():
        # A server would read an empty value as null.
        if value:
            key, data = name.encode(), value.encode()
            ext += struct.pack(">h", len(key)) + key + struct.pack(">i", len(data)) + data
    fixed = struct.pack(">hbhii", command.code, language, command.version, command.opaque, command.flag)
    return b"".join((fixed, struct.pack(">i", len(remark)), remark, struct.pack(">i", len(ext)), ext))
