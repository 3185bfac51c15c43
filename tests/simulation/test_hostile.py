"""A hostile user writes to the topics of rows and of the log. No row is lost or repeated, except without a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tests.simulation.effectively_once import EffectivelyOnceRun
from tests.simulation.hostile import KEY
from tests.simulation.model import ModelPlan, run_model

FAULTS = ("silent", "silent after storing", "task crash", "driver crash", "second task")


def runs(seeds: Iterable[int], *faults: str, key: str | None = None) -> list[EffectivelyOnceRun]:
    """Run writes that the user attacks."""
    options = {"send_msg_timeout": 500} | ({"transactional_key": key} if key else {})
    plans = [replace(ModelPlan.of_seed(seed), faults=(*FAULTS, *faults), rows=6, options=options) for seed in seeds]
    return [run_model(plan) for plan in plans]


def test_rows_of_another_user_lose_no_row() -> None:
    done = runs(range(40), "hostile rows")
    assert not {run.plan.seed: run.problems for run in done if run.problems}
    # They may stop a write with an error.
    faults: Counter[str] = sum((run.faults for run in done), Counter())
    assert faults["stopped: InputChangedError"]
    assert sum(len(run.history.done) >= run.plan.tasks for run in done) >= 20


def test_records_of_another_user_do_nothing_to_a_signed_log() -> None:
    done = runs(range(40), "hostile log", key=KEY)
    assert not {run.plan.seed: run.problems for run in done if run.problems}
    assert sum(len(run.history.done) >= run.plan.tasks for run in done) >= 35


def test_records_of_another_user_are_believed_without_a_key() -> None:
    problems = [problem for run in runs(range(8, 24), "hostile log") for problem in run.problems]
    assert any("rows are missing" in problem for problem in problems)
