"""Attempts at effectively-once writes, run by a test instead of Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa

from rocketmq_spark.deliveries.effectively_once import attempt as resume
from rocketmq_spark.deliveries.effectively_once.attempt import Attempted, ResumePlan, send_missing
from rocketmq_spark.deliveries.exactly_once import plan as plans
from rocketmq_spark.deliveries.log.records import Write
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.sink.task import write_rows
from tests.support.two_phase import TOPIC, Driver

WRITE = Write("write-1")
ROWS = [f"row-{number}" for number in range(400)]
BATCH = 20


class Killed(Exception):
    """The end of a task in the middle of its rows."""


def batches(rows: Iterable[str], dies_after: int | None = None, key: str | None = None) -> Iterator[pa.RecordBatch]:
    rows = list(rows)
    for start in range(0, len(rows), BATCH):
        if dies_after is not None and start >= dies_after:
            raise Killed
        bodies = [row.encode() for row in rows[start : start + BATCH]]
        columns = {"body": pa.array(bodies, pa.binary()), "keys": pa.array(map(str, range(len(bodies))))}
        if key is not None:
            columns["shardingKey"] = pa.array([key] * len(bodies))
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
) -> Attempted | None:
    """Run one attempt at a partition; all rows have the sharding key."""
    recorder = Recorder(write.query or write.name, write.batch_id, partition_id)
    send = partial(_send, job, queues=job.queues if job.options.ordered else None)
    attempt = resume.Attempt(job.brokers, plan, write, partition_id)
    done = attempt.run(recorder, batches(rows, dies_after, key), partial(send_missing, send))
    if summary is not None:
        merge_into(summary, recorder.snapshot())
    return done


def _send(job: Driver, recorder: Recorder, rows: Iterator[pa.RecordBatch], **delivery: object) -> None:
    write_rows(job.options, job.instance, recorder, rows, servers_reached=True, **delivery)  # type: ignore[arg-type]


def new_plan(job: Driver, write: Write | None = WRITE) -> ResumePlan:
    """Plan as a new driver process does."""
    plans._logs.clear()
    return resume.plan(job.brokers, plans.log_of(job.options), write)


def complete(job: Driver, plan: ResumePlan, write: Write, *done: Attempted | None) -> resume.ResumeReport:
    attempts = [one for one in done if one is not None]
    return resume.complete(job.brokers, plans.log_of(job.options), plan, write, attempts, names(job))


def refresh_routes(job: Driver) -> None:
    for topic in (TOPIC, job.options.transaction_topic):
        job.brokers.refresh_route(topic)


def names(job: Driver) -> set[str]:
    return {queue.broker_name for queue in job.queues}
