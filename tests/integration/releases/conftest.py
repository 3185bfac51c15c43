"""Servers of every release of RocketMQ, for tests of every feature. DLedger and RocksDB are other stores.

docs/compatibility.md has the results, the table of `tests/support/releases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark.cluster.config import pick_port
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.log.delivery import forget_logs
from tests.support.cluster import EVERY_TYPE, SHORT_DEADLINES, create_topic, started
from tests.support.releases import SERVERS, ReleaseCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rocketmq_spark.spark.report import Metrics

_PROPERTIES = {
    **EVERY_TYPE,
    **SHORT_DEADLINES,
    "enablePropertyFilter": "true",
    # Many small files: 4 MiB batches fit, and queues of a thousand messages have several.
    "mappedFileSizeCommitLog": str(8 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": str(20 * 400),
}


@pytest.fixture(scope="package", params=SERVERS)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="package")
def servers(release: str) -> Iterator[ReleaseCluster]:
    """A name server and two brokers of the release, for all tests of it. The last module deletes messages."""
    forget_logs()
    forget_checks()
    with started(new_cluster(*release.split())) as cluster:
        assert isinstance(cluster, ReleaseCluster)
        yield cluster


def new_cluster(release: str, store: str = "") -> ReleaseCluster:
    """Return a cluster of a release, perhaps with another store."""
    each = [dict(_PROPERTIES) for _ in range(2)]
    for number, properties in enumerate(each):
        if store == "RocksDB":
            properties["storeType"] = "defaultRocksDB"
        if store == "DLedger":
            peers = f"n0-127.0.0.1:{pick_port(())}"
            group = {"dLegerGroup": f"broker-{number}", "dLegerPeers": peers, "dLegerSelfId": "n0"}
            properties |= {"enableDLegerCommitLog": "true", **group}
    return ReleaseCluster(release, proxy=False, brokers=2, broker_properties=each)


@pytest.fixture
def topic(topic: str) -> str:
    """The name of a topic that no other test uses. It is short: names of groups and logs are made of it."""
    return topic[-50:].strip("_-")


@pytest.fixture
def make(servers: ReleaseCluster, topic: str) -> Callable[..., str]:
    """Create a topic of this test, whose name has a suffix, and return its name."""

    def create(suffix: str = "", message_type: str = "NORMAL", queues: int = 2) -> str:
        return create_topic(servers, topic + suffix, message_type, queues)

    return create


@pytest.fixture
def load(spark: SparkSession, servers: ReleaseCluster, metrics: Metrics) -> Callable[..., DataFrame]:
    def load_from(subscribe: str, **options: Any) -> DataFrame:
        given = {"nameServer": servers.name_server, "subscribe": subscribe, **options}
        return spark.read.format("rocketmq").options(**given).load()

    return load_from
