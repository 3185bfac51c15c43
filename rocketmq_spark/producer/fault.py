"""What is known of each broker: how fast it answered, from when on it may be used again, whether it can be reached.

Rule 1: no clock here; `now` (seconds) always comes in.
Rule 2: this file knows broker names only, neither queues nor sockets; how long a broker is avoided is decided in
        `fault_strategy`.
Rule 3: a broker without an item is available and reachable.

Follows ``LatencyFaultToleranceImpl.java`` (spec/producer.md sections 5.5 to 5.7).
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class FaultItem:
    """What is known of one broker (``LatencyFaultToleranceImpl.FaultItem``).

    Parameters
    ----------
    current_latency_ms : float
        The last latency measured, milliseconds (a duration, not a point in time).
    start_timestamp : float
        From when on the broker may be used again, seconds.
    reachable : bool, default True
    check_stamp : float, default -inf
        From when on the detector may look at it again, seconds.
    """

    current_latency_ms: float
    start_timestamp: float
    reachable: bool = True
    check_stamp: float = float("-inf")

    def is_available(self, now: float) -> bool:
        """Tell whether no isolation is running (`now` equal to its end counts as over)."""
        return now >= self.start_timestamp


class LatencyFaultTolerance:
    """The fault items of all brokers of one client instance; safe for many threads."""

    def __init__(self) -> None:
        self._items: dict[str, FaultItem] = {}
        self._picks = itertools.count(1)
        self._lock = threading.Lock()

    def update(
        self, broker_name: str, latency_ms: float, now: float, *, away_ms: float, reachable: bool, shorten: bool
    ) -> float:
        """Take an outcome into account (``updateFaultItem``).

        Parameters
        ----------
        broker_name : str
        latency_ms : float
            Measured, milliseconds.
        now : float
            Seconds.
        away_ms : float
            How long to stay away from now on, milliseconds.
        reachable : bool
        shorten : bool
            An isolation that is running ends when this outcome says so, even if that is sooner (4.x).

        Returns
        -------
        float
            Milliseconds of isolation that this outcome added; 0 when it added none.
        """
        with self._lock:
            known = self._items.get(broker_name, FaultItem(latency_ms, now))
            start = now + away_ms / 1000
            if not shorten:
                start = max(known.start_timestamp, start) if away_ms else known.start_timestamp
            self._items[broker_name] = replace(
                known, current_latency_ms=latency_ms, start_timestamp=start, reachable=reachable
            )
            return max(0.0, (start - max(known.start_timestamp, now)) * 1000) if away_ms else 0.0

    def is_available(self, broker_name: str, now: float) -> bool:
        """Tell whether no isolation of the broker is running."""
        item = self._items.get(broker_name)
        return item is None or item.is_available(now)

    def is_reachable(self, broker_name: str) -> bool:
        """Tell whether the broker answered last time anything was heard of it."""
        item = self._items.get(broker_name)
        return item is None or item.reachable

    def pick_one_at_least(self, now: float) -> str | None:
        """Return a broker of the better half, each call the next one; None without any item (``pickOneAtLeast``, 4.x).

        Better is: available, then the smaller latency, then sooner available (spec/producer.md section 5.7).
        """
        items = self.items()
        order = sorted(
            items,
            key=lambda name: (
                not items[name].is_available(now),
                items[name].current_latency_ms,
                items[name].start_timestamp,
            ),
        )
        # A single item is its own better half.
        better = order[: max(1, len(order) // 2)]
        return better[next(self._picks) % len(better)] if better else None

    def take_checks(self, now: float, interval: float) -> list[str]:
        """Return the brokers that the detector should look at now; it will not be told them again for `interval` s."""
        with self._lock:
            due = [name for name, item in self._items.items() if now >= item.check_stamp]
            for name in due:
                self._items[name] = replace(self._items[name], check_stamp=now + interval)
            return due

    def set_reachable(self, broker_name: str) -> None:
        """Note that a broker was heard of; one without an item is reachable as it is."""
        with self._lock:
            item = self._items.get(broker_name)
            if item is not None:
                self._items[broker_name] = replace(item, reachable=True)

    def remove(self, broker_name: str) -> None:
        """Forget a broker."""
        with self._lock:
            self._items.pop(broker_name, None)

    def items(self) -> dict[str, FaultItem]:
        """Return a copy of the table, by broker name."""
        with self._lock:
            return dict(self._items)

    def __repr__(self) -> str:
        return f"<LatencyFaultTolerance brokers={len(self._items)}>"
