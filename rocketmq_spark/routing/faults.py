"""The fault items of brokers: latency, isolation, reachability; and the detector that probes unreachable brokers.

A broker without a fault item is available and reachable. `fault_strategy` decides how long a broker is isolated. `now`
is always an argument, in seconds.

Follows ``LatencyFaultToleranceImpl.java``.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.model.message import MessageQueue

logger = logging.getLogger("rocketmq_spark.producer")

# Time between two runs of the detector, and before its first one, seconds.
PERIOD: Final = 3.0


@dataclass(frozen=True, slots=True)
class FaultItem:
    """The state of one broker (``LatencyFaultToleranceImpl.FaultItem``).

    `start_timestamp` ends the isolation. The detector checks the broker from `check_stamp` on. Both are in seconds.
    """

    current_latency_ms: float
    start_timestamp: float
    reachable: bool = True
    check_stamp: float = float("-inf")

    def is_available(self, now: float) -> bool:
        """Return whether the broker is not isolated."""
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
        """Record the outcome of an attempt (``updateFaultItem``); return the isolation that it added, milliseconds.

        The broker is isolated for `away_ms`. With `shorten`, this may end a running isolation early (4.x).
        """
        with self._lock:
            item = self._items.get(broker_name, FaultItem(latency_ms, now))
            start = now + away_ms / 1000
            if not shorten:
                start = max(item.start_timestamp, start) if away_ms else item.start_timestamp
            self._items[broker_name] = replace(
                item, current_latency_ms=latency_ms, start_timestamp=start, reachable=reachable
            )
            return max(0.0, (start - max(item.start_timestamp, now)) * 1000) if away_ms else 0.0

    def is_available(self, broker_name: str, now: float) -> bool:
        """Return whether the broker is not isolated."""
        item = self._items.get(broker_name)
        return item is None or item.is_available(now)

    def is_reachable(self, broker_name: str) -> bool:
        """Return whether the last outcome or probe reached the broker."""
        item = self._items.get(broker_name)
        return item is None or item.reachable

    def pick_one_at_least(self, now: float) -> str | None:
        """Return the brokers of the better half in turn; None without any item (``pickOneAtLeast``, 4.x).

        Available brokers are better, then those of smaller latency, then those whose isolation ends sooner.
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
        better = order[: max(1, len(order) // 2)]
        return better[next(self._picks) % len(better)] if better else None

    def take_checks(self, now: float, interval: float) -> list[str]:
        """Return the brokers to check now. Each is returned again `interval` seconds later."""
        with self._lock:
            due = [name for name, item in self._items.items() if now >= item.check_stamp]
            for name in due:
                self._items[name] = replace(self._items[name], check_stamp=now + interval)
            return due

    def set_reachable(self, broker_name: str) -> None:
        """Record that a broker can be reached; this makes no new item."""
        with self._lock:
            item = self._items.get(broker_name)
            if item is not None:
                self._items[broker_name] = replace(item, reachable=True)

    def remove(self, broker_name: str) -> None:
        """Remove the item of a broker."""
        with self._lock:
            self._items.pop(broker_name, None)

    def items(self) -> dict[str, FaultItem]:
        """Return a copy of all items, by broker name."""
        with self._lock:
            return dict(self._items)


class FaultDetector:
    """Probes the unreachable brokers of a fault table, one after the other.

    `master_of` returns the address of a broker. `probe` returns whether a broker answered in time; it needs a topic of
    the client. A broker is probed once per `interval` (``detectInterval``, seconds).
    """

    def __init__(
        self,
        table: LatencyFaultTolerance,
        *,
        master_of: Callable[[str], str | None],
        topics: Callable[[], Sequence[str]],
        probe: Callable[[MessageQueue, str], bool],
        interval: float,
    ) -> None:
        self._table = table
        self._master_of = master_of
        self._topics = topics
        self._probe = probe
        self._interval = interval

    def run_due(self, now: float) -> float:
        """Check every broker that is due; return when to run again, seconds."""
        for broker_name in self._table.take_checks(now, self._interval):
            address = self._master_of(broker_name)
            topic = next(iter(self._topics()), None)
            if address is None:
                logger.info("broker %s has no master any more: it is not kept in the fault table", broker_name)
                self._table.remove(broker_name)
            elif (
                topic is not None
                and not self._table.is_reachable(broker_name)
                and self._probe(MessageQueue(topic, broker_name, 0), address)
            ):
                logger.info("broker %s can be reached again", broker_name)
                self._table.set_reachable(broker_name)
        return now + PERIOD
