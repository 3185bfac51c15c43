"""The table of properties covers all names, and agrees with the encoders."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import rocketmq_spark.model.properties as const
from rocketmq_spark.arrow.batcher import GrpcBatcher
from rocketmq_spark.arrow.encoders import MessageIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.model import Property
from rocketmq_spark.arrow.schema import COLUMN_OF, COLUMNS, check_grpc
from rocketmq_spark.errors import MQClientException, SchemaError
from rocketmq_spark.model.hashes import NOT_HASHED
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.model.properties import CARRIED, Carried
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import MessageEncoder
from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest
from rocketmq_spark.protocol.grpc.messages import encode_send_request, message_ext
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_properties, encode_single
from tests.support.encoding import batch_options, encode, queues_of

# A valid value of the property, if "7" is invalid.
VALUES = {const.TRAN_MSG: "true", const.WAIT: "false", const.TIMER_DELIVER_MS: "1900000000000"}
ENCODER = MessageEncoder(ProducerOptions.of(max_message_size=1000), lambda: "id")
SEPARATORS = {const.NAME_VALUE_SEPARATOR, const.PROPERTY_SEPARATOR}


def message_with(name: str) -> Message:
    return Message("T", b"x", properties={name: VALUES.get(name, "7")})


def over_grpc(*batches: EncodedBatch) -> list[Message]:
    """Return the messages that a proxy gets."""
    requests = [SendRequest(batch, MessageQueue("T", "p", 0), "p:1", "g", "TBW102", 4, 10) for batch in batches]
    return [
        message_ext(message)
        for request in requests
        for message in SendMessageRequest.FromString(encode_send_request(request)).messages
    ]


def test_every_property_name_has_an_entry_and_every_entry_a_name() -> None:
    names = {value for name, value in vars(const).items() if isinstance(value, str) and not name.startswith("_")}
    assert names - SEPARATORS == CARRIED.keys()


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_remoting_single_message_carries_each_property_of_the_table(name: str) -> None:
    message = message_with(name)
    assert CARRIED[name].single is Carried.PROPERTY
    assert decode_properties(encode_single(message).properties.encode()) == message.properties


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_remoting_batch_carries_each_property_of_the_table(name: str) -> None:
    message = message_with(name)
    if CARRIED[name].batch is Carried.ALONE:
        with pytest.raises(MQClientException, match=r"has a delay|has a priority or a lite|is a half message"):
            ENCODER.encode_batch([message])
        return
    assert CARRIED[name].batch is Carried.PROPERTY
    batch = ENCODER.encode_batch([message]).encoded
    [carried] = decode_batch(b"".join(batch.body), "T")
    assert carried.properties == {const.UNIQ_KEY: "id", **message.properties}


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_grpc_carries_each_property_of_the_table(name: str) -> None:
    message, how = message_with(name), CARRIED[name].grpc
    batch = encode_single(message)
    if how is Carried.REFUSED:
        with pytest.raises(MQClientException, match=f"gRPC cannot carry the property {name}"):
            over_grpc(batch)
        return
    request = SendRequest(batch, MessageQueue("T", "p", 0), "p:1", "g", "TBW102", 4, 10)
    [sent] = SendMessageRequest.FromString(encode_send_request(request)).messages
    assert dict(sent.user_properties) == (message.properties if how is Carried.PROPERTY else {})
    # A proxy turns a relative delay into a delivery time.
    relative = {const.TIMER_DELAY_MS: "17", const.TIMER_DELAY_SEC: "7010"}
    expected = {const.TIMER_DELIVER_MS: relative[name]} if name in relative else message.properties
    assert message_ext(sent).properties == ({} if how is Carried.DROPPED else expected)


ROWS: dict[str, Any] = {
    "body": pa.array([b"0", b"1", b"2", b"3", b"4", b"5"]),
    "tags": pa.array(["a", None, "b", None, None, None]),
    "keys": pa.array([None, "k", None, None, None, None]),
    "shardingKey": pa.array([None, None, "s", None, None, None]),
    "delayMs": pa.array([None, None, None, 7, None, None]),
    "deliverTime": pa.array([None, None, None, None, 1_900_000_000_000, None], pa.timestamp("ms", "UTC")),
    "properties": pa.array([None, [("n", "1")], None, None, None, None], pa.map_(pa.string(), pa.string())),
}


def grpc_messages(row_ids: RowIds) -> list[Message]:
    batcher = GrpcBatcher(
        batch_options(topic="T"),
        partition_id=3,
        queues_of=queues_of,
        unique_ids=MessageIds(pid=1, wall_clock=lambda: 1.7e9, rng=random.Random(4)),
        row_ids=row_ids,
        born_host="h",
        epoch_offset=0.0,
    )
    done = list(batcher.add(pa.RecordBatch.from_pydict(ROWS), 0.0)) + list(batcher.flush())
    return over_grpc(*(batch for batch, _ in done))


def test_rows_over_grpc_have_the_properties_of_rows_over_remoting() -> None:
    row_ids = RowIds("w", 0, 0, None)
    carried = {message.body: message.properties for message in grpc_messages(row_ids)}
    for batch, _ in encode([pa.RecordBatch.from_pydict(ROWS)], batch_options(topic="T"), row_ids=row_ids):
        body, properties = b"".join(batch.body), decode_properties(batch.properties.encode())
        for message in decode_batch(body, "T") if batch.batch else [Message("T", body, properties=properties)]:
            expected = {name: value for name, value in message.properties.items() if name != const.UNIQ_KEY}
            if "TIMER_DELAY_MS" in expected:
                expected[const.TIMER_DELIVER_MS] = str(10 + int(expected.pop(const.TIMER_DELAY_MS)))
            sent = carried.pop(message.body)
            assert {name: value for name, value in sent.items() if name != const.UNIQ_KEY} == expected
    assert carried == {}


def test_grpc_batch_refuses_a_property_without_an_entry() -> None:
    class OtherName(RowIds):
        def of_content(self, first_row: int, *content: Any) -> Property:
            return replace(super().of_content(first_row, *content), name="NEW_PROPERTY")

    with pytest.raises(KeyError, match="NEW_PROPERTY"):
        grpc_messages(OtherName("w", 0, 0, None))


def test_properties_of_columns_are_hashed_or_excluded_by_readers() -> None:
    assert COLUMN_OF.keys() <= CARRIED.keys()
    assert {name for name in COLUMN_OF if not CARRIED[name].hashed} <= NOT_HASHED
    assert not {name for name in COLUMN_OF if CARRIED[name].hashed} & NOT_HASHED


def test_grpc_batches_refuse_a_property_that_grpc_does_not_carry() -> None:
    class OtherName(RowIds):
        def of_content(self, first_row: int, *content: Any) -> Property:
            return replace(super().of_content(first_row, *content), name=const.TTL)

    with pytest.raises(ValueError, match="batches over gRPC carry the property TTL not at all"):
        grpc_messages(OtherName("w", 0, 0, None))


def test_column_whose_property_grpc_refuses_is_an_error() -> None:
    for name, column in COLUMNS.items():
        schema = pa.schema({"body": pa.binary(), name: pa.int32()})
        if column.makes and CARRIED[column.makes].grpc is Carried.REFUSED:
            with pytest.raises(SchemaError, match=f"column {name}: over gRPC"):
                check_grpc(schema)
        else:
            check_grpc(schema)
