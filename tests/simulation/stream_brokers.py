"""Modelled brokers and name servers for a stream: a request is one call, and moves the time of the schedule.

A schedule has one thread. While a request is under way, the events that are due happen. Brokers answer as
docs/internals/reads.md says. Each stored message is kept for the checks, with the time and cause of its deletion.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from rocketmq_spark import errors
from rocketmq_spark.model.hashes import string_hash
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.model.properties import TAGS
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode, broker_error
from rocketmq_spark.protocol.remoting.headers import GetRouteInfoRequestHeader
from rocketmq_spark.protocol.remoting.records import encode_record
from rocketmq_spark.protocol.remoting.responses import ClusterInfo, TopicConfig
from rocketmq_spark.transport.base import OnPulled
from rocketmq_spark.transport.remoting.client import RequestClient
from rocketmq_spark.transport.remoting.name_servers import NameServers
from rocketmq_spark.transport.runtime import Runtime
from tests.simulation.world import EPOCH, SimulationError, World

T = TypeVar("T")

# How a server treats requests: it answers, refuses connections, or is silent until the timeout.
ANSWERS, REFUSES, SILENT = "answers", "refuses", "silent"
# Why a message is not in its queue any more.
EXPIRED, DELETED, LOST = "expired", "deleted", "lost"

_LATENCY: Final = 0.002
_MOST_PULLED: Final = 32
# How long a broker holds a pull for a message, at most (s).
_HELD: Final = 1.0
# Routes are up to date again so many seconds after a fault.
FRESH_AFTER: Final = 2.0


class Timeline(World):
    """A world with one thread: its waits move the time, and call what is due."""

    def advance(self, seconds: float) -> None:
        """Let some seconds pass."""
        self.steps += 1
        until, timers = self.now + max(0.0, seconds), self._timers
        while timers and timers[0][0] <= until:
            due, _, call = heapq.heappop(timers)
            self.now = max(self.now, due)
            call()
        self.now = max(self.now, until)
        if self.now > self._longest or self.steps > self._most_steps:
            raise SimulationError(f"no end after {self.steps} steps and {self.now:.0f} s")


class _Inline(Executor):
    """Runs each call when it is submitted."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(*args, **kwargs))
        return future


class InlineRuntime(Runtime):
    """The runtime of a client in a timeline."""

    def __init__(self, world: Timeline) -> None:
        self._world = world

    def clock(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.advance(seconds)

    def pool(self, threads: int, name: str) -> Executor:
        return _Inline()


@dataclass(eq=False, slots=True)
class Record:
    """A message that was stored, and when and why it was deleted. An incarnation is one life of its queue."""

    queue: MessageQueue
    incarnation: int
    offset: int
    number: int
    tag: str
    is_damaged: bool
    stored_ms: int
    stored_at: float
    gone_at: float = math.inf
    gone_by: str = ""
    _bytes: bytes = b""

    @property
    def encoded(self) -> bytes:
        """The message as a pull returns it. Its body is its number."""
        if not self._bytes:
            body = b"%d" % self.number
            self._bytes = encode_record(
                MessageExt(
                    self.queue.topic,
                    body,
                    properties={TAGS: self.tag} if self.tag else {},
                    queue_id=self.queue.queue_id,
                    queue_offset=self.offset,
                    physical_offset=self.number,
                    # A body that is not compressed, and is marked so, is unreadable.
                    sys_flag=COMPRESSED_FLAG if self.is_damaged else 0,
                    born_timestamp=self.stored_ms,
                    born_host="10.0.0.1:50000",
                    store_timestamp=self.stored_ms,
                    store_host="10.2.0.1:10911",
                    reconsume_times=0,
                    prepared_transaction_offset=0,
                    body_crc=zlib.crc32(body) & 0x7FFFFFFF,
                )
            )
        return self._bytes


@dataclass(eq=False, slots=True)
class Log:
    """One incarnation of a queue. The broker reports `reported` as its first offset, and has the messages from `first`
    on: it corrects the reported offset some seconds after a deletion."""

    incarnation: int
    records: list[Record] = field(default_factory=list)
    first: int = 0
    reported: int = 0

    def pull(self, offset: int, most: int, expression: str) -> PullOutcome:
        """Return what a broker answers to a pull. It compares hashes of tags."""
        first, end = self.reported, len(self.records)
        if not first <= offset <= end:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, first if offset < first else end, first, end)
        if offset == end:
            return PullOutcome(PullStatus.NO_NEW_MSG, offset, first, end)
        if offset < self.first:
            return PullOutcome(PullStatus.OFFSET_ILLEGAL, self.first, first, end)
        stop = min(end, offset + min(most, _MOST_PULLED))
        found = self.records[offset:stop]
        if expression != "*":
            hashes = {string_hash(tag.strip()) for tag in expression.split("||")}
            found = [record for record in found if string_hash(record.tag) in hashes]
        body = b"".join([record.encoded for record in found])
        return PullOutcome(PullStatus.FOUND if found else PullStatus.NO_MATCHED_MSG, stop, first, end, body)

    def search(self, stored_ms: int) -> int:
        """Return the first offset stored at a time or later."""
        return max(self.first, bisect.bisect_left(self.records, stored_ms, key=lambda record: record.stored_ms))


@dataclass(eq=False)
class StreamBroker:
    """One broker. `topics` has the numbers of read and write queues, `committed` the offsets of the consumer group."""

    name: str
    address: str
    state: str = ANSWERS
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    logs: dict[MessageQueue, Log] = field(default_factory=dict)
    committed: dict[MessageQueue, int] = field(default_factory=dict)


class StreamCluster:
    """Brokers and name servers, everything that was ever stored, and everything that was lost."""

    def __init__(self, world: Timeline, brokers: int, name_servers: int) -> None:
        self.world, self.rng = world, world.rng
        self.counts: Counter[str] = Counter()
        self.brokers = {
            f"b{number}": StreamBroker(f"b{number}", f"10.2.0.{number + 1}:10911") for number in range(brokers)
        }
        self.by_address = {broker.address: broker for broker in self.brokers.values()}
        self.name_servers = [f"10.1.0.{number + 1}:9876" for number in range(name_servers)]
        # The brokers that each name server lists, and how it treats requests.
        self.listed = {address: set(self.brokers) for address in self.name_servers}
        self.states = dict.fromkeys(self.name_servers, ANSWERS)
        self.records: list[Record] = []
        # The tags of messages, by turns; and the chance that a message is unreadable.
        self.tags: tuple[str, ...] = ("",)
        self.unreadable = 0.0
        # When a queue lost messages other than by expiry; for the checks.
        self.damaged: dict[MessageQueue, list[float]] = {}
        # The chance that a request fails, by kind of failure.
        self.chances: dict[str, float] = {}
        self._incarnations = itertools.count(1)
        self._disturbances: list[tuple[str, float, float]] = []
        self._last_ms = 0

    def queues(self) -> Iterator[tuple[MessageQueue, Log]]:
        """Return the queues that exist, and their logs."""
        for broker in self.brokers.values():
            yield from broker.logs.items()

    def log(self, queue: MessageQueue) -> Log | None:
        """Return the present log of a queue."""
        return self.brokers[queue.broker_name].logs.get(queue)

    def is_readable(self, queue: MessageQueue) -> bool:
        """Whether a queue is one of the read queues of its topic: brokers reject pulls from others."""
        return queue.queue_id < self.brokers[queue.broker_name].topics.get(queue.topic, (0, 0))[0]

    def create(self, broker: StreamBroker, topic: str, queues: int) -> None:
        """Create a topic on a broker, or give it more queues."""
        broker.topics[topic] = (queues, queues)
        for number in range(queues):
            queue = MessageQueue(topic, broker.name, number)
            if queue not in broker.logs:
                broker.logs[queue] = Log(next(self._incarnations))

    def store(self, queue: MessageQueue) -> None:
        """Store a message. Store times of a schedule are all different."""
        log = self.brokers[queue.broker_name].logs[queue]
        self._last_ms = stored_ms = max(self._last_ms + 1, int((self.world.now + EPOCH) * 1000))
        number = len(self.records)
        tag = self.tags[number % len(self.tags)]
        is_damaged = self.unreadable > 0 and self.rng.random() < self.unreadable
        record = Record(queue, log.incarnation, len(log.records), number, tag, is_damaged, stored_ms, self.world.now)
        log.records.append(record)
        self.records.append(record)

    def expire(self, queue: MessageQueue, first: int, reported_after: float) -> None:
        """Delete the messages before an offset."""
        log = self.brokers[queue.broker_name].logs[queue]
        for record in log.records[log.first : first]:
            record.gone_at, record.gone_by = self.world.now, EXPIRED
        log.first = max(log.first, first)

        def report() -> None:
            log.reported = max(log.reported, first)

        if reported_after:
            self.world.call_later(reported_after, report)
        else:
            report()

    def delete(self, broker: StreamBroker, topic: str) -> None:
        """Delete a topic on a broker."""
        broker.topics.pop(topic, None)
        for queue in [queue for queue in broker.logs if queue.topic == topic]:
            self._drop(broker.logs.pop(queue), queue, 0, DELETED)

    def remove_queues(self, broker: StreamBroker, topic: str, queues: int) -> None:
        """Reduce the queues of a topic. A broker keeps their messages, and rejects pulls."""
        broker.topics[topic] = (queues, queues)
        for queue in broker.logs:
            if queue.topic == topic and queue.queue_id >= queues:
                self.damaged.setdefault(queue, []).append(self.world.now)

    def cut(self, broker: StreamBroker, stored_after: float) -> None:
        """Lose the last messages of a broker's commit log."""
        for queue, log in broker.logs.items():
            kept = next((at for at, record in enumerate(log.records) if record.stored_at > stored_after), None)
            if kept is not None and kept < len(log.records):
                kept = max(kept, log.first)
                self._drop(log, queue, kept, LOST)
                del log.records[kept:]
                log.incarnation = next(self._incarnations)

    def route(self, name_server: str, topic: str) -> TopicRouteData | None:
        """Return the route that a name server has."""
        named = [broker for name, broker in self.brokers.items() if name in self.listed[name_server]]
        having = [broker for broker in named if topic in broker.topics]
        if not having:
            return None
        datas = tuple(QueueData(broker.name, *broker.topics[topic], 6) for broker in having)
        return TopicRouteData(datas, tuple(BrokerData(broker.name, {MASTER_ID: broker.address}) for broker in having))

    def unlist(self, name: str, name_servers: Collection[str]) -> None:
        """Remove a broker from name servers."""
        for address in name_servers:
            self.listed[address].discard(name)

    def list_again(self, name: str, name_servers: Collection[str]) -> None:
        """Add a broker to name servers."""
        for address in name_servers:
            self.listed[address].add(name)

    def disturb(self, names: Collection[str], seconds: float) -> None:
        """Note that brokers may not answer, or are not listed, for some seconds."""
        for name in names:
            self._disturbances.append((name, self.world.now, self.world.now + seconds))

    def disturbances(self, queue: MessageQueue) -> Iterator[tuple[float, float]]:
        """Yield the times in which a queue was disturbed, until routes were up to date again."""
        for name, start, end in self._disturbances:
            if name == queue.broker_name:
                yield start, end + FRESH_AFTER

    def _drop(self, log: Log, queue: MessageQueue, kept: int, cause: str) -> None:
        self.damaged.setdefault(queue, []).append(self.world.now)
        for record in log.records[max(kept, log.first) :]:
            record.gone_at, record.gone_by = self.world.now, cause


class StreamTransport:
    """The transport of a driver or a task: the real search among name servers, above modelled servers."""

    closed = False

    def __init__(self, cluster: StreamCluster, runtime: InlineRuntime, step: Callable[[str], None]) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.clock = runtime.clock
        # Called before and after each request, with its name: the process may end there.
        self._step = step
        # Called with each offset that is committed for the group.
        self.on_commit: Callable[[MessageQueue, int], None] = lambda _, __: None
        client = cast(RequestClient, _NameServerClient(self))
        self._name_servers = NameServers(client, cluster.name_servers, random.Random(cluster.rng.random()))
        self._flying: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """See `NameServers`."""
        return self._name_servers.query_route(topic, timeout)

    def route_at(self, name_server: str, topic: str, timeout: float) -> TopicRouteData:
        """See `NameServers`."""
        return self._name_servers.route_at(name_server, topic, timeout)

    def topics(self, timeout: float) -> frozenset[str]:
        """See `NameServers`."""
        return self._name_servers.topics(timeout)

    def topics_at(self, name_server: str, timeout: float) -> frozenset[str]:
        """See `NameServers`."""
        return self._name_servers.topics_at(name_server, timeout)

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """See `NameServers`."""
        return self._name_servers.cluster_info(timeout)

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the end of a queue; 0 for an unknown one."""
        return self._request("max_offset", address, timeout, lambda broker: len(_log(broker, queue).records))

    def min_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the first offset that a broker reports; 0 for an unknown queue."""
        return self._request("min_offset", address, timeout, lambda broker: _log(broker, queue).reported)

    def search_offset(self, queue: MessageQueue, timestamp_ms: int, address: str, timeout: float) -> int:
        """Return the first offset stored at a time or later."""
        return self._request("search", address, timeout, lambda broker: _log(broker, queue).search(timestamp_ms))

    def topic_config(self, address: str, topic: str, timeout: float) -> TopicConfig:
        """Return the configuration of a plain topic."""

        def config(broker: StreamBroker) -> TopicConfig:
            if topic not in broker.topics:
                raise broker_error(ResponseCode.TOPIC_NOT_EXIST, "no such topic", address, f"asking about {topic}")
            return TopicConfig()

        return self._request("topic_config", address, timeout, config)

    def pull_now(self, request: PullRequest, timeout: float) -> PullOutcome:
        """Return the outcome of a pull."""
        return self._request("pull", request.address, timeout, lambda broker: _pull(broker, request))

    def pull(self, request: PullRequest, timeout: float, on_pulled: OnPulled) -> None:
        """Start a pull, which `poll` ends."""
        broker, now = self.cluster.by_address[request.address], self.world.now
        fault = self._fault(broker)
        if fault == REFUSES:
            raise errors.RemotingConnectException(f"{broker.address} refuses connections")

        def end() -> None:
            if fault == SILENT or broker.state != ANSWERS:
                late = errors.RemotingTimeoutException(f"{broker.address}: no answer")
                on_pulled(PullOutcome(None, error=late))
            elif fault:
                on_pulled(PullOutcome(None, error=_busy(broker)))
            else:
                on_pulled(_pull(broker, request))

        due = now + _LATENCY * (1 + self.cluster.rng.random())
        if fault == SILENT:
            due = now + timeout
        elif request.suspend_ms and _pull(broker, request).status is PullStatus.NO_NEW_MSG:
            due = now + min(request.suspend_ms / 1000, _HELD)
        heapq.heappush(self._flying, (due, next(self._numbers), end))

    def poll(self, timeout: float) -> None:
        """Let time pass until the next pull ends, at most `timeout`, and end all pulls that are due."""
        world, flying = self.world, self._flying
        if not flying or flying[0][0] > world.now + timeout:
            world.advance(timeout)
            return
        world.advance(flying[0][0] - world.now)
        while flying and flying[0][0] <= world.now:
            heapq.heappop(flying)[2]()

    def consumer_offset(self, queue: MessageQueue, group: str, address: str, timeout: float) -> int | None:
        """Return the offset that the group has committed."""
        return self._request("consumer_offset", address, timeout, lambda broker: broker.committed.get(queue))

    def update_consumer_offset(
        self, queue: MessageQueue, group: str, offset: int, address: str, timeout: float
    ) -> None:
        """Commit an offset of the group."""

        def update(broker: StreamBroker) -> None:
            broker.committed[queue] = offset
            self.on_commit(queue, offset)

        self._request("commit", address, timeout, update)

    def consumers(self, group: str, address: str, timeout: float) -> tuple[str, ...]:
        """Return no member."""
        return self._request("consumers", address, timeout, lambda _: ())

    def register_consumer(self, client_id: str, group: str, address: str, timeout: float) -> None:
        """Join the group."""
        self._request("join", address, timeout, lambda _: None)

    def close(self) -> None:
        """Forget the pulls in flight."""
        self._flying.clear()

    def ask_name_server(self, address: str, timeout: float, answer: Callable[[], T]) -> T:
        """Have a name server answer."""
        self._step("name server")
        self.world.advance(_LATENCY)
        self._fail_if(self.cluster.states[address], address, timeout)
        return answer()

    def _request(self, name: str, address: str, timeout: float, execute: Callable[[StreamBroker], T]) -> T:
        """Have a broker execute a request."""
        self._step(name)
        self.world.advance(_LATENCY)
        broker = self.cluster.by_address[address]
        fault = self._fault(broker)
        if fault == "busy":
            raise _busy(broker)
        self._fail_if(fault, address, timeout)
        result = execute(broker)
        self._step(name)
        return result

    def _fault(self, broker: StreamBroker) -> str:
        """Return what is wrong with the next request to a broker; nothing: an empty text."""
        if broker.state != ANSWERS:
            return broker.state
        for fault, chance in self.cluster.chances.items():
            if self.cluster.rng.random() < chance:
                self.cluster.counts[fault] += 1
                # Requests are sent one after the other here, so others may have no time left.
                self.cluster.disturb(self.cluster.brokers, 0.0)
                return SILENT if fault == "lost request" else "busy"
        return ""

    def _fail_if(self, state: str, address: str, timeout: float) -> None:
        if state == REFUSES:
            raise errors.RemotingConnectException(f"{address} refuses connections")
        if state == SILENT:
            self.world.advance(timeout)
            raise errors.RemotingTimeoutException(f"{address}: no answer")


class _NameServerClient:
    """The part of a `RequestClient` that `NameServers` uses."""

    def __init__(self, transport: StreamTransport) -> None:
        self._transport = transport
        self.clock = transport.clock

    def ask_body(self, address: str, header: Any, timeout: float, doing: str, _: object) -> Any:
        """Return the decoded answer of a name server."""
        cluster = self._transport.cluster

        def answer() -> Any:
            names = cluster.listed[address]
            if header == RequestCode.GET_BROKER_CLUSTER_INFO:
                masters = {name: {MASTER_ID: cluster.brokers[name].address} for name in sorted(names)}
                return ClusterInfo(tuple(BrokerData(name, master) for name, master in masters.items()), {})
            if not isinstance(header, GetRouteInfoRequestHeader):
                return frozenset(topic for name in names for topic in cluster.brokers[name].topics)
            route = cluster.route(address, header.topic)
            if route is None:
                raise broker_error(ResponseCode.TOPIC_NOT_EXIST, "No topic route info", address, doing)
            return route

        return self._transport.ask_name_server(address, timeout, answer)


_NOTHING: Final = Log(0)


def _log(broker: StreamBroker, queue: MessageQueue) -> Log:
    return broker.logs.get(queue, _NOTHING)


def _pull(broker: StreamBroker, request: PullRequest) -> PullOutcome:
    """Return a broker's answer to a pull, or its error."""
    queue = request.target.queue
    if queue.topic not in broker.topics:
        return PullOutcome(None, error=_error(ResponseCode.TOPIC_NOT_EXIST, broker, queue))
    if queue.queue_id >= broker.topics[queue.topic][0]:
        return PullOutcome(None, error=_error(ResponseCode.INVALID_PARAMETER, broker, queue))
    return _log(broker, queue).pull(request.offset, request.target.max_msg_nums, request.target.sub_expression)


def _error(code: int, broker: StreamBroker, queue: MessageQueue) -> errors.RocketMQError:
    return broker_error(code, "refused", broker.address, f"pulling from {queue}")


def _busy(broker: StreamBroker) -> errors.RocketMQError:
    return broker_error(ResponseCode.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy", broker.address, "a request")
