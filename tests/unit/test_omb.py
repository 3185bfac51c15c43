"""The pure parts of the OpenMessaging workloads: schedule, search for the highest rate, percentiles and results."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.benchmarks.omb_results import LADDER, SECOND, Run, due_at, due_by, highest, next_rate, percentile

MS = 1_000_000
BEGAN = 5 * SECOND


def run_of(
    rate: int = 1_000, *, publish: int = 2 * MS, end_to_end: int = 3 * MS, missing: int = 0, errors: int = 0
) -> Run:
    """Return a run of one second to warm up and two that count; the last `missing` messages were not sent."""
    due = BEGAN + due_at(np.arange(3 * rate - missing), rate)
    arrivals = np.stack([due, due + end_to_end], axis=1)
    return Run(rate, BEGAN, SECOND, 2, due + MS, due + publish, arrivals, errors)


@pytest.mark.parametrize("rate", [1, 3, 500, 999, 128_000])
def test_schedule_has_each_message_due_at_its_time_and_not_before(rate: int) -> None:
    for number in (0, 1, 2, 1_000, 123_457):
        at = int(due_at(number, rate))
        assert due_by(at, rate) >= number + 1
        assert number == 0 or due_by(at - 1, rate) <= number


def test_messages_of_a_stall_are_late_from_when_they_were_due() -> None:
    run = run_of()
    stalled = run.acknowledged.copy()
    # Nothing is acknowledged for half a second, and then everything that was due meanwhile.
    stalled[1_500:2_000] = BEGAN + 2 * SECOND
    latencies = Run(1_000, BEGAN, SECOND, 2, run.sent, stalled, run.received, 0).publish()
    assert percentile(latencies, 50) == 2 * MS
    assert percentile(latencies, 100) == 500 * MS
    assert percentile(latencies, 99) == 480 * MS


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 50), (99, 99), (99.9, 100), (100, 100)], ids=lambda one: str(one)
)
def test_percentile_is_the_lowest_value_that_so_many_do_not_exceed(percent: float, expected: int) -> None:
    assert percentile(np.arange(1, 101), percent) == expected


def test_percentile_of_nothing_is_zero() -> None:
    assert percentile(np.array([], np.int64), 99) == 0


def test_search_climbs_the_ladder_and_then_halves_the_gap() -> None:
    def tried(capacity: int) -> dict[int, bool]:
        found: dict[int, bool] = {}
        while (rate := next_rate(found)) is not None:
            found[rate] = rate <= capacity
        return found

    assert list(tried(20_000)) == [500, 2_000, 8_000, 32_000, 16_000, 22_627]
    assert highest(tried(20_000)) == 16_000
    assert list(tried(10**9)) == list(LADDER)
    assert list(tried(0)) == [500]
    assert highest(tried(0)) == 0


def test_highest_rate_is_below_every_rate_that_was_not_sustained() -> None:
    assert highest({500: True, 2_000: False, 8_000: True}) == 500
    assert highest({}) == 0


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of(), True),
        (run_of(missing=1), False),
        (run_of(missing=2_000, publish=1_500 * MS, end_to_end=1_500 * MS), False),
        (run_of(publish=300 * MS), True),
        (run_of(publish=4 * SECOND), False),
        (run_of(end_to_end=4 * SECOND), False),
        (run_of(errors=1), False),
    ],
    ids=[
        "in time",
        "ended early",
        "ended early, late in time",
        "late, but as fast as due",
        "behind",
        "consumer behind",
        "error",
    ],
)
def test_rate_is_sustained_if_sender_and_consumer_keep_up(run: Run, expected: bool) -> None:
    assert run.sustained() is expected


def test_run_counts_lost_and_repeated_messages() -> None:
    run = run_of()
    received = np.concatenate([run.received[3:], run.received[-2:]])
    other = Run(1_000, BEGAN, SECOND, 2, run.sent, run.acknowledged, received, 0)
    assert (other.lost(), other.repeated()) == (3, 2)
    assert (run.lost(), run.repeated()) == (0, 0)


def test_result_has_exactly_the_fields_of_openmessaging() -> None:
    result = json.loads(json.dumps(run_of().result("1-topic-16-partitions-1kb", "aio", 1024, 16)))
    statistics = ["Avg", "50pct", "75pct", "95pct", "99pct", "999pct", "9999pct", "Max"]
    kinds = ["PublishLatency", "PublishDelayLatency", "EndToEndLatency"]
    expected = {"workload", "driver", "messageSize", "topics", "partitions", "producersPerTopic", "consumersPerTopic"}
    expected |= {"publishRate", "publishErrorRate", "consumeRate", "backlog"}
    for kind in kinds:
        expected |= {f"{kind[0].lower()}{kind[1:]}{one}" for one in statistics}
        expected |= {f"aggregated{kind}{one}" for one in (*statistics, "Quantiles")}
    assert result.keys() == expected
    assert (result["workload"], result["driver"]) == ("1-topic-16-partitions-1kb", "aio")
    assert (result["messageSize"], result["topics"], result["partitions"]) == (1024, 1, 16)
    assert result["publishRate"] == [1_000, 1_000]
    assert result["consumeRate"] == [1_000, 1_000]
    assert result["backlog"] == [1, 1]
    # Latencies are in ms; delays are whole microseconds.
    assert result["publishLatency99pct"] == [2, 2]
    assert result["aggregatedPublishLatencyMax"] == 2
    assert result["endToEndLatency50pct"] == [3, 3]
    assert result["publishDelayLatency50pct"] == [1_000, 1_000]
    assert result["aggregatedPublishDelayLatencyQuantiles"]["99.9"] == 1_000
    assert isinstance(result["aggregatedPublishDelayLatency99pct"], int)
