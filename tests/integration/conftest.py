"""Servers that only tests of transactions use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.conftest import started

# A broker notes in batches which half messages have ended, and asks back for those that it has not noted: so the note
# must come before the first check (it does with the defaults, 3 s and 6 s).
ASKS_BACK_SOON = {
    "transactionCheckInterval": 500,
    "transactionTimeOut": 3000,
    "transactionOpBatchInterval": 200,
    "transactionCheckMax": 1000,
}


@pytest.fixture(scope="package")
def transactional() -> Iterator[LocalCluster]:
    """A broker that soon asks back for half messages and lets delayed ones be recalled, and a proxy before it.

    Not the one that all tests share: a broker that has ended a transaction keeps a processor busy ever after.
    """
    properties = {**ASKS_BACK_SOON, "recallMessageEnable": "true"}
    with started(LocalCluster(proxy=True, broker_properties=properties)) as own:
        stand_back("TransactionalOpBatchService", own.brokers[0].pid)
        yield own


def stand_back(thread: str, pid: int | None) -> None:
    """Give a thread of a JVM what time others leave, where the system can do that."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # ended while we looked
            # The kernel keeps 15 characters of a name.
            if (task / "comm").read_text().rstrip() == thread[:15]:
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
