"""A fake cluster with two brokers, and a driver of exactly-once writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.deliveries.exactly_once import fence
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.testing import FakeCluster
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2, topics={TOPIC: 2}) as fake:
        yield fake
    fence.forget_checks()


@pytest.fixture
def clock(cluster: FakeCluster) -> MovedClock:
    return MovedClock(cluster)


@pytest.fixture
def first(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    with driver(cluster, clock) as running:
        yield running.open()


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Forget the logs that a test has read."""
    yield
    forget_logs()


@pytest.fixture
def job(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    """Return a driver of effectively-once writes."""
    options = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0", "sendMsgTimeout": "500"}
    with driver(cluster, clock, **options) as running:
        yield running
