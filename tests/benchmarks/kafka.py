"""A Kafka broker on this machine, and Spark's connector for it, to compare the sink and the source with.

Both come from Maven Central through the Ivy that PySpark ships, once per user.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rocketmq_spark.cluster.jars import find_ivy
from rocketmq_spark.cluster.process import ServerProcess, Watchdog, find_java
from rocketmq_spark.errors import ClusterError
from tests.tools.jar_lists import Fetch, listed_jars

KAFKA = ("org.apache.kafka", "kafka_2.13", "3.9.1")
STARTS_WITHIN = 120.0

# What the recipes of docs/payloads.md need.
AVRO = ("org.apache.spark", "spark-avro_2.13", "4.2.0")
CONNECTOR = ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0")
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>
"""
_PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={folder}/logs
num.partitions=8
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.segment.bytes=67108864
"""
_FORGETFUL = """
log.retention.bytes=1
log.retention.check.interval.ms=500
log.segment.delete.delay.ms=0
"""


def jars_of(organisation: str, module: str, release: str, *, alone: bool = False) -> Sequence[Path]:
    """Return a module's jar and its dependencies, or the jar `alone`; fetch them if the user's cache lacks them."""
    fetch = fetch_module(organisation, module, release, alone=alone)
    return listed_jars(place_of(organisation, module, release), fetch)


def place_of(organisation: str, module: str, release: str) -> str:
    """Return the folder of a module's jars, relative to the user's cache folder."""
    return f"bench/{module}-{release}"


def fetch_module(organisation: str, module: str, release: str, *, alone: bool = False) -> Fetch:
    """Return a function that fetches a module's jar and its dependencies, or the jar `alone`, into ``work/jars``."""

    def fetch(work: Path) -> None:
        (work / "ivysettings.xml").write_text(_SETTINGS, encoding="ascii")
        command = [str(find_java()), f"-Divy.default.ivy.user.dir={work}/home", "-jar", str(find_ivy())]
        command += ["-settings", f"{work}/ivysettings.xml", "-cache", f"{work}/ivy", "-confs", "default"]
        command += ["-dependency", organisation, module, release, *(["-notransitive"] if alone else [])]
        command += ["-retrieve", f"{work}/jars/[artifact]-[revision](-[classifier]).[ext]"]
        try:
            subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
        except subprocess.SubprocessError as exc:
            raise ClusterError(f"fetching {module} {release} from Maven Central: {exc}") from exc

    return fetch


class Kafka:
    """A single node in KRaft mode.

    By default it deletes all segments except the ones being written, as the RocketMQ brokers of benchmarks of writes
    do. With `keeps` it keeps all.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-kafka-"))
        self._watchdog = Watchdog()
        port, controller = _free_ports(2)
        self.address = f"127.0.0.1:{port}"
        config = self._folder / "server.properties"
        properties = _PROPERTIES.format(port=port, controller=controller, folder=self._folder)
        config.write_text(properties if keeps else properties + _FORGETFUL, encoding="ascii")
        java = [str(find_java()), "-Xms1g", "-Xmx1g", "-cp", os.pathsep.join(map(str, jars_of(*KAFKA)))]
        self._format = [*java, "kafka.tools.StorageTool", "format", "-t", uuid.uuid4().hex[:22], "-c", str(config)]
        command = [*java, "kafka.Kafka", str(config)]
        self._server = ServerProcess("kafka", command, self._folder, os.environ, self._watchdog)

    def __enter__(self) -> Kafka:
        subprocess.run(self._format, check=True, stdout=subprocess.DEVNULL)
        self._server.start()
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._listens():
            if time.monotonic() > deadline or not self._server.is_alive:
                raise SystemExit(f"Kafka does not start: {self._server.console.read_text()[-2000:]}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._watchdog.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process of the broker."""
        assert self._server.pid is not None, "the broker does not run"
        return self._server.pid

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
