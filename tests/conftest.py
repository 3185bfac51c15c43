"""What tests of several folders share: real servers, a topic of one's own, a Spark session."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.errors import ClusterError
from tests.support import class_archive
from tests.support.cluster import (
    SHARED_BROKERS,
    SharedCluster,
    add_users,
    create_topic,
    secured_cluster,
    shared,
    unavailable,
)
from tests.support.java import (
    Java,
    Read,
    ReadWith,
    grpc_client_jar,
    with_java,
    with_java_over_grpc,
    with_python_over_grpc,
)
from tests.support.processes import PATIENCE, PYSPARK, SERIAL_GC, with_jvm
from tests.tools.packages import Built, build

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.scheduler import Scheduling

    from rocketmq_spark.spark.report import Metrics


pytest.register_assert_rewrite("tests.support.contract")

# A busy machine fails no test. (With CI=true the examples are the same in every run, else each run has others.)
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# JVMs of tests live briefly, so the optimising compiler would cost more than it gains. Every `java` reads this.
QUICK_START = "-XX:TieredStopAtLevel=1"
os.environ["JDK_JAVA_OPTIONS"] = QUICK_START
# Brokers wake up a thousand times a second. If a wake-up may be 20 ms late, an idle broker needs half as much of a
# processor. Processes inherit this (PR_SET_TIMERSLACK, nanoseconds); other systems than Linux do not have it.
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(29, ctypes.c_ulong(20_000_000))
# numpy starts threads for linear algebra, which nothing here uses, in each of the hundreds of processes.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# For every JVM of Spark: the session below, the demo, notebooks.
for _variable in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ[_variable] = SERIAL_GC
# PySpark's zip has no bytecode; this worker script imports the installed PySpark instead.
os.environ["WORKER_PYTHON"] = sys.executable
# The workers have no pandas, except with PySpark 4.0, where functions on Arrow arrays need it.
os.environ["WORKER_PATH"] = f"{Path(__file__).with_name('support')}/without_pandas:" if PYSPARK >= (4, 1) else ""
os.environ["PYSPARK_PYTHON"] = str(Path(__file__).with_name("worker_python"))

# For each file of a checkpoint on a local disk, Spark's default class starts ten processes, this one two.
CHECKPOINT_FILES = (
    f"org.apache.spark.sql.execution.streaming{'.checkpointing' if PYSPARK >= (4, 1) else ''}"
    ".FileSystemBasedCheckpointFileManager"
)

# What one process runs: files that share what starts slowly, servers to break or a Spark session.
TOGETHER = {
    "faults of reads": ("tests/faults/test_reader.py", "tests/faults/test_lost_messages.py"),
    "faults": ("tests/faults/",),
    "batches": tuple(
        f"tests/spark/test_{name}.py"
        for name in (
            "bad_input",
            "batch_write",
            "delivery_options",
            "docs",
            "grpc_write",
            "live",
            "register",
            "topic_types",
            "payloads",
        )
    ),
    "streams": (
        *(
            f"tests/spark/test_{name}.py"
            for name in ("credentials", "dedupe", "row_features", "secrets", "stream_write")
        ),
        "tests/integration/test_security.py",
    ),
    "reads": ("tests/spark/test_read", "tests/interop/test_read.py"),
    "transactions": ("tests/integration/test_transactions.py", "tests/integration/test_grpc_transactions.py"),
}
# An archive of classes takes as long as several sessions.
_MANY = 50
# The order of all: what takes longest before what fills the gaps.
ORDER = (
    # One process computes and the others mostly wait, while the archives of classes are made.
    "tests/simulation/test_swarm.py",
    *(f"tests/unit/{folder}" for folder in ("cluster", "producer", "spark", "testing", "transactions", "transport")),
    "tests/unit",
    "tests/notebooks",
    *TOGETHER,
    "tests/packaging",
    "tests/spark",
    "tests/interop/test_unique_key.py",
    "tests/model",
    "tests/integration",
    "tests/interop",
    "tests",
)


def scope_of(nodeid: str) -> str:
    """Return what a test is part of, to be run by one process: by default its file."""
    path = nodeid.partition("::")[0]
    return next((name for name, of_it in TOGETHER.items() if path.startswith(of_it)), path)


def place_of(item: pytest.Item) -> int:
    """Return when a test's turn is."""
    scope = scope_of(item.nodeid)
    return next(place for place, start in enumerate(ORDER) if scope.startswith(start))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say how long a run may take."""
    parser.addoption("--full", action="store_true", help="faults at full length, and the tests marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run what needs no server first, and fetch the servers' jars meanwhile; leave out what takes long."""
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if PYSPARK < (4, 2):
        # There it is left to the garbage collector to close what `collect` has read from.
        for item in items:
            if item.get_closest_marker("spark"):
                item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))
    items.sort(key=place_of)
    if any(item.get_closest_marker("integration") for item in items):
        threading.Thread(target=fetch_jars, name="fetch-jars", daemon=True).start()
    # In a run of a few tests it would not pay.
    if sum(item.get_closest_marker("spark") is not None for item in items) > _MANY:
        threading.Thread(target=make_archives, name="class-archives", daemon=True).start()


def pytest_collection_finish() -> None:
    """Hide the collected tests from the garbage collector: their 270,000 objects took 15 % of the unit tests' time."""
    gc.freeze()
    # What tests make is collected less often than by default (700, 10, 10).
    gc.set_threshold(2000, 20, 100)


# `--dist loadgroup` would do the same, but not with pytest 9.2: pytest-xdist 3.8 adds the group to `item._nodeid`, and
# `item.nodeid` no longer shows it, so that each test would be a separate group.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    """Run a file in one process, and files with the same slow fixture (Spark, fault servers) in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByServers(config, log)


def make_archives() -> None:
    """Make the archives, and let JVMs that start from then on use them."""
    # What is wrong is said by the test that needs a session or a broker.
    with contextlib.suppress(ClusterError, subprocess.TimeoutExpired):
        class_archive.make_all()
    # An option for an archive that does not exist would take Java's own one away.
    os.environ["SPARK_SUBMIT_OPTS"] = f"{SERIAL_GC} {class_archive.options('spark')}"
    os.environ["JDK_JAVA_OPTIONS"] = f"{QUICK_START} {class_archive.options('servers')}"


def fetch_jars() -> None:
    # What is wrong is said by the test that needs them.
    with contextlib.suppress(ClusterError):
        server_jars(find_java)
        grpc_client_jar()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether faults have their full length (`--full`)."""
    return bool(request.config.getoption("--full"))


def common_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that all its processes have."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """A name server, two brokers and a proxy for the whole run; tests that break servers start their own."""
    with contextlib.ExitStack() as stack:
        try:
            make = functools.partial(
                LocalCluster, brokers=2, proxy=True, broker_properties=SHARED_BROKERS, start_timeout=PATIENCE
            )
            found = stack.enter_context(shared(common_folder(tmp_path_factory) / "cluster", make))
        except ClusterError as exc:
            unavailable(exc)
        yield found


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """A cluster for the whole run that demands TLS and knows the users of tests/support/cluster.py only."""
    with contextlib.ExitStack() as stack:
        try:
            folder = common_folder(tmp_path_factory) / "secured"
            found = stack.enter_context(shared(folder, secured_cluster, add_users))
        except ClusterError as exc:
            unavailable(exc)
        yield found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The package as a release of it would be."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture
def make_topic(cluster: SharedCluster, topic: str) -> Callable[..., str]:
    """Create the test's topic for messages of a type, on all brokers, and return its name."""

    def make(message_type: str, name: str = topic, queues: int = 2) -> str:
        return create_topic(cluster, name, message_type, queues)

    return make


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Java:
    """The official Java client and codecs, for comparison."""
    try:
        return Java(tmp_path_factory.mktemp("java"), common_folder(tmp_path_factory) / "classes")
    except ClusterError as exc:
        unavailable(exc)


@pytest.fixture(scope="session")
def java_over_grpc(tmp_path_factory: pytest.TempPathFactory) -> Java:
    """The official Java client for proxies."""
    try:
        classes = common_folder(tmp_path_factory) / "classes-grpc"
        return Java(tmp_path_factory.mktemp("java-grpc"), classes, over_grpc=True)
    except ClusterError as exc:
        unavailable(exc)


@pytest.fixture
def read_with(request: pytest.FixtureRequest, tmp_path: Path) -> ReadWith:
    """Return a function that reads topics with an official client; it prepares a client at its first use."""

    def read(client: str, of: LocalCluster | SharedCluster, topics: Sequence[str], count: int) -> list[Read]:
        if client == "java":
            return with_java(request.getfixturevalue("java"), of.name_server, topics, count)
        if client == "java over gRPC":
            return with_java_over_grpc(request.getfixturevalue("java_over_grpc"), of.endpoints, topics, count)
        assert client == "python over gRPC"
        return with_python_over_grpc(tmp_path, of.endpoints, topics, count)

    return read


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The name of a topic that no other test uses; it is made by the first message."""
    name = re.sub(r"[^a-zA-Z0-9_-]+", "_", request.node.name)[:80]
    return f"{name}-{uuid.uuid4().hex[:8]}"


def avro_jar() -> str:
    """Return the path of Spark's package for Avro, empty if it cannot be fetched; only its recipe needs it."""
    from tests.benchmarks.kafka import AVRO, jars_of

    try:
        return next(str(jar) for jar in jars_of(*AVRO) if jar.name.startswith("spark-avro"))
    except (ClusterError, subprocess.CalledProcessError):
        return ""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One classic session; `local[2,2]` tries a failed task again, as a cluster does."""
    from pyspark.sql import SparkSession

    session = with_jvm(
        SparkSession.builder.master("local[2,2]")
        .appName("rocketmq-spark tests")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
        .config("spark.sql.shuffle.partitions", "2")
        # An idle stream asks for new messages ten times a second, not a hundred times.
        .config("spark.sql.streaming.pollingDelay", "100ms")
        .config("spark.sql.streaming.checkpointFileManagerClass", CHECKPOINT_FILES)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.jars", avro_jar())
    )
    yield session
    session.stop()


@pytest.fixture
def small_record_batches(spark: SparkSession) -> Iterator[None]:
    """Use record batches of 500 rows, so that tasks get rows early."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.fixture
def metrics(spark: SparkSession) -> Iterator[Metrics]:
    """The metrics of a source registered for this test, with the hook on `save`."""
    from rocketmq_spark.spark.register import register, unregister

    yield register(spark)
    unregister()
