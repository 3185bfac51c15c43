"""The queues of a read, and the brokers to ask about them.

The master is asked first. While it does not answer, its slaves are asked in turn, and the master again after each
``pullTimeoutMs``. A slave that was added later lacks the older messages, so its lower bounds count only if the master
has not answered for ``readTimeoutMs``.
Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and ``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import MASTER_ID, TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.topic_config import TopicConfig
from rocketmq_spark.routing.topic_configs import TopicConfigCache
from rocketmq_spark.source.topic_routes import PlanningDeadline, TopicRoutes, is_gone
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.source")

# The answer of a broker without enablePropertyFilter to a SQL expression (ClientManageProcessor.checkClientConfig).
_NO_SQL: Final = "does not support consumer to filter message"


@dataclass(slots=True)
class _Away:
    """A broker whose master does not answer.

    The times are seconds of the clock: since when, and when the master is tried again. `turn` counts the addresses
    that were asked instead.
    """

    since: float
    retry_at: float
    turn: int = 0
    warned: bool = False


class TopicQueues:
    """The queues of a read; safe for many threads.

    `routes` are known routes by topic, so that a task need not ask a name server. `find` restarts the `deadline`.
    """

    def __init__(
        self,
        options: SourceOptions,
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
        self._configs = TopicConfigCache(transport, clock)

    def find(self) -> list[MessageQueue]:
        """Ask the name servers, and return the queues that can be read now, sorted.

        Raises
        ------
        OptionError
            A queue of ``assign`` does not exist, or a topic is static.
        RouteNotFoundException
            A topic does not exist.
        ReadError
            Name servers did not give all routes within ``readTimeoutMs``.
        RocketMQError
            No name server answers, and no earlier route is known.
        """
        self.deadline.restart()
        self._routes.expire()
        queues = self._present(skip_gone=False)
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
        """Return the queues that can be read now, sorted, by routes of the last second.

        Raises as `find`, except for queues of ``assign``: their broker may come back. Without ``failOnDataLoss`` a
        topic that does not exist is left out.
        """
        return self._present(skip_gone=not self._options.fail_on_data_loss)

    def _present(self, *, skip_gone: bool) -> list[MessageQueue]:
        def ask(topic: str) -> TopicRouteData | None:
            try:
                return self._routes.recent(topic)
            except RouteNotFoundException as exc:
                if not (skip_gone and is_gone(exc)):
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
        """Return the address of a broker to ask about a queue; with `trusted` one that `trusts` accepts.

        Raises a RouteNotFoundException if the last route has no such broker, or with `trusted` no master.
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
                away = self._master_failed(queue, addresses, now)
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
        """Return the known routes of the queues' topics."""
        topics = {queue.topic for queue in queues}
        return {topic: route for topic in topics if (route := self._routes.known(topic)) is not None}

    def is_master(self, queue: MessageQueue, address: str) -> bool:
        """Return whether the master of the queue's broker has this address."""
        return bool(address) and self._known_addresses(queue).get(MASTER_ID) == address

    def has_slave(self, queue: MessageQueue) -> bool:
        """Return whether the last route has a slave of the queue's broker."""
        return any(broker_id != MASTER_ID for broker_id in self._known_addresses(queue))

    def trusts(self, queue: MessageQueue, address: str) -> bool:
        """Return whether the broker's lower bounds count: it is the master, or the master has been away for long."""
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
        """Return whether the route has the queue, or None if it lacks the queue's broker, which may come back.

        A topic without a known route does not exist if the name servers know brokers, but not the topic.
        """
        try:
            route = self._routes.last(queue.topic)
        except RocketMQError as exc:
            return False if is_gone(exc) else None
        if all(data.broker_name != queue.broker_name for data in route.queue_datas):
            return None
        return queue in _readable(queue.topic, route)

    def may_hold_inner_batches(self, queues: Iterable[MessageQueue]) -> bool:
        """Return whether a queue may hold batches as units. A broker ignores the tags and properties of their members.

        A queue of unknown type counts as such a queue, if the filter can be applied without the broker.
        """
        one_of_each = list({place(queue): queue for queue in queues}.values())
        # Most reads are of topics of one type: the first answer may be enough.
        if not one_of_each or not self.is_plain(one_of_each[0]):
            return bool(one_of_each)
        return not all(self.deadline.in_parallel(one_of_each[1:], self.is_plain, "types of topics").values())

    def check_filter(self, queues: Iterable[MessageQueue]) -> None:
        """Have every broker check an SQL expression: a broken one would filter out all messages, or none.

        A broker that does not answer now checks it with the first pull.

        Raises
        ------
        OptionError
            A broker cannot parse the expression, or does not support SQL.
        MQBrokerException
            A broker refuses the user.
        """
        options = self._options
        for queue in {queue.broker_name: queue for queue in queues}.values():
            try:
                self._transport.check_filter(
                    self.address(queue),
                    queue.topic,
                    options.consumer_group,
                    options.sub_expression,
                    options.filter_type,
                    self.deadline.limit(self._timeout),
                )
            except RocketMQError as exc:
                if isinstance(exc, MQBrokerException):
                    if why := _reason(exc):
                        raise OptionError(f"subExpression of filterType={options.filter_type}: {why}: {exc}") from exc
                    if not exc.retriable:
                        raise
                logger.warning("%s can't be asked for its opinion of the filter: %s", queue.broker_name, exc)

    def is_plain(self, queue: MessageQueue) -> bool:
        """Return whether a queue certainly holds no batches as units, or a filter by SQL does not depend on it."""
        try:
            return not self.config(queue, self.address(queue)).holds_batches
        except RocketMQError as exc:
            logger.warning("reading %s with a filter: the type of its queues is unknown: %s", queue, exc)
            # Only brokers can evaluate SQL92.
            return self._options.filter_type == "SQL92"

    def config(self, queue: MessageQueue, address: str) -> TopicConfig:
        """Return the configuration of a queue's topic, as `TopicConfigCache.config`."""
        timeout = self.deadline.limit(self._timeout)
        return self._configs.config(queue.topic, queue.broker_name, address, timeout)

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Note that a broker did not answer: another one is asked next, and the route is looked up again."""
        addresses = self._known_addresses(queue)
        with self._lock:
            now = self._clock()
            away = self._away.get(queue.broker_name)
            if address and address == addresses.get(MASTER_ID):
                away = self._master_failed(queue, addresses, now)
                away.retry_at = now + self._timeout
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
        """Note that a broker answered: a master is asked first again, a slave that was `trusted` is logged."""
        if queue.broker_name in self._away and self.is_master(queue, address):
            with self._lock:
                self._away.pop(queue.broker_name, None)
        elif trusted:
            self.trusts(queue, address)

    def _master_failed(self, queue: MessageQueue, addresses: Mapping[int, str], now: float) -> _Away:
        """Note that the master does not answer. The plan gets the time that its slaves need until they are trusted."""
        if any(broker_id != MASTER_ID for broker_id in addresses):
            self.deadline.extend(2 * self._timeout)
        return self._away.setdefault(queue.broker_name, _Away(now, now))

    def _known_addresses(self, queue: MessageQueue) -> Mapping[int, str]:
        route = self._routes.known(queue.topic)
        return {} if route is None else _addresses(queue, route)


def place(queue: MessageQueue) -> tuple[str, str]:
    """Return the topic and broker of a queue."""
    return queue.topic, queue.broker_name


def _reason(error: MQBrokerException) -> str:
    """Return why a broker rejected an SQL expression; "" if it refused the request for another reason."""
    if error.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
        return "a broker can't read it"
    return "brokers take SQL with enablePropertyFilter=true only" if _NO_SQL in error.remark else ""


def _is_of_servers(topic: str, route: TopicRouteData) -> bool:
    """Return whether a broker created the topic for itself, with its own name or its cluster's."""
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
