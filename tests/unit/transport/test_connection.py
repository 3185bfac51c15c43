"""When a connection writes: at once, or together with later requests."""

from __future__ import annotations

from collections.abc import Sequence

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


def test_pending_requests_fail_with_the_connection(connection: Connection) -> None:
    connection.submit(request(1))
    connection.submit(request(2))
    failed = connection.close(2.0, "closed")
    assert sorted(len(one.body[0]) for one, _ in failed) == [1, 2]
    assert connection.on_attention(2.0) == []
