"""What a hostile or broken server may send: what good ones have sent, damaged in every way that a number can choose.

Rule 1: the same seed gives the same inputs.
Rule 2: the damage is aimed: lengths become extreme, brackets nest, texts break off, pieces of one message end up in
        another. Bytes at random alone would all be refused by the first check that they meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# What stands where a length, a count or a number is expected.
_NUMBERS = tuple(
    value.to_bytes(size, "big", signed=True)
    for size, value in (
        *((4, value) for value in (-1, 0, 1, -(2**31), 2**31 - 1, 0xFFFFFF, 1 << 24, 64 << 20)),
        *((2, value) for value in (-1, 0, -(2**15), 2**15 - 1)),
        *((8, value) for value in (-1, -(2**63), 2**63 - 1)),
        *((1, value) for value in (-1, 0, 1, 127)),
    )
)
# What stands where a text, or a value of JSON, is expected.
_TEXTS = (
    *(b"[" * 1200, b'{"a":' * 1200, b"[" * 60 + b"]" * 60, b'{"a":' * 40 + b"1" + b"}" * 40, b"{}", b"[]"),
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 20, b"2147483648", b"9" * 5000, b"1.5"),
    *(rb"\ud800", rb"\udfff", rb"\u0000", rb"\uD83D\uDE00", b"\\", b'"', b'":"', b",", b":", b";"),
    *(
        b"\xff",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\0",
        b"\1",
        b"\2",
        b"\xef\xbb\xbf",
        "٣".encode(),
        b"-",
        b"+1",
        b" " * 50,
    ),
    *(b"0x10", b"1_000", b"broker-a:99999999999;", b"7F" * 16, b"\r\n", b"A" * 700),
)


def damaged(seeds: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield `count` inputs made of `seeds`, each damaged once or twice, a few of them nothing but noise."""
    rng = np.random.default_rng(seed)
    # All dice at once: one call per input would cost more than what is tested.
    kinds = rng.integers(0, len(_DAMAGES), count).tolist()
    chosen = rng.integers(0, len(seeds), (count, 2)).tolist()
    dice = rng.integers(0, 2**31, (count, 4)).tolist()
    twice = (rng.random(count) < 0.3).tolist()
    for kind, (first, second), (at, until, value, again), more in zip(kinds, chosen, dice, twice, strict=True):
        data = _DAMAGES[kind](seeds[first], seeds[second], at, until, value)
        if more:
            data = _DAMAGES[again % len(_DAMAGES)](data, seeds[first], value, at, until)
        yield data


def _flipped(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    made = bytearray(data)
    if made:
        made[at % len(made)] ^= 1 << value % 8
        made[until % len(made)] = value >> 8 & 0xFF
    return bytes(made)


def _numbered(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    number = _NUMBERS[value % len(_NUMBERS)]
    # Lengths stand at the front more often than elsewhere.
    place = at % (len(data) + 1) if until % 2 else at % min(len(data) + 1, 24)
    return data[:place] + number + data[place + len(number) :]


def _worded(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    place = at % (len(data) + 1)
    return data[:place] + _TEXTS[value % len(_TEXTS)] + data[place + until % 8 :]


def _valued(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    """Put something else in the place of a whole value of JSON."""
    start = data.find(b":", at % (len(data) + 1)) + 1
    end = min((found for found in (data.find(mark, start) for mark in (b",", b"}", b"]")) if found >= 0), default=start)
    return data[:start] + _TEXTS[value % len(_TEXTS)] + data[end:] if until % 4 else data[:start] + data[end:]


def _cut(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    return data[: at % (len(data) + 1)] if value % 2 else data[until % (len(data) + 1) :]


def _spliced(data: bytes, other: bytes, at: int, until: int, _: int) -> bytes:
    return data[: at % (len(data) + 1)] + other[until % (len(other) + 1) :]


def _doubled(data: bytes, _: bytes, at: int, until: int, value: int) -> bytes:
    start = at % (len(data) + 1)
    piece = data[start : start + until % 60]
    return data[:start] + piece * (2 + value % 30) + data[start:]


def _noise(_: bytes, __: bytes, at: int, until: int, value: int) -> bytes:
    return np.random.default_rng(value).bytes(at % 64) + until.to_bytes(4, "big")


_DAMAGES = (_flipped, _numbered, _worded, _valued, _cut, _spliced, _doubled, _noise)
