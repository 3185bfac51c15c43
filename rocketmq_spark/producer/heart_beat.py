"""What brokers are told of the producers of one client: that they live, and that they are gone.

Rule 1: heart-beats go to masters only; who leaves tells every address, slaves included (spec/producer.md 1.5, 1.6).
Rule 2: one round of heart-beats at a time; who comes meanwhile does not wait.
Rule 3: a broker that does not answer is logged, and stops neither the others nor the caller.
Rule 4: a round takes as long as `_LONGEST_ROUND` at most, and the next one goes on where it ended: routes may name
        more brokers than can be waited for, and whoever says good-bye wants to leave.
Rule 5: a user that brokers do not take is logged once, until one takes it again; who says good-bye logs nothing of it,
        for it was an error of all that was sent before.
Rule 6: a broker that was not known before hears at once: else a transaction's check-back could not find its producer
        group until the next round.

Follows ``MQClientInstance.sendHeartbeatToAllBrokerWithLock`` and ``unregisterClient``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from rocketmq_spark.errors import CredentialsError, RocketMQError, UserRefusedException
from rocketmq_spark.producer.route_cache import RouteCache
from rocketmq_spark.transport.base import Transport

logger = logging.getLogger("rocketmq_spark.producer")

# Route, heart-beat and unregister requests (mqClientApiTimeout), seconds.
API_TIMEOUT: Final = 3.0

# heartbeatBrokerInterval's default, seconds: ten brokers that do not answer.
_LONGEST_ROUND: Final = 30.0


class HeartBeats:
    """Keeps one client known to the brokers of its routes; safe for many threads.

    Parameters
    ----------
    client_id : str
    transport : Transport
    routes : RouteCache
    api_timeout : float, default 3.0
        Seconds for one request.
    clock : callable, default time.monotonic
        Seconds.
    """

    def __init__(
        self,
        client_id: str,
        transport: Transport,
        routes: RouteCache,
        api_timeout: float = API_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._last = ""
        self._api_timeout = api_timeout
        self._client_id = client_id
        self._transport = transport
        self._routes = routes
        self._told: frozenset[str] = frozenset()
        # Where heart-beats are refused for the user.
        self._refused_at: set[str] = set()
        self._lock = threading.Lock()

    def to_all(self, groups: Collection[str]) -> bool:
        """Name the groups to every master; return False if another round was under way and nothing was done."""
        return self._round(groups, lambda masters: masters, whole=True)

    def to_new(self, groups: Collection[str]) -> bool:
        """Name the groups to every master that no round has gone to; as `to_all` otherwise."""
        return self._round(groups, lambda masters: masters - self._told, whole=False)

    def unregister(self, group: str) -> None:
        """Tell every address of every broker that the group is gone."""

        def call(address: str) -> None:
            try:
                self._transport.unregister_client(address, self._client_id, group, self._api_timeout)
            except (CredentialsError, UserRefusedException) as exc:
                logger.debug("unregistering group %s at %s: %s", group, address, exc)

        self._tell(self._routes.addresses(), f"unregistering group {group}", call)

    def _round(
        self, groups: Collection[str], among: Callable[[frozenset[str]], frozenset[str]], *, whole: bool
    ) -> bool:
        if not self._lock.acquire(blocking=False):
            logger.debug("another round of heart-beats is under way")
            return False
        try:
            masters = frozenset(self._routes.masters().values())
            self._refused_at &= masters
            if groups and masters:
                chosen = among(masters)
                # One that fails is not asked again before the next round: it may take its whole timeout each time.
                self._told = masters
                after_last = sorted(chosen, key=lambda address: (address <= self._last, address))
                last = self._tell(after_last, "heart-beat", lambda address: self._beat(address, groups))
                self._last = last if whole else self._last
        finally:
            self._lock.release()
        return True

    def _beat(self, address: str, groups: Collection[str]) -> None:
        try:
            self._transport.heart_beat(address, self._client_id, groups, self._api_timeout)
        except (CredentialsError, UserRefusedException) as exc:
            level = logging.DEBUG if self._refused_at else logging.WARNING
            self._refused_at.add(address)
            logger.log(level, "heart-beat at %s failed: %s", address, exc)
        else:
            self._refused_at.discard(address)

    def _tell(self, addresses: Sequence[str], what: str, call: Callable[[str], None]) -> str:
        """Call one after the other; return the last one told if the time was over before all were, else nothing."""
        gives_up = self._clock() + _LONGEST_ROUND
        last = ""
        for number, address in enumerate(addresses):
            if self._clock() >= gives_up:
                left = len(addresses) - number
                logger.warning("%s: %d of %d servers were left out, %g s are over", what, left, len(addresses),
                               _LONGEST_ROUND)  # fmt: skip
                return last
            last = address
            try:
                call(address)
            except RocketMQError as exc:
                # Closed meanwhile, nobody needs to be told.
                level = logging.DEBUG if self._transport.closed else logging.WARNING
                logger.log(level, "%s at %s failed: %s", what, address, exc)
        return ""
