"""Small runs of the simulation of many tasks. All figures are those of virtual time."""

from __future__ import annotations

from tests.simulation.direct import Load
from tests.simulation.scale import Phases, simulate

PHASES = Phases(start=4.0, measured=4.0, paused=2.0, watched=8.0)


def test_few_tasks_write_as_fast_as_their_rows_arrive() -> None:
    result = simulate(10, 20, PHASES)
    assert result.rows_per_second > 0.99 * 10 / Load().seconds_per_row_read
    assert (result.busy, result.failed) == (0.0, 0)
    assert result.fairness > 0.95
    assert result.recovery < 3.0


def test_many_tasks_at_few_brokers_keep_their_throughput() -> None:
    result = simulate(100, 5, PHASES)
    assert result.used > 0.95
    assert result.recovery <= 3.0
    assert result.failed == 0
