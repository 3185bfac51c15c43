"""The rule sets of ``faultPreset``: how long a broker is avoided, what counts as its fault, which brokers come first.

Rule 1: a preset is a value, and all that differs between presets is in it; nobody else asks for a preset's name.
Rule 2: `v4` and `v5` are the rules of 5.x with the numbers of 4.x and of 5.x; `legacy` is the algorithm of 4.x, with
        its bug mended: on a retry it preferred the broker that had just failed (spec/producer.md section 5.5).

Follows ``MQFaultStrategy.java`` (spec/producer.md sections 5.3 to 5.5 and 5.8).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.errors import MQBrokerException, RemotingException, RocketMQError
from rocketmq_spark.producer.fault import LatencyFaultTolerance

Brokers = frozenset[str]
# (table, candidates, broker that failed last, brokers that admit a request, now) -> brokers to choose from now
Preference = Callable[[LatencyFaultTolerance, Brokers, "str | None", Brokers, float], Brokers]


@dataclass(frozen=True, slots=True)
class LatencyLadder:
    """How long to stay away from a broker that answered slowly.

    Parameters
    ----------
    latency_max : tuple of int
        Ascending thresholds, milliseconds.
    not_available_duration : tuple of int
        Milliseconds to stay away from a broker that reached the threshold at the same place.
    """

    latency_max: tuple[int, ...]
    not_available_duration: tuple[int, ...]

    def not_available_ms(self, latency_ms: float) -> int:
        """Return how long to stay away from a broker that answered in `latency_ms`, milliseconds."""
        steps = zip(reversed(self.latency_max), reversed(self.not_available_duration), strict=True)
        return next((away for at_least, away in steps if latency_ms >= at_least), 0)


class FaultSite(enum.Enum):
    """Where a send learns something of a broker: the lines of spec/producer.md section 5.8."""

    RETURNED = "an attempt returned"
    REMOTING_FAILED = "an attempt raised RemotingException"
    CLIENT_FAILED = "an attempt raised MQClientException"
    BROKER_REFUSED = "an attempt raised MQBrokerException"
    INTERRUPTED = "an attempt was interrupted"
    ASYNC_RETURNED = "asynchronous: the answer was processed"
    ASYNC_REFUSED = "asynchronous: the answer was an error"
    ASYNC_FAILED = "asynchronous: transport failure or timeout"
    ASYNC_NOT_SUBMITTED = "asynchronous: the attempt could not be submitted"


@dataclass(frozen=True, slots=True)
class FaultUpdate:
    """What a site says of the broker: whether to isolate it, and whether it can be reached."""

    isolation: bool
    reachable: bool


def site_of(error: RocketMQError) -> FaultSite:
    """Return the site that an attempt's error stands for."""
    if isinstance(error, MQBrokerException):
        return FaultSite.BROKER_REFUSED
    return FaultSite.REMOTING_FAILED if isinstance(error, RemotingException) else FaultSite.CLIENT_FAILED


@dataclass(frozen=True, slots=True)
class FaultPreset:
    """One rule set.

    Parameters
    ----------
    ladder : LatencyLadder
    isolation_latency_ms : int
        What an isolated broker's latency is taken for.
    updates, updates_with_detector : mapping of FaultSite to FaultUpdate
    preference : callable
        Which brokers come first.
    success_ends_isolation : bool
        The last outcome alone says from when on a broker may be used; else a success never shortens an isolation.
    resets_index : bool
        A retry goes on from a new random queue.
    """

    ladder: LatencyLadder
    isolation_latency_ms: int
    updates: Mapping[FaultSite, FaultUpdate]
    updates_with_detector: Mapping[FaultSite, FaultUpdate]
    preference: Preference
    success_ends_isolation: bool
    resets_index: bool


def without_faults(candidates: Brokers, last: str | None, admitted: Brokers) -> Brokers:
    """Return the brokers to choose from while the fault strategy is off (spec/producer.md section 5.2).

    The one that failed last comes after all others; it is taken again rather than waiting for a full one.
    """
    others = candidates - {last} or candidates
    return admitted & others or admitted & candidates


def available_then_reachable(
    table: LatencyFaultTolerance, candidates: Brokers, last: str | None, admitted: Brokers, now: float
) -> Brokers:
    """Return the brokers to choose from by the rules of 5.x (spec/producer.md section 5.4).

    First those out of isolation other than `last`, then those reachable other than `last`, then any. A full window on
    one of the better brokers is worth waiting for: an isolated one would be slower.
    """
    available = frozenset(name for name in candidates if table.is_available(name, now))
    others = candidates - {last}
    best = available & others or frozenset(filter(table.is_reachable, others)) or candidates
    return admitted & best or admitted & available


def available_then_one_at_least(
    table: LatencyFaultTolerance, candidates: Brokers, last: str | None, admitted: Brokers, now: float
) -> Brokers:
    """Return the brokers to choose from by the rules of 4.x (spec/producer.md section 5.5), the bug mended.

    First those out of isolation, preferably others than `last`; then one of the better half of all that are known; then
    any. A full window on an available broker is worth waiting for.
    """
    available = frozenset(name for name in candidates if table.is_available(name, now))
    if available:
        return without_faults(available, last, admitted)
    not_best = table.pick_one_at_least(now)
    if not_best is not None and not_best not in candidates:
        # Without a queue to write to, there is nothing to keep an item for.
        table.remove(not_best)
    return admitted & {not_best} or admitted


_4X: Final = {
    FaultSite.RETURNED: FaultUpdate(isolation=False, reachable=True),
    FaultSite.REMOTING_FAILED: FaultUpdate(isolation=True, reachable=True),
    FaultSite.CLIENT_FAILED: FaultUpdate(isolation=True, reachable=True),
    FaultSite.BROKER_REFUSED: FaultUpdate(isolation=True, reachable=True),
    FaultSite.INTERRUPTED: FaultUpdate(isolation=False, reachable=True),
    FaultSite.ASYNC_RETURNED: FaultUpdate(isolation=False, reachable=True),
    FaultSite.ASYNC_REFUSED: FaultUpdate(isolation=True, reachable=True),
    FaultSite.ASYNC_FAILED: FaultUpdate(isolation=True, reachable=True),
    FaultSite.ASYNC_NOT_SUBMITTED: FaultUpdate(isolation=True, reachable=True),
}
_5X: Final = _4X | {
    FaultSite.CLIENT_FAILED: FaultUpdate(isolation=False, reachable=True),
    FaultSite.BROKER_REFUSED: FaultUpdate(isolation=True, reachable=False),
    FaultSite.ASYNC_NOT_SUBMITTED: FaultUpdate(isolation=True, reachable=False),
}
# Only with a detector is there somebody who will find the broker reachable again.
_5X_DETECTED: Final = _5X | {FaultSite.REMOTING_FAILED: FaultUpdate(isolation=True, reachable=False)}

_V4: Final = FaultPreset(
    ladder=LatencyLadder((50, 100, 550, 1000, 2000, 3000, 15000), (0, 0, 30000, 60000, 120000, 180000, 600000)),
    isolation_latency_ms=30_000,
    updates=_5X,
    updates_with_detector=_5X_DETECTED,
    preference=available_then_reachable,
    success_ends_isolation=False,
    resets_index=True,
)

PRESETS: Final[Mapping[str, FaultPreset]] = {
    "v4": _V4,
    "v5": replace(
        _V4,
        ladder=LatencyLadder((50, 100, 550, 1800, 3000, 5000, 15000), (0, 0, 2000, 5000, 6000, 10000, 30000)),
        isolation_latency_ms=10_000,
    ),
    "legacy": replace(
        _V4,
        updates=_4X,
        updates_with_detector=_4X,
        preference=available_then_one_at_least,
        success_ends_isolation=True,
        resets_index=False,
    ),
}


def preset_of(
    name: str, latency_max: tuple[int, ...] | None = None, not_available_duration: tuple[int, ...] | None = None
) -> FaultPreset:
    """Return a preset, with ladders of one's own in place of its own where they are given.

    Parameters
    ----------
    name : str
        A key of `PRESETS`.
    latency_max, not_available_duration : tuple of int, optional
        Milliseconds; default: the preset's.
    """
    preset = PRESETS[name]
    ladder = LatencyLadder(
        latency_max or preset.ladder.latency_max, not_available_duration or preset.ladder.not_available_duration
    )
    return replace(preset, ladder=ladder)
