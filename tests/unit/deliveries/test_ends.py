"""Ends of many half messages."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver, visible

ROWS = [f"row-{number:03}" for number in range(600)]


def test_more_half_messages_than_the_window_are_committed(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    assert first.end(halves, group).acknowledged.all()
    assert visible(cluster) == Counter(ROWS)


def test_a_busy_broker_gets_the_request_again(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS[:20])
    busy = Reply.code(ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]")
    cluster.brokers["broker-0"].play(busy, code=RequestCode.END_TRANSACTION, times=5)
    assert first.end(halves, group).acknowledged.all()
    assert visible(cluster) == Counter(ROWS[:20])


@pytest.mark.parametrize(
    "reply",
    [Reply.code(ResponseCode.SYSTEM_ERROR, "unknown"), Reply(closes=True, stored=True), Reply(closes=True)],
    ids=["code 1", "executed without an answer", "closed"],
)
def test_a_request_with_an_unknown_outcome_is_not_repeated(cluster: FakeCluster, first: Driver, reply: Reply) -> None:
    halves, group = first.prepare(ROWS[:20])
    cluster.brokers["broker-0"].play(reply, code=RequestCode.END_TRANSACTION)
    sender = first.end(halves, group)
    assert sender.error is not None
    on_broker = [halves[row].queue.broker_name == "broker-0" for row in range(20)]
    # The other broker gets all of its requests.
    assert all(done or there for done, there in zip(sender.acknowledged, on_broker, strict=True))
    assert max(visible(cluster).values()) == 1


def test_a_broker_that_rejects_an_end_as_late_gets_no_more(clock: MovedClock, first: Driver) -> None:
    halves, group = first.prepare(ROWS)
    clock.ahead += 61
    sender = first.end(halves, group)
    assert not sender.acknowledged.any()
    assert "604" in str(sender.error)


def test_no_request_is_sent_after_the_deadline(cluster: FakeCluster, first: Driver) -> None:
    halves, group = first.prepare(ROWS[:5])
    sender = type(first.end(halves.select(halves.codes[:0].astype(int)), group))(
        first.brokers, halves, group, 8, expires=first.brokers.clock()
    )
    sender.run()
    assert not sender.acknowledged.any()
    assert visible(cluster) == Counter()


def test_ordered_rows_become_visible_in_their_order(cluster: FakeCluster, clock: MovedClock) -> None:
    with driver(cluster, clock, ordered="true") as ordered:
        halves, group = ordered.open().prepare(ROWS)
        assert ordered.end(halves, group).acknowledged.all()
        queues: dict[tuple[str, int], list[str]] = {}
        for message in cluster.messages(TOPIC):
            queues.setdefault(place(message), []).append(message.body.decode())
    assert len(queues) == 4
    assert all(bodies == sorted(bodies) for bodies in queues.values())


def test_an_ordered_queue_stops_at_its_first_failure(cluster: FakeCluster, clock: MovedClock) -> None:
    with driver(cluster, clock, ordered="true") as ordered:
        halves, group = ordered.open().prepare(ROWS[:40])
        cluster.brokers["broker-0"].play(Reply(closes=True), code=RequestCode.END_TRANSACTION)
        sender = ordered.end(halves, group)
    for code in range(4):
        done = sender.acknowledged[halves.codes == code].tolist()
        # No row is committed after one that is not.
        assert done == sorted(done, reverse=True)
    assert not sender.acknowledged.all()


def place(message: MessageExt) -> tuple[str, int]:
    return message.store_host, message.queue_id
