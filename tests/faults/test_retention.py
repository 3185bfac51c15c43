"""Recoveries of both once-deliveries on brokers that have deleted their oldest messages since the first attempt.

The rows of one attempt fill several files of a commit log. Topics share the files, so records of the decision log may
expire with the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model.message import MessageQueue
from tests.support.cluster import commit_log, forget
from tests.support.processes import wait_for
from tests.support.resume import Killed, new_plan, run_task
from tests.support.two_phase import ID, WRITE, Driver
from tests.support.writes import make_topic

pytestmark = [pytest.mark.faults, pytest.mark.integration]

# A file of the first broker's commit log (tests/faults/conftest.py) has about 16 of these rows.
ROWS = [f"row-{number:03}".ljust(250_000) for number in range(200)]
# An attempt that dies has sent so many of them.
SENT = 160
ADVICE = ".* write what is missing with another transactionalId"


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Forget what a process has read and checked before."""
    yield
    forget_logs()
    forget_checks()


def name_for(topic: str, suffix: str = "") -> str:
    """Return a transactional id whose log is on the second broker, which keeps its messages."""
    homes = [MessageQueue(log_of(topic), f"broker-{number}", 0) for number in range(2)]
    names = (f"{ID}-{number}" for number in itertools.count())
    return next(name for name in names if max(homes, key=DecisionLog(name + suffix, log_of(topic))._draw) == homes[1])


def log_of(topic: str) -> str:
    return f"log-{topic}"


@contextmanager
def driver(cluster: LocalCluster, topic: str, name: str, **options: Any) -> Iterator[Driver]:
    given: dict[str, Any] = {
        "topic": topic,
        "transactionTopic": log_of(topic),
        "transactionalId": name,
        "compressType": "NONE",
    }
    with closing(Driver(cluster.name_server, **given, deliveryTimeoutMs="60000", **options)) as running:
        yield running


def ends(job: Driver) -> dict[MessageQueue, int]:
    return job.brokers.max_offsets(job.queues)


# delivery=effectivelyOnce


@contextmanager
def resuming(cluster: LocalCluster, topic: str, name: str) -> Iterator[Driver]:
    """Return a driver of an effectively-once write."""
    forget_logs()
    with driver(cluster, topic, name, delivery="effectivelyOnce", fenceMs="0", batchBytes=str(2**20)) as job:
        yield job


def store_some(job: Driver, plan: ResumePlan, partition_id: int = 0) -> None:
    """Run an attempt that dies after 140 rows or more are stored."""
    before = sum(ends(job).values())

    def wait_for_some(rows: int) -> None:
        if rows == SENT:
            wait_for(lambda: sum(ends(job).values()) >= before + 140)

    with pytest.raises(Killed):
        run_task(job, plan, WRITE, partition_id, rows=ROWS, dies_after=SENT, before=wait_for_some)


@pytest.mark.parametrize("when", ["before the plan", pytest.param("after the plan", marks=pytest.mark.long)])
def test_rows_that_expired_before_the_next_attempt_are_an_error(
    two_brokers: LocalCluster, topic: str, when: str
) -> None:
    make_topic(two_brokers, topic, queues=1)
    name, broker = name_for(topic, f"#{topic}"), two_brokers.brokers[0]
    with resuming(two_brokers, topic, name) as job:
        store_some(job, new_plan(job))
    with resuming(two_brokers, topic, name) as job:
        plan = new_plan(job)
        assert plan.home.broker_name != broker.name
        # Without any messages, a broker begins its queues at offset 0 again.
        forget(broker, len(commit_log(broker)) - 2)
        if when == "before the plan":
            plan = new_plan(job)
        queue = MessageQueue(topic, broker.name, 0)
        for _ in range(2):
            with pytest.raises(DataLossError, match=rf"reading queue {queue}: its messages 0 to \d+ are gone{ADVICE}"):
                run_task(job, plan, WRITE, rows=ROWS)
        assert sum(ends(job).values()) <= SENT


@pytest.mark.long
def test_records_that_expired_with_the_first_rows_are_an_error(two_brokers: LocalCluster, topic: str) -> None:
    broker = two_brokers.brokers[0]
    make_topic(two_brokers, topic, queues=1, on=[broker])
    files = len(commit_log(broker))
    with resuming(two_brokers, topic, ID) as job:
        plan = new_plan(job)
        store_some(job, plan)
        store_some(job, plan, 1)
        # The start offsets of the write, and the `begun` record of partition 0.
        forget(broker, files + 1)
        plan = new_plan(job)
        for part in (0, 1):
            with pytest.raises(DataLossError, match=rf"queue {plan.home}\) have expired{ADVICE}"):
                run_task(job, plan, WRITE, part, rows=ROWS)
        assert sum(ends(job).values()) <= 2 * SENT


@pytest.mark.long
def test_records_that_expired_since_the_plan_are_an_error(two_brokers: LocalCluster, topic: str) -> None:
    broker = two_brokers.brokers[0]
    make_topic(two_brokers, topic, queues=1, on=[broker])
    files = len(commit_log(broker))
    with resuming(two_brokers, topic, ID) as job:
        plan = new_plan(job)
        # Another driver begins the partition.
        store_some(job, new_plan(job))
        forget(broker, files + 1)
        with pytest.raises(DataLossError, match=f"reading queue {plan.home}: its messages .* are gone{ADVICE}"):
            run_task(job, plan, WRITE, rows=ROWS)
        assert sum(ends(job).values()) <= SENT


# delivery=exactlyOnce


@pytest.mark.parametrize(
    ("committed", "expired"),
    [
        pytest.param(0, 1, id="a half message"),
        pytest.param(0, 99, marks=pytest.mark.long, id="all half messages"),
        pytest.param(150, 99, marks=pytest.mark.long, id="committed rows"),
    ],
)
def test_expired_messages_stop_the_recovery_of_a_decided_write(
    two_brokers: LocalCluster, topic: str, committed: int, expired: int
) -> None:
    make_topic(two_brokers, topic, queues=1)
    name, broker = name_for(topic), two_brokers.brokers[0]
    files = len(commit_log(broker))
    with driver(two_brokers, topic, name) as dead:
        dead.options = dead.brokers.options = replace(dead.options, transaction_timeout_ms=10_000)
        dead.open().decide_and_crash(ROWS, committed)
    forget(broker, min(files + expired, len(commit_log(broker)) - 2))
    with driver(two_brokers, topic, name) as job:
        job.open()
        assert job.log.home is not None
        assert job.log.home.broker_name != broker.name
        with pytest.raises(DataLossError, match=f"{topic}/{broker.name}/0.*{ADVICE}"):
            job.two_phase.finish(WRITE)
        assert sum(ends(job).values()) <= committed
