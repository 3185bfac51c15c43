"""A schedule in which tasks read offset ranges, while a seed draws faults (see `schedule` for writes)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from rocketmq_spark.errors import DataLossError, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.properties import TAGS, UNIQ_KEY
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.protocol.remoting.responses import BATCH_CQ, QUEUE_TYPE
from rocketmq_spark.source import plan as planning
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.offset_resolver import OffsetResolver
from rocketmq_spark.source.queue_fetch import TURN
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.read import decoded
from rocketmq_spark.source.topic_queues import TopicQueues
from rocketmq_spark.source.topic_routes import TopicRoutes
from rocketmq_spark.testing.fake_storage import BrokerSettings, TopicSettings
from rocketmq_spark.testing.store import MessageStore
from tests.simulation.cluster import BasePlan, BaseRun, SimulatedCluster, Warnings, run_to_end
from tests.simulation.network import Conditions, Network
from tests.simulation.read_checks import PlanRead, ReadHistory, Row, Stored, TaskRead, problems_of_read
from tests.simulation.read_client import Memory, RecordedPuller, RecordedReads
from tests.simulation.read_faults import KINDS, ReadAdversary
from tests.simulation.world import EPOCH, SimulatedRuntime, World

TOPIC = "T"

_SCHEMA = pa.schema(
    [("body", pa.binary()), ("brokerName", pa.string()), ("queueId", pa.int32()), ("queueOffset", pa.int64())]
)
_ATTEMPTS = 4
_READS = 4


@dataclass
class ReadPlan(BasePlan):
    """A read. Before it, a queue has at most `rows` messages."""

    inner: bool = False
    # Later messages are longer, so that answers exceed what the first ones predict.
    grows: bool = False
    begin: str = "earliest"
    window: int = 64
    most_bytes: int = 1 << 20
    turn: int = TURN
    latency: float = 0.0005

    @classmethod
    def of_seed(cls, seed: int) -> ReadPlan:
        """Draw a plan."""
        rng = random.Random(f"read {seed}")
        enabled = tuple(kind for kind in KINDS if rng.random() < rng.choice((0.05, 0.15, 0.3)))
        read_timeout = rng.choice((2_000, 5_000, 20_000))
        options: dict[str, Any] = {
            "read_timeout_ms": read_timeout,
            "pull_timeout_ms": min(read_timeout, rng.choice((500, 1_000, 3_000))),
            "pull_batch_size": rng.choice((1, 3, 8, 32)),
            "fail_on_data_loss": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            options["sub_expression"] = rng.choice(("A", "A || B", "X"))
        needs_slave = {"promote", "expiry on slaves", "slow replication", "slave stopped", "slaves that began later"}
        return cls(
            seed,
            enabled,
            brokers=rng.choice((1, 2, 2, 3)),
            slaves=rng.choice((1, 1, 2)) if needs_slave & set(enabled) else rng.choice((0, 0, 1)),
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2, 4)),
            rows=rng.choice((3, 20, 40, 100)),
            inner=rng.random() < 0.25,
            tasks=rng.choice((1, 1, 2, 5)),
            begin=rng.choice(("earliest", "earliest", "offsets", "time")),
            window=rng.choice((2, 8, 64)),
            most_bytes=rng.choice((300, 3_000, 1 << 20)),
            latency=rng.choice((0.0005, 0.01, 0.03)),
            grows=rng.random() < 0.4,
            turn=rng.choice((4, 16, TURN)),
            options=options,
        )


@dataclass
class ReadRun(BaseRun):
    """A read that was run."""

    plan: ReadPlan
    history: ReadHistory


def run_read(plan: ReadPlan) -> ReadRun:
    """Run a read and check what happened; problems are texts."""
    world = World(plan.seed)
    # With a longer latency, more faults happen while messages are read.
    conditions = Conditions(latency=plan.latency)
    network = Network(world, conditions)
    cluster = SimulatedCluster(
        network, plan.brokers, slaves=plan.slaves, name_servers=plan.name_servers, settings=lambda: BrokerSettings()
    )
    reading = _Reading(plan, world, network, cluster)
    borders = {queue: list(offsets) for queue, offsets in reading.borders.items()}
    adversary = ReadAdversary(world, cluster, network, plan, reading.history, borders)
    adversary.start()

    def check() -> list[str]:
        left_open = [f"a connection to {link.address} stayed open" for link in network.links]
        return problems_of_read(reading.history) + left_open

    with Warnings(world, "rocketmq_spark.source", reading.history.warnings):
        problems = run_to_end(world, reading.run, "", check)
    faults = cluster.faults(adversary.counts)
    return ReadRun(world, faults, problems, plan, reading.history)


class _Reading:
    """The messages, the driver and the tasks of one read."""

    def __init__(self, plan: ReadPlan, world: World, network: Network, cluster: SimulatedCluster) -> None:
        self.plan = plan
        self.world = world
        self.cluster = cluster
        self.runtime = SimulatedRuntime(world, network.socket, network.socketpair)
        self.queues = [MessageQueue(TOPIC, name, number) for name in cluster.masters for number in range(plan.queues)]
        # The offsets at which the first messages may expire.
        self.borders: dict[MessageQueue, list[int]] = {queue: [] for queue in self.queues}
        self._written = 0
        options = plan.options
        expression = options.get("sub_expression")
        self.history = ReadHistory(
            tags=None if expression is None else frozenset(tag.strip() for tag in expression.split("||")),
            fail_on_data_loss=options.get("fail_on_data_loss", True),
            read_timeout=options["read_timeout_ms"] / 1000,
            slack=3 * options["pull_timeout_ms"] / 1000 + 15.0,
            per_message=2 * plan.latency / plan.window,
            most_bytes=plan.most_bytes,
            turn=plan.turn,
            starts={},
            ends={},
            starting_ms=None,
            calm=plan.horizon,
        )
        self._store_all()
        self.options = SourceOptions.of(
            name_server=tuple(cluster.addresses), subscribe=(TOPIC,), **options, **self._span()
        )

    def run(self) -> None:
        """Read again and again, while messages arrive, until the last fault has ended."""
        self.world.start(self._write, "writer")
        self.runtime.sleep(self.world.rng.random())
        for _ in range(_READS):
            self._read()
            if self.world.now >= self.plan.horizon:
                break

    def _read(self) -> None:
        """Plan, and run the tasks."""
        planned = None
        for _ in range(_ATTEMPTS):
            planned = self._plan()
            if planned is not None or isinstance(self.history.plans[-1].error, DataLossError):
                break
            self.runtime.sleep(self.plan.horizon / 2)
        if planned is None:
            return
        tasks = planned.tasks(replace(self.options, min_partitions=self.plan.tasks if self.plan.tasks > 1 else None))
        threads = []
        for number, task in enumerate(tasks):

            def run(number: int = number, task: planning.ReadPlan = task) -> None:
                for _ in range(_ATTEMPTS):
                    error = self._task(number, task)
                    if error is None or isinstance(error, DataLossError):
                        break

            threads.append(self.world.start(run, f"task {number}"))
        for thread in threads:
            thread.join()
            if thread.failure is not None:
                raise thread.failure

    def _transport(self, *, polled: bool) -> RecordedReads:
        rng = random.Random(self.world.rng.random())
        return RecordedReads(
            self.cluster.addresses, random=rng, clock=self.runtime.clock, runtime=self.runtime, polled=polled
        )

    def _plan(self) -> planning.ReadPlan | None:
        """Plan as the driver does; None if that failed."""
        record = PlanRead(self.world.now, ends={queue: self._store(queue).end(queue) for queue in self.queues})
        self.history.plans.append(record)
        transport = self._transport(polled=False)
        try:
            queues = TopicQueues(self.options, transport, self.runtime.clock, runtime=self.runtime)
            requests = QueueRequests(queues, self.runtime.clock, self.runtime.sleep)
            record.ranges = OffsetResolver(requests).ranges(queues.look_up())
            return planning.plan_of(record.ranges, requests)
        except RocketMQError as exc:
            record.error = exc
            return None
        finally:
            record.ended = self.world.now
            record.first_left = {queue: self._first_left(queue) for queue in self.queues}
            spans = ", ".join(f"{part.queue} {part.start}-{part.end}" for part in record.ranges)
            self.world.note(f"planned: {record.error or spans}")
            transport.close()

    def _task(self, number: int, plan: planning.ReadPlan) -> RocketMQError | None:
        """Read as a task does; return its error."""
        task = TaskRead(number, plan.ranges, self.world.now)
        self.history.tasks.append(task)
        longest = self.world.rng.choice((0.0, 0.05, 0.3))
        transport = self._transport(polled=True)
        transport.memory, transport.began = Memory(task), transport.clock()
        options = replace(self.options, sub_expression="*") if plan.tasks_filter else self.options
        brokers = BrokerChoice(TopicRoutes(options, transport, transport.clock, dict(plan.routes), self.runtime))
        bounds = self.plan.window, self.plan.most_bytes, self.plan.turn
        puller = RecordedPuller(options, transport, brokers, transport.clock, *bounds)
        puller.memory = transport.memory

        def rest() -> float:
            if longest and self.world.now < self.plan.horizon:
                self.runtime.sleep(self.world.rng.random() * longest)
            return self.world.now

        puller.rest = rest
        try:
            for batch in decoded(self.options, puller.pull(plan.ranges), _SCHEMA):
                for row in batch.to_pylist():
                    queue = MessageQueue(TOPIC, row["brokerName"], row["queueId"])
                    task.rows.append(Row(queue, row["queueOffset"], row["body"]))
        except RocketMQError as exc:
            task.error = exc
        finally:
            task.polled_in_all = transport.clock() - transport.began
            transport.close()
        task.ended = self.world.now
        self.world.note(f"task {number}: {len(task.rows)} rows, {task.error or 'no error'}")
        return task.error

    def _store_all(self) -> None:
        """Store the messages that are there before the read, on masters and slaves."""
        plan, rng = self.plan, self.world.rng
        attributes = {QUEUE_TYPE: BATCH_CQ} if plan.inner else {}
        for broker in self.cluster.masters.values():
            broker.storage.create_topic(TOPIC, TopicSettings(plan.queues, plan.queues, attributes=attributes))
        for queue in self.queues:
            for number in range(rng.choice((0, plan.rows, rng.randrange(plan.rows + 1)))):
                self._append(queue, EPOCH - 100 + number * 0.05)
            self.borders[queue] = [*self.borders[queue], self._store(queue).end(queue)]
        for name, slaves in self.cluster.slaves.items():
            for slave in slaves:
                slave.copy_from(self.cluster.masters[name])
                if "slaves that began later" in plan.faults:
                    for queue in self.queues:
                        if queue.broker_name == name:
                            first = rng.choice(self.borders[queue])
                            slave.storage.store.expired[queue] = first
                            old = self.history.deleted_on_slaves.get(queue, 0)
                            self.history.deleted_on_slaves[queue] = max(old, first)

    def _span(self) -> dict[str, Any]:
        """Draw where the user begins and ends."""
        rng, history = self.world.rng, self.history
        if self.plan.begin == "time":
            history.starting_ms = int((EPOCH - 100 + rng.random() * self.plan.rows * 0.06) * 1000)
            return {
                "starting_timestamp": history.starting_ms,
                "starting_offsets_by_timestamp_strategy": "latest",
            }
        if self.plan.begin != "offsets":
            return {"starting_offsets": OffsetSpec("earliest")}
        counts = {queue: self._store(queue).end(queue) for queue in self.queues}
        history.starts = {queue: rng.randrange(count + 1) for queue, count in counts.items()}
        options = {"starting_offsets": OffsetSpec(offsets=tuple(sorted(history.starts.items())))}
        if rng.random() < 0.5:
            history.ends = {queue: rng.randint(start, counts[queue]) for queue, start in history.starts.items()}
            options["ending_offsets"] = OffsetSpec(offsets=tuple(sorted(history.ends.items())))
        return options

    def _write(self) -> None:
        """Add messages until the last fault has ended."""
        rng = self.world.rng
        while self.world.now < self.plan.horizon:
            self.runtime.sleep(rng.random() * 0.1)
            queue = rng.choice(self.queues)
            broker = self.cluster.masters[queue.broker_name]
            if broker.running and not broker.paused:
                self._append(queue, self.world.time())
                broker.replicate()

    def _append(self, queue: MessageQueue, now: float) -> None:
        """Store a message, or in a queue of the type BatchCQ a batch as one record."""
        rng, store = self.world.rng, self._store(queue)
        first = store.end(queue)
        self.borders.setdefault(queue, []).append(first)
        messages = []
        for _ in range(rng.randint(1, 6) if self.plan.inner else 1):
            self._written += 1
            length = 20 * first if self.plan.grows else rng.choice((0, 30, 200))
            body = b"%d-%s" % (self._written, b"x" * length)
            messages.append(Message(TOPIC, body, properties={TAGS: rng.choice("ABC")}))
        if self.plan.inner:
            properties = {"INNER_NUM": str(len(messages)), UNIQ_KEY: f"{self._written:032X}"}
            unit = Message(TOPIC, encode_batch(messages), properties=properties)
            store.append(unit, queue, queue, now, sys_flag=0xC0, items=messages)
        else:
            store.put(queue, messages, now)
        for offset, message in enumerate(messages, first):
            stored = Stored(message.body, message.properties[TAGS], int(now * 1000))
            self.history.stored[queue].setdefault(offset, []).append(stored)

    def _store(self, queue: MessageQueue) -> MessageStore:
        return self.cluster.masters[queue.broker_name].storage.store

    def _first_left(self, queue: MessageQueue) -> int:
        store = self._store(queue)
        # A slave that has become the master may have more than the old one.
        deleted = self.history.deleted.get(queue, 0)
        return max(deleted, store.expired.get(queue, 0), store.removed.get(queue, 0))
