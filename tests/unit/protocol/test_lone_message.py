"""The names of the single message of a request, and the error for invalid bytes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message
from rocketmq_spark.protocol.batches import delimited_fields, lone_message, read_varint
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest
from rocketmq_spark.protocol.remoting.records import encode_batch
from tests.support.strategies import messages, property_texts


def batch_of(body: bytes, encoding: Encoding, rows: int = 1) -> EncodedBatch:
    return EncodedBatch("orders", (body[:2], memoryview(body)[2:]), rows, len(body), encoding=encoding)


@given(messages(st.just("orders")))
def test_single_item_of_a_remoting_batch_is_decoded(message: Message) -> None:
    assert lone_message(batch_of(encode_batch([message]), Encoding.REMOTING)) == message


@given(
    st.binary(max_size=300),
    st.fixed_dictionaries({}, optional={"TAGS": property_texts, "KEYS": property_texts, "UNIQ_KEY": property_texts}),
    st.dictionaries(property_texts, property_texts, max_size=3),
)
def test_tags_keys_and_id_of_a_grpc_message_are_decoded(
    body: bytes, named: dict[str, Any], more: dict[str, str]
) -> None:
    message = pb.Message(topic=pb.Resource(name="orders"), user_properties=more, body=body)
    system = message.system_properties
    if "TAGS" in named:
        system.tag = named["TAGS"]
    if "UNIQ_KEY" in named:
        system.message_id = named["UNIQ_KEY"]
    system.keys.extend([named["KEYS"]] if "KEYS" in named else [])
    system.message_type, system.queue_id, system.born_host = pb.NORMAL, 2**31 - 1, "host"
    system.born_timestamp.FromMilliseconds(1_700_000_000_123)
    request = SendMessageRequest(messages=[message]).SerializeToString()
    assert lone_message(batch_of(request, Encoding.GRPC)) == Message("orders", body, properties=named)


def test_lone_message_is_none_for_several_or_no_messages() -> None:
    body = SendMessageRequest(messages=[pb.Message(body=b"x")] * 2).SerializeToString()
    assert lone_message(batch_of(body, Encoding.GRPC, rows=2)) is None
    assert lone_message(batch_of(b"", Encoding.GRPC)) is None
    assert lone_message(batch_of(b"", Encoding.REMOTING)) is None


@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_raise_a_rocketmq_error(body: bytes) -> None:
    with contextlib.suppress(RemotingCommandException):
        lone_message(batch_of(body, Encoding.GRPC))


@given(st.integers(0, 2**63 - 1), st.binary(max_size=3))
def test_a_number_is_read_as_it_was_written(number: int, before: bytes) -> None:
    written = pb.SystemProperties(born_timestamp={"seconds": number}).born_timestamp.SerializeToString()[1:]
    if number:
        data = memoryview(before + written + b"\x07")
        assert read_varint(data, len(before)) == (number, len(before) + len(written))


@pytest.mark.parametrize("data", [b"\x80", b"\x0a", b"\x0a\x02a", b"\x0d\x00\x00\x00\x00", b"\x0a\x00\xff"])
def test_truncated_or_mistyped_field_is_an_error(data: bytes) -> None:
    with pytest.raises(RemotingCommandException):
        list(delimited_fields(memoryview(data)))
