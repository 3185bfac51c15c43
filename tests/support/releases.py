"""Servers of other releases, and servers that `LocalCluster` does not have: for tests marked long."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.cluster.config import pick_port, render
from rocketmq_spark.cluster.jars import RELEASE, cache_folder, find_ivy, sha256_of
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.cluster.servers import Site
from rocketmq_spark.errors import ClusterError
from tests.support.cluster import SharedCluster, SharedServer, started
from tests.support.processes import PATIENCE

# By release, the SHA-256 of the list of its jars: a line of SHA-256 and file name for each, in the order of names.
LISTS: Final[Mapping[str, str]] = {
    "5.5.1": "eb3f3f48ddaf966d311d2963fa32c2d482b4900561ca43619c6c5d4e53a6397f",
    "5.3.3": "343569e2136047dfd0d10eaca7143edd8bc6043af60006feb5086da4c8ce3d7e",
    "5.2.0": "6da644bced4697382ee85725cc59edd87559719db46c7065b2abb3c804837dde",
    "4.9.7": "7485dc4f62609a1e2c2285aa743dd8d0580cce28c22b520baf84c9e65cbbf222",
}
_MODULES: Final = ("namesrv", "broker", "tools", "proxy")
# Maven Central has these modules of 5.5.1. The others of its server are of 5.5.0, the name server and the proxy too.
_NEWER: Final = ("broker", "common", "controller", "remoting", "store", "tiered-store")


def release_jars(release: str) -> tuple[Path, ...]:
    """Return the server's jars of a release, fetching them first if this user has never done so.

    Raises
    ------
    ClusterError
        They can't be fetched, or are not the listed ones.
    """
    cache = cache_folder()
    folder = cache / "releases" / release
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (cache / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(prefix=".tests-", dir=cache) as work:
                _fetch(release, Path(work))
                Path(work, "jars").rename(folder)
    jars = tuple(sorted(folder.glob("*.jar")))
    listed = "".join(f"{sha256_of(jar)}  {jar.name}\n" for jar in jars)
    if hashlib.sha256(listed.encode()).hexdigest() != LISTS[release]:
        raise ClusterError(f"the jars in {folder} are not those of the list: remove the folder")
    return jars


def _fetch(release: str, work: Path) -> None:
    (work / "ivy.xml").write_text(_ivy_module(release), encoding="utf-8")
    # The server's settings ignore the dependencies that modules name.
    text = render("ivysettings.xml").replace('usepoms="false"', 'usepoms="true"')
    (work / "ivysettings.xml").write_text(text, encoding="utf-8")
    settings = os.environ.get("ROCKETMQ_SPARK_IVY_SETTINGS") or str(work / "ivysettings.xml")
    command = [str(find_java()), f"-Divy.default.ivy.user.dir={work}/home", "-jar", str(find_ivy())]
    command += ["-settings", settings, "-ivy", f"{work}/ivy.xml", "-cache", f"{work}/ivy", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{work}/jars/[artifact]-[revision](-[classifier]).[ext]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise ClusterError(f"fetching RocketMQ {release}: {done.stdout[-2000:]}")


def _ivy_module(release: str) -> str:
    if release == "5.5.1":
        newer = re.compile(rf'(name="rocketmq-(?:{"|".join(_NEWER)})" rev=")[^"]+')
        return newer.sub(rf"\g<1>{release}", render("ivy.xml", release=RELEASE))
    modules = [module for module in _MODULES if module != "proxy" or not release.startswith("4.")]
    dependency = '<dependency org="org.apache.rocketmq" name="rocketmq-{}" rev="{}" conf="default-&gt;default"/>'
    return (
        '<ivy-module version="2.0"><info organisation="rocketmq-spark" module="release"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        + "".join(dependency.format(module, release) for module in modules)
        + "</dependencies></ivy-module>"
    )


class ReleaseCluster(LocalCluster):
    """One broker of a release, and from 5.3 on a proxy: older ones need files of their distribution."""

    def __init__(self, release: str, **parameters: Any) -> None:
        self.has_proxy = release >= "5.3"
        super().__init__(proxy=self.has_proxy, start_timeout=PATIENCE, **parameters)
        self._release = release

    def _new_site(self, java: Path, jars: Sequence[Path]) -> Site:
        site = super()._new_site(java, release_jars(self._release))
        # 4.x has its configuration of logs at a fixed place.
        for server in ("namesrv", "broker-0"):
            conf = site.directory / server / "conf"
            conf.mkdir(parents=True, exist_ok=True)
            for name in ("namesrv", "broker"):
                (conf / f"logback_{name}.xml").write_text(render("logback.xml"), encoding="utf-8")
        return site


@contextlib.contextmanager
def cluster_of(release: str, **parameters: Any) -> Iterator[SharedCluster]:
    """Run the servers of a release."""
    cluster = ReleaseCluster(release, **parameters)
    with started(cluster):
        if cluster.has_proxy:
            yield SharedCluster.of(cluster)
            return
        brokers = tuple(SharedServer(broker.name, broker.address, str(broker.log)) for broker in cluster.brokers)
        yield SharedCluster(cluster.name_server, brokers, SharedServer("", "", ""), "", cluster.options)


class LocalModeProxy(Broker):
    """A proxy in local mode: one process that is a broker and its proxy."""

    _MAIN = "proxy.ProxyStartup"
    _CONFIG = ("-bc", "broker.conf")

    @property
    def endpoints(self) -> str:
        """``host:port`` of gRPC."""
        return f"127.0.0.1:{self._grpc_port}"

    def start(self) -> None:
        """Write both configurations and start the JVM."""
        self._grpc_port = pick_port(self._site.ports)
        remoting_port = pick_port({*self._site.ports, self._grpc_port})
        properties = json.loads(
            render(
                "proxy.json",
                name_server=self._site.name_server,
                grpc_port=self._grpc_port,
                remoting_port=remoting_port,
            )
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "proxy.json").write_text(json.dumps({**properties, "proxyMode": "LOCAL"}))
        super().start()

    def _command_line(self) -> list[str]:
        return [*super()._command_line(), "-pc", str(self.folder / "proxy.json"), "-pm", "local"]


@contextlib.contextmanager
def local_mode_proxy(broker_properties: Mapping[str, str]) -> Iterator[SharedCluster]:
    """Run a name server, and a broker with its proxy in one process."""
    # The broker of this cluster only provides the name server.
    with started(LocalCluster(start_timeout=PATIENCE)) as cluster:
        cluster.brokers[0].stop()
        assert cluster._site is not None
        both = LocalModeProxy(cluster._site, "broker-local", broker_properties)
        try:
            both.restart()
            server = SharedServer(both.name, both.address, str(both.log))
            yield SharedCluster(cluster.name_server, (server,), server, both.endpoints, cluster.options)
        finally:
            both.kill()
            shutil.rmtree(both.folder, ignore_errors=True)
