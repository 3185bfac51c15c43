"""A schedule of effectively-once writes: drivers and tasks that crash, freeze and overlap, and the faults of brokers.

Each driver and each task is a process with a separate client. The controller has the part of Spark: it starts a
driver for each micro-batch, and another one after a failure or a freeze. The driver starts a task for each partition,
and another one after a failure, or while the first one still runs. A task that was replaced ends within a second, which
is shorter than the fence, except zombies. Its requests may arrive later.

Here the client is the connector's own, with threads and connections. tests/simulation/model.py has a smaller one.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from rocketmq_spark.arrow.batcher import ArrowBatcher
from rocketmq_spark.arrow.joiner import JoiningBatcher
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once import attempt as attempts
from rocketmq_spark.deliveries.effectively_once import complete as ends
from rocketmq_spark.deliveries.effectively_once import plan as plans
from rocketmq_spark.deliveries.effectively_once.attempt import Attempted, send_missing
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.effectively_once.resolving_sender import ResolvingSender, Resumption
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.metrics import Measures, Recorder
from rocketmq_spark.metrics.measures import Metric
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import UNIQ_KEY
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.task import AT_LEAST_ONCE, RowBatchers, SendRules
from rocketmq_spark.testing.fake_storage import BrokerSettings
from tests.simulation.client import RecordedTransport
from tests.simulation.cluster import BasePlan, BaseRun, SimulatedCluster, run_to_end
from tests.simulation.network import Conditions, Network
from tests.simulation.schedule import KINDS_OF_SENDS, TOPIC, Adversary
from tests.simulation.two_phase import EVENTS
from tests.simulation.world import EPOCH, SimulatedRuntime, World

ID = "job"
QUERY = "query"
LOG = "decisions"
# Ids of such logs have a "#". The homes of this one are those for which the tests' seeds were found.
LOG_ID = f"{ID}-9#{TOPIC}"
FENCE = 2.0

_EVENTS = (*EVENTS, "power failure")
# What happens to drivers and tasks. A zombie is a task that runs for seconds after it was replaced.
FATES = ("driver crash", "driver freeze", "task crash", "task freeze", "second task", "zombie")
KINDS = (*KINDS_OF_SENDS, *_EVENTS, *FATES, "delayed", "broken", "refused")
"""Everything that a seed can enable."""

# The most attempts at a micro-batch, and at a task. The last ones come after the faults.
_MOST_DRIVERS = 40
_MOST_TASKS = 4
_RESTART = 0.5


@dataclass
class EffectivelyOncePlan(BasePlan):
    """Effectively-once writes: `tasks` micro-batches of `partitions` times `rows` rows, one after the other.

    With `batch` they are batch writes, each with a ``writeId``.
    """

    partitions: int = 2
    batch: bool = False

    @classmethod
    def of_seed(cls, seed: int) -> EffectivelyOncePlan:
        """Draw a plan."""
        rng = random.Random(f"effectively-once {seed}")
        return cls(
            seed,
            tuple(kind for kind in KINDS if rng.random() < (0.5 if kind in FATES else rng.choice((0.05, 0.2, 0.4)))),
            brokers=rng.choice((1, 2, 2, 3)),
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2)),
            tasks=rng.choice((1, 2, 3)),
            rows=rng.choice((1, 7, 25)),
            partitions=rng.choice((1, 1, 2)),
            options={"ordered": rng.random() < 0.25, "send_msg_timeout": rng.choice((500, 1_000))},
            horizon=rng.choice((3.0, 12.0)),
        )


@dataclass(eq=False)
class Attempt:
    """One attempt at a partition."""

    write: Write
    partition_id: int
    number: int
    # When its driver had planned.
    planned_at: float
    # The connector's own object, once the task has connected.
    connected: attempts.Attempt | None = None
    # How the unique ids of its rows begin.
    ids: str = ""
    # When the first attempt to send each row ended, by its number.
    first_ends: dict[int, float] = field(default_factory=dict)


@dataclass
class EffectivelyOnceHistory:
    """What the controller saw."""

    done: list[Write] = field(default_factory=list)
    # Of each completed write: when its end began, and what it reported.
    ends: dict[Write, tuple[float, ResumeReport]] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    recovered_rows: int = 0
    drivers: int = 0
    # The brokers that each driver knew which began a log.
    known: list[frozenset[str]] = field(default_factory=list)


@dataclass
class EffectivelyOnceRun(BaseRun):
    """Writes that were run."""

    plan: EffectivelyOncePlan
    history: EffectivelyOnceHistory


def run_effectively_once(plan: EffectivelyOncePlan) -> EffectivelyOnceRun:
    """Run writes and check what consumers see; problems are texts."""
    world = World(plan.seed, longest=7_200.0)
    conditions = Conditions()
    network = Network(world, conditions)

    def settings() -> BrokerSettings:
        return BrokerSettings(sync_flush=True, flush_time=0.001)

    cluster = SimulatedCluster(network, plan.brokers, name_servers=plan.name_servers, settings=settings)
    for topic, count in ((TOPIC, plan.queues), (LOG, 1)):
        cluster.create_topic(topic, count)
    history = EffectivelyOnceHistory()
    queues = [MessageQueue(TOPIC, name, number) for name in cluster.masters for number in range(plan.queues)]

    def new_client(process: str) -> Client:
        return _NetworkClient(world, network, cluster.addresses, plan, process, controller.fixed_queues)

    controller = Controller(plan, world, history, new_client, queues)
    adversary = _EffectivelyOnceAdversary(world, cluster, network, plan, set(plan.faults))
    adversary.start()
    problems = run_to_end(world, controller.run, "controller", lambda: problems_of(plan, cluster, history))
    faults = cluster.faults(adversary.counts, controller.counts) + outcomes_of(cluster)
    return EffectivelyOnceRun(world, faults, problems, plan, history)


class Stored(Protocol):
    """The brokers of a simulation, with the messages that consumers can read."""

    def stored(self, topic: str) -> Iterator[MessageExt]: ...


def problems_of(plan: EffectivelyOncePlan, cluster: Stored, history: EffectivelyOnceHistory) -> list[str]:
    """Return where consumers miss a row, or see one twice although no request was stored after the fence."""
    problems = []
    done = set(history.done)
    # First drivers that see no common broker begin a log each. Then rows may be repeated, and later drivers fail.
    one_log = len(_homes(cluster)) < 2
    if len(_homes(cluster, "begun")) > 1 and (common := frozenset.intersection(*history.known)):
        problems.append(f"there are several logs, although all drivers that began one knew {sorted(common)}")
    if len(done) < plan.tasks and one_log:
        problems.append(f"{len(done)} of {plan.tasks} writes were completed")
    copies = _copies(cluster)
    for write in done:
        expected = {(int(write.name), part, row) for part in range(plan.partitions) for row in range(plan.rows)}
        missing = expected - copies.keys()
        if missing:
            problems.append(f"{write}: {len(missing)} rows are missing: {sorted(missing)[:3]}")
    if not one_log:
        return problems
    attempts = {attempt.ids: attempt for attempt in history.attempts if attempt.ids}
    places = _places(cluster)
    unreported: Counter[Write] = Counter()
    for (number, part, row), found in copies.items():
        write = write_of(plan, number)
        by_attempt = [(attempts[ids], at) for ids, at in found]
        for (one, earlier), (other, later) in combinations(by_attempt, 2):
            if not _is_excused(one, earlier, other, later, row, places):
                problems.append(
                    f"row {number}.{part}.{row} is visible twice, stored at {earlier:.3f} by attempt {one.number} and "
                    f"at {later:.3f} by attempt {other.number}"
                )
        if write in history.ends:
            began, _ = history.ends[write]
            unreported[write] += max(0, sum(at < began for _, at in found) - 1)
    for write, (_, report) in history.ends.items():
        if unreported[write] > report.repeated_rows:
            problems.append(f"{write}: {unreported[write]} rows were repeated, {report.repeated_rows} were reported")
    if plan.options.get("ordered") and not any(len(found) > 1 for found in copies.values()):
        problems += _inversions(cluster)
    return problems


def _is_excused(
    one: Attempt, earlier: float, other: Attempt, later: float, row: int, places: Mapping[str, tuple[int, float]]
) -> bool:
    """Return whether a request of the older attempt was stored after the fence of the newer one."""
    if one is other:
        return earlier > one.first_ends.get(row, 0.0) + FENCE
    (older, stored_at), (newer, _) = sorted(((one, earlier), (other, later)), key=lambda pair: places[_id_of(pair[0])])
    assert newer.connected is not None
    _, began = places[newer.connected.id]
    # Attempts that its driver knew ended before the plan.
    if places[_id_of(older)][0] < newer.connected.plan.position:
        began = min(began, newer.planned_at)
    return stored_at > began + FENCE


def _id_of(attempt: Attempt) -> str:
    return attempt.connected.id if attempt.connected is not None else ""


def _places(cluster: Stored) -> dict[str, tuple[int, float]]:
    """Return offset and time of each attempt's record in the log."""
    places: dict[str, tuple[int, float]] = {}
    for message in cluster.stored(LOG):
        record = json.loads(message.body)
        if record["kind"] == "begun":
            places.setdefault(record["attempt"], (message.queue_offset, message.store_timestamp / 1000 - EPOCH))
    return places


def outcomes_of(cluster: Stored) -> Counter[str]:
    """Return how many rows are stored twice, or more often, and whether there are several logs."""
    repeats = sum(len(copies) > 1 for copies in _copies(cluster).values())
    return Counter({"rows stored after the fence": repeats, "several logs": len(_homes(cluster)) > 1})


def _homes(cluster: Stored, *kinds: str) -> set[str]:
    """Return the brokers with records of some kinds, by default those on which a driver has begun a log."""
    kinds = kinds or ("floors", "begun")
    return {message.store_host for message in cluster.stored(LOG) if json.loads(message.body)["kind"] in kinds}


def _copies(cluster: Stored) -> dict[tuple[int, int, int], list[tuple[str, float]]]:
    """Return each stored row, with the ids of its attempts and the times of its copies, in the order of times."""
    copies: defaultdict[tuple[int, int, int], list[tuple[str, float]]] = defaultdict(list)
    for message in cluster.stored(TOPIC):
        number, part, row = map(int, message.body.decode().split("."))
        at = message.store_timestamp / 1000 - EPOCH
        copies[number, part, row].append((message.properties[UNIQ_KEY][:20], at))
    return {row: sorted(found, key=lambda copy: copy[1]) for row, found in copies.items()}


def _inversions(cluster: Stored) -> list[str]:
    last: dict[tuple[str, int, str], tuple[int, int]] = {}
    problems = []
    for message in cluster.stored(TOPIC):
        number, part, row = map(int, message.body.decode().split("."))
        place = message.store_host, part, message.properties["__SHARDINGKEY"]
        if (number, row) < last.get(place, (-1, -1)):
            problems.append(f"key {place[2]} of partition {part}: row {number}.{row} comes after {last[place]}")
        last[place] = number, row
    return problems


class _EffectivelyOnceAdversary(Adversary):
    events: ClassVar[tuple[str, ...]] = _EVENTS


class Client(Protocol):
    """What one process has of the connector."""

    @property
    def brokers(self) -> Brokers: ...

    def rows(self, write: Write, partition_id: int) -> Iterator[Any]:
        """Return the rows of a partition."""

    def send(
        self, attempt: Attempt, recorder: Recorder, rows: Iterator[Any], write_id: str, resumption: Resumption
    ) -> None:
        """Send rows; see `rocketmq_spark.deliveries.effectively_once.attempt.Send`."""

    def sums(self, recorder: Recorder) -> tuple[set[str], int]:
        """Return the brokers that have acknowledged rows, and the number of recovered rows."""

    def close(self, attempt: Attempt | None = None) -> None:
        """End the work of a driver, or of an attempt."""


def write_of(plan: EffectivelyOncePlan, number: int) -> Write:
    """Return a write by its number."""
    return Write(str(number), "" if plan.batch else QUERY)


class Controller:
    """Starts drivers until each write is complete, as Spark and the user do."""

    # How often processes look at others, seconds.
    every: ClassVar[float] = 0.05

    def __init__(
        self,
        plan: EffectivelyOncePlan,
        world: World,
        history: EffectivelyOnceHistory,
        new_client: Callable[[str], Client],
        queues: Sequence[MessageQueue],
    ) -> None:
        self.plan = plan
        self.world = world
        self.history = history
        self.new_client = new_client
        # The queues of ordered writes.
        self.fixed_queues = queues if plan.options.get("ordered") else None
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Complete the writes in their order, and wait until late requests have arrived."""
        for number in range(self.plan.tasks):
            write = write_of(self.plan, number)
            for _ in range(_MOST_DRIVERS):
                if self._attempt(write):
                    self.history.done.append(write)
                    # Spark may die before it has recorded the end, and runs the micro-batch again.
                    if self.draw("driver crash", 0.3):
                        continue
                    break
                self.world.wait([], _RESTART)
        self.world.wait([], 60.0)

    def _attempt(self, write: Write) -> bool:
        self.history.drivers += 1
        driver = _Driver(self, write, f"driver {self.history.drivers}")
        self.world.start(driver.run, driver.process, driver.process)
        if self.draw("driver crash", 0.5):
            self.strike(driver.process, float("inf"), "driver crash")
        elif self.draw("driver freeze", 0.4):
            self.strike(driver.process, self.world.rng.choice((5.0, 20.0)), "driver freeze")
        while not driver.ended and not self.world.is_dead(driver.process):
            if self.world.is_frozen(driver.process):
                # Its executors notice that it is gone. It may wake and start new tasks.
                break
            self.world.wait([], 2 * self.every)
        # The tasks of a dead driver end, too.
        for process in driver.tasks:
            self.world.call_later(self.world.rng.random(), partial(self.kill, process))
        return driver.completed

    def kill(self, process: str) -> None:
        """End a process without a trace in the counts."""
        self.world.freeze(process, float("inf"))

    def strike(self, process: str, seconds: float, kind: str) -> None:
        """Freeze a process, or end it, soon or in the middle of its work."""
        rng = self.world.rng
        self.world.call_later(
            rng.random() * rng.choice((0.02, 0.06, 0.3, 5.0)), lambda: self.freeze(process, seconds, kind)
        )

    def freeze(self, process: str, seconds: float, kind: str) -> None:
        """Freeze a process now, and count it."""
        self.counts[kind] += 1
        self.world.note(f"{kind}: {process}")
        self.world.freeze(process, seconds)

    def draw(self, kind: str, chance: float) -> bool:
        """Return whether something happens now."""
        return kind in self.plan.faults and self.world.now < self.plan.horizon and self.world.rng.random() < chance


class _NetworkClient:
    """The connector's own client, on a simulated network."""

    def __init__(
        self,
        world: World,
        network: Network,
        name_servers: Sequence[str],
        plan: EffectivelyOncePlan,
        process: str,
        fixed_queues: Sequence[MessageQueue] | None,
    ) -> None:
        self._plan, self._fixed_queues = plan, fixed_queues
        self._runtime = SimulatedRuntime(world, network.socket, network.socketpair)
        self._rng = random.Random(world.rng.random())
        self._options = SinkOptions.of(name_server=tuple(name_servers), client_ip="10.0.0.1", **options_of(plan))
        connection = self._options.connection
        self._transport = RecordedTransport(
            world, list(connection.name_server), random=self._rng, clock=self._runtime.clock, runtime=self._runtime
        )
        self._instance = ClientInstance(
            f"10.0.0.1@{process}", self._transport, connection, clock=self._runtime.clock, runtime=self._runtime
        )
        self.brokers = Brokers(
            self._options, self._instance, clock=self._runtime.clock, runtime=self._runtime, rng=self._rng
        )
        self._instance.start()

    def rows(self, write: Write, partition_id: int) -> Iterator[pa.RecordBatch]:
        # Here, because drivers have no rows.
        self._instance.register(self._options.producer_group)
        return self._rows(write, partition_id)

    def _rows(self, write: Write, partition_id: int) -> Iterator[pa.RecordBatch]:
        rows, place = self._plan.rows, f"{write.name}.{partition_id}"
        for start in range(0, rows, 10):
            if start and self._rng.random() < 0.3:
                self._runtime.sleep(0.2)
            numbers = range(start, min(start + 10, rows))
            bodies = pa.array([f"{place}.{row}".encode() for row in numbers], pa.binary())
            yield pa.record_batch({"body": bodies, "shardingKey": pa.array([f"key-{row % 5}" for row in numbers])})

    def send(
        self, attempt: Attempt, recorder: Recorder, rows: Iterator[Any], write_id: str, resumption: Resumption
    ) -> None:
        routes = RouteFinder(
            self._options,
            self._instance,
            clock=self._runtime.clock,
            runtime=self._runtime,
            rng=self._rng,
            fixed_queues=self._fixed_queues,
            broker_names=resumption.broker_names,
        )

        def send_rows(
            batches: Iterator[pa.RecordBatch], *, row_id_name: str = write_id, rules: SendRules | None = None
        ) -> None:
            batcher = RowBatchers(routes, recorder, row_id_name, rules or AT_LEAST_ONCE).source()
            assert isinstance(batcher, ArrowBatcher)
            # The look-up of topic settings uses separate threads.
            batcher.check_keys = None
            attempt.ids = batcher.unique_ids.prefix.hex().upper()[:20]
            ResolvingSender(routes, recorder, resumption=resumption).write(batches, JoiningBatcher(batcher, TOPIC))

        send_missing(send_rows, rows, write_id, resumption)

    def sums(self, recorder: Recorder) -> tuple[set[str], int]:
        measures = Measures.unpack(recorder.snapshot().packed)
        return set(measures.brokers), measures.total(Metric.RECOVERED)

    def close(self, attempt: Attempt | None = None) -> None:
        if attempt is not None:
            self._note_sends(attempt)
        self._instance.close()

    def _note_sends(self, attempt: Attempt) -> None:
        for sent in self._transport.attempts:
            if sent.batch.topic == TOPIC:
                for message in messages_in(sent.batch):
                    row = int(message.body.decode().split(".")[2])
                    attempt.first_ends.setdefault(row, sent.ended)


def options_of(plan: EffectivelyOncePlan) -> dict[str, Any]:
    """Return the options of a write, without servers."""
    return {
        "topic": TOPIC,
        "delivery": "effectivelyOnce",
        "transactional_id": ID,
        "transaction_topic": LOG,
        "fence_ms": int(FENCE * 1000),
        "delivery_timeout_ms": 10_000,
        "batch_bytes": 1024,
        "heartbeat_broker_interval": 3_000,
        "poll_name_server_interval": 3_000,
        **plan.options,
    }


class _Log(DecisionLog):
    known: list[frozenset[str]]

    def claim_home(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> int:
        self.known.append(frozenset(queue.broker_name for queue in self.records.queues(brokers)))
        return super().claim_home(brokers, write, broker_names)


class _Driver:
    """One process that plans and completes a write, and starts its tasks."""

    def __init__(self, controller: Controller, write: Write, process: str) -> None:
        self.process = process
        self.completed = False
        self.ended = False
        self.tasks: list[str] = []
        self._controller = controller
        self._write = write

    def run(self) -> None:
        """Complete the write, or end with an error."""
        world = self._controller.world
        try:
            self._complete()
            self.completed = True
        except RocketMQError as exc:
            world.note(f"{self.process}: {type(exc).__name__}: {exc}")
        finally:
            self.ended = True

    def _complete(self) -> None:
        client, world, write = self._controller.new_client(self.process), self._controller.world, self._write
        log = _Log(LOG_ID, LOG)
        log.known = self._controller.history.known
        try:
            named = write if self._controller.plan.batch else None
            plan = plans.plan_write(client.brokers, log, named, self._controller.fixed_queues)
            planned_at = world.now
            running = [_Partition(self, plan, planned_at, part) for part in range(self._controller.plan.partitions)]
            while not all(part.ended for part in running):
                for part in running:
                    part.look()
                world.wait([], self._controller.every)
            began = world.now
            done = [part.done for part in running]
            names = set().union(*(part.broker_names for part in running))
            report = ends.complete(client.brokers, log, plan, write, [one for one in done if one], names)
            if report != ResumeReport():
                # Else another driver had completed the write.
                self._controller.history.ends[write] = began, report
            world.note(f"{self.process}: {write}: {report}")
        finally:
            client.close()


class _Partition:
    """Starts tasks of one partition until one succeeds."""

    def __init__(self, driver: _Driver, plan: ResumePlan, planned_at: float, partition_id: int) -> None:
        self.ended = False
        # None: the write was completed before.
        self.done: Attempted | None = None
        self.broker_names: set[str] = set()
        self._driver = driver
        self._plan = plan
        self._planned_at = planned_at
        self._id = partition_id
        self._tasks: list[_Task] = []
        self._failures = 0

    def look(self) -> None:
        """Start a task if none runs, or although one still runs; raise after too many failures."""
        controller, task = self._driver._controller, self._tasks[-1] if self._tasks else None
        if task is not None and task.succeeded:
            self.ended, self.done, self.broker_names = True, task.done, task.broker_names
            return
        if task is None or task.error is not None or controller.world.is_dead(task.process):
            self._failures += 1
            if self._failures > _MOST_TASKS:
                raise RocketMQError(f"partition {self._id} has failed {_MOST_TASKS} times: {task and task.error}")
            self._start()
        elif len(self._tasks) < _MOST_TASKS and controller.draw("second task", 0.4 * controller.every):
            controller.counts["second task"] += 1
            process = task.process
            self._start()
            longest = 8.0 if controller.draw("zombie", 0.5) else 1.0
            controller.counts["zombie"] += longest > 1.0
            controller.world.call_later(longest * controller.world.rng.random(), lambda: controller.kill(process))

    def _start(self) -> None:
        controller, driver = self._driver._controller, self._driver
        process = f"{driver.process} task {self._id}.{len(self._tasks)}"
        number = len(controller.history.attempts)
        attempt = Attempt(driver._write, self._id, number, self._planned_at)
        task = _Task(controller, self._plan, attempt, process)
        self._tasks.append(task)
        driver.tasks.append(process)
        controller.world.start(task.run, process, process)
        if controller.draw("task crash", 0.4):
            controller.strike(process, float("inf"), "task crash")
        if controller.draw("task freeze", 0.3):
            controller.strike(process, controller.world.rng.choice((0.5, 3.0)), "task freeze")


class _Task:
    """One attempt at a partition, in a separate process."""

    def __init__(self, controller: Controller, plan: ResumePlan, attempt: Attempt, process: str) -> None:
        self.process = process
        self.succeeded = False
        self.done: Attempted | None = None
        self.error: RocketMQError | None = None
        self.broker_names: set[str] = set()
        self._controller = controller
        self._plan = plan
        self._attempt = attempt
        controller.history.attempts.append(attempt)

    def run(self) -> None:
        """Send the rows that are missing, or end with an error."""
        client, attempt = self._controller.new_client(self.process), self._attempt
        recorder = Recorder(QUERY, attempt.write.batch_id, attempt.partition_id, epoch_offset=EPOCH)
        try:
            attempt.connected = attempts.Attempt(client.brokers, self._plan, attempt.write, attempt.partition_id)
            rows = client.rows(attempt.write, attempt.partition_id)
            self.done = attempt.connected.run(recorder, rows, partial(client.send, attempt, recorder))
            self.broker_names, recovered = client.sums(recorder)
            self._controller.history.recovered_rows += recovered
            self.succeeded = True
        except RocketMQError as exc:
            self._controller.world.note(f"{self.process}: {type(exc).__name__}: {exc}")
            self.error = exc
        finally:
            client.close(attempt)
