"""The latency ladder and the fault table (spec/producer.md section 17, lines 60, 62, 64 to 66)."""

from __future__ import annotations

import pytest

from rocketmq_spark.options import SinkOptions
from rocketmq_spark.producer.fault import ISOLATION_LATENCY_MS, LatencyFaultTolerance, LatencyLadder

DEFAULTS = SinkOptions(name_server=("127.0.0.1:9876",))
LADDER = LatencyLadder(DEFAULTS.latency_max, DEFAULTS.not_available_duration)


@pytest.mark.parametrize(
    ("latency_ms", "away_ms"),
    [
        (0, 0), (50, 0), (100, 0), (549, 0), (549.9, 0), (550, 30_000), (999, 30_000), (1000, 60_000),
        (2000, 120_000), (3000, 180_000), (14_999, 180_000), (15_000, 600_000), (10**9, 600_000),
    ],
)  # fmt: skip
def test_60_ladder_gives_the_time_of_the_highest_step_reached(latency_ms: float, away_ms: int) -> None:
    assert away_ms == LADDER.not_available_ms(latency_ms)


def test_62_isolation_counts_as_thirty_seconds_of_latency() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    added = faults.update("a", 3.0, now=100.0, isolation=True)
    assert LADDER.not_available_ms(ISOLATION_LATENCY_MS) == added == 600_000
    assert faults.items()["a"].current_latency_ms == 3.0
    assert not faults.is_available("a", 699.9)


def test_64_nothing_is_recorded_while_switched_off() -> None:
    faults = LatencyFaultTolerance(LADDER)
    assert faults.update("a", 20_000, now=1.0, isolation=True) == 0
    assert faults.items() == {}
    assert faults.is_available("a", 1.0)


def test_65_a_broker_is_available_without_an_item_and_again_exactly_when_its_time_comes() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    assert faults.is_available("a", 0.0)
    faults.update("a", 600, now=10.0, isolation=False)
    assert not faults.is_available("a", 39.999)
    assert faults.is_available("a", 40.0)


def test_66_a_fast_success_does_not_shorten_an_isolation() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    faults.update("a", 3000, now=0.0, isolation=False)
    assert faults.update("a", 1, now=1.0, isolation=False) == 0
    assert not faults.is_available("a", 179.0)
    assert faults.items()["a"].current_latency_ms == 1


def test_a_shorter_isolation_does_not_replace_a_longer_one_and_adds_no_time() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    faults.update("a", 3000, now=0.0, isolation=False)
    assert faults.update("a", 600, now=1.0, isolation=False) == 0
    assert faults.items()["a"].start_timestamp == 180.0
    assert faults.update("a", 3000, now=1.0, isolation=False) == pytest.approx(1000)


def test_reachable_is_what_the_last_update_said_and_remove_forgets() -> None:
    faults = LatencyFaultTolerance(LADDER, enabled=True)
    faults.update("a", 1, now=0.0, isolation=True, reachable=False)
    assert not faults.is_reachable("a")
    faults.update("a", 1, now=0.0, isolation=False)
    assert faults.is_reachable("a")
    faults.remove("a")
    assert faults.is_available("a", 0.0)
    assert faults.items() == {}
