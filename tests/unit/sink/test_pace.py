"""The pace of a task: on after a rejection, slower the longer requests wait, off when they wait no more."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.sink.limits import Pace
from rocketmq_spark.testing import Reply
from tests.support.pipelines import Rig
from tests.support.scripted import route

BUSY = Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy", delay=0.2)


def overloaded() -> Pace:
    """Return a pace that is on since time 0. Requests without a wait take 5 ms."""
    pace = Pace(MIB, random.Random(1))
    pace.success("a", 5.0, -1.0, -0.9)
    for _ in range(2):
        pace.rejection("a", 205.0, -0.2, 0.0)
    return pace


def spaced(pace: Pace, wait_ms: float, seconds: float, *, begin: float = 0.0, nbytes: int = MIB) -> int:
    """Send as the pace allows, with answers that all wait so long; return the number of requests."""
    sent, now = 0, begin
    while (now := max(now + 0.001, pace.next_at)) < begin + seconds and pace.is_on:
        pace.start(nbytes, now)
        pace.success("a", 5.0 + wait_ms, now, now + (5.0 + wait_ms) / 1000)
        sent += 1
    return sent


def test_pace_is_off_until_a_rejection() -> None:
    pace = Pace(MIB, random.Random(1))
    for number in range(100):
        pace.start(MIB, number / 1000)
        pace.success("a", 190.0, number / 1000, number / 1000 + 0.19)
    assert not pace.is_on
    assert pace.next_at < 0
    assert pace.parts(MIB) == 1
    pace.rejection("a", 200.0, 0.0, 0.2)
    assert not pace.is_on
    pace.rejection("a", 200.0, 0.0, 0.2)
    assert pace.is_on
    assert pace.next_at >= 0.2
    assert pace.parts(MIB) == 8
    assert pace.parts(MIB // 2) == 4
    assert pace.parts(100) == 1


def test_tasks_send_slower_the_longer_requests_wait() -> None:
    counts = [spaced(overloaded(), wait, 20.0) for wait in (30.0, 70.0, 112.0, 130.0)]
    assert counts == sorted(counts, reverse=True)
    # 10 batches a second at half of the longest wait, a quarter of it at 112 ms.
    assert 160 <= counts[1] <= 240
    assert 35 <= counts[2] <= 75


def test_brokers_that_reject_earlier_make_the_longest_wait_shorter() -> None:
    pace = Pace(MIB, random.Random(1))
    pace.success("a", 5.0, -1.0, -0.9)
    for _ in range(4):
        pace.rejection("a", 105.0, -0.1, 0.0)
    # Half of 70 ms, the longest wait at these brokers.
    assert 160 <= spaced(pace, 35.0, 20.0) <= 240


def test_longest_waits_do_not_stop_a_task() -> None:
    assert spaced(overloaded(), 1000.0, 29.0) >= 4


def test_small_requests_count_by_their_size() -> None:
    large, small = spaced(overloaded(), 75.0, 10.0), spaced(overloaded(), 75.0, 10.0, nbytes=MIB // 8)
    assert 6 <= small / large <= 10


def test_pace_ends_when_requests_wait_no_more() -> None:
    pace = overloaded()
    spaced(pace, 0.0, 10.0, nbytes=MIB // 8)
    assert not pace.is_on
    assert pace.next_at < 0


def test_pace_ends_without_rejections_on_a_slow_link() -> None:
    pace = Pace(MIB, random.Random(1))
    for _ in range(2):
        pace.rejection("a", 300.0, -0.2, 0.1)
    counts = [spaced(pace, 100.0, 30.0, begin=0.1 + begin) for begin in range(0, 120, 30)]
    # Requests wait as long as before, but the task sends faster and faster.
    assert counts == sorted(counts)
    assert counts[1] > 1.5 * counts[0]
    assert counts[3] > 8 * counts[0]
    spaced(pace, 100.0, 10.0, begin=120.1)
    assert not pace.is_on


def test_pace_of_a_task_without_rejections_stays_while_waits_vary() -> None:
    pace = overloaded()
    counts = []
    for begin in range(0, 200, 40):
        counts.append(spaced(pace, 40.0, 1.0, begin=float(begin)) + spaced(pace, 120.0, 39.0, begin=begin + 1.0))
    # Until 120 s after the last rejection, the rate depends on waits only.
    assert 0.8 * counts[1] < counts[2] < 1.2 * counts[1]
    assert counts[4] > 1.5 * counts[2]


def test_tasks_avoid_brokers_at_which_requests_wait_longer() -> None:
    pace = overloaded()
    for number in range(100):
        for broker, wait in (("a", 60.0), ("b", 60.0), ("c", 140.0)):
            pace.success(broker, 5.0 + wait, number / 10, number / 10 + 0.1)
    avoided = Counter(broker for broker in "abcd" for _ in range(10_000) if pace.avoids(broker))
    assert set(avoided) == {"c"}
    assert 500 < avoided["c"] < 3_000


def test_a_rejection_ends_the_haste_of_a_task_that_saw_none_for_a_while() -> None:
    pace = overloaded()
    first, _, hasty = (spaced(pace, 100.0, 30.0, begin=begin) for begin in (0.0, 30.0, 60.0))
    pace.rejection("a", 200.0, 89.8, 90.0)
    again = spaced(pace, 100.0, 30.0, begin=90.0)
    assert hasty > 4 * first
    assert again < 1.2 * first


def test_rejections_keep_the_pace_on() -> None:
    pace = overloaded()
    for begin in range(0, 100, 20):
        pace.rejection("a", 200.0, begin - 0.2, float(begin))
        spaced(pace, 100.0, 20.0, begin=float(begin))
    assert pace.is_on


def test_rejections_after_a_short_wait_do_not_begin_a_pace() -> None:
    pace = Pace(MIB, random.Random(1))
    pace.success("a", 1.0, -1.0, -0.9)
    for _ in range(10):
        pace.rejection("a", 21.0, 0.0, 0.021)
    assert not pace.is_on


def test_rejections_after_a_short_wait_end_the_pace() -> None:
    pace = overloaded()
    pace.rejection("a", 25.0, 1.0, 1.025)
    assert not pace.is_on
    assert pace.next_at < 0


def test_answers_to_earlier_requests_do_not_count() -> None:
    pace, same = overloaded(), overloaded()
    for _ in range(1000):
        pace.success("a", 5.0, -0.1, 0.1)
        pace.rejection("a", 200.0, -0.1, 0.1)
    pace.start(MIB, 1.0)
    same.start(MIB, 1.0)
    assert pace.next_at == same.next_at


@pytest.mark.parametrize("bound", [None, MessageQueue("T", "a", 1)])
def test_rows_are_stored_once_and_in_order_in_parts(bound: MessageQueue | None) -> None:
    # One queue, and one request in flight, so that the order of the rows shows.
    rig = Rig(route({"a": 1 if bound is None else 2}), ordered=True, batch_bytes=1600)
    rig.transport.always["a"] = Reply(delay=0.12)
    rig.transport.play("a", BUSY, BUSY, BUSY)
    bodies = [b"%04d" % number for number in range(300)]
    for begin in range(0, 300, 100):
        rig.offer_bodies(bodies[begin : begin + 100], bound or MessageQueue("T", "a", 0))
    rig.run()
    assert rig.pipeline.failure is None
    (stored,) = rig.transport.stored.values()
    assert [message.body for message in stored] == bodies
    # A rejected batch is resent unchanged.
    sizes = [request.batch.rows for request in rig.transport.requests]
    assert sizes[:4] == [100] * 4
    assert max(sizes[4:]) < 100
    assert rig.pipeline.pending_bytes == 0


def test_batches_that_wait_for_a_full_window_are_divided_later() -> None:
    rig = Rig(route({"a": 4}), batch_bytes=1600)
    rig.transport.always["a"] = Reply(delay=0.12)
    rig.transport.play("a", *[BUSY] * 6)
    rig.offer(40, rows=100)
    rig.run()
    assert rig.pipeline.failure is None
    assert sum(len(messages) for messages in rig.transport.stored.values()) == 4000
    assert min(Counter(request.batch.rows for request in rig.transport.requests)) < 100


def test_the_earliest_deadline_is_retried_first() -> None:
    rig = Rig(route({"a": 1}), delivery_timeout_ms=5000)
    rig.transport.always["a"] = BUSY
    rig.offer(20, rows=7)
    rig.run()
    assert rig.pipeline.failure is not None
    # The lines are checked each ``retryBackoffMs``.
    assert rig.clock.now <= 105.1


def test_a_rejected_batch_is_resent_before_most_newer_ones() -> None:
    brokers = ["a", "b", "c", "d"]
    rig = Rig(route(dict.fromkeys(brokers, 1)), batch_bytes=1600)
    for broker in brokers:
        rig.transport.always[broker] = Reply(delay=0.12)
        rig.transport.play(broker, BUSY, BUSY)
    rig.offer(50, rows=100)
    rig.run()
    assert rig.pipeline.failure is None
    # Only rejected batches are not divided. Two were rejected at each broker.
    places = [place for place, request in enumerate(rig.transport.requests) if request.batch.rows == 100]
    assert len(places) == 4 * len(brokers)
    assert max(places) < len(rig.transport.requests) / 4
