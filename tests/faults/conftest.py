"""The ledger of every fault, and the table at the end of the run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.java import Java
from tests.ledger import Account, Ledger

_PROPERTY = "account"


@pytest.fixture
def ledger(java: Java, record_property: Any) -> Ledger:
    """What the test's fault costs; its account appears in the table."""
    return Ledger(java, lambda account: record_property(_PROPERTY, list(account)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the faults of this run have cost."""
    accounts = [
        Account(*value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if not accounts:
        return
    terminalreporter.section("what faults cost")
    width = max(len(account.fault) for account in accounts)
    terminalreporter.line(f"{'fault':{width}} {'rows in':>9} {'stored':>9} {'repeats':>8} {'retries':>8} longest stall")
    for account in sorted(accounts):
        terminalreporter.line(
            f"{account.fault:{width}} {account.rows:>9,} {account.stored:>9,} {account.repeats:>8,} "
            f"{account.retries:>8,} {account.longest_stall:>11.1f} s"
        )
