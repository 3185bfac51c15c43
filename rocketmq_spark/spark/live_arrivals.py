"""How many messages have arrived in a topic since a moment, by the brokers' own offsets.

Rule 1: a queue counts from its offset at its first answer. One that is known to be new counts from 0: its broker had
        fewer until now, or was registered without the topic at the beginning. Who is merely missing in a route may be
        away, and come back with old messages.
Rule 2: brokers are asked at once. Who does not answer keeps its last count, stops nobody else, and is asked again a
        moment later.
Rule 3: time comes in as `now`, monotonic seconds.

Follows ``MQAdminImpl.java`` (maxOffset): every master that the route names is asked.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from rocketmq_spark.consumer.topic_routes import refuse_static
from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    OptionError,
    RemotingException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.parallel import in_parallel
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.wire.cluster_info import ClusterInfo

# Seconds: for each question, until one that is silent is asked again, between two routes, and what "now" means.
_TIMEOUT: Final = 0.5
_SILENT: Final = 2.0
_ROUTE: Final = 2.0
_WINDOW: Final = 2.0


class Offsets(Protocol):
    """Whom to ask: as much of a transport as is needed."""

    def query_route(self, topic: str, timeout: float) -> TopicRouteData:
        """Return where a topic is."""
        ...

    def cluster_info(self, timeout: float) -> ClusterInfo:
        """Return the brokers that are registered."""
        ...

    def max_offset(self, queue: MessageQueue, address: str, timeout: float) -> int:
        """Return the offset that the queue's next message will get."""
        ...


class BrokerArrivals(NamedTuple):
    """What has arrived at one broker.

    Parameters
    ----------
    broker : str
    messages : int
    per_second : float or None
        Over the last two seconds; None: it does not answer.
    problem : str, default ""
        Why it does not, in few words.
    detail : str, default ""
        The same at length.
    """

    broker: str
    messages: int
    per_second: float | None
    problem: str = ""
    detail: str = ""


@dataclass(slots=True)
class _Broker:
    # The most queues that it has had, or may have had before the beginning: what is beyond is new.
    known: int
    address: str | None = None
    queues: int = 0
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    seen: deque[tuple[float, int]] = field(default_factory=deque)
    problem: str = ""
    detail: str = ""
    ask_at: float = float("-inf")

    @property
    def messages(self) -> int:
        # A topic that was deleted and made again begins from 0.
        return sum(max(0, offset - self.first[queue_id]) for queue_id, offset in self.last.items())


class Arrivals:
    """Counts what arrives in a topic.

    Parameters
    ----------
    transport : Offsets
    topic : str
        As brokers know it.

    Attributes
    ----------
    problem : str
        Why name servers tell nothing; "" if they do.
    note : str
        What is worth a word and no fault.
    """

    def __init__(self, transport: Offsets, topic: str) -> None:
        self._transport = transport
        self._topic = topic
        self._brokers: dict[str, _Broker] = {}
        # Whether name servers have told once of the topic, or that there is none; and who was there without it then.
        self._begun = False
        self._without: Set[str] = frozenset()
        self._route_at = float("-inf")
        self.problem = self.note = ""

    @property
    def messages(self) -> int:
        """How many have arrived, as far as brokers have told."""
        return sum(broker.messages for broker in self._brokers.values())

    def look(self, now: float, *, last: bool = False) -> None:
        """Ask brokers, and name servers from time to time; `last`: now, for where the topic has got to meanwhile.

        What goes wrong is kept as a problem, and nothing is raised for it.
        """
        if last or now >= self._route_at:
            self._refresh(now)
        due = [name for name, broker in self._brokers.items() if now >= broker.ask_at]
        in_parallel(due, lambda name: self._ask(name, self._brokers[name], now))

    def brokers(self) -> list[BrokerArrivals]:
        """Return what has arrived, by broker name."""
        return [
            BrokerArrivals(name, broker.messages, _rate(broker), broker.problem, broker.detail)
            for name, broker in sorted(self._brokers.items())
        ]

    def _refresh(self, now: float) -> None:
        try:
            route = self._route()
        except RocketMQError as exc:
            self.problem = f"no name server tells of the topic: {exc}"
            return
        if route is None:
            self.problem, self.note = "", "no name server knows the topic yet"
            return
        self.problem, self.note, self._route_at = "", "", now + _ROUTE
        try:
            refuse_static(self._topic, route)
        except OptionError as exc:
            self.problem = str(exc)
            return
        masters = {data.broker_name: data.master for data in route.broker_datas}
        for data in route.queue_datas:
            name, queues = data.broker_name, data.queue_nums
            broker = self._brokers.setdefault(name, _Broker(0 if name in self._without else queues))
            broker.first.update(dict.fromkeys(range(broker.known, queues), 0))
            broker.address, broker.queues, broker.known = masters.get(name), queues, max(broker.known, queues)
        for name in self._brokers.keys() - {data.broker_name for data in route.queue_datas}:
            self._brokers[name].address = None

    def _route(self) -> TopicRouteData | None:
        """Return where the topic is, None if no name server knows; the first time, look who is there without it."""
        if self._begun:
            return self._asked()
        registered: Set[str] = frozenset()
        # A proxy in a name server's place does not tell, nor who refuses the user. Before the route: who registers does
        # so with all its topics.
        with contextlib.suppress(MQClientException, MQBrokerException):
            registered = {broker.broker_name for broker in self._transport.cluster_info(_TIMEOUT).brokers}
        route = self._asked()
        self._without = registered - {data.broker_name for data in route.queue_datas} if route else registered
        self._begun = True
        return route

    def _asked(self) -> TopicRouteData | None:
        try:
            return self._transport.query_route(self._topic, _TIMEOUT)
        except TopicRouteStaleException:
            return None

    def _ask(self, name: str, broker: _Broker, now: float) -> None:
        if broker.address is None:
            broker.problem = broker.detail = "no name server knows its master just now"
            return
        try:
            for queue_id in range(broker.queues):
                queue = MessageQueue(self._topic, name, queue_id)
                # An empty queue of the type BatchCQ answers -1.
                offset = max(0, self._transport.max_offset(queue, broker.address, _TIMEOUT))
                broker.first.setdefault(queue_id, offset)
                broker.last[queue_id] = offset
        except RocketMQError as exc:
            broker.problem = "does not answer" if isinstance(exc, RemotingException) else "refuses to tell"
            broker.detail = str(exc)
            broker.ask_at = now + _SILENT
            broker.seen.clear()
            return
        broker.problem = broker.detail = ""
        broker.seen.append((now, broker.messages))
        while len(broker.seen) > 2 and now - broker.seen[1][0] >= _WINDOW:
            broker.seen.popleft()


def _rate(broker: _Broker) -> float | None:
    if broker.problem:
        return None
    if len(broker.seen) < 2:
        return 0.0
    (start, before), (end, after) = broker.seen[0], broker.seen[-1]
    return (after - before) / (end - start) if end > start else 0.0
