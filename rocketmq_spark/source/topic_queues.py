"""Finds the queues of a read, and chooses the broker address for each request (docs/internals/remoting.md#routes).

A request goes to the master. While the master does not answer, requests go to slaves, and it is tried again every
``pullTimeoutMs``. A slave that was added later lacks older messages. So only after ``readTimeoutMs`` without the master
does a read trust a slave about missing messages. Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo`` and
``findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from rocketmq_spark.errors import MQBrokerException, OptionError, RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import MASTER_ID, TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.responses import TopicConfig
from rocketmq_spark.routing.topic_configs import TopicConfigCache
from rocketmq_spark.source.topic_routes import PlanningDeadline, TopicRoutes, is_gone
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.source")

_T = TypeVar("_T")

UNROUTED: Final = (
    "no such queue is in the routes of the topics now. Check that the queue exists and that its broker is running"
)

# The answer of a broker without enablePropertyFilter to a SQL expression (ClientManageProcessor.checkClientConfig).
_NO_SQL: Final = "does not support consumer to filter message"


@dataclass(slots=True)
class _Away:
    """A broker whose master does not answer; `turn` counts the addresses that were tried instead."""

    since: float
    retry_at: float
    turn: int = 0
    warned: bool = False


class TopicQueues:
    """The queues of a read; safe for many threads. Given `routes` by topic, name servers are asked after failures."""

    def __init__(
        self,
        options: SourceOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        routes: Mapping[str, TopicRouteData] | None = None,
        *,
        runtime: Runtime = PROCESS,
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self._patience = options.read_timeout_ms / 1000
        # Seconds for one request.
        self.timeout = options.pull_timeout_ms / 1000
        self.deadline = PlanningDeadline(options.read_timeout_ms, clock, runtime)
        self._routes = TopicRoutes(options, transport, clock, self.deadline, dict(routes or {}))
        self._lock = threading.Lock()
        # By broker name.
        self._away: dict[str, _Away] = {}
        self._configs = TopicConfigCache(transport, clock)

    def find(self) -> list[MessageQueue]:
        """Restart the deadline, ask all name servers, and return the queues that can be read now, sorted.

        Raises an OptionError for an unknown queue of ``assign``, and an error for a topic without a route. Raises a
        ReadError if a broker rejects reads of a queue, or a broker of ``requireBrokers`` is not listed.
        """
        self.deadline.restart()
        self._routes.expire()
        queues = self._present(new=True)
        self._routes.require_brokers()
        if not queues and self._options.subscribe_pattern is not None:
            logger.warning("subscribePattern=%s matches no existing topic", self._options.subscribe_pattern)
        missing = self._options.assign.difference(queues)
        if missing:
            raise OptionError(
                f"assign names {', '.join(map(str, sorted(missing, key=str)))}, which can't be read: {UNROUTED}"
            )
        return queues

    def present(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted, by routes of the last second; raises as `find`.

        A broker of ``assign`` may come back. Without ``failOnDataLoss`` a topic that does not exist is left out. Queues
        above a topic's read queues are left out: they may have been read before they were removed.
        """
        return self._present(new=False)

    def _present(self, *, new: bool) -> list[MessageQueue]:
        skip_gone = not new and not self._options.fail_on_data_loss

        def ask(topic: str) -> TopicRouteData | None:
            try:
                return self._routes.recent(topic, of_each=new)
            except RouteNotFoundException as exc:
                if not (skip_gone and is_gone(exc)):
                    raise
                self._routes.say_gone(topic, exc)
                return None

        by_pattern = self._options.subscribe_pattern is not None
        queues: list[MessageQueue] = []
        routes = self.deadline.in_parallel(
            self._routes.topics(of_each=new), ask, "routes of topics", self._routes.known
        )
        if self.deadline.passed:
            # The name servers used all the time, and all routes are known. The brokers get the same time.
            self.deadline.restart()
        for topic, route in routes.items():
            if route is None:
                continue
            # A broker creates topics for itself, with its own name or its cluster's.
            of_servers = any(topic in (broker.broker_name, broker.cluster) for broker in route.broker_datas)
            if not (by_pattern and of_servers):
                selected = [*filter(self._options.reads, _queues_of(topic, route, closed=new))]
                self._routes.refuse_closed(topic, route, selected)
                queues += selected
        return sorted(queues)

    def address(self, queue: MessageQueue, *, trusted: bool = False) -> str:
        """Return the broker's address for the next request about a queue; with `trusted` one that `trusts` accepts.

        Raises a RouteNotFoundException if the last route has no such broker, or with `trusted` no master.
        """
        route = self._routes.last(queue.topic)
        addresses = _addresses(queue, route)
        if not addresses:
            raise RouteNotFoundException(
                f"reading {queue}: no name server has a broker {queue.broker_name} in the topic's route now; "
                "start the broker, or check its registration (mqadmin topicRoute)"
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
                    f"reading {queue}: the master of {queue.broker_name} is in no route. The read trusts the offsets "
                    f"of its slaves only after readTimeoutMs={self._options.read_timeout_ms}; start the master, or wait"
                )
            if master is not None and now >= away.retry_at:
                away.retry_at = now + self.timeout
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
        """Return whether to use the broker's lower bounds: for the master, or after ``readTimeoutMs`` without it."""
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
        """Return whether the route has the queue, None if it lacks the broker, which may come back; see `is_gone`."""
        try:
            route = self._routes.last(queue.topic)
        except RocketMQError as exc:
            return False if is_gone(exc) else None
        if all(data.broker_name != queue.broker_name for data in route.queue_datas):
            return None
        return queue in _queues_of(queue.topic, route)

    def may_hold_inner_batches(self, queues: Iterable[MessageQueue]) -> bool:
        """Return whether a queue may hold inner batches (docs/internals/messages.md#inner-batches); see `is_plain`."""
        one_of_each = list({place(queue): queue for queue in queues}.values())
        # The first answer often decides, because most reads are of topics of one type.
        if not one_of_each or not self.is_plain(one_of_each[0]):
            return bool(one_of_each)
        return not all(self.by_topic(one_of_each[1:], self.is_plain).values())

    def by_topic(self, queues: Iterable[MessageQueue], ask: Callable[[MessageQueue], _T]) -> dict[MessageQueue, _T]:
        """Return the answer to `ask` for each queue, asked once for each topic and broker."""
        queues = [*queues]
        one_of_each = {place(queue): queue for queue in queues}
        answers = self.deadline.in_parallel(one_of_each.values(), ask, "types of topics")
        return {queue: answers[one_of_each[place(queue)]] for queue in queues}

    def filters_in_reader(self, queues: Iterable[MessageQueue]) -> bool:
        """Return whether the reader itself must filter by tags; let brokers check a SQL92 expression.

        Raises an OptionError if a broker rejects the expression, and for SQL92 with inner batches.
        """
        options, checked = self._options, list(queues)
        if options.sub_expression.strip() == "*":
            return False
        inner = self.may_hold_inner_batches(checked)
        if options.filter_type == "TAG":
            return inner
        if inner:
            topics = sorted({queue.topic for queue in checked})
            names = ", ".join(topics[:5]) + (" and others" if len(topics) > 5 else "")
            raise OptionError(
                f"filterType=SQL92: at least one of the topics {names} is for inner batches (queue.type=BatchCQ). A "
                "broker sees only the properties of a batch, not those of its messages; leave filterType and "
                "subExpression out, and filter the rows"
            )
        self.check_filter(checked)
        return False

    def check_filter(self, queues: Iterable[MessageQueue]) -> None:
        """Raise an OptionError if a broker rejects SQL or the expression (docs/internals/reads.md#pulls)."""
        options = self._options
        for queue in {queue.broker_name: queue for queue in queues}.values():
            try:
                self._transport.check_filter(
                    self.address(queue),
                    queue.topic,
                    options.consumer_group,
                    options.sub_expression,
                    options.filter_type,
                    self.deadline.limit(self.timeout),
                )
            except RocketMQError as exc:
                if isinstance(exc, MQBrokerException):
                    cause = ""
                    if exc.response_code == ResponseCode.SUBSCRIPTION_PARSE_FAILED:
                        cause = "a broker can't parse it"
                    elif _NO_SQL in exc.remark:
                        cause = "brokers take SQL with enablePropertyFilter=true only"
                    if cause:
                        raise OptionError(f"subExpression of filterType={options.filter_type}: {cause}: {exc}") from exc
                    if not exc.retriable:
                        raise
                logger.warning(
                    "broker %s could not check the filter, the first pull will do so: %s", queue.broker_name, exc
                )

    def is_plain(self, queue: MessageQueue) -> bool:
        """Return whether a queue certainly holds no batches as units. With an unknown type, return if SQL filters."""
        try:
            return not self.config(queue, self.address(queue)).holds_batches
        except RocketMQError as exc:
            # Only brokers can evaluate SQL92.
            brokers_filter = self._options.filter_type == "SQL92"
            effect = "tasks filter instead of brokers"
            if brokers_filter:
                effect = "brokers filter, which returns wrong rows if the topic is for inner batches"
            text = "reading %s with a filter: the type of its queues is unknown; %s: %s"
            logger.warning(text, queue, effect, exc)
            return brokers_filter

    def config(self, queue: MessageQueue, address: str) -> TopicConfig:
        """Return the configuration of a queue's topic, as `TopicConfigCache.config`."""
        timeout = self.deadline.limit(self.timeout)
        return self._configs.config(queue.topic, queue.broker_name, address, timeout)

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Record that a broker did not answer: the next request goes to another, and the route is looked up again."""
        addresses = self._known_addresses(queue)
        with self._lock:
            now = self._clock()
            away = self._away.get(queue.broker_name)
            if address and address == addresses.get(MASTER_ID):
                away = self._master_failed(queue, addresses, now)
                away.retry_at = now + self.timeout
            # Of many requests that fail together, only the first selects the next address.
            if away is not None and addresses and _by_turns(addresses, away) == address:
                away.turn += 1
        if self._routes.is_fresh(queue.topic):
            return
        try:
            self._routes.recent(queue.topic)
        except RocketMQError as exc:
            text = "reading %s: broker %s did not answer at %s, and looking up its route again failed: %s"
            logger.warning(text, queue, queue.broker_name, address or "an unknown address", exc)

    def answered(self, queue: MessageQueue, address: str, *, trusted: bool = False) -> None:
        """Record that a broker answered. A master is used again, and a slave that is `trusted` is logged once."""
        if queue.broker_name in self._away and self.is_master(queue, address):
            with self._lock:
                self._away.pop(queue.broker_name, None)
        elif trusted:
            self.trusts(queue, address)

    def _master_failed(self, queue: MessageQueue, addresses: Mapping[int, str], now: float) -> _Away:
        """Record that the master does not answer, and extend the plan's deadline until its slaves are trusted."""
        if any(broker_id != MASTER_ID for broker_id in addresses):
            self.deadline.extend(2 * self.timeout)
        return self._away.setdefault(queue.broker_name, _Away(now, now))

    def _known_addresses(self, queue: MessageQueue) -> Mapping[int, str]:
        route = self._routes.known(queue.topic)
        return {} if route is None else _addresses(queue, route)


def place(queue: MessageQueue) -> tuple[str, str]:
    """Return the topic and broker of a queue."""
    return queue.topic, queue.broker_name


def _queues_of(topic: str, route: TopicRouteData, *, closed: bool = False) -> list[MessageQueue]:
    """Return the read queues, also without permission or an address; with `closed` also write-only queues."""
    return [
        MessageQueue(topic, data.broker_name, queue_id)
        for data in route.queue_datas
        for queue_id in range(data.queue_nums if closed else data.read_queue_nums)
    ]


def _addresses(queue: MessageQueue, route: TopicRouteData) -> Mapping[int, str]:
    """Return the addresses of a queue's broker by their ids; the master's id is the lowest."""
    named = (broker.broker_addrs for broker in route.broker_datas if broker.broker_name == queue.broker_name)
    return next(filter(None, named), {})


def _by_turns(addresses: Mapping[int, str], away: _Away) -> str:
    return addresses[sorted(addresses)[away.turn % len(addresses)]]
