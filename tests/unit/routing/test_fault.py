"""The table of fault items."""

from __future__ import annotations

import pytest

from rocketmq_spark.routing.fault_strategy import LatencyFaultTolerance


def update(
    table: LatencyFaultTolerance,
    broker: str,
    now: float,
    away_ms: float,
    *,
    latency_ms: float = 1.0,
    reachable: bool = True,
    shorten: bool = False,
) -> float:
    return table.update(broker, latency_ms, now, away_ms=away_ms, reachable=reachable, shorten=shorten)


def test_broker_is_available_without_an_item_and_after_its_isolation() -> None:
    table = LatencyFaultTolerance()
    assert table.is_available("a", 0.0)
    update(table, "a", 10.0, 30_000)
    assert not table.is_available("a", 39.999)
    assert table.is_available("a", 40.0)


def test_a_success_does_not_shorten_an_isolation() -> None:
    table = LatencyFaultTolerance()
    update(table, "a", 0.0, 180_000)
    assert update(table, "a", 1.0, 0, latency_ms=7) == 0
    assert not table.is_available("a", 179.0)
    assert table.items()["a"].current_latency_ms == 7


def test_success_ends_an_isolation_if_the_last_outcome_decides() -> None:
    table = LatencyFaultTolerance()
    update(table, "a", 0.0, 180_000, shorten=True)
    assert update(table, "a", 1.0, 0, shorten=True) == 0
    assert table.is_available("a", 1.0)


def test_shorter_isolation_does_not_replace_a_longer_one() -> None:
    table = LatencyFaultTolerance()
    update(table, "a", 0.0, 180_000)
    assert update(table, "a", 1.0, 30_000) == 0
    assert table.items()["a"].start_timestamp == 180.0
    assert update(table, "a", 1.0, 180_000) == pytest.approx(1000)


def test_reachable_follows_the_last_update_and_remove_deletes_it() -> None:
    table = LatencyFaultTolerance()
    update(table, "a", 0.0, 600_000, reachable=False)
    assert not table.is_reachable("a")
    update(table, "a", 0.0, 0)
    assert table.is_reachable("a")
    table.remove("a")
    assert table.is_available("a", 0.0)
    assert table.items() == {}


# Reported at second 0 or 1: (isolated for ms, latency, time of the report).
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((0, 9_000, 0), (20_000, 1, 0)),
        ((0, 1, 1), (0, 2, 0)),
        ((20_000, 1, 1), (20_000, 2, 0)),
        ((0, 5, 0), (0, 5, 1)),
        ((20_000, 5, 0), (20_000, 5, 1)),
    ],
    ids=["availability", "latency", "latency of unavailable", "start", "start of unavailable"],
)
@pytest.mark.parametrize("worse_first", [False, True])
def test_the_order_is_availability_then_latency_then_start(
    better: tuple[int, int, int], worse: tuple[int, int, int], worse_first: bool
) -> None:
    table = LatencyFaultTolerance()
    for name, (away_ms, latency_ms, at) in sorted({"better": better, "worse": worse}.items(), reverse=worse_first):
        update(table, name, float(at), away_ms, latency_ms=latency_ms)
    # The better half of two brokers is one broker.
    assert [table.pick_one_at_least(10.0) for _ in range(3)] == ["better"] * 3


def test_pick_rotates_through_the_better_half() -> None:
    table = LatencyFaultTolerance()
    assert table.pick_one_at_least(0.0) is None
    update(table, "a", 0.0, 600_000)
    assert table.pick_one_at_least(0.0) == "a"
    for broker, latency_ms in (("b", 2), ("c", 3), ("d", 4), ("e", 5)):
        update(table, broker, 0.0, 600_000, latency_ms=latency_ms)
    picks = [table.pick_one_at_least(0.0) for _ in range(4)]
    assert set(picks[:2]) == {"a", "b"}
    assert picks[:2] == picks[2:]


def test_check_is_due_once_per_interval() -> None:
    table = LatencyFaultTolerance()
    update(table, "a", 0.0, 0)
    assert table.take_checks(5.0, 2.0) == ["a"]
    update(table, "b", 6.0, 0)
    assert table.take_checks(6.9, 2.0) == ["b"]
    assert table.take_checks(7.0, 2.0) == ["a"]
    # Reports between two checks do not advance the next check.
    update(table, "a", 7.5, 0)
    assert table.take_checks(7.5, 2.0) == []


def test_set_reachable_creates_no_item() -> None:
    table = LatencyFaultTolerance()
    table.set_reachable("a")
    assert table.items() == {}
