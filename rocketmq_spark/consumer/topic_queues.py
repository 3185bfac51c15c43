"""Which queues a read is about, and which brokers to ask for them.

Rule 1: a master is asked first, its slaves while it is gone; the order turns with every failure.
Rule 2: what a name server can't tell just now stays as it was known; only what it says is not there is not there.
Rule 3: names of topics are the user's here; brokers know them with their namespace.

Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and ``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RemotingException,
    RequestNotSupportedException,
    RocketMQError,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import is_internal_topic
from rocketmq_spark.namespace import bare_name, wrap
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import MASTER_ID, TopicRouteData
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.wire.codes import ResponseCode
from rocketmq_spark.wire.topic_config import BATCH_CQ, queue_type_of

logger = logging.getLogger("rocketmq_spark.consumer")

# A route that has just been asked for is not asked for again, seconds.
_FRESH: Final = 1.0
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
        self._asked_at: dict[str, float] = {}
        # Why there is no route of a topic, where there has never been one.
        self._unknown: dict[str, RocketMQError] = {}
        self._listed: frozenset[str] | None = None
        self._turns: dict[str, int] = {}
        # By topic and broker; a type is for ever.
        self._plain: dict[tuple[str, str], bool] = {}

    def on_wire(self, queue: MessageQueue) -> MessageQueue:
        """Return the queue as brokers know it."""
        namespace = self._options.wrapped_namespace
        return replace(queue, topic=wrap(namespace, queue.topic)) if namespace else queue

    def find(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted; asks the name servers.

        Raises
        ------
        OptionError
            A queue of ``assign`` does not exist, or a topic is of a kind that can't be read.
        RouteNotFoundException
            A topic does not exist.
        RocketMQError
            No name server answers, and none has before.
        """
        with self._lock:
            self._asked_at.clear()
        queues = self.present()
        if not queues and self._options.subscribe_pattern is not None:
            logger.warning("subscribePattern=%s fits no topic that there is now", self._options.subscribe_pattern)
        missing = set(self._options.assign) - set(queues)
        if missing:
            raise OptionError(
                f"assign names {', '.join(map(str, sorted(missing, key=str)))}, which can't be read: no such queue is "
                "in the routes of the topics now: it does not exist, or its broker is down"
            )
        return queues

    def present(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted, by what the name servers have said within the last second.

        Raises as `find`, but for queues of ``assign``: a broker that is away may come back with them.
        """
        by_pattern = self._options.subscribe_pattern is not None
        queues: list[MessageQueue] = []
        for topic in self._topics():
            route = self._recent_route(topic)
            if not (by_pattern and _is_of_servers(topic, route)):
                queues += _readable(topic, route)
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
            with self._lock:
                unknown = self._unknown.get(queue.topic) if self._is_fresh(queue.topic) else None
            if unknown is not None:
                raise unknown
            route = self._route(queue.topic)
        address = _address(queue, route, turn)
        if address is None:
            raise RouteNotFoundException(
                f"reading {queue}: no name server knows a broker {queue.broker_name} for its topic just now"
            )
        return address

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

    def may_hold_inner_batches(self, queues: Iterable[MessageQueue]) -> bool:
        """Return whether a queue may have batches as units, at whose members' tags and properties no broker looks.

        What a broker does not tell is taken for such a batch where a filter can do without the broker.
        """
        one_of_each = {(queue.topic, queue.broker_name): queue for queue in queues}
        return not all(self.is_plain(queue) for queue in one_of_each.values())

    def check_filter(self, queues: Iterable[MessageQueue]) -> None:
        """Have every broker look at an expression of SQL: one that can't be read would let nothing through, or all.

        Raises
        ------
        OptionError
            A broker refuses it. One that can't be asked now is asked with the first pull.
        """
        options = self._options
        for queue in {queue.broker_name: queue for queue in queues}.values():
            try:
                self._transport.check_filter(
                    self.address(queue),
                    self.on_wire(queue).topic,
                    options.consumer_group,
                    options.sub_expression,
                    options.filter_type,
                    self._timeout,
                )
            except MQBrokerException as exc:
                unread = exc.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
                why = "a broker can't read it" if unread else "brokers take SQL with enablePropertyFilter=true only"
                raise OptionError(f"subExpression of filterType={options.filter_type}: {why}: {exc}") from exc
            except RocketMQError as exc:
                logger.warning("%s can't be asked for its opinion of the filter: %s", queue.broker_name, exc)

    def is_plain(self, queue: MessageQueue) -> bool:
        """Return whether a queue has no such batches for sure, or as far as a filter by SQL is concerned."""
        place = queue.topic, queue.broker_name
        if place not in self._plain:
            try:
                attributes = self._transport.topic_attributes(
                    self.address(queue), self.on_wire(queue).topic, self._timeout
                )
            except RocketMQError as exc:
                if not isinstance(exc, RequestNotSupportedException):
                    logger.warning("reading %s with a filter: the type of its queues is unknown: %s", queue, exc)
                    # Nobody but a broker can look at SQL.
                    return self._options.filter_type == "SQL92"
                # Brokers of 4.x have plain queues only.
                attributes = {}
            self._plain[place] = queue_type_of(attributes) != BATCH_CQ
        return self._plain[place]

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Take note that a broker did not answer: another one is asked next, and the route looked up again."""
        with self._lock:
            route, turn = self._routes.get(queue.topic), self._turns.get(queue.broker_name, 0)
            # Of many requests that fail together only the first turns to another address.
            if route is not None and _address(queue, route, turn) == address:
                self._turns[queue.broker_name] = turn + 1
            fresh = self._is_fresh(queue.topic)
        if fresh:
            return
        try:
            self._route(queue.topic)
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
        users = (bare_name(wired, namespace) for wired in self._all_topics() if not is_internal_topic(wired))
        return sorted(topic for topic in users if topic is not None and options.reads(MessageQueue(topic, "", 0)))

    def _all_topics(self) -> frozenset[str]:
        if self._listed is None or not self._is_fresh(_LIST):
            try:
                self._listed = self._transport.topics(self._timeout)
            except RocketMQError as exc:
                if self._listed is None or not exc.retriable:
                    raise
                logger.warning("no name server listed the topics, going on with those of the last time: %s", exc)
            self._was_asked(_LIST)
        return self._listed

    def _recent_route(self, topic: str) -> TopicRouteData:
        with self._lock:
            route = self._routes.get(topic)
        return self._route(topic) if route is None or not self._is_fresh(topic) else route

    def _is_fresh(self, topic: str) -> bool:
        return self._clock() - self._asked_at.get(topic, -math.inf) < _FRESH

    def _route(self, topic: str) -> TopicRouteData:
        self._was_asked(topic)
        try:
            route = self._asked(topic)
        except RocketMQError as exc:
            known = self._routes.get(topic)
            # Fresh from now on: asking may have taken long, and must not take all the time.
            self._was_asked(topic, exc)
            if known is None or not exc.retriable:
                raise
            logger.warning("no name server gave the route of topic %s, going on with the last one: %s", topic, exc)
            return known
        with self._lock:
            self._routes[topic] = route
        return route

    def _was_asked(self, topic: str, error: RocketMQError | None = None) -> None:
        with self._lock:
            self._asked_at[topic] = self._clock()
            if error is None:
                self._unknown.pop(topic, None)
            else:
                self._unknown[topic] = error

    def _asked(self, topic: str) -> TopicRouteData:
        wired = wrap(self._options.wrapped_namespace, topic)
        try:
            route = self._transport.query_route(wired, self._timeout * len(self._options.name_server))
        except TopicRouteStaleException as exc:
            raise RouteNotFoundException(f"reading topic {topic}: {exc}") from exc
        except RemotingException as exc:
            if not exc.retriable:
                raise
            raise RouteNotFoundException(f"reading topic {topic}: {exc}", unreachable=True) from exc
        if route.static_topic:
            raise OptionError(
                f"reading topic {topic}: it is a static (logical) topic, which this release can't read; use an "
                "ordinary topic"
            )
        return route


def _is_of_servers(topic: str, route: TopicRouteData) -> bool:
    """Return whether a topic is one that a broker makes for itself, of its own name or of its cluster's."""
    return any(topic in (broker.broker_name, broker.cluster) for broker in route.broker_datas)


def _readable(topic: str, route: TopicRouteData) -> list[MessageQueue]:
    reachable = {broker.broker_name for broker in route.broker_datas if broker.broker_addrs}
    return [
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        if data.readable and data.broker_name in reachable
        for queue_id in range(data.read_queue_nums)
    ]


def _address(queue: MessageQueue, route: TopicRouteData, turn: int) -> str | None:
    for broker in route.broker_datas:
        if broker.broker_name == queue.broker_name and broker.broker_addrs:
            return broker.broker_addrs[sorted(broker.broker_addrs)[turn % len(broker.broker_addrs)]]
    return None
