"""Counts the messages that arrive in a topic, by the maximum offsets that brokers report (``MQAdminImpl.maxOffset``).

A queue's count begins at the first offset that its broker reports to this display. It begins at 0 if the display saw
that the queue was new: its broker had fewer queues before, or was registered without the topic at first. A broker that
registers later may have been down and have old messages, so the queues that it has then do not count from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.source.topic_routes import refuse_static
from rocketmq_spark.transport.parallel import in_parallel

if TYPE_CHECKING:
    from rocketmq_spark.transport.remoting.transport import RemotingTransport

# Seconds per request.
_TIMEOUT: Final = 0.5
# Seconds before the next request to a silent broker, between two route requests, and the span of a rate.
_PAUSE: Final = 2.0


class BrokerArrivals(NamedTuple):
    """The messages that have arrived at one broker; with a `problem`, `per_second` is None."""

    broker: str
    messages: int
    per_second: float | None
    problem: str = ""
    detail: str = ""


@dataclass(slots=True)
class _Broker:
    # The most queues that it has had, or may have had before the beginning. Further queues are new.
    known: int
    address: str | None = None
    queues: int = 0
    # Offsets by queue id.
    first: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    # Times and numbers of messages.
    seen: deque[tuple[float, int]] = field(default_factory=deque)
    problem: str = ""
    detail: str = ""
    request_at: float = float("-inf")

    @property
    def messages(self) -> int:
        # A topic that was deleted and created again begins from 0.
        return sum(max(0, offset - self.first[queue_id]) for queue_id, offset in self.last.items())

    @property
    def per_second(self) -> float | None:
        if self.problem:
            return None
        if len(self.seen) < 2:
            return 0.0
        (start, before), (end, after) = self.seen[0], self.seen[-1]
        return (after - before) / (end - start) if end > start else 0.0


@dataclass(slots=True, eq=False, repr=False)
class Arrivals:
    """Counts the messages that arrive in a topic."""

    transport: RemotingTransport
    topic: str
    # Why there is no route, and a remark that is no problem.
    problem: str = ""
    note: str = ""
    _brokers: dict[str, _Broker] = field(default_factory=dict)
    # The brokers that were registered without the topic at the first answer of a name server; None before it.
    _without: Set[str] | None = None
    _route_at: float = float("-inf")

    @property
    def messages(self) -> int:
        """How many messages have arrived, as far as brokers have answered."""
        return sum(broker.messages for broker in self._brokers.values())

    def look(self, now: float, *, last: bool = False) -> None:
        """Query the brokers concurrently, first the name servers if the route is two seconds old (with `last`: always).

        A broker that did not answer gets no request for two seconds.
        """
        if last or now >= self._route_at:
            self._refresh(now)
        due = [name for name, broker in self._brokers.items() if now >= broker.request_at]
        in_parallel(due, lambda name: self._count(name, self._brokers[name], now))

    def brokers(self) -> list[BrokerArrivals]:
        """Return what has arrived, by broker name."""
        return [
            BrokerArrivals(name, broker.messages, broker.per_second, broker.problem, broker.detail)
            for name, broker in sorted(self._brokers.items())
        ]

    def _refresh(self, now: float) -> None:
        registered: Set[str] = frozenset()
        route = None
        try:
            if self._without is None:
                # Proxies do not support this request, and the user may lack the permission for it. It precedes the
                # route request, because a broker registers with all its topics.
                with suppress(errors.MQClientException, errors.MQBrokerException):
                    registered = {broker.broker_name for broker in self.transport.cluster_info(_TIMEOUT).brokers}
            with suppress(errors.TopicRouteStaleException):
                route = self.transport.query_route(self.topic, _TIMEOUT)
            self.problem, self.note = "", "" if route else "no name server knows the topic yet"
            listed = {data.broker_name for data in route.queue_datas} if route else set()
            if self._without is None:
                self._without = registered - listed
            if route is None:
                return
            self._route_at = now + _PAUSE
            refuse_static(self.topic, route)
        except errors.OptionError as exc:
            self.problem = str(exc)
            return
        except errors.RocketMQError as exc:
            self.problem = f"looking up the topic failed: {exc}"
            return
        masters = {data.broker_name: data.master for data in route.broker_datas}
        for data in route.queue_datas:
            name, queues = data.broker_name, data.queue_nums
            broker = self._brokers.setdefault(name, _Broker(0 if name in self._without else queues))
            broker.first.update(dict.fromkeys(range(broker.known, queues), 0))
            broker.address, broker.queues, broker.known = masters.get(name), queues, max(broker.known, queues)
        for name in self._brokers.keys() - listed:
            self._brokers[name].address = None

    def _count(self, name: str, broker: _Broker, now: float) -> None:
        if broker.address is None:
            broker.problem = broker.detail = "no name server lists its master now"
            return
        try:
            for queue_id in range(broker.queues):
                queue = MessageQueue(self.topic, name, queue_id)
                # An empty queue of the type BatchCQ answers -1.
                offset = max(0, self.transport.max_offset(queue, broker.address, _TIMEOUT))
                broker.first.setdefault(queue_id, offset)
                broker.last[queue_id] = offset
        except errors.RocketMQError as exc:
            broker.problem = "does not answer" if isinstance(exc, errors.RemotingException) else "rejects the request"
            broker.detail = str(exc)
            broker.request_at = now + _PAUSE
            broker.seen.clear()
            return
        broker.problem = broker.detail = ""
        broker.seen.append((now, broker.messages))
        while len(broker.seen) > 2 and now - broker.seen[1][0] >= _PAUSE:
            broker.seen.popleft()
