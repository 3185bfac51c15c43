"""A fake cluster with two brokers, and a driver of exactly-once writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from rocketmq_spark.deliveries.exactly_once import fence
from rocketmq_spark.deliveries.log.delivery import forget_logs
from rocketmq_spark.testing import FakeCluster
from tests.support.two_phase import TOPIC, Driver, MovedClock, driver

_EFFECTIVELY_ONCE: Final = {"delivery": "effectivelyOnce", "batchBytes": "1024", "fenceMs": "0"}


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
    """Return a driver of effectively-once writes, which soon takes a request without an answer for unknown."""
    with driver(cluster, clock, **_EFFECTIVELY_ONCE, sendMsgTimeout="500") as running:
        yield running


@pytest.fixture
def patient_job(cluster: FakeCluster, clock: MovedClock) -> Iterator[Driver]:
    """Return a driver of effectively-once writes that waits for the answers of a slow machine."""
    with driver(cluster, clock, **_EFFECTIVELY_ONCE, sendMsgTimeout="10000") as running:
        yield running
