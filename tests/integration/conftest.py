"""Servers that only tests of transactions use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.cluster import LocalCluster
from tests.support.cluster import started
from tests.support.processes import PATIENCE

ASKS_BACK_SOON = {
    "transactionCheckInterval": 500,
    "transactionTimeOut": 3000,
    "transactionCheckMax": 1000,
}


@pytest.fixture(scope="package")
def transactional() -> Iterator[LocalCluster]:
    """A broker that checks half messages early and lets delayed ones be recalled, with a proxy.

    The shared cluster checks half messages only after a minute.
    """
    properties = {**ASKS_BACK_SOON, "recallMessageEnable": "true"}
    with started(LocalCluster(proxy=True, broker_properties=properties, start_timeout=PATIENCE)) as cluster:
        yield cluster
