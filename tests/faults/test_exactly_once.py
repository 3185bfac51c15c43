"""`delivery=exactlyOnce` while drivers, Python workers and brokers are killed and paused, mostly during commits.

Every attempt at a write has other rows, so the tests also notice a write with rows of two attempts.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support import writes
from tests.support.drivers import resume
from tests.support.exactly_once import TIMEOUT_MS, Account, Chaos, Job
from tests.support.java import Java

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

NewJob = Callable[..., Job]
Settle = Callable[[str, Job], Account]


@pytest.fixture
def new_job(two_brokers: LocalCluster, topic: str, tmp_path: Path) -> Iterator[NewJob]:
    with ExitStack() as stack:

        def make(timeout_ms: int = TIMEOUT_MS, **settings: Any) -> Job:
            writes.make_topic(two_brokers, topic, queues=2)
            job = Job(two_brokers, topic, tmp_path, transactionTimeoutMs=str(timeout_ms), **settings)
            stack.callback(job.close)
            return job

        yield make


@pytest.fixture
def settle(java: Java, record_property: Callable[[str, object], None]) -> Settle:
    """Return a function that counts the rows of a job after its end, and adds them to the table of faults."""

    def count(fault: str, job: Job) -> Account:
        job.close()
        account = job.account(java)
        print(f"{fault}: {account}")
        found = account.found
        line = writes.Account(fault, found.rows, found.messages, found.repeats, account.recoveries, 0.0, found.most)
        record_property("account", list(line))
        return account

    return count


def test_every_row_is_written_once_despite_faults_in_commits(new_job: NewJob, settle: Settle) -> None:
    # A new driver on a slow machine needs more than `TIMEOUT_MS` for its first micro-batch.
    job = new_job(rows=400, timeout_ms=2 * TIMEOUT_MS)
    broker, _ = job.cluster.brokers
    job.feed(4)
    # This driver pauses in the middle of a micro-batch, beyond its deadline. The next driver completes it.
    paused = job.start_held(1, 250)
    processes = paused.pause()
    job.go(1)
    successor = job.start(hold={2: 100, 3: 300})
    job.await_held(2, successor)
    resume(processes)
    # Its micro-batch is complete, so it has to give up.
    assert paused.wait() != 0
    broker.kill()
    job.go(2)
    broker.restart()
    job.await_held(3, successor)
    for worker in successor.workers():
        worker.kill()
    job.finish(successor)
    account = settle("driver replaced, broker killed, workers killed", job)
    account.found.check()
    assert account.recoveries >= 2


@pytest.mark.long
@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_write_waits_for_a_broker_that_is_down_beyond_the_deadline(new_job: NewJob, settle: Settle, fault: str) -> None:
    job = new_job(rows=400, batch=True)
    broker, _ = job.cluster.brokers
    job.feed(2)
    driver = job.start_held(0, 200)
    broker.pause() if fault == "paused" else broker.kill()
    job.go(0)
    # Longer than the deadline of every half message that exists now.
    time.sleep(job.timeout_ms / 1000 + 2)
    broker.resume() if fault == "paused" else broker.restart()
    job.complete()
    assert driver.wait() == 0, driver.tail()
    account = settle(f"broker {fault} beyond the deadline", job)
    account.found.check()
    assert account.recoveries >= 1


@pytest.mark.long
@pytest.mark.parametrize("fence", [True, False], ids=["with_fence", "without_fence"])
def test_only_the_fence_prevents_repeats_by_a_paused_driver(new_job: NewJob, settle: Settle, *, fence: bool) -> None:
    # Without the fence no driver waits, and the paused driver continues within its deadline.
    job = new_job(rows=400, batch=True, timeout_ms=TIMEOUT_MS if fence else 600_000)
    job.feed(1)
    job.complete()
    paused = job.start_held(0, 100, fence=fence)
    processes = paused.pause()
    job.go(0)
    assert job.start(fence=fence).wait() == 0
    resume(processes)
    paused.wait()
    account = settle(f"driver paused in its commit, {'with' if fence else 'without'} the fence", job)
    account.found.check(*([] if fence else ["repeated"]))
    assert (account.found.repeats > 0) is not fence


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("batch", "faults", "rows"), [(False, 100, 100_000), (True, 40, 20_000)], ids=["stream", "batch"]
)
def test_every_row_is_written_once_in_chaos(
    new_job: NewJob, settle: Settle, *, batch: bool, faults: int, rows: int
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 32))
    print(f"CHAOS_SEED={seed}", flush=True)
    job = new_job(rows=2_000, batch=batch)
    chaos = Chaos(job, seed)
    chaos.run(faults, rows // job.rows)
    account = settle(f"chaos ({'batch' if batch else 'stream'}, {chaos.faults.total()} faults)", job)
    print(f"{dict(chaos.faults)}, {chaos.restarts} restarts")
    account.found.check()
