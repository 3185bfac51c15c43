"""A broker with a full disk rejects sends, and stores no row of them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support.writes import Trial

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
