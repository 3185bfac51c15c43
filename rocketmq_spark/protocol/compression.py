"""Compresses and decompresses bodies in the formats that every RocketMQ client reads.

LZ4 is a frame of independent blocks, because lz4-java reads no others. Only the sysFlag holds the type of a compressed
body; type 0 is the ZLIB of old clients. A body that exceeds the limit, ends early or has another format is an error.

Follows ``CompressionType.java``, ``Compressor.java`` and the LZ4 frame format.
"""

from __future__ import annotations

import enum
import zlib
from typing import Final

from rocketmq_spark.errors import CompressionError
from rocketmq_spark.model.message import Buffer

COMPRESSED_FLAG: Final = 0x1
_TYPE_MASK: Final = 0x700

DEFAULT_LEVEL: Final = 5
"""``compressLevel`` of the Java producer; LZ4 has no levels."""

MAX_DECOMPRESSED: Final = 64 * 1024 * 1024
"""What a body may unpack to unless the caller says otherwise, bytes: 16 times the brokers' default maxMessageSize."""

# Unpacked piece by piece, so that a bomb meets the limit before it fills the memory.
_CHUNK: Final = 64 * 1024

# LZ4's names of its block sizes (frame format: BD byte): the smallest that holds the body, for readers allocate one.
_LZ4_BLOCKS: Final = ((64 * 1024, 4), (256 * 1024, 5), (1024 * 1024, 6))
_LZ4_LARGEST: Final = 7


class CompressionType(enum.Enum):
    """How a body is compressed; the value is the type bits of the sysFlag."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300

    @property
    def sys_flag(self) -> int:
        """The bits that say "compressed, in this way"."""
        return COMPRESSED_FLAG | self.value

    @classmethod
    def parse(cls, text: str) -> CompressionType:
        """Return the type of that name, in any case.

        Raises
        ------
        ValueError
            There is none of that name.
        """
        try:
            return cls[text.strip().upper()]
        except KeyError:
            raise ValueError(f"compression type {text!r}: allowed are {', '.join(cls.__members__)}") from None

    @classmethod
    def of_sys_flag(cls, sys_flag: int) -> CompressionType | None:
        """Return how a body with that sysFlag is compressed, None if it isn't.

        Raises
        ------
        CompressionError
            The type bits are none that a client of today writes.
        """
        if not sys_flag & COMPRESSED_FLAG:
            return None
        bits = sys_flag & _TYPE_MASK
        if bits == 0:
            return cls.ZLIB
        try:
            return cls(bits)
        except ValueError:
            raise CompressionError(
                f"sysFlag 0x{sys_flag:X} says compression type {bits >> 8}: known are 0 and 3 (ZLIB), 1 (LZ4), 2 (ZSTD)"
            ) from None

    @classmethod
    def of_body(cls, body: Buffer) -> CompressionType:
        """Return the type that the first bytes of a compressed body show: a proxy does not name it."""
        return _MAGIC.get(bytes(body[:4]), cls.ZLIB)


# The first bytes of an LZ4 and of a ZSTD frame.
_MAGIC: Final = {b"\x04\x22\x4d\x18": CompressionType.LZ4, b"\x28\xb5\x2f\xfd": CompressionType.ZSTD}


def compress(body: Buffer, kind: CompressionType, level: int = DEFAULT_LEVEL) -> bytes:
    """Return `body` compressed; it may come out longer than it was.

    Parameters
    ----------
    level : int, default 5
        ZLIB: 0 to 9; ZSTD: 1 to 22, beyond that the nearest; LZ4 has none and ignores it, as in Java.

    Raises
    ------
    CompressionError
        The level doesn't exist, or this pyarrow was built without the codec.
    """
    try:
        if kind is CompressionType.ZLIB:
            return zlib.compress(body, level)
        if kind is CompressionType.LZ4:
            return _lz4_frame(body)
        import pyarrow as pa

        return bytes(pa.Codec("zstd", compression_level=level).compress(body, asbytes=True))
    except (zlib.error, OSError, ValueError, NotImplementedError) as exc:
        raise CompressionError(
            f"compressing a body of {len(body)} bytes with {kind.name}, level {level}: {exc}"
        ) from exc


def decompress(body: Buffer, sys_flag: int, *, limit: int = MAX_DECOMPRESSED) -> bytes:
    """Return a body as its sender had it.

    Parameters
    ----------
    body : bytes or memoryview
        As stored.
    sys_flag : int
        Says whether and how it is compressed; a body that isn't comes back as it is.
    limit : int, default 64 MiB
        Bytes that a compressed body may unpack to.

    Raises
    ------
    CompressionError
        The body is not what its sysFlag says, is cut off, or unpacks to more than `limit`.
    """
    kind = CompressionType.of_sys_flag(sys_flag)
    if kind is None:
        return bytes(body)
    try:
        if kind is CompressionType.ZLIB:
            return _inflated(body, limit)
        return _unpacked_lz4(body, limit) if kind is CompressionType.LZ4 else _unpacked_zstd(body, limit)
    except (zlib.error, OSError, NotImplementedError, _NotWhole) as exc:
        raise CompressionError(f"decompressing a body of {len(body)} bytes with {kind.name}: {exc}") from exc


class _NotWhole(Exception):
    pass


def _lz4_frame(body: Buffer) -> bytes:
    import lz4.frame

    block_size = next((name for size, name in _LZ4_BLOCKS if len(body) <= size), _LZ4_LARGEST)
    return bytes(lz4.frame.compress(body, block_size=block_size, block_linked=False, store_size=False))


def _inflated(body: Buffer, limit: int) -> bytes:
    # Java's InflaterInputStream, too, stops at the end of the stream and leaves what follows.
    stream = zlib.decompressobj()
    data = stream.decompress(body, limit + 1)
    if len(data) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise _NotWhole("the stream is cut off")
    return data


def _unpacked_lz4(body: Buffer, limit: int) -> bytes:
    import lz4.frame

    stream = lz4.frame.LZ4FrameDecompressor()
    pieces: list[bytes] = []
    # The room for a piece is allocated at once, whether it will be filled or not; and each call copies what is left of
    # the body, so there must not be many.
    size, room = 0, _CHUNK
    try:
        while not stream.eof:
            if stream.needs_input and pieces:
                raise _NotWhole("the frame is cut off")
            pieces.append(stream.decompress(b"" if pieces else body, max_length=room))
            size += len(pieces[-1])
            if size > limit:
                raise _too_large(limit)
            room *= 2
    except RuntimeError as exc:
        raise _NotWhole(str(exc)) from exc
    return b"".join(pieces)


def _unpacked_zstd(body: Buffer, limit: int) -> bytes:
    import pyarrow as pa

    if not body:
        raise _NotWhole("there is nothing to unpack")
    pieces: list[pa.Buffer] = []
    size = 0
    with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
        # Not read(): when that meets bytes that are no ZSTD, pyarrow never frees the piece that it was to fill.
        while (piece := stream.read_buffer(_CHUNK)).size:
            pieces.append(piece)
            size += piece.size
            if size > limit:
                raise _too_large(limit)
    return b"".join(pieces)


def _too_large(limit: int) -> _NotWhole:
    return _NotWhole(f"it unpacks to more than {limit} bytes, the limit here")
