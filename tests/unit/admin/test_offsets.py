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
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.testing.fake_broker import FakeBroker
from tests.support.peer import Peer, Session


@pytest.fixture
def admin(fake: FakeCluster) -> Iterator[Admin]:
    with Admin(fake.name_server, timeout=0.5) as admin:
        yield admin


@pytest.fixture
def broker(fake: FakeCluster) -> FakeBroker:
    return fake.brokers["a"]


def permit(fake: FakeCluster, read_queues: int, write_queues: int, perm: int) -> None:
    """Set the queues of `orders` that clients may use."""
    topic = replace(
        fake.brokers["a"].storage.topics["orders"],
        read_queue_nums=read_queues,
        write_queue_nums=write_queues,
        perm=perm,
    )
    fake.brokers["a"].storage.create_topic("orders", topic)


def make_static(fake: FakeCluster) -> None:
    """Make `orders` a static topic, in the route that clients get."""
    route = fake.name_servers[0].route("orders")
    assert route is not None
    fake.name_servers[0].routes["orders"] = replace(route, static_topic=True)


def pulls(broker: FakeBroker) -> list[dict[str, str]]:
    return [dict(request.ext_fields) for request in broker.requests if request.code == 11]


def says_nothing(session: Session) -> None:
    while True:
        session.read()


def test_silent_broker_with_many_queues_does_not_affect_others(
    admin: Admin, fake: FakeCluster, broker: FakeBroker
) -> None:
    with Peer(says_nothing) as silent:
        brokers = (BrokerData("a", {0: broker.address}), BrokerData("silent", {0: silent.address}))
        fake.create_topic("wide", 20)
        fake.name_servers[0].routes["wide"] = TopicRouteData(
            (QueueData("a", 20, 20, 6), QueueData("silent", 20, 20, 6)), brokers
        )
        broker.storage.store.put(MessageQueue("wide", "a", 19), [Message.of("wide", b"there")], 1_700_000_000.5)
        found = admin.offsets("wide")
        peeked = admin.peek("wide")
    assert [(row.broker_name, row.queue_id) for row in found] == [("a", number) for number in range(20)]
    for table in (found, peeked):
        assert [text.partition(": ")[0] for text in table.missing] == ["20 queues of silent"]
    assert [row.body for row in peeked] == [b"there"]


@pytest.mark.parametrize(
    ("queues", "readable", "said"),
    [
        (
            (2, 2, 2),
            set(),
            "2 queues of a: broker a rejects reads, because the topic's permission there is w. Allow reads with ",
        ),
        (
            (1, 2, 6),
            {0},
            "1 queue of a: broker a rejects reads of the queues 1 to 1, because the topic has 2 write queues and 1 ",
        ),
    ],
)
def test_peek_names_queues_without_read_permission_and_shows_the_others(
    admin: Admin, fake: FakeCluster, queues: tuple[int, int, int], readable: set[int], said: str
) -> None:
    permit(fake, *queues)
    found = admin.peek("orders")
    (missing,) = found.missing
    assert missing.startswith(said)
    assert f" -b {fake.brokers['a'].address} " in missing
    assert {row.queue_id for row in found} == readable
    assert {int(fields["queueId"]) for fields in pulls(fake.brokers["a"])} == readable
    # The other queues count.
    assert admin.offsets("orders").notes == ("3 messages in 2 queues",)


def test_unreadable_queue_without_messages_is_not_reported_missing(admin: Admin, fake: FakeCluster) -> None:
    permit(fake, 2, 5, 6)
    assert admin.peek("orders").missing == ()


def test_static_topic_is_rejected_like_by_a_read(admin: Admin, fake: FakeCluster) -> None:
    make_static(fake)
    assert admin.route("orders").static_topic
    for ask in (admin.offsets, admin.peek, lambda topic: queue_offsets([fake.name_server], topic)):
        with pytest.raises(OptionError, match=r"reading topic orders: it is a static \(logical\) topic, which"):
            ask("orders")


@pytest.mark.parametrize(("kind", "asked"), [("BatchCQ", "*"), ("SimpleCQ", "t1")])
def test_peek_filters_tags_itself_in_inner_batch_topics(
    admin: Admin, broker: FakeBroker, kind: str, asked: str
) -> None:
    broker.storage.topics["orders"].attributes["queue.type"] = kind
    assert [row.tags for row in admin.peek("orders", tag="t1")] == ["t1"]
    assert {fields["subscription"] for fields in pulls(broker)} == {asked}


def test_peek_error_does_not_mention_read_options(admin: Admin, broker: FakeBroker) -> None:
    broker.always[RequestCode.PULL_MESSAGE] = Reply(silent=True)
    with pytest.raises(ReadError, match=r"peeking at topic orders: PULL_MESSAGE to .* longer timeout") as raised:
        admin.peek("orders")
    assert "readTimeoutMs" not in str(raised.value)


def test_name_servers_can_be_one_string(fake: FakeCluster) -> None:
    assert queue_offsets(fake.name_server, "orders") == queue_offsets([fake.name_server], "orders")


def test_minimum_above_the_maximum_lowers_no_total(fake: FakeCluster, admin: Admin, broker: FakeBroker) -> None:
    fake.create_topic("expired", 2)
    empty, filled = (MessageQueue("expired", "a", number) for number in (0, 1))
    broker.storage.store.put(filled, [Message.of("expired", b"x")] * 3, 0.0)
    broker.storage.store.expired[empty] = 5
    found = admin.offsets("expired")
    assert {row.queue: row.messages for row in found if row.broker_name == "a"} == {empty: 0, filled: 3}
    assert found.notes[0].startswith("3 messages in")
