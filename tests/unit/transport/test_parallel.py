"""Requests to many servers: each returns an answer or an error within a minute."""

from __future__ import annotations

import threading
from concurrent.futures import Executor

import pytest

from rocketmq_spark.errors import RemotingTooMuchRequestException, RocketMQError
from rocketmq_spark.transport.parallel import MOST_AT_ONCE, in_parallel, query_all
from rocketmq_spark.transport.runtime import Runtime


def test_answers_are_in_the_order_of_their_keys() -> None:
    assert list(in_parallel(range(1000), str).items()) == [(number, str(number)) for number in range(1000)]


@pytest.mark.parametrize("keys", [(), (1,)])
def test_no_thread_starts_for_less_than_two_keys(keys: tuple[int, ...]) -> None:
    class NoThreads(Runtime):
        def pool(self, threads: int, name: str) -> Executor:
            raise AssertionError(f"a pool of {threads} threads")

    assert in_parallel(keys, str, NoThreads()) == {key: str(key) for key in keys}


def test_servers_that_answer_late_are_all_asked_at_once() -> None:
    everyone = threading.Barrier(MOST_AT_ONCE)
    assert len(in_parallel(range(MOST_AT_ONCE), lambda _: everyone.wait(60))) == MOST_AT_ONCE


def test_first_failed_key_is_reported_and_no_further_key_is_asked() -> None:
    second_has_failed = threading.Event()
    asked: list[int] = []

    def ask(number: int) -> None:
        asked.append(number)
        if number == 0:
            assert second_has_failed.wait(60)
            raise RocketMQError("first")
        if number == 1:
            second_has_failed.set()
            raise RocketMQError("second")

    with pytest.raises(RocketMQError, match="first"):
        in_parallel(range(100_000), ask)
    assert len(asked) < 100_000


def test_every_query_has_an_answer_or_an_error() -> None:
    def ask(number: int) -> int:
        if number == 1:
            raise RocketMQError("no")
        return number * 10

    found = query_all(range(3), ask, lambda: 0.0)
    assert (found[0], str(found[1]), found[2]) == (0, "no", 20)


def test_no_query_is_sent_after_a_minute() -> None:
    times = iter([0.0, 59.9])
    asked: list[str] = []
    found = query_all("abc", asked.append, lambda: next(times, 60.0))
    assert len(asked) == 1
    refused = [answer for answer in found.values() if answer is not None]
    assert [type(answer) for answer in refused] == [RemotingTooMuchRequestException] * 2
    assert all("not asked: the requests before it took 60 s" in str(answer) for answer in refused)
