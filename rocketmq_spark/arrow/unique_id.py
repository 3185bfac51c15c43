"""Client message ids by the thousand: ``UNIQ_KEY`` (spec/remoting.md 9.2), ``message_id`` of gRPC (spec/grpc.md 5.2).

Rule 1: an id is 10 bytes that stay for the life of a task, and a 48-bit sequence that starts at ``ms << 16``.
Rule 2: the sequence only counts up, so more than 65,536 rows carry into the time part and never repeat an id.
Rule 3: the 10 bytes hold 4 random ones, so a retried task or a forked worker gives other ids.
Rule 4: those of gRPC have 9 bytes that stay, 6 of them random, and a 64-bit sequence that starts at ``seconds << 32``.

Follows ``MessageClientIDSetter.java``, and ``MessageIdCodec.java`` of the gRPC client.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import Ints
from rocketmq_spark.unique_id import message_id_prefix, message_id_sequence, milliseconds_of_month
from rocketmq_spark.wire.records import unique_id_prefix

# "0000" to "FFFF", each read as one 32-bit number: a group of four hex digits is one look-up and one store.
_HEX4: Final = np.frombuffer("".join(f"{number:04X}" for number in range(0x10000)).encode("ascii"), np.uint32)


class UniqueIds:
    """Hands out ranges of ids to one task.

    Parameters
    ----------
    ip : bytes
        The client's IPv4 address; where it has none, any 4 bytes.
    pid : int
    wall_clock : callable
        Returns epoch seconds; read once, here.
    rng : random.Random
        Read once, here.
    """

    LENGTH: ClassVar[int] = 32

    def __init__(self, *, ip: bytes, pid: int, wall_clock: Callable[[], float], rng: random.Random) -> None:
        if len(ip) != 4:
            raise ValueError(f"ip must be the 4 bytes of an IPv4 address, got {len(ip)}")
        self.prefix = unique_id_prefix(ip, pid, rng.getrandbits(32))
        self._next = milliseconds_of_month(wall_clock()) << 16

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.prefix.hex().upper()} next={self._next:012X}>"

    def take(self, count: int) -> int:
        """Reserve `count` ids and return the sequence number of the first."""
        first = self._next
        self._next += count
        return first

    @staticmethod
    def digits(first: int, rows: Ints) -> tuple[bytes | npt.NDArray[np.uint32], ...]:
        """Return the last 12 hex digits of ids, as three groups of four.

        Parameters
        ----------
        first : int
            From `take`.
        rows : int array
            Which ids of that range, in any order.

        Returns
        -------
        tuple of bytes or uint32 array
            Each number's four bytes are four ASCII digits; bytes where a group is the same for all rows.
        """
        low = rows + (first & 0xFFFF)
        carry = low >> 16
        time = first >> 16
        if not carry.any():
            return _HEX4[time >> 16 & 0xFFFF].tobytes(), _HEX4[time & 0xFFFF].tobytes(), _HEX4[low]
        times = carry + time
        return _HEX4[times >> 16 & 0xFFFF], _HEX4[times & 0xFFFF], _HEX4[low & 0xFFFF]


class MessageIds(UniqueIds):
    """The same for gRPC: version 1, with random bytes in the place of the network card's address.

    Parameters
    ----------
    pid : int
    wall_clock : callable
        Returns epoch seconds; read once, here.
    rng : random.Random
        Read once, here.
    """

    LENGTH = 34

    def __init__(self, *, pid: int, wall_clock: Callable[[], float], rng: random.Random) -> None:
        self.prefix = message_id_prefix(pid, rng)
        self._next = message_id_sequence(wall_clock())

    @staticmethod
    def digits(first: int, rows: Ints) -> tuple[bytes | npt.NDArray[np.uint32], ...]:
        """Return the last 16 hex digits of ids, as four groups of four; see `UniqueIds.digits`."""
        low = rows + (first & 0xFFFF)
        carry = low >> 16
        rest = first >> 16
        if not carry.any():
            return *(_HEX4[rest >> shift & 0xFFFF].tobytes() for shift in (32, 16, 0)), _HEX4[low]
        numbers = carry + rest
        return *(_HEX4[numbers >> shift & 0xFFFF] for shift in (32, 16, 0)), _HEX4[low & 0xFFFF]
