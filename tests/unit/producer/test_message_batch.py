"""Batches of the public producer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.properties import UNIQ_KEY, WAIT
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import EncodedMessage, MessageEncoder
from rocketmq_spark.protocol.remoting.records import (
    MAX_BATCH_ROWS,
    decode_batch,
    decode_properties,
    encode_items,
    encode_properties,
)

LIMIT = 4 * 1024 * 1024


def ids() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"ID{next(numbers)}"


def encode(*messages: Message, limit: int = LIMIT, namespace: str | None = None) -> EncodedMessage:
    options = ProducerOptions.of(max_message_size=limit, namespace=namespace)
    return MessageEncoder(options, ids()).encode_batch(messages)


def refusal(*messages: Message) -> MQClientException:
    with pytest.raises(MQClientException, match="making a batch of messages") as caught:
        encode(*messages)
    assert caught.value.response_code == -1
    return caught.value


GOOD = Message.of("orders", b"body")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Message.of("others", b"body"), "is for topic 'others', message 0 for 'orders'"),
        (Message.of("orders", b"body", wait_store_msg_ok=False), "differ in waitStoreMsgOK"),
        (Message.of("orders", b"body", delay_time_level=1), "message 1 has a delay"),
        (Message.of("orders", b"body", delay_ms=1), "message 1 has a delay"),
        (Message.of("orders", b"body", delay_sec=1), "message 1 has a delay"),
        (Message.of("orders", b"body", deliver_ms=1), "message 1 has a delay"),
        (Message.of("%RETRY%group", b"body"), "retry topic '%RETRY%group'"),
        (None, "message 1 is None"),
        (Message("orders", b""), "its body is empty"),
        (Message("orders", b"body", 2**31), "must fit 32 bits"),
        (Message("orders", b"body", 0, {"a": "x\x02"}), "0x01 or 0x02"),
    ],
)
def test_messages_that_a_batch_cannot_contain_are_rejected_with_a_cause(bad: Message, reason: str) -> None:
    error = refusal(GOOD, bad)
    assert reason in str(error)
    assert isinstance(error.__cause__, MQClientException)
    assert error.__cause__.response_code == 13


def test_an_empty_batch_is_refused() -> None:
    assert "the batch is empty" in str(refusal())


def test_messages_without_a_topic_are_refused() -> None:
    nameless = Message(None, b"body", 0, {"WAIT": "true"})  # type: ignore[arg-type]
    assert "topic None is blank" in str(refusal(nameless, nameless))


def test_a_property_that_is_no_text_is_refused() -> None:
    number = Message("orders", b"body", 0, {"a": 5})  # type: ignore[dict-item]
    assert isinstance(refusal(GOOD, number).__cause__, TypeError)


def test_a_malformed_delay_is_refused_with_its_cause() -> None:
    assert isinstance(refusal(Message("orders", b"body", 0, {"DELAY": "soon"})).__cause__, ValueError)


def test_batch_is_checked_before_its_messages() -> None:
    assert "has a delay" in str(refusal(Message("a.b", b""), Message.of("orders", b"body", delay_ms=1)))


def test_a_forbidden_topic_keeps_its_code_in_the_cause() -> None:
    cause = refusal(Message.of("SELF_TEST_TOPIC", b"body")).__cause__
    assert isinstance(cause, MQClientException)
    assert cause.response_code == -1


def test_batch_body_contains_its_messages_in_order() -> None:
    batch = encode(Message("orders", b"one", 5, {"UNIQ_KEY": "U"}), Message("orders", b"three", -1, {"UNIQ_KEY": "V"}))
    body = (
        "00000024 00000000 00000000 00000005 00000003 6f6e65     000b 554e49515f4b4559 01 55 02"
        "00000026 00000000 00000000 ffffffff 00000005 7468726565 000b 554e49515f4b4559 01 56 02"
    )
    assert (bytes.fromhex(body),) == batch.encoded.body
    assert batch.encoded.nbytes == (22 + 3 + 11) + (22 + 5 + 11)
    assert batch.encoded.rows == 2


def test_every_member_gets_an_id_unless_it_has_one() -> None:
    with_id = GOOD.with_properties({"UNIQ_KEY": "own"})
    batch = encode(GOOD, with_id, GOOD)
    assert batch.msg_id == "ID1,own,ID2"
    members = decode_batch(batch.encoded.body[0], "orders")
    assert [member.unique_id for member in members] == ["ID1", "own", "ID2"]
    assert GOOD.unique_id is None


@pytest.mark.parametrize(("waits", "text"), [(True, "true"), (False, "false")])
def test_batch_header_has_wait_and_an_id(waits: bool, text: str) -> None:
    batch = encode(Message.of("orders", b"body", wait_store_msg_ok=waits))
    assert f"WAIT\x01{text}\x02UNIQ_KEY\x01ID2\x02" == batch.encoded.properties
    assert batch.message.unique_id == "ID2"


def test_a_body_larger_than_the_limit_is_code_13() -> None:
    members = [Message("orders", bytes(50), 0, {"UNIQ_KEY": "U"})] * 3
    size = 3 * (22 + 50 + 11)
    assert size == encode(*members, limit=size).encoded.nbytes
    with pytest.raises(MQClientException, match=f"has {size} bytes, max_message_size allows {size - 1}") as caught:
        encode(*members, limit=size - 1)
    assert caught.value.response_code == 13


def test_a_batch_is_never_compressed() -> None:
    batch = encode(*[Message.of("orders", bytes(100_000))] * 3)
    assert (batch.encoded.batch, batch.encoded.sys_flag) == (True, 0)
    assert batch.encoded.nbytes > 300_000


def test_msg_id_of_a_batch_result_is_that_of_its_members_or_the_batch() -> None:
    batch = encode(GOOD, GOOD)
    stored = SendOutcome(MessageQueue("orders", "a", 0), SendStatus.SEND_OK, None, 1.0)
    assert batch.result_of(stored).msg_id == "ID1,ID2"
    assert batch.result_of(replace(stored, batch_uniq_id="ID3")).msg_id == "ID3"


def test_a_namespace_is_named_in_a_property() -> None:
    batch = encode(GOOD, namespace="NS")
    assert batch.encoded.topic == "orders"
    assert decode_properties(batch.encoded.properties.encode())["INSTANCE_ID"] == "NS"
    assert "INSTANCE_ID" not in decode_properties(encode(GOOD, namespace=" ").encoded.properties.encode())


def test_a_topic_too_long_with_its_namespace_is_refused() -> None:
    assert encode(Message.of("t" * 124, b"body"), namespace="NS").encoded.topic
    with pytest.raises(MQClientException, match="has 128 characters"):
        encode(Message.of("t" * 125, b"body"), namespace="NS")


def test_batch_with_too_many_messages_for_a_broker_is_rejected() -> None:
    # Java sends such batches, and the broker damages its queue.
    assert f"1 to {MAX_BATCH_ROWS} are allowed" in str(refusal(*[GOOD] * (MAX_BATCH_ROWS + 1)))


def test_properties_over_32767_bytes_are_refused() -> None:
    # Java sends such batches, and the error of the broker names no cause.
    message = Message("orders", b"body", 0, {"n": "v" * 32_764})
    assert len(encode_properties(message.properties)) == 32_767
    with pytest.raises(MQClientException, match="32768 bytes together, at most 32767") as caught:
        encode_properties(message.with_properties({"n": "v" * 32_765}).properties)
    assert caught.value.response_code == 13
    assert "at most 32767" in str(refusal(message))


@pytest.mark.parametrize("flush", [True, False])
def test_usual_messages_are_encoded_as_one_by_one(flush: bool) -> None:
    texts: list[dict[str, Any]] = [{}, {"tags": "new"}, {"keys": "ключ 鍵"}, {"tags": "t", "sharding_key": "c-1"}]
    own = {"shop": "7", "Größe": "🙂"}
    members = [
        Message("orders", b"%d" % number, -number, {**Message.of("orders", b"", **text).properties, **user})
        for number, (text, user) in enumerate(itertools.product(texts, ({}, own)))
    ]
    members = [member.with_properties({WAIT: str(flush).lower()}) for member in members]
    for batch in ([member] for member in members), (members,), (members[::-1],):
        for some in batch:
            encoded = encode(*some)
            draw = ids()
            expected = [encode_properties({**member.properties, UNIQ_KEY: draw()}) for member in some]
            assert b"".join(encoded.encoded.body) == encode_items(some, expected)


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({"shop": "a\x01b"}, "holds 0x01 or 0x02"),
        ({"a\x01b\x02c": "d"}, "holds 0x01 or 0x02"),
        ({"shop": "\ud800"}, "are not valid Unicode"),
        ({"shop": "x" * 32_767}, "at most 32767 fit one message"),
        ({"shop": "鍵" * 10_922}, "at most 32767 fit one message"),
        ({"_SYS_MSG_PRIORITY_": "1"}, "has a priority or a lite topic"),
        ({"TRAN_MSG": "true"}, "is a half message"),
        ({"INNER_MULTI_DISPATCH": "a/b"}, "must not hold '/'"),
    ],
)
def test_properties_that_brokers_would_refuse_or_ignore_are_found(properties: dict[str, str], reason: str) -> None:
    bad = Message("orders", b"body", properties={WAIT: "true", **properties})
    assert reason in str(refusal(GOOD, bad))
    assert reason in str(refusal(bad))
