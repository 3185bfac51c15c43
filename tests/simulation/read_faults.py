"""The faults of a simulated read."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_broker import FakeBroker
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.network import Network
from tests.simulation.read_checks import ReadHistory
from tests.simulation.schedule import Adversary, Drawn
from tests.simulation.world import World

_REPLIES: dict[str, Callable[[random.Random], Reply]] = {
    "pull busy": lambda rng: Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy", delay=rng.random() * 0.3),
    "pull system error": lambda _: Reply.code(1, "something failed"),
    "pull silent": lambda _: Reply(silent=True),
    "pull closes": lambda _: Reply(closes=True),
    "pull slow": lambda rng: Reply(delay=rng.random() * 5),
    "pull answered twice": lambda _: Reply(repeats=1),
}
_CODES = {RequestCode.PULL_MESSAGE: 3_000, RequestCode.GET_MAX_OFFSET: 300, RequestCode.GET_MIN_OFFSET: 300}
_LONGEST = 3.0
_OWN = ("expiry", "expiry without a new minimum", "expiry on slaves", "slow replication", "slave stopped")
_SHARED = (
    *("pause", "restart", "power failure", "promote", "partition", "name server partition", "break links"),
    *("stale routes", "name server stopped"),
)

KINDS = (*_REPLIES, *_OWN, *_SHARED, "short answers", "slaves that began later", "delayed", "broken", "refused")
"""Everything that a seed can enable."""


class ReadAdversary(Adversary):
    """Also deletes messages, holds up slaves, and shortens answers; `borders` are the offsets at which messages end."""

    events: ClassVar[tuple[str, ...]] = (*_OWN, *_SHARED)

    def __init__(
        self,
        world: World,
        cluster: SimulatedCluster,
        network: Network,
        plan: Drawn,
        history: ReadHistory,
        borders: Mapping[MessageQueue, list[int]],
    ) -> None:
        super().__init__(world, cluster, network, plan, set(plan.faults))
        self.history = history
        self.borders = borders

    def start(self) -> None:
        """Schedule all faults; most deletions do not meet a read, so there are more of them."""
        super().start()
        for kind in _OWN[:2]:
            if kind in self.enabled:
                for _ in range(6):
                    self.world.call_later(self.world.rng.random() * self.plan.horizon, partial(self._event, kind))

    def _play_replies(self) -> None:
        rng = self.world.rng
        kinds = [kind for kind in _REPLIES if kind in self.enabled]
        chance = rng.choice((0.02, 0.1, 0.4))
        for broker in self.cluster.brokers():
            for code, times in _CODES.items():
                broker.play(self._reply_of(broker, kinds, chance), code=code, times=times)

    def _reply_of(self, broker: FakeBroker, kinds: list[str], chance: float) -> Callable[[object], Reply | None]:
        rng = self.world.rng

        def choose(_: object) -> Reply | None:
            broker.settings.max_transfer_count = rng.choice((1, 2, 5, 32)) if "short answers" in self.enabled else 32
            if not kinds or not self.enabled or rng.random() >= chance:
                return None
            return _REPLIES[rng.choice(kinds)](rng)

        return choose

    def _event(self, kind: str) -> None:
        if not self.enabled:
            return
        if kind in _OWN:
            self._own_event(kind)
            return
        before = {name: (broker, len(broker.storage.store.log)) for name, broker in self.cluster.masters.items()}
        super()._event(kind)
        for name, broker in self.cluster.masters.items():
            old, length = before[name]
            if len(broker.storage.store.log) < length:
                self.history.shortened.add(name)
            if not broker.running:
                # Stale routes may last as long again.
                self.history.absences.append((name, self.world.now, self.world.now + 2 * _LONGEST + 0.5))
            if broker is not old:
                for queue, first in self.history.deleted_on_slaves.items():
                    if queue.broker_name == name:
                        self._count_deleted(self.history.deleted, queue, first)

    def _own_event(self, kind: str) -> None:
        rng = self.world.rng
        name = rng.choice(list(self.cluster.masters))
        master, slaves = self.cluster.masters[name], self.cluster.slaves[name]
        lasting = rng.choice((0.05, 0.5, _LONGEST))
        if kind.startswith("expiry"):
            self._expire(kind, name, lasting)
        elif kind == "slow replication":
            self._count(kind, name)
            usual = master.settings.replication_time
            master.settings.replication_time = rng.choice((0.5, 3.0))
            self._until(lasting, lambda: setattr(master.settings, "replication_time", usual))
        elif slaves and slaves[0].running:
            self._count(kind, name)
            self._stop_slave(slaves[0], lasting)

    def _expire(self, kind: str, name: str, lasting: float) -> None:
        """Delete the oldest messages of a queue."""
        rng = self.world.rng
        slaves = self.cluster.slaves[name]
        queue = rng.choice([queue for queue in self.borders if queue.broker_name == name])
        first = rng.choice(self.borders[queue])
        if kind == "expiry on slaves":
            if slaves:
                self._count(kind, f"{queue} to {first}")
                self._count_deleted(self.history.deleted_on_slaves, queue, first)
                self._count_deleted(rng.choice(slaves).storage.store.expired, queue, first)
            return
        self._count(kind, f"{queue} to {first}")
        store = self.cluster.masters[name].storage.store
        self._count_deleted(self.history.deleted, queue, first)
        if kind == "expiry":
            self._count_deleted(store.expired, queue, first)
        else:
            self._count_deleted(store.removed, queue, first)
            self._until(lasting, lambda: self._count_deleted(store.expired, queue, first))

    def _stop_slave(self, slave: FakeBroker, lasting: float) -> None:
        slave.stop()
        self.network.close(slave.address)
        self.cluster.register()

        def start() -> None:
            if not slave.running:
                self.network.listen(slave.address, slave)
                slave.start()
                self.cluster.masters[slave.name].replicate()

        self._until(lasting, start)

    def _count(self, kind: str, where: str) -> None:
        self.counts[kind] += 1
        self.world.note(f"{kind}: {where}")

    def _until(self, seconds: float, heal: Callable[[], None]) -> None:
        self._healers.append(heal)
        self.world.call_later(seconds, heal)

    @staticmethod
    def _count_deleted(firsts: dict[MessageQueue, int], queue: MessageQueue, first: int) -> None:
        firsts[queue] = max(first, firsts.get(queue, 0))
