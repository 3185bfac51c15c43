"""`delivery=effectivelyOnce` while drivers, JVMs, Python workers and brokers are killed at random moments.

A streaming query copies a topic to another, with micro-batches of 50,000 rows and all other options at their defaults.
Only the short run has another `fenceMs`: with the default, it would wait 10 s after each kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support import writes
from tests.support.auditor import BY_NUMBER, audit, numbered_rows
from tests.support.exactly_once import Chaos, Growth, Job
from tests.support.java import Java
from tests.support.processes import PATIENCE, StandaloneCluster, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

OPTIONS: dict[str, Any] = {"delivery": "effectivelyOnce", "fenceMs": "2000"}
QUEUES = 4
# Each kind of process is killed once.
KILLS = 4
# At most so many more, until a kill has interrupted a task that has begun.
MORE_RUNS = 4

Record = Callable[[str, object], None]


def new_seed() -> int:
    """Return the seed of the kills. To repeat them, set CHAOS_SEED."""
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 32))
    print(f"CHAOS_SEED={seed}", flush=True)
    return seed


def run_jobs(
    new_job: Callable[[str, Path], Job], topic: str, folder: Path, java: Java, record: Record, what: str, runs: int
) -> None:
    """Write 50,000 rows a kill in each run, while processes are killed, and count with RocketMQ's own consumer.

    The variable CHAOS_RUNS sets another number of runs.
    """
    seed, faults, total, phases = new_seed(), Counter[str](), Counter[str](), Counter[str]()
    runs = int(os.environ.get("CHAOS_RUNS") or runs)
    for number in range(runs + MORE_RUNS):
        if number >= runs and total["recoveries"]:
            break
        (folder / str(number)).mkdir()
        with closing(new_job(f"{topic}-{number}", folder / str(number))) as job:
            chaos = Chaos(job, seed + number, kills=True)
            chaos.run(KILLS, KILLS)
            job.close()
            account, met = job.account(java), job.phases(chaos.times)
        phases += met
        faults += chaos.faults
        total.update(rows=account.found.rows, recoveries=account.recoveries, **account.found.counts)
        print(f"run {number}, seed {seed + number}: {account}; {dict(chaos.faults)} {dict(met)}", flush=True)
        account.found.check()
        # A task reads and writes several queues.
        assert account.partitions < 2 * QUEUES
    line = writes.Account(f"{faults.total()} kills ({what})", total["rows"], total["rows"], 0, 0, 0.0, 1)
    record("account", list(line))
    print(f"{what}: {dict(faults)} during {dict(phases)}, {dict(total)}")
    assert total["recoveries"] > 0


@pytest.mark.timeout(14400)
@pytest.mark.parametrize(
    ("runs", "connect"),
    [(1, False), pytest.param(30, False, marks=pytest.mark.long), pytest.param(10, True, marks=pytest.mark.long)],
    ids=["once", "classic", "connect"],
)
def test_topic_is_copied_although_processes_are_killed(
    two_brokers: LocalCluster,
    topic: str,
    tmp_path: Path,
    java: Java,
    record_property: Record,
    *,
    runs: int,
    connect: bool,
) -> None:
    if connect:
        pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")

    def new_job(name: str, folder: Path) -> Job:
        source = f"{name}-source"
        for one in (source, name):
            writes.make_topic(two_brokers, one, queues=QUEUES)
        return Job(
            two_brokers,
            name,
            folder,
            rows=50_000,
            source=source,
            connect=connect,
            restarts=3,
            **(OPTIONS if runs == 1 else {"delivery": "effectivelyOnce"}),
        )

    what = f"topic to topic{' through Spark Connect' if connect else ''}"
    run_jobs(new_job, topic, tmp_path, java, record_property, what, runs)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_batches_of_files_are_stored_once_although_processes_are_killed(
    two_brokers: LocalCluster, topic: str, tmp_path: Path, java: Java, record_property: Record
) -> None:
    def new_job(name: str, folder: Path) -> Job:
        writes.make_topic(two_brokers, name, queues=QUEUES)
        return Job(two_brokers, name, folder, rows=50_000, batch=True, restarts=3, **OPTIONS)

    run_jobs(new_job, topic, tmp_path, java, record_property, "batch", 30)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_row_is_stored_once_although_stages_are_repeated(
    two_brokers: LocalCluster,
    topic: str,
    tmp_path: Path,
    java: Java,
    record_property: Record,
) -> None:
    rng, count, rows, kills = random.Random(new_seed()), 30, 50_000, 0
    writes.make_topic(two_brokers, topic, queues=4)
    options = {
        **OPTIONS,
        "nameServer": two_brokers.name_server,
        "topic": topic,
        "transactionalId": f"job-{topic}",
        # A write lasts seconds on any machine, so the kill falls into it.
        "maxRatePerSecond": "10000",
        "maxRateTasks": "2",
        "batchBytes": "16k",
    }
    conf = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": tmp_path.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.stage.maxConsecutiveAttempts": "100",
        "spark.task.maxFailures": "100",
    }
    with StandaloneCluster(tmp_path / "spark") as spark:
        driver = spark.submit("shuffled_writes", {"writes": count, "rows": rows, "options": options}, conf=conf)
        with closing(Growth(two_brokers, lambda: not driver.is_alive)) as growth:
            while driver.is_alive:
                growth.wait(topic)
                time.sleep(rng.uniform(0, 2))
                executors = spark.executors()
                if executors and driver.is_alive:
                    os.kill(rng.choice(executors), signal.SIGKILL)
                    kills += 1
                    wait_for(lambda: len(spark.executors()) == len(spark.workers) or not driver.is_alive)
        recovered = driver.result(PATIENCE)
    (log,) = tmp_path.glob("app-*")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    repeated_stages = sum(
        event["Stage Info"]["Stage Attempt ID"] > 0
        for event in events
        if event["Event"] == "SparkListenerStageSubmitted"
    )
    given = numbered_rows(topic, range(count * rows), 0, keyed=False)
    found = audit(java, two_brokers.name_server, given, identity=BY_NUMBER)
    what = f"{kills} executors killed, {repeated_stages} stages repeated"
    print(f"{what}: {count * rows} rows, {recovered}")
    record_property(
        "account", list(writes.Account(what, count * rows, found.messages, 0, recovered["recovered"], 0.0, 1))
    )
    found.check()
    assert recovered["recovered"] > 0
    assert repeated_stages > 0
