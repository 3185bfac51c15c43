"""Compresses and decompresses message bodies with ZLIB, LZ4 or ZSTD (docs/internals/messages.md#compression).

A body that unpacks to more than a limit, by default 64 MiB, is an error.
"""

from __future__ import annotations

import enum
import math
import zlib
from typing import Final

from rocketmq_spark.errors import CompressionError
from rocketmq_spark.model.message import Buffer

COMPRESSED_FLAG: Final = 0x1
_TYPE_MASK: Final = 0x700
COMPRESSION_BITS: Final = COMPRESSED_FLAG | _TYPE_MASK

# ``compressLevel`` of the Java producer; LZ4 has no levels.
DEFAULT_LEVEL: Final = 5
# The default limit of a decompressed body: 16 times the brokers' default maxMessageSize.
MAX_DECOMPRESSED: Final = 64 * 1024 * 1024
# Bodies are decompressed in pieces, so that a zip bomb reaches the limit before it fills the memory.
_CHUNK: Final = 64 * 1024

# LZ4's names of its block sizes (frame format: BD byte). The smallest is used, because readers allocate a block.
_LZ4_BLOCKS: Final = ((64 * 1024, 4), (256 * 1024, 5), (1024 * 1024, 6), (math.inf, 7))


class CompressionType(enum.Enum):
    """How a body is compressed; the value is the type bits of the sysFlag."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300

    @property
    def sys_flag(self) -> int:
        """The bits of the sysFlag that mean "compressed in this way"."""
        return COMPRESSED_FLAG | self.value

    @classmethod
    def parse(cls, text: str) -> CompressionType:
        """Return the type with a name, in any case; raise a ValueError for an unknown name."""
        try:
            return cls[text.strip().upper()]
        except KeyError:
            raise ValueError(f"compression type {text!r}: allowed are {', '.join(cls.__members__)}") from None

    @classmethod
    def of_sys_flag(cls, sys_flag: int) -> CompressionType | None:
        """Return how a body is compressed, or None; raise a CompressionError for an unknown type."""
        if not sys_flag & COMPRESSED_FLAG:
            return None
        bits = sys_flag & _TYPE_MASK
        try:
            return cls(bits or cls.ZLIB.value)
        except ValueError:
            raise CompressionError(
                f"sysFlag 0x{sys_flag:X} says compression type {bits >> 8}: known are 0 and 3 (ZLIB), 1 (LZ4), 2 (ZSTD)"
            ) from None

    @classmethod
    def of_body(cls, body: Buffer) -> CompressionType:
        """Return the type of a compressed body from a proxy, which does not name it, by the first bytes."""
        return _MAGIC.get(bytes(body[:4]), cls.ZLIB)


# The first bytes of an LZ4 and of a ZSTD frame.
_MAGIC: Final = {b"\x04\x22\x4d\x18": CompressionType.LZ4, b"\x28\xb5\x2f\xfd": CompressionType.ZSTD}


def compress(body: Buffer, kind: CompressionType, level: int = DEFAULT_LEVEL) -> bytes:
    """Return `body` compressed; raise a CompressionError for an invalid level, or a pyarrow without the codec.

    `level` is 0 to 9 for ZLIB, 1 to 22 for ZSTD (beyond that the nearest); LZ4 ignores it, as in Java.
    """
    try:
        if kind is CompressionType.ZLIB:
            return zlib.compress(body, level)
        if kind is CompressionType.LZ4:
            import lz4.frame

            block_size = next(name for size, name in _LZ4_BLOCKS if len(body) <= size)
            return bytes(lz4.frame.compress(body, block_size=block_size, block_linked=False, store_size=False))
        import pyarrow as pa

        return bytes(pa.Codec("zstd", compression_level=level).compress(body, asbytes=True))
    except (zlib.error, OSError, ValueError, NotImplementedError) as exc:
        raise CompressionError(
            f"compressing a body of {len(body)} bytes with {kind.name}, level {level}: {exc}; choose another "
            "compressLevel or compressType, or compressType=NONE"
        ) from exc


def decompress(body: Buffer, sys_flag: int, *, limit: int = MAX_DECOMPRESSED) -> bytes:
    """Return a stored body decompressed; raise a CompressionError if it is damaged or longer than `limit` bytes."""
    kind = CompressionType.of_sys_flag(sys_flag)
    if kind is None:
        return bytes(body)
    try:
        if kind is CompressionType.ZLIB:
            return _inflated(body, limit)
        return _unpacked_lz4(body, limit) if kind is CompressionType.LZ4 else _unpacked_zstd(body, limit)
    except (zlib.error, OSError, RuntimeError, ValueError) as exc:
        raise CompressionError(f"decompressing a body of {len(body)} bytes with {kind.name}: {exc}") from exc


def _inflated(body: Buffer, limit: int) -> bytes:
    # Like Java's InflaterInputStream, this ignores bytes after the end of the stream.
    stream = zlib.decompressobj()
    data = stream.decompress(body, limit + 1)
    if len(data) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise ValueError("the stream is cut off")
    return data


def _unpacked_lz4(body: Buffer, limit: int) -> bytes:
    import lz4.frame

    # Like lz4-java, this reads several frames one after the other. An `LZ4FrameDecompressor` would copy the rest of the
    # body at each frame.
    data, context = memoryview(body), lz4.frame.create_decompression_context()
    pieces: list[bytes] = []
    # Each call allocates a whole piece, so pieces begin small and double.
    size, room = 0, _CHUNK
    at, ended = 0, False
    while at < len(data) or not ended:
        piece, consumed, ended = lz4.frame.decompress_chunk(context, data[at:], max_length=room)
        if not (piece or consumed):
            raise ValueError("the frame is cut off")
        at += consumed
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        if piece:
            pieces.append(piece)
        if len(piece) == room:
            room *= 2
    return b"".join(pieces)


def _unpacked_zstd(body: Buffer, limit: int) -> bytes:
    import pyarrow as pa

    if not body:
        raise ValueError("the body is empty")
    pieces: list[pa.Buffer] = []
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
        # After read() of bytes that are not ZSTD, pyarrow never frees the piece.
        while (piece := stream.read_buffer(_CHUNK)).size:
            pieces.append(piece)
            size += piece.size
            if size > limit:
                raise _too_large(limit)
    return b"".join(pieces)


def _too_large(limit: int) -> ValueError:
    return ValueError(f"it unpacks to more than {limit} bytes, the limit of this client")
