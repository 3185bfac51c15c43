"""Queue selection."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.fault_strategy import PRESETS, FaultSite, FaultStrategy
from rocketmq_spark.routing.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.routing.selectors import (
    MachineRoomSelector,
    QueueSelector,
    RandomSelector,
    RoundRobinSelector,
    ThreadLocalSelector,
    selector_of,
)
from tests.support.scripted import route

S = FaultSite
MODES = [None, *PRESETS]


def strategy(preset: str | None = "v4", **isolated: FaultSite) -> FaultStrategy:
    """Return a strategy (None: switched off) with reports of these brokers at time 0."""
    faults = FaultStrategy(PRESETS[preset or "v4"], enabled=preset is not None)
    for broker, site in isolated.items():
        faults.update(site, broker, 1.0, 0.0)
    return faults


def queues(*brokers: str, nums: int = 4) -> TopicPublishInfo:
    return publish_info_of("T", route(dict.fromkeys(brokers, nums)))


def selector(faults: FaultStrategy | None = None, seed: int = 1) -> RoundRobinSelector:
    return RoundRobinSelector(faults or strategy(None), random.Random(seed))


def brokers_of(chosen: QueueSelector, info: TopicPublishInfo, last: str | None, now: float = 1.0) -> set[str | None]:
    """Return the brokers of many selections."""
    picked = [chosen.select(info, last, always, now) for _ in range(60)]
    return {queue.broker_name if queue else None for queue in picked}


def always(_broker: str) -> bool:
    return True


def test_each_queue_is_selected_once_per_round_without_failures() -> None:
    chosen, all_queues = selector(), queues("a", "b", "c")
    picked = [chosen.select(all_queues, None, always, 0.0) for _ in all_queues.queues]
    assert Counter(picked) == Counter(all_queues.queues)


def test_two_selectors_start_at_different_queues() -> None:
    all_queues = queues("a", "b", nums=50)
    starts = {selector(seed=seed).select(all_queues, None, always, 0.0) for seed in range(8)}
    assert len(starts) > 1


def broker_of(queue: MessageQueue | None) -> str | None:
    return None if queue is None else queue.broker_name


def test_the_broker_that_failed_is_avoided_while_there_is_another() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    assert {broker_of(chosen.select(all_queues, "a", always, 0.0)) for _ in range(20)} == {"b"}


def test_queue_of_the_failed_broker_is_selected_if_there_is_no_other() -> None:
    assert selector().select(queues("a"), "a", always, 0.0) in queues("a").queues


def test_the_index_wraps_without_going_negative() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    chosen._index = 0x7FFFFFFF - 3
    picked = [chosen.select(all_queues, None, always, 0.0) for _ in range(16)]
    assert None not in picked
    assert chosen._index >= 0
    assert {queue.broker_name for queue in picked if queue} == {"a", "b"}


@pytest.mark.parametrize("preset", ["v4", "v5"])
def test_available_brokers_are_preferred_to_reachable_ones(preset: str) -> None:
    all_queues = queues("a", "b", "c")
    assert brokers_of(selector(strategy(preset, a=S.REMOTING_FAILED)), all_queues, "b") == {"c"}
    unreachable = strategy(preset, a=S.REMOTING_FAILED, b=S.REMOTING_FAILED, c=S.BROKER_REFUSED)
    assert brokers_of(selector(unreachable), all_queues, "b") == {"a"}
    none_left = strategy(preset, a=S.BROKER_REFUSED, b=S.BROKER_REFUSED, c=S.BROKER_REFUSED)
    assert brokers_of(selector(none_left), all_queues, "b") == {"a", "b", "c"}


@pytest.mark.parametrize("preset", ["v4", "v5"])
def test_isolated_reachable_broker_is_preferred_to_the_one_that_failed(preset: str) -> None:
    faults = strategy(preset, a=S.REMOTING_FAILED)
    assert brokers_of(selector(faults), queues("a", "b"), "b") == {"a"}


@pytest.mark.parametrize(("preset", "resets"), [("v4", True), ("v5", True), ("legacy", False), (None, False)])
def test_retry_restarts_at_a_random_queue_only_with_presets_v4_and_v5(preset: str | None, resets: bool) -> None:
    chosen, info = ThreadLocalSelector(strategy(preset), random.Random(3)), queues("a", nums=1000)
    ids = [queue.queue_id for queue in (chosen.select(info, None, 0.0, reset_index=True) for _ in range(20)) if queue]
    steps = {(after - before) % 1000 for before, after in itertools.pairwise(ids)}
    assert (steps != {1}) is resets


def test_legacy_does_not_prefer_the_broker_that_failed() -> None:
    faults = strategy("legacy", c=S.REMOTING_FAILED)
    assert brokers_of(selector(faults), queues("a", "b", "c"), "a") == {"b"}
    # The broker is available, so it is selected before an isolated one.
    assert brokers_of(selector(faults), queues("a", "c"), "a") == {"a"}


def test_legacy_selects_from_the_better_half_if_all_are_isolated() -> None:
    faults = strategy("legacy")
    for latency_ms, broker in enumerate("abcd"):
        faults.update(S.REMOTING_FAILED, broker, latency_ms, 0.0)
    info = publish_info_of("T", route({"a": 2, "b": 8, "c": 8, "d": 8}))
    picked = {selector(faults).select(info, None, always, 1.0) for _ in range(60)}
    assert {queue.broker_name for queue in picked if queue} == {"a", "b"}
    assert picked <= info.queue_set


def test_legacy_removes_a_picked_broker_without_writable_queues() -> None:
    faults = strategy("legacy", gone=S.REMOTING_FAILED, a=S.REMOTING_FAILED, b=S.REMOTING_FAILED, c=S.REMOTING_FAILED)
    faults.update(S.REMOTING_FAILED, "gone", 0.5, 0.0)
    chosen = selector(faults)
    assert brokers_of(chosen, queues("a", "b", "c"), None) <= {"a", "b", "c"}
    assert "gone" not in faults.table.items()
    assert {"a", "b", "c"} <= faults.table.items().keys()


def test_broker_with_full_window_is_skipped() -> None:
    chosen, all_queues = selector(), queues("a", "b")
    assert {broker_of(chosen.select(all_queues, None, "b".__eq__, 0.0)) for _ in range(8)} == {"b"}
    assert chosen.select(all_queues, None, lambda _: False, 0.0) is None


def test_failed_broker_with_room_is_preferred_to_a_full_one() -> None:
    for chosen in (selector(), RandomSelector(random.Random(1))):
        queue = chosen.select(queues("a", "b"), "a", "a".__eq__, 0.0)
        assert queue is not None
        assert queue.broker_name == "a"


@pytest.mark.parametrize("preset", PRESETS)
def test_isolated_broker_is_not_selected_because_the_others_are_full(preset: str) -> None:
    faults = strategy(preset, a=S.REMOTING_FAILED)
    assert selector(faults).select(queues("a", "b"), None, "a".__eq__, 1.0) is None


@pytest.mark.parametrize("mode", MODES)
def test_selection_does_not_wait_for_a_broker_without_a_master(mode: str | None) -> None:
    found = replace(route({"a": 1}), order_topic_conf="a:2;gone:2")
    chosen = selector(strategy(mode, a=S.REMOTING_FAILED))
    assert {chosen.select(publish_info_of("T", found), None, "a".__eq__, 1.0) for _ in range(9)} == {
        *queues("a", nums=2).queues
    }


def test_random_reaches_every_queue_and_only_those_that_admit() -> None:
    chosen, all_queues = RandomSelector(random.Random(7)), queues("a", "b")
    counts = Counter(chosen.select(all_queues, None, always, 0.0) for _ in range(400))
    assert set(counts) == all_queues.queue_set
    assert {broker_of(chosen.select(all_queues, None, "b".__eq__, 0.0)) for _ in range(50)} == {"b"}


SITES = st.sampled_from([None, *FaultSite])


@st.composite
def situations(draw: st.DrawFn) -> tuple[FaultStrategy, TopicPublishInfo, str | None, set[str]]:
    """Draw a strategy with reports, the queues of a topic, the broker that failed last, and the brokers with room."""
    faults = strategy(draw(st.sampled_from(MODES)))
    for broker in "abcdef":
        site = draw(SITES)
        if site:
            faults.update(site, broker, draw(st.sampled_from((1.0, 600.0, 20_000.0))), 0.0)
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, unique=True))
    last = draw(st.sampled_from([*names, None, "gone"]))
    return faults, queues(*names), last, draw(st.sets(st.sampled_from(names)))


def every_selector(faults: FaultStrategy, seed: int) -> list[QueueSelector]:
    rng = random.Random(seed)
    return [RoundRobinSelector(faults, rng), MachineRoomSelector(["a", "c"], faults, rng), RandomSelector(rng)]


@given(situations(), st.integers(0, 2**40), st.floats(0, 700))
def test_selected_queue_always_belongs_to_a_broker_with_room(
    situation: tuple[FaultStrategy, TopicPublishInfo, str | None, set[str]], seed: int, now: float
) -> None:
    faults, info, last, admitted = situation
    for chosen in every_selector(faults, seed):
        queue = chosen.select(info, last, admitted.__contains__, now)
        assert queue is None or (queue in info.queue_set and queue.broker_name in admitted)
        if queue is None and admitted:
            # Waiting pays in one case only: all brokers with room are isolated, or in another machine room.
            assert faults.enabled or isinstance(chosen, MachineRoomSelector)
            assert info.broker_names - admitted
        assert chosen.select(info, last, always, now) in info.queue_set


@given(situations(), st.integers(0, 2**40))
def test_broker_with_room_is_selected_and_the_last_one_only_at_the_end(
    situation: tuple[FaultStrategy, TopicPublishInfo, str | None, set[str]], seed: int
) -> None:
    faults, info, last, admitted = situation
    queue = selector(faults, seed).select(info, last, admitted.__contains__, 1e9)
    assert (queue is None) == (not admitted)
    assert queue is None or queue.broker_name in (admitted - {last} or admitted)


ROOMS = ("idc1-a", "idc1-b", "idc2-a", "idc10-a")


@pytest.mark.parametrize("mode", MODES)
def test_queues_of_the_room_are_preferred_in_turn(mode: str | None) -> None:
    chosen, info = MachineRoomSelector(["idc1"], strategy(mode), random.Random(1)), queues(*ROOMS, nums=3)
    picked = [chosen.select(info, None, always, 0.0) for _ in range(6)]
    assert {*picked} == queues("idc1-a", "idc1-b", nums=3).queue_set
    assert brokers_of(chosen, info, "idc1-a") == {"idc1-b"}


@pytest.mark.parametrize("mode", MODES)
def test_selection_waits_for_a_full_window_in_the_room(mode: str | None) -> None:
    chosen, info = MachineRoomSelector(["idc1"], strategy(mode), random.Random(1)), queues(*ROOMS)
    assert chosen.select(info, None, "idc2-a".__eq__, 0.0) is None
    queue = chosen.select(info, "idc1-a", "idc1-a".__eq__, 0.0)
    assert queue is not None
    assert queue.broker_name == "idc1-a"


def test_other_rooms_are_used_without_an_available_broker_in_the_room() -> None:
    info = queues(*ROOMS)
    for faults in (strategy(None), strategy("v4", **{"idc1-b": S.REMOTING_FAILED})):
        one_room = MachineRoomSelector(["idc1"], faults, random.Random(1))
        last = None if not faults.enabled else "idc1-a"
        found = brokers_of(one_room, info, last)
        assert found == ({"idc1-a", "idc1-b"} if last is None else {"idc2-a", "idc10-a"})
    elsewhere = MachineRoomSelector(["idc7"], strategy(None), random.Random(1))
    assert brokers_of(elsewhere, info, None) == set(ROOMS)
    alone = MachineRoomSelector(["idc2"], strategy(None), random.Random(1))
    assert brokers_of(alone, info, "idc2-a") == set(ROOMS) - {"idc2-a"}


@pytest.mark.parametrize(
    ("queue_selector", "kind"),
    [
        (None, RoundRobinSelector), ("roundRobin", RoundRobinSelector), ("hash", RoundRobinSelector),
        ("column", RoundRobinSelector), ("random", RandomSelector), ("machineRoom", MachineRoomSelector),
    ],
)  # fmt: skip
def test_option_queue_selector_determines_the_selector_of_unbound_rows(queue_selector: str | None, kind: type) -> None:
    options = SinkOptions.of(name_server=("ns:1",), queue_selector=queue_selector, machine_room=("idc1",))
    assert type(selector_of(options, strategy(None), random.Random(1))) is kind


def test_new_publish_info_restarts_at_a_random_queue() -> None:
    chosen = ThreadLocalSelector(strategy(None), random.Random(2))
    firsts = set()
    for _ in range(10):
        info = queues("a", nums=1000)
        first, second = chosen.select(info, None, 0.0), chosen.select(info, None, 0.0)
        assert first is not None
        assert second is not None
        assert second.queue_id == (first.queue_id + 1) % 1000
        firsts.add(first.queue_id)
    assert len(firsts) > 5


def test_each_thread_rotates_independently() -> None:
    chosen, info = ThreadLocalSelector(strategy(None), random.Random(2)), queues("a", "b")
    rounds: list[list[object]] = []

    def go_round() -> None:
        rounds.append([chosen.select(info, None, 0.0) for _ in info.queues])

    for _ in range(3):
        go_round()
        thread = threading.Thread(target=go_round)
        thread.start()
        thread.join()
    assert len(rounds) == 6
    assert all(set(picked) == info.queue_set for picked in rounds)


def test_a_topic_without_a_queue_gives_none() -> None:
    chosen = ThreadLocalSelector(strategy(None), random.Random(2))
    assert chosen.select(publish_info_of("T", route({})), None, 0.0) is None
