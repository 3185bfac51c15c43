"""Generates the ids of a `Producer`'s messages, one at a time.

All producers of a process share one generator for remoting and one for gRPC. `rocketmq_spark.arrow.encoders` generates
the ids of whole record batches. Ids for gRPC have the layout of ``MessageIdCodec.java`` of the gRPC client, but random
bytes in the place of its network address. See docs/internals/messages.md#message-ids and
docs/internals/grpc-messages.md#ids.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rocketmq_spark.protocol.remoting.records import unique_id_prefix

# 2021-01-01T00:00:00Z.
_EPOCH_V1: Final = 1_609_459_200


def milliseconds_of_month(now: float) -> int:
    """Return the milliseconds since the current month began in local time; `now` is epoch seconds."""
    return int((now - _month_start(now)) * 1000)


def message_id_prefix(pid: int, rng: random.Random) -> bytes:
    """Return the prefix of a process's gRPC message ids, 9 bytes."""
    # Random bytes replace a network card's address, because containers of many hosts have equal addresses.
    return b"\x01" + rng.getrandbits(48).to_bytes(6, "big") + (pid & 0xFFFF).to_bytes(2, "big")


def message_id_sequence(now: float) -> int:
    """Return the first number of the sequence of gRPC message ids; `now` is epoch seconds."""
    return (int(now) - _EPOCH_V1) << 32


def _month_start(now: float) -> float:
    return datetime.fromtimestamp(now).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


@dataclass(eq=False, repr=False, kw_only=True)
class _Generator:
    """Draws ids for all threads of a process and its forks, whose ids differ only in the pid if `rng` is seeded."""

    wall_clock: Callable[[], float] = time.time
    rng: random.Random = field(default_factory=random.SystemRandom)
    getpid: Callable[[], int] = os.getpid

    def __post_init__(self) -> None:
        self._of_process = self._begin(self.getpid())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._of_process[1].hex().upper()}>"

    def next_id(self) -> str:
        """Return an id that no other call returns, in upper-case hex digits."""
        pid, _, draw = self._of_process
        if pid != self.getpid():
            # Several threads of a new process may do this at once. Their prefixes differ, and so do their ids.
            _, _, draw = self._of_process = self._begin(self.getpid())
        return draw()

    def next_ids(self, count: int) -> list[str]:
        """Return as many ids as `next_id` would."""
        return [self.next_id() for _ in range(count)]

    def _begin(self, pid: int) -> tuple[int, bytes, Callable[[], str]]:
        """Return the process id, a new prefix, and the function that draws ids."""
        raise NotImplementedError


@dataclass(eq=False, repr=False)
class UniqueIdGenerator(_Generator):
    """Draws ids for remoting: 32 digits, or 56 with an `ip` of 16 bytes on a host that has IPv6 only."""

    ip: bytes

    def _begin(self, pid: int) -> tuple[int, bytes, Callable[[], str]]:
        self._sequence = sequence = _Sequence(self.ip, pid, self.rng, self.wall_clock)
        return pid, sequence.prefix, sequence.next_id

    def next_ids(self, count: int) -> list[str]:
        """Return as many ids as `next_id` would, in less time."""
        # In a new process this begins another sequence.
        first = self.next_id()
        return [first, *self._sequence.next_ids(count - 1)] if count else []


class _Sequence:
    def __init__(self, ip: bytes, pid: int, rng: random.Random, clock: Callable[[], float]) -> None:
        self._ip = ip
        self._pid = pid
        self._rng = rng
        self._clock = clock
        self._lock = threading.Lock()
        self._last = -1
        self._begin_month(clock())

    def next_id(self) -> str:
        now = self._clock()
        with self._lock:
            if now >= self._month_end:
                self._begin_month(now)
            # After a clock that is set back, or in a full millisecond, the sequence runs ahead of the time.
            self._last = max(self._last + 1, int((now - self._month_start) * 1000) << 16)
            return f"{self._text}{self._last & 0xFFFFFFFFFFFF:012X}"

    def next_ids(self, count: int) -> list[str]:
        # The sequence runs ahead of the time, at most by a millisecond for each 65,536 ids.
        with self._lock:
            first = self._last + 1
            self._last += count
            text = self._text
        return [f"{text}{number & 0xFFFFFFFFFFFF:012X}" for number in range(first, first + count)]

    def _begin_month(self, now: float) -> None:
        self.prefix = unique_id_prefix(self._ip, self._pid, self._rng.getrandbits(32))
        self._text = self.prefix.hex().upper()
        self._month_start = _month_start(now)
        # 32 days after the first of a month is always in the next one.
        self._month_end = _month_start(self._month_start + 32 * 86_400)
        self._last = -1


class MessageIdGenerator(_Generator):
    """Draws message ids for gRPC: 34 digits."""

    def _begin(self, pid: int) -> tuple[int, bytes, Callable[[], str]]:
        prefix = message_id_prefix(pid, self.rng)
        numbers = itertools.count(message_id_sequence(self.wall_clock()))
        # next() of a count is one step of the interpreter, so no two threads get the same number.
        text = prefix.hex().upper()
        return pid, prefix, lambda: f"{text}{next(numbers):016X}"
