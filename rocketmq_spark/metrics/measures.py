"""`Measures`: the measurements of one task of a write, or the merged ones of many tasks.

They are one table of integers, sorted by key, so that numpy merges them.

    key      metric (5 bits) | subject (24 bits) | index (34 bits)
    value    a sum; from `Metric.SECOND_MAX_US` on a maximum
    subject  the number of a pair: broker, and detail (a topic, reason or rule); each may be ""
    index    latency bucket, queue id, epoch second divided by `Measures.width` (seconds per step of the timeline), or 0

Latency buckets and quantiles are those of HdrHistogram, from 1 us to 1 hour (``AbstractHistogram.java``). With two
significant digits there are 3,328 buckets, each 1 us or at most 1/128 of its value wide. Three digits would need
23,552.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = "npt.NDArray[np.int64]"
# The first metric, broker, detail, index, and the values of this metric and the next ones.
Row: TypeAlias = tuple[int, str, str, int, Sequence[int]]

_INDEX_BITS: Final = 34
_SUBJECT_BITS: Final = 24
_METRIC_SHIFT: Final = _SUBJECT_BITS + _INDEX_BITS
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_SUBJECT_MASK: Final = (1 << _SUBJECT_BITS) - 1

# The most buckets of the timeline. If there are more, buckets of twice the width replace them.
MAX_SECONDS: Final = 600

LOWEST_US: Final = 1
HIGHEST_US: Final = 3_600_000_000
SIGNIFICANT_DIGITS: Final = 2
# 26 halves of 128 buckets.
BUCKETS: Final = 3_328
# 2 * 10^digits rounded up to a power of two. The first buckets are one unit wide, then the width doubles.
_SUB_BUCKET_BITS: Final = 8
_HALF_BITS: Final = _SUB_BUCKET_BITS - 1


class BrokerTotals(NamedTuple):
    """The counters of one broker. `requests` and `nbytes` cover `rows` and `sent_rows`."""

    rows: int = 0  # Acknowledged
    sent_rows: int = 0  # Never acknowledged (``sendMode=oneway``)
    requests: int = 0
    nbytes: int = 0
    retries: int = 0
    failures: int = 0
    isolated_times: int = 0
    isolated_us: int = 0  # The time in which tasks avoided the broker
    clamped: int = 0  # Latencies outside 1 us .. 1 hour


class Metric:
    """The metrics in the order of keys, first the fields of `BrokerTotals`. A commit message ends with `LATENCY`.

    From `SECOND_MAX_US` on a merge keeps the larger value. The negatives of first offsets and of the start are stored.
    """

    (
        ROWS, SENT_ROWS, REQUESTS, NBYTES, RETRIES, FAILURES, ISOLATED_TIMES, ISOLATED_US, CLAMPED,
        SKIPPED, DEAD_LETTERED, RECOVERED, REPEATED, INCOMPLETE, SKIPPED_WRITES, LATENCY,
        REASON_RETRIES, REASON_FAILURES, QUEUE_ROWS, SECOND_ROWS, SECOND_REQUESTS, SECOND_RETRIES,
        SECOND_MAX_US, SECOND_ISOLATED, LAST_OFFSET, FIRST_OFFSET, END_MS, START_MS,
    ) = range(28)  # fmt: skip


_RECEIPT: Final = {
    "rows": Metric.QUEUE_ROWS, "first_offset": Metric.FIRST_OFFSET, "last_offset": Metric.LAST_OFFSET,
}  # fmt: skip
_MAXIMA: Final = Metric.SECOND_MAX_US << _METRIC_SHIFT
_TIMELINE: Final = Metric.SECOND_ROWS << _METRIC_SHIFT, (Metric.SECOND_ISOLATED + 1) << _METRIC_SHIFT


class Measures:
    """Measurements of one task, or of many tasks. `width` is the seconds per bucket of the timeline, a power of two."""

    __slots__ = ("_keys", "_subjects", "_values", "width")

    def __init__(self) -> None:
        # The number of each subject, in ascending order.
        self._subjects: dict[tuple[str, str], int] = {}
        self._keys: IntArray = np.empty(0, np.int64)
        self._values: IntArray = np.empty(0, np.int64)
        self.width = 1

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Measures:
        """Return the measurements of one task; those of the same metric, subject and index are merged."""
        measures = cls()
        subjects, keys, values = measures._subjects, [], []
        for metric, broker, detail, index, row in rows:
            number = subjects.setdefault((broker, detail), len(subjects))
            for place, value in enumerate(row, metric):
                if value or place in (Metric.LAST_OFFSET, Metric.FIRST_OFFSET):
                    keys.append(place << _METRIC_SHIFT | number << _INDEX_BITS | index)
                    values.append(value)
        measures._keys, measures._values = _sorted(np.array(keys, np.int64), np.array(values, np.int64))
        return measures

    def merge(self, other: Measures) -> None:
        """Add the measurements of `other`, which stays unchanged."""
        if len(self._subjects) + len(other._subjects) > _SUBJECT_MASK:
            raise ValueError(f"more than {_SUBJECT_MASK} brokers, topics and reasons in one write")
        if other.width > self.width:
            self._widen(other.width)
        elif other.width < self.width:
            other = copy.copy(other)
            other._widen(self.width)
        keys, values = other._keys, other._values
        if self._subjects:
            names = other._subjects
            numbers = np.array([self._subjects.setdefault(each, len(self._subjects)) for each in names], np.int64)
            subjects = other._subject_numbers()
            keys = np.concatenate((self._keys, keys + (numbers[subjects] - subjects << _INDEX_BITS)))
            keys, values = _sorted(keys, np.concatenate((self._values, values)))
        else:
            self._subjects = dict(other._subjects)
        self._keys, self._values = keys, values
        # The final width depends on the measured seconds, not on the order of merging.
        while self._is_long():
            self._widen(2 * self.width)

    def _is_long(self) -> bool:
        """Return whether the timeline has more than `MAX_SECONDS` buckets."""
        keys = self._keys[self._timeline()]
        # A bucket has at least one key.
        return len(keys) > MAX_SECONDS and len(np.unique(keys & _INDEX_MASK)) > MAX_SECONDS

    def _widen(self, width: int) -> None:
        keys, timeline = self._keys.copy(), self._timeline()
        buckets = keys[timeline] & _INDEX_MASK
        keys[timeline] += buckets // (width // self.width) - buckets
        self._keys, self._values = _sorted(keys, self._values)
        self.width = width

    def _timeline(self) -> slice:
        return slice(*self._keys.searchsorted(_TIMELINE))

    def _start(self, metric: int, subject: int = 0) -> int:
        return int(self._keys.searchsorted(metric << _METRIC_SHIFT | subject << _INDEX_BITS))

    def _subject_numbers(self) -> IntArray:
        return (self._keys >> _INDEX_BITS) & _SUBJECT_MASK

    def incomplete(self) -> Measures:
        """Return a copy that says that offsets of rows are missing."""
        result = Measures.of([(Metric.INCOMPLETE, "", "", 0, [1])])
        result.merge(self)
        return result

    def totals_only(self, latency_bits: int | None = None) -> Measures:
        """Return a copy with totals and, unless None, latencies in 2^`latency_bits` times wider buckets (at most 7)."""
        latencies, end = self._start(Metric.LATENCY), self._start(Metric.LATENCY + 1)
        if latency_bits is None:
            end = latencies
        numbers = self._subject_numbers()[:end]
        used, new_numbers = np.unique(numbers, return_inverse=True)
        keys = self._keys[:end] + (new_numbers - numbers << _INDEX_BITS)
        if latency_bits:
            keys[latencies:] = (keys[latencies:] >> latency_bits << latency_bits) + (1 << latency_bits >> 1)
        result = Measures()
        subjects = list(self._subjects)
        result._subjects = {subjects[number]: place for place, number in enumerate(used.tolist())}
        result._keys, result._values = _sorted(keys, self._values[:end])
        return result

    def entries(self, first: int, last: int) -> Iterator[tuple[str, str, int, int, int]]:
        """Yield broker, detail, metric, index and value of every measurement from metric `first` to `last`."""
        subjects = list(self._subjects)
        part = slice(self._start(first), self._start(last + 1))
        for key, value in zip(self._keys[part].tolist(), self._values[part].tolist(), strict=True):
            broker, detail = subjects[key >> _INDEX_BITS & _SUBJECT_MASK]
            yield broker, detail, key >> _METRIC_SHIFT, key & _INDEX_MASK, value

    @property
    def brokers(self) -> dict[str, BrokerTotals]:
        """Counters by broker, names ascending; also of brokers on which rows were only found stored."""
        recovered = self.entries(Metric.RECOVERED, Metric.RECOVERED)
        totals = {broker: [0] * len(BrokerTotals._fields) for broker, *_ in recovered if broker}
        for broker, _, metric, _, value in self.entries(Metric.ROWS, Metric.CLAMPED):
            totals.setdefault(broker, [0] * len(BrokerTotals._fields))[metric] = value
        return {broker: BrokerTotals(*totals[broker]) for broker in sorted(totals)}

    def total(self, metric: int) -> int:
        """Return the sum of a metric over all brokers and details."""
        return sum(value for *_, value in self.entries(metric, metric))

    def by_detail(self, metric: int) -> dict[str, int]:
        """Return a metric that no broker has, by detail, such as the rule that skipped rows break."""
        return {detail: value for _, detail, _, _, value in self.entries(metric, metric)}

    def queues(self) -> dict[tuple[str, str, int], dict[str, int | None]]:
        """Return ``rows``, ``first_offset`` and ``last_offset`` by broker, topic and queue id; None if unknown."""
        spans: dict[tuple[str, str, int], dict[str, int | None]] = {}
        for name, metric in _RECEIPT.items():
            for broker, topic, _, queue_id, value in self.entries(metric, metric):
                spans.setdefault((broker, topic, queue_id), dict.fromkeys(_RECEIPT))[name] = abs(value)
        return spans

    def span_ms(self) -> tuple[int, int] | None:
        """Return the times of the first request and of the last answer, epoch milliseconds."""
        span = {metric: value for _, _, metric, _, value in self.entries(Metric.END_MS, Metric.START_MS)}
        return (-span[Metric.START_MS], span[Metric.END_MS]) if len(span) == 2 else None

    def latencies(self, broker: str | None) -> tuple[IntArray, IntArray]:
        """Return bucket indices, ascending, and counts of a broker (None: of all); empty for an unknown broker."""
        if broker is None:
            part = slice(self._start(Metric.LATENCY), self._start(Metric.LATENCY + 1))
            indices, places = np.unique(self._keys[part] & _INDEX_MASK, return_inverse=True)
            counts = np.zeros(len(indices), np.int64)
            np.add.at(counts, places, self._values[part])
            return indices, counts
        number = self._subjects.get((broker, ""), _SUBJECT_MASK - 1)
        part = slice(self._start(Metric.LATENCY, number), self._start(Metric.LATENCY, number + 1))
        return self._keys[part] & _INDEX_MASK, self._values[part]

    def quantiles_ms(self, broker: str | None) -> tuple[float, float, float, float] | None:
        """Return p50, p90, p99 and the largest latency of a broker (None: of all); None without latencies."""
        indices, counts = self.latencies(broker)
        if not len(indices):
            return None
        reached = np.cumsum(counts)
        targets = [max(int(percent * int(reached[-1]) / 100 + 0.5), 1) for percent in (50, 90, 99, 100)]
        places = np.searchsorted(reached, targets)
        p50, p90, p99, longest = (highest_us(int(indices[place])) / 1000 for place in places)
        return p50, p90, p99, longest

    def pack(self) -> bytes:
        """Return compressed bytes for `unpack`: a line of JSON, then differences of keys, and values."""
        brokers, details = ([subject[place] for subject in self._subjects] for place in (0, 1))
        head = json.dumps([self.width, brokers, details], separators=(",", ":"))
        # The lowest bytes of all numbers come first, because nearly all higher bytes are 0.
        numbers = np.concatenate((np.diff(self._keys, prepend=0), self._values)).astype("<i8")
        return zlib.compress(head.encode() + b"\n" + numbers.view(np.uint8).reshape(-1, 8).T.tobytes())

    @classmethod
    def unpack(cls, packed: bytes) -> Measures:
        """Return the measurements that `pack` has packed; raise a ValueError for other bytes."""
        try:
            head, _, data = zlib.decompress(packed).partition(b"\n")
            return cls._of_bytes(data, *json.loads(head))
        except (zlib.error, ValueError, TypeError) as exc:
            raise ValueError(f"not the measures of a task: {exc!r}") from exc

    @classmethod
    def _of_bytes(cls, data: bytes, width: Any, brokers: Any, details: Any) -> Measures:
        measures = cls()
        measures.width = width
        measures._subjects = {subject: number for number, subject in enumerate(zip(brokers, details, strict=True))}
        numbers = np.frombuffer(data, np.uint8).reshape(8, -1).T.copy().view("<i8").reshape(2, -1)
        measures._keys = keys = numbers[0].cumsum()
        measures._values = numbers[1].copy()
        "".join(name for subject in measures._subjects for name in subject)  # a TypeError unless all names are text
        if type(width) is not int or not 1 <= width <= _INDEX_MASK or width & (width - 1):
            raise ValueError("the width of the timeline is not a power of two")
        if len(measures._subjects) != len(brokers) or (keys[1:] <= keys[:-1]).any() or keys.min(initial=0) < 0:
            raise ValueError("a measurement or a subject is duplicated, or out of order")
        if (keys >> _METRIC_SHIFT > Metric.START_MS).any() or (measures._subject_numbers() >= len(brokers)).any():
            raise ValueError("a metric or a subject is unknown")
        latencies = slice(measures._start(Metric.LATENCY), measures._start(Metric.LATENCY + 1))
        if (keys[latencies] & _INDEX_MASK >= BUCKETS).any() or (measures._values[latencies] < 1).any():
            raise ValueError("a latency lies outside the buckets")
        return measures

    def describe(self) -> str:
        """Return the number of brokers and the sums of their rows and requests, for a repr."""
        brokers = self.brokers.values()
        rows, requests = sum(each.rows for each in brokers), sum(each.requests for each in brokers)
        return f"brokers={len(brokers)} rows={rows} requests={requests}"

    def __repr__(self) -> str:
        return f"<Measures {self.describe()}>"


def _sorted(keys: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
    """Return the distinct keys, ascending, and their merged values."""
    order = keys.argsort(kind="stable")
    keys, values = keys[order], values[order]
    differs = keys[1:] != keys[:-1]
    if differs.all():
        return keys, values
    starts = np.append(0, differs.nonzero()[0] + 1)
    keys = keys[starts]
    return keys, np.where(keys < _MAXIMA, np.add.reduceat(values, starts), np.maximum.reduceat(values, starts))


def index_of(latency_us: int) -> int:
    """Return the bucket of a latency between 0 and `HIGHEST_US`, microseconds."""
    bucket = max(latency_us.bit_length() - _SUB_BUCKET_BITS, 0)
    return (bucket << _HALF_BITS) + (latency_us >> bucket)


def lowest_us(index: int) -> int:
    """Return the smallest latency of a bucket, microseconds."""
    bucket = max((index >> _HALF_BITS) - 1, 0)
    return (index - (bucket << _HALF_BITS)) << bucket


def highest_us(index: int) -> int:
    """Return the largest latency of a bucket, microseconds."""
    return lowest_us(index + 1) - 1
