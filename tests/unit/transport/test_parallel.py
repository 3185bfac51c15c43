"""Requests to many servers: each returns an answer or an error within a minute."""

from __future__ import annotations

from rocketmq_spark.errors import RemotingTooMuchRequestException, RocketMQError
from rocketmq_spark.transport.parallel import query_all


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
