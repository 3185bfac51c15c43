"""Effectively-once writes in virtual time: fixed seeds, and rules whose removal the checks must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.deliveries.effectively_once.resolving_sender import ResolvingSender
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.sink.in_flight import PendingBatch
from tests.simulation.effectively_once import EffectivelyOncePlan, run_effectively_once

SEEDS = range(50)


def test_rows_are_stored_once_under_faults() -> None:
    runs = [run_effectively_once(EffectivelyOncePlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    assert sum(run.history.recovered_rows > 0 for run in runs) >= 10
    assert sum(run.history.drivers for run in runs) > sum(run.plan.tasks for run in runs)


def test_schedules_replay_exactly() -> None:
    first, again = (run_effectively_once(EffectivelyOncePlan.of_seed(7)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults


def unresolved(self: ResolvingSender, pending: PendingBatch, *known: Any) -> None:
    self._events.put((pending, known[-1]))


def unsafe_unresolved(usual: Callable[..., None]) -> Callable[..., None]:
    def on_outcome(self: ResolvingSender, pending: PendingBatch, *known: Any) -> None:
        if known[-1].status not in (None, SendStatus.SEND_OK):
            self._events.put((pending, known[-1]))
        else:
            usual(self, pending, *known)

    return on_outcome


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    changes = {
        "resolving": unresolved,
        "resolving of unsafe answers": unsafe_unresolved(ResolvingSender._on_outcome),
    }
    return lambda patch: patch.setattr(ResolvingSender, "_on_outcome", changes[name])


# The faults and the number of the schedules that find it. tests/simulation/test_model.py has the rules of the protocol.
RULES: dict[str, tuple[tuple[str, ...], int]] = {
    "resolving": (("silent after storing",), 50),
    "resolving of unsafe answers": (("not flushed",), 50),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, schedules = RULES[rule]
    plans = [replace(EffectivelyOncePlan.of_seed(seed), faults=faults) for seed in range(schedules)]
    without(rule)(monkeypatch)
    assert any(run_effectively_once(plan).problems for plan in plans)
