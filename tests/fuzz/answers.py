"""Random answers of brokers: stored records of every layout, and damage to each of their parts.

An answer is drawn field by field, so that most damage reaches the code behind earlier checks. Lengths lie by one or by
very much, or are the largest or negative numbers. Property strings have any pieces. Inner batches have wrong items, or
a wrong number of them. Checksums fit damaged bodies. Some answers are then damaged as plain bytes.
"""

from __future__ import annotations

import random
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled
from rocketmq_spark.protocol.compression import CompressionType, compress

MAGICS: Final = (0xDAA320A7, 0xDAA320AB)
NAMES: Final = [b"KEYS", b"TAGS", b"UNIQ_KEY", b"SPARK_ATTEMPT", b"INNER_NUM", "ключ".encode(), b"k", b"x" * 40]
VALUES: Final = [
    b"a",
    b"b",
    b"7F0000010A5B1B2C3D4E",
    b"3",
    b"2",
    b"0",
    b"99999",
    b"123456",
    "ü€😀".encode(),
    b"v" * 200,
]
BAD_PIECES: Final = [
    b"\x01", b"\x02", b"\x01\x02", b"\x02\x02", b"\x00", b"\xff", b"\xc3", b"\xc0\x80", b"\xed\xa0\x80",
    b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98",
    b"name", b"INNER_NUM\x01", b"xINNER_NUM\x012\x02", b"INNER_NUM\x015\x02",
]  # fmt: skip
TOPICS: Final = [b"orders", b"", b"t" * 127, "темы".encode(), b"%RETRY%group"]
# Java reads the lengths of the last two as negative numbers, the first of them in records of the first magic.
BAD_TOPICS: Final = [*BAD_PIECES, b"t" * 200, b"t" * 33_000]
LONG_PROPERTY: Final = b"long\x01" + b"v" * 32_800 + b"\x02"
LONGS: Final = [0, 1, -1, 2**62, 2**63 - 1, -(2**63), (2**63 - 1) // 1000, (2**63 - 1) // 1000 + 1, 1_700_000_000_000]
INTS: Final = [0, 1, -1, 2**31 - 1, -(2**31)]
WRONG_LENGTHS: Final = [
    -1,
    0,
    1,
    2,
    90,
    91,
    127,
    128,
    255,
    256,
    32_767,
    32_768,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
HOSTS: Final = [b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x02", b"\xff\xff\xff\xff"]
QUEUES: Final = [MessageQueue("orders", f"broker-{name}", number) for number, name in enumerate("ab")]


class Draws:
    """Draws answers; equal seeds give equal answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # How often something is damaged: never in a third of the answers.
        self._damage = self._random.choice([0.0, 0.05, 0.3])
        self._items = 0  # Of the current inner batch
        self._is_mixed = self._random.random() < 0.1
        self._family = self._random.choice([0, 0, 0x10, 0x20, 0x30])

    def pulls(self) -> list[Pulled]:
        """Return one or a few answers that are decoded together."""
        return [self._pull() for _ in range(self._random.choice([1, 1, 1, 2, 3]))]

    def _pull(self) -> Pulled:
        first = self._random.randrange(4)
        records = [self._record(first + place) for place in range(self._random.choice([0, 1, 1, 2, 3, 8]))]
        body = b"".join(records)
        if self._is_damaged():
            body = self._damaged(body)
        start, end = self._random.choice([(0, 2**63 - 1), (0, 50), (1, 3), (2, 5), (-(2**63), 2**63 - 1)])
        # An array has no byte behind its last one, as bytes have: a sanitizer sees a read behind the answer.
        as_stored = memoryview(array("B", body)) if self._random.random() < 0.5 else memoryview(b"head" + body)[4:]
        return Pulled(self._random.choice(QUEUES), start, end, as_stored)

    def _is_damaged(self) -> bool:
        return self._random.random() < self._damage

    def _length(self, length: int) -> int:
        """Return a length, or one that lies."""
        if not self._is_damaged():
            return length
        if self._random.random() < 0.5:
            return length + self._random.choice([-2, -1, 1, 2, 8])
        return self._random.choice(WRONG_LENGTHS)

    def _number(self, sound: int, others: Sequence[int]) -> int:
        return sound if self._random.random() < 0.7 else self._random.choice(others)

    def _properties(self) -> bytes:
        names = self._random.sample(NAMES, self._random.choice([0, 1, 2, 3, 3, 5]))
        if self._random.random() < 0.02:
            names = [b"n%d" % number for number in range(self._random.choice([33, 64, 65, 200]))]
        if self._is_damaged() and names:
            names.append(self._random.choice(names))
        text = b"".join(name + b"\x01" + self._random.choice(VALUES) + b"\x02" for name in names)
        if self._random.random() < 0.2:
            text = text[:-1]
        if self._random.random() < 0.003:
            text += LONG_PROPERTY
        while self._is_damaged():
            at = self._random.randint(0, len(text))
            text = text[:at] + self._random.choice(BAD_PIECES) + text[at:]
        return text

    def _sized(self, layout: str, data: bytes) -> bytes:
        """Return bytes after their length."""
        length = self._length(len(data)) % 2 ** (8 * struct.calcsize(layout))
        return struct.pack(layout, length) + data

    def _item(self) -> bytes:
        body = self._random.choice([b"", b"item", b"x" * 100])
        rest = self._sized(">I", body) + self._sized(">H", self._properties())
        return struct.pack(">iIIi", self._length(16 + len(rest)) % 2**31, 0, 0, self._number(0, INTS)) + rest

    def _body(self, sys_flag: int) -> bytes:
        if sys_flag & 0xC0 == 0xC0:
            return b"".join(self._item() for _ in range(self._items))
        return self._random.choice(
            [b"", b"body", b"%d" % self._random.getrandbits(60), b"y" * self._random.randrange(300)]
        )

    def _record(self, offset: int) -> bytes:
        draw = self._random
        family = draw.choice([0, 0x10, 0x20, 0x30]) if self._is_mixed else self._family
        sys_flag = family | (0xC0 if draw.random() < 0.15 else draw.choice([0, 0, 0, 0x40, 0x80, 0x700]))
        self._items = draw.choice([0, 1, 2, 3, 3])
        body = self._body(sys_flag)
        properties = self._properties()
        if sys_flag & 0x80 and draw.random() < 0.7 and b"INNER_NUM" not in properties:
            properties = b"INNER_NUM\x01%d\x02" % (self._items if sys_flag & 0x40 else 1) + properties
        if draw.random() < 0.08:
            kind = draw.choice(list(CompressionType))
            body, sys_flag = compress(body, kind), sys_flag & ~0x700 | kind.sys_flag
        if self._is_damaged():
            body = self._damaged(body)
        crc = zlib.crc32(body) & 0x7FFFFFFF
        if self._is_damaged():
            crc ^= draw.choice([1, 0x80000000])
        magic = draw.choice(MAGICS) if not self._is_damaged() else draw.choice([0, 0xCBD43194, 0xDAA320A8])
        topic = draw.choice(TOPICS) if not self._is_damaged() else draw.choice(BAD_TOPICS)
        rest = b"".join(
            (
                struct.pack(">IIii", magic, crc, 3, self._number(0, INTS)),
                struct.pack(">qq", self._number(offset, LONGS), self._number(4096 + offset, LONGS)),
                struct.pack(">iq", sys_flag, self._number(1_700_000_000_123, LONGS)),
                self._host(sys_flag & 0x10),
                struct.pack(">q", self._number(1_700_000_000_456, LONGS)),
                self._host(sys_flag & 0x20),
                struct.pack(">iq", self._number(0, INTS), self._number(0, LONGS)),
                self._sized(">I", body),
                self._sized(">B" if magic == MAGICS[0] else ">H", topic),
                self._sized(">H", properties),
            )
        )
        if self._is_damaged():
            rest += b"\x00" * draw.randrange(3)
        return struct.pack(">I", self._length(4 + len(rest)) % 2**32) + rest

    def _host(self, v6: int) -> bytes:
        return self._random.choice(HOSTS) * (4 if v6 else 1) + struct.pack(">i", self._number(10911, INTS))

    def _damaged(self, data: bytes) -> bytes:
        draw = self._random
        changed = bytearray(data)
        at, other = draw.randint(0, len(data)), draw.randint(0, len(data))
        damages: list[Callable[[], object]] = [
            lambda: changed.__delitem__(slice(at, None)),
            lambda: changed.__delitem__(slice(min(at, other), min(at, other) + draw.randrange(9))),
            lambda: changed.__setitem__(slice(at, at), changed[other : other + draw.randrange(200)]),
            lambda: changed.__setitem__(slice(at, at + 4), struct.pack(">I", draw.choice(WRONG_LENGTHS) % 2**32)),
            lambda: changed.__setitem__(slice(at, at + 1), draw.randbytes(1)),
            lambda: changed.extend(draw.randbytes(draw.randrange(120))),
        ]
        draw.choice(damages)()
        return bytes(changed)
