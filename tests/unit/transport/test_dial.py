from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from rocketmq_spark.model.route import parse_address
from rocketmq_spark.transport.dial import Candidate, Dial
from tests.support.peer import address_of, full_listener
from tests.support.processes import PATIENCE


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def closed(dial: Dial) -> None:
    for sock in (dial.sock, *dial.abandoned):
        if sock is not None:
            sock.close()


def finish(dial: Dial, now: float = 0.0) -> None:
    while not dial.connected and not dial.failed:
        if dial.sock is not None:
            select.select([], [dial.sock], [], 20.0)
        dial.on_ready(now)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:9876", ("127.0.0.1", 9876)),
        ("broker.example:10911", ("broker.example", 10911)),
        ("[::1]:9876", ("::1", 9876)),
        ("fe80::1:9876", ("fe80::1", 9876)),
    ],
)
def test_an_address_is_split_at_its_last_colon(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


def test_unanswered_name_lookups_use_at_most_64_threads() -> None:
    answer, failed = threading.Event(), threading.Event()

    def look_up(*_: object) -> list[Candidate]:
        answer.wait(PATIENCE)
        raise OSError("never mind")

    dials = [Dial(f"broker-{number}.example:1", 3.0, failed.set, look_up) for number in range(65)]
    try:
        for dial in dials:
            dial.begin(0.0)
        assert [dial.failed for dial in dials] == [False] * 64 + [True]
        assert "64 names are being looked up already" in dials[-1].reasons
    finally:
        answer.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rocketmq-spark-lookup-"):
            thread.join(PATIENCE)


def test_only_the_first_addresses_of_a_name_are_listed_in_the_error() -> None:
    looked_up = threading.Event()
    # Port 0 can't be dialled.
    candidates: list[Candidate] = [(socket.AF_INET, (f"127.0.{number // 250}.1", 0)) for number in range(3000)]
    dial = Dial("broker.example:1", 3.0, looked_up.set, lambda *_: candidates)
    dial.begin(0.0)
    assert looked_up.wait(PATIENCE)
    dial.step(0.0)
    while not dial.failed:
        dial.on_ready(0.0)
    closed(dial)
    assert dial.reasons.endswith("; and 2992 more addresses")
    assert len(dial.reasons) < 1000


@pytest.mark.parametrize("address", ["", "host", "host:", ":9876", "host:0", "host:65536", "host:9x", "host:-1"])
def test_text_that_is_not_host_and_port_is_rejected(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(address)


def test_a_numeric_address_is_dialled_at_once(listener: socket.socket) -> None:
    dial = Dial(address_of(listener), 3.0, lambda: None)
    dial.begin(0.0)
    finish(dial)
    assert dial.connected
    assert dial.sock is not None
    assert dial.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    closed(dial)


def test_a_refused_address_fails_with_its_reason(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    dial = Dial(address, 3.0, lambda: None)
    dial.begin(0.0)
    finish(dial)
    assert dial.failed
    assert dial.reasons == f"{address}: [Errno 111] Connection refused"
    assert isinstance(dial.failures[0][1], ConnectionRefusedError)
    closed(dial)


def test_silent_address_leaves_time_for_the_other_addresses() -> None:
    with full_listener() as silent, socket.create_server(("127.0.0.1", 0)) as listening:
        addresses = [(socket.AF_INET, sock.getsockname()) for sock in (silent, listening)]
        woken = threading.Event()
        dial = Dial("somewhere:9876", 9.0, woken.set, lambda _host, _port: addresses)
        dial.begin(0.0)
        assert woken.wait(PATIENCE)
        dial.step(1.0)
        assert dial.due == 5.0
        dial.step(4.9)
        assert dial.failures == []
        dial.step(5.0)
        assert [tried for tried, _ in dial.failures] == [address_of(silent)]
        finish(dial, 5.0)
        assert dial.connected
        closed(dial)


def test_every_address_of_a_name_is_tried_and_named() -> None:
    refused = [(socket.AF_INET, ("127.0.0.1", 1)), (socket.AF_INET, ("127.0.0.2", 1))]
    woken = threading.Event()
    dial = Dial("somewhere:1", 9.0, woken.set, lambda _host, _port: refused)
    dial.begin(0.0)
    assert woken.wait(PATIENCE)
    dial.step(0.0)
    finish(dial)
    assert dial.failed
    assert [tried for tried, _ in dial.failures] == ["127.0.0.1:1", "127.0.0.2:1"]
    closed(dial)


def test_a_name_that_has_no_address_fails_with_the_resolvers_reason() -> None:
    def unknown(host: str, _port: int) -> list[Candidate]:
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is unknown")

    woken = threading.Event()
    dial = Dial("nowhere:9876", 3.0, woken.set, unknown)
    dial.begin(0.0)
    assert woken.wait(PATIENCE)
    dial.step(0.0)
    assert dial.failed
    assert "nowhere is unknown" in dial.reasons


def test_a_name_that_is_not_resolved_in_time_fails() -> None:
    over, woken = threading.Event(), threading.Event()

    def slow(_host: str, _port: int) -> list[Candidate]:
        over.wait(PATIENCE)
        return []

    dial = Dial("somewhere:9876", 3.0, woken.set, slow)
    dial.begin(0.0)
    dial.step(2.9)
    assert not dial.failed
    dial.step(3.0)
    assert dial.failed
    assert "not resolved in time" in dial.reasons
    over.set()
    assert woken.wait(PATIENCE)
