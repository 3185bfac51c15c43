"""Looks up the queues of a read. Follows ``MQClientInstance.topicRouteData2TopicSubscribeInfo``."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.responses import TopicConfig
from rocketmq_spark.routing.topic_configs import TopicConfigCache
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.topic_routes import TopicRoutes, is_gone
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.source")

_T = TypeVar("_T")

UNROUTED: Final = (
    "no such queue is in the routes of the topics now. Check that the queue exists and that its broker is running"
)


class TopicQueues:
    """The queues of a read; safe for many threads. With `routes` by topic, it queries name servers after failures."""

    def __init__(
        self,
        options: SourceOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        routes: Mapping[str, TopicRouteData] | None = None,
        *,
        runtime: Runtime = PROCESS,
    ) -> None:
        self.options = options
        self.transport = transport
        self._routes = TopicRoutes(options, transport, clock, dict(routes or {}), runtime)
        self.deadline = self._routes.deadline
        self.brokers = BrokerChoice(self._routes)
        self._configs = TopicConfigCache(transport, clock)

    def look_up(self) -> list[MessageQueue]:
        """Restart the deadline, query all name servers, and return the queues that can be read now, sorted.

        Raises an OptionError for an unknown queue of ``assign``, and an error for a topic without a route. Raises a
        ReadError if a broker rejects reads of a queue, or a broker of ``requireBrokers`` is not listed.
        """
        self.deadline.restart()
        self._routes.expire()
        routes = self._recent_routes(new=True)
        queues = self._selected(routes, new=True)
        self._routes.require_brokers(routes)
        if not queues and self.options.subscribe_pattern is not None:
            logger.warning("subscribePattern=%s matches no existing topic", self.options.subscribe_pattern)
        missing = self.options.assign.difference(queues)
        if missing:
            raise OptionError(
                f"assign names {', '.join(map(str, sorted(missing, key=str)))}, which can't be read: {UNROUTED}"
            )
        return queues

    def present(self) -> list[MessageQueue]:
        """Return the queues that can be read now, sorted, by routes of the last second; raises as `look_up`.

        A broker of ``assign`` may come back. Without ``failOnDataLoss`` a topic that does not exist is left out. Queues
        above a topic's read queues are left out: they may have been read before they were removed.
        """
        return self._selected(self._recent_routes(new=False), new=False)

    def _recent_routes(self, *, new: bool) -> dict[str, TopicRouteData]:
        """Return the routes of the topics; with `new` of all name servers, and a topic without a route is an error."""
        skip_gone = not new and not self.options.fail_on_data_loss

        def route_of(topic: str) -> TopicRouteData | None:
            try:
                return self._routes.recent(topic, of_each=new)
            except RouteNotFoundException as exc:
                if not (skip_gone and is_gone(exc)):
                    raise
                self._routes.say_gone(topic, exc)
                return None

        routes = self.deadline.in_parallel(
            self._routes.topics(of_each=new), route_of, "routes of topics", self._routes.known
        )
        if self.deadline.passed:
            # The name servers used all the time, and all routes are known. The brokers get the same time.
            self.deadline.restart()
        return {topic: route for topic, route in routes.items() if route is not None}

    def _selected(self, routes: Mapping[str, TopicRouteData], *, new: bool) -> list[MessageQueue]:
        """Return the queues that the options select; with `new` a queue that readers may not read is an error."""
        by_pattern = self.options.subscribe_pattern is not None
        queues: list[MessageQueue] = []
        for topic, route in routes.items():
            # A broker creates topics for itself, with its own name or its cluster's.
            of_servers = any(topic in (broker.broker_name, broker.cluster) for broker in route.broker_datas)
            if not (by_pattern and of_servers):
                selected = [*filter(self.options.reads, _queues_of(topic, route, closed=new))]
                self._routes.refuse_closed(topic, route, selected)
                queues += selected
        return sorted(queues)

    def routes(self, queues: Iterable[MessageQueue]) -> dict[str, TopicRouteData]:
        """Return the known routes of the queues' topics."""
        topics = {queue.topic for queue in queues}
        return {topic: route for topic in topics if (route := self._routes.known(topic)) is not None}

    def exists(self, queue: MessageQueue) -> bool | None:
        """Return whether the route has the queue, None if it lacks the broker, which may come back; see `is_gone`."""
        try:
            route = self._routes.last(queue.topic)
        except RocketMQError as exc:
            return False if is_gone(exc) else None
        if all(data.broker_name != queue.broker_name for data in route.queue_datas):
            return None
        return queue in _queues_of(queue.topic, route)

    def gone(self, queues: Iterable[MessageQueue], *, recent: bool) -> set[MessageQueue]:
        """Return those queues that their topics do not have any more, by known or by recent routes; see `is_gone`."""
        of_topics: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        for queue in queues:
            of_topics[queue.topic].append(queue)
        gone: set[MessageQueue] = set()
        for topic, several in of_topics.items():
            try:
                route = self._routes.recent(topic) if recent else self._routes.last(topic)
            except RocketMQError as exc:
                gone.update(several if is_gone(exc) else ())
                continue
            counts = {data.broker_name: data.read_queue_nums for data in route.queue_datas}
            gone.update(queue for queue in several if queue.queue_id >= counts.get(queue.broker_name, sys.maxsize))
        return gone

    def expire(self) -> None:
        """Make the next calls query the name servers."""
        self._routes.expire()

    def by_topic(self, queues: Iterable[MessageQueue], request: Callable[[MessageQueue], _T]) -> dict[MessageQueue, _T]:
        """Return the answer to `request` for each queue. There is one request for each topic and broker."""
        queues = [*queues]
        one_of_each = {place(queue): queue for queue in queues}
        answers = self.deadline.in_parallel(one_of_each.values(), request, "types of topics")
        return {queue: answers[one_of_each[place(queue)]] for queue in queues}

    def config(self, queue: MessageQueue, address: str) -> TopicConfig:
        """Return the configuration of a queue's topic, as `TopicConfigCache.config`."""
        timeout = self.deadline.limit(self.brokers.timeout)
        return self._configs.config(queue.topic, queue.broker_name, address, timeout)


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
