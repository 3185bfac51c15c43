"""Writes rows to a topic, and sets a clock back by ten minutes in the middle. Prints the errors, one a line, as JSON.

usage: python -m tests.programs.clocked_write NAME_SERVER TOPIC CLOCK CASE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.producer.producer import Producer
from tests.support.clocks import BACK, set_clock
from tests.support.once import BODIES, MANY_BODIES, committing, resuming
from tests.support.processes import wait_for
from tests.support.resume import Killed, complete, new_plan, run_task
from tests.support.two_phase import WRITE
from tests.support.writes import SMALL, messages_in, rows


@dataclass
class Cluster:
    """What a driver knows of a cluster."""

    name_server: str


def set_back(stored: int) -> None:
    """Wait until more messages are stored, then set the clock back."""
    wait_for(lambda: messages_in(name_server, topic) > stored)
    set_clock(clock, BACK)


def at_least_once() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(rows(4_000)):
            if number == 4:
                set_back(1_000)
            yield batch

    with Producer("clocked", name_server=name_server) as producer:
        producer.send_arrow(batches(), topic, **SMALL)


def effectively_once() -> None:
    """Set the clock back in a task that is killed later; a second driver completes the write."""

    def fault(number: int) -> None:
        if number == 500:
            set_back(200)

    with resuming(cluster, topic, batchBytes="1024") as job, suppress(Killed):
        run_task(job, new_plan(job), WRITE, rows=BODIES, before=fault, dies_after=1_200)
    with resuming(cluster, topic, batchBytes="1024") as job:
        plan = new_plan(job)
        complete(job, plan, WRITE, run_task(job, plan, WRITE, rows=BODIES))


def before_a_commit() -> None:
    with committing(cluster, topic) as job:
        # As when a driver plans a write.
        job.two_phase.prepare({"broker-0"})
        halves = job.prepare(BODIES)
        set_clock(clock, BACK)
        job.two_phase.commit(WRITE, *halves)


def before_half_messages() -> None:
    """Set the clock back when the driver has started; its write fails, and that of a driver with a right clock not."""
    with committing(cluster, topic) as job:
        set_clock(clock, BACK)
        try:
            job.two_phase.commit(WRITE, *job.prepare(BODIES))
        except RocketMQError as exc:
            errors.append(str(exc))
    set_clock(clock, 0)
    with committing(cluster, topic) as job:
        job.two_phase.commit(WRITE, *job.prepare(BODIES))


def in_a_commit() -> None:
    with committing(cluster, topic, timeout_ms=60_000) as job, ThreadPoolExecutor(1) as pool:
        running = pool.submit(job.two_phase.commit, WRITE, *job.prepare(MANY_BODIES))
        set_back(0)
        running.result()
    with committing(cluster, topic) as job:
        job.two_phase.finish(WRITE)


_, name_server, topic, file, case = sys.argv
cluster, clock, errors = Cluster(name_server), Path(file), list[str]()
globals()[case]()
print(json.dumps(errors))
