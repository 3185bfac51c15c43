"""Which queues a read is about, and which brokers to ask for them.

Rule 1: a master is asked first, its slaves while it is gone; the order turns with every failure.
Rule 2: what a name server can't tell just now stays as it was known; only what it says is not there is not there.
Rule 3: names of topics are the user's here; brokers know them with their namespace.

Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and ``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFoundException, TopicRouteStaleException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import DLQ_PREFIX, RETRY_PREFIX, is_system_topic
from rocketmq_spark.namespace import unwrap, wrap
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import MASTER_ID, TopicRouteData
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

# What a name server has just said is not asked for again, seconds; nor is one that takes its time, for so many times as
# long: whoever polls has other things to do than to wait for it.
_FRESH: Final = 1.0
_TIMES_AS_LONG: Final = 3
# What the list of topics is called among the routes.
_LIST: Final = ""


class TopicQueues:
    """The queues of a read, and where they are.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
    clock : callable
        Seconds, monotonic.
    routes : mapping of str to TopicRouteData, optional
        What is known already, by topic: who only reads need not ask a name server then.
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        routes: Mapping[str, TopicRouteData] | None = None,
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        # Per request, and for each name server in turn.
        self._timeout = options.pull_timeout_ms / 1000
        self._lock = threading.Lock()
        self._routes = dict(routes or {})
        self._names: frozenset[str] | None = None
        self._fresh_until: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def on_wire(self, queue: MessageQueue) -> MessageQueue:
        """Return the queue as brokers know it."""
        namespace = self._options.wrapped_namespace
        return replace(queue, topic=wrap(namespace, queue.topic)) if namespace else queue

    def find(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted; asks the name servers.

        Raises
        ------
        OptionError
            A topic of ``subscribe`` does not exist, or a queue of ``assign`` does not.
        RocketMQError
            No name server answers, and none has before.
        """
        with self._lock:
            self._fresh_until.clear()
        queues = self.present()
        missing = set(self._options.assign) - set(queues)
        if missing:
            raise OptionError(
                f"assign names {', '.join(map(str, sorted(missing, key=str)))}, which the brokers of the topic don't "
                "have for reading: see mqadmin topicRoute"
            )
        return queues

    def present(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted, by what the name servers have said within the last second.

        Raises
        ------
        RouteNotFoundException
            A topic of ``subscribe`` does not exist.
        RocketMQError
            No name server answers, and none has before.
        """
        topics = self._topics()
        queues = [queue for topic in topics for queue in _readable(topic, self._recent_route(topic))]
        wanted = filter(self._options.reads, queues)
        return sorted(wanted, key=lambda queue: (queue.topic, queue.broker_name, queue.queue_id))

    def address(self, queue: MessageQueue) -> str:
        """Return whom to ask for a queue: the master of its broker; after failures a slave, by turns.

        Raises
        ------
        RouteNotFoundException
            No broker of that name is known just now.
        """
        with self._lock:
            route, turn = self._routes.get(queue.topic), self._turns.get(queue.broker_name, 0)
        if route is None:
            route = self._route(queue.topic)
        for broker in route.broker_datas:
            if broker.broker_name == queue.broker_name and broker.broker_addrs:
                return broker.broker_addrs[sorted(broker.broker_addrs)[turn % len(broker.broker_addrs)]]
        raise RouteNotFoundException(
            f"reading {queue}: no name server knows a broker {queue.broker_name} for its topic just now"
        )

    def routes(self, queues: Iterable[MessageQueue]) -> dict[str, TopicRouteData]:
        """Return the routes of the topics of queues, as they are known."""
        with self._lock:
            return {topic: self._routes[topic] for topic in {queue.topic for queue in queues} & self._routes.keys()}

    def is_master(self, queue: MessageQueue, address: str) -> bool:
        """Return whether the master of the queue's broker has this address."""
        with self._lock:
            route = self._routes.get(queue.topic)
        masters = () if route is None else route.broker_datas
        return any(
            one.broker_name == queue.broker_name and one.broker_addrs.get(MASTER_ID) == address for one in masters
        )

    def exists(self, queue: MessageQueue) -> bool | None:
        """Return whether the route has the queue; None: it does not know its broker, which may come back."""
        with self._lock:
            route = self._routes.get(queue.topic)
        if route is None or all(data.broker_name != queue.broker_name for data in route.queue_datas):
            return None
        return queue in _readable(queue.topic, route)

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Take note that a broker did not answer: another one is asked next, and the route looked up again."""
        try:
            # Of many requests that fail together only the first turns to another address.
            asked = self.address(queue)
        except RocketMQError:
            asked = ""
        with self._lock:
            if asked == address:
                self._turns[queue.broker_name] = self._turns.get(queue.broker_name, 0) + 1
        try:
            self._recent_route(queue.topic)
        except RocketMQError as exc:
            logger.warning("%s did not answer for %s, and its route is unknown: %s", address, queue, exc)

    def _topics(self) -> list[str]:
        options = self._options
        if options.subscribe:
            return list(options.subscribe)
        if options.subscribe_pattern is None:
            named = options.assign or [queue for queue, _ in options.starting_offsets.offsets]
            return sorted({queue.topic for queue in named})
        namespace = options.wrapped_namespace
        own = {unwrap(topic, namespace): topic for topic in self._recent_names() if not _is_internal(topic)}
        # A topic of another namespace is not changed by taking this one's off.
        topics = {
            topic
            for topic, wired in own.items()
            if wrap(namespace, topic) == wired and (not namespace or topic != wired)
        }
        return sorted(topic for topic in topics if options.reads(MessageQueue(topic, "", 0)))

    def _recent_names(self) -> frozenset[str]:
        """Return the names of all topics, on the wire."""
        if self._names is None or not self._is_fresh(_LIST):
            try:
                with self._asking(_LIST):
                    self._names = self._transport.topics(self._timeout)
            except RocketMQError as exc:
                if self._names is None or not exc.retriable:
                    raise
                logger.warning("no name server gave the list of topics, going on with the last one: %s", exc)
        return self._names

    def _recent_route(self, topic: str) -> TopicRouteData:
        with self._lock:
            route = self._routes.get(topic)
        return self._route(topic) if route is None or not self._is_fresh(topic) else route

    def _is_fresh(self, what: str) -> bool:
        with self._lock:
            return self._clock() < self._fresh_until.get(what, -math.inf)

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        began = self._clock()
        with self._lock:
            # Of many threads that want to know, one asks.
            self._fresh_until[what] = began + _FRESH
        try:
            yield
        finally:
            ended = self._clock()
            with self._lock:
                self._fresh_until[what] = ended + max(_FRESH, _TIMES_AS_LONG * (ended - began))

    def _route(self, topic: str) -> TopicRouteData:
        wired = wrap(self._options.wrapped_namespace, topic)
        timeout = self._timeout * len(self._options.name_server)
        try:
            with self._asking(topic):
                route = self._transport.query_route(wired, timeout)
        except TopicRouteStaleException as exc:
            known = self._routes.get(topic)
            if known is None:
                raise RouteNotFoundException(f"reading topic {topic}: {exc}") from exc
            logger.warning("the route of topic %s is gone, its brokers may come back: %s", topic, exc)
            return known
        except RocketMQError as exc:
            known = self._routes.get(topic)
            if known is None or not exc.retriable:
                raise
            logger.warning("no name server gave the route of topic %s, going on with the last one: %s", topic, exc)
            return known
        if route.static_topic:
            raise RouteNotFoundException(
                f"reading topic {topic}: it is a static (logical) topic, which this release can't read; use an "
                "ordinary topic"
            )
        with self._lock:
            self._routes[topic] = route
        return route


def _readable(topic: str, route: TopicRouteData) -> list[MessageQueue]:
    reachable = {broker.broker_name for broker in route.broker_datas if broker.broker_addrs}
    return [
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        if data.readable and data.broker_name in reachable
        for queue_id in range(data.read_queue_nums)
    ]


def _is_internal(topic: str) -> bool:
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
