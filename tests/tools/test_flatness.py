"""What a long run's figures are called: flat, or growing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.tools.flatness import Line, Sample, judge

EVERY = 5.0


def judged(minutes: float, figure: Callable[[float], float], name: str = "worker MB") -> Line:
    """Judge one figure, a function of the minutes since the start."""
    times = [number * EVERY for number in range(1, int(minutes * 60 / EVERY))]
    (line,) = judge([Sample(1e6 + at, {name: figure(at / 60)}) for at in times])
    return line


def test_constant_figure_is_flat() -> None:
    assert judged(30, lambda _: 150.0) == ("worker MB", 150.0, 150.0, 150.0, 0.0, True)


def test_decreasing_figure_is_flat() -> None:
    assert judged(30, lambda at: 150.0 - at).fine


def test_a_single_peak_is_no_growth() -> None:
    line = judged(30, lambda at: 500.0 if at > 29.8 else 150.0)
    assert (line.fine, line.highest) == (True, 500.0)


@pytest.mark.parametrize("seed", range(20))
def test_figure_that_jumps_at_restarts_is_flat(seed: int) -> None:
    rng = random.Random(seed)
    # Half as much again for a while after each restart, and a little all the time.
    assert judged(30, lambda at: 150.0 + rng.gauss(0.0, 10.0) + (80.0 if at % 1 < 0.2 else 0.0)).fine


def test_figure_that_grows_only_during_warm_up_is_flat() -> None:
    line = judged(30, lambda at: 150.0 + 300.0 * min(at, 9.0))
    assert (line.fine, line.first) == (True, 150.0 + 2700.0)
    # As caches fill: ever more slowly.
    assert judged(30, lambda at: 150.0 + 100.0 * (1.0 - math.exp(-at / 3.0))).fine


@pytest.mark.parametrize("seed", range(20))
def test_steady_leak_is_detected_despite_noise(seed: int) -> None:
    rng = random.Random(seed)
    line = judged(30, lambda at: 500.0 + 1.7 * at + rng.gauss(0.0, 10.0))
    assert not line.fine
    assert line.per_hour == pytest.approx(102.0, rel=0.3)


def test_leak_at_each_restart_is_detected_in_a_longer_run() -> None:
    def leak(at: float) -> float:
        return 150.0 + 0.3 * int(at)

    assert judged(3, leak).fine
    assert judged(30, leak).fine
    assert not judged(60, leak).fine


@pytest.mark.parametrize(("name", "minutes"), [("JVM threads", 1), ("JVM descriptors", 1), ("worker threads", 4)])
def test_steady_growth_of_an_integer_figure_is_not_noise(name: str, minutes: int) -> None:
    assert judged(30, lambda at: 20.0 + int(at) % 2, name).fine
    assert not judged(30, lambda at: 20.0 + int(at / minutes), name).fine


def test_figure_below_its_limit_can_grow() -> None:
    samples = [Sample(number * EVERY, {"JVM MB": 1000.0 + number}) for number in range(1, 361)]
    assert [line.fine for line in judge(samples, {"JVM MB": 1360.0})] == [True]
    assert [line.fine for line in judge(samples, {"JVM MB": 1359.0})] == [False]


def test_leak_that_ends_is_accepted_only_if_it_ends_in_the_warm_up() -> None:
    assert not judged(30, lambda at: 150.0 + min(at, 20.0)).fine
    assert judged(30, lambda at: 150.0 + min(at, 10.0)).fine


def test_restarted_processes_may_differ_by_a_part_of_the_figure() -> None:
    samples = [Sample(number * EVERY, {"worker MB": 100.0 + number / 12}) for number in range(1, 361)]
    assert [judge(samples, slack=part)[0].fine for part in (0.0, 0.01, 0.25)] == [False, False, True]


def test_no_sample_is_no_line() -> None:
    assert judge([]) == []
