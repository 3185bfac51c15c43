"""Exactly-once writes to modelled brokers, with Spark's part: drivers and tasks that fail, freeze and overlap.

Everything above the transport is the connector's own: plan, tasks, half messages, decision log, commits, recoveries and
rollbacks. Rows of different attempts at a partition differ, as if the input were not deterministic.
`tests.simulation.two_phase` runs commits on a simulated network.

``python -m tests.simulation --kind exactly-once --seeds 1000000`` runs many schedules.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa

from rocketmq_spark.deliveries.base import OpenInstance, PartitionResult, PartitionTask, TaskResults, WriteReport
from rocketmq_spark.deliveries.exactly_once.delivery import ExactlyOnce
from rocketmq_spark.deliveries.exactly_once.fence import forget_checks
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.metrics import Recorder, WriteSummary
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from tests.simulation.cluster import BaseRun, Warnings, run_to_end
from tests.simulation.exactly_once_checks import Committed, is_allowed, problems_of
from tests.simulation.hostile import KEY
from tests.simulation.hostile import KINDS as OF_HOSTILE_USER
from tests.simulation.hostile_sender import HostileSender
from tests.simulation.model import ModelClient, ModelController
from tests.simulation.model_brokers import EVENTS, OF_ENDS, REQUESTS, SETTINGS, ModelCluster
from tests.simulation.model_client import Fate, ModelTransport
from tests.simulation.spark import FATES, ID, LOG, TOPIC, Attempt, Driver, History, Log, SparkPlan
from tests.simulation.world import World

_TIMEOUT_MS = 4_000
# The most seconds by which a wall clock is wrong, and still right enough for the timeout.
_RIGHT_ENOUGH = 0.15

# Inputs may differ in any way. There are no rows with equal contents, because rows name their attempts.
INPUTS = ("other order", "other cuts", "other partitions", "slow input")
OF_PROCESSES = ("clocks", "other plan")
"""Wrong wall clocks; a commit by another plan than that of the tasks, as PySpark 4.3 does."""
KINDS = (
    *(*REQUESTS, *OF_ENDS, *EVENTS, *SETTINGS, *FATES, *INPUTS, *OF_PROCESSES, *OF_HOSTILE_USER),
    *("hostile halves", "no key"),
)
"""All faults. Without a key, the promise is only about users who do not write to the log."""
HOLES = ("promotion", "async flush")
"""Faults after which acknowledged rows are missing. No seed enables them."""


@dataclass
class ExactlyOncePlan(SparkPlan):
    """Exactly-once writes to modelled brokers."""

    @classmethod
    def of_seed(cls, seed: int) -> ExactlyOncePlan:
        """Draw a plan."""
        rng = random.Random(f"exactly-once {seed}")
        plan = cls(
            seed,
            tuple(
                kind
                for kind in KINDS
                if rng.random() < (0.35 if kind in FATES else rng.choice((0.05, 0.2, 0.4))) and kind not in HOLES
            ),
            brokers=rng.choice((1, 1, 2, 2, 3)),
            queues=rng.choice((1, 1, 2)),
            tasks=rng.choice((1, 1, 2, 3)),
            rows=rng.choice((1, 3, 6)),
            partitions=rng.choice((1, 1, 1, 2)),
            identity=rng.choice(("stream", "stream", "batch", "foreach_batch", "thread")),
            options={"send_msg_timeout": rng.choice((500, 1_000)), "ordered": rng.random() < 0.2},
            horizon=rng.choice((3.0, 12.0)),
        )
        signs = "no key" not in plan.faults and ("hostile log" in plan.faults or rng.random() < 0.3)
        return replace(plan, options=plan.options | ({"transactional_key": KEY} if signs else {}))


@dataclass
class ExactlyOnceRun(BaseRun):
    """Writes that were run."""

    plan: ExactlyOncePlan
    history: History


def run_exactly_once(plan: ExactlyOncePlan) -> ExactlyOnceRun:
    """Run writes and check what consumers see; problems are texts."""
    world = World(plan.seed, longest=20_000.0)
    cluster = ModelCluster(world, plan)
    history = History()
    fates: dict[str, Fate] = {}
    forget_checks()
    for broker in cluster.brokers.values():
        broker.transaction_timeout = world.rng.choice((0.5, 3.0, 6.0))
        if TOPIC not in broker.topics:
            # An exactly-once write needs a topic. Other brokers get it later.
            later = 0.0 if broker.name == "b0" else plan.horizon * world.rng.random()
            world.call_later(later, functools.partial(broker.topics.update, {TOPIC: plan.queues}))
    drawn = tuple(plan.options.items())

    def new_client(process: str) -> ModelClient:
        ahead = 0.0
        if controller.draw("clocks", 0.5):
            controller.counts["clocks"] += 1
            ahead = world.rng.choice((_RIGHT_ENOUGH, -_RIGHT_ENOUGH, 1.0, -1.0, 30.0, -30.0))
        return ModelClient(ModelTransport(cluster, process, fates, ahead), _options(drawn), controller)

    # Those of all brokers: tasks of ordered writes wait for them.
    queues = [MessageQueue(TOPIC, name, number) for name in cluster.brokers for number in range(plan.queues)]
    controller = _Controller(plan, world, history, new_client, queues, functools.partial(is_allowed, plan))
    controller.fates = fates
    cluster.start_events()
    user = HostileSender(world, cluster, plan)
    user.start()
    committed: list[Committed] = []

    def check() -> list[str]:
        committed.extend(map(Committed.of, cluster.all_entries()))
        return problems_of(plan, history, committed)

    with Warnings(world, "rocketmq_spark.producer", history.warnings):
        problems = run_to_end(world, controller.run, "controller", check)
    return ExactlyOnceRun(world, controller.counts + cluster.counts + user.counts, problems, plan, history)


class _Controller(ModelController):
    plan: ExactlyOncePlan

    def plan_job(self, driver: Driver, client: Any) -> ExactlyOnceJob:
        """Plan the write of a driver, in its process."""
        return ExactlyOnceJob(self, driver, client)

    def bodies(self, number: int, attempt: Attempt) -> list[str]:
        """Return the rows of a write, as an attempt at one of its partitions reads them."""
        rows = range(self.plan.rows * self.plan.partitions)[attempt.partition_id :: attempt.partitions]
        return [f"{number}.{attempt.number}.{row}" for row in rows]


@functools.lru_cache(maxsize=64)
def _options(drawn: tuple[tuple[str, Any], ...]) -> SinkOptions:
    return SinkOptions.of(
        name_server=("10.1.0.1:9876",),
        client_ip="10.0.0.1",
        topic=TOPIC,
        delivery="exactlyOnce",
        transactional_id=ID,
        transaction_topic=LOG,
        transaction_timeout_ms=_TIMEOUT_MS,
        delivery_timeout_ms=10_000,
        **dict(drawn),
    )


class _Process:
    """What a process of a driver has: its brokers, and the log that it has read so far."""

    def __init__(self, brokers: Brokers, history: History) -> None:
        self.brokers = brokers
        self.log = Log(ID, LOG, keys_of(brokers.options))
        self.log.known = history.known


class _Delivery(ExactlyOnce):
    """The delivery, which gets the brokers of its process instead of a client instance."""

    @classmethod
    @contextmanager
    def _opened(cls, options: SinkOptions, open_instance: OpenInstance) -> Iterator[tuple[Brokers, DecisionLog]]:
        process = cast(_Process, open_instance())
        yield process.brokers, process.log


class ExactlyOnceJob:
    """An exactly-once write, as one driver has planned it."""

    def __init__(self, controller: _Controller, driver: Driver, client: ModelClient) -> None:
        self._controller, self._driver, self._brokers = controller, driver, client.brokers
        self._process = _Process(client.brokers, controller.history)
        self._options = client.brokers.options
        self._write = driver.identify(_Delivery, self._options)
        self._delivery = self._planned()
        # PySpark 4.3 plans each micro-batch twice, and commits by the second plan, perhaps in another process.
        self._other = controller.draw("other plan", 0.6)
        controller.counts["other plan"] += self._other

    def _planned(self) -> _Delivery:
        options = self._options
        if self._write is not None and not self._write.query:
            options = replace(options, write_id=self._write.name)
        return _Delivery.plan(options, self._open, self._write, self._controller.fixed_queues)

    def _open(self) -> Any:
        return self._process

    def _committer(self) -> _Delivery:
        if not self._other:
            return self._delivery
        self._process = _Process(self._brokers, self._controller.history)
        return self._planned()

    def write_partition(
        self, client: ModelClient, attempt: Attempt, recorder: Recorder, rows: Iterator[pa.RecordBatch]
    ) -> PartitionResult | None:
        """Store the rows as half messages."""
        return self._delivery.write_partition(PartitionTask(recorder, rows, self._open, client.send(attempt, recorder)))

    def complete(self, results: Sequence[Any], receipt: WriteSummary) -> WriteReport | None:
        """Commit the half messages."""
        report = self._committer().complete(self._open, self._results(results))
        # Else another driver had completed it.
        return None if report == CommitReport() else report

    def abort(self, results: Sequence[Any]) -> None:
        """Roll the half messages of finished tasks back."""
        self._committer().abort(self._open, self._results(results))

    def _results(self, results: Sequence[Any]) -> TaskResults[Any]:
        return TaskResults(results, *self._driver.names())
