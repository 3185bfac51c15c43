"""Attempts at effectively-once writes, run by a test instead of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempt, Attempted
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.deliveries.effectively_once.complete import complete as complete_write
from rocketmq_spark.deliveries.effectively_once.delivery import EffectivelyOnce
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan, plan_write
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import forget_logs, log_of
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.sink.task import SendContext, SendRules, write_rows
from rocketmq_spark.testing import FakeCluster
from tests.support.processes import wait_for
from tests.support.two_phase import TOPIC, Driver

WRITE = Write("write-1")
ROWS = [f"row-{number}" for number in range(400)]
BATCH = 20


class Killed(Exception):
    """The end of a task in the middle of its rows."""


def batches(
    rows: Iterable[str],
    dies_after: int | None = None,
    key: str | None = None,
    before: Callable[[int], object] = lambda _: None,
) -> Iterator[pa.RecordBatch]:
    rows = list(rows)
    for start in range(0, len(rows), BATCH):
        before(start)
        if dies_after is not None and start >= dies_after:
            raise Killed
        some = rows[start : start + BATCH]
        columns = {"body": pa.array([row.encode() for row in some], pa.binary())}
        columns["keys"] = pa.array([f"key of {row[:99]}" for row in some])
        if key is not None:
            columns["shardingKey"] = pa.array([key] * len(some))
        yield pa.record_batch(columns)


def run_task(
    job: Driver,
    plan: ResumePlan,
    write: Write,
    partition_id: int = 0,
    rows: Iterable[str] = ROWS,
    dies_after: int | None = None,
    summary: WriteSummary | None = None,
    key: str | None = None,
    before: Callable[[int], object] = lambda _: None,
) -> Attempted | None:
    """Run one attempt at a partition; all rows have the sharding key. `before` is called with numbers of rows."""
    recorder = Recorder(write.query or write.name, write.batch_id, partition_id)
    send = partial(_send, job, recorder)
    attempt = Attempt(job.brokers, plan, write, partition_id)
    done = attempt.run(recorder, batches(rows, dies_after, key, before), send)
    if summary is not None:
        merge_into(summary, recorder.snapshot())
    return done


def dying_after_stored_rows(cluster: FakeCluster, rows: int) -> dict[str, Any]:
    """Return the arguments of a task that dies after `rows` rows, when brokers have stored 7 or more of them."""

    def wait_for_some(start: int) -> None:
        if start >= rows:
            wait_for(lambda: len(cluster.messages(TOPIC)) >= 7)

    return {"dies_after": rows, "before": wait_for_some}


def _send(
    job: Driver,
    recorder: Recorder,
    rows: Iterator[pa.RecordBatch],
    *,
    row_id_name: str = "",
    rules: SendRules | None = None,
) -> None:
    assert rules is not None
    queues = job.queues if job.options.ordered else None
    context = SendContext(options=job.options, instance=job.instance, queues=queues, servers_reached=True)
    write_rows(context, recorder, rows, row_id_name, rules)


def job_log(job: Driver) -> DecisionLog:
    with log_of(job.options, EffectivelyOnce.log_name(job.options)) as log:
        return log


def new_plan(job: Driver, write: Write | None = WRITE) -> ResumePlan:
    """Plan as a new driver process does."""
    forget_logs()
    return plan_write(job.brokers, job_log(job), write)


def complete(job: Driver, plan: ResumePlan, write: Write, *done: Attempted | None) -> ResumeReport:
    attempts = [one for one in done if one is not None]
    names = {queue.broker_name for queue in job.queues}
    return complete_write(job.brokers, job_log(job), plan, write, attempts, names)


def refresh_routes(job: Driver) -> None:
    for topic in (TOPIC, job.options.transaction_topic):
        job.brokers.refresh_route(topic)
