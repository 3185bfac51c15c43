from __future__ import annotations

import random

import pytest

from rocketmq_spark.routing.retries import Backoff, Retries
from tests.support.scripted import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


def retries(clock: ManualClock, seconds: float) -> Retries:
    """Return retries that wait 1 s, 2 s, 3 s, ... until `seconds` from now."""
    return Retries(clock.now + seconds, float, clock, clock.advance)


def test_backoff_doubles_up_to_its_cap_and_jitters_downwards_only() -> None:
    backoff = Backoff(100, 5000, random.Random(3))
    for waits, step in [(1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (60, 5.0), (10**6, 5.0)]:
        delays = [backoff.delay(waits) for _ in range(200)]
        assert step / 2 <= min(delays) < max(delays) <= step
    assert Backoff(0, 0, random.Random(3)).delay(5) == 0


def test_last_attempt_begins_at_the_deadline(clock: ManualClock) -> None:
    assert [clock.now for _ in retries(clock, 5.0)] == [100.0, 101.0, 103.0, 105.0]


def test_first_attempt_is_made_after_the_deadline_too(clock: ManualClock) -> None:
    assert len(list(retries(clock, -1.0))) == 1
    assert clock.now == 100.0


def test_time_that_an_attempt_takes_counts(clock: ManualClock) -> None:
    attempts = 0
    for _ in retries(clock, 60.0):
        attempts += 1
        clock.advance(25.0)
    assert (attempts, clock.now) == (3, 178.0)


def test_waits_are_short_again_after_progress(clock: ManualClock) -> None:
    waits = retries(clock, 100.0)
    assert waits.wait()
    assert waits.wait()
    waits.progressed()
    assert waits.wait()
    assert clock.now == 104.0


def test_deadline_can_move_while_attempts_are_made(clock: ManualClock) -> None:
    waits = retries(clock, 0.0)
    assert not waits.wait()
    waits.deadline += 10.0
    assert waits.wait()
    assert clock.now == 101.0
