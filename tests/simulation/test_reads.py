"""Reads in virtual time: fixed seeds, and errors that the checks must find."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from rocketmq_spark.errors import DataLossError, ReadError
from rocketmq_spark.model.message import MessageQueue
from tests.simulation.read_checks import ReadHistory, Row, problems_of_read
from tests.simulation.reads import TOPIC, ReadPlan, ReadRun, run_read

SEEDS = range(120, 180)

QUEUE = MessageQueue(TOPIC, "b0", 0)


def plain(*faults: str, seed: int = 4, begin: str = "earliest", **changes: object) -> ReadRun:
    """Run a read of one queue that has 40 messages."""
    plan = ReadPlan(seed, faults, brokers=1, queues=1, begin=begin, latency=0.03)
    plan.options = {"read_timeout_ms": 5_000, "pull_timeout_ms": 1_000, "pull_batch_size": 8, **changes}
    run = run_read(plan)
    assert not run.problems
    return run


def test_reads_keep_their_promises_under_faults() -> None:
    runs = [run_read(ReadPlan.of_seed(seed)) for seed in SEEDS]
    assert not {run.plan.seed: run.problems for run in runs if run.problems}
    # Otherwise the checks of losses and failures would see nothing.
    assert any("not there any more" in text for run in runs for _, text in run.history.warnings)
    errors = {type(task.error) for run in runs for task in run.history.tasks}
    assert errors == {type(None), DataLossError, ReadError}


def test_read_replays_exactly() -> None:
    first, again = (run_read(ReadPlan.of_seed(7)) for _ in range(2))
    assert first.trace == again.trace
    assert first.faults == again.faults
    assert [task.rows for task in first.history.tasks] == [task.rows for task in again.history.tasks]


def skip_a_row(history: ReadHistory) -> None:
    del history.tasks[0].rows[5]


def skip_the_end(history: ReadHistory) -> None:
    del history.tasks[0].rows[-1]


def repeat_a_row(history: ReadHistory) -> None:
    history.tasks[0].rows.insert(5, history.tasks[0].rows[5])


def swap_two_rows(history: ReadHistory) -> None:
    rows = history.tasks[0].rows
    rows[5], rows[6] = rows[6], rows[5]


def change_a_body(history: ReadHistory) -> None:
    history.tasks[0].rows[5] = history.tasks[0].rows[5]._replace(body=b"other")


def return_a_row_of_no_range(history: ReadHistory) -> None:
    history.tasks[0].rows.append(Row(QUEUE, 10_000, b"other"))


def return_a_rejected_row(history: ReadHistory) -> None:
    history.tags = frozenset({"A"})


def report_a_loss_that_is_none(history: ReadHistory) -> None:
    del history.tasks[0].rows[2:4]
    text = f"messages 2 to 3 of {QUEUE} are not there any more, the first one left is 4"
    history.warnings.append((history.tasks[0].ended, text))


def never_end(history: ReadHistory) -> None:
    history.tasks[0].ended = math.inf


def end_late(history: ReadHistory) -> None:
    history.tasks[0].ended += 100


def give_up_early(history: ReadHistory) -> None:
    text = f"reading {QUEUE} up to offset 39: nothing came from offset 5 on for readTimeoutMs=5000"
    history.tasks[0].error = ReadError(text)


def name_no_range(history: ReadHistory) -> None:
    history.tasks[0].error = DataLossError("something is lost")


def keep_too_many_bytes(history: ReadHistory) -> None:
    history.tasks[0].most_waiting = 1 << 30


def send_too_many_requests(history: ReadHistory) -> None:
    history.tasks[0].most_in_flight = 65


def plan_too_short(history: ReadHistory) -> None:
    (part,) = history.plans[0].ranges
    history.plans[0].ranges = [dataclasses.replace(part, end=39)]


def plan_too_late(history: ReadHistory) -> None:
    (part,) = history.plans[0].ranges
    history.plans[0].ranges = [dataclasses.replace(part, start=1)]


def plan_without_a_queue(history: ReadHistory) -> None:
    history.plans[0].ranges = []


def fail_to_plan(history: ReadHistory) -> None:
    history.plans[0].error = ReadError("planning failed")
    history.plans[0].began = history.calm + 1


PLANTED: dict[Callable[[ReadHistory], None], str] = {
    skip_a_row: "skipped silently",
    skip_the_end: "skipped silently",
    repeat_a_row: "came after",
    swap_two_rows: "came after",
    change_a_body: "never had the body",
    return_a_row_of_no_range: "is not in its ranges",
    return_a_rejected_row: "does not match the filter",
    report_a_loss_that_is_none: "the broker has them",
    never_end: "has not ended",
    end_late: "it waited",
    give_up_early: "gave up after",
    name_no_range: "names no range",
    keep_too_many_bytes: "bytes waited",
    send_too_many_requests: "requests were in flight",
    plan_too_short: "messages were there",
    plan_too_late: "its first message is 0",
    plan_without_a_queue: "leaves out",
    fail_to_plan: "a plan without a fault failed",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_error_in_a_history_is_found(plant: Callable[[ReadHistory], None]) -> None:
    history = plain().history
    assert len(history.tasks[0].rows) >= 40
    plant(history)
    assert any(PLANTED[plant] in problem for problem in problems_of_read(history))


def test_rows_of_two_queues_in_the_order_of_arrival_are_found() -> None:
    run = run_read(dataclasses.replace(ReadPlan.of_seed(4), faults=(), brokers=2, queues=2, rows=40, turn=16, tasks=1))
    assert not run.problems
    rows = run.history.tasks[0].rows
    assert len({row.queue for row in rows}) > 1
    rows.append(rows.pop(0))
    assert any("came after" in problem for problem in problems_of_read(run.history))


def test_loss_that_is_not_reported_is_found() -> None:
    # The broker does not correct its minimum at once, so that a task finds the gap. It also gives short answers.
    faults = "expiry without a new minimum", "short answers"
    history = plain(*faults, seed=4, begin="offsets", fail_on_data_loss=False).history
    task = history.tasks[0]
    lost = [warning for warning in history.warnings if task.began < warning[0] <= task.ended]
    assert lost
    history.warnings.remove(lost[0])
    assert any("skipped silently" in problem for problem in problems_of_read(history))


def test_loss_that_a_plan_does_not_report_is_found() -> None:
    history = plain("expiry", seed=0, begin="offsets", fail_on_data_loss=False).history
    assert history.plans[0].ranges[0].start > history.starts[QUEUE]
    history.warnings.clear()
    assert any("a plan skipped" in problem for problem in problems_of_read(history))


def test_a_read_whose_filter_rejects_all_messages_may_take_long() -> None:
    # One message per request, two requests at a time, and 60 ms for each of them.
    assert run_read(ReadPlan.of_seed(10_364_646)).problems == []
