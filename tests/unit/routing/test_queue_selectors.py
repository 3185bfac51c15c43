"""Selectors of the public producer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.routing.selectors import (
    MessageQueueSelector,
    SelectMessageQueueByHash,
    SelectMessageQueueByMachineRoom,
    SelectMessageQueueByRandom,
    select_queue,
)

MESSAGE = Message("T", b"x")


def queues(*brokers: str, nums: int = 3) -> list[MessageQueue]:
    return [MessageQueue("T", broker, number) for broker in brokers for number in range(nums)]


# Math.abs(arg.hashCode() % 7) as OpenJDK 17 printed it.
@pytest.mark.parametrize(
    ("arg", "index"), [("", 0), ("abc", 6), ("\U0001f600", 2), (-13, 6), (-(2**31), 2), ("polygenelubricants", 2)]
)
def test_the_hash_selector_takes_the_queue_that_java_takes(arg: object, index: int) -> None:
    seven = queues("a", nums=7)
    assert select_queue(SelectMessageQueueByHash(), seven, MESSAGE, arg) == seven[index]


def test_the_random_selector_reaches_every_queue_and_no_other() -> None:
    selector = SelectMessageQueueByRandom(random.Random(5))
    assert {select_queue(selector, queues("a", "b"), MESSAGE, None) for _ in range(200)} == {*queues("a", "b")}


def test_machine_room_selector_returns_queues_of_its_rooms() -> None:
    selector = SelectMessageQueueByMachineRoom(["idc1", "idc.3"], random.Random(5))
    everywhere = queues("idc1-a", "idc10-b", "c@idc.3", "idc-3", "d")
    assert {select_queue(selector, everywhere, MESSAGE, None) for _ in range(200)} == {*queues("idc1-a", "c@idc.3")}


def test_any_queue_is_selected_without_a_broker_in_the_room() -> None:
    selector = SelectMessageQueueByMachineRoom(["idc1"], random.Random(5))
    assert {select_queue(selector, queues("a", "b"), MESSAGE, None) for _ in range(200)} == {*queues("a", "b")}


@pytest.mark.parametrize("rooms", [[], [" "], ["idc1", ""], "idc1"])
def test_invalid_machine_rooms_are_rejected(rooms: Sequence[str]) -> None:
    with pytest.raises(ValueError, match="machine rooms"):
        SelectMessageQueueByMachineRoom(rooms)


def test_exception_of_a_selector_is_the_cause_of_the_send_error() -> None:
    def broken(_queues: Sequence[MessageQueue], _message: Message, _arg: object) -> MessageQueue:
        raise KeyError("no such customer")

    with pytest.raises(MQClientException, match=r"topic T.*KeyError.*no such customer") as raised:
        select_queue(broken, queues("a"), MESSAGE, None)
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.response_code == -1


@pytest.mark.parametrize("returned", [None, 0, "T/a/0"])
def test_a_selector_that_returns_no_queue_fails_the_send(returned: object) -> None:
    selector: MessageQueueSelector = lambda _queues, _message, _arg: returned  # type: ignore[assignment, return-value] # noqa: E731
    with pytest.raises(MQClientException, match=r"topic T.*must return one of the 3 queues"):
        select_queue(selector, queues("a"), MESSAGE, None)


def test_bytes_as_a_hash_key_fail_the_send_with_the_reason() -> None:
    with pytest.raises(MQClientException, match="bytes"):
        select_queue(SelectMessageQueueByHash(), queues("a"), MESSAGE, b"key")
