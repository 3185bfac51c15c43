"""One cluster for all processes of a test run.

The first process that needs the cluster starts it, and stops it after the last user.

Servers cost more than most of the tests that use them, so the processes of a run share them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rocketmq_spark.admin import Admin
from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.cluster.jars import server_jars
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.cluster.security import client_options
from rocketmq_spark.cluster.servers import Server
from rocketmq_spark.errors import ClusterError, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.processes import PATIENCE, wait_for

# The shortest deadline of a half message. With the default of 6 s, each test of a recovery takes 4 s more.
SHORT_DEADLINES = {"transactionTimeOut": "500"}
# A controller soon replaces a silent master, and a master soon finds out that its slave is gone (ms).
FAST_FAILOVER = {
    "controllerHeartBeatTimeoutMills": 3000,
    "haMaxTimeSlaveNotCatchup": 3000,
    "checkSyncStateSetPeriod": 1000,
}
# By default brokers reject topics of the type MIXED, and do not copy messages to lite topics.
EVERY_TYPE = {"enableMixedMessageType": "true", "enableLmq": "true", "enableMultiDispatch": "true"}


def unavailable(exc: ClusterError) -> NoReturn:
    """Skip a test whose servers cannot run here; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"no local cluster: {exc}")
    pytest.skip(f"no local cluster: {exc}")


@contextlib.contextmanager
def started(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Run a cluster for one test."""
    try:
        cluster.start()
    except ClusterError as exc:
        unavailable(exc)
    try:
        yield cluster
    finally:
        cluster.stop()


@dataclass(frozen=True)
class SharedServer:
    """A broker, or the proxy."""

    name: str
    address: str
    log: str


@dataclass(frozen=True)
class SharedCluster:
    """Addresses and options of a cluster that tests share. No test may stop or pause its servers."""

    name_server: str
    brokers: tuple[SharedServer, ...]
    proxy: SharedServer
    endpoints: str
    options: dict[str, str]

    @property
    def admin(self) -> Credentials | None:
        """Credentials of the administrator; None without access control."""
        if "accessKey" not in self.options:
            return None
        secret_file = self.options["secretKey"].removeprefix("file:")
        return Credentials(self.options["accessKey"], Path(secret_file).read_text())

    @property
    def tls(self) -> TlsSettings | None:
        """TLS settings of a client; None without TLS."""
        return TlsSettings(self.options["tlsCaFile"]) if "useTls" in self.options else None

    @property
    def transport_settings(self) -> dict[str, Any]:
        """Keyword arguments of a transport with the administrator's rights."""
        return {"credentials": self.admin, "tls": self.tls}

    @property
    def admin_settings(self) -> dict[str, Any]:
        """Keyword arguments of `Admin` and `Producer` with the administrator's rights."""
        return {name: value for name, value in client_options(self.options).items() if name != "name_server"}

    @classmethod
    def of(cls, cluster: LocalCluster) -> SharedCluster:
        assert cluster.proxy is not None
        brokers = tuple(SharedServer(broker.name, broker.address, str(broker.log)) for broker in cluster.brokers)
        proxy = SharedServer(cluster.proxy.name, cluster.proxy.address, str(cluster.proxy.log))
        return cls(cluster.name_server, brokers, proxy, cluster.endpoints, cluster.options)

    @classmethod
    def read(cls, path: Path) -> SharedCluster:
        facts = json.loads(path.read_text())
        brokers = tuple(SharedServer(**broker) for broker in facts.pop("brokers"))
        return cls(brokers=brokers, proxy=SharedServer(**facts.pop("proxy")), **facts)


@contextlib.contextmanager
def shared(folder: Path, cluster: LocalCluster, prepare: Callable[[LocalCluster], None]) -> Iterator[SharedCluster]:
    """Yield the cluster of a run; it has a proxy.

    `folder` is the same for all processes of the run. The first process starts `cluster`, and calls `prepare` with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts, starts = folder / "cluster.json", False
    # The kernel releases these locks when their process ends, even if it is killed.
    with (folder / "lock").open("w") as lock, (folder / "users").open("w") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts.exists():
            cluster.start()
            starts = True
            prepare(cluster)
            facts.write_text(json.dumps(asdict(SharedCluster.of(cluster))))
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            yield SharedCluster.read(facts)
        finally:
            if starts:
                # Later processes start another cluster. Present users finish before this one stops.
                fcntl.flock(lock, fcntl.LOCK_EX)
                fcntl.flock(users, fcntl.LOCK_EX)
                facts.unlink()
                cluster.stop()


class Slave:
    """A slave of the cluster's first broker. It replicates `topic`, which the master has."""

    def __init__(self, cluster: LocalCluster, topic: str) -> None:
        self._master = cluster.brokers[0]
        self._topic = topic
        self._transport = RemotingTransport([cluster.name_server])
        given = {
            "brokerName": self._master.name,
            "brokerRole": "SLAVE",
            "brokerId": "1",
            "slaveReadEnable": "true",
            # Must be that of the master.
            "mappedFileSizeCommitLog": self._master.properties["mappedFileSizeCommitLog"],
        }
        assert cluster._site is not None
        self.broker = Broker(cluster._site, "slave", given)
        # A slave asks its master for topics a minute after its start. A master that runs replaces these files.
        self._master.pause()
        try:
            shutil.copytree(self._master.folder / "store" / "config", self.broker.folder / "store" / "config")
        finally:
            self._master.resume()

    def launch(self) -> None:
        """Start the slave, and wait until the name server knows it. It copies from the master's current file on."""
        self.broker.start()
        wait_for(self._is_known)

    def start(self) -> None:
        """Start the slave, and wait until it replicates: it gets all later messages."""
        self.launch()
        wait_for(lambda: self._has(self._master.name, 1))

    def catch_up(self) -> None:
        """Wait until the slave has all messages of the topic."""
        wait_for(lambda: self._has(self._topic, 2))

    def end(self) -> None:
        """Kill the slave and remove its files, logs excepted."""
        self._transport.close()
        self.broker.kill()
        self.broker.remove_all_but_logs()

    def _has(self, topic: str, queues: int) -> bool:
        def ends(address: str) -> list[int]:
            of_it = [MessageQueue(topic, self._master.name, number) for number in range(queues)]
            return [self._transport.max_offset(queue, address, 5.0) for queue in of_it]

        return ends(self.broker.address) == ends(self._master.address)

    def _is_known(self) -> bool:
        with contextlib.suppress(RocketMQError):
            # A change of its configuration makes a broker register at once.
            set_config(self.broker, brokerPermission=6)
            route = self._transport.query_route(self._topic, 5.0)
            return any(self.broker.address in data.broker_addrs.values() for data in route.broker_datas)
        return False


USER = Credentials("spark-user", "user-hush-hush", "token-token")
"""May publish to ``allowed-...``, read ``readable-...`` as the source does, and nothing else."""

MARKED = Credentials("marked", "password-7f3c9e51-must-not-show", "token-7f3c9e51-must-not-show")
"""Has the rights of `USER`. Its secrets are unique texts, so that tests can search for them."""

ANYBODY = Credentials("anybody", "anybody-hush-hush")
"""May publish to and read all topics, in any group."""


def create_topic(
    cluster: LocalCluster | SharedCluster, topic: str, message_type: str, queues: int = 2, *, inner: bool = False
) -> str:
    """Create a topic on all brokers of a cluster, and return its name once the name server knows it of each.

    A proxy creates no topic, and caches for a while that a topic is missing. An `inner` topic has the type BatchCQ.
    """
    settings = cluster.admin_settings if isinstance(cluster, SharedCluster) else {}
    with Admin(cluster.name_server, **settings, timeout=PATIENCE) as admin:
        admin.create_topic(topic, queues, message_type=message_type, inner=inner, update=True)
    return topic


def mqadmin(folder: Path, *arguments: str) -> str:
    """Run ``mqadmin``, again if a server has not answered in time, and return its output. Its files go to `folder`."""
    classpath = os.pathsep.join(map(str, server_jars(find_java)))
    folders = [f"-Duser.home={folder}", f"-Djava.io.tmpdir={folder}"]
    command = [str(find_java()), *folders, "-cp", classpath]
    command += ["org.apache.rocketmq.tools.command.MQAdminStartup", *arguments]
    # Its timeout cannot be longer, and its exit status is 0 after one.
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, cwd=folder)
        if not re.search("RemotingTimeoutException|RemotingConnectException", done.stderr):
            break
    return done.stdout


def set_config(broker: Broker, **properties: object) -> None:
    """Change properties of a running broker."""
    Probe(timeout=5.0).configure(broker.address, properties)


def commit_log(broker: Broker) -> list[Path]:
    """Return the files of a broker's commit log, from the oldest on."""
    return sorted((broker.folder / "store" / "commitlog").iterdir())


def forget(broker: Broker, files: int) -> None:
    """Delete the oldest files of a broker's commit log, as the broker does if they have expired."""
    broker.kill()
    for file in commit_log(broker)[:files]:
        file.unlink()
    broker.restart()


def start_all(servers: Sequence[Server], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Resume or start servers, and wait until all are ready: replicas become ready together."""
    for server in servers:
        if server.is_alive:
            server.resume()
        else:
            server.start()
    for server in servers:
        meanwhile()
        server.await_ready(time.monotonic() + PATIENCE, keep_ports=True)


def heal(cluster: LocalCluster) -> None:
    """Resume or restart all servers, and wait until the name server knows all brokers."""
    name_server = cluster.servers[0]
    for server in cluster.servers:
        if server.is_alive:
            server.resume()
    if not name_server.is_alive:
        name_server.restart()
    for broker in cluster.brokers:
        if not broker.is_alive:
            broker.restart()
        broker.await_ready(time.monotonic() + PATIENCE)
