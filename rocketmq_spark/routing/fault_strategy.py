"""Decides how long a slow or failing broker is isolated, and which brokers a send prefers.

Without ``sendLatencyFaultEnable``, the default, no broker is isolated, and sends only prefer not to repeat the broker
that failed last. A fault item is the record of a broker's last latency or failure. A broker without one is available
and reachable. Follows Java's ``MQFaultStrategy`` (docs/internals/routing.md#latency-faults).
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark.errors import MQBrokerException, RemotingException, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.connection import ConnectionOptions

logger = logging.getLogger("rocketmq_spark.producer")

# Time between two runs of the detector, and before its first one, seconds.
PERIOD: Final = 3.0


@dataclass(frozen=True, slots=True)
class FaultItem:
    """The state of one broker (``LatencyFaultToleranceImpl.FaultItem``)."""

    current_latency_ms: float
    start_timestamp: float  # The end of the isolation, seconds
    reachable: bool = True
    check_stamp: float = float("-inf")  # The detector checks the broker from then on, seconds


class LatencyFaultTolerance:
    """The fault items of all brokers of one client instance; safe for many threads."""

    def __init__(self) -> None:
        self._items: dict[str, FaultItem] = {}
        self._picks = itertools.count(1)
        self._lock = threading.Lock()

    def update(
        self, broker_name: str, latency_ms: float, now: float, *, away_ms: float, reachable: bool, shorten: bool
    ) -> float:
        """Isolate a broker (``updateFaultItem``), or `shorten` its isolation (4.x); return the added milliseconds."""
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
        return item is None or now >= item.start_timestamp

    def is_reachable(self, broker_name: str) -> bool:
        """Return whether the last outcome or probe reached the broker."""
        item = self._items.get(broker_name)
        return item is None or item.reachable

    def pick_one_at_least(self, now: float) -> str | None:
        """Return the brokers of the better half in turn; None without any item (``pickOneAtLeast``, 4.x)."""

        def order(entry: tuple[str, FaultItem]) -> tuple[bool, float, float]:
            item = entry[1]
            return now < item.start_timestamp, item.current_latency_ms, item.start_timestamp

        names = [name for name, _ in sorted(self.items().items(), key=order)]
        better = names[: max(1, len(names) // 2)]
        return better[next(self._picks) % len(better)] if better else None

    def take_checks(self, now: float, interval: float) -> list[str]:
        """Return the brokers that are due for a check; they are due again `interval` seconds later."""
        with self._lock:
            due = [name for name, item in self._items.items() if now >= item.check_stamp]
            for name in due:
                self._items[name] = replace(self._items[name], check_stamp=now + interval)
            return due

    def set_reachable(self, broker_name: str) -> None:
        """Record that a broker can be reached, if it has an item."""
        with self._lock:
            if broker_name in self._items:
                self._items[broker_name] = replace(self._items[broker_name], reachable=True)

    def remove(self, broker_name: str) -> None:
        """Remove the item of a broker."""
        with self._lock:
            self._items.pop(broker_name, None)

    def items(self) -> dict[str, FaultItem]:
        """Return a copy of all items, by broker name."""
        with self._lock:
            return dict(self._items)


@dataclass(frozen=True, slots=True)
class FaultDetector:
    """Probes unreachable brokers, and forgets those without a master (docs/internals/routing.md#detector)."""

    table: LatencyFaultTolerance
    master_of: Callable[[str], str | None]
    topics: Callable[[], Sequence[str]]
    probe: Callable[[MessageQueue, str], bool]  # Returns whether the broker of a queue, at an address, answered in time
    interval: float  # ``detectInterval``, seconds between two probes of a broker

    def run_due(self, now: float) -> float:
        """Check every broker that is due; return when to run again, seconds."""
        for broker_name in self.table.take_checks(now, self.interval):
            address = self.master_of(broker_name)
            topics = () if self.table.is_reachable(broker_name) else self.topics()[:1]
            if address is None:
                logger.info("broker %s has no master any more: its fault item is removed", broker_name)
                self.table.remove(broker_name)
            elif any(self.probe(MessageQueue(topic, broker_name, 0), address) for topic in topics):
                logger.info("broker %s can be reached again", broker_name)
                self.table.set_reachable(broker_name)
        return now + PERIOD


class FaultSite(enum.Enum):
    """Where a send reports an outcome to the fault strategy."""

    RETURNED = "an attempt returned"
    REMOTING_FAILED = "an attempt raised RemotingException"
    CLIENT_FAILED = "an attempt raised MQClientException"
    BROKER_REFUSED = "an attempt raised MQBrokerException"
    INTERRUPTED = "an attempt was interrupted"
    ASYNC_RETURNED = "asynchronous: the answer was processed"
    ASYNC_REFUSED = "asynchronous: the answer was an error"
    ASYNC_FAILED = "asynchronous: transport failure or timeout"
    ASYNC_NOT_SUBMITTED = "asynchronous: the attempt could not be submitted"


def site_of(error: RocketMQError) -> FaultSite:
    """Return the site of an attempt's error."""
    if isinstance(error, MQBrokerException):
        return FaultSite.BROKER_REFUSED
    return FaultSite.REMOTING_FAILED if isinstance(error, RemotingException) else FaultSite.CLIENT_FAILED


@dataclass(frozen=True, slots=True)
class FaultPreset:
    """The rules of one preset. An `isolating` site counts as a latency of `isolation_latency_ms`."""

    # Ascending thresholds of latency, and how long a broker is isolated for each, milliseconds.
    latency_max: tuple[int, ...]
    not_available_duration: tuple[int, ...]
    isolation_latency_ms: int
    isolating: frozenset[FaultSite]
    # Sites that mark the broker as unreachable.
    unreachable: frozenset[FaultSite]
    unreachable_with_detector: frozenset[FaultSite]
    # While no broker is available, prefer one of the better half (4.x), not all that are reachable (5.x).
    picks_one_at_least: bool
    success_ends_isolation: bool
    # A retry continues at a new random queue.
    resets_index: bool

    def not_available_ms(self, latency_ms: float) -> int:
        """Return how long a broker of this latency is isolated, milliseconds."""
        steps = zip(reversed(self.latency_max), reversed(self.not_available_duration), strict=True)
        return next((duration for threshold, duration in steps if latency_ms >= threshold), 0)


_ERRORS: Final = frozenset(FaultSite) - {FaultSite.RETURNED, FaultSite.INTERRUPTED, FaultSite.ASYNC_RETURNED}
_UNREACHABLE: Final = frozenset({FaultSite.BROKER_REFUSED, FaultSite.ASYNC_NOT_SUBMITTED})

# The rules of 5.x with the numbers of 4.x.
_V4: Final = FaultPreset(
    latency_max=(50, 100, 550, 1000, 2000, 3000, 15000),
    not_available_duration=(0, 0, 30000, 60000, 120000, 180000, 600000),
    isolation_latency_ms=30_000,
    isolating=_ERRORS - {FaultSite.CLIENT_FAILED},
    unreachable=_UNREACHABLE,
    # Only the detector can mark the broker as reachable again.
    unreachable_with_detector=_UNREACHABLE | {FaultSite.REMOTING_FAILED},
    picks_one_at_least=False,
    success_ends_isolation=False,
    resets_index=True,
)

PRESETS: Final[Mapping[str, FaultPreset]] = {
    "v4": _V4,
    "v5": replace(
        _V4,
        latency_max=(50, 100, 550, 1800, 3000, 5000, 15000),
        not_available_duration=(0, 0, 2000, 5000, 6000, 10000, 30000),
        isolation_latency_ms=10_000,
    ),
    # The algorithm of 4.x, without its bug of preferring the broker that has just failed.
    "legacy": replace(
        _V4,
        isolating=_ERRORS,
        unreachable=frozenset(),
        unreachable_with_detector=frozenset(),
        picks_one_at_least=True,
        success_ends_isolation=True,
        resets_index=False,
    ),
}


def preset_of(
    name: str, latency_max: tuple[int, ...] | None = None, not_available_duration: tuple[int, ...] | None = None
) -> FaultPreset:
    """Return a preset, with other thresholds or durations (milliseconds) if they are not None."""
    preset = PRESETS[name]
    return replace(
        preset,
        latency_max=latency_max or preset.latency_max,
        not_available_duration=not_available_duration or preset.not_available_duration,
    )


@dataclass(slots=True, eq=False)
class FaultStrategy:
    """Decides which brokers the users of one client instance prefer; safe for many threads."""

    preset: FaultPreset = PRESETS["v4"]
    enabled: bool = False  # ``sendLatencyFaultEnable``; may be set later
    detector_enabled: bool = False  # ``startDetectorEnable``
    table: LatencyFaultTolerance = field(init=False, default_factory=LatencyFaultTolerance)

    @classmethod
    def of_options(cls, options: ConnectionOptions) -> FaultStrategy:
        """Return the strategy that the options choose."""
        return cls(
            preset_of(options.fault_preset, options.latency_max, options.not_available_duration),
            enabled=options.send_latency_fault_enable,
            detector_enabled=options.start_detector_enable,
        )

    @property
    def resets_index(self) -> bool:
        """True if a retry continues at a new random queue."""
        return self.enabled and self.preset.resets_index

    def update(self, site: FaultSite, broker_name: str, latency_ms: float, now: float) -> float:
        """Record an outcome at time `now`, in seconds; return the isolation that it added, milliseconds."""
        if not self.enabled:
            return 0.0
        preset = self.preset
        counted_latency_ms = preset.isolation_latency_ms if site in preset.isolating else latency_ms
        unreachable = preset.unreachable_with_detector if self.detector_enabled else preset.unreachable
        return self.table.update(
            broker_name,
            latency_ms,
            now,
            away_ms=preset.not_available_ms(counted_latency_ms),
            reachable=site not in unreachable,
            shorten=preset.success_ends_isolation,
        )

    def is_available(self, broker_name: str, now: float) -> bool:
        """Return whether the broker is not isolated."""
        return not self.enabled or self.table.is_available(broker_name, now)

    def prefer(
        self, candidates: frozenset[str], last_broker_name: str | None, admitted: frozenset[str], now: float
    ) -> frozenset[str]:
        """Return the brokers to choose from, all `admitted` (windows with room); none if the caller should wait."""
        others = candidates - {last_broker_name}
        if not self.enabled:
            return admitted & (others or candidates) or admitted & candidates
        available = frozenset(name for name in candidates if self.table.is_available(name, now))
        preferred = available & others
        if not self.preset.picks_one_at_least:
            preferred = preferred or frozenset(filter(self.table.is_reachable, others)) or candidates
        elif available:
            preferred = preferred or available
        else:
            not_best = self.table.pick_one_at_least(now)
            if not_best is not None and not_best not in candidates:
                # The topic has no queue on this broker.
                self.table.remove(not_best)
            return admitted & {not_best} or admitted
        return admitted & preferred or admitted & available
