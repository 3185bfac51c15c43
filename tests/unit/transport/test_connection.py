"""When a connection writes: at once, or together with later requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand
from rocketmq_spark.transport.remoting.connection import Connection, State
from rocketmq_spark.transport.remoting.requests import Request


class Stream:
    """A socket that accepts all bytes, and records the bytes of each call."""

    def __init__(self) -> None:
        self.written: list[list[RemotingCommand]] = []

    def sendmsg(self, pieces: Sequence[bytes]) -> int:
        frames, data = FrameBuffer(), b"".join(pieces)
        frames.feed(data)
        self.written.append([])
        while (command := frames.take()) is not None:
            self.written[-1].append(command)
        return len(data)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def attended() -> list[Connection]:
    return []


@pytest.fixture
def connection(stream: Stream, attended: list[Connection]) -> Connection:
    connection = Connection("broker:10911", lambda: 1.0, 3.0, attended.append, lambda *_: False)
    connection.state, connection._stream = State.OPEN, stream  # type: ignore[assignment]
    return connection


def request(nbytes: int) -> Request:
    return Request(310, {}, (bytes(nbytes),), 3.0, lambda _answer: None)


def lengths(stream: Stream) -> list[list[int]]:
    return [[len(command.body) for command in commands] for commands in stream.written]


def test_short_requests_during_a_write_are_sent_together(
    connection: Connection, stream: Stream, attended: list[Connection]
) -> None:
    for nbytes in (1, 2, 3):
        assert connection.submit(request(nbytes))
    assert lengths(stream) == [[1]]
    assert attended == [connection]
    assert connection.on_attention(1.0) == []
    assert lengths(stream) == [[1], [2, 3]]
    assert connection.on_attention(1.0) == []
    assert len(stream.written) == 2


def test_long_request_is_written_at_once_unless_others_wait(
    connection: Connection, stream: Stream, attended: list[Connection]
) -> None:
    connection.submit(request(1))
    connection.submit(request(20_000))
    assert lengths(stream) == [[1], [20_000]]
    assert attended == []
    connection.submit(request(2))
    connection.submit(request(20_001))
    assert lengths(stream) == [[1], [20_000]]
    connection.on_attention(1.0)
    assert lengths(stream) == [[1], [20_000], [2, 20_001]]


class Interrupted(Stream):
    """A socket that has taken the bytes when the user presses Ctrl+C."""

    def sendmsg(self, pieces: Sequence[bytes]) -> int:
        super().sendmsg(pieces)
        raise KeyboardInterrupt


def test_interrupted_write_closes_the_connection_and_is_not_repeated(
    connection: Connection, attended: list[Connection]
) -> None:
    stream = connection._stream = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        connection.submit(request(20_000))
    assert attended == [connection]
    [(_, answer)] = connection.on_attention(1.0)
    assert answer.error is not None
    assert answer.error.maybe_stored
    assert connection.state is State.CLOSED
    assert lengths(stream) == [[20_000]]


class Counted(Request):
    """A request that counts how often anything of such requests is read or compared."""

    uses = 0

    def __getattribute__(self, name: str) -> Any:
        Counted.uses += 1
        return super().__getattribute__(name)

    def __eq__(self, other: object) -> bool:
        Counted.uses += 1
        return self is other

    __hash__ = Request.__hash__


def test_time_for_many_unanswered_requests_is_linear(connection: Connection) -> None:
    for _ in range(1_000):
        connection.submit(Counted(310, {}, (b"x",), 3.0))
    connection.on_attention(1.0)
    Counted.uses = 0
    assert len(connection.sweep(10.0)) == 1_000
    assert Counted.uses < 100_000


def test_time_for_many_unsent_requests_is_linear(blocked: Connection) -> None:
    blocked.submit(Request(310, {}, (bytes(20_000),), 60.0))
    for timeout in (60.0, 3.0):
        for _ in range(500):
            blocked.submit(Counted(310, {}, (b"x",), timeout, deadline=1.0 + timeout))
    Counted.uses = 0
    assert len(blocked.sweep(10.0)) == 500
    assert Counted.uses < 100_000


class Slow:
    """A socket that accepts a number of bytes."""

    def __init__(self) -> None:
        self.accepts = 100
        self.written = b""

    def sendmsg(self, pieces: Sequence[bytes]) -> int:
        taken = b"".join(pieces)[: self.accepts]
        if not taken:
            raise BlockingIOError
        self.accepts -= len(taken)
        self.written += taken
        return len(taken)

    def lengths(self) -> list[int]:
        frames, lengths = FrameBuffer(), []
        frames.feed(self.written)
        while (command := frames.take()) is not None:
            lengths.append(len(command.body))
        return lengths


@pytest.fixture
def times() -> list[float]:
    """Return a list whose last item is the time."""
    return [1.0]


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def blocked(slow: Slow, times: list[float]) -> Connection:
    connection = Connection("broker:10911", lambda: times[-1], 3.0, lambda _: None, lambda *_: False)
    connection.state, connection._stream = State.OPEN, slow  # type: ignore[assignment]
    return connection


def test_a_request_is_not_written_after_its_time(blocked: Connection, slow: Slow, times: list[float]) -> None:
    second = request(20_001)
    second.write_by = 2.0
    for one in (request(20_000), second, request(20_002)):
        blocked.submit(one)
    times.append(2.0)
    slow.accepts = 100_000
    assert blocked.on_writable(2.0) == []
    assert slow.lengths() == [20_000, 20_002]
    ((failed, answer),) = blocked.sweep(2.0)
    assert failed is second
    assert "was not sent in time" in str(answer.error)
    assert blocked.state is State.OPEN


def test_the_rest_of_a_request_is_not_written_after_its_time(
    blocked: Connection, slow: Slow, times: list[float]
) -> None:
    first, second = request(20_000), request(20_001)
    first.write_by = 2.0
    blocked.submit(first)
    blocked.submit(second)
    times.append(2.0)
    slow.accepts = 100_000
    failed = blocked.on_writable(2.0)
    assert len(slow.written) == 100
    assert blocked.state is State.CLOSED
    assert [one for one, _ in failed] == [first, second]
    assert "may have been executed" in str(failed[0][1].error)
    assert "this request was not sent" in str(failed[1][1].error)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_connection_that_blocks_a_late_request_is_closed(
    blocked: Connection, slow: Slow, times: list[float], *, blocks: bool
) -> None:
    slow.accepts = 100 if blocks else 100_000
    one = request(20_000)
    one.write_by = 2.0
    blocked.submit(one)
    assert blocked.due == 2.0
    times.append(2.0)
    # An answer may come later.
    assert len(blocked.sweep(2.0)) == blocks
    assert blocked.state is (State.CLOSED if blocks else State.OPEN)


def test_pending_requests_fail_with_the_connection(connection: Connection) -> None:
    connection.submit(request(1))
    connection.submit(request(2))
    failed = connection.close(2.0, "closed")
    assert sorted(len(one.body[0]) for one, _ in failed) == [1, 2]
    assert connection.on_attention(2.0) == []
