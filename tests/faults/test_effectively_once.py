"""`delivery=effectivelyOnce` while drivers, JVMs, Python workers and brokers are killed at random moments."""

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
from tests.support.exactly_once import Account, Chaos, Growth, Job
from tests.support.java import Java
from tests.support.processes import PATIENCE, StandaloneCluster, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

OPTIONS: dict[str, Any] = {"delivery": "effectivelyOnce", "fenceMs": "2000"}


def run(
    cluster: LocalCluster, topic: str, folder: Path, java: Java, *, batch: bool, seed: int, kills: int
) -> tuple[Chaos, Account]:
    """Write at least `kills` times 50,000 rows while processes are killed, and return what consumers see."""
    folder.mkdir()
    writes.make_topic(cluster, topic, queues=4)
    with closing(Job(cluster, topic, folder, rows=50_000, batch=batch, **OPTIONS)) as job:
        chaos = Chaos(job, seed, kills=True)
        chaos.run(kills, kills)
        return chaos, job.account(java)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("runs", "batch"),
    [(1, False), pytest.param(30, False, marks=pytest.mark.long), pytest.param(30, True, marks=pytest.mark.long)],
    ids=["one_stream", "streams", "batches"],
)
def test_every_row_is_stored_once_although_processes_are_killed(
    two_brokers: LocalCluster,
    topic: str,
    tmp_path: Path,
    java: Java,
    record_property: Callable[[str, object], None],
    *,
    runs: int,
    batch: bool,
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 32))
    print(f"CHAOS_SEED={seed}", flush=True)
    faults, rows, recoveries = Counter[str](), 0, 0
    for number in range(runs):
        chaos, account = run(
            two_brokers,
            f"{topic}-{number}",
            tmp_path / str(number),
            java,
            batch=batch,
            seed=seed + number,
            kills=4 if runs > 1 else 2,
        )
        faults += chaos.faults
        rows += account.rows
        recoveries += account.recoveries
        print(f"run {number}: {account}; {dict(chaos.faults)}", flush=True)
        assert account.violations == 0, f"{account}\n{account.repeated[:20]=}\n{account.missing[:20]=}"
    what = f"{faults.total()} kills ({'batch' if batch else 'stream'})"
    line = writes.Account(what, rows, rows, 0, recoveries, 0.0, 1)
    record_property("account", list(line))
    print(f"{runs} runs, {rows} rows, {dict(faults)}, {recoveries} partitions recovered")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_row_is_stored_once_although_stages_are_repeated(
    two_brokers: LocalCluster,
    topic: str,
    tmp_path: Path,
    java: Java,
    record_property: Callable[[str, object], None],
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 32))
    print(f"CHAOS_SEED={seed}", flush=True)
    rng, count, rows, kills = random.Random(seed), 30, 50_000, 0
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
    held = writes.messages_in(two_brokers.name_server, topic)
    lines = java.read_topic(two_brokers.name_server, topic, held, within=PATIENCE)
    copies = Counter(int(line["body"]) for line in lines)
    what = f"{kills} executors killed, {repeated_stages} stages repeated"
    print(f"{what}: {count * rows} rows, {recovered}")
    record_property("account", list(writes.Account(what, count * rows, len(lines), 0, recovered["recovered"], 0.0, 1)))
    assert copies.keys() == set(range(count * rows))
    assert copies.total() == count * rows
    assert recovered["recovered"] > 0
    assert repeated_stages > 0
