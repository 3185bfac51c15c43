"""The checks of messages before a send."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.names import FORBIDDEN_TOPICS, check_group, check_topic
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import MessageEncoder, check_message
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY

LIMIT = 100


def refusal(message: Message | None) -> MQClientException:
    with pytest.raises(MQClientException) as caught:
        check_message(message, LIMIT)
    assert not caught.value.retriable
    return caught.value


@pytest.mark.parametrize("group", ["", " ", "\u3000", None, "a.b", "a b", "ä", "x" * 121, "DEFAULT_PRODUCER"])
def test_invalid_group_is_rejected(group: str | None) -> None:
    with pytest.raises(MQClientException, match="producer group") as caught:
        check_group(group)
    assert caught.value.response_code == -1
    assert repr(group) in str(caught.value)


@pytest.mark.parametrize("group", ["g", "x" * 120, "%RETRY%g|A-z_9", "CID_RMQ_SYS_x"])
def test_valid_group_does_not_raise(group: str) -> None:
    check_group(group)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "got None"),
        (Message("orders", None), "must be bytes, got NoneType"),  # type: ignore[arg-type]
        (Message("orders", "text"), "must be bytes, got str"),  # type: ignore[arg-type]
        (Message("orders", b""), "is empty"),
        (Message("orders", bytes(LIMIT + 1)), "has 101 bytes, max_message_size allows 100"),
        (Message("orders", b"body", 2**31), "flag 2147483648 must fit 32 bits"),
        (Message("orders", b"body", None), "flag None must fit 32 bits"),  # type: ignore[arg-type]
    ],
)
def test_no_message_and_an_invalid_body_or_flag_are_code_13(message: Message | None, reason: str) -> None:
    error = refusal(message)
    assert error.response_code == 13
    assert reason in str(error)


def test_body_of_exactly_the_limit_does_not_raise() -> None:
    check_message(Message("orders", bytes(LIMIT)), LIMIT)


@pytest.mark.parametrize("topic", ["", " \t", "\u3000", None, "a.b", "a b", "\u00a0", "ä", "a/b", "orders\n"])
def test_a_blank_topic_and_illegal_characters_are_code_minus_1(topic: str) -> None:
    error = refusal(Message(topic, b"body"))
    assert error.response_code == -1
    assert repr(topic) in str(error)


def test_a_topic_of_127_characters_is_accepted_and_of_128_refused() -> None:
    check_topic("t" * 127)
    error = refusal(Message("t" * 128, b"body"))
    assert error.response_code == -1
    assert "has 128 characters, at most 127 are allowed" in str(error)


def test_length_counts_utf_16_units() -> None:
    # Both are errors; the order of the checks is Java's.
    assert "has 128 characters" in str(refusal(Message("\U0001f600" * 64, b"body")))
    assert "illegal character" in str(refusal(Message("\U0001f600" * 63, b"body")))


@pytest.mark.parametrize("topic", sorted(FORBIDDEN_TOPICS))
def test_each_of_the_eight_forbidden_topics_is_refused(topic: str) -> None:
    assert len(FORBIDDEN_TOPICS) == 8
    error = refusal(Message(topic, b"body"))
    assert error.response_code == -1
    assert topic in str(error)


@pytest.mark.parametrize("topic", ["TBW102", "RMQ_SYS_TRACE_TOPIC", "BenchmarkTest", "self_test_topic"])
def test_message_to_another_system_topic_does_not_raise(topic: str) -> None:
    check_message(Message(topic, b"body"), LIMIT)


def test_a_path_separator_in_inner_multi_dispatch_is_code_13() -> None:
    error = refusal(Message("orders", b"body", 0, {"INNER_MULTI_DISPATCH": "%LMQ%a,b/c"}))
    assert error.response_code == 13
    assert "'%LMQ%a,b/c'" in str(error)
    check_message(Message("orders", b"body", 0, {"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b"}), LIMIT)


def test_the_topic_is_judged_before_the_body() -> None:
    assert refusal(Message("a.b", b"")).response_code == -1


@pytest.mark.parametrize("batch", [False, True])
def test_a_body_that_does_not_fit_a_frame_is_code_13(*, batch: bool) -> None:
    options = ProducerOptions.of(max_message_size=32 * 1024**2, compress_type="NONE")
    encoder = MessageEncoder(options, lambda: "id")
    message = Message("orders", bytes(LARGEST_BODY + 1))
    with pytest.raises(MQClientException, match=f"has {LARGEST_BODY + 1} bytes|a frame has room for") as caught:
        encoder.encode_batch([message]) if batch else encoder.encode(message)
    assert "send a smaller body" in str(caught.value)
    zipped = MessageEncoder(ProducerOptions.of(max_message_size=32 * 1024**2), lambda: "id").encode(message)
    assert zipped.encoded.nbytes < 100_000
