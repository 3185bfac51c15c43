"""The parts of a message are counted in its bytes, before a parser allocates memory for them."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message as ProtoMessage
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.batches import check_parts, read_varint
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.transport.grpc.client import _fields_of

NUMBERS = st.integers(0, 2**31 - 1)
QUEUES = st.builds(
    pb.MessageQueue,
    topic=st.builds(pb.Resource, name=st.text(max_size=5)),
    id=NUMBERS,
    broker=st.builds(
        pb.Broker,
        name=st.text(max_size=5),
        endpoints=st.builds(pb.Endpoints, addresses=st.lists(st.builds(pb.Address, port=NUMBERS), max_size=3)),
    ),
    accept_message_types=st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4),
)


def parts(message: ProtoMessage) -> int:
    """Count the parts of a parsed message: what `check_parts` does on its bytes."""
    total = 0
    for field, value in message.ListFields():
        values = list(value) if field.is_repeated else [value]
        if field.message_type is not None:
            total += len(values) + sum(map(parts, values))
        elif field.is_repeated:
            # Packed values: the field, and one byte per value.
            total += 1 + len(values)
    return total


@given(st.lists(QUEUES, max_size=5))
def test_parts_of_a_reply_are_counted_exactly(queues: list[pb.MessageQueue]) -> None:
    reply = service.QueryRouteResponse(status=pb.Status(code=pb.OK), message_queues=queues)
    fields, count = _fields_of(reply.DESCRIPTOR), parts(reply)
    check_parts(reply.SerializeToString(), fields, count)
    with pytest.raises(RemotingCommandException, match=f"more than {count - 1} parts"):
        check_parts(reply.SerializeToString(), fields, count - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"\x12",
        b"\x12\x02\x0a",
        b"\x12\x03\x0a\x02x",
        b"\x12\x80",
        b"\x13",
        b"\x80" * 100,
        b"\x0d\x00",
        b"\x12\x01\x0a\x00",
    ],
)
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(RemotingCommandException):
        check_parts(data, _fields_of(service.QueryRouteResponse.DESCRIPTOR), 1_000)


def test_a_number_that_does_not_end_is_refused_after_ten_bytes() -> None:
    with pytest.raises(RemotingCommandException, match="does not end"):
        read_varint(b"\xff" * 16_000_000, 0)


@pytest.mark.parametrize("value", [b"\x08\x01", b"\x12\x00", b"\x10\x01"], ids=["number", "text", "wrong type"])
def test_repeated_single_values_are_counted_too(value: bytes) -> None:
    fields = _fields_of(service.QueryRouteResponse.DESCRIPTOR)
    status = pb.Status(code=pb.OK).SerializeToString() + value * 19
    check_parts(b"\x0a" + bytes([len(status)]) + status, fields, 10)
    status += value
    with pytest.raises(RemotingCommandException, match="more than 20 single values in 46 bytes"):
        check_parts(b"\x0a" + bytes([len(status)]) + status, fields, 10)
