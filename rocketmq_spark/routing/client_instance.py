"""Creates, shares and closes client instances, which have the connections, routes and periodic jobs of a client id.

Producers of the same client id and namespace share an instance; their other connection options must be equal, too.
Spark tasks of a process share one if client id and connection options are equal. See
docs/internals/producer.md#client-instances; Java: ``MQClientInstance``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.errors import (
    MQClientException,
    NoBrokersException,
    OptionError,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.routing.connect import SharedConnection
from rocketmq_spark.routing.fault_strategy import PERIOD, FaultDetector, FaultStrategy
from rocketmq_spark.routing.heart_beat import HeartBeats, Worker
from rocketmq_spark.routing.route_cache import RouteCache
from rocketmq_spark.routing.topic_configs import TopicConfigCache
from rocketmq_spark.transport.base import OnCheckTransaction, Transport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.producer")

IDLE_SECONDS: Final = 60.0  # Java has no such time

_FIRST_HEART_BEAT: Final = 1.0
_REFRESH_GAP: Final = 1.0


class ClientInstance:
    """Connections, routes and fault items of one client id; calls `on_idle` after `idle_seconds` without a user."""

    def __init__(
        self,
        client_id: str,
        transport: Transport,
        options: ConnectionOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_seconds: float = IDLE_SECONDS,
        runtime: Runtime = PROCESS,
    ) -> None:
        self._worker = Worker(f"rocketmq-client-{client_id}", self._run_due_or_end, clock, runtime)
        self._detecting = Worker(f"rocketmq-detector-{client_id}", self.detect_due, clock, runtime)
        self._api_timeout = options.mq_client_api_timeout / 1000
        self.client_id = client_id
        self.transport = transport
        self.routes = RouteCache(
            transport.query_route,
            # Over gRPC no message creates a topic.
            create_topic_key=None if options.over_grpc else options.create_topic_key,
            default_topic_queue_nums=options.default_topic_queue_nums,
            on_change=self._worker.wake,
            runtime=runtime,
        )
        self.topic_configs = TopicConfigCache(transport, clock)
        self.faults = FaultStrategy.of_options(options)
        self.pid = os.getpid()
        self._poll_interval = options.poll_name_server_interval / 1000
        self._heart_beat_interval = options.heartbeat_broker_interval / 1000
        self._detect_timeout = options.detect_timeout / 1000
        self._clock = clock
        self._idle_seconds = idle_seconds
        self._heart_beats = HeartBeats(client_id, transport, self.routes, self._api_timeout, clock)
        self._detector = FaultDetector(
            self.faults.table,
            master_of=self.routes.master_of,
            topics=self.routes.topics,
            probe=self._probe,
            interval=options.detect_interval / 1000,
        )
        # Number of producers and tasks by producer group.
        self._groups: dict[str, int] = {}
        self._topics_to_refresh: set[str] = set()
        self._refreshed_at: dict[str, float] = {}
        # Topics whose last look-up failed; "" is every topic, because no server answered, or none knew a broker.
        self._failing: set[str] = set()
        now = clock()
        # Processes that start together look up their routes at different times.
        self._routes_due = now + self._poll_interval * (0.5 + zlib.crc32(client_id.encode()) / 2**33)
        self._heart_beat_due = now + _FIRST_HEART_BEAT
        self._detection_due = now + PERIOD
        self._lock = threading.Lock()
        self._closed = False
        self.on_idle: Callable[[], None] = self.close
        self._idle_since: float | None = now

    @property
    def users(self) -> int:
        """Number of producers and tasks that use this instance."""
        return sum(self._groups.values())

    @property
    def closed(self) -> bool:
        """True if it is closing or closed, or its transport has failed."""
        return self._closed or self.transport.closed

    def register(self, producer_group: str) -> None:
        """Add a producer of a group; heartbeats contain the group from now on."""
        with self._lock:
            self._groups[producer_group] = self._groups.get(producer_group, 0) + 1
            self._idle_since = None

    def start(self) -> None:
        """Start the threads of the periodic jobs. Idempotent."""
        self._worker.start()
        if self.faults.detector_enabled:
            self._detecting.start()

    def unregister(self, producer_group: str) -> None:
        """Remove a producer of a group; heartbeats contain the group until the instance closes."""
        with self._lock:
            self._groups[producer_group] -= 1
            if not self.users:
                self._idle_since = self._clock()

    def forget(self, producer_group: str) -> None:
        """Remove every producer of a group, and unregister the group at every broker. Does not raise."""
        with self._lock:
            self._groups.pop(producer_group, None)
            if not self.users and self._idle_since is None:
                self._idle_since = self._clock()
        self._heart_beats.unregister(producer_group)

    def heart_beat(self) -> bool:
        """Send heartbeats to all masters now; return False if another round is running."""
        return self._heart_beats.send(tuple(self._groups))

    def refresh_route(self, topic: str) -> None:
        """Look up a topic's route in the background, at most once a second."""
        if topic not in self._topics_to_refresh:
            self._topics_to_refresh.add(topic)
            self._worker.wake()

    def idle_for(self, now: float) -> float:
        """Return how long the instance has had no user, seconds; 0 while it has one."""
        return 0.0 if self._idle_since is None else now - self._idle_since

    def run_due(self, now: float) -> float:
        """Run the jobs that are due, and log their errors; return when the next one is due, seconds."""
        for topic in tuple(self._topics_to_refresh):
            if now >= self._refreshed_at.get(topic, float("-inf")) + _REFRESH_GAP:
                self._topics_to_refresh.discard(topic)
                self._refresh(topic, now)
        if now >= self._routes_due:
            self._routes_due = now + self._poll_interval
            for topic in self.routes.topics():
                # An error that concerns every topic ends the round.
                if not self._refresh(topic, now):
                    break
        if not self._beat_if_due(now):
            self._heart_beats.send(tuple(self._groups), only_new=True)
        refreshes = [self._refreshed_at.get(topic, now) + _REFRESH_GAP for topic in tuple(self._topics_to_refresh)]
        return min(self._routes_due, self._heart_beat_due, *refreshes)

    def detect_due(self, now: float) -> float:
        """Run the fault detector if it is due; return when it is due next, seconds."""
        if now >= self._detection_due:
            self._detection_due = self._detector.run_due(now)
        return self._detection_due

    def close(self) -> None:
        """Unregister from the brokers, close the connections, stop the threads. Idempotent."""
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

    def _refresh(self, topic: str, now: float) -> bool:
        """Look up a topic's route; return False if no server answers, or none knows a broker."""
        self._refreshed_at[topic] = now
        try:
            if self.routes.refresh(topic, self._api_timeout):
                logger.info("route of topic %s changed", topic)
        except RocketMQError as exc:
            unreachable = isinstance(exc, RouteNotFoundException) and exc.unreachable
            subject = "" if unreachable or isinstance(exc.__cause__, NoBrokersException) else topic
            # An instance that was closed meanwhile needs no route.
            is_known = self.closed or subject in self._failing
            logger.log(logging.DEBUG if is_known else logging.WARNING, "%s (the cached route stays in use)", exc)
            self._failing.add(subject)
            if subject:
                self._failing.discard("")
        else:
            self._failing -= {topic, ""}
            subject = topic
        # Look-ups that take 3 s each must not delay a heartbeat, for which brokers wait 120 s.
        self._beat_if_due(self._clock())
        return bool(subject)

    def _beat_if_due(self, now: float) -> bool:
        if now < self._heart_beat_due:
            return False
        self._heart_beat_due = now + self._heart_beat_interval
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
        if self.idle_for(now) >= self._idle_seconds:
            self.on_idle()
        return min(due, now + self._idle_seconds)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"users={self.users}"
        return f"<ClientInstance {self.client_id} {state} {self.routes!r} {self.transport!r}>"


class GroupTakenError(MQClientException):
    """The client instance already has a producer of the group."""


@dataclass(slots=True)
class _Member:
    instance: ClientInstance
    connection: SharedConnection | None = None
    # The handler of transaction checks of each producer group.
    groups: dict[str, OnCheckTransaction | None] = field(default_factory=dict)

    def on_check_transaction(self, check: TransactionCheck) -> None:
        on_check = self.groups.get(check.producer_group)
        if on_check is not None:
            on_check(check)
        else:
            text = (
                "%s checks the transaction of message %s, but this process has no transactional producer of group %r. "
                "Start one; the server will check again"
            )
            logger.warning(text, check.address, check.unique_id, check.producer_group)


class Registry:
    """The shared client instances of one process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._members: dict[Hashable, _Member] = {}

    def acquire(self, key: Hashable, producer_group: str, make: Callable[[], ClientInstance]) -> ClientInstance:
        """Return the instance of a key, from `make` if it is new; the caller releases it with `unregister`."""
        with self._locked():
            return self._started(key, self._member(key, make, None), producer_group)

    def join(
        self,
        client_id: str,
        connection: SharedConnection,
        producer_group: str,
        on_check: OnCheckTransaction | None,
        make: Callable[[], ClientInstance],
    ) -> ClientInstance:
        """Return the instance of a client id and a namespace for a producer, from `make` if it is new.

        Raises OptionError if it has other connection options, GroupTakenError if it has a producer of the group.
        """
        with self._locked():
            key = client_id, connection.namespace
            member = self._member(key, make, connection)
            if member.connection is not None and (differences := member.connection.differences(connection)):
                raise OptionError(
                    f"starting a producer of group {producer_group}: client {client_id} is in use by a producer whose "
                    f"{', '.join(differences)} {'differ' if len(differences) > 1 else 'differs'}. Set another "
                    "instance_name, or the same values"
                )
            if producer_group in member.groups:
                raise GroupTakenError(
                    f"starting a producer of group {producer_group}: client {client_id} has one already; use another "
                    "group, or set another instance_name"
                )
            instance = self._started(key, member, producer_group)
            member.groups[producer_group] = on_check
            return instance

    def leave(self, instance: ClientInstance, producer_group: str) -> None:
        """Remove a producer and unregister its group at the brokers; close the instance if it has no users."""
        with self._lock:
            for key, member in list(self._members.items()):
                if member.instance is instance:
                    member.groups.pop(producer_group, None)
                    if not member.groups:
                        del self._members[key]
        instance.forget(producer_group)
        if not instance.users:
            instance.close()

    def close_all(self) -> None:
        """Close every instance, even if it is in use."""
        with self._lock:
            members, self._members = list(self._members.values()), {}
        for member in members:
            member.instance.close()

    def _locked(self) -> threading.Lock:
        if os.getpid() != self._pid:
            # After a fork the lock may stay locked, and threads and sockets are the parent's.
            self.__init__()  # type: ignore[misc]
        return self._lock

    def _member(
        self, key: Hashable, make: Callable[[], ClientInstance], connection: SharedConnection | None
    ) -> _Member:
        member = self._members.get(key)
        if member is not None and not member.instance.closed:
            return member
        member = self._members[key] = _Member(make(), connection)
        member.instance.on_idle = lambda: self._close_idle(key, member.instance)
        if connection is not None:
            member.instance.transport.on_check_transaction = member.on_check_transaction
        return member

    def _started(self, key: Hashable, member: _Member, producer_group: str) -> ClientInstance:
        """Return a member's instance, started and with one more user of a group."""
        instance = member.instance
        try:
            instance.start()
        except BaseException:
            # For example, the thread did not start. An instance without users must not stay.
            if not instance.users:
                del self._members[key]
                instance.close()
            raise
        instance.register(producer_group)
        return instance

    def _close_idle(self, key: Hashable, instance: ClientInstance) -> None:
        with self._lock:
            # A task may have acquired it meanwhile.
            if instance.users:
                return
            if key in self._members and self._members[key].instance is instance:
                del self._members[key]
        instance.close()


registry: Final = Registry()
