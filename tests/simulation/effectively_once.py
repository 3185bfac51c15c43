"""A schedule of effectively-once writes on a simulated network, with the connector's own threads and connections.

tests/simulation/spark.py has drivers and tasks, tests/simulation/delivery_checks.py what must hold.
tests/simulation/model.py runs the same writes faster.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rocketmq_spark.deliveries.base import Send
from rocketmq_spark.deliveries.effectively_once.tokens import TOKEN_LENGTH
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ATTEMPT, UNIQ_KEY
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.testing.fake_storage import BrokerSettings
from tests.simulation.client import RecordedTransport
from tests.simulation.cluster import BaseRun, SimulatedCluster, run_to_end
from tests.simulation.delivery_checks import Copy, is_allowed, outcomes_of, problems_of
from tests.simulation.network import Conditions, Network
from tests.simulation.schedule import KINDS_OF_SENDS, Adversary
from tests.simulation.spark import (
    FATES,
    HOLES,
    IDENTITIES,
    INPUTS,
    LOG,
    TOPIC,
    Attempt,
    Controller,
    History,
    SparkPlan,
)
from tests.simulation.two_phase import EVENTS
from tests.simulation.world import EPOCH, SimulatedRuntime, World
from tests.simulation.write_client import WriteClient, options_of

_EVENTS = (*EVENTS, "power failure")
KINDS = (*KINDS_OF_SENDS, *_EVENTS, *FATES, *INPUTS, "delayed", "broken", "refused")
"""Everything that a seed can enable."""


@dataclass
class EffectivelyOncePlan(SparkPlan):
    """Effectively-once writes on a simulated network."""

    @classmethod
    def of_seed(cls, seed: int) -> EffectivelyOncePlan:
        """Draw a plan."""
        rng = random.Random(f"effectively-once {seed}")
        often = (*FATES, *INPUTS)
        return cls(
            seed,
            tuple(
                kind
                for kind in KINDS
                if rng.random() < (0.3 if kind in often else rng.choice((0.05, 0.2, 0.4))) and kind not in HOLES
            ),
            brokers=rng.choice((1, 2, 2, 3)),
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2)),
            tasks=rng.choice((1, 2, 3)),
            rows=rng.choice((1, 7, 25)),
            partitions=rng.choice((1, 1, 2)),
            options={"ordered": rng.random() < 0.25, "send_msg_timeout": rng.choice((500, 1_000))},
            horizon=rng.choice((3.0, 12.0)),
            identity=rng.choice(IDENTITIES),
        )


@dataclass
class EffectivelyOnceRun(BaseRun):
    """Writes that were run."""

    plan: SparkPlan
    history: History


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
    history = History()
    queues = [MessageQueue(TOPIC, name, number) for name in cluster.masters for number in range(plan.queues)]
    clients: list[_NetworkClient] = []

    def new_client(process: str) -> _NetworkClient:
        clients.append(_NetworkClient(world, network, cluster.addresses, plan, process, controller.fixed_queues))
        return clients[-1]

    controller = Controller(plan, world, history, new_client, queues, functools.partial(is_allowed, plan))
    adversary = _EffectivelyOnceAdversary(world, cluster, network, plan, set(plan.faults))
    adversary.start()

    def copies() -> Iterator[Copy]:
        sent = {key: (client.attempt, at) for client in clients for key, at in client.sends()}
        names = {broker.address: name for name, broker in cluster.masters.items()}
        for message in cluster.stored(TOPIC):
            attempt, sent_at = sent[message.properties[UNIQ_KEY]]
            yield copy_of(message, names[message.store_host], attempt, sent_at)

    stored: list[Copy] = []

    def check() -> list[str]:
        stored.extend(copies())
        return problems_of(plan, history, stored, cluster.stored(LOG))

    problems = run_to_end(world, controller.run, "controller", check)
    outcomes = outcomes_of(plan, stored, cluster.stored(LOG))
    return EffectivelyOnceRun(
        world, cluster.faults(adversary.counts, controller.counts, outcomes), problems, plan, history
    )


def copy_of(message: MessageExt, broker_name: str, attempt: Attempt | None, sent_at: float) -> Copy:
    """Return a stored message for the checks."""
    return Copy(
        message.body.decode(),
        message.properties.get("__SHARDINGKEY", ""),
        MessageQueue(TOPIC, broker_name, message.queue_id),
        message.queue_offset,
        message.store_timestamp / 1000 - EPOCH,
        attempt,
        sent_at,
        message.properties.get(UNIQ_KEY, ""),
        message.properties.get(ATTEMPT, "")[:TOKEN_LENGTH],
    )


class _EffectivelyOnceAdversary(Adversary):
    events: ClassVar[tuple[str, ...]] = _EVENTS


class _NetworkClient(WriteClient):
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
        runtime = SimulatedRuntime(world, network.socket, network.socketpair)
        rng = random.Random(world.rng.random())
        options = SinkOptions.of(name_server=tuple(name_servers), client_ip="10.0.0.1", **options_of(plan))
        connection = options.connection
        self._transport = RecordedTransport(
            world, list(connection.name_server), random=rng, clock=runtime.clock, runtime=runtime
        )
        self._instance = ClientInstance(
            f"10.0.0.1@{process}", self._transport, connection, clock=runtime.clock, runtime=runtime
        )
        super().__init__(
            Brokers(options, self._instance, clock=runtime.clock, runtime=runtime, rng=rng), runtime, rng, fixed_queues
        )
        self.attempt: Attempt | None = None
        self._instance.start()

    def send(self, attempt: Attempt, recorder: Recorder) -> Send:
        # Here, because drivers have no rows.
        self._instance.register(self.brokers.options.producer_group)
        self.attempt = attempt
        return super().send(attempt, recorder)

    def sends(self) -> Iterator[tuple[str, float]]:
        """Yield the unique id of each row, and when it was sent first."""
        started: dict[str, float] = {}
        for sent in self._transport.attempts:
            if sent.batch.topic == TOPIC and self.attempt is not None:
                for message in messages_in(sent.batch):
                    key = message.properties[UNIQ_KEY]
                    started.setdefault(key, sent.started)
                    self.attempt.first_ends.setdefault(key, sent.ended)
        yield from started.items()

    def close(self) -> None:
        """Close the connections."""
        self._instance.close()
