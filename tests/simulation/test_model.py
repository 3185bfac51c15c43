"""Effectively-once writes to modelled brokers: fixed seeds, and rules whose removal the checks must find."""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.numpy_hashes import hash_sums
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once import attempt as attempts
from rocketmq_spark.deliveries.effectively_once import complete as ends
from rocketmq_spark.deliveries.effectively_once import plan as plans
from rocketmq_spark.deliveries.effectively_once import stored
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.deliveries.effectively_once.lease import Lease
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.log import records
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import LoggedDelivery
from rocketmq_spark.deliveries.log.keys import LogKeys, Opened, unsigned
from rocketmq_spark.deliveries.log.records import Begun, BegunRecord, DoneRecord, Record
from rocketmq_spark.deliveries.log.scan import Floor
from rocketmq_spark.deliveries.log.state import StartOffsets
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled
from tests.simulation.hostile import HASHES, KEY
from tests.simulation.model import KINDS, LONG, ModelPlan, run_model
from tests.simulation.spark import HOLES


def test_rows_are_stored_once_whatever_happens_at_each_step() -> None:
    runs = [run_model(ModelPlan.of_seed(seed)) for seed in range(300)]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks would see little.
    faults: Counter[str] = sum((run.faults for run in runs), Counter())
    assert set(faults) >= {*KINDS, "rows stored after the fence"} - {*HOLES, "equal rows"}
    assert sum(run.history.recovered_rows > 0 for run in runs) >= 30
    assert sum(run.history.drivers for run in runs) > sum(run.plan.tasks for run in runs)


def test_schedules_replay_exactly() -> None:
    first, again = (run_model(ModelPlan.of_seed(42)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults


def no_wait(brokers: Brokers, log: DecisionLog, write: Write, broker_names: Collection[str], _: float) -> None:
    """Pass the barrier, but not the fence."""
    stored = log.append_homes(brokers, write, set(broker_names))
    brokers.for_each(stored, lambda queue: brokers.await_readable(queue, stored[queue]))


def no_barrier(brokers: Brokers, log: DecisionLog, write: Write, broker_names: Collection[str], seconds: float) -> None:
    """Pass the fence, but not the barrier."""
    if broker_names:
        brokers.for_each(sorted(broker_names), lambda name: brokers.max_offsets([MessageQueue(log.topic, name, 0)]))
        brokers.runtime.sleep(max(seconds, 1.0))


def first_offsets_last(
    self: DecisionLog, kind: str, write: Write, start_offsets: Mapping[MessageQueue, int], offset: int
) -> None:
    """Let the last start offsets of their kind count, as those of a driver that was frozen."""
    after = write if kind == "done" else None
    self.start_offsets = [*self.start_offsets[-1:], StartOffsets(after, start_offsets, offset)]


def without_attempts(usual: Callable[..., ResumePlan]) -> Callable[..., ResumePlan]:
    """Return a plan that has no earlier attempts."""
    return lambda *arguments: replace(usual(*arguments), begun={}, completed=frozenset())


class WithoutEnds(DecisionLog):
    """A log whose reader does not see that a write is done. The attempts of a batch write are gone then."""

    def _apply(self, record: Record) -> None:
        super()._apply(record)
        if isinstance(record, DoneRecord) and record.write in self.writes:
            self.writes[record.write].done = False


class WithoutOthers(DecisionLog):
    """A log whose reader does not see the attempts of others."""

    own = ""

    def append_begun(
        self, brokers: Brokers, write: Write, partition_id: int, attempt: str, begun: Begun, since: int
    ) -> None:
        self.own = attempt
        super().append_begun(brokers, write, partition_id, attempt, begun, since)

    def _apply(self, record: Record) -> None:
        if not isinstance(record, BegunRecord) or record.attempt == self.own:
            super()._apply(record)


def only_listed(
    usual: Callable[..., dict[MessageQueue, Floor]],
) -> Callable[..., dict[MessageQueue, Floor]]:
    """Return a look-up of queues that knows only those of the route."""

    def floors_of(
        brokers: Brokers, attempts: Sequence[Begun], start_offsets: Mapping[MessageQueue, int]
    ) -> dict[MessageQueue, Floor]:
        found = usual(brokers, attempts, start_offsets)
        listed = brokers.routes().look_up(str(brokers.options.topic)).queue_set
        return {queue: floor for queue, floor in found.items() if queue in listed}

    return floors_of


def not_done(usual: Callable[..., ResumePlan]) -> Callable[..., ResumePlan]:
    """Return a plan that does not see that a batch write is complete."""
    return lambda *arguments: replace(usual(*arguments), done=False)


def unchecked(
    brokers: Brokers, _: DecisionLog, __: Write, ___: object, queues: Collection[MessageQueue]
) -> dict[MessageQueue, int]:
    """Return where queues end, also if that is below an acknowledged row."""
    return brokers.max_offsets(queues)


def unbounded(field: str, usual: Callable[..., int]) -> Callable[..., int]:
    """Return a check of numbers in records that does not bound those of a field."""

    def integer(value: object, name: str, lowest: int, highest: int) -> int:
        return usual(value, name, lowest, 10**300 if name == field else highest)

    return integer


def incomplete(usual: Callable[..., Iterator[Pulled]]) -> Callable[..., Iterator[Pulled]]:
    """Return a reading that does not notice missing messages."""
    return lambda *arguments, complete=False: usual(*arguments)


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(patch: pytest.MonkeyPatch) -> None:
        usual_complete = ends.complete
        changes: dict[str, tuple[object, str, object]] = {
            "fence": (attempts, "pass_fence", no_wait),
            "claims": (DecisionLog, "claim_home", lambda *_: None),
            "barrier": (attempts, "pass_fence", no_barrier),
            "attempts in the plan": (plans, "plan_write", without_attempts(plans.plan_write)),
            "attempts since the plan": (attempts, "DecisionLog", WithoutOthers),
            "queues of attempts": (attempts, "floors_of", only_listed(stored.floors_of)),
            "end in the plan": (plans, "plan_write", not_done(plans.plan_write)),
            "end since the plan": (attempts, "DecisionLog", WithoutEnds),
            "older start offsets": (ResumePlan, "start_offsets_of", lambda self, _: self.start_offsets[-1]),
            "first start offsets": (DecisionLog, "_apply_start_offsets", first_offsets_last),
            "old drivers": (DecisionLog, "is_superseded", lambda _, __: False),
            "identity": (LoggedDelivery, "identify", guessed()),
            "signatures": (LogKeys, "opened", believed),
            "contents of requests": (ContentHash, "_sums", equal_sums),
            "contents": (ContentHash, "_sums", equal_sums),
            "seeds against collisions": (ContentHash, "_sums", sums_of_words),
            "any order": (attempts, "ContentHash", lambda numbered: ContentHash(numbered=True)),
            "floors": (Brokers, "pulls", incomplete(Brokers.pulls)),
            "ends below floors": (stored, "floor_now", lambda _, __, floor, *___: floor),
            "ends below receipts": (ends, "_ends", unchecked),
            "lost rows behind others": (ends, "has_others", lambda *_: False),
            "recovered rows in receipts": (Recorder, "record_recovered", lambda *_: None),
            "report": (
                ends, "complete",
                lambda *arguments: ResumeReport(0, usual_complete(*arguments).seconds),
            ),
        }  # fmt: skip
        where, what, change = changes[name]
        for module in (where, ends) if what == "pass_fence" else (where,):
            patch.setattr(module, what, change)

    return remove


def equal_sums(_: ContentHash, columns: Sequence[Any]) -> Any:
    """Return equal hashes of all contents."""
    return np.zeros((2, len(columns[0].sizes)), np.uint64)


def sums_of_words(self: ContentHash, columns: Sequence[Any]) -> Any:
    """Return hashes as in ``SPARK_ROW_ID``, with the seed: a user prepares collisions without it."""
    return hash_sums(columns, Workspace(), struct.unpack_from("<QQ", self.seed))


def believed(self: LogKeys, message: Any, log: str, queue: MessageQueue) -> Opened:
    """Open any message as if its signature were valid."""
    body = unsigned(message)
    return Opened(bytes(message) if body is None else body, 0, self.signs)


def guessed() -> Callable[..., Write]:
    """Return a look-up of the identity that draws a new one for each write without Spark's local properties."""
    numbers = itertools.count()
    return lambda options, batch_id: Write(f"guess-{next(numbers)}")


def with_faults(*faults: str, first: int = 0, **changes: Any) -> Iterator[ModelPlan]:
    return (replace(ModelPlan.of_seed(seed), faults=faults, **changes) for seed in range(first, first + 500))


# At least one of these schedules finds the fault.
RULES: dict[str, Iterable[ModelPlan]] = {
    "fence": with_faults("second task", "delayed"),
    "barrier": with_faults("task crash", "slow storage"),
    "ends below receipts": with_faults("promotion", rows=6),
    "lost rows behind others": with_faults("promotion", "others", rows=6),
    "ends below floors": with_faults(
        "lost end",
        "task crash",
        first=60,
        identity="batch",
        tasks=3,
        rows=6,
        brokers=2,
        queues=1,
        partitions=1,
        horizon=12.0,
    ),
    "seeds against collisions": with_faults("silent", HASHES, rows=6, digits=LONG),
    "claims": with_faults("driver freeze", "not listed", brokers=2),
    "attempts in the plan": with_faults("driver crash"),
    "attempts since the plan": with_faults("task crash"),
    "queues of attempts": with_faults("not listed", "task crash", first=80, brokers=2),
    "end in the plan": with_faults("driver freeze", "driver crash"),
    "end since the plan": with_faults("driver freeze"),
    "older start offsets": with_faults("driver crash"),
    "first start offsets": with_faults(
        "driver freeze", "driver crash", first=150, rows=6, tasks=2, identity="stream", horizon=12.0
    ),
    "old drivers": with_faults("driver freeze", first=40, tasks=3, rows=3, identity="stream", horizon=12.0),
    "identity": with_faults("driver crash", rows=6, identity="thread"),
    "signatures": with_faults("hostile log", options={"send_msg_timeout": 500, "transactional_key": KEY}),
    "contents of requests": with_faults("silent", "hostile rows", rows=6),
    "contents": with_faults("task crash", "hostile rows", rows=6),
    "any order": with_faults("task crash", "other order", first=30, rows=6),
    "floors": with_faults("driver crash", "retention", "others", "new topic"),
    "recovered rows in receipts": with_faults("task crash", rows=6),
    "report": with_faults("second task", "zombie", "late"),
}


# At least one of these schedules finds the hole in the protocol.
OF_HOLES: dict[str, Iterable[ModelPlan]] = {
    "other partitions": with_faults("other partitions", "driver crash", rows=6, partitions=2),
}


# Attempts that overlap with their successors. At least one of these schedules finds that they have no lease.
OVERLAPS: dict[str, Iterable[ModelPlan]] = {
    "zombie": with_faults("second task", "zombie", "slow input", rows=6),
    "orphan": with_faults("driver crash", "orphan", "slow input", first=210, rows=6, partitions=1),
    "second driver": with_faults("second driver", "slow input", rows=6),
    "frozen driver": with_faults("driver freeze", "slow input", rows=6),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_missing_lease_is_found(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "left", lambda _: math.inf)
    monkeypatch.setattr(Lease, "check", lambda _: None)
    assert any(run_model(plan).problems for plan in OVERLAPS[overlap])


def test_a_missing_bound_of_fences_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt waits for the longest fence of earlier ones. Without a key, users forge them."""

    def ends(plan: ModelPlan) -> bool:
        return not any("no end" in problem for problem in run_model(plan).problems)

    faults = "silent", "silent after storing", "task crash", "driver crash", "second task", "hostile log"
    plans = list(itertools.islice(with_faults(*faults, first=28, rows=6, options={"send_msg_timeout": 500}), 5))
    assert all(map(ends, plans))
    monkeypatch.setattr(records, "_integer", unbounded("fence", records._integer))
    assert not all(map(ends, plans))


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_found(hole: str) -> None:
    assert any(run_model(plan).problems for plan in OF_HOLES[hole])


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without(rule)(monkeypatch)
    assert any(run_model(plan).problems for plan in RULES[rule])
