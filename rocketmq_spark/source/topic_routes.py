"""Looks up the topics of a read and their routes at the name servers, and has the deadline for planning a read.

`TopicRoutes.recent` keeps an answer or an error for a second, unless `expire` is called. After a retriable error the
last known route stays valid, because a name server that does not know the topic may have restarted
(docs/internals/routing.md#route-cache).
"""

from __future__ import annotations

import logging
import math
import shlex
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from rocketmq_spark import errors
from rocketmq_spark.errors import escaped
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.names import MAX_TOPIC_LENGTH, is_internal_topic
from rocketmq_spark.model.route import PERM_READ, PERM_WRITE, QueueData, TopicRouteData, masters_of, permission_text
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.transport.base import ReadTransport
from rocketmq_spark.transport.parallel import in_parallel
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.source")

# Seconds for which an answer is kept.
_FRESH: Final = 1.0
# Seconds to wait for each name server if several are queried at the same time.
_EACH: Final = 3.0
# The key of the list of topics in `_queried_at`.
_LIST: Final = ""

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True, repr=False)
class PlanningDeadline:
    """The deadline for planning, `at`: ``readTimeoutMs`` after `restart`, infinite before it, later after `extend`."""

    timeout_ms: int
    clock: Callable[[], float]
    runtime: Runtime = PROCESS
    at: float = field(default=math.inf, init=False)
    _started: float = field(default=math.inf, init=False)

    def restart(self) -> None:
        """Set the deadline of a new plan."""
        self._started = self.clock()
        self.at = self._started + self.timeout_ms / 1000

    def extend(self, seconds: float) -> None:
        """Move the deadline by ``readTimeoutMs``, after which slaves are trusted, and `seconds`; once per plan."""
        self.at = max(self.at, self._started + 2 * self.timeout_ms / 1000 + seconds)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.at

    def limit(self, seconds: float) -> float:
        """Return a timeout of at most `seconds` that ends by the deadline."""
        return min(seconds, self.at - self.clock())

    def in_parallel(
        self,
        subjects: Iterable[K],
        request: Callable[[K], T],
        what: str,
        fallback: Callable[[K], T | None] = lambda _: None,
    ) -> dict[K, T]:
        """Return the answer to `request` for each of `subjects`, in their order.

        After the deadline the older answer of `fallback` is used. Without one a `ReadError` names `what` is missing.
        """
        keys = list(subjects)
        answered: list[K] = []

        def request_in_time(key: K) -> T:
            error: errors.RocketMQError | None = None
            hint = "raise readTimeoutMs, or read fewer topics"
            if not self.passed:
                try:
                    answer = request(key)
                    answered.append(key)
                    return answer
                except errors.RocketMQError as exc:
                    if not self.passed or not (exc.retriable or isinstance(exc, errors.ReadError)):
                        raise
                    error, hint = exc, f"the last try: {exc}"
            older = fallback(key)
            if older is not None:
                return older
            raise errors.ReadError(
                f"planning the read: readTimeoutMs={self.timeout_ms} has passed with {len(answered)} of {len(keys)} "
                f"{what} known; {hint}"
            ) from error

        return in_parallel(keys, request_in_time, self.runtime)


@dataclass(slots=True, eq=False, repr=False)
class TopicRoutes:
    """The routes of a read's topics; safe for many threads. `routes` are the last known ones."""

    options: SourceOptions
    transport: ReadTransport
    clock: Callable[[], float]
    routes: dict[str, TopicRouteData]
    runtime: Runtime = PROCESS
    deadline: PlanningDeadline = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _queried_at: dict[str, float] = field(default_factory=dict, init=False)
    # The error of the last request, by topic; None if it succeeded.
    _errors: dict[str, errors.RocketMQError | None] = field(default_factory=dict, init=False)
    # The topics that were logged as gone.
    _gone: set[str] = field(default_factory=set, init=False)
    _listed: frozenset[str] | None = field(default=None, init=False)
    _warned_of_long_names: bool = field(default=False, init=False)
    # The name servers that did not answer since `expire`.
    _silent: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.deadline = PlanningDeadline(self.options.read_timeout_ms, self.clock, self.runtime)

    def topics(self, *, of_each: bool = False) -> list[str]:
        """Return the topics that the options name, or those of the name servers' list that fit the pattern.

        With `of_each` it joins the lists of all name servers.
        """
        options = self.options
        if options.subscribe:
            return list(options.subscribe)
        if options.subscribe_pattern is None:
            named = options.assign or [queue for queue, _ in options.starting_offsets.offsets]
            return sorted({queue.topic for queue in named})
        listed = [topic for topic in self._all_topics(of_each=of_each) if not is_internal_topic(topic)]
        # Brokers create no such topics, and the time of a regular expression grows with the length of a name.
        legal = [topic for topic in listed if len(topic) <= MAX_TOPIC_LENGTH]
        if len(legal) < len(listed) and not self._warned_of_long_names:
            self._warned_of_long_names = True
            logger.warning(
                "name servers list %d topics with names of more than %d characters; subscribePattern ignores them",
                *(len(listed) - len(legal), MAX_TOPIC_LENGTH),
            )
        return sorted(topic for topic in legal if options.reads(MessageQueue(topic, "", 0)))

    def known(self, topic: str) -> TopicRouteData | None:
        """Return the last known route."""
        with self._lock:
            return self.routes.get(topic)

    def last(self, topic: str) -> TopicRouteData:
        """Return the last known route; if the topic has no known route, the result of `recent`."""
        return self.known(topic) or self.recent(topic)

    def recent(self, topic: str, *, of_each: bool = False) -> TopicRouteData:
        """Return the route as of the last second; raises the error of the request if no route was ever known.

        A request goes to the first name server that answers, or with `of_each` to all of them.
        """
        with self._lock:
            route, error = self.routes.get(topic), self._errors.get(topic)
        if self.is_fresh(topic):
            if route is not None:
                return route
            if error is not None:
                raise error
        return self._update(topic, of_each=of_each)

    def is_fresh(self, topic: str) -> bool:
        """Return whether the name servers were queried within the last second."""
        return self.clock() - self._queried_at.get(topic, -math.inf) < _FRESH

    def expire(self) -> None:
        """Make the next calls query the name servers."""
        with self._lock:
            self._queried_at.clear()
            self._silent.clear()

    def say_gone(self, topic: str, error: errors.RocketMQError) -> None:
        """Log once that a topic is gone."""
        with self._lock:
            logged = topic in self._gone
            self._gone.add(topic)
        if not logged:
            logger.warning("topic %s is gone from the name servers; reading the other topics: %s", topic, error)

    def refuse_closed(self, topic: str, route: TopicRouteData, queues: Iterable[MessageQueue]) -> None:
        """Raise a ReadError if brokers reject reads of one of these queues of a topic, which may hold messages."""
        reasons = closed_to_readers(self.options.connection.wire_name(topic), route, queues)
        if reasons:
            by_broker = {queue.broker_name: reasons[queue] for queue in sorted(reasons)}
            first, *others = by_broker
            more = f". It also has queues that reject reads on {', '.join(others[:10])}" if others else ""
            raise errors.ReadError(f"reading topic {topic}: {by_broker[first]}{more}")

    def require_brokers(self, routes: Mapping[str, TopicRouteData]) -> None:
        """Raise a ReadError if these routes lack a broker of ``requireBrokers``; log others that are down."""
        required = self.options.require_brokers
        listed = {data.broker_name for route in routes.values() for data in route.queue_datas}
        names = ", ".join(sorted(listed)) or "no broker"
        missing = sorted(set(required) - listed) if isinstance(required, tuple) else []
        if missing or (isinstance(required, int) and len(listed) < required):
            wanted = ",".join(required) if isinstance(required, tuple) else required
            raise errors.ReadError(
                f"requireBrokers={wanted}: for the topics of the read the name servers list {names}, and not "
                f"{', '.join(missing) or f'{required} brokers'}. Start the missing brokers and read again, or change "
                "requireBrokers to read without them"
            )
        for topic, route in routes.items():
            ordered = {entry.partition(":")[0] for entry in (route.order_topic_conf or "").split(";")} - {"", *listed}
            if ordered:
                logger.warning(
                    "reading topic %s: its order configuration names %s, which no name server lists now. The read "
                    "lacks their messages; start them, or set requireBrokers",
                    *(topic, ", ".join(map(escaped, sorted(ordered)))),
                )

    def _of_each(self, request: Callable[[str, float], T]) -> dict[str, T | errors.RocketMQError]:
        """Return the answer or the error of each name server; one that did not answer gets no second request."""
        timeout = self.deadline.limit(min(self.options.pull_timeout_ms / 1000, _EACH))

        def answer(name_server: str) -> T | errors.RocketMQError:
            try:
                return request(name_server, timeout)
            except errors.RocketMQError as exc:
                unknown_topic = isinstance(exc, errors.TopicRouteStaleException)
                if not unknown_topic and name_server not in self._silent:
                    self._silent.add(name_server)
                    logger.warning(
                        "planning the read: name server %s gives no answer. The read lacks brokers that only this one "
                        "lists: %s",
                        *(name_server, exc),
                    )
                return exc

        answering = [name for name in self.options.connection.name_server if name not in self._silent]
        return in_parallel(answering, answer, self.deadline.runtime)

    def _joined(self, topic: str, route: TopicRouteData) -> TopicRouteData:
        """Return the route with the queues of all name servers. One that has restarted lacks brokers for 30 s."""
        answers = self._of_each(lambda name_server, timeout: self.transport.route_at(name_server, topic, timeout))
        for answer in answers.values():
            if isinstance(answer, TopicRouteData):
                route = route.joined(answer)
        queues = {data.broker_name: data.read_queue_nums for data in route.queue_datas}
        for name_server, answer in answers.items():
            if name_server in self._silent:
                continue
            datas = answer.queue_datas if isinstance(answer, TopicRouteData) else ()
            listed = {data.broker_name: data.read_queue_nums for data in datas}
            missing = sorted(name for name, number in queues.items() if listed.get(name, -1) < number)
            if missing:
                logger.warning(
                    "reading topic %s: name server %s does not list all queues of %s, as another one does. The read "
                    "includes them",
                    *(topic, name_server, ", ".join(map(escaped, missing))),
                )
        return route

    def _all_topics(self, *, of_each: bool) -> frozenset[str]:
        if self._listed is None or not self.is_fresh(_LIST):
            try:
                self._listed = self.transport.topics(self.deadline.limit(self.options.pull_timeout_ms / 1000))
                if of_each and len(self.options.connection.name_server) > 1:
                    lists = self._of_each(self.transport.topics_at).values()
                    self._listed = self._listed.union(*(topics for topics in lists if isinstance(topics, frozenset)))
            except errors.RocketMQError as exc:
                if self._listed is None or not exc.retriable:
                    raise
                logger.warning("no name server listed the topics, using the last list: %s", exc)
            self._record_query(_LIST)
        return self._listed

    def _update(self, topic: str, *, of_each: bool = False) -> TopicRouteData:
        self._record_query(topic)
        try:
            route = self._request(topic)
            if of_each and len(self.options.connection.name_server) > 1:
                route = self._joined(topic, route)
            refuse_static(topic, route)
        except errors.RocketMQError as exc:
            known = self.known(topic)
            # The request may have taken longer than a second. Without this every call would repeat it.
            self._record_query(topic, exc)
            if known is None or not exc.retriable:
                raise
            if is_gone(exc):
                self.say_gone(topic, exc)
            else:
                logger.warning("no name server returned the route of topic %s, using the last one: %s", topic, exc)
            return known
        with self._lock:
            self.routes[topic] = route
            self._gone.discard(topic)
        return route

    def _record_query(self, topic: str, error: errors.RocketMQError | None = None) -> None:
        with self._lock:
            self._queried_at[topic], self._errors[topic] = self.clock(), error

    def _request(self, topic: str) -> TopicRouteData:
        timeout = self.options.pull_timeout_ms / 1000 * len(self.options.connection.name_server)
        try:
            return self.transport.query_route(topic, self.deadline.limit(timeout))
        except errors.TopicRouteStaleException as exc:
            raise errors.RouteNotFoundException(f"reading topic {topic}: {exc}") from exc
        except errors.RemotingException as exc:
            if not exc.retriable:
                raise
            raise errors.RouteNotFoundException(f"reading topic {topic}: {exc}", unreachable=True) from exc


def is_gone(error: errors.RocketMQError) -> bool:
    """Return whether the name servers that answered know brokers, but not the topic."""
    cause = error.__cause__
    return isinstance(cause, errors.TopicRouteStaleException) and not isinstance(cause, errors.NoBrokersException)


def refuse_static(topic: str, route: TopicRouteData) -> None:
    """Raise an OptionError for a static topic: its queues are logical, with other ids and offsets than the broker's."""
    if route.static_topic:
        raise errors.OptionError(
            f"reading topic {topic}: it is a static (logical) topic, which this release can't read; use an ordinary "
            "topic"
        )


def closed_to_readers(topic: str, route: TopicRouteData, queues: Iterable[MessageQueue]) -> dict[MessageQueue, str]:
    """Return the queues that readers may not read, and why; name servers and brokers know their topic as `topic`."""
    datas, masters = {data.broker_name: data for data in route.queue_datas}, masters_of(route.broker_datas)
    return {
        queue: _closed(topic, datas[queue.broker_name], masters.get(queue.broker_name, "ADDRESS"))
        for queue in queues
        if queue.queue_id >= datas[queue.broker_name].open_queues
    }


def _closed(topic: str, data: QueueData, address: str) -> str:
    """Return why a broker rejects reads of some queues, and the commands that allow it."""
    at = f"-t {shlex.quote(topic)} -b {shlex.quote(address)}"
    if not data.readable:
        perm = PERM_READ | data.perm & PERM_WRITE
        return (
            f"broker {data.broker_name} rejects reads, because the topic's permission there is "
            f"{permission_text(data.perm)}. Allow reads with mqadmin updateTopicPerm {at} -p {perm}. If the topic has "
            "this permission, that of the broker (brokerPermission) lacks r: mqadmin updateBrokerConfig "
            f"-b {shlex.quote(address)} -k brokerPermission -v 6"
        )
    queues = data.write_queue_nums
    return (
        f"broker {data.broker_name} rejects reads of the queues {data.read_queue_nums} to {queues - 1}, because the "
        f"topic has {queues} write queues and {data.read_queue_nums} read queues there. Allow reads with mqadmin "
        f"updateTopic {at} -r {queues} -w {queues} -p {data.perm}"
    )
