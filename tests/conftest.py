"""What tests of several folders share: real servers, a topic of one's own, a Spark session."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.java import find_java
from rocketmq_spark.errors import ClusterError, TopicRouteStaleException
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.java import Java
from tests.peer import PATIENCE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.spark.report import Metrics

TESTS = Path(__file__).parent

pytest.register_assert_rewrite("tests.contract")

# JVMs that live for minutes: what a thorough compiler would gain, it would first cost.
QUICK_JVM = ("-XX:TieredStopAtLevel=1",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs no server first, and fetch the server's jars meanwhile."""
    items.sort(key=lambda item: not item.path.is_relative_to(TESTS / "unit"))
    if any(item.get_closest_marker("integration") for item in items):
        threading.Thread(target=fetch_jars, name="fetch-jars", daemon=True).start()


def fetch_jars() -> None:
    # What is wrong is said by the test that needs them.
    with contextlib.suppress(ClusterError):
        server_jars(find_java)


def unavailable(exc: ClusterError) -> NoReturn:
    """Skip a test whose servers can't run here, and fail it in CI: the one place where this is decided."""
    if os.environ.get("CI"):
        pytest.fail(f"no local cluster: {exc}")
    pytest.skip(f"no local cluster: {exc}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A name server and two brokers for the whole run; tests that break servers start their own."""
    shared = LocalCluster(brokers=2, jvm_options=QUICK_JVM)
    try:
        shared.start()
    except ClusterError as exc:
        unavailable(exc)
    yield shared
    shared.stop()


# A broker notes in batches which half messages have ended, and asks back for those that it has not noted: so the note
# must come before the first check (it does with the defaults, 3 s and 6 s).
ASKS_BACK_SOON = {
    "transactionCheckInterval": 500,
    "transactionTimeOut": 3000,
    "transactionOpBatchInterval": 200,
    "transactionCheckMax": 1000,
}


@pytest.fixture(scope="session")
def proxied() -> Iterator[LocalCluster]:
    """Two brokers that soon ask back for half messages, and a proxy before them, for the whole run."""
    shared = LocalCluster(brokers=2, proxy=True, broker_properties=ASKS_BACK_SOON, jvm_options=QUICK_JVM)
    try:
        shared.start()
    except ClusterError as exc:
        unavailable(exc)
    yield shared
    shared.stop()


@pytest.fixture
def make_topic(proxied: LocalCluster, topic: str) -> Callable[..., str]:
    """Create the test's topic for messages of a type, on all proxied brokers, and return its name.

    A proxy creates no topic, and remembers for a while that it has not found one: so none is named to it before.
    """

    def make(message_type: str, name: str = topic, queues: int = 2) -> str:
        attributes = f"+message.type={message_type}"
        with RemotingTransport([proxied.name_server]) as transport:
            for broker in proxied.brokers:
                transport.create_topic(broker.address, name, queues, 6, PATIENCE, attributes=attributes)
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    if len(transport.query_route(name, PATIENCE).broker_datas) == len(proxied.brokers):
                        return name
                except TopicRouteStaleException:
                    pass  # The name server learns of it in a moment.
                assert time.monotonic() < deadline
                time.sleep(0.1)

    return make


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Java:
    """The official Java client and codecs, for comparison."""
    try:
        return Java(tmp_path_factory.mktemp("java"))
    except ClusterError as exc:
        unavailable(exc)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses; it is made by the first message."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", request.node.name)[:80]
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One classic session; `local[2,4]` tries a failed task again, as a cluster does."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("rocketmq-spark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.driver.extraJavaOptions", " ".join(QUICK_JVM))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture
def metrics(spark: SparkSession) -> Iterator[Metrics]:
    """The metrics of a source registered for this test, with the hook on `save`."""
    from rocketmq_spark.spark.register import register, unregister

    yield register(spark)
    unregister()
