"""Spark's part of effectively-once writes: drivers and tasks that fail, freeze, overlap and outlive their replacement.

Each driver and each task is a process with a separate client. The controller starts a driver for each micro-batch, and
another one after a failure or a freeze. A driver starts a task for each partition, and another one after a failure, or
while the first one still runs. Spark does not stop every task that it has replaced: an executor may be cut off from the
driver, and a stage may be repeated beside running tasks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from rocketmq_spark.deliveries.base import Delivery, PartitionResult, Send, Write, WriteReport
from rocketmq_spark.deliveries.effectively_once import attempt as attempts
from rocketmq_spark.deliveries.effectively_once import complete as ends
from rocketmq_spark.deliveries.effectively_once import plan as plans
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport
from rocketmq_spark.deliveries.effectively_once.delivery import EffectivelyOnce
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.errors import InputChangedError, RocketMQError
from rocketmq_spark.metrics import Recorder, WriteSummary, merge_into
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.spark.writer import names_of_task
from tests.simulation.cluster import BasePlan
from tests.simulation.world import EPOCH, World

TOPIC = "T"
QUERY = "query"
LOG = "decisions"
ID = "job"
# Ids of such logs have a "#". The homes of this one are those for which the tests' seeds were found.
LOG_ID = f"{ID}-9#{TOPIC}"
# ``fenceMs``, seconds.
FENCE = 2.0

# What happens to drivers and tasks. A replaced task ends within a second, except a zombie. An orphan is a task that
# outlives its driver.
FATES = (
    *("driver crash", "driver freeze", "second driver", "task crash", "task freeze", "second task", "zombie", "orphan"),
)
# What is different at the next reading of the input.
INPUTS = ("other order", "other cuts", "other partitions", "equal rows", "slow input")
# How a write gets its identity: by the option ``writeId``, as a micro-batch of a query, or by `foreach_batch`. Spark
# Connect and threads of the user have no local properties.
IDENTITIES = ("batch", "stream", "foreach_batch", "thread")
HOLES = ("other partitions",)
"""Faults that the protocol does not survive, and no seed enables; see `tests.simulation.test_model`."""
OF_LOSS = {"async flush", "promotion", "retention", "lost end"}
"""Faults after which a write may end with an error."""

# Spark's local properties of a thread that runs a micro-batch.
_BATCH_ID = "streaming.sql.batchId"
_QUERY_ID = "sql.streaming.queryId"

# The most attempts at a micro-batch, and at a task. The last ones come after the faults.
_MOST_DRIVERS = 40
_MOST_TASKS = 4
_RESTART = 0.5
# The user gives up after this number of drivers has failed with an error that a fault allows.
_GIVES_UP = 3
# How long a zombie or an orphan runs on, seconds. The fence is shorter.
_OUTLIVES = 30.0


@dataclass
class SparkPlan(BasePlan):
    """Effectively-once writes: `tasks` micro-batches of `partitions` times `rows` rows, one after the other.

    Groups of `equal` rows have the same content.
    """

    partitions: int = 2
    # How a write gets its identity: see `IDENTITIES`.
    identity: str = "stream"
    equal: int = 1
    # The least digits of a row's number. Short rows have no prepared collisions.
    digits: int = 1

    def bodies(self, number: int) -> list[str]:
        """Return the rows of a write. Consumers see no more of them than this."""
        rows = range(self.rows * self.partitions)
        return [f"{number}.{str(row // self.equal).zfill(self.digits)}" for row in rows]

    def write(self, number: int) -> Write:
        """Return a write by its number."""
        queries = {"batch": "", "stream": QUERY}
        return Write(str(number), queries.get(self.identity, f"{ID}#{TOPIC}"))


@dataclass(eq=False)
class Attempt:
    """One attempt at a partition."""

    write: Write
    partition_id: int
    # The number of partitions that its driver has.
    partitions: int
    number: int
    # Its driver, by number, and its id in the log; empty before it has connected.
    driver: int = 0
    id: str = ""
    # Its rows in the order of its input.
    bodies: list[str] = field(default_factory=list)
    # When the first request with each row ended, by unique id.
    first_ends: dict[str, float] = field(default_factory=dict)


@dataclass
class Ending:
    """The end of a write by its driver: when it began, what it reported, and the receipt of the write."""

    began: float
    report: WriteReport
    receipt: WriteSummary


@dataclass
class History:
    """What the controller saw."""

    done: list[Write] = field(default_factory=list)
    ends: dict[Write, Ending] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    # Of the driver that has failed last.
    error: RocketMQError | None = None
    # The write that the user gave up, because it failed again and again.
    stopped: Write | None = None
    recovered_rows: int = 0
    drivers: int = 0
    # The brokers that each driver knew which began a log.
    known: list[frozenset[str]] = field(default_factory=list)
    # Warnings of the connector, with their times.
    warnings: list[tuple[float, str]] = field(default_factory=list)


class Job(Protocol):
    """A write, as one driver has planned it: what it does with the connector's code of the delivery."""

    def write_partition(
        self, client: Any, attempt: Attempt, recorder: Recorder, rows: Iterator[pa.RecordBatch]
    ) -> PartitionResult | None:
        """Write a partition in the process of a task; return None if the write was completed before."""

    def complete(self, results: Sequence[Any], receipt: WriteSummary) -> WriteReport | None:
        """End the write; return None if another driver had completed it."""

    def abort(self, results: Sequence[Any]) -> None:
        """Undo what can be undone of a failed write."""


class Client(Protocol):
    """What one process has of the connector."""

    @property
    def brokers(self) -> Brokers: ...

    def rows(self, bodies: Sequence[str], *, slow: bool, cuts: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Return rows as record batches."""

    def send(self, attempt: Attempt, recorder: Recorder) -> Send:
        """Return what sends the rows of an attempt."""

    def close(self) -> None:
        """End the work of the process."""


class Controller:
    """Starts drivers until each write is complete, as Spark and the user do."""

    # How often processes look at others, seconds.
    every: ClassVar[float] = 0.05

    def plan_job(self, driver: Driver, client: Any) -> Job:
        """Plan the write of a driver, in its process."""
        return EffectivelyOnceJob(self, driver, client)

    def __init__(
        self,
        plan: SparkPlan,
        world: World,
        history: History,
        new_client: Callable[[str], Client],
        queues: Sequence[MessageQueue],
        allowed: Callable[[RocketMQError], bool] = lambda _: False,
    ) -> None:
        self.plan = plan
        self.world = world
        self.history = history
        self.new_client = new_client
        # The queues of ordered writes.
        self.fixed_queues = queues if plan.options.get("ordered") else None
        self.counts: Counter[str] = Counter()
        # Whether a fault of the plan allows an error of a driver, after which the user may give up.
        self._allowed = allowed

    def run(self) -> None:
        """Complete the writes in their order, and wait until late requests have arrived."""
        for number in range(self.plan.tasks):
            if not self._complete(number):
                break
        self.world.wait([], 60.0)

    def _complete(self, number: int) -> bool:
        """Complete a write; return False if the user gives up."""
        write, refusals = self.plan.write(number), 0
        for _ in range(_MOST_DRIVERS):
            if self._attempt(number):
                self.history.done.append(write)
                # Spark may die before it has recorded the end, and runs the micro-batch again.
                if self.draw("driver crash", 0.3):
                    continue
                return True
            error = self.history.error
            allowed = error is not None and self._allowed(error)
            # Another attempt would not help after an InputChangedError, either.
            if self.world.now > self.plan.horizon and (allowed or isinstance(error, InputChangedError)):
                refusals += 1
                if refusals >= _GIVES_UP:
                    if allowed:
                        self.history.stopped = write
                        self.counts[f"stopped: {type(error).__name__}"] += 1
                    else:
                        # An earlier driver may have completed it, but the query cannot continue.
                        self.history.done = [done for done in self.history.done if done != write]
                    return False
            self.world.wait([], _RESTART)
        # An earlier driver may have completed it.
        return write in self.history.done

    def _attempt(self, number: int) -> bool:
        """Run a driver, sometimes with a second one beside it; return whether one has completed the write."""
        drivers = [self._start_driver(number)]
        if self.draw("second driver", 0.4):
            self.world.wait([], self.world.rng.random() * self.world.rng.choice((0.1, 1.0, 5.0)))
            self.counts["second driver"] += 1
            drivers.append(self._start_driver(number))
        while not any(driver.completed for driver in drivers):
            running = [driver for driver in drivers if not driver.ended and not self.world.is_dead(driver.process)]
            # The executors of a frozen driver notice that it is gone. It may wake and start new tasks.
            if all(self.world.is_frozen(driver.process) for driver in running):
                break
            self.world.wait([], 2 * self.every)
        # The tasks of a dead driver end, too.
        for process in [process for driver in drivers for process in driver.tasks]:
            longest = _OUTLIVES if self.draw("orphan", 0.5) else 1.0
            self.counts["orphan"] += longest > 1.0
            self.world.call_later(longest * self.world.rng.random(), partial(self.kill, process))
        return any(driver.completed for driver in drivers)

    def _start_driver(self, number: int) -> Driver:
        self.history.drivers += 1
        self.history.error = None
        driver = Driver(self, number, self.history.drivers)
        self.world.start(driver.run, driver.process, driver.process)
        if self.draw("driver crash", 0.5):
            self.strike(driver.process, float("inf"), "driver crash")
        elif self.draw("driver freeze", 0.4):
            self.strike(driver.process, self.world.rng.choice((5.0, 20.0)), "driver freeze")
        return driver

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

    def partitions(self) -> int:
        """Draw the number of partitions of a driver."""
        if self.draw("other partitions", 0.5):
            self.counts["other partitions"] += 1
            return self.world.rng.randint(1, self.plan.partitions + 1)
        return self.plan.partitions

    def bodies(self, number: int, attempt: Attempt) -> list[str]:
        """Return the rows of a partition. With one partition more or less, some rows change theirs."""
        return self.plan.bodies(number)[attempt.partition_id :: attempt.partitions]

    def rows(self, client: Client, number: int, attempt: Attempt) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition as one reading of the input gives them."""
        rng, bodies = self.world.rng, self.bodies(number, attempt)
        if self.draw("other order", 0.8):
            self.counts["other order"] += 1
            rng.shuffle(bodies)
        attempt.bodies = bodies
        cuts = rng.choices(range(len(bodies) + 1), k=rng.randrange(4)) if self.draw("other cuts", 0.8) else []
        self.counts["other cuts"] += bool(cuts)
        slow = self.draw("slow input", 0.7)
        self.counts["slow input"] += slow
        return client.rows(bodies, slow=slow, cuts=cuts)


class Log(DecisionLog):
    """A log that keeps which brokers the drivers knew that have begun one."""

    known: list[frozenset[str]]

    def claim_home(self, brokers: Brokers, write: Write, broker_names: Collection[str]) -> int:
        self.known.append(frozenset(queue.broker_name for queue in self.records.queues(brokers)))
        return super().claim_home(brokers, write, broker_names)


class Driver:
    """One process that plans and completes a write, and starts its tasks."""

    def __init__(self, controller: Controller, number: int, driver: int) -> None:
        self.id = driver
        self.process = f"driver {driver}"
        self.completed = False
        self.ended = False
        self.tasks: list[str] = []
        self.controller = controller
        self.number = number
        self.write = controller.plan.write(number)
        self.partitions = controller.partitions()
        # What `identify` has returned.
        self.identity: Write | None = None

    def identify(self, delivery: type[Delivery[Any]], options: SinkOptions) -> Write | None:
        """Return the identity of the write, as the connector finds it before the tasks; None for a stream."""
        kind, name = self.controller.plan.identity, str(self.number)
        if kind == "batch":
            self.identity = delivery.identify(replace(options, write_id=name), None)
        elif kind != "stream":
            self.identity = delivery.identify(options, self.number)
        return self.identity

    def names(self) -> tuple[str, int]:
        """Return the query and the micro-batch, as its tasks know them."""
        has_properties = self.controller.plan.identity in ("stream", "foreach_batch")
        properties = {_QUERY_ID: QUERY, _BATCH_ID: str(self.number)} if has_properties else {}
        return names_of_task(self.identity, properties.get, f"save of {self.process}")

    def run(self) -> None:
        """Complete the write, or end with an error."""
        world = self.controller.world
        try:
            self._complete()
            self.completed = True
        except RocketMQError as exc:
            self.controller.history.error = exc
            world.note(f"{self.process}: {type(exc).__name__}: {exc}")
        finally:
            self.ended = True

    def _complete(self) -> None:
        controller, write = self.controller, self.write
        client, world, history = controller.new_client(self.process), controller.world, controller.history
        try:
            job = controller.plan_job(self, client)
            running = [_Partition(self, job, part) for part in range(self.partitions)]
            try:
                while not all(part.ended for part in running):
                    for part in running:
                        part.look()
                    world.wait([], controller.every)
            except RocketMQError:
                job.abort([part.done for part in running if part.done])
                raise
            began = world.now
            receipt = WriteSummary()
            for part in running:
                merge_into(receipt, part.recorder.snapshot())
            report = job.complete([part.done for part in running if part.done], receipt)
            if report is not None:
                history.ends[write] = Ending(began, report, receipt)
            world.note(f"{self.process}: {write}: {report}")
        finally:
            client.close()


class EffectivelyOnceJob:
    """An effectively-once write."""

    def __init__(self, controller: Controller, driver: Driver, client: Client) -> None:
        self._brokers = client.brokers
        self._driver = driver
        self._log = Log(LOG_ID, LOG, keys=keys_of(client.brokers.options))
        self._log.known = controller.history.known
        write = driver.identify(EffectivelyOnce, client.brokers.options)
        batch = None if write is None or write.query else write
        self._plan = plans.plan_write(client.brokers, self._log, batch, controller.fixed_queues)

    def write_partition(
        self, client: Client, attempt: Attempt, recorder: Recorder, rows: Iterator[pa.RecordBatch]
    ) -> PartitionResult | None:
        """Send the rows that are missing."""
        write = self._plan.write_of(recorder.write_id, recorder.batch_id)
        connected = attempts.Attempt(client.brokers, self._plan, write, attempt.partition_id)
        attempt.id = connected.id
        return connected.run(recorder, rows, client.send(attempt, recorder))

    def complete(self, results: Sequence[Any], receipt: WriteSummary) -> WriteReport | None:
        """Record that all rows are stored."""
        write = self._driver.identity or self._plan.write_of(*self._driver.names())
        report = ends.complete(self._brokers, self._log, self._plan, write, results, set(receipt.to_dict()))
        return None if report == ResumeReport() else report

    def abort(self, results: Sequence[Any]) -> None:
        """Do nothing."""


class _Partition:
    """Starts tasks of one partition until one succeeds."""

    def __init__(self, driver: Driver, job: Job, partition_id: int) -> None:
        self.ended = False
        # None: the write was completed before.
        self.done: PartitionResult | None = None
        self.recorder = Recorder(*driver.names(), partition_id, epoch_offset=EPOCH)
        self._driver = driver
        self._job = job
        self._id = partition_id
        self._tasks: list[_Task] = []
        self._failures = 0
        # When the driver starts another task although the last one runs.
        self._second_at = math.inf

    def look(self) -> None:
        """Start a task if none runs, or although one still runs; raise after too many failures."""
        controller, task = self._driver.controller, self._tasks[-1] if self._tasks else None
        # Spark takes the result of a task that it has replaced, if that comes first.
        first = next((each for each in self._tasks if each.succeeded), None)
        if first is not None and not self.ended:
            self.ended, self.done, self.recorder = True, first.done, first.recorder
        if self.ended:
            return
        if task is None or task.error is not None or controller.world.is_dead(task.process):
            self._failures += 1
            if self._failures > _MOST_TASKS:
                error = task.error if task is not None else None
                kind = RocketMQError if error is None else type(error)
                raise kind(f"partition {self._id} has failed {_MOST_TASKS} times: {error}") from error
            self._start()
        elif controller.world.now >= self._second_at:
            controller.counts["second task"] += 1
            process = task.process
            self._start()
            longest = _OUTLIVES if controller.draw("zombie", 0.5) else 1.0
            controller.counts["zombie"] += longest > 1.0
            controller.world.call_later(longest * controller.world.rng.random(), lambda: controller.kill(process))

    def _start(self) -> None:
        driver, controller = self._driver, self._driver.controller
        process = f"{driver.process} task {self._id}.{len(self._tasks)}"
        number = len(controller.history.attempts)
        attempt = Attempt(driver.write, self._id, driver.partitions, number, driver.id)
        task = _Task(driver, self._job, attempt, process)
        self._tasks.append(task)
        driver.tasks.append(process)
        second = len(self._tasks) < _MOST_TASKS and controller.draw("second task", 0.6)
        soon = controller.world.rng.choice((0.0, 0.3, 3.0)) * controller.world.rng.random()
        self._second_at = controller.world.now + soon if second else math.inf
        controller.world.start(task.run, process, process)
        if controller.draw("task crash", 0.4):
            controller.strike(process, float("inf"), "task crash")
        if controller.draw("task freeze", 0.3):
            controller.strike(process, controller.world.rng.choice((0.5, 3.0, 8.0)), "task freeze")


class _Recorder(Recorder):
    """A recorder that also counts rows which the task has found stored."""

    recovered = 0

    def record_recovered(self, queue: MessageQueue, rows: int, first: int, last: int) -> None:
        self.recovered += rows
        super().record_recovered(queue, rows, first, last)


class _Task:
    """One attempt at a partition, in a separate process."""

    def __init__(self, driver: Driver, job: Job, attempt: Attempt, process: str) -> None:
        self.process = process
        self.succeeded = False
        self.done: PartitionResult | None = None
        self.error: RocketMQError | None = None
        self.recorder = _Recorder(*driver.names(), attempt.partition_id, epoch_offset=EPOCH)
        self._driver = driver
        self._job = job
        self._attempt = attempt
        driver.controller.history.attempts.append(attempt)

    def run(self) -> None:
        """Send the rows that are missing, or end with an error."""
        controller, attempt = self._driver.controller, self._attempt
        client = controller.new_client(self.process)
        try:
            rows = controller.rows(client, self._driver.number, attempt)
            self.done = self._job.write_partition(client, attempt, self.recorder, rows)
            controller.history.recovered_rows += self.recorder.recovered
            self.succeeded = True
        except RocketMQError as exc:
            controller.world.note(f"{self.process}: {type(exc).__name__}: {exc}")
            self.error = exc
        finally:
            client.close()
