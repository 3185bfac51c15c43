"""Compression and decompression, and invalid compressed bodies. tests/interop compares with Java."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import CompressionError
from rocketmq_spark.protocol.compression import DEFAULT_LEVEL, CompressionType, compress, decompress

KIB = 1024
NOISE = random.Random(5).randbytes(200 * KIB)
BODIES = {
    "one byte": b"x",
    "text": b"the same words again and again, " * 200,
    "noise": NOISE,
    "64 KiB": b"ab" * 32 * KIB,
    "64 KiB and one": b"ab" * 32 * KIB + b"!",
    "over 1 MiB": (NOISE + b"z" * 200 * KIB) * 4,
    "4 MiB and a bit": b"0123456789abcdef" * 256 * KIB + b"tail",
}
each_type = pytest.mark.parametrize("kind", list(CompressionType))


def test_default_compression_level_is_five() -> None:
    assert DEFAULT_LEVEL == 5


@each_type
@pytest.mark.parametrize("name", BODIES)
def test_a_body_comes_back(kind: CompressionType, name: str) -> None:
    packed = compress(BODIES[name], kind)
    assert BODIES[name] == decompress(packed, kind.sys_flag)
    assert BODIES[name] == decompress(memoryview(packed), kind.sys_flag | 0x4)


@given(st.binary(max_size=2000), st.sampled_from(CompressionType))
def test_any_body_comes_back(body: bytes, kind: CompressionType) -> None:
    assert body == decompress(compress(memoryview(body), kind), kind.sys_flag)


def test_the_flags_are_java_s() -> None:
    assert {kind.name: kind.sys_flag for kind in CompressionType} == {"LZ4": 0x101, "ZSTD": 0x201, "ZLIB": 0x301}
    assert CompressionType.ZLIB is CompressionType.of_sys_flag(0x1)
    assert CompressionType.LZ4 is CompressionType.of_sys_flag(0x101 | 0x30)
    assert CompressionType.of_sys_flag(0x300) is None


def test_body_without_the_compression_flag_is_returned_unchanged() -> None:
    assert decompress(b"\x78\x9c plain", 0x300) == b"\x78\x9c plain"


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(CompressionError, match="sysFlag 0x401 says compression type 4: known are"):
        decompress(b"body", 0x401)


@pytest.mark.parametrize("text", ["zlib", "ZLIB", " Zlib "])
def test_a_type_is_named_in_any_case(text: str) -> None:
    assert CompressionType.ZLIB is CompressionType.parse(text)


@pytest.mark.parametrize("text", ["", "gzip", "NONE"])
def test_an_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed are LZ4, ZSTD, ZLIB"):
        CompressionType.parse(text)


def test_compressed_formats_have_the_standard_signatures() -> None:
    body = BODIES["text"]
    assert body == zlib.decompress(compress(body, CompressionType.ZLIB))
    assert compress(body, CompressionType.ZSTD)[:4].hex() == "28b52ffd"
    assert compress(body, CompressionType.LZ4)[:4].hex() == "04224d18"


@pytest.mark.parametrize(
    ("size", "head"),
    [
        (1, "6040"), (64 * KIB, "6040"), (64 * KIB + 1, "6050"), (256 * KIB + 1, "6060"), (KIB * KIB + 1, "6070"),
        (5 * KIB * KIB, "6070"),
    ],
)  # fmt: skip
def test_lz4_blocks_are_independent_and_no_larger_than_the_body_needs(size: int, head: str) -> None:
    assert head == compress(bytes(size), CompressionType.LZ4)[4:6].hex()


def test_level_affects_all_types_but_lz4() -> None:
    body = " ".join(str(number * number) for number in range(5000)).encode()
    for kind in (CompressionType.ZLIB, CompressionType.ZSTD):
        assert len(compress(body, kind, 9)) != len(compress(body, kind, 1))
    assert compress(body, CompressionType.LZ4, 9) == compress(body, CompressionType.LZ4, 1)


def test_a_level_that_does_not_exist_is_named() -> None:
    with pytest.raises(CompressionError, match="compressing a body of 5 bytes with ZLIB, level 10: "):
        compress(b"12345", CompressionType.ZLIB, 10)


@each_type
@pytest.mark.parametrize("cut", [0, 1, 5, 50, -1])
def test_a_body_that_is_cut_off_is_an_error(kind: CompressionType, cut: int) -> None:
    packed = compress(BODIES["noise"], kind)[:cut]
    with pytest.raises(CompressionError, match=f"decompressing a body of {len(packed)} bytes with {kind.name}: "):
        decompress(packed, kind.sys_flag)


@each_type
def test_a_body_of_another_format_is_an_error(kind: CompressionType) -> None:
    with pytest.raises(CompressionError, match=kind.name):
        decompress(b"this is not compressed at all", kind.sys_flag)


@each_type
def test_a_body_that_unpacks_to_more_than_the_limit_is_an_error(kind: CompressionType) -> None:
    bomb = compress(bytes(8 * KIB * KIB), kind)
    assert len(bomb) < 64 * KIB
    with pytest.raises(CompressionError, match="unpacks to more than 1000 bytes, the limit of this client"):
        decompress(bomb, kind.sys_flag, limit=1000)
    assert bytes(1000) == decompress(compress(bytes(1000), kind), kind.sys_flag, limit=1000)


@each_type
def test_decompressing_a_small_body_allocates_little_memory(kind: CompressionType) -> None:
    packed = compress(b"small", kind)
    decompress(packed, kind.sys_flag)
    tracemalloc.start()
    try:
        decompress(packed, kind.sys_flag)
        assert tracemalloc.get_traced_memory()[1] < 256 * KIB
    finally:
        tracemalloc.stop()


def test_linked_blocks_are_decompressed() -> None:
    body = BODIES["over 1 MiB"]
    linked = pa.Codec("lz4").compress(body, asbytes=True)
    assert body == decompress(linked, CompressionType.LZ4.sys_flag)


@pytest.mark.parametrize("kind", [CompressionType.LZ4, CompressionType.ZSTD])
def test_all_frames_of_a_body_are_decompressed_like_in_java(kind: CompressionType) -> None:
    first, second, empty = (compress(body, kind) for body in (b"first ", b"second", b""))
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"skip"
    for body in (first + second, skippable + first + skippable + empty + second, empty + first + second + skippable):
        assert decompress(body, kind.sys_flag) == b"first second"
    large = BODIES["over 1 MiB"]
    assert decompress(compress(large, kind) * 2, kind.sys_flag) == large * 2


@pytest.mark.parametrize("rest", [b"x", b"no frame", bytes(4), compress(b"second", CompressionType.LZ4)[:-1]])
def test_an_lz4_body_that_does_not_end_with_a_frame_is_an_error(rest: bytes) -> None:
    with pytest.raises(CompressionError, match="with LZ4: "):
        decompress(compress(b"first", CompressionType.LZ4) + rest, CompressionType.LZ4.sys_flag)


def test_bytes_after_a_zlib_stream_are_ignored_like_in_java() -> None:
    assert decompress(zlib.compress(b"body") + b"more", CompressionType.ZLIB.sys_flag) == b"body"
