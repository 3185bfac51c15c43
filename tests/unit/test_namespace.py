"""Namespaces in names (spec/producer.md section 17, line 33)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.namespace import check_namespace, namespace_of, unwrap, wrap
from tests.strategies import topics

EXAMPLES = [("T", "A%T"), ("%RETRY%G", "%RETRY%A%G"), ("%DLQ%G", "%DLQ%A%G")]


@pytest.mark.parametrize(("bare", "wrapped"), EXAMPLES)
def test_33_names_are_wrapped_once_and_unwrapped(bare: str, wrapped: str) -> None:
    assert wrapped == wrap("A", bare) == wrap("A", wrapped)
    assert bare == unwrap(wrapped, "A") == unwrap(bare, "A")


@pytest.mark.parametrize(
    "name", ["TBW102", "SCHEDULE_TOPIC_XXXX", "rmq_sys_x", "RMQ_SYS_TRACE_TOPIC", "CID_RMQ_SYS_x", ""]
)
def test_33_the_broker_s_own_names_are_never_wrapped(name: str) -> None:
    assert name == wrap("A", name)


def test_33_a_name_of_another_namespace_stays_wrapped() -> None:
    assert unwrap("B%T", "A") == "B%T"
    assert unwrap("%DLQ%B%G", "A") == "%DLQ%B%G"
    assert wrap("A", "B%T") == "A%B%T"


@pytest.mark.parametrize("namespace", [None, "", "  ", "\u3000"])
def test_no_namespace_changes_nothing(namespace: str | None) -> None:
    check_namespace(namespace)
    assert wrap(namespace, "T") == "T"
    assert unwrap("%T", namespace) == "%T"


def test_a_namespace_with_a_percent_sign_is_refused() -> None:
    # Java takes it, and its unwrap then cuts at the first of the two signs.
    for refuse in (lambda: wrap("A%B", "T"), lambda: unwrap("A%B%T", "A%B"), lambda: check_namespace("A%B")):
        with pytest.raises(MQClientException, match="namespace 'A%B' holds '%'") as caught:
            refuse()
        assert caught.value.response_code == -1


@given(st.text("abcXYZ019-_|", min_size=1), topics)
def test_33_wrapping_is_idempotent_and_unwrapping_undoes_it(namespace: str, topic: str) -> None:
    wrapped = wrap(namespace, topic)
    assert wrapped == wrap(namespace, wrapped)
    assert unwrap(topic, namespace) == unwrap(wrapped, namespace)


@pytest.mark.parametrize(
    ("address", "namespace"),
    [
        ("MQ_INST_1234_abc.mq.example.com:80", "MQ_INST_1234_abc"),
        ("http://MQ_INST_1234_a_b.mq.example.com:80", "MQ_INST_1234_a_b"),
        ("MQ_INST_1234.mq.example.com:80", None),
        ("MQ_INST_1234_abc:80", None),
        ("x-MQ_INST_1_a.b", None),
        ("127.0.0.1:9876", None),
        ("", None),
    ],
)
def test_a_namespace_may_be_part_of_the_address(address: str, namespace: str | None) -> None:
    assert namespace == namespace_of(address)
