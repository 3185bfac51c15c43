"""Which queues a read is about, and which brokers to ask for them.

Rule 1: the master is asked first. While it does not answer, its slaves are asked in turn; the master is tried again
        after each ``pullTimeoutMs``.
Rule 2: a slave that was added later lacks the older messages. Its lower bounds count only if the master has not
        answered for ``readTimeoutMs``.
Rule 3: where a queue is, and whether it is there, is what `TopicRoutes` knows.
Rule 4: names of topics are the user's here; brokers know them with their namespace.

Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and ``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.consumer.deadline import PlanningDeadline
from rocketmq_spark.consumer.topic_routes import TopicRoutes, is_gone
from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RequestNotSupportedException,
    RocketMQError,
    RouteNotFoundException,
    TopicRouteStaleException,
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


@dataclass(slots=True)
class _Away:
    """A broker whose master does not answer: since when, whose turn it is, and when the master is tried again."""

    since: float
    retry_at: float
    turn: int = 0
    warned: bool = False


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
        self._clock = clock
        self._patience = options.read_timeout_ms / 1000
        # Per request.
        self._timeout = options.pull_timeout_ms / 1000
        self.deadline = PlanningDeadline(options.read_timeout_ms, clock)
        self._routes = TopicRoutes(options, transport, clock, self.deadline, routes)
        self._lock = threading.Lock()
        # By broker name.
        self._away: dict[str, _Away] = {}
        # By topic and broker; queue type and cleanup policy never change.
        self._configs: dict[tuple[str, str], TopicConfig] = {}

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

    def address(self, queue: MessageQueue, *, trusted: bool = False) -> str:
        """Return the address of a broker to ask about a queue.

        Parameters
        ----------
        queue : MessageQueue
        trusted : bool, default False
            Only a broker that `trusts` accepts.

        Raises
        ------
        RouteNotFoundException
            The name servers know no broker of that name, or with `trusted` no master.
        """
        route = self._routes.last(queue.topic)
        addresses = _addresses(queue, route)
        if not addresses:
            raise RouteNotFoundException(
                f"reading {queue}: no name server knows a broker {queue.broker_name} for its topic just now"
            )
        master = addresses.get(MASTER_ID)
        with self._lock:
            now = self._clock()
            away = self._away.get(queue.broker_name)
            if master is None:
                away = self._away.setdefault(queue.broker_name, _Away(now, now))
                self.deadline.extend(2 * self._timeout)
            if away is None or (trusted and master is not None and now - away.since < self._patience):
                return addresses[min(addresses)]
            if trusted and now - away.since < self._patience:
                raise RouteNotFoundException(
                    f"reading {queue}: the master of {queue.broker_name} is in no route. The offsets of its slaves "
                    f"count after readTimeoutMs={self._options.read_timeout_ms}"
                )
            if master is not None and now >= away.retry_at:
                away.retry_at = now + self._timeout
                return master
            return _by_turns(addresses, away)

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

    def has_slave(self, queue: MessageQueue) -> bool:
        """Return whether the last route has a slave of the queue's broker."""
        route = self._routes.known(queue.topic)
        return route is not None and any(broker_id != MASTER_ID for broker_id in _addresses(queue, route))

    def trusts(self, queue: MessageQueue, address: str) -> bool:
        """Return whether this broker's lower bounds count: it is the master, or the master has been away for long."""
        if self.is_master(queue, address):
            return True
        with self._lock:
            away = self._away.get(queue.broker_name)
            if away is None or self._clock() - away.since < self._patience:
                return False
            warned, away.warned = away.warned, True
        if not warned:
            logger.warning(
                "the master of %s has not answered for readTimeoutMs=%d: the offsets of its slave %s count instead. "
                "If the slave lacks older messages, the read does not return them",
                *(queue.broker_name, self._options.read_timeout_ms, address),
            )
        return True

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
        try:
            return not self.config(queue, self.address(queue)).holds_batches
        except RocketMQError as exc:
            logger.warning("reading %s with a filter: the type of its queues is unknown: %s", queue, exc)
            # Only brokers can evaluate SQL92.
            return self._options.filter_type == "SQL92"

    def config(self, queue: MessageQueue, address: str) -> TopicConfig:
        """Return the configuration of a queue's topic; a broker is asked until it has answered once.

        Brokers of 4.x and proxies do not support the request. Their topics count as plain ones without compaction.

        Raises
        ------
        RocketMQError
            The broker does not answer, or refuses the user.
        """
        place = queue.topic, queue.broker_name
        if place not in self._configs:
            try:
                config = self._transport.topic_config(
                    address, self.on_wire(queue).topic, self.deadline.limit(self._timeout)
                )
            except TopicRouteStaleException:
                # A broker without the topic creates it with the default attributes.
                return TopicConfig()
            except RequestNotSupportedException:
                config = TopicConfig()
            self._configs[place] = config
        return self._configs[place]

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Take note that a broker did not answer: another one is asked next, and the route looked up again."""
        route = self._routes.known(queue.topic)
        addresses = {} if route is None else _addresses(queue, route)
        with self._lock:
            now = self._clock()
            away = self._away.get(queue.broker_name)
            if address and address == addresses.get(MASTER_ID):
                away = self._away.setdefault(queue.broker_name, _Away(now, now))
                away.retry_at = now + self._timeout
                if len(addresses) > 1:
                    self.deadline.extend(2 * self._timeout)
            # Of many requests that fail together only the first turns to another address.
            if away is not None and addresses and _by_turns(addresses, away) == address:
                away.turn += 1
        if self._routes.is_fresh(queue.topic):
            return
        try:
            self._routes.recent(queue.topic)
        except RocketMQError as exc:
            logger.warning("%s did not answer for %s, and its route is unknown: %s", address, queue, exc)

    def answered(self, queue: MessageQueue, address: str, *, trusted: bool = False) -> None:
        """Note that a broker answered: a master is asked first from now on, a slave that was `trusted` is logged."""
        if queue.broker_name in self._away and self.is_master(queue, address):
            with self._lock:
                self._away.pop(queue.broker_name, None)
        elif trusted:
            self.trusts(queue, address)


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


def _addresses(queue: MessageQueue, route: TopicRouteData) -> Mapping[int, str]:
    """Return the addresses of a queue's broker by their ids; the master's id is the lowest."""
    named = (broker.broker_addrs for broker in route.broker_datas if broker.broker_name == queue.broker_name)
    return next(filter(None, named), {})


def _by_turns(addresses: Mapping[int, str], away: _Away) -> str:
    return addresses[sorted(addresses)[away.turn % len(addresses)]]
