"""Messages to gRPC messages and back, and the meaning of replies."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    CompressionError,
    DelayRefusedException,
    MessageRefusedException,
    MQBrokerException,
    MQClientException,
    UserRefusedException,
)
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE
from rocketmq_spark.protocol.compression import CompressionType, compress, decompress
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb.service_pb2 import (
    RecoverOrphanedTransactionCommand,
    SendMessageRequest,
    SendMessageResponse,
    SendResultEntry,
)
from rocketmq_spark.protocol.grpc.messages import (
    encode_send_request,
    message_ext,
    outcome_of,
    restamp,
    transaction_check,
)
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import encode_batch, encode_properties
from tests.support.strategies import key_items, property_names, visible_texts

BORN = 1_700_000_000_123
QUEUE = MessageQueue("orders", "p:8081", 0)

bodies = st.binary(min_size=1, max_size=60) | st.sampled_from([b"a" * 127, b"a" * 128, b"a" * 16_383, b"a" * 16_384])
user_properties = st.dictionaries(property_names, visible_texts, max_size=4)
# Properties that messages of every type may have, and at most one type.
plain: dict[str, st.SearchStrategy[Any]] = {
    "tags": st.none() | visible_texts,
    "keys": st.none() | st.lists(key_items, min_size=1, max_size=3) | key_items,
    "properties": user_properties,
    "wait_store_msg_ok": st.booleans(),
}
kinds: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"sharding_key": "gr\u00fcn"}, {"deliver_ms": BORN + 7}, {"delay_ms": 7}, {"delay_sec": 7}]
)


@st.composite
def drawn_messages(draw: st.DrawFn, kind: st.SearchStrategy[dict[str, Any]] = kinds) -> Message:
    drawn = Message.of("orders", draw(bodies), **draw(st.fixed_dictionaries(plain)), **draw(kind))
    return drawn.with_properties({"UNIQ_KEY": f"{draw(st.integers(0, 2**128 - 1)):032X}"})


def request_of(batch: EncodedBatch, born_timestamp: int = BORN) -> SendRequest:
    return SendRequest(batch, QUEUE, "p:8081", "pg", "TBW102", 4, born_timestamp)


def single(message: Message, sys_flag: int = 0) -> SendRequest:
    properties = encode_properties(message.properties).decode()
    return request_of(
        EncodedBatch(
            message.topic,
            (message.body,),
            1,
            len(message.body),
            batch=False,
            properties=properties,
            flag=message.flag,
            sys_flag=sys_flag,
        )
    )


def batch_of(messages: Sequence[Message], **facts: Any) -> SendRequest:
    body = encode_batch(messages)
    # The pieces are slices of larger buffers, cut anywhere.
    pieces = (memoryview(body)[:3], memoryview(body)[3:])
    return request_of(EncodedBatch("orders", pieces, len(messages), len(body), properties="WAIT\x01true\x02", **facts))


def sent(request: SendRequest, **facts: Any) -> list[pb.Message]:
    return list(SendMessageRequest.FromString(encode_send_request(request, **facts)).messages)


def as_stored(message: Message) -> dict[str, str]:
    """Return the properties that a reader gets: without WAIT, and with a delivery time instead of a delay."""
    dropped = ("WAIT", "PGROUP", "INSTANCE_ID", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")
    stored = {name: text for name, text in message.properties.items() if name not in dropped}
    delay = message.delay_ms or message.delay_sec * 1000
    return {**stored, "TIMER_DELIVER_MS": str(BORN + delay)} if delay else stored


@given(drawn_messages())
def test_every_message_round_trips(message: Message) -> None:
    [encoded] = sent(single(message))
    found = message_ext(encoded)
    assert (found.topic, found.body, found.flag, found.born_timestamp) == ("orders", message.body, 0, BORN)
    assert found.properties == as_stored(message)


@given(st.lists(drawn_messages(st.just({})), min_size=1, max_size=8))
def test_every_message_of_a_batch_round_trips_in_order(messages: list[Message]) -> None:
    found = [message_ext(encoded) for encoded in sent(batch_of(messages))]
    assert [one.body for one in found] == [message.body for message in messages]
    assert [one.properties for one in found] == [as_stored(message) for message in messages]
    assert {(one.topic, one.born_timestamp) for one in found} == {("orders", BORN)}


def test_each_system_property_is_encoded_in_its_field() -> None:
    message = Message.of("orders", b"body", tags="red", keys=["k1", "k2"], properties={"colour": "gr\u00fcn"})
    [encoded] = sent(single(message.with_properties({"UNIQ_KEY": "any id", "INSTANCE_ID": "ns", "PGROUP": "pg"})))
    assert encoded == pb.Message(
        topic=pb.Resource(name="orders"),
        user_properties={"colour": "gr\u00fcn"},
        system_properties=pb.SystemProperties(
            tag="red",
            keys=["k1 k2"],
            message_id="any id",
            body_encoding=pb.IDENTITY,
            message_type=pb.NORMAL,
            born_timestamp={"seconds": 1_700_000_000, "nanos": 123_000_000},
        ),
        body=b"body",
    )


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, pb.NORMAL),
        ({"TRAN_MSG": "false"}, pb.NORMAL),
        ({"__SHARDINGKEY": "k"}, pb.FIFO),
        ({"TIMER_DELIVER_MS": "1700000001000"}, pb.DELAY),
        ({"TIMER_DELAY_MS": "877"}, pb.DELAY),
        ({"TRAN_MSG": "true", "PGROUP": "pg"}, pb.TRANSACTION),
        ({"_SYS_MSG_PRIORITY_": "0"}, pb.PRIORITY),
        ({"__LITE_TOPIC": "chat-1"}, pb.LITE),
    ],
)
def test_properties_determine_the_message_type(properties: dict[str, str], kind: int) -> None:
    [encoded] = sent(single(Message("orders", b"body", properties=properties)))
    system = encoded.system_properties
    assert system.message_type == kind
    assert system.message_group == properties.get("__SHARDINGKEY", "")
    assert system.HasField("delivery_timestamp") == (kind == pb.DELAY)
    assert system.HasField("priority") == (kind == pb.PRIORITY)
    assert system.lite_topic == properties.get("__LITE_TOPIC", "")
    if kind == pb.DELAY:
        assert system.delivery_timestamp.ToMilliseconds() == 1_700_000_001_000
    assert not encoded.user_properties


def test_namespace_and_born_host_are_encoded_in_their_fields() -> None:
    messages = [Message.of("orders", b"a"), Message.of("orders", b"b")]
    for encoded in sent(batch_of(messages), namespace="ns", born_host="worker-1"):
        assert (encoded.topic.resource_namespace, encoded.topic.name) == ("ns", "orders")
        assert encoded.system_properties.born_host == "worker-1"


def test_zlib_body_is_encoded_as_gzip_and_decompressed() -> None:
    packed = zlib.compress(b"long " * 99)
    [encoded] = sent(single(Message("orders", packed), CompressionType.ZLIB.sys_flag))
    assert (encoded.system_properties.body_encoding, encoded.body) == (pb.GZIP, packed)
    found = message_ext(encoded)
    assert decompress(found.body, found.sys_flag) == b"long " * 99


def test_every_compressed_body_of_a_batch_has_its_encoding() -> None:
    messages = [Message("orders", zlib.compress(body)) for body in (b"a", b"b")]
    encoded = sent(batch_of(messages, sys_flag=CompressionType.ZLIB.sys_flag))
    assert [one.system_properties.body_encoding for one in encoded] == [pb.GZIP, pb.GZIP]


@pytest.mark.parametrize(
    ("message", "sys_flag", "named"),
    [
        (Message("orders", b"x", flag=7), 0, "gRPC cannot carry its flag 7"),
        (Message("orders", b"x", properties={"DELAY": "3"}), 0, "the property DELAY;.*delayMs"),
        (Message("orders", b"x", properties={"MSG_TYPE": "reply", "TTL": "1"}), 0, "MSG_TYPE, TTL"),
        (Message("orders", b"x", properties={"RECONSUME_TIME": "1"}), 0, "RECONSUME_TIME"),
        (Message("orders", b"x", properties={"TRACE_ON": "true"}), 0, "TRACE_ON"),
        (Message("orders", b"x"), CompressionType.LZ4.sys_flag, "compressed with LZ4"),
        (Message("orders", b"x"), CompressionType.ZSTD.sys_flag, "compressed with ZSTD"),
        (Message("orders", b"x", properties={"TIMER_DELAY_MS": "soon"}), 0, "TIMER_DELAY_MS .* 'soon', not a number"),
        (Message("orders", b"x", properties={"TIMER_DELIVER_MS": "9", "TIMER_DELAY_SEC": "1"}), 0, "several delays"),
        (Message.of("orders", b"x", priority=2**31), 0, "invalid priority: .* 2147483648"),
        (Message("orders", b"x", properties={"_SYS_MSG_PRIORITY_": "high"}), 0, "'high', not a number"),
        (Message("orders", b"x", properties={"__SHARDINGKEY": "k", "TIMER_DELAY_MS": "5"}), 0,
         "a delay and a shardingKey"),
        (Message("orders", b"x", properties={"__SHARDINGKEY": "k", "TRAN_MSG": "true"}), 0,
         "a transaction and a shardingKey"),
    ],
)  # fmt: skip
def test_property_that_grpc_cannot_carry_is_rejected_by_name(message: Message, sys_flag: int, named: str) -> None:
    with pytest.raises(MQClientException, match=f"topic 'orders': .*{named}") as refused:
        encode_send_request(single(message, sys_flag))
    assert refused.value.response_code == 13
    assert not refused.value.retriable
    assert not refused.value.split
    if not sys_flag:
        with pytest.raises(MQClientException) as batch_refused:
            encode_send_request(batch_of([Message("orders", b"valid"), message]))
        assert (batch_refused.value.response_code, batch_refused.value.split) == (13, True)


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_MS"])
@pytest.mark.parametrize("milliseconds", [253_402_300_800_000, 2**62, 10**30])
def test_a_delivery_after_the_year_9999_is_an_invalid_row(name: str, milliseconds: int) -> None:
    with pytest.raises(DelayRefusedException, match=r"topic 'orders': .* after the year 9999") as refused:
        encode_send_request(single(Message("orders", b"x", properties={name: str(milliseconds)})))
    assert (refused.value.response_code, refused.value.invalid_row, refused.value.invalid_message) == (13, True, True)


def test_a_compression_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(CompressionError, match="type 7"):
        encode_send_request(single(Message("orders", b"x"), 0x701))


@pytest.mark.parametrize(
    "properties",
    [
        {"__SHARDINGKEY": "k"},
        {"TIMER_DELAY_MS": "5"},
        {"TRAN_MSG": "true"},
        {"_SYS_MSG_PRIORITY_": "3"},
        {"__LITE_TOPIC": "a"},
    ],
)
def test_message_that_must_be_sent_alone_is_rejected_in_a_batch(properties: dict[str, str]) -> None:
    normal, alone = Message("orders", b"a"), Message("orders", b"b", properties=properties)
    with pytest.raises(MQClientException, match="must be sent alone, not in a batch"):
        encode_send_request(batch_of([normal, alone]))
    assert len(sent(batch_of([alone]))) == 1


def test_id_of_an_inner_batch_is_not_used_as_a_message_id() -> None:
    batch = batch_of([Message("orders", b"a", properties={"UNIQ_KEY": "one"})]).batch
    inner = EncodedBatch(batch.topic, batch.body, 1, batch.nbytes, properties="UNIQ_KEY\x01of the batch\x02")
    assert [encoded.system_properties.message_id for encoded in sent(request_of(inner))] == ["one"]


def grpc_batch(messages: Sequence[Message], born_timestamp: int) -> EncodedBatch:
    body = encode_send_request(request_of(batch_of(messages).batch, born_timestamp), namespace="ns")
    pieces = (memoryview(body)[:5], body[5:])
    return EncodedBatch(
        "orders", pieces, len(messages), len(body), encoding=Encoding.GRPC, born_timestamp=born_timestamp
    )


@pytest.mark.parametrize("age", [-5000, 0, 29_999])
def test_young_encoded_batch_is_sent_unchanged(age: int) -> None:
    batch = grpc_batch([Message.of("orders", b"a"), Message.of("orders", b"b")], BORN)
    assert encode_send_request(request_of(batch, BORN + age), namespace="unused") == b"".join(batch.body)


@settings(max_examples=50)
@given(st.lists(drawn_messages(st.just({})), min_size=1, max_size=5), st.integers(30_000, 10**9))
def test_only_the_born_timestamp_of_an_old_batch_is_renewed(messages: list[Message], age: int) -> None:
    batch = grpc_batch(messages, BORN)
    renewed = sent(request_of(batch, BORN + age))
    assert {encoded.system_properties.born_timestamp.ToMilliseconds() for encoded in renewed} == {BORN + age}
    again = restamp(encode_send_request(request_of(batch, BORN + age)), BORN)
    assert SendMessageRequest.FromString(again) == SendMessageRequest.FromString(b"".join(batch.body))


def test_unknown_field_is_kept_when_the_born_timestamp_is_renewed() -> None:
    unknown = b"\xfa\x07\x03abc"  # field 127
    body = SendMessageRequest(messages=[pb.Message(body=b"x")]).SerializeToString() + unknown
    assert unknown in restamp(body, BORN)


def test_undecodable_batch_is_rejected_with_its_topic_and_rows() -> None:
    body = b"\x0a\x07\x1a\x05\x0a\x03c\xe9t"  # a message whose tag is no UTF-8
    batch = EncodedBatch("orders", (body,), 7, len(body), encoding=Encoding.GRPC, born_timestamp=BORN)
    assert encode_send_request(request_of(batch, BORN)) == body
    with pytest.raises(MQClientException, match=r"sending 7 rows to topic 'orders'.*not valid UTF-8") as caught:
        encode_send_request(request_of(batch, BORN + 3_600_000))
    assert caught.value.response_code == ResponseCode.MESSAGE_ILLEGAL
    assert isinstance(caught.value.__cause__, DecodeError)


def test_retry_has_the_same_id_and_a_new_born_timestamp() -> None:
    batch = single(Message("orders", b"x", properties={"UNIQ_KEY": "id", "TIMER_DELAY_MS": "50"})).batch
    first, second = (sent(request_of(batch, born))[0].system_properties for born in (BORN, BORN + 10))
    assert first.message_id == second.message_id == "id"
    assert second.born_timestamp.ToMilliseconds() - first.born_timestamp.ToMilliseconds() == 10
    assert second.delivery_timestamp.ToMilliseconds() == BORN + 60


def status_of(code: int, message: str = "") -> pb.Status:
    return pb.Status(code=cast("pb.Code", code), message=message)


def answer(code: int, *results: SendResultEntry | int, message: str = "") -> SendMessageResponse:
    entries = [one if isinstance(one, SendResultEntry) else SendResultEntry(status=status_of(one)) for one in results]
    return SendMessageResponse(status=status_of(code, message), entries=entries)


THREE = batch_of([Message.of("orders", body) for body in (b"a", b"b", b"c")])
ONE = single(Message.of("orders", b"a"))


def test_outcome_of_a_stored_message_has_its_offset_and_no_queue() -> None:
    entry = SendResultEntry(
        status=pb.Status(code=pb.OK), message_id="id", transaction_id="tx", offset=42, recall_handle="djEg"
    )
    outcome = outcome_of(ONE, answer(20000, entry), 1.5)
    assert (outcome.status, outcome.error, outcome.latency_ms) == (SendStatus.SEND_OK, None, 1.5)
    assert outcome.queue == MessageQueue("orders", "p:8081", -1)
    assert (outcome.queue_offset, outcome.transaction_id, outcome.recall_handle) == (42, "tx", "djEg")
    # The entry has the client's message id, which does not contain the message's position.
    assert (outcome.offset_msg_id, outcome.batch_uniq_id) == ("", "")


@pytest.mark.parametrize("message_id", ["A,B,C", "0" * 56, ""])
def test_batch_outcome_ignores_the_ids_of_its_single_result(message_id: str) -> None:
    entry = SendResultEntry(status=pb.Status(code=pb.OK), message_id=message_id, transaction_id="A", offset=7)
    outcome = outcome_of(THREE, answer(20000, entry), 2.0)
    assert (outcome.status, outcome.queue_offset) == (SendStatus.SEND_OK, 7)
    assert (outcome.offset_msg_id, outcome.transaction_id) == ("", "")


UNKNOWN = BrokerOutcomeUnknownException


@pytest.mark.parametrize(
    ("request_", "response", "expected"),
    [
        (THREE, answer(20000, 20000, 20000, 20000), SendStatus.SEND_OK),
        (THREE, answer(30000, 20000, 20000, 20000), SendStatus.SEND_OK),
        (ONE, answer(30000, 20000), SendStatus.SEND_OK),
        # A proxy repeats the status of its only result.
        (THREE, answer(50401, 50401), SendStatus.FLUSH_DISK_TIMEOUT),
        (THREE, answer(50402, 50402), SendStatus.FLUSH_SLAVE_TIMEOUT),
        (THREE, answer(50002, 50002), SendStatus.SLAVE_NOT_AVAILABLE),
        (THREE, answer(20000, 50002), SendStatus.SLAVE_NOT_AVAILABLE),
        (THREE, answer(30000, 20000, 50402, 20000), SendStatus.FLUSH_SLAVE_TIMEOUT),
        # The reply does not show whether the message was stored.
        (THREE, SendMessageResponse(), UNKNOWN),
        (THREE, answer(20000), UNKNOWN),
        (THREE, answer(50401), UNKNOWN),
        (THREE, answer(30000), UNKNOWN),
        (THREE, answer(30000, 20000), UNKNOWN),
        (THREE, answer(30000, 20000, 20000, 20000, 20000), UNKNOWN),
        # One bad result among good ones: a retriable error is retried, another one fails.
        (THREE, answer(20000, 20000, 42900, 20000), UNKNOWN),
        (THREE, answer(30000, 20000, 50400, 20000), UNKNOWN),
        (THREE, answer(30000, 50400, 40007, 20000), MessageRefusedException),
        (THREE, answer(30000, 20000, 20000, 40100), UserRefusedException),
        (THREE, answer(20000, 40007), MessageRefusedException),
        (ONE, answer(20000, 42900), BrokerBusyException),
        (ONE, answer(30000, 40402, 20000), UNKNOWN),
        # An unknown code of a later release is not a success, with or without results.
        (ONE, answer(20001, 20000), UNKNOWN),
        (ONE, answer(20000, 20001), UNKNOWN),
        (THREE, answer(42900), BrokerBusyException),
        (THREE, answer(41300), MessageRefusedException),
        (THREE, answer(40100), UserRefusedException),
        (THREE, answer(50001, message="message body size exceeded"), MessageRefusedException),
    ],
)  # fmt: skip
def test_outcome_follows_the_status_and_every_result_of_the_answer(
    request_: SendRequest, response: SendMessageResponse, expected: SendStatus | type[MQBrokerException]
) -> None:
    outcome = outcome_of(request_, response, 1.0)
    if isinstance(expected, SendStatus):
        assert (outcome.status, outcome.error) == (expected, None)
    else:
        assert (outcome.status, type(outcome.error)) == (None, expected)
        assert outcome.queue == QUEUE


@given(
    st.sampled_from([20000, 30000, 40007, 42900, 50001, 50401]),
    st.lists(st.sampled_from([20000, 40007, 42900, 50001, 50401, 77]), max_size=4),
    st.sampled_from([ONE, THREE]),
)
def test_batch_counts_as_stored_only_if_the_whole_answer_says_stored(
    code: int, results: list[int], request_: SendRequest
) -> None:
    stored = {20000, 50401}
    outcome = outcome_of(request_, answer(code, *results), 1.0)
    covers_all = len(results) == request_.batch.rows or (code != 30000 and len(results) == 1)
    said = bool(results) and code in stored | {30000} and set(results) <= stored and covers_all
    assert (outcome.status is not None) == said
    assert (outcome.error is None) == said


@pytest.mark.parametrize("code", [20000, 30000])
@pytest.mark.parametrize("results", [2, 4])
def test_reply_with_another_number_of_results_is_not_stored(code: int, results: int) -> None:
    error = outcome_of(THREE, answer(code, *[20000] * results), 1.0).error
    assert f"the answer has {results} results" in str(error)
    assert isinstance(error, MQBrokerException)
    assert error.maybe_stored


def test_error_names_rows_topic_proxy_and_answer() -> None:
    outcome = outcome_of(THREE, answer(40007, message="property is used by system: DELAY"), 1.0)
    assert str(outcome.error).startswith(
        "sending 3 rows to topic orders: p:8081 answered 40007 ILLEGAL_MESSAGE_PROPERTY_KEY: "
        "property is used by system: DELAY ("
    )


def delivered(**system: Any) -> pb.Message:
    encoded = pb.Message(
        topic=pb.Resource(name="orders"),
        body=b"half",
        user_properties={"colour": "red", "__SHARDINGKEY": "k", "MIN_OFFSET": "0"},
        system_properties=pb.SystemProperties(message_id="AB" * 17, message_type=pb.TRANSACTION, **system),
    )
    encoded.system_properties.born_timestamp.FromMilliseconds(BORN)
    encoded.system_properties.store_timestamp.FromMilliseconds(BORN + 5)
    return encoded


def test_delivered_message_has_the_system_properties_from_the_proxy() -> None:
    found = message_ext(
        delivered(queue_id=3, queue_offset=9, delivery_attempt=2, born_host="h:1", store_host="1.2.3.4:10911")
    )
    assert (found.queue_id, found.queue_offset, found.reconsume_times) == (3, 9, 1)
    assert (found.born_timestamp, found.store_timestamp) == (BORN, BORN + 5)
    assert (found.born_host, found.store_host, found.physical_offset) == ("h:1", "1.2.3.4:10911", -1)
    # RocketMQ's own names are not user properties, even if a proxy sends them as such.
    assert found.properties == {"colour": "red", "__SHARDINGKEY": "k", "UNIQ_KEY": "AB" * 17, "TRAN_MSG": "true"}


def test_empty_message_is_decoded() -> None:
    found = message_ext(pb.Message())
    assert (found.topic, found.body, found.properties, found.born_timestamp) == ("", b"", {}, 0)
    assert (found.reconsume_times, found.sys_flag) == (0, 0)


@pytest.mark.parametrize("kind", CompressionType)
def test_compressed_body_is_marked_with_the_type_that_its_bytes_show(kind: CompressionType) -> None:
    body = compress(b"x" * 8000, kind)
    found = message_ext(pb.Message(body=body, system_properties=pb.SystemProperties(body_encoding=pb.GZIP)))
    assert (found.sys_flag, decompress(found.body, found.sys_flag)) == (kind.sys_flag, b"x" * 8000)


def test_check_names_its_group_and_is_answered_to_its_proxy() -> None:
    command = RecoverOrphanedTransactionCommand(message=delivered(queue_offset=9), transaction_id="tx")
    check = transaction_check(command, "p:8081", "pg")
    assert (check.address, check.producer_group, check.unique_id) == ("p:8081", "pg", "AB" * 17)
    end = check.answer(TRANSACTION_COMMIT_TYPE)
    assert (end.topic, end.msg_id, end.transaction_id) == ("orders", "AB" * 17, "tx")
    assert (end.broker_name, end.from_transaction_check) == ("p:8081", True)
