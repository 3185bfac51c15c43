from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingCommandException, TooLongFrameException
from rocketmq_spark.protocol.remoting.command import MAX_FRAME, FrameBuffer, RemotingCommand
from tests.support.frames import SerializeType, encode_command
from tests.support.strategies import chunkings, commands
from tests.vectors import load

GOLDEN = [bytes.fromhex(frame["response"]["hex"]) for frame in load("remoting_frames.json")["frames"]]


def take_all(buffer: FrameBuffer) -> list[RemotingCommand]:
    return list(iter(buffer.take, None))


def commands_of(data: bytes) -> list[RemotingCommand]:
    buffer = FrameBuffer()
    buffer.feed(data)
    return take_all(buffer)


def test_empty_buffer_has_no_command() -> None:
    assert FrameBuffer().take() is None


@pytest.mark.parametrize("frame", GOLDEN, ids=range(len(GOLDEN)))
def test_whole_and_byte_by_byte_give_the_same_command(frame: bytes) -> None:
    buffer = FrameBuffer()
    for at in range(len(frame) - 1):
        buffer.feed(frame[at : at + 1])
        assert buffer.take() is None
    buffer.feed(frame[-1:])
    assert [buffer.take()] == commands_of(frame)
    assert buffer.take() is None


@pytest.mark.parametrize("frame", GOLDEN, ids=range(len(GOLDEN)))
def test_trailing_bytes_wait_for_the_rest_of_their_frame(frame: bytes) -> None:
    buffer = FrameBuffer()
    buffer.feed(frame + frame[:9])
    assert [buffer.take(), buffer.take()] == [*commands_of(frame), None]
    buffer.feed(frame[9:])
    assert [buffer.take(), buffer.take()] == [*commands_of(frame), None]


def test_several_frames_at_once_come_out_in_order() -> None:
    assert [command.opaque for command in commands_of(b"".join(GOLDEN))] == [1, 2, 3, 4, 5, 6, 7, 114]


@given(st.data(), st.lists(st.tuples(commands(), st.sampled_from(SerializeType)), max_size=6))
def test_any_chunking_gives_the_same_commands(
    data: st.DataObject, sent: list[tuple[RemotingCommand, SerializeType]]
) -> None:
    stream = b"".join(encode_command(command, serialize_type) for command, serialize_type in sent)
    buffer = FrameBuffer()
    received = []
    for piece in data.draw(chunkings(stream)):
        buffer.feed(piece)
        received += take_all(buffer)
    assert received == [command for command, _ in sent]


@given(st.data())
def test_taking_after_all_chunks_gives_the_same_commands(data: st.DataObject) -> None:
    buffer = FrameBuffer()
    for piece in data.draw(chunkings(b"".join(GOLDEN))):
        buffer.feed(piece)
    assert take_all(buffer) == commands_of(b"".join(GOLDEN))


def test_bodies_stay_valid_after_the_buffer_is_reused() -> None:
    memory = bytearray(encode_command(RemotingCommand(0, 1, body=b"first")))
    buffer = FrameBuffer()
    buffer.feed(memoryview(memory))
    first = buffer.take()
    memory[:] = bytes(len(memory))
    buffer.feed(encode_command(RemotingCommand(0, 2, body=b"second" * 1000)))
    second = buffer.take()
    assert first is not None
    assert second is not None
    assert (first.body, second.body) == (b"first", b"second" * 1000)


def test_large_frame_is_assembled_from_small_pieces() -> None:
    command = RemotingCommand(0, 1, {"msgId": "7F" * 500_000}, body=bytes(range(256)) * 4096, flag=1)
    frame = encode_command(command)
    buffer = FrameBuffer()
    for at in range(0, len(frame), 1000):
        assert buffer.take() is None
        buffer.feed(frame[at : at + 1000])
    assert buffer.take() == command


@pytest.mark.parametrize("length", [-1, -(2**31), 0, 3, MAX_FRAME - 3, 2**31 - 1])
def test_frame_length_out_of_bounds_is_rejected_early_and_permanently(length: int) -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack(">i", length))
    with pytest.raises(RemotingCommandException, match=f"length {length}") as first:
        buffer.take()
    assert isinstance(first.value, TooLongFrameException) == (length > MAX_FRAME - 4)
    buffer.feed(GOLDEN[0])
    with pytest.raises(RemotingCommandException, match=f"length {length}"):
        buffer.take()


def test_largest_frame_is_accepted_and_one_byte_more_is_not() -> None:
    command = RemotingCommand(0, 1, body=b"x" * 100)
    frame = encode_command(command)
    exact = FrameBuffer(max_frame=len(frame))
    exact.feed(frame)
    assert exact.take() == command
    small = FrameBuffer(max_frame=len(frame) - 1)
    small.feed(frame)
    with pytest.raises(RemotingCommandException, match=f"length {len(frame) - 4}, allowed are 4 to {len(frame) - 5}"):
        small.take()


def test_frame_limit_equals_that_of_a_server() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack(">i", 16_777_212))
    assert buffer.take() is None


def test_frames_before_a_damaged_one_are_returned_and_later_ones_not() -> None:
    buffer = FrameBuffer()
    buffer.feed(GOLDEN[0] + b"\0\0\0\6\0\0\0\2[]" + GOLDEN[1])
    assert buffer.take() == commands_of(GOLDEN[0])[0]
    for _ in range(2):
        with pytest.raises(RemotingCommandException, match="instead of an object"):
            buffer.take()


@given(st.binary(max_size=60))
def test_any_bytes_give_commands_or_are_refused(data: bytes) -> None:
    buffer = FrameBuffer(max_frame=64)
    buffer.feed(data)
    try:
        received = take_all(buffer)
    except RemotingCommandException:
        return
    assert all(isinstance(command, RemotingCommand) for command in received)


def test_repr_shows_the_number_of_pending_bytes() -> None:
    buffer = FrameBuffer()
    buffer.feed(b"\0\0\0")
    assert repr(buffer) == "<FrameBuffer waiting=3 bytes max_frame=16777216>"
