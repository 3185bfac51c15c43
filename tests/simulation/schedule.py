"""One schedule: everything that a seed draws, the run of it, and the checks of what happened.

Each seed enables some kinds of faults and leaves out the others (swarm testing), because faults that always happen
together hide one another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

from rocketmq_spark.model.message import MessageQueue, SendStatus
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_storage import BrokerSettings, TopicSettings
from tests.simulation.checks import KEYS, problems_of
from tests.simulation.client import TaskResult, Worker
from tests.simulation.cluster import BasePlan, BaseRun, SimulatedCluster, run_to_end
from tests.simulation.network import Conditions, Network
from tests.simulation.world import World

TOPIC = "T"

# Faults of replies to sends, and what they are.
_REPLIES: dict[str, Callable[[random.Random], Reply]] = {
    "busy": lambda rng: Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy", delay=rng.random() * 0.3),
    "system error": lambda _: Reply.code(1, "something failed"),
    "system error after storing": lambda _: Reply(error=Reply.code(1, "something failed").error, stored=True),
    "not available": lambda _: Reply.code(14, "service not available now"),
    "topic missing": lambda _: Reply.code(17, "topic[T] not exist, apply first please!"),
    "silent": lambda _: Reply(silent=True),
    "silent after storing": lambda _: Reply(silent=True, stored=True),
    "closes": lambda _: Reply(closes=True),
    "closes after storing": lambda _: Reply(closes=True, stored=True),
    "slow": lambda rng: Reply(delay=rng.random() * 5),
    "answers twice": lambda _: Reply(repeats=1),
    "not flushed": lambda _: Reply(status=SendStatus.FLUSH_DISK_TIMEOUT),
    "not replicated": lambda _: Reply(status=SendStatus.FLUSH_SLAVE_TIMEOUT),
}
KINDS_OF_SENDS = tuple(_REPLIES)
_EVENTS = (
    *("pause", "restart", "power failure", "promote", "partition", "name server partition", "break links"),
    *("disk full", "read only", "fewer queues", "more queues", "slow storage", "stale routes", "name server stopped"),
)
_NETWORK = ("delayed", "broken", "refused")


@dataclass
class Plan(BasePlan):
    """A write."""

    batch_rows: int = 4
    rows_at_once: int = 8
    ordered: bool = False

    @classmethod
    def of_seed(cls, seed: int) -> Plan:
        """Draw a plan."""
        rng = random.Random(f"plan {seed}")
        kinds = (*_REPLIES, *_EVENTS, *_NETWORK)
        enabled = tuple(kind for kind in kinds if rng.random() < rng.choice((0.05, 0.15, 0.3)))
        options: dict[str, Any] = {
            # The first one is after 30 s at the earliest, so that senders find new routes by their own look-ups.
            "poll_name_server_interval": 60_000,
            "delivery_timeout_ms": rng.choice((4_000, 10_000, 30_000)),
            "send_msg_timeout": rng.choice((500, 1_000, 3_000)),
            "retry_times_when_send_failed": rng.choice((0, 1, 2)),
            "retry_backoff_ms": rng.choice((20, 100)),
            "max_in_flight": rng.choice((1, 2, 8)),
            "max_in_flight_bytes": rng.choice((400, 4_000, 1 << 20)),
        }
        if rng.random() < 0.2:
            options["retry_another_broker_when_not_store_ok"] = True
        if rng.random() < 0.2:
            options["fault_preset"] = rng.choice(("v5", "legacy"))
        if rng.random() < 0.15:
            options["send_mode"] = "sync"
        ordered = rng.random() < 0.25
        return cls(
            seed,
            enabled,
            brokers=rng.choice((1, 2, 2, 3)),
            slaves=rng.choice((0, 0, 1)) if "promote" not in enabled else 1,
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2, 4)),
            tasks=rng.choice((1, 1, 2, 3)),
            rows=rng.choice((1, 12, 24, 48, 120)),
            batch_rows=rng.choice((1, 3, 8)),
            rows_at_once=rng.choice((1, 8, 16, 120)),
            ordered=ordered,
            options=options | ({"ordered": True} if ordered else {}),
        )


@dataclass
class Run(BaseRun):
    """A write that was run."""

    plan: Plan
    worker: Worker

    @property
    def results(self) -> list[TaskResult]:
        """The tasks' results."""
        return self.worker.results


def run(plan: Plan) -> Run:
    """Run a schedule and check what happened; problems are texts."""
    world = World(plan.seed)
    rng = world.rng
    enabled = set(plan.faults)
    conditions = Conditions()
    network = Network(world, conditions)

    def settings() -> BrokerSettings:
        return BrokerSettings(
            send_threads=rng.choice((1, 4)),
            service_time=lambda rows, _: 0.0001 + rows * 2e-6,
            sync_flush=rng.random() < 0.3,
            flush_time=0.001,
            replication_time=rng.choice((0.0005, 0.02)),
            sync_replication=bool(plan.slaves) and rng.random() < 0.5,
        )

    cluster = SimulatedCluster(
        network, plan.brokers, slaves=plan.slaves, name_servers=plan.name_servers, settings=settings
    )
    cluster.create_topic(TOPIC, plan.queues)
    options = SinkOptions.of(name_server=tuple(cluster.addresses), topic=TOPIC, **plan.options)
    worker = Worker(network, cluster.addresses, options)
    adversary = Adversary(world, cluster, network, plan, enabled)
    queues = [MessageQueue(TOPIC, name, number) for name in cluster.masters for number in range(plan.queues)]

    if plan.ordered:
        worker.queue_of = lambda key: queues[key % len(queues)]

    def main() -> None:
        threads = []
        for number in range(plan.tasks):
            rows = [(rng.randrange(KEYS), b"%d-%05d" % (number, row)) for row in range(plan.rows)]
            rest = rng.choice((0.0, 0.0, 0.05, 0.5))

            def task(number: int = number, rows: list[tuple[int, bytes]] = rows, rest: float = rest) -> None:
                worker.run_task(number, rows, plan.batch_rows, rest, plan.rows_at_once)

            threads.append(world.start(task, f"task {number}"))
        for thread in threads:
            thread.join()
            if thread.failure is not None:
                raise thread.failure
        # Requests on the network may still be stored.
        adversary.heal_all()
        worker.runtime.sleep(2.0)
        worker.instance.close()

    adversary.start()
    worker.instance.start()
    problems = run_to_end(world, main, "", lambda: problems_of(plan, worker, cluster))
    faults = cluster.faults(adversary.counts)
    return Run(world, faults, problems, plan, worker)


class Drawn(Protocol):
    """What an adversary needs of a plan."""

    faults: tuple[str, ...]
    horizon: float
    queues: int


class Adversary:
    """Plays the enabled faults at random times, and heals them."""

    # The kinds that `_event` plays.
    events: ClassVar[tuple[str, ...]] = _EVENTS

    def __init__(
        self, world: World, cluster: SimulatedCluster, network: Network, plan: Drawn, enabled: set[str]
    ) -> None:
        self.world = world
        self.cluster = cluster
        self.network = network
        self.plan = plan
        self.enabled = enabled
        self.counts: Counter[str] = Counter()
        self._healers: list[Callable[[], None]] = []

    def start(self) -> None:
        """Schedule all faults."""
        rng, conditions = self.world.rng, self.network.conditions
        if "delayed" in self.enabled:
            conditions.delayed, conditions.long_delay = rng.choice(((0.05, 1.0), (0.3, 0.2), (0.02, 8.0)))
        if "broken" in self.enabled:
            conditions.broken = rng.choice((0.01, 0.05, 0.2))
        if "refused" in self.enabled:
            conditions.refused = rng.choice((0.1, 0.5))
        self.world.call_later(self.plan.horizon, self._calm)
        self._play_replies()
        for kind in self.events:
            if kind in self.enabled:
                for _ in range(rng.choice((1, 1, 2, 4))):
                    self.world.call_later(rng.random() * self.plan.horizon, partial(self._event, kind))

    def _play_replies(self) -> None:
        replies = [kind for kind in _REPLIES if kind in self.enabled]
        if replies:
            chance = self.world.rng.choice((0.05, 0.2, 0.6))
            for broker in self.cluster.brokers():
                broker.play(self._chooser(replies, chance), times=10_000)

    def heal_all(self) -> None:
        """End all faults."""
        healers, self._healers = self._healers, []
        for heal in healers:
            heal()

    def _calm(self) -> None:
        conditions = self.network.conditions
        conditions.delayed = conditions.broken = conditions.refused = 0.0
        self.enabled = set()
        self.heal_all()

    def _chooser(self, kinds: list[str], chance: float) -> Callable[[object], Reply | None]:
        rng = self.world.rng

        def choose(_: object) -> Reply | None:
            if not self.enabled or rng.random() >= chance:
                return None
            return _REPLIES[rng.choice(kinds)](rng)

        return choose

    def _event(self, kind: str) -> None:
        if not self.enabled:
            return
        rng, cluster = self.world.rng, self.cluster
        name = rng.choice(list(cluster.masters))
        broker = cluster.masters[name]
        server = rng.choice(cluster.name_servers)
        self.counts[kind] += 1
        self.world.note(f"{kind}: {server.address if 'name server' in kind or kind == 'stale routes' else name}")
        lasting = rng.choice((0.05, 0.5, 3.0))

        def until(heal: Callable[[], None]) -> None:
            self._healers.append(heal)
            self.world.call_later(lasting, heal)

        if kind == "pause" and broker.running:
            broker.pause()
            until(broker.resume)
        elif kind in ("restart", "power failure") and broker.running:
            cluster.kill(name, lose_unflushed=kind == "power failure")
            until(lambda: cluster.restart(name))
        elif kind == "promote":
            cluster.promote(name)
        elif kind in ("partition", "name server partition"):
            address = broker.address if kind == "partition" else server.address
            self.network.partition(address)
            until(lambda: self.network.heal(address))
        elif kind == "break links":
            self.network.break_links(broker.address)
        elif kind == "disk full":
            broker.settings.disk_full = True
            until(lambda: setattr(broker.settings, "disk_full", False))
        elif kind in ("read only", "fewer queues", "more queues"):
            self._change_topic(kind, name, until)
        elif kind == "slow storage":
            usual = broker.settings.service_time
            broker.settings.service_time = lambda rows, _: 0.15 + rows * 0.001
            until(lambda: setattr(broker.settings, "service_time", usual))
        elif kind == "stale routes":
            server.frozen = True

            def thaw() -> None:
                server.frozen = False
                cluster.register()

            until(thaw)
        elif kind == "name server stopped" and server.running:
            server.running = False
            self.network.close(server.address)

            def start() -> None:
                server.running = True
                self.network.listen(server.address, server)
                cluster.register()

            until(start)

    def _change_topic(self, kind: str, name: str, until: Callable[[Callable[[], None]], None]) -> None:
        storage = self.cluster.masters[name].storage
        usual = storage.topics.get(TOPIC)
        if usual is None:
            return
        nums = {"fewer queues": max(1, usual.write_queue_nums - 1), "more queues": usual.write_queue_nums + 1}
        writes = nums.get(kind, usual.write_queue_nums)
        storage.create_topic(TOPIC, TopicSettings(usual.read_queue_nums, writes, 4 if kind == "read only" else 6))
        if kind == "fewer queues":
            storage.create_topic(TOPIC, TopicSettings(writes, writes, 6))
        # A slave that was promoted meanwhile has the changed topic, too.
        planned = TopicSettings(self.plan.queues, self.plan.queues, 6)
        until(lambda: self.cluster.masters[name].storage.create_topic(TOPIC, planned))
