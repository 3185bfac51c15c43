"""Caches the queues and broker addresses of topics for one client instance, as name servers or proxies report them.

Over remoting, a topic that no name server knows gets the queues that brokers would create from the template topic, if
that exists. See docs/internals/routing.md#routes and docs/internals/remoting.md#routes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocketmq_spark import errors
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.names import java_order
from rocketmq_spark.model.route import MASTER_ID, MAX_QUEUES, TopicRouteData
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.producer")


# As in Java (MQClientInstance.LOCK_TIMEOUT_MILLIS).
_LOCK_TIMEOUT_S = 3.0

_COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class TopicPublishInfo:
    """The queues of a topic that a send may use (``TopicPublishInfo.java``)."""

    topic: str
    # Sorted by broker name, then queue id; only of brokers that have a master.
    queues: tuple[MessageQueue, ...]
    # The master's host:port by broker name.
    addresses: Mapping[str, str]
    route: TopicRouteData
    # The queues are those of an order configuration, even of brokers without a master.
    order_topic: bool = False
    # The topic has no route yet; the queues are the template topic's.
    template: bool = False
    queue_set: frozenset[MessageQueue] = field(init=False, repr=False, compare=False)
    # The brokers of the queues that have a master, or all brokers of the queues if none has.
    broker_names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "queue_set", frozenset(self.queues))
        names = frozenset(queue.broker_name for queue in self.queues)
        object.__setattr__(self, "broker_names", names.intersection(self.addresses) or names)

    @property
    def ok(self) -> bool:
        """True if there is a queue to send to."""
        return bool(self.queues)

    @property
    def has_master(self) -> bool:
        """True if the broker of a queue has a master now."""
        return not self.broker_names.isdisjoint(self.addresses)


def publish_info_of(topic: str, route: TopicRouteData, *, template: bool = False) -> TopicPublishInfo:
    """Return a route's writable queues (docs/internals/routing.md#publish-info); may raise RouteNotFoundException."""
    # The first of several entries for a broker counts, even if it has no master.
    masters = {broker.broker_name: broker.master for broker in reversed(route.broker_datas)}
    addresses = {name: address for name, address in masters.items() if address is not None}
    if route.order_topic_conf:
        queues = _ordered_queues(topic, route.order_topic_conf)
        return TopicPublishInfo(topic, queues, addresses, route, order_topic=True, template=template)
    if route.static_topic and route.order_topic_conf is None:
        raise errors.RouteNotFoundException(
            f"looking up the route of topic {topic}: writes to static (logical) topics are not supported; use an "
            "ordinary topic",
        )
    nums = [
        (data.broker_name, data.write_queue_nums)
        for data in sorted(route.queue_datas, key=lambda data: java_order(data.broker_name))
        if data.writable and data.broker_name in addresses
    ]
    return TopicPublishInfo(topic, _queues(topic, nums), addresses, route, template=template)


def _ordered_queues(topic: str, conf: str) -> tuple[MessageQueue, ...]:
    """Return the queues of an order configuration such as ``brokerA:4;brokerB:2``, in its order."""
    nums: list[tuple[str, int]] = []
    for entry in filter(None, conf.split(";")):
        # As in Java, only the first two fields count.
        broker, count = (*entry.split(":"), "")[:2]
        if not (broker and _COUNT.fullmatch(count)):
            raise errors.RouteNotFoundException(
                f"looking up the route of topic {topic}: its order configuration {conf!r} does not have the form "
                "broker:queues;broker:queues. Correct it (mqadmin updateOrderConf)"
            )
        nums.append((broker, int(count)))
    return _queues(topic, nums)


def _queues(topic: str, nums: Sequence[tuple[str, int]]) -> tuple[MessageQueue, ...]:
    total = sum(max(count, 0) for _, count in nums)
    if total > MAX_QUEUES:
        raise errors.RouteNotFoundException(
            f"looking up the route of topic {topic}: {total} queues, {MAX_QUEUES} are allowed; check that nameServer "
            "is the address of a name server"
        )
    return tuple(MessageQueue(topic, broker, queue_id) for broker, count in nums for queue_id in range(count))


class RouteCache:
    """The routes of one client instance; safe for many threads. Timeouts are seconds for each request.

    `on_change` is called after a route was added or changed, on the thread that looked it up, and must not block.
    """

    def __init__(
        self,
        query_route: Callable[[str, float], TopicRouteData],
        *,
        create_topic_key: str | None,
        default_topic_queue_nums: int,
        on_change: Callable[[], None] = lambda: None,
        runtime: Runtime = PROCESS,
    ) -> None:
        self._query_route = query_route
        self._on_change = on_change
        self._create_topic_key = create_topic_key
        self._default_topic_queue_nums = default_topic_queue_nums
        self._infos: dict[str, TopicPublishInfo] = {}
        # Addresses by broker name and broker id, of the newest route (brokerAddrTable).
        self._broker_addrs: dict[str, Mapping[int, str]] = {}
        # Topics in the order of their first look-up.
        self._topics: dict[str, None] = {}
        self._once_ok: set[str] = set()
        # Held during a look-up.
        self._lock = runtime.lock()

    @property
    def is_empty(self) -> bool:
        """True until the first route is cached."""
        return not self._infos

    def cached(self, topic: str) -> TopicPublishInfo | None:
        """Return the cached route of a topic."""
        return self._infos.get(topic)

    def was_ok(self, topic: str) -> bool:
        """Return whether the topic has ever had a queue to send to."""
        return topic in self._once_ok

    def topics(self) -> tuple[str, ...]:
        """Return every topic that was looked up; the periodic refresh updates them."""
        return tuple(self._topics)

    def masters(self) -> dict[str, str]:
        """Return the address of every known master, by broker name."""
        brokers = tuple(self._broker_addrs.items())
        return {name: addrs[MASTER_ID] for name, addrs in brokers if MASTER_ID in addrs}

    def master_of(self, broker_name: str) -> str | None:
        """Return the address of a broker's master, if it is known."""
        return self._broker_addrs.get(broker_name, {}).get(MASTER_ID)

    def addresses(self) -> tuple[str, ...]:
        """Return every known address of every broker, slaves included, sorted."""
        brokers = tuple(self._broker_addrs.values())
        return tuple(sorted({address for addrs in brokers for address in addrs.values()}))

    def clean_offline_brokers(self) -> None:
        """Remove the addresses that no cached route contains any more (``cleanOfflineBroker``)."""
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            # The slow look-up reports its own error.
            text = "addresses of removed brokers stay cached for now, because a route lookup takes longer than %g s"
            logger.info(text, _LOCK_TIMEOUT_S)
            return
        try:
            brokers = [broker for info in self._infos.values() for broker in info.route.broker_datas]
            in_routes = {address for broker in brokers for address in broker.broker_addrs.values()}
            for name, addrs in tuple(self._broker_addrs.items()):
                kept = {broker_id: address for broker_id, address in addrs.items() if address in in_routes}
                if not kept:
                    del self._broker_addrs[name]
                    logger.info("broker %s is in no route any more", name)
                elif len(kept) < len(addrs):
                    self._broker_addrs[name] = kept
        finally:
            self._lock.release()

    def look_up(self, topic: str, timeout: float) -> TopicPublishInfo:
        """Return a topic's route, cached or looked up (``tryToFindTopicPublishInfo``); raise as `refresh`."""
        info = self._infos.get(topic)
        if info is None or not info.ok:
            self.refresh(topic, timeout, unless_ok=True)
            info = self._infos[topic]
        if not info.ok:
            names = ", ".join(data.broker_name for data in info.route.queue_datas)
            raise errors.RouteNotFoundException(
                f"looking up the route of topic {topic}: the topic exists, but none of its queues is writable "
                f"(brokers {names or 'none'}); give it the write permission (mqadmin updateTopicPerm -p 6) "
                "or check that its brokers have a master",
            )
        return info

    def refresh(self, topic: str, timeout: float, *, unless_ok: bool = False) -> bool:
        """Update a topic's route from the name servers; return whether it changed.

        With `unless_ok`, a usable route that another thread has cached meanwhile is enough. After an error the cached
        route stays. The error is a ``RouteNotFoundException`` (10005), or one of a server that is not retriable.
        """
        self._topics[topic] = None
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise errors.RouteNotFoundException(
                f"looking up the route of topic {topic}: another lookup of this client has not ended within "
                f"{_LOCK_TIMEOUT_S:g} s, and a client makes one lookup at a time; try again, or check that the servers "
                "answer in time",
                unreachable=True,
            )
        try:
            cached = self._infos.get(topic)
            if unless_ok and cached is not None and cached.ok:
                return False
            info = self._fetch(topic, timeout)
            # A name server that does not know the topic does not remove its cached route.
            if cached is not None and info.template and not cached.template:
                return False
            # Also if this route is unchanged: an older route of another topic may have set other addresses.
            self._broker_addrs.update({broker.broker_name: broker.broker_addrs for broker in info.route.broker_datas})
            if cached is not None and cached.route == info.route and cached.ok and cached.template == info.template:
                return False
            self._infos[topic] = info
            if info.ok:
                self._once_ok.add(topic)
        finally:
            self._lock.release()
        logger.debug("route of %s: %d queues on %s", topic, len(info.queues), ", ".join(info.addresses))
        self._on_change()
        return True

    def _fetch(self, topic: str, timeout: float) -> TopicPublishInfo:
        try:
            return publish_info_of(topic, self._query_route(topic, timeout))
        except errors.NoBrokersException as exc:
            raise errors.RouteNotFoundException(str(exc)) from exc
        except errors.TopicRouteStaleException as exc:
            if self._create_topic_key is None:
                raise _unknown_to_proxy(topic, exc) from exc
            return self._fetch_template(topic, self._create_topic_key, timeout, exc)
        except (errors.RemotingException, errors.MQBrokerException) as exc:
            if not exc.retriable:
                raise
            raise errors.RouteNotFoundException(
                f"looking up the route of topic {topic}: {exc}", unreachable=True
            ) from exc

    def _fetch_template(
        self, topic: str, key: str, timeout: float, unknown: errors.MQBrokerException
    ) -> TopicPublishInfo:
        """Return the route that a broker will create from the template topic (docs/internals/routing.md#template)."""
        try:
            route = self._query_route(key, timeout)
        except (errors.RemotingException, errors.MQBrokerException) as exc:
            raise errors.RouteNotFoundException(
                f"looking up the route of topic {topic}: no name server knows it ({unknown.remark or unknown}), nor "
                f"the template {key} that would let a broker create it ({exc}); create the topic first "
                f"(rocketmq-spark create-topic {topic}, or mqadmin updateTopic -t {topic}), or set "
                "autoCreateTopicEnable=true on a broker",
            ) from exc
        queue_datas = []
        for data in route.queue_datas:
            # As in Java, the read queues of the template limit both.
            nums = min(self._default_topic_queue_nums, data.read_queue_nums)
            queue_datas.append(replace(data, read_queue_nums=nums, write_queue_nums=nums))
        return publish_info_of(topic, replace(route, queue_datas=tuple(queue_datas)), template=True)

    def __repr__(self) -> str:
        return f"<RouteCache topics={len(self._infos)} brokers={len(self._broker_addrs)}>"


def _unknown_to_proxy(topic: str, unknown: errors.MQBrokerException) -> errors.RouteNotFoundException:
    # The other lines of the remark only refer to RocketMQ's documentation.
    remark = (unknown.remark or str(unknown)).partition("\n")[0]
    return errors.RouteNotFoundException(
        f"looking up the route of topic {topic}: the proxy does not know it ({remark}), and over gRPC no message "
        f"creates a topic; create it first (rocketmq-spark create-topic {topic} -n <name server>, or "
        f"mqadmin updateTopic -n <name server> -c <cluster> -t {topic} -a +message.type=NORMAL; the type is FIFO for "
        "messages with a sharding key, DELAY for delayed ones). A proxy that was asked for a topic before its creation "
        "repeats this answer for up to 30 s"
    )
