"""A small model of the brokers of effectively-once writes, so that a schedule takes milliseconds.

Plan, attempts, end and decision log are the connector's own, and so are the drivers and tasks of the controller. Below
them, a request is one call: there are no connections, frames, threads or pipelines. A process may crash or freeze
before and after the execution of each request. Brokers store a message before it is flushed and before it is readable.
A power failure loses messages that are not flushed.

``python -m tests.simulation --kind model --seeds 1000000`` runs many schedules.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest import mock

import pyarrow as pa

from rocketmq_spark.arrow.read_columns import ROW_IDS
from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.effectively_once import stored
from rocketmq_spark.deliveries.effectively_once.resolving_sender import Resumption
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.errors import DeliveryError, MQClientException, RouteNotFoundException
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.hashes import row_hash
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ROW_ID, UNIQ_KEY
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.routing.route_cache import TopicPublishInfo, publish_info_of
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.pipeline import OnStored
from tests.simulation.cluster import run_to_end
from tests.simulation.effectively_once import (
    FATES,
    Attempt,
    Controller,
    EffectivelyOnceHistory,
    EffectivelyOncePlan,
    EffectivelyOnceRun,
    options_of,
    outcomes_of,
    problems_of,
)
from tests.simulation.schedule import TOPIC
from tests.simulation.world import EPOCH, SimulatedRuntime, World
from tests.support.scripted import route

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# What happens to a request that stores something: it is refused, or has no answer, or one that says "not safe".
_REQUESTS = ("refused", "silent", "silent after storing", "delayed", "late", "not flushed")
# What happens to a broker. A broker that is not listed is in no route.
_EVENTS = ("pause", "power failure", "not listed", "slow storage")
KINDS = (*_REQUESTS, *_EVENTS, *FATES)
"""Everything that a seed can enable."""

_LATENCY = 0.001
_BACKOFF = 0.1


@dataclass
class ModelPlan(EffectivelyOncePlan):
    """Effectively-once writes to modelled brokers."""

    @classmethod
    def of_seed(cls, seed: int) -> ModelPlan:
        """Draw a plan."""
        rng = random.Random(f"model {seed}")
        plan = cls(
            seed,
            tuple(kind for kind in KINDS if rng.random() < (0.5 if kind in FATES else rng.choice((0.05, 0.2, 0.4)))),
            brokers=rng.choice((1, 1, 2, 2, 3)),
            queues=rng.choice((1, 1, 2)),
            tasks=rng.choice((1, 1, 2)),
            rows=rng.choice((1, 3, 6)),
            partitions=rng.choice((1, 1, 1, 2)),
            batch=rng.random() < 0.3,
            options={"send_msg_timeout": rng.choice((500, 1_000))},
            horizon=rng.choice((3.0, 12.0)),
        )
        return replace(plan, tasks=3) if plan.tasks == 2 and rng.random() < 0.3 else plan


def run_model(plan: ModelPlan) -> EffectivelyOnceRun:
    """Run writes and check what consumers see; problems are texts."""
    world = World(plan.seed, longest=7_200.0)
    cluster = ModelCluster(world, plan)
    history = EffectivelyOnceHistory()
    controller = _ModelController(plan, world, history, lambda process: _Client(cluster, process), [])
    cluster.fates = controller.fates
    cluster.start_events()
    # The decoding of pulled records takes longer than all the rest.
    with mock.patch.object(stored, "_read", _read_rows):
        problems = run_to_end(world, controller.run, "controller", lambda: problems_of(plan, cluster, history))
    faults = controller.counts + cluster.counts + outcomes_of(cluster)
    return EffectivelyOnceRun(world, faults, problems, plan, history)


@dataclass
class _Fate:
    """What happens to a process at one of its steps."""

    step: int
    strike: Callable[[], None]


class _ModelController(Controller):
    every = 0.25

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fates: dict[str, _Fate] = {}

    def strike(self, process: str, seconds: float, kind: str) -> None:
        rng = self.world.rng
        step = 1 + rng.randrange(rng.choice((8, 24, 64)))
        self.fates[process] = _Fate(step, lambda: self.freeze(process, seconds, kind))


@dataclass(eq=False, slots=True)
class _Entry:
    """A message in a commit log."""

    message: MessageExt
    queue: MessageQueue
    readable_at: float
    flushed_at: float
    lost: bool = False


@dataclass(eq=False, slots=True)
class _Request:
    """One attempt to store messages, which arrives now or later, or never."""

    queue: MessageQueue
    fault: str
    entries: list[_Entry] = field(default_factory=list)
    acknowledged: bool = False

    @property
    def answered_at(self) -> float:
        """When the answer arrives."""
        if self.fault == "refused":
            return 0.0
        if self.fault not in ("", "not flushed") or not self.entries or self.entries[-1].lost:
            return math.inf
        return 0.0 if self.fault else self.entries[-1].flushed_at


class ModelBroker:
    """Messages of one broker. Offsets of a queue have no gaps."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.address = f"{name}:10911"
        # Until then it does nothing.
        self.idle_until = 0.0
        # Whether it is down in that time, so that requests are lost.
        self.down = False
        # When name servers list it again.
        self.listed_at = 0.0
        # How long it takes to flush a message, and to make it readable.
        self.lags = (0.0, 0.0)
        self.queues: defaultdict[MessageQueue, list[_Entry]] = defaultdict(list)
        self._world = world
        self._log: list[_Entry] = []

    @property
    def idle(self) -> bool:
        """Whether it is paused or down."""
        return self._world.now < self.idle_until

    def store(self, queue: MessageQueue, topic: str, body: bytes, properties: Mapping[str, str]) -> _Entry:
        """Append a message."""
        now, entries = self._world.now, self.queues[queue]
        last = self._log[-1] if self._log else None
        flushed, readable = now + self.lags[0], now + self.lags[1]
        if last is not None:
            flushed, readable = max(flushed, last.flushed_at), max(readable, last.readable_at)
        stored_at = int((now + EPOCH) * 1000)
        message = MessageExt(
            topic,
            body,
            0,
            properties,
            queue_id=queue.queue_id,
            queue_offset=len(entries),
            physical_offset=len(self._log),
            sys_flag=0,
            born_timestamp=stored_at,
            born_host="",
            store_timestamp=stored_at,
            store_host=self.address,
            reconsume_times=0,
            prepared_transaction_offset=0,
            body_crc=0,
        )
        entry = _Entry(message, queue, readable, flushed)
        self._log.append(entry)
        entries.append(entry)
        return entry

    def end(self, queue: MessageQueue) -> int:
        """Return the offset after the last readable message."""
        entries, now = self.queues[queue], self._world.now
        end = len(entries)
        while end and entries[end - 1].readable_at > now:
            end -= 1
        return end

    def fail(self) -> None:
        """Lose all or some messages that are not flushed."""
        first = next((at for at, entry in enumerate(self._log) if entry.flushed_at > self._world.now), len(self._log))
        kept = self._world.rng.randint(first, len(self._log))
        for entry in self._log[kept:]:
            entry.lost = True
            self.queues[entry.queue].remove(entry)
        del self._log[kept:]


class ModelCluster:
    """Brokers ``b0``, ``b1``, ..., and their faults."""

    def __init__(self, world: World, plan: ModelPlan) -> None:
        self.world, self.plan, self.rng = world, plan, world.rng
        self.fates: Mapping[str, _Fate] = {}
        self.brokers = {f"b{number}": ModelBroker(world, f"b{number}") for number in range(plan.brokers)}
        self.counts: Counter[str] = Counter()
        self._requests = [kind for kind in _REQUESTS if kind in plan.faults]
        self._chance = self.rng.choice((0.05, 0.2, 0.5))

    def stored(self, topic: str) -> Iterator[MessageExt]:
        """Return the messages of a topic, queue by queue."""
        for broker in self.brokers.values():
            for queue, entries in sorted(broker.queues.items()):
                if queue.topic == topic:
                    yield from (entry.message for entry in entries)

    def route(self, topic: str) -> TopicPublishInfo:
        """Return a topic's queues on the brokers that are listed now."""
        names = tuple(name for name, broker in self.brokers.items() if broker.listed_at <= self.world.now)
        return _route_of(topic, names, self.plan.queues if topic == TOPIC else 1)

    def fault(self) -> str:
        """Draw what happens to a request; empty: nothing."""
        if not self._requests or self.world.now > self.plan.horizon or self.rng.random() > self._chance:
            return ""
        kind = self.rng.choice(self._requests)
        self.counts[kind] += 1
        return kind

    def start_events(self) -> None:
        """Schedule what happens to brokers."""
        for kind in _EVENTS:
            if kind in self.plan.faults:
                for _ in range(self.rng.choice((1, 2, 4))):
                    self.world.call_later(self.rng.random() * self.plan.horizon, functools.partial(self._event, kind))

    def _event(self, kind: str) -> None:
        broker, now = self.rng.choice(list(self.brokers.values())), self.world.now
        lasting = self.rng.choice((0.05, 0.5, 3.0))
        self.counts[kind] += 1
        self.world.note(f"{kind}: {broker.name} for {lasting} s")
        if kind == "not listed":
            broker.listed_at = now + lasting
        elif kind == "slow storage":
            broker.lags = self.rng.random() * lasting, self.rng.random() * lasting
            self.world.call_later(lasting, lambda: setattr(broker, "lags", (0.0, 0.0)))
        elif not broker.idle:
            broker.down = kind == "power failure"
            broker.idle_until = now + lasting
            if broker.down:
                broker.fail()


@functools.lru_cache(maxsize=256)
def _route_of(topic: str, names: tuple[str, ...], queues: int) -> TopicPublishInfo:
    return publish_info_of(topic, route(dict.fromkeys(names, queues)) if names else TopicRouteData((), ()))


@functools.lru_cache(maxsize=8)
def _options(send_msg_timeout: int) -> SinkOptions:
    plan = EffectivelyOncePlan(0, options={"send_msg_timeout": send_msg_timeout})
    return SinkOptions.of(name_server=("10.1.0.1:9876",), client_ip="10.0.0.1", **options_of(plan))


class _Routes:
    """The part of a `RouteCache` that writes use."""

    is_empty = False

    def __init__(self, cluster: ModelCluster) -> None:
        self._cluster = cluster
        self._known: dict[str, TopicPublishInfo] = {}
        self._masters: dict[str, str] = {}

    def cached(self, topic: str) -> TopicPublishInfo | None:
        return self._known.get(topic)

    def look_up(self, topic: str, _: float) -> TopicPublishInfo:
        self.refresh(topic, _)
        return self._known[topic]

    def refresh(self, topic: str, _: float) -> None:
        found = self._cluster.route(topic)
        if not found.ok:
            raise RouteNotFoundException(f"no broker has topic {topic}")
        self._known[topic] = found
        self._masters = {name: address for info in self._known.values() for name, address in info.addresses.items()}

    def was_ok(self, _: str) -> bool:
        return True

    def masters(self) -> dict[str, str]:
        return self._masters


class _ModelBrokers(Brokers):
    """The brokers as one process reaches them."""

    def __init__(self, cluster: ModelCluster, process: str) -> None:
        routes = _Routes(cluster)

        def refresh_route(topic: str) -> None:
            with contextlib.suppress(RouteNotFoundException):
                routes.refresh(topic, 0.0)

        instance: Any = SimpleNamespace(routes=routes, transport=None, refresh_route=refresh_route)
        self.cluster, self.world, self._process, self._steps = cluster, cluster.world, process, 0
        runtime = SimulatedRuntime(cluster.world, lambda: None, lambda: None)
        options = _options(cluster.plan.options["send_msg_timeout"])
        super().__init__(options, instance, clock=runtime.clock, runtime=runtime, rng=cluster.rng)

    def step(self) -> None:
        """Crash or freeze here, if it is the fate of the process."""
        self._steps += 1
        fate = self.cluster.fates.get(self._process)
        if fate is not None and fate.step == self._steps:
            fate.strike()
            self.runtime.sleep(0.0)

    def for_each(self, keys: Iterable[K], ask: Callable[[K], T], at_once: int = 0) -> dict[K, T]:
        return {key: ask(key) for key in keys}

    def max_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        by_broker: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            by_broker[queue.broker_name].append(queue)
        ends: dict[MessageQueue, int] = {}
        for some in by_broker.values():

            def ends_of(broker: Any, some: list[MessageQueue] = some) -> dict[MessageQueue, int]:
                return {queue: broker.end(queue) for queue in some}

            # The connector sends a request for each queue, all at the same time.
            ends |= self._request(some[0], ends_of)
        return ends

    def min_offset(self, queue: MessageQueue) -> int:
        return self._request(queue, lambda _: 0)

    def check_readable(self, queue: MessageQueue) -> None:
        self._request(queue, lambda _: None)

    def read(
        self, queue: MessageQueue, start: int, end: int, expression: str = "*", *, complete: bool = False
    ) -> Iterator[MessageExt]:
        if start >= end:
            return
        messages = [entry.message for entry in self._read(queue, start, end)]
        yield from (message for message in messages if expression in ("*", message.tags))

    def rows_in(self, queue: MessageQueue, start: int, end: int) -> list[MessageExt]:
        """Return the messages of a queue from one offset to another."""
        return [entry.message for entry in self._read(queue, start, end)] if start < end else []

    def ends_at_once(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        self.step()
        brokers = self.cluster.brokers
        return {queue: brokers[queue.broker_name].end(queue) for queue in queues if not brokers[queue.broker_name].idle}

    def _messages_before(self, queue: MessageQueue, offset: int) -> Iterator[MessageExt]:
        return iter(self.rows_in(queue, max(0, offset - 32), offset))

    def send_records(self, messages: Sequence[tuple[EncodedBatch, MessageQueue]], on_stored: OnStored) -> None:
        for batch, queue in messages:
            (message,) = messages_in(batch)
            stored = self._store_record(queue, message)
            on_stored(
                PendingBatch(batch, queue), SendOutcome(queue, SendStatus.SEND_OK, None, 1.0, stored.queue_offset)
            )

    def start(self, queue: MessageQueue, execute: Callable[[ModelBroker], list[_Entry]]) -> _Request:
        """Send a request that stores messages."""
        self.routes().look_up(queue.topic)
        self.step()
        request = _Request(queue, self.cluster.fault())
        broker, world = self.cluster.brokers[queue.broker_name], self.world

        def arrive() -> None:
            if not broker.idle:
                request.entries = execute(broker)
            elif not broker.down:
                # A paused broker executes it afterwards, with all others that wait.
                world.call_later(broker.idle_until - world.now + 0.5 * self.rng.random(), arrive)

        longest = {"delayed": 1.5, "late": 8.0}.get(request.fault, 0.5 * _LATENCY)
        if request.fault not in ("refused", "silent"):
            world.call_later(longest * self.rng.random(), arrive)
        return request

    def await_answers(self, requests: Sequence[_Request]) -> None:
        """Wait for the answers, or until they have timed out."""
        expires = self.world.now + self.request_timeout
        self.world.wait([], _LATENCY)
        last = max(request.answered_at for request in requests)
        if last > self.world.now:
            self.world.wait([], min(last, expires) - self.world.now)
        for request in requests:
            request.acknowledged = not request.fault and request.answered_at <= self.world.now
        self.step()

    def _create_topic(self, topic: str, address: str, timeout: float) -> None:
        """Do nothing: all brokers have all topics."""

    def _request(self, queue: MessageQueue, execute: Callable[[ModelBroker], T]) -> T:
        """Have a broker execute a request, as soon as it can."""
        return self.request(queue, lambda *_: self._execute(queue, execute))

    def _execute(self, queue: MessageQueue, execute: Callable[[ModelBroker], T]) -> T:
        self.step()
        broker, expires = self.cluster.brokers[queue.broker_name], self.world.now + self.patience
        self.world.wait([], _LATENCY * self.rng.random())
        while broker.idle:
            if broker.idle_until >= expires:
                self.runtime.sleep(expires - self.world.now)
                raise MQClientException(f"{broker.name} does not answer")
            self.runtime.sleep(broker.idle_until - self.world.now)
        result = execute(broker)
        self.step()
        return result

    def _read(self, queue: MessageQueue, start: int, end: int) -> list[_Entry]:
        def execute(broker: ModelBroker) -> list[_Entry]:
            return broker.queues[queue][start : min(end, broker.end(queue))]

        found = self._request(queue, execute)
        if len(found) < end - start:
            raise MQClientException(f"{queue} has no messages from {start + len(found)} to {end} any more")
        return found

    def _store_record(self, queue: MessageQueue, record: Message) -> MessageExt:
        """Have a broker store a record, again and again until one is safe."""

        def execute(broker: ModelBroker) -> list[_Entry]:
            return [broker.store(queue, record.topic, record.body, record.properties)]

        expires = self.world.now + self.patience
        while True:
            request = self.start(queue, execute)
            self.await_answers([request])
            if request.acknowledged:
                return request.entries[0].message
            if self.world.now >= expires:
                raise DeliveryError(f"a record for {queue} was not stored")
            self.runtime.sleep(_BACKOFF * self.rng.random())


def _read_rows(
    brokers: _ModelBrokers,
    starts: Mapping[MessageQueue, int],
    ends: Mapping[MessageQueue, int],
    prefix: str,
    schema: pa.Schema,
    take: Callable[[pa.RecordBatch, MessageQueue, str], T],
) -> list[T]:
    """Do what `stored._read` does."""
    taken = []
    for queue, start in starts.items():
        found = brokers.rows_in(queue, start, ends[queue])
        if of_write := [message for message in found if message.properties[ROW_ID].startswith(prefix)]:
            columns = {
                ROW_IDS: [message.properties[ROW_ID] for message in of_write],
                "queueOffset": [message.queue_offset for message in of_write],
                "body": [message.body for message in of_write],
                "flag": [message.flag for message in of_write],
                "properties": [list(message.properties.items()) for message in of_write],
            }
            batch = pa.record_batch({field.name: pa.array(columns[field.name], field.type) for field in schema})
            taken.append(take(batch, queue, prefix))
    return taken


class _Client:
    """A `tests.simulation.effectively_once.Client` of modelled brokers."""

    # Rows of one request.
    together: ClassVar[int] = 2

    def __init__(self, cluster: ModelCluster, process: str) -> None:
        self.brokers = _ModelBrokers(cluster, process)
        self._used: set[str] = set()
        self._recovered = 0

    def rows(self, write: Write, partition_id: int) -> Iterator[list[int]]:
        yield list(range(self.brokers.cluster.plan.rows))

    def sums(self, recorder: Recorder) -> tuple[set[str], int]:
        return self._used, self._recovered

    def close(self, attempt: Attempt | None = None) -> None:
        """Do nothing."""

    def send(
        self, attempt: Attempt, recorder: Recorder, rows: Iterator[Any], write_id: str, resumption: Resumption
    ) -> None:
        """Send the rows that are not stored, all at the same time, and resolve requests as a `ResolvingSender` does."""
        brokers, attempt.ids = self.brokers, f"{attempt.number:020}"
        stored = set() if resumption.stored is None else set(resumption.stored.numbers.tolist())
        self._recovered = len(stored)
        missing = [row for batch in rows for row in batch if row not in stored]
        start_offsets = {**resumption.start_offsets, **resumption.ends}
        expires = brokers.world.now + brokers.patience
        while missing:
            unknown: defaultdict[str, list[tuple[_Request, tuple[int, ...], int]]] = defaultdict(list)
            sent, missing = self._send_all(attempt, write_id, missing, resumption.broker_names), []
            for request, some in sent:
                queue, start_offset = request.queue, start_offsets.get(request.queue, 0)
                if request.fault == "refused":
                    missing += some
                elif not request.acknowledged:
                    unknown[queue.broker_name].append((request, some, start_offset))
            for request, _ in sent:
                if request.acknowledged:
                    queue = request.queue
                    start_offsets[queue] = max(
                        start_offsets.get(queue, 0), request.entries[-1].message.queue_offset + 1
                    )
                    self._used.add(queue.broker_name)
            for of_broker in unknown.values():
                missing += _resolved(of_broker, resumption)
            if missing and brokers.world.now >= expires:
                raise DeliveryError(f"rows {missing} were not stored")

    def _send_all(
        self, attempt: Attempt, write_id: str, rows: Sequence[int], broker_names: Collection[str]
    ) -> list[tuple[_Request, tuple[int, ...]]]:
        """Send rows, and wait for the answers."""
        brokers, sent = self.brokers, []
        queues = [queue for queue in brokers.routes().look_up(TOPIC).queues if queue.broker_name in broker_names]
        if not queues:
            brokers.refresh_route(TOPIC)
            raise DeliveryError("no broker of the write is listed")
        for first in range(0, len(rows), self.together):
            queue, some = brokers.rng.choice(queues), tuple(rows[first : first + self.together])
            execute = functools.partial(_store_rows, attempt, write_id, queue, some)
            sent.append((brokers.start(queue, execute), some))
        brokers.await_answers([request for request, _ in sent])
        for row in rows:
            attempt.first_ends.setdefault(row, brokers.world.now)
        return sent


def _resolved(unknown: Sequence[tuple[_Request, tuple[int, ...], int]], resumption: Resumption) -> list[int]:
    """Return the rows of requests to one broker that are not stored."""
    start_offsets: dict[MessageQueue, int] = {}
    for request, _, start_offset in unknown:
        start_offsets[request.queue] = min(start_offset, start_offsets.get(request.queue, start_offset))
    late = not all(request.fault == "not flushed" for request, _, _ in unknown)
    stored = set(resumption.read_stored(start_offsets, late).numbers.tolist())
    missing: list[int] = []
    for _, rows, _ in unknown:
        found = stored.intersection(rows)
        if found and len(found) < len(rows):
            raise DeliveryError(f"of the rows {rows} only {found} are stored")
        missing += [] if found else rows
    return missing


def _store_rows(
    attempt: Attempt, write_id: str, queue: MessageQueue, rows: Iterable[int], broker: ModelBroker
) -> list[_Entry]:
    write, part, entries = attempt.write, attempt.partition_id, []
    for row in rows:
        body = f"{write.name}.{part}.{row}".encode()
        row_id = f"{write_id}/{write.batch_id}/{part}/{row}/{_hash_of(body)}"
        properties = {UNIQ_KEY: f"{attempt.ids}{row:012}", ROW_ID: row_id}
        entries.append(broker.store(queue, TOPIC, body, properties))
    return entries


@functools.lru_cache(maxsize=1024)
def _hash_of(body: bytes) -> str:
    return row_hash(TOPIC, body, {})
