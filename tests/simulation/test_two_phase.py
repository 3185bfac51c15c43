"""Exactly-once writes in virtual time: fixed seeds, and rules whose removal the checks must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rocketmq_spark.deliveries.exactly_once import ends
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.records import Decision
from rocketmq_spark.deliveries.log.state import WriteState
from tests.simulation.two_phase import TwoPhasePlan, run_two_phase

SEEDS = range(100)
# An END_TRANSACTION that is late by seconds shows the lack of the fence: in 8 of 300 schedules of only these faults,
# but in 3 of 2,500 of all faults.
FAULTS_OF_RULES = {"fence": ("short freeze", "second driver", "delayed")}


def test_rows_are_visible_once_under_faults() -> None:
    runs = [run_two_phase(TwoPhasePlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    reports = [report for run in runs for report in run.history.reports]
    assert sum(report.recovered_rows > 0 for report in reports) >= 10
    assert sum(run.history.drivers for run in runs) > sum(run.plan.tasks for run in runs)


def test_schedules_replay_exactly() -> None:
    first, again = (run_two_phase(TwoPhasePlan.of_seed(7)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults


class LastDecisionWins(dict[int, Decision]):
    """Decisions of a write; the last one of a round counts."""

    def setdefault(self, round_: int, decision: Decision) -> Decision:
        self[round_] = decision
        return decision


def without_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = WriteState.__init__
    monkeypatch.setattr(WriteState, "__init__", lambda self, since: usual(self, since, LastDecisionWins()))


RULES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "fence": lambda patch: patch.setattr(TwoPhaseCommit, "_fence", lambda self, decision: 0.0),
    "one end": lambda patch: patch.setattr(ends, "_is_not_executed", lambda error: error.maybe_stored),
    "first decision wins": without_first_wins,
    "no older micro-batch": lambda patch: patch.setattr(DecisionLog, "is_superseded", lambda self, write: False),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule](monkeypatch)
    plans = [TwoPhasePlan.of_seed(seed) for seed in range(400)]
    if rule in FAULTS_OF_RULES:
        plans = [replace(plan, faults=FAULTS_OF_RULES[rule], tasks=3, rows=20) for plan in plans]
    assert any("visible" in text for plan in plans for text in run_two_phase(plan).problems)
