"""Which topics a read is about, and what name servers say of them.

Rule 1: what has just been asked is not asked again, whatever the answer was.
Rule 2: what a name server can't tell just now stays as it was known, and so does a topic that it says is not there: it
        may have been restarted a moment ago. What is lost with such a topic its brokers tell.
Rule 3: that a topic is gone is said once.

Follows ``MQClientInstance.updateTopicRouteInfoFromNameServer``.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Final

from rocketmq_spark.consumer.deadline import PlanningDeadline
from rocketmq_spark.errors import (
    NoBrokersException,
    OptionError,
    RemotingException,
    RocketMQError,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import MAX_TOPIC_LENGTH, is_internal_topic
from rocketmq_spark.namespace import bare_name, wrap
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.base import ReadTransport

logger = logging.getLogger("rocketmq_spark.consumer")

# How long an answer counts, seconds.
_FRESH: Final = 1.0
# What the list of topics is called among the routes.
_LIST: Final = ""


class TopicRoutes:
    """The routes of a read's topics. Any thread may ask.

    Parameters
    ----------
    options : ReaderOptions
    transport : ReadTransport
    clock : callable
        Seconds, monotonic.
    deadline : PlanningDeadline
        Shortens the timeouts of requests.
    routes : mapping of str to TopicRouteData, optional
        What is known already, by topic.
    """

    def __init__(
        self,
        options: ReaderOptions,
        transport: ReadTransport,
        clock: Callable[[], float],
        deadline: PlanningDeadline,
        routes: Mapping[str, TopicRouteData] | None = None,
    ) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self._deadline = deadline
        # Per request, and for each name server in turn.
        self._timeout = options.pull_timeout_ms / 1000
        self._lock = threading.Lock()
        self._routes = dict(routes or {})
        self._asked_at: dict[str, float] = {}
        # Why the last question had no answer, by topic.
        self._unknown: dict[str, RocketMQError] = {}
        # What was said to be gone.
        self._gone: set[str] = set()
        self._listed: frozenset[str] | None = None
        self._warned_of_long_names = False

    def topics(self) -> list[str]:
        """Return the topics that the options ask for; of a pattern, those that name servers list."""
        options = self._options
        if options.subscribe:
            return list(options.subscribe)
        if options.subscribe_pattern is None:
            named = options.assign or [queue for queue, _ in options.starting_offsets.offsets]
            return sorted({queue.topic for queue in named})
        namespace = options.wrapped_namespace
        listed = [wired for wired in self._all_topics() if not is_internal_topic(wired)]
        # Brokers create no such topics, and the time of a regular expression grows with the length of a name.
        legal = [wired for wired in listed if len(wired) <= MAX_TOPIC_LENGTH]
        if len(legal) < len(listed) and not self._warned_of_long_names:
            self._warned_of_long_names = True
            logger.warning(
                "name servers list %d topics with names of more than %d characters; subscribePattern ignores them",
                *(len(listed) - len(legal), MAX_TOPIC_LENGTH),
            )
        users = (bare_name(wired, namespace) for wired in legal)
        return sorted(topic for topic in users if topic is not None and options.reads(MessageQueue(topic, "", 0)))

    def known(self, topic: str) -> TopicRouteData | None:
        """Return the last route that there was."""
        with self._lock:
            return self._routes.get(topic)

    def last(self, topic: str) -> TopicRouteData:
        """Return the last route that there was; where there has been none, that of `recent`, which may raise."""
        return self.known(topic) or self.recent(topic)

    def recent(self, topic: str) -> TopicRouteData:
        """Return the route by what name servers have said within the last second; else ask them.

        Raises
        ------
        OptionError
            The topic is a static one.
        RouteNotFoundException
            There is no route, and there has been none.
        RocketMQError
            No name server answers, and none has before.
        """
        with self._lock:
            route, unknown = self._routes.get(topic), self._unknown.get(topic)
        if self.is_fresh(topic):
            if route is not None:
                return route
            if unknown is not None:
                raise unknown
        return self._ask(topic)

    def is_fresh(self, topic: str) -> bool:
        """Return whether name servers were asked within the last second."""
        return self._clock() - self._asked_at.get(topic, -math.inf) < _FRESH

    def expire(self) -> None:
        """Have everything asked anew."""
        with self._lock:
            self._asked_at.clear()

    def say_gone(self, topic: str, error: RocketMQError) -> None:
        """Log that a topic is gone, unless that was said."""
        with self._lock:
            said = topic in self._gone
            self._gone.add(topic)
        if not said:
            logger.warning("topic %s is gone, by all that name servers know; the others go on: %s", topic, error)

    def _all_topics(self) -> frozenset[str]:
        if self._listed is None or not self.is_fresh(_LIST):
            try:
                self._listed = self._transport.topics(self._deadline.limit(self._timeout))
            except RocketMQError as exc:
                if self._listed is None or not exc.retriable:
                    raise
                logger.warning("no name server listed the topics, going on with those of the last time: %s", exc)
            self._was_asked(_LIST)
        return self._listed

    def _ask(self, topic: str) -> TopicRouteData:
        self._was_asked(topic)
        try:
            route = self._asked(topic)
        except RocketMQError as exc:
            known = self.known(topic)
            # Fresh from now on: asking may have taken long, and must not take all the time.
            self._was_asked(topic, exc)
            if known is None or not exc.retriable:
                raise
            if is_gone(exc):
                self.say_gone(topic, exc)
            else:
                logger.warning("no name server gave the route of topic %s, going on with the last one: %s", topic, exc)
            return known
        with self._lock:
            self._routes[topic] = route
            self._gone.discard(topic)
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
            timeout = self._deadline.limit(self._timeout * len(self._options.name_server))
            route = self._transport.query_route(wired, timeout)
        except TopicRouteStaleException as exc:
            raise RouteNotFoundException(f"reading topic {topic}: {exc}") from exc
        except RemotingException as exc:
            if not exc.retriable:
                raise
            raise RouteNotFoundException(f"reading topic {topic}: {exc}", unreachable=True) from exc
        refuse_static(topic, route)
        return route


def is_gone(error: RocketMQError) -> bool:
    """Return whether no name server that answers knows the topic that was asked for, while they know brokers."""
    cause = error.__cause__
    return isinstance(cause, TopicRouteStaleException) and not isinstance(cause, NoBrokersException)


def refuse_static(topic: str, route: TopicRouteData) -> None:
    """Refuse a topic whose queues are logical ones: their ids and offsets are not those that a broker goes by.

    Raises
    ------
    OptionError
    """
    if route.static_topic:
        raise OptionError(
            f"reading topic {topic}: it is a static (logical) topic, which this release can't read; use an ordinary "
            "topic"
        )
