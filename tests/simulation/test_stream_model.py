"""A streaming query that is restarted while brokers, topics and queues come and go: fixed seeds, and planted bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.planted_bugs import ROOT, STREAM_BUGS, PlantedBug, schedules_until_found
from tests.simulation.stream_model import KINDS, StreamPlan, run_stream

SCHEDULES = 300


def test_each_message_is_in_one_micro_batch_or_is_reported() -> None:
    runs = [run_stream(StreamPlan.of_seed(seed)) for seed in range(SCHEDULES)]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    faults: Counter[str] = sum((run.faults for run in runs), Counter())
    assert set(faults) >= {*KINDS}
    drivers = [driver for run in runs for driver in run.history.drivers]
    assert len(drivers) > 4 * SCHEDULES
    assert {driver.trigger for driver in drivers} == {"processing time", "available now"}
    repeated = sum(len(run.history.runs) - len(run.history.committed) for run in runs)
    assert repeated > SCHEDULES / 10


def test_schedules_replay_exactly() -> None:
    for seed in range(5):
        first, again = (run_stream(StreamPlan.of_seed(seed)) for _ in range(2))
        assert (first.trace, first.faults) == (again.trace, again.faults)


def test_schedules_do_not_depend_on_the_order_of_sets() -> None:
    # These seeds look up the routes, or request the offsets, of several queues that are gone or replaced.
    code = (
        "from tests.simulation.stream_model import StreamPlan, run_stream\n"
        "for seed in (131, 226, 230, 320): print(run_stream(StreamPlan.of_seed(seed)).trace)"
    )
    traces = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": order},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in "012"
    ]
    assert traces[0]
    assert traces[1:] == traces[:1] * 2


@pytest.mark.parametrize("bug", STREAM_BUGS, ids=lambda bug: bug.name)
def test_planted_bug_of_a_stream_is_found(bug: PlantedBug) -> None:
    assert schedules_until_found(bug) is not None
