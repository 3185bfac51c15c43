"""The send times of messages under a rate limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.sink.limits import RateLimit, largest_batch


def test_first_messages_of_a_task_are_limited_too() -> None:
    limit = RateLimit(100.0, 50.0)
    assert limit.reserve(100, 50.0) == 51.0
    assert limit.reserve(50, 50.0) == 51.5


def test_unused_rate_is_kept_for_one_second() -> None:
    limit = RateLimit(100.0, 0.0)
    assert limit.reserve(100, 60.0) == 60.0
    assert limit.reserve(1, 60.0) == 60.01


def test_largest_batch_is_one_second_of_the_rate_but_at_least_one_row() -> None:
    assert largest_batch(100.9) == 100
    assert largest_batch(0.2) == 1


@given(st.floats(0.1, 1e4), st.lists(st.tuples(st.integers(1, 500), st.floats(0.0, 3.0)), min_size=1, max_size=40))
def test_messages_never_exceed_the_rate_plus_one_second(rate: float, asked: list[tuple[int, float]]) -> None:
    limit, now, turns = RateLimit(rate, 0.0), 0.0, []
    for messages, pause in asked:
        now += pause
        turns.append((limit.reserve(messages, now), messages))
    moments = [moment for moment, _ in turns]
    assert moments == sorted(moments)
    for moment, _ in turns:
        gone = sum(messages for at, messages in turns if at <= moment)
        assert gone <= rate * (moment + 1e-6) * (1 + 1e-9)
