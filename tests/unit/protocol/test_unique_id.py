"""Ids of single messages."""

from __future__ import annotations

import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from rocketmq_spark.protocol.remoting.records import unique_id, unique_id_prefix
from rocketmq_spark.protocol.unique_id import MessageIdGenerator, UniqueIdGenerator, milliseconds_of_month

IP = bytes([10, 0, 0, 7])
MAY = datetime(2024, 5, 1, 0, 0, 12, 345_000).timestamp()


class Clock:
    """A clock that stands still until the test sets it."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def generator(clock: Clock, ip: bytes = IP) -> UniqueIdGenerator:
    return UniqueIdGenerator(ip, wall_clock=clock, rng=random.Random(5), getpid=lambda: 0x12345)


def test_id_is_32_hex_digits_of_address_pid_random_time_and_counter() -> None:
    ids = generator(Clock(MAY))
    prefix = unique_id_prefix(IP, 0x2345, random.Random(5).getrandbits(32))
    assert [unique_id(prefix, (12_345 << 16) + count) for count in (0, 1)] == [ids.next_id(), ids.next_id()]
    assert re.fullmatch("0A0000072345[0-9A-F]{8}00003039[0-9A-F]{4}", ids.next_id())
    assert f"<UniqueIdGenerator {prefix.hex().upper()}>" == repr(ids)


def test_id_of_an_ipv6_host_has_56_digits() -> None:
    found = generator(Clock(MAY), ip=bytes(15) + b"\x01").next_id()
    assert re.fullmatch("0{31}12345[0-9A-F]{8}00003039[0-9A-F]{4}", found)
    assert len(found) == 56


def test_ids_are_unique_within_a_millisecond_and_over_a_carry() -> None:
    clock = Clock(MAY)
    ids = generator(clock)
    drawn = [ids.next_id() for _ in range(70_000)]
    clock.now += 0.001
    drawn += [ids.next_id() for _ in range(70_000)]
    assert sorted(set(drawn)) == drawn


def test_ids_are_unique_over_threads() -> None:
    ids = UniqueIdGenerator(IP)
    drawn: list[str] = []

    def draw() -> None:
        drawn.extend([ids.next_id() for _ in range(20_000)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 80_000


def test_fork_gets_another_prefix() -> None:
    pid = 1
    ids = UniqueIdGenerator(IP, wall_clock=Clock(MAY), rng=random.Random(5), getpid=lambda: pid)
    parent = ids.next_id()
    pid = 2 + 0x10000  # the low 16 bits of a pid can be the parent's again
    child = ids.next_id()
    pid = 1 + 0x10000
    grandchild = ids.next_id()
    assert len({parent[:20], child[:20], grandchild[:20]}) == 3
    assert parent[8:12] == grandchild[8:12]
    assert parent[20:] == child[20:] == grandchild[20:]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_process_generates_other_ids() -> None:
    ids = UniqueIdGenerator(IP)
    parent = ids.next_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, ids.next_id().encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        found = stream.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert len(found) == 32
    assert found[:20] not in {parent[:20], ids.next_id()[:20]}


def test_a_clock_that_is_set_back_gives_no_id_twice() -> None:
    clock = Clock(MAY)
    ids = generator(clock)
    before = ids.next_id()
    clock.now -= 5
    assert f"{int(before, 16) + 1:032X}" == ids.next_id()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (datetime(2024, 12, 31, 23, 59, 59), datetime(2025, 1, 1)),
        (datetime(2024, 2, 29, 12), datetime(2024, 3, 1, 0, 0, 1)),
    ],
)
def test_new_month_restarts_the_time_with_a_new_prefix(before: datetime, after: datetime) -> None:
    clock = Clock(before.timestamp())
    ids = generator(clock)
    old = ids.next_id()
    clock.now = after.timestamp()
    new = ids.next_id()
    assert after.second * 1000 == int(new[20:28], 16)
    assert old[:12] == new[:12]
    assert old[12:20] != new[12:20]


def test_clock_set_back_over_a_month_start_keeps_counting() -> None:
    clock = Clock(datetime(2024, 6, 1).timestamp())
    ids = generator(clock)
    first = ids.next_id()
    clock.now -= 3600
    assert f"{int(first, 16) + 1:032X}" == ids.next_id()


def test_the_month_is_that_of_the_local_time_zone() -> None:
    assert milliseconds_of_month(MAY) == 12_345


def test_message_ids_have_34_digits_and_are_unique_over_threads() -> None:
    ids = MessageIdGenerator(wall_clock=lambda: 1_609_459_200.0 + 3, rng=random.Random(1), getpid=lambda: 0x54321)
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: ids.next_id(), range(4000)))
    assert len(set(drawn)) == 4000
    assert {len(one) for one in drawn} == {34}
    assert sorted(drawn)[0][:2] == "01"
    assert sorted(drawn)[0][14:] == f"4321{3:08X}{0:08X}"
    assert {one[14:26] for one in drawn} == {f"4321{3:08X}"}


def test_another_process_generates_other_message_ids() -> None:
    pid = 1
    ids = MessageIdGenerator(wall_clock=lambda: 1_700_000_000.0, rng=random.Random(1), getpid=lambda: pid)
    first = ids.next_id()
    pid = 65_537  # ids contain 16 bits of the process id
    second, third = ids.next_id(), ids.next_id()
    assert first[2:14] != second[2:14] == third[2:14]
    assert int(third, 16) == int(second, 16) + 1
    assert first[2:14] in repr(MessageIdGenerator(wall_clock=lambda: 0.0, rng=random.Random(1), getpid=lambda: 1))
