"""Servers and official clients that the tests of a run share.

`cluster`, `secured` and `tuned` serve all tests that neither kill nor pause servers. If a test needs another property
of a broker, add it to one of them: a further cluster takes 5 to 10 s of processor time. Tests that kill and pause
servers use `two_brokers` (tests/faults/conftest.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import ClusterError
from tests.support.cluster import ANYBODY, EVERY_TYPE, MARKED, SHORT_DEADLINES, USER, SharedCluster, shared, unavailable
from tests.support.java import Java, Read, ReadWith, with_java, with_java_over_grpc, with_python_over_grpc
from tests.support.processes import PATIENCE


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all processes of a run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def _in_one_process(
    folder: Path, servers: LocalCluster, prepare: Callable[[LocalCluster], None] = lambda _: None
) -> Iterator[SharedCluster]:
    """Yield a cluster that one process of the run starts, and all use.

    Without this, each of the four processes starts its own servers. A name server, two brokers and a proxy take 10 s of
    processor time to start, and then 5 % of a core.
    """
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(shared(folder, servers, prepare))
        except ClusterError as exc:
            unavailable(exc)
        yield found


@pytest.fixture(scope="session")
def cluster(run_folder: Path) -> Iterator[SharedCluster]:
    """A name server, two brokers and a proxy."""
    properties = {**EVERY_TYPE, **SHORT_DEADLINES}
    servers = LocalCluster(brokers=2, proxy=True, broker_properties=properties, start_timeout=PATIENCE)
    yield from _in_one_process(run_folder / "cluster", servers)


@pytest.fixture(scope="session")
def secured(run_folder: Path) -> Iterator[SharedCluster]:
    """A broker and a proxy that require TLS and know only the users of tests/support/cluster.py.

    The proxy closes connections that are idle for 2 seconds.
    """
    proxy = {"grpcClientIdleTimeMills": 2000}
    servers = LocalCluster(proxy=proxy, auth=True, tls=True, broker_properties=SHORT_DEADLINES, start_timeout=PATIENCE)
    yield from _in_one_process(run_folder / "secured", servers, _add_users)


def _add_users(servers: LocalCluster) -> None:
    readers = ["spark-rocketmq-source"]
    for user in (USER, MARKED):
        servers.create_user(
            user.access_key, user.secret_key, publish=["allowed-*"], subscribe=["readable-*"], groups=readers
        )
    servers.create_user(ANYBODY.access_key, ANYBODY.secret_key, publish=["*"], subscribe=["*"], groups=["*"])


@pytest.fixture(scope="session")
def tuned(run_folder: Path) -> Iterator[SharedCluster]:
    """A broker and a proxy with SQL filters, recall of delayed messages, and checks of half messages every half second.

    `cluster` has none of these: its brokers reject SQL filters, as by default, and check half messages every 30 s. For
    this broker all messages are cold: a group reads at most 3 MiB of them in 5 s. An answer to a pull has up to 64 MiB.
    """
    checks = {"transactionCheckInterval": 500, "transactionTimeOut": 3000, "transactionCheckMax": 1000}
    cold = {"coldDataFlowControlEnable": True, "accessMessageInMemoryHotRatio": 0}
    properties = {**checks, **cold, "recallMessageEnable": True, "enablePropertyFilter": True}
    properties["maxTransferBytesOnMessageInMemory"] = 64 * 1024 * 1024
    servers = LocalCluster(proxy=True, broker_properties=properties, start_timeout=PATIENCE)
    yield from _in_one_process(run_folder / "tuned", servers)


def _new_java(run_folder: Path, name: str, tmp_path_factory: pytest.TempPathFactory, *, over_grpc: bool) -> Java:
    try:
        return Java(tmp_path_factory.mktemp(name), run_folder / name, over_grpc=over_grpc)
    except ClusterError as exc:
        unavailable(exc)


@pytest.fixture(scope="session")
def java(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Java:
    """RocketMQ's Java client and codecs."""
    return _new_java(run_folder, "java", tmp_path_factory, over_grpc=False)


@pytest.fixture(scope="session")
def java_over_grpc(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Java:
    """RocketMQ's Java client for proxies."""
    return _new_java(run_folder, "java-over-grpc", tmp_path_factory, over_grpc=True)


@pytest.fixture
def read_with(request: pytest.FixtureRequest, tmp_path: Path) -> ReadWith:
    """A function that reads topics with one of `CLIENTS`. It prepares a client at its first use."""

    def read(client: str, of: LocalCluster | SharedCluster, topics: Sequence[str], count: int) -> list[Read]:
        if client == "java":
            return with_java(request.getfixturevalue("java"), of.name_server, topics, count)
        if client == "java over gRPC":
            return with_java_over_grpc(request.getfixturevalue("java_over_grpc"), of.endpoints, topics, count)
        assert client == "python over gRPC"
        return with_python_over_grpc(tmp_path, of.endpoints, topics, count)

    return read
