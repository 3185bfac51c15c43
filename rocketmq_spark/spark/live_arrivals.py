"""How many messages have arrived in a topic since a moment, by the brokers' own offsets.

Rule 1: a queue counts from its offset at the first look; one that a later route brings, from 0: it is being made.
Rule 2: who does not answer keeps its last count, stops nobody else, and is asked again a moment later.
Rule 3: time comes in as `now`, monotonic seconds.

Follows ``MQAdminImpl.java`` (maxOffset): every master that the route names is asked.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from rocketmq_spark.errors import RemotingException, RocketMQError, TopicRouteStaleException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.route_data import TopicRouteData

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
    address: str | None
    queues: int
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
        # Whether name servers have told once of the topic, or that there is none.
        self._begun = False
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
        for name, broker in self._brokers.items():
            if now >= broker.ask_at:
                self._ask(name, broker, now)

    def brokers(self) -> list[BrokerArrivals]:
        """Return what has arrived, by broker name."""
        return [
            BrokerArrivals(name, broker.messages, _rate(broker), broker.problem, broker.detail)
            for name, broker in sorted(self._brokers.items())
        ]

    def _refresh(self, now: float) -> None:
        try:
            route = self._transport.query_route(self._topic, _TIMEOUT)
        except TopicRouteStaleException:
            self._begun, self.problem, self.note = True, "", "no name server knows the topic yet"
            return
        except RocketMQError as exc:
            self.problem = f"no name server tells of the topic: {exc}"
            return
        self.problem, self.note, self._route_at = "", "", now + _ROUTE
        masters = {data.broker_name: data.master for data in route.broker_datas}
        for data in route.queue_datas:
            queues = max(data.read_queue_nums, data.write_queue_nums)
            known = self._brokers.setdefault(data.broker_name, _Broker(None, 0))
            if self._begun:
                known.first.update(dict.fromkeys(range(known.queues, queues), 0))
            known.address, known.queues = masters.get(data.broker_name), queues
        for name in self._brokers.keys() - {data.broker_name for data in route.queue_datas}:
            self._brokers[name].address = None
        self._begun = True

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
