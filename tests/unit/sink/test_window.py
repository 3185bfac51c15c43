"""The window of one broker: starts small, halves on trouble, grows slowly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.sink.limits import BATCH_COST, SINGLE_COST, Window


def answer(window: Window, times: int, latency_ms: float = 5.0) -> None:
    """Keep the window full, and answer `times` batches."""
    for _ in range(times):
        while window.admits(BATCH_COST, 0.0):
            window.start(BATCH_COST)
        window.success(BATCH_COST, latency_ms)


def test_window_starts_with_two_batches_or_sixteen_single_messages() -> None:
    window = Window(8)
    for _ in range(16):
        assert window.admits(SINGLE_COST, 0.0)
        window.start(SINGLE_COST)
    assert not window.admits(SINGLE_COST, 0.0)
    assert not window.admits(BATCH_COST, 0.0)


def test_fast_answers_grow_the_window_to_its_maximum() -> None:
    window = Window(8)
    answer(window, 200)
    assert window.limit == 8


def test_unused_window_does_not_grow() -> None:
    window = Window(8)
    for _ in range(100):
        window.start(SINGLE_COST)
        window.success(SINGLE_COST, 1.0)
    assert window.limit == 2


def test_queueing_answers_do_not_grow_the_window() -> None:
    window = Window(8)
    window.start(BATCH_COST)
    window.success(BATCH_COST, 300.0)
    before = window.limit
    answer(window, 50, latency_ms=700.0)
    assert window.limit == before


def test_window_grows_on_a_slow_link_with_stable_latency() -> None:
    window = Window(8)
    answer(window, 200, latency_ms=300.0)
    assert window.limit == 8


def test_concurrent_failures_halve_the_window_once() -> None:
    window = Window(8)
    answer(window, 200)
    first = [window.trouble(BATCH_COST, started_at=1.0, now=2.0) for _ in range(7)]
    assert first == [True] + [False] * 6
    assert (window.limit, window.troubles) == (4, 1)
    window.start(BATCH_COST)
    assert window.trouble(BATCH_COST, started_at=2.5, now=3.0)
    assert (window.limit, window.troubles) == (2, 2)


def test_window_never_shrinks_below_one_request() -> None:
    window = Window(8)
    for now in range(1, 20):
        window.start(BATCH_COST)
        window.trouble(BATCH_COST, started_at=now, now=now + 0.5)
    assert window.admits(BATCH_COST, 99.0)
    window.start(SINGLE_COST)
    assert not window.admits(SINGLE_COST, 99.0)


def test_a_resting_broker_admits_nothing_until_its_time_comes() -> None:
    window = Window(8)
    window.rest(5.0)
    window.rest(4.0)
    assert not window.admits(SINGLE_COST, 4.9)
    assert window.admits(SINGLE_COST, 5.0)


def test_success_resets_the_count_of_failures() -> None:
    window = Window(8)
    window.start(BATCH_COST)
    window.trouble(BATCH_COST, 0.0, 1.0)
    window.start(BATCH_COST)
    window.success(BATCH_COST, 1.0)
    assert window.troubles == 0


@given(st.integers(1, 64), st.lists(st.tuples(st.sampled_from("stre"), st.booleans())))
def test_cost_in_flight_returns_to_zero_and_stays_within_the_maximum(
    maximum: int, events: list[tuple[str, bool]]
) -> None:
    window, flying, now = Window(maximum), [], 0.0
    for event, single in events:
        now += 1.0
        cost = SINGLE_COST if single else BATCH_COST
        if event == "s" and window.admits(cost, now):
            window.start(cost)
            flying.append((cost, now))
        elif event == "t" and flying:
            ended, started = flying.pop()
            window.trouble(ended, started, now)
        elif event == "r" and flying:
            window.success(flying.pop()[0], 1.0)
        elif event == "e" and flying:
            window.release(flying.pop()[0])
        assert window.in_flight == sum(cost for cost, _ in flying) <= max(maximum, 1)
        assert 0 < window.limit <= maximum
    for cost, _ in flying:
        window.release(cost)
    assert window.in_flight == 0
