from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.command import FrameBuffer
from rocketmq_spark.transport.remoting.requests import IOV_MAX, MAX_FRAME_LENGTH, WRITE_LIMIT, Outbound, Request


def encoded(body: tuple[Buffer, ...], opaque: int = 0) -> Request:
    request = Request(310, {"a": "pg"}, body, 3.0, lambda _: None)
    request.encode(opaque)
    return request


bodies = st.lists(st.binary(max_size=40), max_size=6).map(tuple)


helpings = st.lists(st.integers(0, 300), min_size=1, max_size=12).filter(any)


@given(st.lists(bodies, min_size=1, max_size=6), helpings)
def test_the_socket_gets_the_same_bytes_however_few_it_takes_at_once(
    all_bodies: list[tuple[bytes, ...]], taken: list[int]
) -> None:
    helping = itertools.cycle(taken)
    outbound, written, finished = Outbound(), b"", []
    for opaque, body in enumerate(all_bodies):
        outbound.append(encoded(body, opaque))
    while outbound:
        offered = b"".join(outbound.gather())
        assert offered, "a socket would be offered nothing"
        sent = min(next(helping), len(offered))
        written += offered[:sent]
        finished += outbound.advance(sent)
        assert all(request.unsent == 0 for request in finished)
    frames = FrameBuffer()
    frames.feed(written)
    commands = [frames.take() for _ in all_bodies]
    assert [(command.opaque, bytes(command.body)) for command in commands if command] == [
        (opaque, b"".join(body)) for opaque, body in enumerate(all_bodies)
    ]
    assert frames.take() is None
    assert [request.opaque for request in finished] == list(range(len(all_bodies)))


def test_one_gather_has_at_most_iov_max_pieces() -> None:
    outbound = Outbound()
    outbound.append(encoded((b"x",) * (3 * IOV_MAX)))
    outbound.append(encoded((b"y",) * 10))
    gathers = []
    while outbound:
        gathered = outbound.gather()
        gathers.append(len(gathered))
        outbound.advance(sum(map(len, gathered)))
    assert max(gathers) == IOV_MAX
    assert sum(gathers) == 3 * IOV_MAX + 10 + 2


def test_one_gather_has_at_most_the_write_limit_of_bytes() -> None:
    outbound = Outbound()
    outbound.append(encoded((bytes(3 * WRITE_LIMIT),)))
    assert sum(map(len, outbound.gather())) == WRITE_LIMIT


def test_body_is_written_without_a_copy() -> None:
    body = bytes(100_000)
    outbound = Outbound()
    outbound.append(encoded((body,)))
    assert outbound.gather()[1] is body


def test_request_is_marked_as_started_with_its_first_byte() -> None:
    outbound = Outbound()
    first, second = encoded((b"abc",)), encoded((b"def",))
    outbound.append(first)
    outbound.append(second)
    outbound.advance(1)
    assert (first.started, second.started) == (True, False)
    outbound.advance(first.unsent)
    assert second.started is False
    outbound.advance(1)
    assert second.started is True


def test_frame_above_the_limit_of_a_server_is_rejected() -> None:
    encoded((bytes(MAX_FRAME_LENGTH - 200),))
    with pytest.raises(MQClientException, match="at most 16777212"):
        encoded((bytes(MAX_FRAME_LENGTH - 50),))
