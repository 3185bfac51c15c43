"""Who filters the messages of a read, and checks of expressions."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    ReadError,
    RemotingConnectException,
    RequestNotSupportedException,
    RocketMQError,
)
from rocketmq_spark.protocol.remoting.codes import broker_error
from rocketmq_spark.source.filters import check_filter, may_hold_inner_batches, tasks_filter
from tests.support.processes import PATIENCE
from tests.support.scripted import route
from tests.unit.source.conftest import A0, A1, B0, B1, Make

DOWN = RemotingConnectException("refused")


def test_attributes_of_inner_batch_topics_are_requested_once(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    reader.queues.look_up()
    assert not may_hold_inner_batches(reader.requests, [A0, A1, B0])
    assert [address for address, _ in reader.asked("topic_config")] == ["a:10911", "b:10911"]
    other = make_reader(sub_expression="a")
    other.transport.attributes["orders"] = {"queue.type": "BatchCQ"}
    other.queues.look_up()
    assert may_hold_inner_batches(other.requests, [A0, B0])
    assert may_hold_inner_batches(other.requests, [A1])
    assert len(other.asked("topic_config")) == 1


def test_topic_created_again_for_inner_batches_is_filtered_by_tasks(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a")
    reader.queues.look_up()
    assert not tasks_filter(reader.requests, [A0])
    reader.transport.attributes["orders"] = {"queue.type": "BatchCQ"}
    reader.clock.advance(1.0)
    assert tasks_filter(reader.requests, [A0])


NO_RIGHT = MQBrokerException("no right", 16, "", "a:10911")
UNSUPPORTED = RequestNotSupportedException("unknown request", 3, "", "a:10911")


@pytest.mark.parametrize(
    ("error", "filter_type", "may"),
    [(DOWN, "TAG", True), (NO_RIGHT, "TAG", True), (UNSUPPORTED, "TAG", True), (NO_RIGHT, "SQL92", False)],
)
def test_topic_of_unknown_type_is_filtered_by_task_or_broker(
    make_reader: Make, caplog: pytest.LogCaptureFixture, error: RocketMQError, filter_type: str, *, may: bool
) -> None:
    reader = make_reader(sub_expression="a", filter_type=filter_type)
    reader.queues.look_up()
    reader.transport.fail("topic_config", error)
    assert may_hold_inner_batches(reader.requests, [A0]) is may
    assert "The type of its queues is unknown" in caplog.text


@pytest.mark.parametrize("filter_type", ["TAG", "SQL92"])
def test_brokers_of_4_9_filter_because_they_have_no_inner_batches(make_reader: Make, filter_type: str) -> None:
    reader = make_reader(sub_expression="a", filter_type=filter_type)
    reader.transport.release = "V4_9_7"
    reader.queues.look_up()
    reader.transport.fail("topic_config", UNSUPPORTED, UNSUPPORTED)
    assert not tasks_filter(reader.requests, [A0])
    reader.clock.advance(1.0)
    assert not tasks_filter(reader.requests, [A0])
    # One address has one release until the broker knows the request.
    assert reader.asked("runtime_info") == [("a:10911",)]


def test_sql92_is_rejected_by_way_of_a_proxy_which_checks_nothing(make_reader: Make) -> None:
    reader = make_reader(sub_expression="n > > 1", filter_type="SQL92")
    reader.queues.look_up()
    reader.transport.fail("topic_config", UNSUPPORTED)
    reader.transport.fail("runtime_info", UNSUPPORTED)
    with pytest.raises(OptionError, match="a:10911 is a proxy, so no broker can check subExpression"):
        tasks_filter(reader.requests, [A0])
    assert reader.asked("check_filter") == []


def test_every_broker_checks_an_expression_once(make_reader: Make) -> None:
    reader = make_reader(sub_expression="n > > 1", filter_type="SQL92")
    reader.queues.look_up()
    check_filter(reader.requests, [A0, A1, B0, B1])
    assert sorted(reader.asked("check_filter")) == [
        (f"{broker}:10911", "orders", reader.options.consumer_group, "n > > 1", "SQL92") for broker in ("a", "b")
    ]
    reader.transport.fail("check_filter", MQBrokerException("can't be parsed", 23, "", "a:10911"))
    with pytest.raises(OptionError, match=r"filterType=SQL92: a broker can't parse it: .*can't be parsed"):
        check_filter(reader.requests, [A0, A1, B0, B1])


@pytest.mark.parametrize(
    ("code", "remark", "expected", "text"),
    [
        (
            1,
            "The broker does not support consumer to filter message by SQL92",
            OptionError,
            "enablePropertyFilter=true",
        ),
        (23, "can't be parsed", OptionError, "can't parse it"),
        (16, "User:x has no permission to access Topic:orders", MQBrokerException, "the right that it needs on Topic"),
        (1, "org.apache.rocketmq.acl.common.AclException: no permission", MQBrokerException, "no permission"),
    ],
)
def test_rejected_expression_and_rejected_user_are_distinguished(
    make_reader: Make, code: int, remark: str, expected: type[RocketMQError], text: str
) -> None:
    reader = make_reader(sub_expression="a > 1", filter_type="SQL92")
    reader.queues.look_up()
    reader.transport.fail("check_filter", broker_error(code, remark, "a:10911", "checking a filter"))
    with pytest.raises(expected, match=text) as raised:
        check_filter(reader.requests, [A0])
    assert isinstance(raised.value, OptionError) is (expected is OptionError)


@pytest.mark.parametrize(
    "error",
    [
        DOWN,
        *(
            broker_error(code, remark, "a:10911", "checking a filter")
            for code, remark in [(2, "[REJECTREQUEST]system busy"), (14, "shutting down"), (1, "oops")]
        ),
    ],
)
def test_broker_that_does_not_check_the_filter_is_asked_again(make_reader: Make, error: RocketMQError) -> None:
    rejected = MQBrokerException("can't be parsed", 23, "", "a:10911")
    reader = make_reader(sub_expression="n > > 1", filter_type="SQL92")
    reader.queues.look_up()
    reader.transport.fail("check_filter", error, rejected)
    with pytest.raises(OptionError, match="a broker can't parse it"):
        check_filter(reader.requests, [A0])


def test_filter_that_no_broker_checks_in_time_is_a_read_error(make_reader: Make) -> None:
    # Brokers return every message for an expression that they can't parse.
    reader = make_reader(sub_expression="n > > 1", filter_type="SQL92", read_timeout_ms=5_000)
    reader.queues.look_up()
    reader.transport.fail("check_filter", *[DOWN] * 100)
    with pytest.raises(ReadError, match=r"requests about queue orders/a/0: no broker answered within readTimeoutMs=5"):
        check_filter(reader.requests, [A0])


@pytest.mark.parametrize("planned", ["filter", "time"])
def test_types_of_many_topics_are_requested_concurrently(make_reader: Make, planned: str) -> None:
    topics = [f"t{number}" for number in range(5)]
    reader = make_reader(subscribe=tuple(topics), sub_expression="a")
    reader.transport.routes |= {name: route({"a": 1}) for name in topics}
    queues = reader.queues.look_up()
    reader.fill(dict.fromkeys(queues, 1))
    # A filter asks for the type of one topic first.
    asked_first = 1 if planned == "filter" else 0
    together, works = threading.Barrier(len(topics) - asked_first), reader.transport.topic_config

    def asked(address: str, topic: str, timeout: float) -> Any:
        if len(reader.asked("topic_config")) >= asked_first:
            together.wait(PATIENCE)
        return works(address, topic, timeout)

    reader.transport.topic_config = asked
    if planned == "filter":
        assert not may_hold_inner_batches(reader.requests, queues)
    else:
        assert reader.at(dict.fromkeys(queues, 0)) == dict.fromkeys(queues, 0)
    assert len(reader.asked("topic_config")) == len(topics)
