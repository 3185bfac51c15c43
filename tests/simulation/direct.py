"""A cluster under load without sockets: brokers that count rows, and transports that hand them whole requests.

The queue, the threads and the time limit of a broker are those of `FakeBroker`. A simulated batch has eight short
messages in the place of many rows. The service time is that of all rows, and the broker stores nothing. The link of a
broker has a latency and a limit of bytes per second.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from rocketmq_spark.errors import RemotingTimeoutException
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.model.route import TopicRouteData, masters_of
from rocketmq_spark.options.kinds import MIB
from rocketmq_spark.protocol.remoting import headers
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_requests import HANDLERS
from rocketmq_spark.testing.fake_sends import Send
from rocketmq_spark.testing.fake_storage import BrokerSettings, BrokerStorage
from rocketmq_spark.transport.base import Closes, OnOutcome
from rocketmq_spark.transport.remoting.requests import Answer, outcome_of
from tests.simulation.world import World
from tests.support.scripted import route

TOPIC = "T"
# Messages of a full batch, so that a sink can divide it; and the length of each.
MESSAGES = 8
_LENGTH = 128
# The body of a message of the other producer.
_ROW = b"r"


@dataclass(frozen=True)
class Load:
    """The constants of a simulation, as measured with a real broker (times in seconds)."""

    # 4 processors or more: min(processors, 4) threads. A row of 100 bytes in a batch takes 1.3 us of a thread.
    send_threads: int = 4
    seconds_per_row: float = 1.3e-6
    # 2 threads answer 35,000 single messages a second.
    seconds_per_request: float = 57e-6
    send_queue_capacity: int = 10_000
    wait_time_in_send_queue: float = 0.2
    # The largest batch (1 MiB) with the most rows (short bodies), which a thread takes 42 ms for: the hardest case.
    rows_per_batch: int = 32_000
    # Spark and the encoder give a task a million rows per second.
    seconds_per_row_read: float = 1e-6
    queues_per_broker: int = 8
    latency: float = 0.0005
    # The link of a broker has 10 Gbit/s. A rejected batch uses it, too.
    seconds_per_batch_received: float = MIB / 1.25e9

    @property
    def service_time(self) -> float:
        """The seconds that a batch takes of a thread."""
        return self.seconds_per_request + self.rows_per_batch * self.seconds_per_row

    @property
    def capacity(self) -> float:
        """The most rows that a broker stores per second."""
        return self.send_threads * self.rows_per_batch / self.service_time

    def settings(self) -> BrokerSettings:
        """Return the settings of a broker."""
        return BrokerSettings(
            send_threads=self.send_threads,
            send_queue_capacity=self.send_queue_capacity,
            wait_time_in_send_queue=self.wait_time_in_send_queue,
            service_time=self._service_time,
        )

    @property
    def rows_per_message(self) -> float:
        """The rows that a message stands for."""
        return self.rows_per_batch / MESSAGES

    def _service_time(self, messages: int, nbytes: int) -> float:
        rows = messages * self.rows_per_message if nbytes > len(_ROW) else messages
        return self.seconds_per_request + rows * self.seconds_per_row

    def batch(self) -> EncodedBatch:
        """Return a full batch."""
        body = encode_batch([Message(TOPIC, b"r" * _LENGTH)] * MESSAGES)
        return EncodedBatch(TOPIC, (body,), MESSAGES, len(body))


class CountingStorage(BrokerStorage):
    """Acknowledges sends without storing them."""

    # Offsets of a queue grow. A batch has fewer rows than the distance.
    _next_offset = 0
    _DISTANCE = 1_000_000

    def store_send(self, send: Send, body: bytes) -> dict[str, str]:
        offset, self._next_offset = self._next_offset, self._next_offset + self._DISTANCE
        return {"msgId": "", "queueId": str(send.queue_id), "queueOffset": str(offset)}


@dataclass
class LoadedCluster:
    """Brokers ``b000``, ``b001``, ..., and the number of their answers to the tasks by response code."""

    world: World
    brokers: int
    load: Load = field(default_factory=Load)
    answers: Counter[int] = field(default_factory=Counter)
    # When the link of a broker has taken all bytes so far, by address.
    _link_free: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [f"b{number:03}" for number in range(self.brokers)]
        self.route = route(dict.fromkeys(names, self.load.queues_per_broker))
        self.addresses = masters_of(self.route.broker_datas)
        self.by_address = {address: self._broker(name, address) for name, address in self.addresses.items()}

    def written(self, address: str, messages: int) -> float:
        """Return when the last byte of a batch that starts now is written; a broker's link takes them in turn."""
        seconds = messages / MESSAGES * self.load.seconds_per_batch_received
        free = max(self.world.now, self._link_free.get(address, 0.0)) + seconds
        self._link_free[address] = free
        return free

    def pause(self, count: int) -> None:
        """Pause the first brokers."""
        for broker in list(self.by_address.values())[:count]:
            broker.pause()

    def resume(self) -> None:
        """Resume all paused brokers."""
        for broker in self.by_address.values():
            if broker.paused:
                broker.resume()

    def _broker(self, name: str, address: str) -> FakeBroker:
        broker = FakeBroker(name, self.world, HANDLERS, address=address, settings=self.load.settings())
        broker.storage = CountingStorage(name, address, "c", broker.settings, self.world.time, broker.later)
        broker.requests = deque(maxlen=1)
        return broker


class DirectTransport(Closes):
    """Sends whole requests to the brokers of a cluster. It has what a `BatchSender` and its client instance call."""

    def __init__(self, cluster: LoadedCluster, answers: Counter[int]) -> None:
        self.cluster = cluster
        # The number of answers by response code.
        self.answers = answers
        self._closed = False

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Accept no more requests."""
        self._closed = True

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        """Start one attempt; see `Sends.send`."""
        code, fields = headers.head_of(request)
        world, cluster = self.cluster.world, self.cluster
        broker = cluster.by_address[request.address]
        body = b"".join(map(bytes, request.batch.body))
        command = RemotingCommand(code=code, opaque=0, ext_fields=fields, body=body)
        written = cluster.written(request.address, request.batch.rows)
        attempt = _Attempt(self, request, on_outcome, written)
        world.call_later(written - world.now + cluster.load.latency, partial(broker.receive, command, attempt))
        world.call_later(min(written - world.now + timeout, within), attempt.expire)

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return the route of every topic."""
        return self.cluster.route

    def heart_beat(self, address: str, client_id: str, producer_groups: Collection[str], timeout: float) -> None:
        """Do nothing."""

    def unregister_client(self, address: str, client_id: str, producer_group: str, timeout: float) -> None:
        """Do nothing."""


class OtherProducer:
    """Sends single messages to all brokers in turn, with at most three attempts each, as Java's producer does."""

    PER_SECOND = 200.0
    _ATTEMPTS = 3
    _TIMEOUT = 3.0

    def __init__(self, cluster: LoadedCluster) -> None:
        self.cluster = cluster
        # Seconds until a message was stored; infinite if it was not.
        self.latencies: list[float] = []
        self._transport = DirectTransport(cluster, Counter())
        self._queues = itertools.cycle(cluster.addresses.items())

    def start(self) -> None:
        """Send a message, and go on until the world ends."""
        self._send(self.cluster.world.now, self._ATTEMPTS)
        self.cluster.world.call_later(1 / self.PER_SECOND, self.start)

    def _send(self, began: float, attempts: int) -> None:
        name, address = next(self._queues)
        batch = EncodedBatch(TOPIC, (_ROW,), 1, len(_ROW), batch=False)
        request = SendRequest(batch, MessageQueue(TOPIC, name, 0), address, "other", "TBW102", 4, 0)

        def on_outcome(outcome: SendOutcome) -> None:
            if outcome.status is not None:
                self.latencies.append(self.cluster.world.now - began)
            elif attempts > 1:
                self._send(began, attempts - 1)
            else:
                self.latencies.append(math.inf)

        self._transport.send(request, self._TIMEOUT, on_outcome)


@dataclass(slots=True, eq=False)
class _Attempt:
    """A send in flight, and the channel of its answer."""

    transport: DirectTransport
    request: SendRequest
    on_outcome: Callable[..., None]
    started: float
    ended: bool = False

    def send(self, command: RemotingCommand) -> None:
        """Answer, after the latency of the link."""
        cluster = self.transport.cluster
        cluster.world.call_later(cluster.load.latency, lambda: self._end(command, None))

    def close(self) -> None:
        """Do nothing."""

    def expire(self) -> None:
        """End without an answer."""
        if not self.ended:
            address = self.request.address
            self._end(None, RemotingTimeoutException(f"SEND_BATCH_MESSAGE to {address}: no answer in time"))

    def _end(self, command: RemotingCommand | None, error: RemotingTimeoutException | None) -> None:
        if self.ended:
            return
        self.ended = True
        transport, request = self.transport, self.request
        if command is not None:
            transport.answers[command.code] += 1
        answer = Answer(command, error, transport.cluster.world.now - self.started)
        self.on_outcome(outcome_of(request.queue, request.batch.rows, request.address, answer))


def busy_share(before: Counter[int], after: Counter[int]) -> float:
    """Return the share of SYSTEM_BUSY among the answers between two counts."""
    answers = after - before
    return answers[ResponseCode.SYSTEM_BUSY] / max(1, sum(answers.values()))
