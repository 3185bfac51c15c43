"""Servers of other releases of RocketMQ, and what each release does: for tests marked long."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.config import render
from rocketmq_spark.cluster.jars import RELEASE, cache_folder, find_ivy, server_jars, sha256_of
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import find_java
from rocketmq_spark.cluster.servers import Site
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.credentials import Credentials
from tests.support.cluster import SharedCluster, SharedServer, started
from tests.support.processes import PATIENCE

# By release, the SHA-256 of the list of its jars: a line of SHA-256 and file name for each, in the order of names.
LISTS: Final[Mapping[str, str]] = {
    "5.5.1": "eb3f3f48ddaf966d311d2963fa32c2d482b4900561ca43619c6c5d4e53a6397f",
    "5.4.0": "1f34860baaff90c13e37a8d80f2bbc0a2f614a728d547254e405c22205060489",
    "5.3.3": "343569e2136047dfd0d10eaca7143edd8bc6043af60006feb5086da4c8ce3d7e",
    "5.2.0": "6da644bced4697382ee85725cc59edd87559719db46c7065b2abb3c804837dde",
    "5.1.4": "ad1f46ab4770927d5231f4f1ccba8db60f5f3aa92d56246598ae32bb8c34d72e",
    "4.9.7": "7485dc4f62609a1e2c2285aa743dd8d0580cce28c22b520baf84c9e65cbbf222",
}
# The administrator of brokers with ACL 1.
_ADMIN: Final = "administrator"
_MODULES: Final = ("namesrv", "broker", "tools", "proxy")
# Maven Central has these modules of 5.5.1. The others of its server are of 5.5.0, the name server and the proxy too.
_NEWER: Final = ("broker", "common", "controller", "remoting", "store", "tiered-store")

RELEASES: Final = ("4.9.7", "5.1.4", "5.2.0", "5.3.3", "5.4.0", "5.5.0", "5.5.1")
SERVERS: Final = (*RELEASES, "4.9.7 DLedger", "5.4.0 DLedger", "5.3.3 RocksDB", "5.5.0 RocksDB")
YES, ERROR, NOT_TESTED = "yes", "an error", "not tested"
TABLE: Final[Mapping[str, Mapping[str, str]]] = {
    "rows, columns": {},
    "offsets, times": {},
    "streams": {},
    "filters": {},
    "`delayTimeLevel`": {},
    "`delayMs`, `deliverTime`": {"4.9.7": ERROR, "4.9.7 DLedger": ERROR},
    # The brokers do not return the messages.
    "COMPACTION": {"4.9.7": ERROR, "4.9.7 DLedger": ERROR, "5.5.0 RocksDB": "reads fail"},
    "expired messages": dict.fromkeys(("4.9.7 DLedger", "5.4.0 DLedger"), NOT_TESTED),
    "committed offsets": {},
    "access control": {
        **dict.fromkeys(("4.9.7", "5.1.4", "5.2.0"), "ACL 1"),
        **dict.fromkeys(("5.3.3", "5.4.0", "5.5.0"), "ACL 2"),
        **dict.fromkeys(("5.5.1", *SERVERS[len(RELEASES) :]), NOT_TESTED),
    },
    "`effectivelyOnce`": {},
    "`exactlyOnce`": {"4.9.7": ERROR, "4.9.7 DLedger": ERROR},
}
"""By feature: what a release does, where that is not `YES`. `tests/integration/releases/` tests it."""


def of(feature: str, server: str) -> str:
    """Return what a release, perhaps with another store, does with a feature."""
    return TABLE[feature].get(server, YES)


def leave_out(feature: str, server: str) -> None:
    """Skip the test of a feature that a release does not have, and that the driver does not refuse."""
    if (found := of(feature, server)) not in (YES, ERROR):
        pytest.skip(f"{feature} on {server}: {found}")


def table() -> str:
    """Return `TABLE` as docs/compatibility.md has it."""
    lines = [f"| release | {' | '.join(TABLE)} |", "|---" * (len(TABLE) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(of(feature, name) for feature in TABLE)} |" for name in SERVERS]
    return "\n".join(lines) + "\n"


def release_jars(release: str) -> tuple[Path, ...]:
    """Return the server's jars of a release, fetching them first if this user has never done so.

    Raises
    ------
    ClusterError
        They can't be fetched, or are not the listed ones.
    """
    if release == RELEASE:
        return server_jars(find_java)
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
    # Maven Central has the proxy from 5.2 on.
    modules = [module for module in _MODULES if module != "proxy" or release >= "5.2"]
    dependency = '<dependency org="org.apache.rocketmq" name="rocketmq-{}" rev="{}" conf="default-&gt;default"/>'
    return (
        '<ivy-module version="2.0"><info organisation="rocketmq-spark" module="release"/>'
        '<configurations><conf name="default"/></configurations><dependencies>'
        + "".join(dependency.format(module, release) for module in modules)
        + "</dependencies></ivy-module>"
    )


@dataclass(frozen=True)
class Account:
    """A user of brokers before 5.3 (ACL 1). Names and keys need 7 characters or more."""

    name: str
    secret_key: str
    topics: Mapping[str, str] = field(default_factory=dict)  # Rights such as ``PUB|SUB``
    groups: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the user's lines of plain_acl.yml."""
        yield f"- accessKey: {self.name}"
        yield f"  secretKey: {self.secret_key}"
        yield from ("  admin: false", "  defaultTopicPerm: DENY", "  defaultGroupPerm: DENY")
        for kind, rights in (("topicPerms", self.topics), ("groupPerms", self.groups)):
            if rights:
                yield f"  {kind}:"
                yield from (f"  - {name}={right}" for name, right in rights.items())


class ReleaseCluster(LocalCluster):
    """The servers of a release, with a proxy from 5.3 on: older ones need files of their distribution.

    With `accounts` brokers have ACL 1, which releases before 5.3 have instead of `auth`.
    """

    def __init__(
        self,
        release: str,
        *,
        proxy: bool | None = None,
        auth: bool = False,
        accounts: Sequence[Account] = (),
        **parameters: Any,
    ) -> None:
        self.has_proxy = release >= "5.3" if proxy is None else proxy
        super().__init__(proxy=self.has_proxy, start_timeout=PATIENCE, auth=auth or bool(accounts), **parameters)
        self._release = release
        self._accounts = accounts

    def _new_site(self, java: Path, jars: Sequence[Path]) -> Site:
        site = super()._new_site(java, release_jars(self._release))
        if self._accounts:
            assert site.security.admin is not None
            # The name of the cluster's own administrator is too short.
            admin = Credentials(_ADMIN, site.security.admin.secret_key)
            site.security, site.probe = replace(site.security, admin=admin), Probe(credentials=admin)
            first = f"- {{accessKey: {_ADMIN}, secretKey: {admin.secret_key}, admin: true}}"
            users = ["accounts:", first, *(line for account in self._accounts for line in account.lines()), ""]
        # 4.x has its configuration of logs at a fixed place.
        for server in ("namesrv", *(f"broker-{number}" for number in range(len(self._overrides)))):
            conf = site.directory / server / "conf"
            conf.mkdir(parents=True, exist_ok=True)
            for name in ("namesrv", "broker"):
                (conf / f"logback_{name}.xml").write_text(render("logback.xml"), encoding="utf-8")
            if self._accounts:
                (conf / "plain_acl.yml").write_text("\n".join(users), encoding="ascii")
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
