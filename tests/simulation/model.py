"""Effectively-once writes to modelled brokers, so that a schedule takes milliseconds.

Everything above the transport is the connector's own, and so are the drivers and tasks of the controller.

``python -m tests.simulation --kind model --seeds 1000000`` runs many schedules.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

from rocketmq_spark.deliveries.base import Send
from rocketmq_spark.deliveries.effectively_once.tokens import TOKEN_LENGTH
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ATTEMPT, UNIQ_KEY
from rocketmq_spark.options.sink import SinkOptions
from tests.simulation.cluster import Warnings, run_to_end
from tests.simulation.delivery_checks import Copy, is_allowed, outcomes_of, problems_of
from tests.simulation.effectively_once import EffectivelyOnceRun
from tests.simulation.hostile import HASHES, KEY, HostileUser
from tests.simulation.hostile import KINDS as OF_HOSTILE_USER
from tests.simulation.model_brokers import EVENTS, LOST_END, REQUESTS, SETTINGS, Entry, ModelCluster, Sender
from tests.simulation.model_client import Fate, ModelBrokers, ModelTransport
from tests.simulation.spark import FATES, HOLES, INPUTS, LOG, TOPIC, Attempt, Controller, History, SparkPlan
from tests.simulation.world import World
from tests.simulation.write_client import WriteClient, options_of

_DRAWN = (*REQUESTS, *EVENTS, *SETTINGS, *FATES, *INPUTS, *OF_HOSTILE_USER)
# Drawn apart, so that the other draws of a seed stay.
_ALSO_DRAWN = (LOST_END, HASHES)
KINDS = (*_DRAWN, *_ALSO_DRAWN)
"""All faults."""
# How often.
_ALSO = 0.1
# The digits of rows with prepared collisions.
LONG = 24


@dataclass
class ModelPlan(SparkPlan):
    """Effectively-once writes to modelled brokers."""

    @classmethod
    def of_seed(cls, seed: int) -> ModelPlan:
        """Draw a plan."""
        rng = random.Random(f"model {seed}")
        plan = cls(
            seed,
            tuple(kind for kind in _DRAWN if rng.random() < rng.choice((0.05, 0.2, 0.4)) and kind not in HOLES),
            brokers=rng.choice((1, 1, 2, 2, 3)),
            queues=rng.choice((1, 1, 2)),
            tasks=rng.choice((1, 1, 2)),
            rows=rng.choice((1, 3, 6)),
            partitions=rng.choice((1, 1, 1, 2)),
            identity=_identity_of(rng.random()),
            options={"send_msg_timeout": rng.choice((500, 1_000))},
            horizon=rng.choice((3.0, 12.0)),
        )
        if plan.tasks == 2 and rng.random() < 0.3:
            plan = replace(plan, tasks=3)
        if "hostile log" in plan.faults:
            plan = replace(plan, options=plan.options | {"transactional_key": KEY})
        if "equal rows" in plan.faults:
            plan = replace(plan, equal=rng.choice((2, 6)))
        rng = random.Random(f"model, {_ALSO_DRAWN} {seed}")
        also = tuple(kind for kind in _ALSO_DRAWN if rng.random() < _ALSO)
        return replace(plan, faults=plan.faults + also, digits=LONG if HASHES in also else 1)


def _identity_of(number: float) -> str:
    limits = {"batch": 0.3, "foreach_batch": 0.5, "thread": 0.65, "stream": 1.0}
    return next(name for name, limit in limits.items() if number < limit)


def run_model(plan: ModelPlan) -> EffectivelyOnceRun:
    """Run writes and check what consumers see; problems are texts."""
    world = World(plan.seed, longest=7_200.0)
    cluster = ModelCluster(world, plan)
    history = History()
    fates: dict[str, Fate] = {}

    def new_client(process: str) -> ModelClient:
        return ModelClient(ModelTransport(cluster, process, fates), _options(tuple(plan.options.items())), controller)

    queues = [MessageQueue(TOPIC, name, number) for name in cluster.brokers for number in range(plan.queues)]
    controller = ModelController(plan, world, history, new_client, queues, functools.partial(is_allowed, plan))
    controller.fates = fates
    cluster.start_events()
    user = HostileUser(world, cluster, plan)
    user.start()
    stored: list[Copy] = []

    def log() -> list[MessageExt]:
        return [entry.message for entry in cluster.entries(LOG) if entry.sender is None or entry.sender.process]

    def check() -> list[str]:
        stored.extend(copies_of(cluster))
        return problems_of(plan, history, stored, log())

    with Warnings(world, "rocketmq_spark.producer", history.warnings):
        problems = run_to_end(world, controller.run, "controller", check)
    faults = controller.counts + cluster.counts + user.counts + outcomes_of(plan, stored, log())
    return EffectivelyOnceRun(world, faults, problems, plan, history)


def copies_of(cluster: ModelCluster) -> list[Copy]:
    """Return all rows that were stored, including lost ones."""
    return [
        _copy_of(entry, expired=entry.message.queue_offset < broker.first[entry.queue])
        for broker in cluster.brokers.values()
        for entries in (*broker.queues.values(), broker.lost)
        for entry in entries
        if entry.queue.topic == TOPIC
    ]


def _copy_of(entry: Entry, *, expired: bool) -> Copy:
    message, sender = entry.message, entry.sender or Sender(None, entry.stored_at)
    return Copy(
        message.body.decode(errors="replace"),
        message.properties.get("__SHARDINGKEY", ""),
        entry.queue,
        message.queue_offset,
        entry.stored_at,
        sender.attempt,
        sender.sent_at,
        message.properties.get(UNIQ_KEY, ""),
        message.properties.get(ATTEMPT, "")[:TOKEN_LENGTH],
        sender.same,
        entry.lost_at,
        entry.acknowledged,
        expired,
    )


class ModelController(Controller):
    every = 0.25
    fates: dict[str, Fate]

    def strike(self, process: str, seconds: float, kind: str) -> None:
        rng = self.world.rng
        if rng.random() < 0.3:
            # At any time, also while the process waits.
            super().strike(process, seconds, kind)
            return
        step = 1 + rng.randrange(rng.choice((8, 24, 64)))
        self.fates[process] = Fate(step, lambda: self.freeze(process, seconds, kind))


@functools.lru_cache(maxsize=64)
def _options(drawn: tuple[tuple[str, Any], ...]) -> SinkOptions:
    options = options_of(SparkPlan(0, options=dict(drawn)))
    return SinkOptions.of(name_server=("10.1.0.1:9876",), client_ip="10.0.0.1", **options)


class ModelClient(WriteClient):
    """The client of a process of the model."""

    def __init__(self, transport: ModelTransport, options: SinkOptions, controller: Controller) -> None:
        brokers, queues = ModelBrokers.of(transport, options), controller.fixed_queues
        super().__init__(brokers, transport.runtime, transport.cluster.rng, queues)
        self._transport = transport

    def send(self, attempt: Attempt, recorder: Recorder) -> Send:
        self._transport.attempt = attempt
        return super().send(attempt, recorder)

    def close(self) -> None:
        """Do nothing."""
