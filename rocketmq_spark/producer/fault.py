"""Which brokers to avoid for now, and for how long.

Rule 1: no clock here; `now` (seconds) always comes in.
Rule 2: this file knows broker names only, neither queues nor sockets.
Rule 3: a success never shortens an isolation; only time ends it (5.x; spec/producer.md section 5.6).
Rule 4: switched off, nothing is recorded and every broker is available.

Follows ``MQFaultStrategy.java`` and ``LatencyFaultToleranceImpl.java`` with the seed's numbers (spec/producer.md
sections 5.3, 5.4, 5.6).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final

# What an isolated broker's latency is taken for, milliseconds (4.x; spec/producer.md section 5.3).
ISOLATION_LATENCY_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class LatencyLadder:
    """How long to stay away from a broker that answered slowly.

    Parameters
    ----------
    latency_max : sequence of int
        Ascending thresholds, milliseconds.
    not_available_duration : sequence of int
        Milliseconds to stay away from a broker that reached the threshold at the same place.
    """

    latency_max: tuple[int, ...]
    not_available_duration: tuple[int, ...]

    def not_available_ms(self, latency_ms: float) -> int:
        """Return how long to stay away from a broker that answered in `latency_ms`, milliseconds."""
        steps = zip(reversed(self.latency_max), reversed(self.not_available_duration), strict=True)
        return next((away for at_least, away in steps if latency_ms >= at_least), 0)


@dataclass(frozen=True, slots=True)
class FaultItem:
    """What is known of one broker (``LatencyFaultToleranceImpl.FaultItem``).

    Parameters
    ----------
    current_latency_ms : float
        The last latency measured, milliseconds (a duration, not a point in time).
    start_timestamp : float
        From when on the broker may be used again, seconds.
    reachable : bool
    """

    current_latency_ms: float
    start_timestamp: float
    reachable: bool = True


class LatencyFaultTolerance:
    """The fault items of all brokers of one client instance; safe for many threads.

    Parameters
    ----------
    ladder : LatencyLadder
    enabled : bool, default False
        ``sendLatencyFaultEnable``.
    """

    def __init__(self, ladder: LatencyLadder, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._ladder = ladder
        self._items: dict[str, FaultItem] = {}
        self._lock = threading.Lock()

    def update(
        self, broker_name: str, latency_ms: float, now: float, *, isolation: bool, reachable: bool = True
    ) -> float:
        """Take an outcome into account (``updateFaultItem``).

        Returns
        -------
        float
            Milliseconds of isolation that this outcome added; 0 when it added none.
        """
        if not self.enabled:
            return 0.0
        away_ms = self._ladder.not_available_ms(ISOLATION_LATENCY_MS if isolation else latency_ms)
        with self._lock:
            known = self._items.get(broker_name, FaultItem(latency_ms, now))
            until = now + away_ms / 1000 if away_ms else known.start_timestamp
            start = max(known.start_timestamp, until)
            self._items[broker_name] = replace(
                known, current_latency_ms=latency_ms, start_timestamp=start, reachable=reachable
            )
            return max(0.0, (start - max(known.start_timestamp, now)) * 1000) if away_ms else 0.0

    def is_available(self, broker_name: str, now: float) -> bool:
        """Tell whether no isolation of the broker is running (`now` equal to its end counts as over)."""
        item = self._items.get(broker_name)
        return item is None or now >= item.start_timestamp

    def is_reachable(self, broker_name: str) -> bool:
        """Tell whether the broker answered last time anything was heard of it."""
        item = self._items.get(broker_name)
        return item is None or item.reachable

    def remove(self, broker_name: str) -> None:
        """Forget a broker."""
        with self._lock:
            self._items.pop(broker_name, None)

    def items(self) -> dict[str, FaultItem]:
        """Return a copy of the table, by broker name."""
        with self._lock:
            return dict(self._items)

    def __repr__(self) -> str:
        return f"<LatencyFaultTolerance enabled={self.enabled} brokers={len(self._items)}>"
