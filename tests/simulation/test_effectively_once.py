"""Effectively-once writes in virtual time: fixed seeds, and rules whose removal the checks must find."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from rocketmq_spark.model.message import SendOutcome, SendStatus
from rocketmq_spark.sink.in_flight import InFlightBatch
from rocketmq_spark.sink.settling_sender import SettlingSender
from rocketmq_spark.transactions import resume
from rocketmq_spark.transactions.brokers import Brokers
from rocketmq_spark.transactions.decision_log import DecisionLog, Floors, Write
from rocketmq_spark.transactions.resume import Attempt, ResumePlan, ResumeReport
from tests.simulation.effectively_once import EffectivelyOncePlan, run_effectively_once

# The last three found an end that did not report repeats.
SEEDS = (*range(100), 100_007_051, 100_007_245, 200_009_794)


def test_rows_are_stored_once_under_faults() -> None:
    runs = [run_effectively_once(EffectivelyOncePlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    assert sum(run.history.recovered_rows > 0 for run in runs) >= 20
    assert sum(run.history.drivers for run in runs) > sum(run.plan.tasks for run in runs)


def test_schedules_replay_exactly() -> None:
    first, again = (run_effectively_once(EffectivelyOncePlan.of_seed(7)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults


def no_wait(brokers: Brokers, log: DecisionLog, write: Write, broker_names: Collection[str], _: float) -> None:
    """Pass the barrier, but not the fence."""
    brokers.await_listed(log.topic, broker_names)
    stored = log.append_homes(brokers, write, set(broker_names))
    brokers.ask_all(stored, lambda queue: brokers.await_readable(queue, stored[queue]))


def unsettled(self: SettlingSender, delivery: InFlightBatch, _: int, outcome: SendOutcome) -> None:
    self._events.put((delivery, outcome))


def unsafe_unsettled(usual: Callable[..., None]) -> Callable[..., None]:
    def on_outcome(self: SettlingSender, delivery: InFlightBatch, floor: int, outcome: SendOutcome) -> None:
        if outcome.status not in (None, SendStatus.SEND_OK):
            self._events.put((delivery, outcome))
        else:
            usual(self, delivery, floor, outcome)

    return on_outcome


def first_floors_last(self: DecisionLog, kind: str, write: Write, floors: object, offset: int) -> None:
    """Let the last floors of their kind count, as those of a driver that was frozen."""
    after = write if kind == "done" else None
    self.floors = [*self.floors[-1:], Floors(after, floors, offset)]  # type: ignore[arg-type]


def begins_alone(usual: Callable[[Attempt], object], *, planned: bool) -> Callable[[Attempt], object]:
    """Return a begin that does not see earlier attempts in the plan, or in the log since the plan."""

    def begin(self: Attempt) -> object:
        plan = self.plan
        if planned:
            self.plan = replace(plan, begun={})
        else:
            self.id = ""
        try:
            return usual(self)
        finally:
            self.plan = plan

    return begin


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(patch: pytest.MonkeyPatch) -> None:
        usual_complete = resume.complete
        changes: dict[str, tuple[object, str, object]] = {
            "fence": (resume, "pass_fence", no_wait),
            "settling": (SettlingSender, "_on_outcome", unsettled),
            "settling of unsafe answers": (
                SettlingSender, "_on_outcome", unsafe_unsettled(SettlingSender._on_outcome)
            ),
            "attempts in the plan": (Attempt, "_begin", begins_alone(Attempt._begin, planned=True)),
            "attempts since the plan": (Attempt, "_begin", begins_alone(Attempt._begin, planned=False)),
            "older floors": (ResumePlan, "floors_of", lambda self, _: self.floors[-1]),
            "first floors": (DecisionLog, "_take_floors", first_floors_last),
            "old drivers": (DecisionLog, "_is_superseded", lambda _, __: False),
            "report": (
                resume, "complete",
                lambda *arguments: ResumeReport(0, usual_complete(*arguments).seconds),
            ),
        }  # fmt: skip
        patch.setattr(*changes[name])  # type: ignore[arg-type]

    return remove


# The faults and the number of the schedules that find it.
RULES: dict[str, tuple[tuple[str, ...], int]] = {
    "fence": (("second task", "delayed", "slow storage"), 300),
    "settling": (("silent after storing",), 50),
    "settling of unsafe answers": (("not flushed",), 50),
    "attempts in the plan": (("driver crash",), 50),
    "attempts since the plan": (("task crash",), 50),
    "older floors": (("driver crash",), 100),
    "first floors": (("driver freeze", "driver crash"), 400),
    "old drivers": (("driver freeze", "driver crash"), 400),
    "report": (("second task", "zombie", "task freeze"), 400),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, schedules = RULES[rule]
    plans = [replace(EffectivelyOncePlan.of_seed(seed), faults=faults) for seed in range(schedules)]
    without(rule)(monkeypatch)
    assert any(run_effectively_once(plan).problems for plan in plans)
