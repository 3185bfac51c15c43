"""The simulator: schedules with random faults keep every promise, and planted bugs do not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.simulation.planted_bugs import BUGS, PlantedBug, schedules_until_found
from tests.simulation.schedule import Plan, Run, run
from tests.simulation.swarm import keep_figures, kept_figures, minimised, run_chunk, trace_of

SCHEDULES = 250


@pytest.mark.parametrize("first", [0, int(time.time()) * 1_000_000 + os.getpid()], ids=["fixed", "fresh"])
def test_schedules_with_random_faults_keep_every_promise(first: int) -> None:
    chunk = run_chunk(range(first, first + SCHEDULES))
    assert chunk.problems == {}
    assert len(chunk.faults) > 20


def fingerprint(done: Run) -> list[tuple[object, ...]]:
    attempts = [
        (attempt.started, attempt.ended, str(attempt.queue), attempt.batch.rows, str(attempt.outcome))
        for attempt in done.worker.transport.attempts
    ]
    return [(done.world.steps, done.world.now, dict(done.faults)), *attempts, *done.world.trace]


def test_seed_replays_exactly() -> None:
    for seed in range(20):
        assert fingerprint(run(Plan.of_seed(seed))) == fingerprint(run(Plan.of_seed(seed)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: PlantedBug) -> None:
    assert schedules_until_found(bug) is not None


def test_failed_plan_is_reduced_to_what_makes_it_fail() -> None:
    plan = Plan(
        7, ("busy", "closes", "pause"), brokers=3, tasks=3, rows=48, options={"max_in_flight": 2, "ordered": True}
    )
    smallest = minimised(plan, lambda smaller: "closes" in smaller.faults and smaller.tasks > 1 and smaller.rows >= 5)
    assert isinstance(smallest, Plan)
    assert (smallest.faults, smallest.tasks, smallest.brokers, smallest.options) == (
        ("closes",),
        2,
        1,
        {"ordered": True},
    )
    assert 5 <= smallest.rows <= 6
    assert smallest.seed == plan.seed


def test_figures_of_several_runs_add_up(tmp_path: Path) -> None:
    chunk, path = run_chunk(range(5), "exactly-once"), tmp_path / "figures"
    chunk.problems[3] = ["a row is missing"]
    for kind, first in (("exactly-once", 0), ("exactly-once", 100), ("model", 200)):
        keep_figures(path, kind, first, chunk)
    total, seeds = kept_figures(path, "exactly-once")
    assert seeds == {*range(5), *range(100, 105)}
    assert (total.schedules, total.problems) == (10, chunk.problems)
    assert total.faults == chunk.faults + chunk.faults
    assert total.with_fault == chunk.with_fault + chunk.with_fault


def test_trace_has_faults_attempts_and_ends_of_tasks_in_order() -> None:
    done = next(done for done in map(run, map(Plan.of_seed, range(50))) if done.world.trace)
    lines = trace_of(done)
    assert sum("fault: " in line for line in lines) == len(done.world.trace)
    assert sum(" begins" in line for line in lines) == len(done.worker.transport.attempts)
    assert sum(line.split("  ")[-1].startswith("task ") for line in lines) == len(done.results)
    times = [float(line.split(" s  ")[0]) for line in lines]
    assert times == sorted(times)
