"""Offsets and newest messages of queues, if some brokers do not answer or some queues are closed to readers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rocketmq_spark import Admin
from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.errors import OptionError, ReadError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from tests.support.peer import BrokerPeer, Peer, Session


@pytest.fixture
def admin(server: BrokerPeer) -> Iterator[Admin]:
    with Admin(server.address, timeout=0.5) as made:
        yield made


def pulls(server: BrokerPeer) -> list[dict[str, str]]:
    return [dict(request.ext_fields) for request in server.requests if request.code == 11]


def says_nothing(session: Session) -> None:
    while True:
        session.read()


def test_silent_broker_with_many_queues_does_not_affect_others(admin: Admin, server: BrokerPeer) -> None:
    with Peer(says_nothing) as silent:
        brokers = (BrokerData("a", {0: silent.address}, "c"), BrokerData("b", {0: server.address}, "c"))
        server.routes["wide"] = TopicRouteData((QueueData("a", 20, 20, 6), QueueData("b", 20, 20, 6)), brokers)
        server.store.put(MessageQueue("wide", "b", 19), [Message.of("wide", b"there")], 1_700_000_000.5)
        found = admin.offsets("wide")
        peeked = admin.peek("wide")
    assert [(row.broker_name, row.queue_id) for row in found] == [("b", number) for number in range(20)]
    for table in (found, peeked):
        assert [text.partition(": ")[0] for text in table.missing] == ["20 queues of a"]
    assert [row.body for row in peeked] == [b"there"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            QueueData("a", 2, 2, 2),
            "2 queues of a: closed to readers (on this broker the topic has permission w and readQueueNums=2)",
        ),
        (
            QueueData("a", 1, 2, 6),
            "1 queue of a: closed to readers (on this broker the topic has permission rw and readQueueNums=1)",
        ),
    ],
)
def test_peek_names_queues_without_read_permission_and_shows_the_others(
    admin: Admin, server: BrokerPeer, data: QueueData, said: str
) -> None:
    server.routes["orders"] = replace(server.routes["orders"], queue_datas=(data,))
    found = admin.peek("orders")
    assert found.missing == (said,)
    assert {row.queue_id for row in found} == ({0} if data.readable else set())
    assert {fields["queueId"] for fields in pulls(server)} == ({"0"} if data.readable else set())
    # The other queues count.
    assert admin.offsets("orders").notes == ("3 messages in 2 queues",)


def test_unreadable_queue_without_messages_is_not_reported_missing(admin: Admin, server: BrokerPeer) -> None:
    server.routes["orders"] = replace(server.routes["orders"], queue_datas=(QueueData("a", 2, 5, 6),))
    assert admin.peek("orders").missing == ()


def test_static_topic_is_rejected_like_by_a_read(admin: Admin, server: BrokerPeer) -> None:
    server.routes["orders"] = replace(server.routes["orders"], static_topic=True)
    assert admin.route("orders").static_topic
    for ask in (admin.offsets, admin.peek, lambda topic: queue_offsets([server.address], topic)):
        with pytest.raises(OptionError, match=r"reading topic orders: it is a static \(logical\) topic, which"):
            ask("orders")


@pytest.mark.parametrize(("kind", "asked"), [("BatchCQ", "*"), ("SimpleCQ", "t1")])
def test_peek_filters_tags_itself_in_inner_batch_topics(
    admin: Admin, server: BrokerPeer, kind: str, asked: str
) -> None:
    server.attributes["orders"] = {"queue.type": kind}
    assert [row.tags for row in admin.peek("orders", tag="t1")] == ["t1"]
    assert {fields["subscription"] for fields in pulls(server)} == {asked}


def test_peek_error_does_not_mention_read_options(admin: Admin, server: BrokerPeer) -> None:
    server._answer_pull = lambda session, request: b""  # type: ignore[method-assign]
    with pytest.raises(ReadError, match=r"peeking at topic orders: PULL_MESSAGE to .* longer timeout") as raised:
        admin.peek("orders")
    assert "readTimeoutMs" not in str(raised.value)


def test_name_servers_can_be_one_string(server: BrokerPeer) -> None:
    assert queue_offsets(server.address, "orders") == queue_offsets([server.address], "orders")
