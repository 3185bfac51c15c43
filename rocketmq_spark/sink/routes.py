"""The client instances of writes, and the routes of their topics.

Encoders and senders are not imported: with Spark, a process that plans a write needs none of them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from rocketmq_spark.errors import RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER
from rocketmq_spark.routing.client_instance import ClientInstance, registry
from rocketmq_spark.routing.connect import SharedConnection, client_id_of, new_transport
from rocketmq_spark.routing.heart_beat import API_TIMEOUT
from rocketmq_spark.routing.retries import Backoff, Retries
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.producer")

# A proxy caches for 20 s that a topic is unknown, and returns that once more (docs/internals/grpc.md#routes). Seconds.
_PROXY_FORGETS: Final = 35.0


@dataclass(eq=False, repr=False)
class RouteFinder:
    """Looks up the routes of a write's topics, and waits for name servers and proxies that are down."""

    options: SinkOptions
    instance: ClientInstance
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    runtime: Runtime = PROCESS
    rng: random.Random = field(default_factory=random.Random)
    # With ``ordered``, the queues of the whole write, whatever the route says now.
    fixed_queues: Sequence[MessageQueue] | None = None
    # The brokers that rows may go to, and how many of their queues; None: all of the route.
    queue_nums: Mapping[str, int] | None = None
    # A name server or proxy has answered during this write, perhaps to the driver. So the addresses are right, and an
    # unreachable server is down for a while.
    servers_reached: bool = False
    # The last argument of `_allowed`, and its result. Any thread may replace both.
    _last_allowed: tuple[TopicPublishInfo, TopicPublishInfo] | None = field(default=None, init=False)

    def cached(self, topic: str) -> TopicPublishInfo | None:
        """Return a topic's route without a request; None if it is not known."""
        info = self.instance.routes.cached(topic)
        return None if info is None else self._allowed(info)

    def _allowed(self, info: TopicPublishInfo) -> TopicPublishInfo:
        """Return a route without the queues that `queue_nums` does not have."""
        nums = self.queue_nums
        if nums is None:
            return info
        last = self._last_allowed
        if last is None or last[0] is not info:
            queues = tuple(queue for queue in info.queues if queue.queue_id < nums.get(queue.broker_name, 0))
            last = self._last_allowed = info, info if queues == info.queues else replace(info, queues=queues)
        return last[1]

    def queues_of(self, topic: str) -> Sequence[MessageQueue]:
        """Return the fixed queues of the write, or the writable queues of a topic; see `look_up`."""
        if self.fixed_queues and topic == self.options.topic:
            return self.fixed_queues
        return self.look_up(topic).queues

    def look_up(self, topic: str) -> TopicPublishInfo:
        """Return a topic's route; docs/internals/routing.md#routes has the waits.

        Raises an MQClientException (10004 without any name server, 10005 without a route).
        """
        routes = self.instance.routes
        info = routes.cached(topic)
        if info is not None and info.ok:
            return self._allowed(info)
        options = self.options
        servers = len(options.connection.route_servers)
        if not servers:
            raise RouteNotFoundException(
                f"looking up topic {topic}: the name server list is empty; set nameServer, or endpoints for gRPC",
                NO_NAME_SERVER,
            )
        started = self.clock()
        short, longest = options.send_msg_timeout * servers / 1000, options.delivery_timeout_ms / 1000
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_max_ms, self.rng)
        retries = Retries(started, backoff.delay, self.clock, self.runtime.sleep)
        while True:
            try:
                return self._allowed(routes.look_up(topic, min(short, API_TIMEOUT * servers)))
            except RouteNotFoundException as exc:
                # The driver found the queues of an ordered write, so a topic without a route has lost its brokers.
                once_ok = routes.was_ok(topic) or (self.fixed_queues is not None and not exc.unreachable)
                known = self.servers_reached or not routes.is_empty
                patience = longest if once_ok or (exc.unreachable and known) else short
                if options.over_grpc and not exc.unreachable:
                    patience = max(patience, min(_PROXY_FORGETS, longest))
                retries.deadline = started + patience
                if not retries.wait():
                    raise
                logger.info("%s; trying again", exc)


@contextmanager
def acquired(options: SinkOptions) -> Iterator[ClientInstance]:
    """Return the instance that the writes of this process with these options share.

    Leaving the context unregisters the producer group.
    """
    key = (_client_id(options), SharedConnection.of(options.connection))
    instance = registry.acquire(key, options.producer_group, lambda: new_instance(options))
    try:
        yield instance
    finally:
        instance.unregister(options.producer_group)


def _client_id(options: SinkOptions) -> str:
    # The repr has no secrets: a client id is sent and logged, and must not be a means to guess them.
    digest = hashlib.sha1(repr(options.connection).encode()).hexdigest()[:8]
    return client_id_of(options.connection, options.instance_name or f"{os.getpid()}#{digest}")


def new_instance(options: SinkOptions) -> ClientInstance:
    """Return a new instance; its user closes it."""
    client_id = _client_id(options)
    return ClientInstance(client_id, new_transport(options.connection, client_id), options.connection)
