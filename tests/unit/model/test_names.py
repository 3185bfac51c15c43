"""Java's idea of blank, of length and of a legal name."""

from __future__ import annotations

import pytest

from rocketmq_spark.model.names import is_blank, is_legal, is_system_group, is_system_topic, java_length


@pytest.mark.parametrize(
    "text", ["", " ", "\t\r\n\x0b\x0c", "\x1c\x1d\x1e\x1f", "\u3000", "\u2028\u2029", "\u2003\u1680"]
)
def test_java_s_white_space_is_blank(text: str) -> None:
    assert is_blank(text)


@pytest.mark.parametrize("text", ["a", " a ", "\u00a0", "\u2007", "\u202f", "\u0085", "\x00", "\u200b", "\ufeff"])
def test_characters_that_java_does_not_count_as_white_space_are_not_blank(text: str) -> None:
    assert not is_blank(text)


def test_length_counts_utf_16_units() -> None:
    assert (java_length(""), java_length("äé"), java_length("a\U0001f600")) == (0, 2, 3)


@pytest.mark.parametrize("name", ["a", "%RETRY%g|x", "A-b_9"])
def test_legal_names(name: str) -> None:
    assert is_legal(name)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "a\n", "ä", "a/b", "\u0661"])
def test_illegal_names(name: str) -> None:
    assert not is_legal(name)


def test_system_topics_and_groups_are_recognised() -> None:
    assert is_system_topic("TBW102")
    assert is_system_topic("SELF_TEST_TOPIC")
    assert is_system_topic("rmq_sys_anything")
    assert not is_system_topic("RMQ_SYS_anything")
    assert is_system_group("CID_RMQ_SYS_TRANS")
    assert not is_system_group("CID_orders")
