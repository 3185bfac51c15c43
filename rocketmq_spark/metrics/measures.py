"""Measurements of a write: a task fills and packs them once, and the driver merges them in any order.

A report that cannot be read raises `ValueError` before anything is merged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

import numpy as np

from rocketmq_spark.metrics.histogram import BUCKETS, IntArray, coarser, percentiles_us

# The timeline keeps at most this many buckets. When there are more, buckets of twice the width replace them.
MAX_SECONDS: Final = 600

# The first offset is stored as its negative, so that a merge keeps the larger number. This value means unknown.
NO_OFFSET: Final = -(1 << 62)

_COUNTERS: Final = (
    "rows", "sent_rows", "requests", "nbytes", "retries", "failures", "isolated_times", "isolated_us", "clamped",
)  # fmt: skip
# How many leading numbers of a row are sums; a merge keeps the larger of the others.
_QUEUE_SUMS: Final = 1
_SECOND_SUMS: Final = 3

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True)
class BrokerMeasures:
    """Measurements of one broker.

    Attributes
    ----------
    rows : int
        Acknowledged rows.
    sent_rows : int
        Rows of ``sendMode=oneway``, which no broker acknowledges. They are not among `rows`.
    requests, nbytes : int
        Requests that the broker acknowledged (with ``sendMode=oneway``: took), and their size.
    isolated_us : int
        How long the task avoided the broker, microseconds.
    clamped : int
        Latencies outside 1 us .. 1 hour.
    latency : dict of int to int
        Successful attempts by latency bucket.
    queues : dict of (str, int) to list of int
        By topic and queue id: rows, last offset, negative first offset.
    reasons : dict of str to list of int
        By error or status: retries, failures.
    """

    rows: int = 0
    sent_rows: int = 0
    requests: int = 0
    nbytes: int = 0
    retries: int = 0
    failures: int = 0
    isolated_times: int = 0
    isolated_us: int = 0
    clamped: int = 0
    latency: dict[int, int] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[str, list[int]] = field(default_factory=dict)

    def merge(self, other: BrokerMeasures) -> None:
        """Add the measurements of another task."""
        for name in _COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for index, count in other.latency.items():
            self.latency[index] = self.latency.get(index, 0) + count
        _merge_rows(self.queues, other.queues, _QUEUE_SUMS)
        _merge_rows(self.reasons, other.reasons)

    def without_details(self, latency_bits: int | None) -> BrokerMeasures:
        """Return a copy without queues and reasons; `latency_bits` as in `Measures.totals_only`."""
        latency: dict[int, int] = {}
        if latency_bits is not None:
            for index, count in self.latency.items():
                index = coarser(index, latency_bits)
                latency[index] = latency.get(index, 0) + count
        return replace(self, latency=latency, queues={}, reasons={})


class Measures:
    """Measurements of one task, or of many merged ones.

    Attributes
    ----------
    brokers : dict of str to BrokerMeasures
    timeline : dict of int to dict of str to list of int
        By bucket (epoch seconds divided by `width`) and broker: rows, requests, retries, largest latency (us), and 1 if
        the broker was isolated.
    width : int
        Seconds per bucket of the timeline, a power of two.
    invalid : dict of str to list of int
        By the rule that rows break: rows skipped, rows sent to the dead-letter topic.
    span_ms : tuple of int or None
        When the first request was written and when the last one was answered, epoch milliseconds.
    """

    __slots__ = ("brokers", "invalid", "span_ms", "timeline", "width")

    def __init__(self) -> None:
        self.brokers: dict[str, BrokerMeasures] = {}
        self.timeline: dict[int, dict[str, list[int]]] = {}
        self.width = 1
        self.invalid: dict[str, list[int]] = {}
        self.span_ms: tuple[int, int] | None = None

    def merge(self, other: Measures) -> None:
        """Add the measurements of `other`, which stays unchanged."""
        for name, theirs in other.brokers.items():
            own = self.brokers.get(name)
            if own is None:
                own = self.brokers[name] = BrokerMeasures()
            own.merge(theirs)
        _merge_rows(self.invalid, other.invalid)
        if other.span_ms is not None:
            first, last = other.span_ms
            own_first, own_last = self.span_ms or other.span_ms
            self.span_ms = min(first, own_first), max(last, own_last)
        if other.width > self.width:
            self._widen(other.width)
        factor = self.width // other.width
        for bucket, rows in other.timeline.items():
            _merge_rows(self.timeline.setdefault(bucket // factor, {}), rows, _SECOND_SUMS)
        self._limit_timeline()

    def second(self, second: int) -> dict[str, list[int]]:
        """Return the timeline's bucket that holds an epoch second, creating it if it is missing."""
        brokers = self.timeline.get(second // self.width)
        if brokers is None:
            self.timeline[second // self.width] = {}
            self._limit_timeline()
            brokers = self.timeline[second // self.width]
        return brokers

    def _limit_timeline(self) -> None:
        # The final width depends only on the seconds that were measured, not on the order of merging.
        while len(self.timeline) > MAX_SECONDS:
            self._widen(2 * self.width)

    def _widen(self, width: int) -> None:
        factor = width // self.width
        timeline: dict[int, dict[str, list[int]]] = {}
        for bucket, rows in self.timeline.items():
            _merge_rows(timeline.setdefault(bucket // factor, {}), rows, _SECOND_SUMS)
        self.timeline, self.width = timeline, width

    def totals_only(self, latency_bits: int | None = None) -> Measures:
        """Return a copy without timeline, queues, reasons and span, for a commit message.

        Parameters
        ----------
        latency_bits : int or None, default None
            With latencies, where each 2^bits neighbouring buckets become one; None: without latencies.
        """
        result = Measures()
        result.brokers = {name: broker.without_details(latency_bits) for name, broker in self.brokers.items()}
        result.invalid = {rule: row.copy() for rule, row in self.invalid.items()}
        return result

    def invalid_rows(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the skipped rows by rule, and the dead-lettered rows by rule."""
        skipped = {rule: rows[0] for rule, rows in self.invalid.items() if rows[0]}
        return skipped, {rule: rows[1] for rule, rows in self.invalid.items() if rows[1]}

    def latencies(self, broker: str | None) -> tuple[IntArray, IntArray]:
        """Return bucket indices, ascending, and counts of one broker (None: of all); empty for an unknown one."""
        counts: dict[int, int] = {}
        for name, measures in self.brokers.items():
            if broker in (None, name):
                for index, count in measures.latency.items():
                    counts[index] = counts.get(index, 0) + count
        indices = sorted(counts)
        return np.array(indices, np.int64), np.array([counts[index] for index in indices], np.int64)

    def quantiles_ms(self, broker: str | None) -> tuple[float, float, float, float] | None:
        """Return p50, p90, p99 and the largest latency of a broker (None: of all); None without latencies."""
        indices, counts = self.latencies(broker)
        if not len(indices):
            return None
        p50, p90, p99, longest = percentiles_us(indices, counts, (50, 90, 99, 100))
        return p50 / 1000, p90 / 1000, p99 / 1000, longest / 1000

    def pack(self) -> bytes:
        """Return compressed JSON for `unpack`. Columns and differences make it small."""
        numbers = {name: number for number, name in enumerate(self.brokers)}
        brokers = []
        for name, broker in self.brokers.items():
            indices = sorted(broker.latency)
            brokers.append([
                name,
                [getattr(broker, counter) for counter in _COUNTERS],
                [index - before for before, index in pairwise([0, *indices])],
                [broker.latency[index] for index in indices],
                [[topic, queue_id, *row] for (topic, queue_id), row in broker.queues.items()],
                broker.reasons,
            ])  # fmt: skip
        timeline = [
            (bucket, numbers[name], *row) for bucket, rows in self.timeline.items() for name, row in rows.items()
        ]
        content = [self.width, self.span_ms, self.invalid, brokers, list(zip(*timeline, strict=True))]
        return zlib.compress(json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def unpack(cls, packed: bytes) -> Measures:
        """Return the measurements that `pack` made bytes of.

        Raises
        ------
        ValueError
            These are not such bytes.
        """
        try:
            return cls._of(*json.loads(zlib.decompress(packed)))
        except (zlib.error, ValueError, TypeError, AttributeError, LookupError) as exc:
            raise ValueError(f"not the measures of a task: {exc!r}") from exc

    @classmethod
    def _of(cls, width: int, span_ms: Any, invalid: Any, brokers: Any, timeline: Any) -> Measures:
        measures = cls()
        if width < 1 or width & (width - 1):
            raise ValueError("the width of the timeline is no power of two")
        measures.width = width
        if span_ms is not None:
            first, last = _numbers(span_ms, 2)
            measures.span_ms = first, last
        measures.invalid = {rule: _numbers(rows, 2) for rule, rows in invalid.items()}
        for name, counters, differences, counts, queues, reasons in brokers:
            broker = BrokerMeasures()
            for counter, value in zip(_COUNTERS, _numbers(counters, len(_COUNTERS)), strict=True):
                setattr(broker, counter, value)
            indices = list(accumulate(_numbers(differences, len(counts))))
            broker.latency = dict(zip(indices, _numbers(counts, len(counts)), strict=True))
            if indices and (min(indices) < 0 or max(indices) >= BUCKETS or min(counts) < 1):
                raise ValueError("a latency lies outside the buckets")
            broker.queues = {(_text(topic), queue_id): _numbers(row, 3) for topic, queue_id, *row in queues}
            _numbers([queue_id for _, queue_id in broker.queues], len(broker.queues))
            broker.reasons = {reason: _numbers(row, 2) for reason, row in reasons.items()}
            measures.brokers[_text(name)] = broker
        names = list(measures.brokers)
        for column in timeline:
            _numbers(column, len(timeline[0]))
        for bucket, number, rows, requests, retries, max_us, isolated in zip(*timeline, strict=True):
            row = [rows, requests, retries, max_us, isolated]
            measures.timeline.setdefault(bucket, {})[names[number]] = row
        return measures

    def __repr__(self) -> str:
        rows, requests = (sum(getattr(each, name) for each in self.brokers.values()) for name in ("rows", "requests"))
        return f"<Measures brokers={len(self.brokers)} rows={rows} requests={requests}>"


def _merge_rows(own: dict[_Key, list[int]], other: Mapping[_Key, list[int]], sums: int = 2) -> None:
    """Add the first `sums` numbers of each row to `own` in place, and keep the larger of the others."""
    for key, row in other.items():
        known = own.get(key)
        if known is None:
            own[key] = row.copy()
            continue
        for place, number in enumerate(row):
            if place < sums:
                known[place] += number
            elif number > known[place]:
                known[place] = number


def _numbers(row: Collection[Any], count: int) -> list[int]:
    if type(row) is not list or len(row) != count or set(map(type, row)) - {int}:
        raise ValueError(f"{count} numbers were expected, not {row!r}")
    return row


def _text(name: Any) -> str:
    if type(name) is not str:
        raise ValueError(f"a name was expected, not {name!r}")
    return name
