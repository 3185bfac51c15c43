"""Fake name servers and brokers on a simulated network, and the faults that a schedule can play on them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import MASTER_ID
from rocketmq_spark.testing.fake_broker import FakeBroker, Handler
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from rocketmq_spark.testing.fake_requests import HANDLERS
from rocketmq_spark.testing.fake_storage import BrokerSettings, TopicSettings, template_topic
from tests.simulation.network import Network
from tests.simulation.world import SimulationError, World


@dataclass
class BasePlan:
    """What the seeds of writes, reads and transactions draw. With fewer `faults` enabled, a schedule is smaller."""

    seed: int
    faults: tuple[str, ...] = ()
    brokers: int = 2
    slaves: int = 0
    name_servers: int = 1
    queues: int = 2
    tasks: int = 1
    rows: int = 40
    options: dict[str, Any] = field(default_factory=dict)
    horizon: float = 3.0


class Warnings(logging.Handler):
    """Keeps the warnings of a logger in `texts`, each with its time, and notes them in the trace."""

    def __init__(self, world: World, logger: str, texts: list[tuple[float, str]]) -> None:
        super().__init__(logging.WARNING)
        self._world = world
        self._texts = texts
        self._logger = logging.getLogger(logger)

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append((self._world.now, record.getMessage()))
        self._world.note(f"warning: {record.getMessage()}")

    def __enter__(self) -> Warnings:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


def run_to_end(world: World, main: Callable[[], None], process: str, check: Callable[[], list[str]]) -> list[str]:
    """Run a world until `main` has ended, and close it; return what `check` finds, or why there was no end."""
    try:
        world.run(world.start(main, process or "main", process))
    except SimulationError as exc:
        return [f"no end: {exc}"]
    except Exception as exc:
        return [f"{type(exc).__name__}: {exc}"]
    else:
        failed = [thread for thread in world.threads if thread.failure is not None]
        return [*(f"{thread.name} failed: {thread.failure!r}" for thread in failed), *check()]
    finally:
        world.close()


@dataclass
class BaseRun:
    """What a schedule leaves behind: the faults by kind, and a text for each problem that the checks have found."""

    world: World
    faults: Counter[str]
    problems: list[str]

    @property
    def trace(self) -> list[tuple[float, str]]:
        """What happened, with its times."""
        return self.world.trace


class SimulatedCluster:
    """The servers of one simulation. Names of brokers are ``b0``, ``b1``, ...; `slaves` per master."""

    def __init__(
        self,
        network: Network,
        brokers: int,
        *,
        slaves: int = 0,
        name_servers: int = 1,
        settings: Callable[[], BrokerSettings] = BrokerSettings,
        handlers: Mapping[int, Handler] = HANDLERS,
    ) -> None:
        self._handlers = handlers
        self.network = network
        addresses = [f"10.1.0.{number + 1}:9876" for number in range(name_servers)]
        self.name_servers = [FakeNameServer(address, network.world) for address in addresses]
        self.masters: dict[str, FakeBroker] = {}
        self.slaves: dict[str, list[FakeBroker]] = {}
        # Bodies of acknowledged messages that a power failure or a failover has taken.
        self.lost: set[bytes] = set()
        for number in range(brokers):
            name = f"b{number}"
            self.masters[name] = self._broker(name, MASTER_ID, number, settings())
            self.slaves[name] = [self._broker(name, slave + 1, number, settings()) for slave in range(slaves)]
            self.masters[name].slaves = self.slaves[name]
        for server in self.name_servers:
            network.listen(server.address, server)
        for broker in self.brokers():
            network.listen(broker.address, broker)
        self.register()

    @property
    def addresses(self) -> list[str]:
        """The addresses of the name servers."""
        return [server.address for server in self.name_servers]

    def faults(self, *counts: Mapping[str, int]) -> Counter[str]:
        """Return the faults by kind: those of `counts`, and the replies that were played."""
        total: Counter[str] = Counter()
        for count in (*counts, self.network.conditions.counts):
            total += Counter(count)
        for broker in self.brokers():
            total += Counter({f"reply: {kind}": count for kind, count in broker.played.items()})
        return total

    def brokers(self) -> Iterator[FakeBroker]:
        """Return all brokers, slaves included."""
        yield from self.masters.values()
        for slaves in self.slaves.values():
            yield from slaves

    def register(self) -> None:
        """Tell the name servers what the brokers have."""
        for server in self.name_servers:
            server.register(self.brokers())

    def create_topic(self, topic: str, queues: int, perm: int = 6) -> None:
        """Create a topic on all brokers."""
        for broker in self.brokers():
            broker.storage.create_topic(topic, TopicSettings(queues, queues, perm))

    def kill(self, name: str, *, lose_unflushed: bool = False) -> None:
        """End a master; with `lose_unflushed` its unflushed messages are lost."""
        broker = self.masters[name]
        before = {entry.read.body for entry in broker.storage.store.log}
        broker.stop(lose_unflushed=lose_unflushed)
        self.lost |= before - {entry.read.body for entry in broker.storage.store.log}
        self.network.close(broker.address)
        self.register()

    def restart(self, name: str) -> None:
        """Start a killed master again."""
        broker = self.masters[name]
        if not broker.running:
            self.network.listen(broker.address, broker)
            broker.start()

    def promote(self, name: str) -> None:
        """Replace a master by its first slave; the old master does not come back."""
        if not self.slaves[name]:
            return
        old = self.masters[name]
        if old.running:
            self.kill(name)
        new, *others = self.slaves[name]
        kept = {entry.read.body for entry in new.storage.store.log}
        self.lost |= {entry.read.body for entry in old.storage.store.log} - kept
        self.masters[name], self.slaves[name] = new, others
        new.promote(others)
        self.register()

    def stored(self, topic: str) -> Iterator[MessageExt]:
        """Return the messages of a topic that consumers can read, queue by queue."""
        for name, broker in self.masters.items():
            for queue in sorted(queue for queue in broker.storage.store.queues if queue.topic == topic):
                assert queue.broker_name == name
                yield from broker.storage.store.messages(queue, 0, broker.storage.store.end(queue))

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic that have messages."""
        return [
            queue
            for broker in self.masters.values()
            for queue in sorted(broker.storage.store.queues)
            if queue.topic == topic
        ]

    def _broker(self, name: str, broker_id: int, number: int, settings: BrokerSettings) -> FakeBroker:
        broker = FakeBroker(
            name,
            self.network.world,
            self._handlers,
            address=f"10.2.{broker_id}.{number + 1}:10911",
            broker_id=broker_id,
            settings=settings,
        )
        broker.storage.topics = template_topic()
        broker.on_change = self.register
        return broker
