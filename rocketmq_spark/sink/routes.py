"""The routes of a write's topics."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence

from rocketmq_spark.errors import RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import NO_NAME_SERVER
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.heart_beat import API_TIMEOUT
from rocketmq_spark.routing.route_cache import TopicPublishInfo
from rocketmq_spark.sink.retry import Backoff

logger = logging.getLogger("rocketmq_spark.producer")

# A proxy caches that a topic is unknown for 20 s, and returns that once more afterwards. Measured on a real one: known
# after 21 s when asked every second, after 27 s when asked every 4.5 s. Seconds.
_PROXY_FORGETS = 35.0


class RouteFinder:
    """Looks up the routes of a write's topics, and waits for name servers and proxies that are down.

    Parameters
    ----------
    options : SinkOptions
    instance : ClientInstance
    clock : callable, default time.monotonic
        Seconds.
    rng : random.Random, optional
    fixed_queues : sequence of MessageQueue, optional
        With ``ordered``, the queues of the whole write, whatever the route says now.
    servers_reached : bool, default False
        A name server or proxy has answered during this write, for example the driver's. So the addresses are right, and
        a server that cannot be reached is down for a while.
    """

    def __init__(
        self,
        options: SinkOptions,
        instance: ClientInstance,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        fixed_queues: Sequence[MessageQueue] | None = None,
        servers_reached: bool = False,
    ) -> None:
        self._options = options
        self._routes = instance.routes
        self._clock = clock
        self._rng = rng or random.Random()
        self._fixed_queues = fixed_queues
        self._servers_reached = servers_reached

    def queues_of(self, topic: str) -> Sequence[MessageQueue]:
        """Return the fixed queues of the write, or the writable queues of a topic; see `find`."""
        if self._fixed_queues and topic == self._options.topic:
            return self._fixed_queues
        return self.find(topic).queues

    def find(self, topic: str) -> TopicPublishInfo:
        """Return a topic's route.

        A first route, and a topic that no server knows, are waited for ``sendMsgTimeout`` for each name server or
        endpoint. A name server that was reached before is waited for until ``deliveryTimeoutMs``. A topic that proxies
        do not know may have been created just now: it is waited for 35 s (at most ``deliveryTimeoutMs``).

        Raises
        ------
        MQClientException
            10004 without any name server, 10005 (`RouteNotFoundException`) if there is still no route.
        """
        info = self._routes.cached(topic)
        if info is not None and info.ok:
            return info
        options = self._options
        servers = len(options.connection.route_servers)
        if not servers:
            raise RouteNotFoundException(f"looking up topic {topic}: the name server list is empty", NO_NAME_SERVER)
        started, waits = self._clock(), 0
        short, longest = options.send_msg_timeout * servers / 1000, options.delivery_timeout_ms / 1000
        backoff = Backoff(options.retry_backoff_ms, options.retry_backoff_max_ms)
        while True:
            try:
                return self._routes.find(topic, min(short, API_TIMEOUT * servers))
            except RouteNotFoundException as exc:
                # The driver has found the queues of an ordered write, so a topic without them has lost its brokers.
                once_ok = self._routes.was_ok(topic) or (self._fixed_queues is not None and not exc.unreachable)
                known = self._servers_reached or not self._routes.is_empty
                patience = longest if once_ok or (exc.unreachable and known) else short
                if options.over_grpc and not exc.unreachable:
                    patience = max(patience, min(_PROXY_FORGETS, longest))
                waits += 1
                pause = backoff.delay(waits, self._rng)
                if self._clock() + pause >= started + patience:
                    raise
                logger.info("%s; trying again", exc)
                time.sleep(pause)
