"""Servers for fault tests, the ledger of each fault, and the table at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support.cluster import FAST_FAILOVER, SHORT_DEADLINES, heal, started
from tests.support.java import Java
from tests.support.losses import UncleanSwitch
from tests.support.processes import PATIENCE
from tests.support.writes import Account, Ledger, Trial

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

_PROPERTY = "account"


@pytest.fixture(scope="package")
def _breakable() -> Iterator[LocalCluster]:
    properties: list[dict[str, object]] = [
        {
            # By default, a local broker sends nothing to slaves.
            "haTransferBatchSize": 32_768,
            "haHousekeepingInterval": 20_000,
            # Small files, which tests delete, or let expire in any hour.
            "mappedFileSizeCommitLog": 4 * 1024 * 1024,
            "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
            "cleanResourceInterval": 4_000,
        },
        # The second broker flushes before it answers, so that a flush can time out.
        {"flushDiskType": "SYNC_FLUSH"},
    ]
    with started(LocalCluster(brokers=2, proxy=True, broker_properties=properties, start_timeout=PATIENCE)) as cluster:
        yield cluster


@pytest.fixture
def two_brokers(_breakable: LocalCluster) -> Iterator[LocalCluster]:
    """Servers that tests may kill and pause. A test that changes broker properties must restore them."""
    yield _breakable
    heal(_breakable)


@pytest.fixture(scope="package")
def _switched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UncleanSwitch]:
    properties = {**SHORT_DEADLINES, **FAST_FAILOVER}
    cluster = LocalCluster(controller=True, replicas=2, broker_properties=properties, start_timeout=PATIENCE)
    with started(cluster):
        yield UncleanSwitch(cluster, tmp_path_factory.mktemp("mqadmin"))


@pytest.fixture
def unclean_switch(_switched: UncleanSwitch) -> Iterator[UncleanSwitch]:
    """A broker with two replicas, of which a slave that lacks messages may become the master."""
    yield _switched
    _switched.heal()


@pytest.fixture
def ledger(java: Java, record_property: Any) -> Ledger:
    """The ledger of the test. Its account appears in the table."""
    return Ledger(java, lambda account: record_property(_PROPERTY, list(account)))


@pytest.fixture
def trial(spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics, ledger: Ledger) -> Trial:
    """A write of this test to a new topic on both brokers."""
    return Trial(spark, two_brokers, topic, metrics, ledger)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the account of each fault of this run, and the faults that could not be made on this machine."""
    accounts = [
        Account(*value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    skipped = {
        # `longrepr` is file, line and reason.
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.getreports("skipped")
        if report.nodeid.startswith("tests/faults/")
    }
    if not accounts and not skipped:
        return
    terminalreporter.section("what faults cost")
    if accounts:
        print_table(terminalreporter, accounts)
    for reason in sorted(skipped):
        terminalreporter.line(f"not made: {reason}")


def print_table(terminalreporter: Any, accounts: Sequence[Account]) -> None:
    width = max(len(account.fault) for account in accounts)
    terminalreporter.line(f"{'fault':{width}} {'rows in':>9} {'stored':>9} {'repeats':>8} {'retries':>8} longest stall")
    for account in sorted(accounts):
        terminalreporter.line(
            f"{account.fault:{width}} {account.rows:>9,} {account.stored:>9,} {account.repeats:>8,} "
            f"{account.retries:>8,} {account.longest_stall:>11.1f} s"
        )
