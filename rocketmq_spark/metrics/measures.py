"""What was measured, of one task or of any number of them: seven sparse tables and the names their keys refer to.

Rule 1: merging is the same operation for two tasks, two micro-batches, and a micro-batch that is folded away.
Rule 2: a merge is a few numpy calls whatever the number of brokers; the driver does it for every task, one by one.
Rule 3: packed bytes are all that travels; what can't be read raises ValueError and changes nothing.

    table      key, bits                                counters                     peaks
    totals     broker                                   see `Totals`                 largest latency (us)
    latency    broker | bucket index (12)               requests
    timeline   second / width | broker (20)             rows, requests, retries      largest latency, isolated (0, 1)
    queues     topic | broker (20) | queue id (20)      rows                         last offset, -(first offset)
    reasons    broker | reason or code (20)             retries, failures
    invalid    rule broken                              rows skipped, rows dead-lettered
    span       0                                                                     end, -(start) (epoch, ms)
"""

from __future__ import annotations

import copy
import json
import zlib
from typing import Final, NamedTuple

import numpy as np

from rocketmq_spark.metrics.histogram import INDEX_BITS, IntArray, coarser, percentiles_us
from rocketmq_spark.metrics.table import SparseTable

NAME_BITS: Final = 20
_NAME_MASK: Final = (1 << NAME_BITS) - 1
_INDEX_MASK: Final = (1 << INDEX_BITS) - 1

# Buckets of the time line that are kept; more become half as many of twice the width.
MAX_SECONDS: Final = 600

# The first offset is kept as a peak of its negative; this stands for "none known", below any real one.
NO_OFFSET: Final = -(1 << 62)


class Totals(NamedTuple):
    """Counters of one broker.

    `nbytes` are those of acknowledged requests; `isolated_us` is the time, within the task's life, during which the
    task kept away from the broker; `clamped` counts latencies outside 1 us .. 1 hour; `sent_rows` are those that nobody
    acknowledges (oneway), and not among `rows`. Of `max_us`, the largest latency, the larger one stays in a merge; all
    others add.
    """

    rows: int
    requests: int
    nbytes: int
    retries: int
    failures: int
    isolated_times: int
    isolated_us: int
    clamped: int
    sent_rows: int
    max_us: int


class InvalidCounts(NamedTuple):
    """Rows that no broker could store as they are, by the rule they break: left out, and sent as dead letters."""

    skipped: dict[str, int]
    dead_lettered: dict[str, int]

    def lines(self) -> list[str]:
        """Return a line for each of the two that has rows: how many, and by which rules."""
        found = []
        for what, by_rule in (("skipped", self.skipped), ("sent to the dead-letter topic", self.dead_lettered)):
            if by_rule:
                rules = ", ".join(f"{rows} {rule}" for rule, rows in sorted(by_rule.items(), key=lambda item: -item[1]))
                found.append(f"{sum(by_rule.values())} invalid rows {what}: {rules}.")
        return found


class Measures:
    """Everything measured, mergeable in any order.

    Attributes
    ----------
    names : list of str
        Brokers, topics, reasons, codes and rules; keys of the tables refer to them by their place.
    width : int
        Seconds that one bucket of the time line spans, a power of two.
    """

    __slots__ = (
        "_numbers", "invalid", "latency", "names", "queues", "reasons", "span", "timeline", "totals", "width",
    )  # fmt: skip

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self.width = 1
        self.totals = SparseTable(counters=len(Totals._fields) - 1, peaks=1)
        self.latency = SparseTable(counters=1)
        self.timeline = SparseTable(counters=3, peaks=2)
        self.queues = SparseTable(counters=1, peaks=2)
        self.reasons = SparseTable(counters=2)
        self.invalid = SparseTable(counters=2)
        self.span = SparseTable(counters=0, peaks=2)

    def number(self, name: str) -> int:
        """Return the number of a name, a new one if need be."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) > _NAME_MASK:
                raise ValueError(f"more than {_NAME_MASK + 1} names of brokers, topics and reasons in one write")
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def merge(self, other: Measures) -> None:
        """Add what another one measured; `other` stays as it is."""
        numbers = np.array([self.number(name) for name in other.names], np.int64)
        width = max(self.width, other.width)
        timeline = other._timeline_of(width)
        others = other.totals, other.latency, timeline, other.queues, other.reasons, other.invalid, other.span
        # All keys first: numbers that mean nothing raise here, before anything is added.
        keys = (
            _renumbered(numbers, other.totals.keys, 0),
            _renumbered(numbers, other.latency.keys, INDEX_BITS),
            _renumbered(numbers, timeline.keys, 0),
            _renumbered(numbers, other.queues.keys, 2 * NAME_BITS, NAME_BITS),
            _renumbered(numbers, other.reasons.keys, NAME_BITS, 0),
            _renumbered(numbers, other.invalid.keys, 0),
            other.span.keys,
        )
        self.widen(width)
        seconds = len(self.timeline)
        for own, more, more_keys in zip(self._tables(), others, keys, strict=True):
            own.add(more_keys, more.values)
        if len(self.timeline) > seconds:
            self.limit_timeline()

    def widen(self, width: int) -> None:
        """Make a bucket of the time line span `width` seconds: a power of two, not less than it is."""
        self.timeline, self.width = self._timeline_of(width), width

    def _timeline_of(self, width: int) -> SparseTable:
        if width == self.width:
            return self.timeline
        coarse = copy.copy(self.timeline)
        seconds = (coarse.keys >> NAME_BITS) // (width // self.width)
        coarse.rekey(seconds << NAME_BITS | (coarse.keys & _NAME_MASK))
        return coarse

    def limit_timeline(self) -> None:
        """Merge pairs of buckets of the time line until there are at most `MAX_SECONDS`.

        The buckets that remain depend only on all the seconds that were measured, not on the order of merging.
        """
        while np.count_nonzero(np.diff(self.timeline.keys >> NAME_BITS)) >= MAX_SECONDS:
            self.widen(2 * self.width)

    def totals_only(self, latency_bits: int | None = None) -> Measures:
        """Return a copy without time line, queues, reasons and span, for a commit message.

        Parameters
        ----------
        latency_bits : int or None, default None
            None: without latencies. Otherwise with them, 2^bits neighbouring buckets made one.
        """
        result = Measures()
        numbers = np.zeros(len(self.names), np.int64)
        for number in (*self.totals.keys.tolist(), *self.invalid.keys.tolist()):
            numbers[number] = result.number(self.names[number])
        result.totals.add(numbers[self.totals.keys], self.totals.values)
        result.invalid.add(numbers[self.invalid.keys], self.invalid.values)
        if latency_bits is not None:
            keys = _renumbered(numbers, self.latency.keys, INDEX_BITS)
            result.latency.add(keys, self.latency.values)
            keys = result.latency.keys
            result.latency.rekey((keys & ~_INDEX_MASK) | coarser(keys & _INDEX_MASK, latency_bits))
        return result

    def broker_totals(self) -> dict[str, Totals]:
        """Return the counters of every broker, by name in ascending order."""
        return dict(sorted((self.names[number], Totals(*values)) for number, values in self.totals.columns()))

    def invalid_rows(self) -> InvalidCounts:
        """Return the counts of invalid rows, rules in the order in which they were first met."""
        counts = InvalidCounts({}, {})
        for number, values in self.invalid.columns():
            for by_rule, count in zip(counts, values, strict=True):
                if count:
                    by_rule[self.names[number]] = count
        return counts

    def first_and_last(self) -> tuple[float, float] | None:
        """Return when the first request was written and when the last one was answered, epoch seconds; None: never."""
        if not len(self.span):
            return None
        end, start = self.span.values.max(axis=1).tolist()
        return -start / 1000, end / 1000

    def latencies(self, broker: str | None) -> tuple[IntArray, IntArray]:
        """Return bucket indices, ascending, and counts of one broker (None: of all); empty for an unknown one."""
        if broker is None:
            indices, places = np.unique(self.latency.keys & _INDEX_MASK, return_inverse=True)
            counts = np.zeros(len(indices), np.int64)
            np.add.at(counts, places, self.latency.values[0])
            return indices, counts
        base = self._numbers.get(broker, _NAME_MASK) << INDEX_BITS
        start, end = np.searchsorted(self.latency.keys, (base, base + _INDEX_MASK + 1))
        return self.latency.keys[start:end] & _INDEX_MASK, self.latency.values[0, start:end]

    def quantiles_ms(self, broker: str | None) -> tuple[float, float, float, float]:
        """Return p50, p90, p99 and the largest latency of a broker (None: of all), as HdrHistogram shows them."""
        indices, counts = self.latencies(broker)
        p50, p90, p99, longest = percentiles_us(indices, counts, (50, 90, 99, 100))
        return p50 / 1000, p90 / 1000, p99 / 1000, longest / 1000

    def pack(self) -> bytes:
        """Return the whole as bytes, for `unpack`."""
        tables = [list(table.packed()) for table in self._tables()]
        head = [self.names, self.width, [[len(table), "".join(code for code, _ in rows)]
                for table, rows in zip(self._tables(), tables, strict=True)]]  # fmt: skip
        text = json.dumps(head, separators=(",", ":")).encode()
        rows = (data for rows in tables for _, data in rows)
        return zlib.compress(b"".join((len(text).to_bytes(4, "big"), text, *rows)))

    @classmethod
    def unpack(cls, packed: bytes) -> Measures:
        """Return what `pack` made bytes of.

        Raises
        ------
        ValueError
            These are not such bytes.
        """
        try:
            return cls._unpack(zlib.decompress(packed))
        except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not the measures of a task: {exc!r}") from exc

    @classmethod
    def _unpack(cls, data: bytes) -> Measures:
        at = 4 + int.from_bytes(data[:4], "big")
        names, width, shapes = json.loads(data[4:at])
        measures = cls()
        "".join(names)  # names are text, or this raises
        measures.names = names
        measures._numbers = {name: number for number, name in enumerate(names)}
        measures.width = width
        if len(measures._numbers) != len(names) or width < 1 or width & (width - 1):
            raise ValueError("a name stands twice, or the width of the time line is no power of two")
        for table, (columns, codes) in zip(measures._tables(), shapes, strict=True):
            at = table.fill(data, at, columns, codes)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left over")
        return measures

    def _tables(self) -> tuple[SparseTable, ...]:
        return self.totals, self.latency, self.timeline, self.queues, self.reasons, self.invalid, self.span

    def __repr__(self) -> str:
        rows, requests = self.totals.values[:2].sum(axis=1).tolist()
        return f"<Measures brokers={len(self.totals)} rows={rows} requests={requests}>"


def _renumbered(numbers: IntArray, keys: IntArray, *shifts: int) -> IntArray:
    """Return the keys with the names' numbers that they hold at these bits replaced."""
    for shift in shifts:
        held = (keys >> shift) & _NAME_MASK
        keys = keys + ((numbers[held] - held) << shift)
    return keys
