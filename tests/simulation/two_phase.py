"""A schedule of exactly-once writes: drivers that crash, freeze and overlap, and the faults of brokers and network.

A driver is a process with threads, connections and a separate decision log. It also prepares the rows, as tasks do.
Rows of different attempts at a write differ, as if the input were not deterministic. The controller has the part of
Spark: it starts a driver for each micro-batch, another one after a failure, and now and then a second one while the
first one still runs.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once import fence
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit, group_of
from rocketmq_spark.deliveries.exactly_once.half_sender import store_halves
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, half_properties
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_single
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_storage import BrokerSettings
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.simulation.cluster import BasePlan, BaseRun, SimulatedCluster, run_to_end
from tests.simulation.network import Conditions, Network
from tests.simulation.schedule import KINDS_OF_SENDS, TOPIC, Adversary
from tests.simulation.transactions import REPLIES_TO_ENDS
from tests.simulation.world import SimulatedRuntime, World

ID = "job"
QUERY = "query"
_LOG = "decisions"
_TIMEOUT_MS = 4_000

EVENTS = (
    *("pause", "restart", "partition", "name server partition", "break links"),
    *("slow storage", "stale routes", "name server stopped"),
)
# What happens to drivers.
_FATES = ("crash", "short freeze", "long freeze", "second driver")
KINDS = (*KINDS_OF_SENDS, *REPLIES_TO_ENDS, *EVENTS, *_FATES, "delayed", "broken", "refused")
"""Everything that a seed can enable."""

# The most attempts at a write. With the seconds between two of them, the last ones come after the faults.
_MOST_ATTEMPTS = 40
_RESTART = 0.5


@dataclass
class TwoPhasePlan(BasePlan):
    """Exactly-once writes: `tasks` micro-batches of `rows` rows, one after the other."""

    tasks: int = 2
    rows: int = 6

    @classmethod
    def of_seed(cls, seed: int) -> TwoPhasePlan:
        """Draw a plan."""
        rng = random.Random(f"two-phase {seed}")
        return cls(
            seed,
            tuple(kind for kind in KINDS if rng.random() < (0.5 if kind in _FATES else rng.choice((0.05, 0.2, 0.4)))),
            brokers=rng.choice((1, 2, 2, 3)),
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2)),
            tasks=rng.choice((1, 2, 3)),
            rows=rng.choice((1, 5, 20)),
            options={"ordered": rng.random() < 0.25, "send_msg_timeout": rng.choice((500, 1_000))},
            horizon=rng.choice((3.0, 12.0)),
        )


@dataclass
class TwoPhaseHistory:
    """What the controller saw: the completed writes, their reports, and the number of started drivers."""

    done: list[Write] = field(default_factory=list)
    reports: list[CommitReport] = field(default_factory=list)
    drivers: int = 0


@dataclass
class TwoPhaseRun(BaseRun):
    """Writes that were run."""

    plan: TwoPhasePlan
    history: TwoPhaseHistory


def run_two_phase(plan: TwoPhasePlan) -> TwoPhaseRun:
    """Run writes and check what consumers see; problems are texts."""
    world = World(plan.seed, longest=7_200.0)
    rng = world.rng
    conditions = Conditions()
    network = Network(world, conditions)
    fence.forget_checks()

    def settings() -> BrokerSettings:
        return BrokerSettings(
            sync_flush=True,
            flush_time=0.001,
            transaction_timeout=rng.choice((0.5, 3.0)),
            transaction_check_interval=5.0,
        )

    cluster = SimulatedCluster(network, plan.brokers, name_servers=plan.name_servers, settings=settings)
    for topic, queues in ((TOPIC, plan.queues), (_LOG, 1)):
        cluster.create_topic(topic, queues)
    history = TwoPhaseHistory()
    controller = _Controller(plan, world, network, cluster, history)
    adversary = TwoPhaseAdversary(world, cluster, network, plan, set(plan.faults))
    adversary.start()

    def check() -> list[str]:
        if began_apart(cluster):
            controller.counts["homes that no claim connects"] += 1
            return []
        return problems_of(plan, cluster, history)

    problems = run_to_end(world, controller.run, "controller", check)
    faults = cluster.faults(adversary.counts, controller.counts)
    return TwoPhaseRun(world, faults, problems, plan, history)


def problems_of(plan: TwoPhasePlan, cluster: SimulatedCluster, history: TwoPhaseHistory) -> list[str]:
    """Return where consumers do not see each row of each write exactly once, from one attempt."""
    problems = []
    if len(history.done) < plan.tasks:
        problems.append(f"{len(history.done)} of {plan.tasks} writes were completed")
    copies = Counter(message.body.decode() for message in cluster.stored(TOPIC))
    problems += [f"row {body} is visible {count} times" for body, count in copies.items() if count > 1]
    for write in history.done:
        rows = sorted(body.split(".") for body in copies if body.startswith(f"{write.name}."))
        attempts = {attempt for _, attempt, _ in rows}
        if len(attempts) > 1:
            problems.append(f"{write}: rows of the attempts {sorted(attempts)} are visible")
        missing = plan.rows - len({row for _, _, row in rows})
        if missing:
            problems.append(f"{write}: {missing} rows are missing")
    if plan.options.get("ordered"):
        problems += _inversions(cluster)
    return problems


def began_apart(cluster: SimulatedCluster) -> bool:
    """Return whether the log began in two homes, and no driver of one saw the broker of the other.

    The protocol excludes this: a new job must start while all brokers are registered.
    """
    homes: set[MessageQueue] = set()
    claims: set[tuple[MessageQueue, MessageQueue]] = set()
    for broker in cluster.masters.values():
        store = broker.storage.store
        for queue in [queue for queue in store.queues if queue.topic == _LOG]:
            for message in store.messages(queue, 0, 1 << 30):
                record = json.loads(message.body) if message.body.startswith(b"{") else {}
                if record.get("kind") == "claim":
                    claims.add((queue, MessageQueue(*record["home"])))
                elif record.get("kind") == "decision":
                    homes.add(queue)
    return len(homes) > 1 and claims.isdisjoint(itertools.permutations(homes, 2))


def _inversions(cluster: SimulatedCluster) -> list[str]:
    last: dict[tuple[str, int], tuple[int, int]] = {}
    problems = []
    for message in cluster.stored(TOPIC):
        name, _, row = message.body.decode().split(".")
        place, number = (message.store_host, message.queue_id), (int(name), int(row))
        if place in last and number < last[place]:
            problems.append(f"queue {place}: row {number} comes after {last[place]}")
        last[place] = number
    return problems


class TwoPhaseAdversary(Adversary):
    """Also plays faults of the answers to END_TRANSACTION."""

    events: ClassVar[tuple[str, ...]] = EVENTS

    def _play_replies(self) -> None:
        super()._play_replies()
        rng = self.world.rng
        kinds = [kind for kind in REPLIES_TO_ENDS if kind in self.enabled]
        chance = rng.choice((0.05, 0.3))

        def choose(_: object) -> Reply | None:
            if not kinds or not self.enabled or rng.random() >= chance:
                return None
            return REPLIES_TO_ENDS[rng.choice(kinds)](rng)

        for broker in self.cluster.brokers():
            broker.play(choose, code=RequestCode.END_TRANSACTION, times=1_000)


class _Controller:
    """Starts drivers until each write is complete, as Spark and the user do."""

    def __init__(
        self, plan: TwoPhasePlan, world: World, network: Network, cluster: SimulatedCluster, history: TwoPhaseHistory
    ) -> None:
        self.plan = plan
        self.world = world
        self.network = network
        self.cluster = cluster
        self.history = history
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Complete the writes in their order, and wait until late requests have arrived."""
        for number in range(self.plan.tasks):
            write = Write(str(number), QUERY)
            for _ in range(_MOST_ATTEMPTS):
                if self._attempt(write):
                    self.history.done.append(write)
                    break
                self.world.wait([], _RESTART)
        # Frozen drivers wake, and their requests arrive.
        self.world.wait([], 120.0)

    def _attempt(self, write: Write) -> bool:
        """Run a driver, sometimes with a second one; return whether one has completed the write."""
        drivers = [self._start(write)]
        if self._draw("second driver", 0.6):
            self.world.wait([], self.world.rng.random() * self.world.rng.choice((0.2, 0.2, 8.0)))
            drivers.append(self._start(write))
        while not any(driver.completed for driver in drivers):
            if all(driver.ended or self.world.is_dead(driver.process) for driver in drivers):
                return False
            self.world.wait([], 0.1)
        return True

    def _start(self, write: Write) -> _Driver:
        self.history.drivers += 1
        driver = _Driver(self, write, self.history.drivers)
        self.world.start(driver.run, driver.process, driver.process)
        rng = self.world.rng
        for kind, seconds in (("crash", float("inf")), ("short freeze", 2.5), ("long freeze", 15.0)):
            if self._draw(kind, 0.5):
                self.world.call_later(
                    rng.random() * rng.choice((0.03, 0.06, 8.0)),
                    partial(self._freeze, driver, kind, seconds),
                )
        return driver

    def _freeze(self, driver: _Driver, kind: str, seconds: float) -> None:
        if not driver.ended:
            self.counts[kind] += 1
            self.world.note(f"{kind}: {driver.process}")
            self.world.freeze(driver.process, seconds)

    def _draw(self, kind: str, chance: float) -> bool:
        drawn = kind in self.plan.faults and self.world.now < self.plan.horizon and self.world.rng.random() < chance
        self.counts[kind] += drawn and kind == "second driver"
        return drawn


class _Driver:
    """One process that plans, prepares and commits a write."""

    def __init__(self, controller: _Controller, write: Write, number: int) -> None:
        self.process = f"driver {number}"
        self.completed = False
        self.ended = False
        self._controller = controller
        self._write = write
        self._number = number

    def run(self) -> None:
        """Complete the write, or end with an error."""
        try:
            self._complete()
            self.completed = True
        except RocketMQError as exc:
            self._controller.world.note(f"{self.process}: {type(exc).__name__}: {exc}")
        finally:
            self.ended = True

    def _complete(self) -> None:
        plan, world = self._controller.plan, self._controller.world
        runtime = SimulatedRuntime(world, self._controller.network.socket, self._controller.network.socketpair)
        options = SinkOptions.of(
            name_server=tuple(self._controller.cluster.addresses),
            client_ip="10.0.0.1",
            topic=TOPIC,
            delivery="exactlyOnce",
            transactional_id=ID,
            transaction_topic=_LOG,
            transaction_timeout_ms=_TIMEOUT_MS,
            delivery_timeout_ms=6_000,
            heartbeat_broker_interval=3_000,
            poll_name_server_interval=3_000,
            **plan.options,
        )
        rng = random.Random(world.rng.random())
        transport = RemotingTransport(options.connection.name_server, random=rng, clock=runtime.clock, runtime=runtime)
        instance = ClientInstance(
            f"10.0.0.1@{self.process}", transport, options.connection, clock=runtime.clock, runtime=runtime
        )
        instance.start()
        try:
            brokers = Brokers(options, instance, clock=runtime.clock, runtime=runtime, rng=rng)
            run_id = f"run{self._number}"
            two_phase = TwoPhaseCommit(brokers, DecisionLog(ID, _LOG), run_id)
            two_phase.prepare(brokers.routes().look_up(TOPIC).broker_names)
            two_phase.log.open(brokers, everything=False)
            if self._write in two_phase.log.writes:
                report = two_phase.finish(self._write)
            else:
                group = group_of(ID, self._write, 1, run_id)
                collector = HalfCollector()
                queues = itertools.cycle(brokers.routes().look_up(TOPIC).queues)
                messages = [(self._half(row, group), next(queues)) for row in range(plan.rows)]
                store_halves(brokers, messages, collector.append)
                report = two_phase.commit(self._write, collector.halves(), group)
            self._controller.history.reports.append(report)
            world.note(f"{self.process}: {report}")
        finally:
            instance.close()

    def _half(self, row: int, group: str) -> EncodedBatch:
        properties = decode_properties(half_properties(group, _TIMEOUT_MS).encode())
        properties["UNIQ_KEY"] = f"{self._number:016X}{row:016X}"
        body = f"{self._write.name}.{self._number}.{row}".encode()
        return encode_single(Message(TOPIC, body, 0, properties), TRANSACTION_PREPARED_TYPE)
