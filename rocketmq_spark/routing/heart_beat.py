"""Sends the heartbeats of a client instance (docs/internals/producer.md#heartbeats).

`Worker` is a thread that runs periodic jobs. An instance has one for heartbeats and routes, and one for the fault
detector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.errors import CredentialsError, RocketMQError, UserRefusedException
from rocketmq_spark.routing.route_cache import RouteCache
from rocketmq_spark.transport.base import ProxyTransport
from rocketmq_spark.transport.runtime import PROCESS, Runtime

logger = logging.getLogger("rocketmq_spark.producer")

# Default of mqClientApiTimeout, for route, heartbeat and unregister requests, seconds.
API_TIMEOUT: Final = 3.0

# The default of heartbeatBrokerInterval, seconds: enough for ten brokers that do not answer.
_LONGEST_ROUND: Final = 30.0


@dataclass(slots=True, eq=False)
class HeartBeats:
    """Sends the heartbeats of one client, one round at a time; safe for many threads. A failed broker is only logged.

    A failing address is a warning once, until it accepts a heartbeat. A rejected user is a warning once, until no
    broker rejects it any more.
    """

    client_id: str
    transport: ProxyTransport
    routes: RouteCache
    api_timeout: float
    clock: Callable[[], float]
    # The masters of the last round, and its last address if its time was over.
    _masters: frozenset[str] = field(default=frozenset(), init=False)
    _last_address: str = field(default="", init=False)
    # Addresses that reject the user, and addresses that failed since their last heartbeat.
    _rejecting: set[str] = field(default_factory=set, init=False)
    _failing: set[str] = field(default_factory=set, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def send(self, groups: Collection[str], *, only_new: bool = False) -> bool:
        """Send the groups to every master, or only to new ones; return False if another round is running."""
        # A broker needs a heartbeat to find the producer group for its transaction checks.
        if not self._lock.acquire(blocking=False):
            logger.debug("another round of heartbeats is running")
            return False
        try:
            masters = frozenset(self.routes.masters().values())
            self._rejecting &= masters
            self._failing &= {*self.routes.addresses(), *masters}
            if groups and masters:
                addresses = masters - self._masters if only_new else masters
                # A new broker that fails may time out each time, so it is not called again before the next full round.
                self._masters = masters
                after_last = sorted(addresses, key=lambda address: (address <= self._last_address, address))
                last_address = self._call_each(after_last, "heartbeat", lambda address: self._beat(address, groups))
                if not only_new:
                    self._last_address = last_address
        finally:
            self._lock.release()
        return True

    def unregister(self, group: str) -> None:
        """Unregister the group at every address of every broker, slaves included."""

        def call(address: str) -> None:
            try:
                self.transport.unregister_client(address, self.client_id, group, self.api_timeout)
            except (CredentialsError, UserRefusedException) as exc:
                # Earlier requests have reported this.
                logger.debug("unregistering group %s at %s: %s", group, address, exc)

        self._call_each(self.routes.addresses(), f"unregistering group {group}", call)

    def _beat(self, address: str, groups: Collection[str]) -> None:
        try:
            self.transport.heart_beat(address, self.client_id, groups, self.api_timeout)
        except (CredentialsError, UserRefusedException) as exc:
            level = logging.DEBUG if self._rejecting else logging.WARNING
            self._rejecting.add(address)
            logger.log(level, "heartbeat at %s failed: %s", address, exc)
        else:
            self._rejecting.discard(address)
            self._failing.discard(address)

    def _call_each(self, addresses: Sequence[str], doing: str, call: Callable[[str], None]) -> str:
        """Call each address; return the last one called if the time was over before all were, else ""."""
        deadline = self.clock() + _LONGEST_ROUND
        for number, address in enumerate(addresses):
            if self.clock() >= deadline:
                skipped = len(addresses) - number
                text = "%s: %d of %d servers were skipped, because the requests to the others took %g s"
                logger.warning(text, doing, skipped, len(addresses), _LONGEST_ROUND)
                return addresses[number - 1] if number else ""
            try:
                call(address)
            except RocketMQError as exc:
                # Errors of a transport that was closed meanwhile do not matter.
                is_known = self.transport.closed or address in self._failing
                level = logging.DEBUG if is_known else logging.WARNING
                self._failing.add(address)
                logger.log(level, "%s at %s failed: %s", doing, address, exc)
        return ""


# Pause after an unexpected exception, seconds.
_AFTER_FAILURE: Final = 3.0


class Worker:
    """A daemon thread that calls ``run_due(now)``, which returns when it is due next, in seconds."""

    def __init__(
        self,
        name: str,
        run_due: Callable[[float], float],
        clock: Callable[[], float],
        runtime: Runtime = PROCESS,
    ) -> None:
        self._runtime = runtime
        self._run_due = run_due
        self._clock = clock
        self._wake = runtime.event()
        self._stopped = False
        self._lock = threading.Lock()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has been started or stopped."""
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = self._runtime.start(self._run, self._name)

    def wake(self) -> None:
        """Let the thread call `run_due` at once, or again if it is running."""
        self._wake.set()

    def stop(self) -> None:
        """Stop after the running job, without waiting for it."""
        with self._lock:
            self._stopped = True
        self._wake.set()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped:
            now = self._clock()
            try:
                due = self._run_due(now)
            except Exception:
                # A bug must not stop the periodic jobs of the process.
                logger.exception("a job of %s failed; it runs again in %g s", self._name, _AFTER_FAILURE)
                due = now + _AFTER_FAILURE
            # If `wake` was called during the job, the next run is at once.
            self._wake.wait(max(due - self._clock(), 0.0))
            self._wake.clear()
