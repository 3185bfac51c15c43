"""A broker with a full disk rejects sends and commits, and stores no row of them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import RocketMQError
from tests.support.java import Java
from tests.support.once import check_once, committing
from tests.support.processes import PATIENCE, wait_for
from tests.support.two_phase import WRITE
from tests.support.writes import Trial, make_topic, messages_in

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.integration]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The first broker's folder: a mounted file system whose size can change."""
    folder = tmp_path / "broker-0"
    folder.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=1g", "tmpfs", folder):
        # Skipped in CI too, because containers may not mount by default. The table of faults reports it.
        pytest.skip("disk of one broker full: this user may not mount a file system of the test's own")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def mounted(*arguments: object) -> bool:
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True, check=False).returncode == 0


@pytest.fixture
def two_brokers(disk: Path) -> Iterator[LocalCluster]:
    # Half full is what counts as full: what a broker writes until it looks again must have its place, or it dies. It
    # begins to look after a minute.
    options = ("-Drocketmq.broker.diskSpaceWarningLevelRatio=0.5", "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.5")
    properties = {"cleanResourceInterval": 500, "cleanFileForciblyEnable": False}
    with LocalCluster(brokers=2, directory=disk.parent, broker_properties=properties, jvm_options=options) as cluster:
        time.sleep(61.0)
        yield cluster
        for broker in cluster.brokers:
            # Nothing in them is worth an orderly end.
            broker.kill()


@pytest.mark.long
def test_rows_of_broker_with_full_disk_go_to_the_other_broker(trial: Trial, disk: Path) -> None:
    full, other = trial.cluster.brokers

    def fill_for_a_while() -> None:
        used = shutil.disk_usage(disk).used
        assert mounted("-o", f"remount,size={int(used * 1.6)}", disk)
        time.sleep(5.0)
        assert mounted("-o", "remount,size=1g", disk)

    trial.write(40_000, fill_for_a_while, per_second=4_000)
    facts = trial.metrics.to_dict()
    account = trial.settle("disk of one broker full for 5 s")
    assert facts[full.name]["retries_by_reason"].keys() == {"BrokerUnavailableException 14"}
    assert account.repeats == 0
    assert facts[other.name]["rows"] > facts[full.name]["rows"]


@pytest.mark.long
@pytest.mark.parametrize("when", ["before the decision", "in the commit"])
def test_a_disk_that_is_full_in_a_commit_costs_no_row(
    two_brokers: LocalCluster, disk: Path, topic: str, java: Java, *, when: str
) -> None:
    bodies = [f"row-{number:05}" for number in range(20_000)]
    make_topic(two_brokers, topic, queues=2)

    def fill() -> None:
        used = shutil.disk_usage(disk).used
        assert mounted("-o", f"remount,size={int(used * 1.6)}", disk)
        # A broker looks every half second.
        time.sleep(2.0)

    with committing(two_brokers, topic, timeout_ms=60_000) as job, ThreadPoolExecutor(1) as pool:
        halves = job.prepare(bodies)
        if when == "before the decision":
            fill()
        running = pool.submit(job.two_phase.commit, WRITE, *halves)
        if when == "in the commit":
            wait_for(lambda: messages_in(two_brokers.name_server, topic) > 0 or running.done())
            fill()
        time.sleep(5.0)
        assert mounted("-o", "remount,size=1g", disk)
        with suppress(RocketMQError):
            running.result(PATIENCE)
    with committing(two_brokers, topic) as job:
        if WRITE in job.log.writes:
            job.two_phase.finish(WRITE)
        else:
            job.two_phase.commit(WRITE, *job.prepare(bodies))
    check_once(java, two_brokers.name_server, topic, bodies)
