"""A fake cluster with two brokers, and a driver of exactly-once writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.transactions import fence
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2, topics={TOPIC: 2}) as own:
        yield own
    fence.forget_checks()


@pytest.fixture
def clock(cluster: FakeCluster) -> MovedClock:
    return MovedClock(cluster)


@pytest.fixture
def first(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    with driver(cluster, clock) as own:
        yield own.open()
