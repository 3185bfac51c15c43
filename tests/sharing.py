"""One cluster for all processes of a test run: the first that needs it starts it, and stops it when nobody else does.

Servers cost more than most of the tests that use them, so a run has them once and not once for each of its processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.security import client_options
from rocketmq_spark.credentials import Credentials
from rocketmq_spark.transport.tls import TlsSettings


@dataclass(frozen=True)
class SharedServer:
    """A broker, or the proxy."""

    name: str
    address: str
    log: str


@dataclass(frozen=True)
class SharedCluster:
    """What tests need to know of a cluster; they neither stop nor pause anything of it."""

    name_server: str
    brokers: tuple[SharedServer, ...]
    proxy: SharedServer
    endpoints: str
    options: dict[str, str]

    @property
    def admin(self) -> Credentials | None:
        """Who may do anything, where there is access control."""
        if "accessKey" not in self.options:
            return None
        secret_file = self.options["secretKey"].removeprefix("file:")
        return Credentials(self.options["accessKey"], Path(secret_file).read_text())

    @property
    def tls(self) -> TlsSettings | None:
        """Whom to trust, where connections are encrypted."""
        return TlsSettings(self.options["tlsCaFile"]) if "useTls" in self.options else None

    @property
    def transport_settings(self) -> dict[str, Any]:
        """What a transport takes to do anything."""
        return {"credentials": self.admin, "tls": self.tls}

    @property
    def admin_settings(self) -> dict[str, Any]:
        """What `Admin` and a producer take to do anything."""
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
def shared(
    folder: Path, make: Callable[[], LocalCluster], prepare: Callable[[LocalCluster], None] | None = None
) -> Iterator[SharedCluster]:
    """Yield the cluster of a run, with a proxy in it.

    Parameters
    ----------
    folder : pathlib.Path
        The same for all processes of the run.
    make : callable
        Returns the cluster, not started yet.
    prepare : callable, optional
        Called with the cluster once it has started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts, own = folder / "cluster.json", None
    # A lock goes with its process, however that ends.
    with (folder / "lock").open("w") as lock, (folder / "users").open("w") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not facts.exists():
            own = make()
            own.start()
            if prepare is not None:
                prepare(own)
            facts.write_text(json.dumps(asdict(SharedCluster.of(own))))
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            yield SharedCluster.read(facts)
        finally:
            if own is not None:
                # Whoever comes from now on starts another one; whoever is here already is waited for.
                fcntl.flock(lock, fcntl.LOCK_EX)
                fcntl.flock(users, fcntl.LOCK_EX)
                facts.unlink()
                own.stop()
