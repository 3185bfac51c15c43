"""Queue selection (spec/producer.md section 17, lines 55 to 59 and 67)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.producer.fault import LatencyFaultTolerance, LatencyLadder
from rocketmq_spark.producer.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.producer.selector import RandomSelector, RoundRobinSelector
from rocketmq_spark.transport.script import route

LADDER = LatencyLadder((50, 550), (0, 30_000))


def queues(*brokers: str, nums: int = 4) -> TopicPublishInfo:
    return publish_info_of("T", route(dict.fromkeys(brokers, nums)))


def selector(faults: LatencyFaultTolerance | None = None, seed: int = 1) -> RoundRobinSelector:
    return RoundRobinSelector(faults or LatencyFaultTolerance(LADDER), random.Random(seed))


def always(_broker: str) -> bool:
    return True


def test_55_without_a_failure_a_round_visits_each_queue_once() -> None:
    chosen, all_queues = selector(), queues("a", "b", "c")
    picked = [chosen.select(all_queues, None, always, 0.0) for _ in all_queues.queues]
    assert sorted(picked) == sorted(all_queues.queues)


def test_56_two_selectors_start_at_different_queues() -> None:
    all_queues = queues("a", "b", nums=50)
    starts = {selector(seed=seed).select(all_queues, None, always, 0.0) for seed in range(8)}
    assert len(starts) > 1


def test_57_the_broker_that_failed_is_avoided_while_there_is_another() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    assert {chosen.select(all_queues, "a", always, 0.0).broker_name for _ in range(20)} == {"b"}  # type: ignore[union-attr]


def test_58_a_queue_is_still_returned_when_all_are_on_the_broker_that_failed() -> None:
    assert selector().select(queues("a"), "a", always, 0.0) in queues("a").queues


def test_59_the_index_wraps_without_going_negative() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    chosen._index = 0x7FFFFFFF - 3
    picked = [chosen.select(all_queues, None, always, 0.0) for _ in range(16)]
    assert None not in picked
    assert chosen._index >= 0
    assert {queue.broker_name for queue in picked if queue} == {"a", "b"}


def test_67_with_the_fault_strategy_available_comes_before_reachable_before_any() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    chosen, all_queues = selector(faults), queues("a", "b", "c")
    faults.update("a", 600, now=0.0, isolation=False)
    assert {chosen.select(all_queues, "b", always, 1.0).broker_name for _ in range(12)} == {"c"}  # type: ignore[union-attr]
    faults.update("c", 600, now=0.0, isolation=True, reachable=False)
    assert {chosen.select(all_queues, "b", always, 1.0).broker_name for _ in range(12)} == {"a"}  # type: ignore[union-attr]
    faults.update("a", 600, now=0.0, isolation=True, reachable=False)
    assert {chosen.select(all_queues, "b", always, 1.0).broker_name for _ in range(12)} == {"a", "c"}  # type: ignore[union-attr]


def test_a_full_window_is_passed_over_and_waited_for_only_when_all_are_full() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    assert {chosen.select(all_queues, None, "b".__eq__, 0.0).broker_name for _ in range(8)} == {"b"}  # type: ignore[union-attr]
    assert chosen.select(all_queues, None, lambda _: False, 0.0) is None


def test_the_broker_that_failed_is_taken_again_rather_than_waiting_for_a_full_one() -> None:
    for chosen in (selector(), RandomSelector(random.Random(1))):
        queue = chosen.select(queues("a", "b"), "a", "a".__eq__, 0.0)
        assert queue is not None
        assert queue.broker_name == "a"


def test_an_isolated_broker_is_not_taken_because_the_available_one_is_full() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    faults.update("a", 600, now=0.0, isolation=False)
    assert selector(faults).select(queues("a", "b"), None, "a".__eq__, 1.0) is None


def test_random_reaches_every_queue_and_only_those_that_admit() -> None:
    chosen, all_queues = RandomSelector(random.Random(7)), queues("a", "b")
    counts = Counter(chosen.select(all_queues, None, always, 0.0) for _ in range(400))
    assert set(counts) == all_queues.queue_set
    assert {chosen.select(all_queues, None, "b".__eq__, 0.0).broker_name for _ in range(50)} == {"b"}  # type: ignore[union-attr]


@pytest.mark.parametrize("enabled", [False, True])
@given(data=st.data())
def test_a_select_always_returns_an_admitted_queue_while_one_exists(enabled: bool, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcde"), min_size=1, unique=True))
    admitting = data.draw(st.sets(st.sampled_from(names), min_size=1))
    last = data.draw(st.sampled_from([*names, None, "gone"]))
    chosen = selector(LatencyFaultTolerance(LADDER, enabled=enabled), seed=data.draw(st.integers(0, 2**40)))
    queue = chosen.select(queues(*names), last, admitting.__contains__, 0.0)
    assert queue is not None
    assert queue.broker_name in (admitting - {last} or admitting)
