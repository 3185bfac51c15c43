"""Exactly-once writes to modelled brokers: fixed seeds, and rules whose removal the checks must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.deliveries.exactly_once import commit, ends
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit
from rocketmq_spark.deliveries.log import records
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import LogKeys
from tests.simulation.exactly_once import HOLES, KINDS, ExactlyOncePlan, run_exactly_once
from tests.simulation.hostile import KEY
from tests.simulation.model_client import ModelBrokers
from tests.simulation.test_model import believed, unbounded
from tests.simulation.test_two_phase import without_first_wins

SEEDS = range(200)


@pytest.mark.parametrize("seed", [1_008_266, 1_012_079])
def test_a_broker_may_leave_the_route_while_the_topic_of_the_log_is_created_on_another(seed: int) -> None:
    assert not run_exactly_once(ExactlyOncePlan.of_seed(seed)).problems


def test_rows_are_visible_once_whatever_happens_at_each_step() -> None:
    runs = [run_exactly_once(ExactlyOncePlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    faults: Counter[str] = sum((run.faults for run in runs), Counter())
    assert set(faults) >= {*KINDS} - {*HOLES, "no key"}
    reports = [ending.report for run in runs for ending in run.history.ends.values()]
    assert sum(getattr(report, "recovered_rows", 0) > 0 for report in reports) >= 10
    assert sum(run.history.drivers for run in runs) > sum(run.plan.tasks for run in runs)


def test_schedules_replay_exactly() -> None:
    first, again = (run_exactly_once(ExactlyOncePlan.of_seed(42)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults


def with_faults(*faults: str, first: int = 0, key: bool = False, **changes: Any) -> Iterator[ExactlyOncePlan]:
    for seed in range(first, first + 400):
        plan = ExactlyOncePlan.of_seed(seed)
        options: dict[str, Any] = {"send_msg_timeout": 500, "ordered": False}
        options |= {"transactional_key": KEY} if key else {}
        yield replace(plan, faults=faults, **{"options": options, "rows": 6, **changes})


def any_message(self: TwoPhaseCommit, half: Any, group: str) -> Any:
    """View a message, and do not compare it."""
    return self.brokers.view(half.queue, half.commit_log_offset)


def incomplete(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reading that does not notice missing messages."""
    return lambda *arguments, complete=False: usual(*arguments)


def without(name: str, patch: pytest.MonkeyPatch) -> None:
    """Remove a rule."""
    if name == "first decision wins":
        without_first_wins(patch)
        return
    fence = TwoPhaseCommit._fence
    if name == "barrier":
        patch.setattr(commit, "BARRIER_WAIT", 0.0)
    changes: dict[str, tuple[object, str, object]] = {
        "fence": (TwoPhaseCommit, "_fence", lambda self, decision: 0.0),
        "barrier": (TwoPhaseCommit, "_fence", lambda self, decision: min(fence(self, decision), 0.0)),
        "one end": (ends, "_is_not_executed", lambda error: error.maybe_stored),
        "no older micro-batch": (DecisionLog, "is_superseded", lambda self, write: False),
        "signatures": (LogKeys, "opened", believed),
        "timeouts": (records, "_integer", unbounded("timeout_ms", records._integer)),
        "viewed half messages": (TwoPhaseCommit, "_view", any_message),
        "flushed commits": (DecisionLog, "await_stored", lambda *_: None),
        "floors": (ModelBrokers, "read", incomplete(ModelBrokers.read)),
    }
    where, what, change = changes[name]
    patch.setattr(where, what, change)


# At least one of these schedules finds the fault.
RULES: dict[str, Iterable[ExactlyOncePlan]] = {
    "fence": with_faults("driver freeze", "second driver", "delayed"),
    "barrier": with_faults("late", "slow end", first=70),
    "one end": with_faults("silent after storing"),
    "first decision wins": with_faults("second driver", "driver freeze"),
    "no older micro-batch": with_faults("driver freeze", tasks=3, identity="stream"),
    "signatures": with_faults("hostile log", key=True),
    "timeouts": with_faults("hostile log", identity="batch", tasks=3, brokers=1),
    "viewed half messages": with_faults("hostile log", first=30),
    "flushed commits": with_faults(
        "power failure", "slow storage", "unsafe end", brokers=2, rows=1, partitions=1, tasks=3
    ),
    "floors": with_faults("driver crash", "retention", "silent"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(rule, monkeypatch)
    assert any(run_exactly_once(plan).problems for plan in RULES[rule])
