"""Recalls of delayed messages: the broker that is asked, and handles that are rejected before."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.send_result import RecallMessage, broker_name_of
from rocketmq_spark.producer.producer import Producer
from tests.support.scripted import ScriptedTransport


def handle(*words: str) -> str:
    return base64.urlsafe_b64encode(" ".join(words).encode()).decode()


GOOD = handle("v1", "T", "b", "1795226656001", "0102")


def test_a_handle_names_its_broker() -> None:
    given = "djEgc3BlY19iMSBzcGVjLWIgMTc5NTIyNjY1NjAwMSBEMkQyRDJEMkQyRDJEMkQyRDJEMkQyRDJEMkQyRDJEMg=="
    assert broker_name_of(given) == "spec-b"


@pytest.mark.parametrize("bad", ["", "x", "grün", handle("v2", "T", "b", "1", "id"), handle("v1", "T"), GOOD[:-3]])
def test_malformed_recall_handle_is_rejected(bad: str) -> None:
    with pytest.raises(MQClientException, match="is no recall handle"):
        broker_name_of(bad)


def test_recall_goes_to_the_broker_that_holds_the_message(
    make_producer: Callable[..., Producer], transport: ScriptedTransport
) -> None:
    producer = make_producer("pg")
    producer.start()
    assert producer.recall_message("T", GOOD) == GOOD
    [call] = [call for call in transport.calls if call[0] == "recall_message"]
    masters = {broker.broker_name: broker.master for broker in transport.routes["T"].broker_datas}
    assert call == ("recall_message", masters["b"], RecallMessage("T", GOOD, "pg", "b"))


@pytest.mark.parametrize("topic", ["%RETRY%g", "%DLQ%g", "a topic"])
def test_other_topics_are_refused(
    make_producer: Callable[..., Producer], transport: ScriptedTransport, topic: str
) -> None:
    producer = make_producer()
    producer.start()
    with pytest.raises(MQClientException):
        producer.recall_message(topic, GOOD)
    assert not [call for call in transport.calls if call[0] == "recall_message"]
