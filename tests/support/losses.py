"""A broker that loses messages that it has acknowledged, so that its queues grow again from lower offsets."""

from __future__ import annotations

import shutil
from pathlib import Path

from rocketmq_spark.cluster import Broker, LocalCluster


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
