"""Measures what one task, or one call of `Producer.send_arrow`, sends, and packs this as a `PartitionReport`.

Not thread-safe. While attempts are in flight, the sender calls a `Recorder` only under the sender's lock. The thread
that reads rows needs no lock, because it only counts invalid rows, and only it does. A broker's impossible queue ids
and offsets are left out.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from rocketmq_spark.metrics.measures import HIGHEST_US, LOWEST_US, BrokerTotals, Measures, Metric, Row, index_of
from rocketmq_spark.model.message import MessageQueue

# A broker may answer with any queue id and offset.
_MAX_QUEUES: Final = 1 << 20
_MAX_LONG: Final = 2**63 - 1
# The most rows of the timeline. If there are more, all measurements are merged into one table, which is smaller.
_MAX_TIMELINE: Final = 4_096
# Less than any offset, and than any negative one.
_NO_OFFSET: Final = -(1 << 63)
# By broker, topic and queue id: rows, last offset, negative first offset.
_Queues: TypeAlias = "defaultdict[tuple[str, str, int], list[int]]"


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The report of a task of a write; `write_id` and `batch_id` are those of `Recorder`."""

    write_id: str
    batch_id: int
    partition_id: int
    # Bytes, so that a damaged report, or one of another release, fails when it is merged and not when it is unpickled.
    packed: bytes


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The report of a task of a read: the number of skipped messages by topic (``onUnreadable=skip``)."""

    skipped: Mapping[str, int]


class Recorder:
    """Counts what one task sends, per broker, second and queue. Each `now` is monotonic time in seconds.

    `write_id` identifies a batch write or a streaming query, `batch_id` the micro-batch (-1 in a batch write). `now`
    plus `epoch_offset` is epoch time, which tasks on several hosts share.
    """

    def __init__(self, write_id: str, batch_id: int, partition_id: int, epoch_offset: float | None = None) -> None:
        self.write_id = write_id
        self.batch_id = batch_id
        self.partition_id = partition_id
        self._epoch_offset = time.time() - time.monotonic() if epoch_offset is None else epoch_offset
        # Earlier measurements, with a coarser timeline.
        self._past = Measures()
        self._start_empty()
        # What a task's reading thread counts, by metric, broker and detail. It does not have the sender's lock, so no
        # other thread clears these two.
        self._read: Counter[tuple[int, str, str]] = Counter()
        # Rows that were found stored after a fault, as in `_queues`.
        self._recovered: _Queues = defaultdict(lambda: [0, _NO_OFFSET, _NO_OFFSET])
        # Whether rows are stored at offsets that are not known.
        self._incomplete = False
        # Start and end of every isolation by broker, monotonic seconds. Those of one broker do not overlap.
        self._isolations: dict[str, list[tuple[float, float]]] = {}
        self._first_now = float("inf")
        self._last_now = -float("inf")

    def _start_empty(self) -> None:
        # By broker: as in `BrokerTotals`, and requests by latency bucket.
        self._totals: defaultdict[str, list[int]] = defaultdict(lambda: [0] * len(BrokerTotals._fields))
        self._latencies: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        # By epoch second and broker: rows, requests, retries, largest latency.
        self._timeline: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * 4)
        self._queues: _Queues = defaultdict(lambda: [0, _NO_OFFSET, _NO_OFFSET])
        # Retries and failures by metric, broker and reason.
        self._reasons: Counter[tuple[int, str, str]] = Counter()

    def record_success(
        self, broker: str, rows: int, nbytes: int, latency_ms: float, queue: MessageQueue, queue_offset: int, now: float
    ) -> None:
        """Count a request that a broker acknowledged, with its rows and bytes.

        `latency_ms` is the time between its last byte and its acknowledgement. `queue_offset` is that of its first row,
        negative if unknown. Impossible queue ids, such as -1 over gRPC, are not counted by queue.
        """
        totals = self._totals[broker]
        latency = latency_ms * 1000
        # `not >=` clamps NaN, too.
        if not latency >= LOWEST_US:
            latency = LOWEST_US
            totals[Metric.CLAMPED] += 1
        elif latency > HIGHEST_US:
            latency = HIGHEST_US
            totals[Metric.CLAMPED] += 1
        latency_us = int(latency + 0.5)
        totals[Metric.ROWS] += rows
        totals[Metric.REQUESTS] += 1
        totals[Metric.NBYTES] += nbytes
        self._latencies[broker][index_of(latency_us)] += 1
        if 0 <= queue.queue_id < _MAX_QUEUES:
            stored = self._queues[broker, queue.topic, queue.queue_id]
            stored[0] += rows
            if 0 <= queue_offset <= _MAX_LONG - rows:
                stored[1] = max(stored[1], queue_offset + rows - 1)
                stored[2] = max(stored[2], -queue_offset)
            else:
                self._incomplete = True
        else:
            self._incomplete = True
        second = self._second(broker, now, latency_us)
        second[0] += rows
        second[1] += 1
        if latency_us > second[3]:
            second[3] = latency_us

    def record_sent(self, broker: str, rows: int, nbytes: int, now: float) -> None:
        """Count a request that no broker acknowledges (``sendMode=oneway``)."""
        self._incomplete = True
        totals = self._totals[broker]
        totals[Metric.SENT_ROWS] += rows
        totals[Metric.REQUESTS] += 1
        totals[Metric.NBYTES] += nbytes
        second = self._second(broker, now)
        second[0] += rows
        second[1] += 1

    def record_retry(self, broker: str, reason: str, now: float) -> None:
        """Count a failed attempt that will be retried; `reason` names the error or the status."""
        self._totals[broker][Metric.RETRIES] += 1
        self._reasons[Metric.REASON_RETRIES, broker, reason] += 1
        self._second(broker, now)[2] += 1

    def record_failure(self, broker: str, code: str, now: float) -> None:
        """Count a failed attempt that will not be retried; `code` names the error or the status."""
        self._totals[broker][Metric.FAILURES] += 1
        self._reasons[Metric.REASON_FAILURES, broker, code] += 1
        self._last_now = max(self._last_now, now)

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
        """Count skipped rows by the rule that they break."""
        for rule, rows in by_rule.items():
            self._read[Metric.SKIPPED, "", rule] += rows

    def record_dead_letters(self, by_rule: Mapping[str, int]) -> None:
        """Count rows for the dead-letter topic by the rule that they break."""
        for rule, rows in by_rule.items():
            self._read[Metric.DEAD_LETTERED, "", rule] += rows

    def record_recovered(self, queue: MessageQueue, rows: int, first: int, last: int) -> None:
        """Count rows that were found stored after a fault, and not sent again, between two offsets of a queue."""
        self._read[Metric.RECOVERED, queue.broker_name, ""] += rows
        stored = self._recovered[queue.broker_name, queue.topic, queue.queue_id]
        stored[0] += rows
        stored[1] = max(stored[1], last)
        stored[2] = max(stored[2], -first)

    def record_repeats(self, rows: int) -> None:
        """Count rows that were found stored twice or more often."""
        self._read[Metric.REPEATED, "", ""] += rows

    def record_incomplete(self) -> None:
        """Note that the offsets of some stored rows are unknown, so the metrics are an incomplete receipt."""
        self._incomplete = True

    def record_skipped_write(self, write: str) -> None:
        """Note that the task sends no row of a write, because the decision log has the write already.

        The offsets of its stored rows are unknown.
        """
        self._read[Metric.SKIPPED_WRITES, "", write] = 1
        self._incomplete = True

    def stored(self, topic: str) -> tuple[int, list[tuple[str, int, dict[str, int | None]]]]:
        """Return how many rows brokers have acknowledged, or were found stored, and where they are in a topic.

        That is broker, queue id and `Measures.queues` for each queue; empty if an offset is unknown.
        """
        measures = self._so_far()
        rows = measures.total(Metric.ROWS) + measures.total(Metric.RECOVERED)
        queues = {} if measures.total(Metric.INCOMPLETE) else measures.queues()
        return rows, [(broker, number, span) for (broker, of, number), span in queues.items() if of == topic]

    def snapshot(self) -> PartitionReport:
        """Return the measurements so far, packed; recording may continue."""
        return PartitionReport(self.write_id, self.batch_id, self.partition_id, self._so_far().pack())

    def lines(self) -> list[str]:
        """Return a line of rows, requests and latencies for every broker that received a request."""
        measures = self._so_far()
        lines = []
        for name, broker in measures.brokers.items():
            if broker.sent_rows:
                lines.append(f"{name} {broker.sent_rows} rows in {broker.requests} requests")
            elif quantiles := measures.quantiles_ms(name):
                p50, _, p99, longest = quantiles
                latencies = f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {longest:.1f} ms"
                lines.append(f"{name} {broker.rows} rows in {broker.requests} requests ({latencies})")
        return lines

    def _so_far(self) -> Measures:
        """Return a copy of the measurements, with the isolations until the last recorded `now`."""
        measures = Measures()
        measures.merge(self._past)
        measures.merge(Measures.of(itertools.chain(self._rows(), self._read_rows(), self._spans())))
        return measures

    def _rows(self) -> Iterator[Row]:
        for broker, row in self._totals.items():
            yield Metric.ROWS, broker, "", 0, row
        for broker, counts in self._latencies.items():
            for bucket, count in counts.items():
                yield Metric.LATENCY, broker, "", bucket, [count]
        for (second, broker), row in self._timeline.items():
            yield Metric.SECOND_ROWS, broker, "", second, row
        yield from _rows_of(self._queues, self._reasons)

    def _read_rows(self) -> Iterator[Row]:
        yield from _rows_of(self._recovered, self._read)
        yield Metric.INCOMPLETE, "", "", 0, [int(self._incomplete)]

    def _spans(self) -> Iterator[Row]:
        for broker, isolations in self._isolations.items():
            past = [(start, min(end, self._last_now)) for start, end in isolations if start <= self._last_now]
            isolated_us = round(sum(end - start for start, end in past) * 1e6)
            yield Metric.ISOLATED_TIMES, broker, "", 0, [len(past), isolated_us]
            seconds: set[int] = set()
            for start, end in past:
                first, last = int(start + self._epoch_offset), int(end + self._epoch_offset)
                seconds.update((*range(first, last, self._past.width), last))
            for second in seconds:
                yield Metric.SECOND_ISOLATED, broker, "", second, [1]
        if self._first_now <= self._last_now:
            first_ms, last_ms = (round((now + self._epoch_offset) * 1000) for now in (self._first_now, self._last_now))
            yield Metric.END_MS, "", "", 0, [last_ms, -first_ms]

    def _second(self, broker: str, now: float, latency_us: int = 0) -> list[int]:
        # Comparisons instead of min and max: with single messages this runs once per row.
        if now - latency_us / 1e6 < self._first_now:
            self._first_now = now - latency_us / 1e6
        if now > self._last_now:
            self._last_now = now
        if len(self._timeline) >= _MAX_TIMELINE:
            # The caller does not change other tables of this request between two calls.
            self._past.merge(Measures.of(self._rows()))
            self._start_empty()
        return self._timeline[int(now + self._epoch_offset), broker]

    def __repr__(self) -> str:
        place = f"write={self.write_id} batch={self.batch_id} partition={self.partition_id}"
        return f"<Recorder {place} {self._so_far().describe()}>"


def _rows_of(queues: _Queues, counts: Counter[tuple[int, str, str]]) -> Iterator[Row]:
    for (broker, topic, queue_id), row in queues.items():
        if 0 <= queue_id < _MAX_QUEUES:
            yield Metric.QUEUE_ROWS, broker, topic, queue_id, row[:1]
            if row[1] != _NO_OFFSET:
                yield Metric.LAST_OFFSET, broker, topic, queue_id, row[1:]
    for (metric, broker, detail), count in counts.items():
        yield metric, broker, detail, 0, [count]
