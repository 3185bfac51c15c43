"""Decide whether figures that were recorded over a long time stay constant or grow.

The first third of the time is warm-up and does not count. After it, the median of the last quarter may exceed the
median of the first quarter by a fixed amount, whatever the duration. Medians ignore short peaks. A figure with a
ceiling may grow up to it. Processes that are killed and restarted have figures of processes of different ages, so a
part of the figure is allowed in addition.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

# How much the median may rise, by the ending of the figure's name; the first match counts. Without a leak, the medians
# of the two quarters differ by as much as this: an allocator keeps a few megabytes more or fewer after a broker's
# restart, and one more Python worker has five threads and eight descriptors in the JVM. In a run of 30 minutes the
# quarters are 15 minutes apart. Such a run detects a leak of 24 MB an hour, of one thread or descriptor per restart, or
# of a worker every few minutes. A longer run detects smaller leaks.
_NO_GROWTH_YET = {
    "JVM threads": 6.0,
    "JVM descriptors": 10.0,
    "MB": 6.0,
    "threads": 2.0,
    "descriptors": 2.0,
    "workers": 1.0,
    "connections": 4.0,
}


class Sample(NamedTuple):
    """Figures by name, and the time of their measurement (seconds)."""

    at: float
    figures: Mapping[str, float]


class Line(NamedTuple):
    """The verdict on one figure."""

    name: str
    first: float
    last: float
    highest: float
    per_hour: float
    fine: bool


def judge(
    samples: Sequence[Sample], ceilings: Mapping[str, float] = MappingProxyType({}), slack: float = 0.0
) -> list[Line]:
    """Compare, figure by figure, the last quarter of the time after the warm-up with the first one.

    `slack` is the part of a figure by which it may grow in addition.
    """
    if not samples:
        return []
    counted = samples[len(samples) // 3 :]
    quarter = max(len(counted) // 4, 1)
    before, after = counted[:quarter], counted[-quarter:]
    hours = (_median_time(after) - _median_time(before)) / 3600
    lines = []
    for name in samples[-1].figures:
        first, last = (statistics.median(sample.figures[name] for sample in part) for part in (before, after))
        allowed = next(most for ending, most in _NO_GROWTH_YET.items() if name.endswith(ending))
        highest = max(sample.figures[name] for sample in samples)
        fine = highest <= ceilings[name] if name in ceilings else last - first <= allowed + slack * first
        lines.append(Line(name, first, last, highest, (last - first) / hours if hours else 0.0, fine))
    return lines


def _median_time(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.at for sample in samples)
