"""Servers to break, the ledger of every fault, and the table at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support.cluster import QUICK_READS, heal, started
from tests.support.java import Java
from tests.support.processes import PATIENCE
from tests.support.writes import Account, Ledger, Trial

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

_PROPERTY = "account"


@pytest.fixture(scope="package")
def _breakable() -> Iterator[LocalCluster]:
    # The first one gets a slave at times, which a local broker's own settings give nothing. The second one flushes
    # before it answers, so that there is something to be late with.
    properties = [
        {**QUICK_READS, "haTransferBatchSize": 32_768, "haHousekeepingInterval": 20_000},
        {**QUICK_READS, "flushDiskType": "SYNC_FLUSH"},
    ]
    with started(LocalCluster(brokers=2, proxy=True, broker_properties=properties, start_timeout=PATIENCE)) as own:
        yield own


@pytest.fixture
def two_brokers(_breakable: LocalCluster) -> Iterator[LocalCluster]:
    """Servers to kill and to pause; whoever changes a broker's properties sets them back."""
    yield _breakable
    heal(_breakable)


@pytest.fixture
def ledger(java: Java, record_property: Any) -> Ledger:
    """What the test's fault costs; its account appears in the table."""
    return Ledger(java, lambda account: record_property(_PROPERTY, list(account)))


@pytest.fixture
def trial(spark: SparkSession, two_brokers: LocalCluster, topic: str, metrics: Metrics, ledger: Ledger) -> Trial:
    """A write of the test's own, to a topic of its own on both brokers."""
    return Trial(spark, two_brokers, topic, metrics, ledger)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the faults of this run have cost, and which of them could not be made here."""
    accounts = [
        Account(*value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    skipped = {
        # Where, in which line, and why.
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
