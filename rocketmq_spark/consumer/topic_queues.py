"""Which queues a read is about, and which brokers to ask for them.

Rule 1: a master is asked first, its slaves while it is gone; the order turns with every failure.
Rule 2: where a queue is, and whether it is there, is what `TopicRoutes` knows.
Rule 3: names of topics are the user's here; brokers know them with their namespace.

Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and ``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from rocketmq_spark.consumer.deadline import PlanningDeadline
from rocketmq_spark.consumer.topic_routes import TopicRoutes, is_gone
from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RequestNotSupportedException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.namespace import wrap
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import MASTER_ID, TopicRouteData
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.wire.codes import ResponseCode
from rocketmq_spark.wire.topic_config import TopicConfig

logger = logging.getLogger("rocketmq_spark.consumer")

# What a broker without enablePropertyFilter says of SQL (ClientManageProcessor.checkClientConfig).
_NO_SQL: Final = "does not support consumer to filter message"


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

    Attributes
    ----------
    deadline : PlanningDeadline
        Of the driver; `find` restarts it.
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
        # Per request.
        self._timeout = options.pull_timeout_ms / 1000
        self.deadline = PlanningDeadline(options.read_timeout_ms, clock)
        self._routes = TopicRoutes(options, transport, clock, self.deadline, routes)
        self._lock = threading.Lock()
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
        ReadError
            Name servers did not give all routes within ``readTimeoutMs``.
        RocketMQError
            No name server answers, and none has before.
        """
        self.deadline.restart()
        self._routes.expire()
        queues = self._present(goes_on=False)
        if not queues and self._options.subscribe_pattern is not None:
            logger.warning("subscribePattern=%s fits no topic that there is now", self._options.subscribe_pattern)
        missing = self._options.assign.difference(queues)
        if missing:
            raise OptionError(
                f"assign names {', '.join(map(str, sorted(missing, key=str)))}, which can't be read: no such queue is "
                "in the routes of the topics now: it does not exist, or its broker is down"
            )
        return queues

    def present(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted, by what the name servers have said within the last second.

        Raises as `find`, but for queues of ``assign``: a broker that is away may come back with them. Without
        ``failOnDataLoss`` a topic that does not exist is left out.
        """
        return self._present(goes_on=not self._options.fail_on_data_loss)

    def _present(self, *, goes_on: bool) -> list[MessageQueue]:
        def ask(topic: str) -> TopicRouteData | None:
            try:
                return self._routes.recent(topic)
            except RouteNotFoundException as exc:
                if not (goes_on and is_gone(exc)):
                    raise
                self._routes.say_gone(topic, exc)
                return None

        by_pattern = self._options.subscribe_pattern is not None
        queues: list[MessageQueue] = []
        routes = self.deadline.in_parallel(self._routes.topics(), ask, "routes of topics", self._routes.known)
        if self.deadline.passed:
            # Name servers are slow, and all routes are known: brokers have time to answer, too.
            self.deadline.restart()
        for topic, route in routes.items():
            if route is not None and not (by_pattern and _is_of_servers(topic, route)):
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
        route = self._routes.last(queue.topic)
        with self._lock:
            turn = self._turns.get(queue.broker_name, 0)
        address = _address(queue, route, turn)
        if address is None:
            raise RouteNotFoundException(
                f"reading {queue}: no name server knows a broker {queue.broker_name} for its topic just now"
            )
        return address

    def routes(self, queues: Iterable[MessageQueue]) -> dict[str, TopicRouteData]:
        """Return the routes of the topics of queues, as they are known."""
        found = {topic: self._routes.known(topic) for topic in {queue.topic for queue in queues}}
        return {topic: route for topic, route in found.items() if route is not None}

    def is_master(self, queue: MessageQueue, address: str) -> bool:
        """Return whether the master of the queue's broker has this address."""
        route = self._routes.known(queue.topic)
        masters = () if route is None else route.broker_datas
        return any(
            one.broker_name == queue.broker_name and one.broker_addrs.get(MASTER_ID) == address for one in masters
        )

    def exists(self, queue: MessageQueue) -> bool | None:
        """Return whether the route has the queue; None: it does not know its broker, which may come back.

        A topic that had no route until now is gone if name servers that know brokers do not know it.
        """
        try:
            route = self._routes.last(queue.topic)
        except RocketMQError as exc:
            return False if is_gone(exc) else None
        if all(data.broker_name != queue.broker_name for data in route.queue_datas):
            return None
        return queue in _readable(queue.topic, route)

    def may_hold_inner_batches(self, queues: Iterable[MessageQueue]) -> bool:
        """Return whether a queue may have batches as units, at whose members' tags and properties no broker looks.

        What a broker does not tell is taken for such a batch where a filter can do without the broker.
        """
        places = list({(queue.topic, queue.broker_name): queue for queue in queues}.values())
        # Most reads are of topics of one type: the first answer may be enough.
        if not places or not self.is_plain(places[0]):
            return bool(places)
        return not all(self.deadline.in_parallel(places[1:], self.is_plain, "types of topics").values())

    def check_filter(self, queues: Iterable[MessageQueue]) -> None:
        """Have every broker look at an expression of SQL: one that can't be read would let nothing through, or all.

        Raises
        ------
        OptionError
            A broker can't read it, or takes no SQL.
        MQBrokerException
            A broker refuses the user. One that can't be asked now is asked with the first pull.
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
                    self.deadline.limit(self._timeout),
                )
            except RocketMQError as exc:
                if isinstance(exc, MQBrokerException):
                    if why := _why_refused(exc):
                        raise OptionError(f"subExpression of filterType={options.filter_type}: {why}: {exc}") from exc
                    if not exc.retriable:
                        raise
                logger.warning("%s can't be asked for its opinion of the filter: %s", queue.broker_name, exc)

    def is_plain(self, queue: MessageQueue) -> bool:
        """Return whether a queue has no such batches for sure, or as far as a filter by SQL is concerned."""
        place = queue.topic, queue.broker_name
        if place not in self._plain:
            try:
                config = self._transport.topic_config(
                    self.address(queue), self.on_wire(queue).topic, self.deadline.limit(self._timeout)
                )
            except RocketMQError as exc:
                if not isinstance(exc, RequestNotSupportedException):
                    logger.warning("reading %s with a filter: the type of its queues is unknown: %s", queue, exc)
                    # Nobody but a broker can look at SQL.
                    return self._options.filter_type == "SQL92"
                # Brokers of 4.x have plain queues only.
                config = TopicConfig()
            self._plain[place] = not config.holds_batches
        return self._plain[place]

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Take note that a broker did not answer: another one is asked next, and the route looked up again."""
        route = self._routes.known(queue.topic)
        with self._lock:
            turn = self._turns.get(queue.broker_name, 0)
            # Of many requests that fail together only the first turns to another address.
            if route is not None and _address(queue, route, turn) == address:
                self._turns[queue.broker_name] = turn + 1
        if self._routes.is_fresh(queue.topic):
            return
        try:
            self._routes.recent(queue.topic)
        except RocketMQError as exc:
            logger.warning("%s did not answer for %s, and its route is unknown: %s", address, queue, exc)


def _why_refused(error: MQBrokerException) -> str:
    """Return what is wrong with an expression of SQL; "" if that is not what a broker refused."""
    if error.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
        return "a broker can't read it"
    return "brokers take SQL with enablePropertyFilter=true only" if _NO_SQL in error.remark else ""


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
