"""Properties of a message, and the names that users may not set."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import ReservedPropertyError, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.model.send_result import LocalTransactionState, SendResult, TransactionSendResult

PLAIN = Message.of("orders", b"body")


def test_wait_is_always_set_and_tags_and_keys_only_if_not_empty() -> None:
    assert Message("orders", b"body", 0, {"WAIT": "true"}) == PLAIN
    assert Message.of("orders", b"body", tags="", keys="").properties == {"WAIT": "true"}
    full = Message.of("orders", b"body", tags="tag", keys="k1 k2", flag=-7, wait_store_msg_ok=False)
    assert Message("orders", b"body", -7, {"KEYS": "k1 k2", "TAGS": "tag", "WAIT": "false"}) == full


def test_list_of_keys_is_joined_by_one_space() -> None:
    assert Message.of("orders", b"body", keys=["a", "b", "c"]).keys == "a b c"
    assert Message.of("orders", b"body", keys=iter(("a", "b"))).keys == "a b"
    assert Message.of("orders", b"body", keys=[]).keys is None


@pytest.mark.parametrize("item", ["", "a b", " "])
def test_key_with_a_space_in_a_list_of_keys_is_rejected(item: str) -> None:
    with pytest.raises(ValueError, match="one key of at least one character, without a space"):
        Message.of("orders", b"body", keys=["fine", item])


@pytest.mark.parametrize(
    ("text", "waits"), [("true", True), ("TRUE", True), ("false", False), ("", False), ("1", False)]
)
def test_wait_store_msg_ok_is_true_if_absent_and_otherwise_only_for_true(text: str, waits: bool) -> None:
    assert Message("orders", b"body").wait_store_msg_ok is True
    assert Message("orders", b"body", 0, {"WAIT": text}).wait_store_msg_ok is waits


def test_reserved_properties_equal_those_of_5_5_0() -> None:
    assert len(RESERVED_PROPERTIES) == 54
    assert {"KEYS", "TAGS", "1ST_POP_TIME", "__CRC32#", "__LITE_TOPIC"} <= RESERVED_PROPERTIES
    assert not {"__SHARDINGKEY", "INNER_NUM", "SPARK_ROW_ID", ""} & RESERVED_PROPERTIES


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_each_reserved_name_is_rejected(name: str) -> None:
    with pytest.raises(
        ReservedPropertyError, match=f"user property '{name}': RocketMQ uses this name itself"
    ) as caught:
        PLAIN.put_user_property(name, "value")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RocketMQError)
    with pytest.raises(ReservedPropertyError):
        Message.of("orders", b"body", properties={name: "value"})


def test_the_name_of_attempts_is_rejected() -> None:
    with pytest.raises(ReservedPropertyError, match="only an effectively-once write uses this name"):
        PLAIN.put_user_property("SPARK_ATTEMPT", "value")


def test_sharding_key_is_not_a_reserved_name() -> None:
    assert PLAIN.put_user_property("__SHARDINGKEY", "k").sharding_key == "k"


@pytest.mark.parametrize("blank", ["", " ", "\t\n\x0b \x00\x1f", None])
def test_blank_name_or_value_is_rejected(blank: str) -> None:
    with pytest.raises(ValueError, match="its name is") as caught:
        PLAIN.put_user_property(blank, "value")
    assert not isinstance(caught.value, ReservedPropertyError)
    with pytest.raises(ValueError, match="'name': its value is"):
        PLAIN.put_user_property("name", blank)


def test_reserved_name_is_rejected_before_a_blank_value() -> None:
    with pytest.raises(ReservedPropertyError):
        PLAIN.put_user_property("KEYS", "")


@pytest.mark.parametrize("text", ["\u3000", "\u00a0", "\u0085", " \u2003 "])
def test_white_space_above_u_0020_is_not_blank_to_java_trim(text: str) -> None:
    assert {text: text} == PLAIN.put_user_property(text, text).user_properties


@pytest.mark.parametrize("text", ["a\x01b", "\x02!", "name\x02"])
def test_a_separator_in_a_user_property_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="0x01 or 0x02"):
        PLAIN.put_user_property(text, "value")
    with pytest.raises(ValueError, match="0x01 or 0x02"):
        PLAIN.put_user_property("name", text)
    with pytest.raises(ValueError, match="TAGS holds 0x01 or 0x02"):
        Message.of("orders", b"body", tags=text)
    with pytest.raises(ValueError, match="item of keys holds 0x01 or 0x02"):
        Message.of("orders", b"body", keys=[text])


def test_putting_a_property_makes_a_new_message() -> None:
    given = {"colour": "red"}
    first = Message.of("orders", b"body", properties=given)
    second = first.put_user_property("colour", "blue").put_user_property("size", "9")
    assert {"colour": "red"} == given == first.user_properties
    assert second.user_properties == {"colour": "blue", "size": "9"}
    given["late"] = "1"
    assert first.user_properties == {"colour": "red"}


def test_internal_copies_leave_the_message_alone() -> None:
    changed = PLAIN.with_properties({"UNIQ_KEY": "id", "WAIT": "false"})
    assert (changed.unique_id, changed.wait_store_msg_ok) == ("id", False)
    assert changed.without_properties("UNIQ_KEY", "absent").with_properties({"WAIT": "true"}) == PLAIN
    assert PLAIN.unique_id is None


def test_every_reader_reads_its_property() -> None:
    message = Message(
        "orders",
        b"body",
        0,
        {
            "TAGS": "t", "KEYS": "a b", "WAIT": "false", "DELAY": "3", "TIMER_DELAY_SEC": "4", "TIMER_DELAY_MS": "5",
            "TIMER_DELIVER_MS": "6", "UNIQ_KEY": "id", "__SHARDINGKEY": "s", "__transactionId__": "tx",
            "TRAN_MSG": "True", "MSG_TYPE": "reply", "mine": "1",
        },
    )  # fmt: skip
    assert (message.tags, message.keys, message.wait_store_msg_ok) == ("t", "a b", False)
    assert (message.delay_time_level, message.delay_sec, message.delay_ms, message.deliver_ms) == (3, 4, 5, 6)
    assert (message.unique_id, message.sharding_key, message.transaction_id) == ("id", "s", "tx")
    assert message.is_half_message
    assert message.is_reply
    assert message.user_properties == {"__SHARDINGKEY": "s", "__transactionId__": "tx", "mine": "1"}


def test_a_message_without_properties_has_their_defaults() -> None:
    bare = Message("orders", b"body")
    assert [bare.tags, bare.keys, bare.unique_id, bare.sharding_key, bare.transaction_id] == [None] * 5
    assert [bare.delay_time_level, bare.delay_sec, bare.delay_ms, bare.deliver_ms] == [0] * 4
    assert (bare.is_half_message, bare.is_reply, bare.user_properties) == (False, False, {})


def test_a_delay_that_is_no_number_names_property_and_value() -> None:
    with pytest.raises(ValueError, match="property DELAY of a message for 'orders' is 'soon', not a number"):
        _ = Message("orders", b"body", 0, {"DELAY": "soon"}).delay_time_level


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("delay_time_level", "DELAY"),
        ("delay_ms", "TIMER_DELAY_MS"),
        ("delay_sec", "TIMER_DELAY_SEC"),
        ("deliver_ms", "TIMER_DELIVER_MS"),
    ],
)
def test_each_delay_becomes_its_property(argument: str, name: str) -> None:
    message = Message.of("orders", b"body", **{argument: 2**40})  # type: ignore[arg-type]
    assert {"WAIT": "true", name: str(2**40)} == message.properties
    assert getattr(message, argument) == 2**40


@pytest.mark.parametrize("delays", [{"delay_ms": -1}, {"delay_ms": 1, "delay_sec": 1}, {"delay_time_level": -(2**31)}])
def test_several_delays_or_a_negative_one_are_refused(delays: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at most one of them, and none below 0"):
        Message.of("orders", b"body", **delays)  # type: ignore[arg-type]


@pytest.mark.parametrize("delays", [{"delay_ms": 2**63 - 1}, {"delay_sec": 2**53}, {"deliver_ms": 2**63}])
def test_a_delay_that_a_broker_would_add_to_a_time_in_the_past_is_refused(delays: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"a delay may have at most {2**62} ms, and a time must be below 2\^63"):
        Message.of("orders", b"body", **delays)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Message.of("orders", "text"),  # type: ignore[arg-type]
        lambda: Message.of("orders", None),  # type: ignore[arg-type]
        lambda: Message.of("orders", b"body", tags=b"tag"),  # type: ignore[arg-type]
        lambda: Message.of("orders", b"body", keys=[7]),  # type: ignore[list-item]
        lambda: Message.of("orders", b"body", properties={"a": 1}),  # type: ignore[dict-item]
        lambda: Message.of("orders", b"body", delay_ms=1.5),  # type: ignore[arg-type]
    ],
)
def test_another_type_is_a_type_error(make: Callable[[], Message]) -> None:
    with pytest.raises(TypeError):
        make()


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_the_body_is_a_copy_in_bytes(kind: Callable[[bytes], bytes]) -> None:
    message = Message.of("orders", kind(b"body"))
    assert type(message.body) is bytes
    assert PLAIN == message == pickle.loads(pickle.dumps(message))


def test_a_send_result_has_java_s_defaults() -> None:
    queue = MessageQueue("orders", "broker-a", 3)
    result = SendResult(SendStatus.SEND_OK, "id", queue, 7)
    assert (
        result.offset_msg_id,
        result.transaction_id,
        result.region_id,
        result.trace_on,
        result.recall_handle,
    ) == ("", "", "DefaultRegion", True, "")
    half = TransactionSendResult(SendStatus.SEND_OK, "id", queue, 7)
    assert LocalTransactionState.UNKNOW is half.local_transaction_state
    assert isinstance(half, SendResult)


@pytest.mark.parametrize("name", ["delay_time_level", "delay_ms", "delay_sec", "deliver_ms"])
@pytest.mark.parametrize("delay", [0.0, None, ""])
def test_a_delay_that_is_no_integer_is_refused(name: str, delay: object) -> None:
    with pytest.raises(TypeError):
        Message.of("T", b"x", **{name: delay})  # type: ignore[arg-type]


def test_a_priority_and_a_lite_topic_become_their_properties() -> None:
    message = Message.of("orders", b"body", priority=0)
    assert (message.priority, message.lite_topic) == (0, None)
    assert message.properties == {"WAIT": "true", "_SYS_MSG_PRIORITY_": "0"}
    message = Message.of("orders", b"body", lite_topic="chat-1", keys="k")
    assert (message.priority, message.lite_topic) == (None, "chat-1")
    assert message.properties == {"KEYS": "k", "WAIT": "true", "__LITE_TOPIC": "chat-1"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"priority": -1}, "give a priority from 0 on"),
        ({"lite_topic": ""}, "a lite topic of at least one character"),
        ({"priority": 1, "lite_topic": "a"}, "give one of priority, lite_topic, sharding_key and a delay"),
        ({"priority": 1, "sharding_key": "a"}, "give one of priority"),
        ({"lite_topic": "a", "delay_ms": 5}, "give one of priority"),
        ({"lite_topic": "a\x01"}, "holds 0x01 or 0x02"),
    ],
)
def test_a_priority_or_a_lite_topic_that_brokers_would_ignore_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Message.of("orders", b"body", **arguments)
