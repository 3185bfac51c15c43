"""The client of one process of a model: the connector's own, above requests to modelled brokers that are single calls.

Plan, attempts, recoveries, senders and ends are the connector's. There are no connections and frames, and records of
the log need no pipeline. A process may crash or freeze before and after the execution of each of its requests.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.errors import (
    DeliveryError,
    MQClientException,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.properties import UNIQ_KEY
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.model.send_result import EndTransaction
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.fault_strategy import FaultStrategy
from rocketmq_spark.routing.route_cache import RouteCache
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.pipeline import OnStored
from rocketmq_spark.transport.base import OnOutcome
from rocketmq_spark.transport.remoting.client import Namespace
from tests.simulation.model_brokers import Answer, Entry, ModelBroker, ModelCluster, Request, Sender
from tests.simulation.spark import Attempt
from tests.simulation.world import SimulatedRuntime, World

T = TypeVar("T")
K = TypeVar("K")

_LATENCY = 0.001
_BACKOFF = 0.1


@dataclass
class Fate:
    """What happens to a process at one of its steps."""

    step: int
    strike: Callable[[], None]


class _Runtime(SimulatedRuntime):
    """The runtime of a process whose wall clock may be wrong by some seconds."""

    def __init__(self, world: World, clock_ahead: float) -> None:
        super().__init__(world, lambda: None, lambda: None)
        self._clock_ahead = clock_ahead

    def wall_clock(self) -> float:
        return super().wall_clock() + self._clock_ahead


class ModelTransport:
    """Has the requests that a write needs. A request to a paused broker waits; one to a broker that is down, too."""

    closed = False
    namespace = Namespace("", AUTO_CREATE_TOPIC)

    def __init__(
        self, cluster: ModelCluster, process: str, fates: Mapping[str, Fate], clock_ahead: float = 0.0
    ) -> None:
        self.cluster, self.world, self.process = cluster, cluster.world, process
        self.runtime = _Runtime(cluster.world, clock_ahead)
        self.attempt: Attempt | None = None
        self._fates, self._steps = fates, 0

    def step(self) -> None:
        """Crash or freeze here, if it is the fate of the process."""
        self._steps += 1
        fate = self._fates.get(self.process)
        if fate is not None and fate.step == self._steps:
            fate.strike()
            self.runtime.sleep(0.0)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return a topic's route."""
        return self.cluster.route(topic)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of a queue's next message."""
        return self._execute(address, timeout, lambda broker: broker.end(queue))

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset of a queue's first message."""
        return self._execute(address, timeout, lambda broker: min(broker.first[queue], broker.end(queue)))

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Return the outcome of a pull."""
        target = request.target

        def pull(broker: ModelBroker) -> PullOutcome:
            return broker.pull(target.queue, request.offset, target.max_msg_nums, target.sub_expression)

        return self._execute(request.address, timeout, pull)

    def topic_config(self, address: str, topic: str, timeout: float) -> None:
        """Do nothing: each broker has the topic of the log."""

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt; see `rocketmq_spark.transport.base.Sends`."""
        world, queue, broker = self.world, request.queue, self.cluster.by_address[request.address]
        messages, flags = messages_in(request.batch), request.batch.sys_flag
        self.cluster.seen += messages
        ended = False

        def end(outcome: SendOutcome) -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            if self.attempt is not None:
                for message in messages:
                    self.attempt.first_ends.setdefault(message.properties.get(UNIQ_KEY, ""), world.now)

            def call() -> None:
                self.step()
                on_outcome(outcome)

            world.start(call, "answers", self.process)

        def execute() -> list[Entry]:
            # A broker creates a topic that it does not have, if the template says so.
            broker.topics.setdefault(queue.topic, self.cluster.plan.queues)
            self.cluster.lose_end(broker)
            born = request.born_timestamp
            return [broker.store(queue, message, sender, flags, born=born) for message in messages]

        def on_answer(answered: Request) -> None:
            status = SendStatus.SEND_OK if not answered.fault or answered.fault == "delayed" else None
            status = status or SendStatus.FLUSH_DISK_TIMEOUT
            first = answered.entries[0].message
            end(SendOutcome(queue, status, None, 1.0, first.queue_offset, first.offset_msg_id))

        self.step()
        sender = Sender(self.attempt, world.now, process=self.process)
        if world.now >= request.write_by:
            # The transport writes no byte of a request after this time.
            error = RemotingConnectException(f"{broker.name}: the request was not sent in time")
            world.call_later(_LATENCY, lambda: end(SendOutcome(queue, None, error, 0.0)))
            return
        started = self.cluster.start(broker, execute, on_answer)
        if started.fault == "refused":
            error = RemotingConnectException(f"{broker.name} refused the connection")
            world.call_later(_LATENCY, lambda: end(SendOutcome(queue, None, error, 0.0)))
            return
        late = RemotingTimeoutException(f"{broker.name}: no answer")
        world.call_later(min(timeout, within), lambda: end(SendOutcome(queue, None, late, 0.0)))

    def store(self, queue: MessageQueue, record: Message, timeout: float) -> int | None:
        """Have a broker store a record, and return its offset if it is safe."""
        self.step()
        world, broker = self.world, self.cluster.brokers[queue.broker_name]
        waiters: list[Any] = []
        offsets: list[int] = []

        def execute() -> list[Entry]:
            return [broker.store(queue, record, Sender(None, world.now, process=self.process))]

        def on_answer(answered: Request) -> None:
            if not answered.fault or answered.fault == "delayed":
                offsets.append(answered.entries[0].message.queue_offset)
                world.wake_all(waiters)

        self.cluster.start(broker, execute, on_answer)
        world.wait(waiters, timeout)
        self.step()
        return offsets[0] if offsets else None

    def view_message(self, address: str, physical_offset: int, timeout: float, *, topic: str = "") -> MessageExt:
        """Return the message at an offset of a broker's commit log."""
        entry = self._execute(address, timeout, lambda broker: broker.view(physical_offset))
        if entry is None:
            raise MQClientException(f"{address} has no message that begins at {physical_offset}")
        return entry.message

    def end_transaction(
        self, address: str, request: EndTransaction, timeout: float, on_end: Callable[[RocketMQError | None], None]
    ) -> None:
        """Start to end a half message; see `rocketmq_spark.transport.base.Transactions`."""
        world, broker, ended = self.world, self.cluster.by_address[address], False

        def end(error: RocketMQError | None) -> None:
            nonlocal ended
            if not ended:
                ended = True
                world.start(lambda: call(error), "answers", self.process)

        def call(error: RocketMQError | None) -> None:
            self.step()
            on_end(error)

        def on_answer(code: int) -> None:
            end(None if code == ResponseCode.SUCCESS else broker_error(code, "", address, "ending a half message"))

        self.step()
        fault = self.cluster.end(broker, request, Sender(self.attempt, world.now, process=self.process), on_answer)
        if fault == "refused":
            error = RemotingConnectException(f"{broker.name} refused the connection")
            world.call_later(_LATENCY, lambda: end(error))
        else:
            late = RemotingTimeoutException(f"{broker.name}: no answer")
            world.call_later(timeout, lambda: end(late))

    def connection(self, address: str) -> object:
        """Return what stands for the connection to a broker."""
        return self.cluster.by_address[address].failures

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        """Send the end of a half message without waiting for an answer."""
        sender = Sender(self.attempt, self.world.now, process=self.process)
        self.cluster.end(self.cluster.by_address[address], request, sender, lambda _: None)

    def close(self) -> None:
        """Do nothing."""

    def _execute(self, address: str, timeout: float, execute: Callable[[ModelBroker], T]) -> T:
        """Have a broker execute a request, as soon as it can."""
        self.step()
        broker, expires = self.cluster.by_address[address], self.world.now + timeout
        self.world.wait([], _LATENCY * self.world.rng.random())
        while broker.idle:
            if broker.idle_until >= expires:
                self.runtime.sleep(expires - self.world.now)
                raise RemotingTimeoutException(f"{broker.name}: no answer")
            self.runtime.sleep(broker.idle_until - self.world.now)
        result = execute(broker)
        self.step()
        return result


class _Instance:
    """The part of a `ClientInstance` that writes use. Routes are looked up without a thread."""

    def __init__(self, transport: ModelTransport, options: SinkOptions) -> None:
        connection = options.connection
        self.transport = transport
        self.routes = RouteCache(
            transport.query_route,
            create_topic_key=connection.create_topic_key,
            default_topic_queue_nums=connection.default_topic_queue_nums,
            runtime=transport.runtime,
        )
        self.faults = FaultStrategy.of_options(connection)

    def refresh_route(self, topic: str) -> None:
        """Look a topic's route up now."""
        with contextlib.suppress(RouteNotFoundException):
            self.routes.refresh(topic, 1.0)


class ModelBrokers(Brokers):
    """The brokers as one process reaches them. It asks them one after the other, and sends records without a thread."""

    transport: Any

    @classmethod
    def of(cls, transport: ModelTransport, options: SinkOptions) -> ModelBrokers:
        """Return the brokers of a process."""
        runtime, rng = transport.runtime, transport.cluster.rng
        instance = cast(ClientInstance, _Instance(transport, options))
        return cls(options, instance, clock=runtime.clock, runtime=runtime, rng=rng)

    def for_each(self, keys: Iterable[K], call: Callable[[K], T], at_once: int = 0) -> dict[K, T]:
        return {key: call(key) for key in keys}

    def read(
        self, queue: MessageQueue, start: int, end: int, expression: str = "*", *, complete: bool = False
    ) -> Iterator[MessageExt]:
        # Each process reads the log again and again. Here no process decodes it.
        for pulled in self.pulls(queue, start, end, expression, complete=complete):
            for message in cast(Answer, pulled.body).messages:
                if pulled.start <= message.queue_offset < pulled.end:
                    yield message

    def send_records(self, messages: Sequence[tuple[EncodedBatch, MessageQueue]], on_stored: OnStored) -> None:
        for batch, queue in messages:
            (record,) = messages_in(batch)
            offset = self._store(queue, record)
            on_stored(PendingBatch(batch, queue), SendOutcome(queue, SendStatus.SEND_OK, None, 1.0, offset))

    def _store(self, queue: MessageQueue, record: Message) -> int:
        """Store a record again and again until it is safe."""
        expires = self.clock() + self.patience
        while True:
            self.routes().look_up(queue.topic)
            offset = self.transport.store(queue, record, self.request_timeout)
            if offset is not None:
                return int(offset)
            if self.clock() >= expires:
                raise DeliveryError(f"a record for {queue} was not stored")
            self.runtime.sleep(_BACKOFF * self.rng.random())
