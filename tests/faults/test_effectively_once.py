"""`delivery=effectivelyOnce` while drivers, JVMs, Python workers and brokers are killed at random moments."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support import writes
from tests.support.exactly_once import Account, Chaos, Job
from tests.support.java import Java

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]

OPTIONS = {"delivery": "effectivelyOnce", "fenceMs": "2000"}


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
