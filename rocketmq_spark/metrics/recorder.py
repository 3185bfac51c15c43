"""Measures what one task sends.

One thread at a time: the sender calls with its lock held. No measurement raises: a latency out of range is clamped, and
counted as such.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from rocketmq_spark.metrics.measures import (
    HIGHEST_US,
    LOWEST_US,
    MAX_SECONDS,
    METRIC_BITS,
    Measures,
    Metric,
    index_of,
)
from rocketmq_spark.model.message import MessageQueue

# A broker may answer with any queue id and offset.
_MAX_QUEUES: Final = 1 << 20
_MAX_LONG: Final = 2**63 - 1

_Counts: TypeAlias = defaultdict[tuple[str, str], defaultdict[int, int]]


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What a task sends back to the driver; `write_id` and `batch_id` are those of `Recorder`.

    The measurements are bytes for `Measures.unpack`. So a damaged report, or one of another release, fails where it is
    merged and can be counted, and not where Spark unpickles it.
    """

    write_id: str
    batch_id: int
    partition_id: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a task of a read sends back: how many unreadable messages it skipped (``onUnreadable=skip``), by topic."""

    skipped: Mapping[str, int]


class Recorder:
    """Counts what one task sends, per broker, second and queue. Each `now` is monotonic time in seconds.

    Parameters
    ----------
    write_id : str
        One batch write, or one streaming query.
    batch_id : int
        The micro-batch; -1 in a batch write.
    partition_id : int
    epoch_offset : float or None, default None
        Added to `now`, it gives epoch seconds, so that the seconds of tasks on several hosts line up. None: the offset
        of ``time.monotonic``.
    """

    def __init__(self, write_id: str, batch_id: int, partition_id: int, epoch_offset: float | None = None) -> None:
        self.write_id = write_id
        self.batch_id = batch_id
        self.partition_id = partition_id
        self._epoch_offset = time.time() - time.monotonic() if epoch_offset is None else epoch_offset
        # As in `Measures.of`.
        self._counts: _Counts = _no_counts()
        # Earlier measurements. There, a long timeline becomes coarser.
        self._past = Measures()
        self._second_now = -1
        self._seconds = 0
        # Start and end of every isolation by broker, monotonic seconds; no two of a broker overlap.
        self._isolations: dict[str, list[tuple[float, float]]] = {}
        self._first_now = float("inf")
        self._last_now = -float("inf")

    def record_success(
        self,
        broker: str,
        rows: int,
        nbytes: int,
        latency_ms: float,
        queue: MessageQueue,
        queue_offset: int,
        now: float,
    ) -> None:
        """Count a request that a broker acknowledged, with its rows and bytes.

        `latency_ms` counts from its last byte written to its acknowledgement. An impossible queue id, such as the -1 of
        gRPC, leaves no receipt. `queue_offset` is that of its first row, negative if unknown.
        """
        latency = latency_ms * 1000
        clamped = 0
        # Written so that NaN is clamped, too.
        if not latency >= LOWEST_US:
            latency, clamped = LOWEST_US, 1
        elif latency > HIGHEST_US:
            latency, clamped = HIGHEST_US, 1
        latency_us = int(latency + 0.5)
        second = self._second(now, latency_us)
        counts = self._counts[broker, ""]
        counts[Metric.ROWS] += rows
        counts[Metric.REQUESTS] += 1
        counts[Metric.NBYTES] += nbytes
        if clamped:
            counts[Metric.CLAMPED] += 1
        counts[index_of(latency_us) << METRIC_BITS | Metric.LATENCY] += 1
        counts[second | Metric.SECOND_ROWS] += rows
        counts[second | Metric.SECOND_REQUESTS] += 1
        if latency_us > counts[second | Metric.SECOND_MAX_US]:
            counts[second | Metric.SECOND_MAX_US] = latency_us
        if 0 <= queue.queue_id < _MAX_QUEUES:
            counts = self._counts[broker, queue.topic]
            place = queue.queue_id << METRIC_BITS
            counts[place | Metric.QUEUE_ROWS] += rows
            if 0 <= queue_offset <= _MAX_LONG - rows:
                last = queue_offset + rows - 1
                counts[place | Metric.LAST_OFFSET] = max(counts.get(place | Metric.LAST_OFFSET, last), last)
                counts[place | Metric.FIRST_OFFSET] = max(
                    counts.get(place | Metric.FIRST_OFFSET, -queue_offset), -queue_offset
                )

    def record_sent(self, broker: str, rows: int, nbytes: int, now: float) -> None:
        """Count a request that no broker acknowledges (``sendMode=oneway``)."""
        second = self._second(now)
        counts = self._counts[broker, ""]
        counts[Metric.SENT_ROWS] += rows
        counts[Metric.REQUESTS] += 1
        counts[Metric.NBYTES] += nbytes
        counts[second | Metric.SECOND_ROWS] += rows
        counts[second | Metric.SECOND_REQUESTS] += 1

    def record_retry(self, broker: str, reason: str, now: float) -> None:
        """Count a failed attempt whose bytes will be sent again; `reason` names the error or the status."""
        second = self._second(now)
        counts = self._counts[broker, ""]
        counts[Metric.RETRIES] += 1
        counts[second | Metric.SECOND_RETRIES] += 1
        self._counts[broker, reason][Metric.REASON_RETRIES] += 1

    def record_failure(self, broker: str, code: str, now: float) -> None:
        """Count a failed attempt after which its batch is given up; `code` names the error or the status."""
        self._last_now = max(self._last_now, now)
        self._counts[broker, ""][Metric.FAILURES] += 1
        self._counts[broker, code][Metric.REASON_FAILURES] += 1

    def record_isolation(self, broker: str, duration_ms: float, now: float) -> None:
        """Count an isolation that begins now, or extend a running one by `duration_ms`."""
        self._last_now = max(self._last_now, now)
        isolations = self._isolations.setdefault(broker, [])
        if isolations and isolations[-1][1] > now:
            start, end = isolations[-1]
            isolations[-1] = (start, end + duration_ms / 1000)
        else:
            isolations.append((now, now + duration_ms / 1000))

    def record_skipped(self, by_rule: Mapping[str, int]) -> None:
        """Count rows that were skipped, by the rule that they break."""
        for rule, rows in by_rule.items():
            self._counts["", rule][Metric.SKIPPED] += rows

    def record_dead_letters(self, by_rule: Mapping[str, int]) -> None:
        """Count rows that go to the dead-letter topic, by the rule that they break."""
        for rule, rows in by_rule.items():
            self._counts["", rule][Metric.DEAD_LETTERED] += rows

    def snapshot(self) -> PartitionReport:
        """Return the measurements so far, packed; recording may continue."""
        return PartitionReport(self.write_id, self.batch_id, self.partition_id, self._so_far().pack())

    def lines(self) -> list[str]:
        """Return a line of rows, requests and latencies for every broker that took a request."""
        measures = self._so_far()
        found = []
        for name, broker in measures.brokers.items():
            if broker.sent_rows:
                found.append(f"{name} {broker.sent_rows} rows in {broker.requests} requests")
            elif quantiles := measures.quantiles_ms(name):
                p50, _, p99, longest = quantiles
                found.append(
                    f"{name} {broker.rows} rows in {broker.requests} requests "
                    f"(p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {longest:.1f} ms)"
                )
        return found

    def _so_far(self) -> Measures:
        """Return a copy of the measurements, with every isolation until the last `now` that was recorded."""
        spans = _no_counts()
        for name, isolations in self._isolations.items():
            counts = spans[name, ""]
            for start, end in isolations:
                end = min(end, self._last_now)
                if start > end:
                    continue
                counts[Metric.ISOLATED_TIMES] += 1
                counts[Metric.ISOLATED_US] += round((end - start) * 1e6)
                first, last = int(start + self._epoch_offset), int(end + self._epoch_offset)
                for second in (*range(first, last, self._past.width), last):
                    counts[second << METRIC_BITS | Metric.SECOND_ISOLATED] = 1
        if self._first_now <= self._last_now:
            spans["", ""][Metric.START_MS] = -round((self._first_now + self._epoch_offset) * 1000)
            spans["", ""][Metric.END_MS] = round((self._last_now + self._epoch_offset) * 1000)
        measures = Measures()
        for part in (self._past, Measures.of(self._counts), Measures.of(spans)):
            measures.merge(part)
        return measures

    def _second(self, now: float, latency_us: int = 0) -> int:
        """Return the place of the timeline's second; it may replace `_counts`."""
        # Comparisons instead of min and max: with single messages this runs once per row.
        if now - latency_us / 1e6 < self._first_now:
            self._first_now = now - latency_us / 1e6
        if now > self._last_now:
            self._last_now = now
        second = int(now + self._epoch_offset)
        if second != self._second_now:
            self._second_now = second
            self._seconds += 1
            if self._seconds > MAX_SECONDS:
                self._past.merge(Measures.of(self._counts))
                self._counts, self._seconds = _no_counts(), 0
        return second << METRIC_BITS

    def __repr__(self) -> str:
        return (
            f"<Recorder write={self.write_id} batch={self.batch_id} partition={self.partition_id} "
            f"{self._so_far().describe()}>"
        )


def _no_counts() -> _Counts:
    return defaultdict(lambda: defaultdict(int))
