"""What the producers of one process share: connections, routes, fault items, and the schedules that keep them fresh.

Rule 1: one instance per key in a process, counted by its users; the last one gone, it stays warm for
        `IDLE_SECONDS`, so that the next task of a reused Python worker starts with open connections.
Rule 2: nothing survives a fork: what another process made is forgotten, its sockets never touched.
Rule 3: schedules never raise; what fails is logged and tried again at its next time.
Rule 4: the schedule is a function of `now` (`run_due`); the thread around it only waits.
Rule 5: the fault detector has a thread of its own: probes of brokers that don't answer take their whole timeout, and
        must hold up neither heart-beats nor routes.

Follows ``MQClientManager.java`` and ``MQClientInstance.java`` (spec/producer.md sections 1.3 to 1.6); the idle time is
the connector's own (design.md section 2).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.client_config import ClientConfig
from rocketmq_spark.producer.detector import PERIOD, FaultDetector
from rocketmq_spark.producer.fault_strategy import FaultStrategy
from rocketmq_spark.producer.heart_beat import API_TIMEOUT, HeartBeats
from rocketmq_spark.producer.route_cache import RouteCache
from rocketmq_spark.producer.worker import Worker
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.topic_configs import TopicConfigCache

logger = logging.getLogger("rocketmq_spark.producer")

IDLE_SECONDS: Final = 60.0

_FIRST_HEART_BEAT: Final = 1.0
_REFRESH_GAP: Final = 1.0


@dataclass(slots=True)
class _Schedule:
    """When the next run of each periodic job is due, seconds."""

    routes: float
    heart_beat: float
    detection: float


class ClientInstance:
    """Connections, routes and fault items of one client id.

    Parameters
    ----------
    client_id : str
        ``ip@instanceName``.
    transport : Transport
    options : ClientConfig
        Route, schedule and fault settings.
    clock : callable, default time.monotonic
        Seconds.
    idle_seconds : float, default 60
        How long it stays warm without a user.
    api_timeout : float, default 3.0
        Seconds for a route, heart-beat or unregister request (``mqClientApiTimeout``).
    """

    def __init__(
        self,
        client_id: str,
        transport: Transport,
        options: ClientConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_seconds: float = IDLE_SECONDS,
        api_timeout: float = API_TIMEOUT,
    ) -> None:
        self._api_timeout = api_timeout
        self.client_id = client_id
        self.transport = transport
        self.routes = RouteCache(
            transport.query_route,
            # Through a proxy no message creates a topic.
            create_topic_key=None if options.over_grpc else options.create_topic_key,
            default_topic_queue_nums=options.default_topic_queue_nums,
            on_change=self._wake,
        )
        self.topic_configs = TopicConfigCache(transport, clock)
        self.faults = FaultStrategy.of_options(options)
        self.pid = os.getpid()
        self._poll_interval = options.poll_name_server_interval / 1000
        self._heart_beat_interval = options.heartbeat_broker_interval / 1000
        self._detect_timeout = options.detect_timeout / 1000
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._heart_beats = HeartBeats(client_id, transport, self.routes, api_timeout, clock)
        self._detector = FaultDetector(
            self.faults.table,
            master_of=lambda broker_name: self.routes.masters().get(broker_name),
            topics=self.routes.topics,
            probe=self._probe,
            interval=options.detect_interval / 1000,
        )
        self._groups: dict[str, int] = {}
        self._refresh_wanted: set[str] = set()
        self._refreshed_at: dict[str, float] = {}
        now = clock()
        self._schedule = _Schedule(now + self._poll_interval, now + _FIRST_HEART_BEAT, now + PERIOD)
        self._lock = threading.Lock()
        self._worker = Worker(f"rocketmq-client-{client_id}", self._run_due_or_end, clock)
        self._detecting = Worker(f"rocketmq-detector-{client_id}", self.detect_due, clock)
        self._closed = False
        self._idle_since: float | None = now

    @property
    def users(self) -> int:
        """How many producers use this instance."""
        return sum(self._groups.values())

    @property
    def closed(self) -> bool:
        """True from the moment it begins to close, or its transport has broken down: make a new one."""
        return self._closed or self.transport.closed

    def register(self, producer_group: str) -> None:
        """Count a producer of that group in; heart-beats name the group from now on."""
        with self._lock:
            self._groups[producer_group] = self._groups.get(producer_group, 0) + 1
            self._idle_since = None

    def start(self) -> None:
        """Begin the schedules, on threads of their own. Idempotent."""
        self._worker.start()
        if self.faults.detector_enabled:
            self._detecting.start()

    def unregister(self, producer_group: str) -> None:
        """Count a producer of that group out; brokers still hear of the group while the instance stays warm."""
        with self._lock:
            self._groups[producer_group] -= 1
            if not self.users:
                self._idle_since = self._clock()

    def forget(self, producer_group: str) -> None:
        """Count every producer of a group out, and tell every address of every broker that it is gone.

        Does not raise; each address may take the time of one request.
        """
        with self._lock:
            self._groups.pop(producer_group, None)
            if not self.users and self._idle_since is None:
                self._idle_since = self._clock()
        self._heart_beats.unregister(producer_group)

    def heart_beat(self) -> bool:
        """Send heart-beats to all masters now; False if others are just being sent."""
        return self._heart_beats.to_all(tuple(self._groups))

    def refresh_route(self, topic: str) -> None:
        """Have a topic's route looked up in the background, at most once a second."""
        if topic not in self._refresh_wanted:
            self._refresh_wanted.add(topic)
            self._wake()

    def idle_for(self, now: float) -> float:
        """Return for how long no producer has used this instance, seconds; 0 while one does."""
        return 0.0 if self._idle_since is None else now - self._idle_since

    def run_due(self, now: float) -> float:
        """Run what is due, and return when something will be due next (seconds)."""
        for topic in tuple(self._refresh_wanted):
            if now >= self._refreshed_at.get(topic, float("-inf")) + _REFRESH_GAP:
                self._refresh_wanted.discard(topic)
                self._refresh(topic, now)
        if now >= self._schedule.routes:
            self._schedule.routes = now + self._poll_interval
            for topic in self.routes.topics():
                self._refresh(topic, now)
        if not self._beat_if_due(now):
            self._heart_beats.to_new(tuple(self._groups))
        due = [self._schedule.routes, self._schedule.heart_beat]
        due += [self._refreshed_at.get(topic, now) + _REFRESH_GAP for topic in tuple(self._refresh_wanted)]
        return min(due)

    def detect_due(self, now: float) -> float:
        """Run the fault detector if its time has come, and return when it comes next (seconds)."""
        if now >= self._schedule.detection:
            self._schedule.detection = self._detector.run_due(now)
        return self._schedule.detection

    def close(self) -> None:
        """Tell the brokers, close the connections, end the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._worker.stop()
        self._detecting.stop()
        if os.getpid() == self.pid:
            for group in tuple(self._groups):
                self._heart_beats.unregister(group)
        self.transport.close()

    def _wake(self) -> None:
        self._worker.wake()

    def _refresh(self, topic: str, now: float) -> None:
        self._refreshed_at[topic] = now
        try:
            if self.routes.refresh(topic, self._api_timeout):
                logger.info("route of topic %s changed", topic)
        except RocketMQError as exc:
            # Of one that has been closed meanwhile nobody needs a route.
            logger.log(logging.DEBUG if self.closed else logging.WARNING, "%s (the cached route goes on)", exc)

        # Name servers that do not answer take 3 s for each topic. A broker closes the connection of a producer 120 s
        # after its last heart-beat, whatever is in flight.
        self._beat_if_due(self._clock())

    def _beat_if_due(self, now: float) -> bool:
        if now < self._schedule.heart_beat:
            return False
        self._schedule.heart_beat = now + self._heart_beat_interval
        self.routes.clean_offline_brokers()
        self.heart_beat()
        return True

    def _probe(self, queue: MessageQueue, address: str) -> bool:
        try:
            self.transport.probe(queue, address, self._detect_timeout)
        except RocketMQError as exc:
            logger.info("broker %s still can't be reached: %s", queue.broker_name, exc)
            return False
        return True

    def _run_due_or_end(self, now: float) -> float:
        due = self.run_due(now)
        if self.idle_for(now) >= self._idle_seconds and _instances.discard(self):
            self.close()
        # No later than the moment at which it may have been idle for long enough.
        return min(due, now + self._idle_seconds)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"users={self.users}"
        return f"<ClientInstance {self.client_id} {state} {self.routes!r} {self.transport!r}>"


class _Instances:
    """The instances of this process, by key (``MQClientManager.java``)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._by_key: dict[Hashable, ClientInstance] = {}

    def acquire(self, key: Hashable, group: str, make: Callable[[], ClientInstance]) -> ClientInstance:
        if os.getpid() != self._pid:
            # Forked: the parent's threads are not here, its lock may be held for ever, its sockets are not ours.
            self.__init__()  # type: ignore[misc]
        with self._lock:
            instance = self._by_key.get(key)
            if instance is None or instance.closed:
                instance = self._by_key[key] = make()
            instance.start()
            instance.register(group)
            return instance

    def discard(self, instance: ClientInstance) -> bool:
        """Take an idle instance out, unless somebody has just begun to use it."""
        with self._lock:
            if instance.users:
                return False
            self._by_key = {key: known for key, known in self._by_key.items() if known is not instance}
            return True

    def close_all(self) -> None:
        with self._lock:
            instances, self._by_key = list(self._by_key.values()), {}
        for instance in instances:
            instance.close()


_instances = _Instances()


def acquire_instance(key: Hashable, producer_group: str, make: Callable[[], ClientInstance]) -> ClientInstance:
    """Return this process's instance for `key`, made by `make` if there is none, with the group counted in.

    The caller gives it back with `ClientInstance.unregister`.
    """
    return _instances.acquire(key, producer_group, make)


def close_instances() -> None:
    """Close every instance of this process now, used or not (tests; the end of a driver)."""
    _instances.close_all()
