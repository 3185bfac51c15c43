"""Chooses the broker address for each request of a read (docs/internals/remoting.md#routes).

A request goes to the master. While the master does not answer, requests go to slaves, and it is tried again every
``pullTimeoutMs``. A slave that was added later lacks older messages. So only after ``readTimeoutMs`` without the master
does a read trust a slave about missing messages. Follows ``MQClientInstance.findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from rocketmq_spark.errors import RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.route import MASTER_ID, TopicRouteData, in_order
from rocketmq_spark.source.topic_routes import TopicRoutes

logger = logging.getLogger("rocketmq_spark.source")


@dataclass(slots=True)
class _SilentMaster:
    """A broker whose master does not answer; `turn` counts the addresses that were tried instead."""

    since: float
    retry_at: float
    turn: int = 0
    warned: bool = False


@dataclass(eq=False, repr=False)
class BrokerChoice:
    """Chooses the addresses of brokers; safe for many threads."""

    routes: TopicRoutes
    timeout: float = field(init=False)  # Seconds for one request
    _patience: float = field(init=False)
    _silent: dict[str, _SilentMaster] = field(default_factory=dict, init=False)  # By broker name
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.timeout = self.routes.options.pull_timeout_ms / 1000
        self._patience = self.routes.options.read_timeout_ms / 1000

    def address(self, queue: MessageQueue, *, trusted: bool = False) -> str:
        """Return the broker's address for the next request about a queue; with `trusted` one that `trusts` accepts.

        Raises a RouteNotFoundException if the last route has no such broker, or with `trusted` no master.
        """
        route = self.routes.last(queue.topic)
        addresses = _addresses(queue, route)
        if not addresses:
            raise RouteNotFoundException(
                f"reading {queue}: no name server has a broker {queue.broker_name} in the topic's route now; "
                "start the broker, or check its registration (mqadmin topicRoute)"
            )
        master = addresses.get(MASTER_ID)
        with self._lock:
            now = self.routes.clock()
            silent = self._silent.get(queue.broker_name)
            if master is None:
                silent = self._master_failed(queue, addresses, now)
            if silent is None or (trusted and master is not None and now - silent.since < self._patience):
                return addresses[in_order(addresses)[0]]
            if trusted and now - silent.since < self._patience:
                raise RouteNotFoundException(
                    f"reading {queue}: the master of {queue.broker_name} is in no route. The read trusts the offsets "
                    "of its slaves only after readTimeoutMs="
                    f"{self.routes.options.read_timeout_ms}; start the master, or wait"
                )
            if master is not None and now >= silent.retry_at:
                silent.retry_at = now + self.timeout
                return master
            return _by_turns(addresses, silent)

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
            silent = self._silent.get(queue.broker_name)
            if silent is None or self.routes.clock() - silent.since < self._patience:
                return False
            warned, silent.warned = silent.warned, True
        if not warned:
            logger.warning(
                "the master of %s has not answered for readTimeoutMs=%d: the offsets of its slave %s count instead. "
                "If the slave lacks older messages, the read does not return them",
                *(queue.broker_name, self.routes.options.read_timeout_ms, address),
            )
        return True

    def failed(self, queue: MessageQueue, address: str) -> None:
        """Record that a broker did not answer: the next request goes to another, and the route is looked up again."""
        addresses = self._known_addresses(queue)
        with self._lock:
            now = self.routes.clock()
            silent = self._silent.get(queue.broker_name)
            if address and address == addresses.get(MASTER_ID):
                silent = self._master_failed(queue, addresses, now)
                silent.retry_at = now + self.timeout
            # Of many requests that fail together, only the first selects the next address.
            if silent is not None and addresses and _by_turns(addresses, silent) == address:
                silent.turn += 1
        if self.routes.is_fresh(queue.topic):
            return
        try:
            self.routes.recent(queue.topic)
        except RocketMQError as exc:
            text = "reading %s: broker %s did not answer at %s, and looking up its route again failed: %s"
            logger.warning(text, queue, queue.broker_name, address or "an unknown address", exc)

    def answered(self, queue: MessageQueue, address: str, *, trusted: bool = False) -> None:
        """Record that a broker answered. A master is used again, and a slave that is `trusted` is logged once."""
        if queue.broker_name in self._silent and self.is_master(queue, address):
            with self._lock:
                self._silent.pop(queue.broker_name, None)
        elif trusted:
            self.trusts(queue, address)

    def _master_failed(self, queue: MessageQueue, addresses: Mapping[int, str], now: float) -> _SilentMaster:
        """Record that the master does not answer, and extend the plan's deadline until its slaves are trusted."""
        if any(broker_id != MASTER_ID for broker_id in addresses):
            self.routes.deadline.extend(2 * self.timeout)
        return self._silent.setdefault(queue.broker_name, _SilentMaster(now, now))

    def _known_addresses(self, queue: MessageQueue) -> Mapping[int, str]:
        route = self.routes.known(queue.topic)
        return {} if route is None else _addresses(queue, route)


def _addresses(queue: MessageQueue, route: TopicRouteData) -> Mapping[int, str]:
    """Return the addresses of a queue's broker by their ids."""
    named = (broker.broker_addrs for broker in route.broker_datas if broker.broker_name == queue.broker_name)
    return next(filter(None, named), {})


def _by_turns(addresses: Mapping[int, str], silent: _SilentMaster) -> str:
    return addresses[in_order(addresses)[silent.turn % len(addresses)]]
