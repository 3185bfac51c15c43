"""A broker that loses messages that it has acknowledged, so that its queues grow again from lower offsets.

Each class has a `cluster`, `mark`, after which the first broker loses all that it acknowledges, and `lose`, which
returns when the broker serves again.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.cluster.servers import NameServer
from rocketmq_spark.errors import ClusterError, RocketMQError
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import mqadmin, start_all
from tests.support.processes import PATIENCE, wait_for


class Loss(Protocol):
    """A way to lose messages."""

    cluster: LocalCluster

    def mark(self) -> None: ...

    def lose(self) -> None: ...


class OlderStore:
    """A power failure that takes what was not flushed.

    The end of a process does not take the page cache. So the store is replaced by a copy: what was on the disk at
    `mark`.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def mark(self) -> None:
        """Let the first broker lose all that it acknowledges from now on."""
        broker = self._broker
        broker.pause()
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._store, self._copy)
        broker.resume()

    def lose(self) -> None:
        """Lose it, and return when the broker serves again."""
        self._broker.kill()
        shutil.rmtree(self._store)
        shutil.copytree(self._copy, self._store)
        self._broker.restart()

    @property
    def _broker(self) -> Broker:
        return self.cluster.brokers[0]

    @property
    def _store(self) -> Path:
        return self._broker.folder / "store"

    @property
    def _copy(self) -> Path:
        return self._broker.folder / "copy-of-store"


class EmptyStore:
    """An empty broker takes the name of the first one."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def mark(self) -> None:
        """Do nothing: the broker loses all of its messages."""

    def lose(self) -> None:
        """Replace the broker. It has no topic and no message."""
        broker = self.cluster.brokers[0]
        broker.kill()
        shutil.rmtree(broker.folder / "store")
        broker.restart()


class UncleanSwitch:
    """The election of a slave that lacks messages, which a controller allows with `enableElectUncleanMaster`.

    The slave is paused. When it is out of sync, its master acknowledges messages without it.
    """

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        """`folder` gets the files of ``mqadmin``."""
        self.cluster = cluster
        self._controllers = [server.controller for server in cluster.servers if isinstance(server, NameServer)]
        for controller in self._controllers:
            mqadmin(folder, "updateControllerConfig", "-a", controller, "-k", "enableElectUncleanMaster", "-v", "true")

    def mark(self) -> None:
        """Pause the slave, and wait until the master acknowledges without it."""
        self._master = self.cluster.master()
        (self._slave,) = (broker for broker in self.cluster.brokers if broker is not self._master)
        # A slave asks its master for topics every ten seconds.
        with RemotingTransport([self.cluster.name_server]) as transport:
            topics = transport.all_topic_attributes(self._master.address, PATIENCE).keys()
            wait_for(lambda: topics <= transport.all_topic_attributes(self._slave.address, PATIENCE).keys())
        self._slave.pause()
        wait_for(lambda: self._in_sync() == {self._master.address})

    def lose(self) -> None:
        """Kill the master, let the slave run, and wait until it is the master."""
        self._master.kill()
        self._slave.resume()
        wait_for(self._is_elected)

    def heal(self) -> None:
        """Restart the old master, which drops its last messages, and wait until both replicas are in sync."""
        start_all(self.cluster.brokers)

    def _in_sync(self) -> set[str]:
        assert self.cluster._site is not None
        return set(self.cluster._site.probe.in_sync(self._controllers, self._master.broker_name))

    def _is_elected(self) -> bool:
        with suppress(ClusterError, RocketMQError):
            return self.cluster.master() is self._slave
        return False
