"""What one task measures while it sends.

Rule 1: one thread at a time; the producer calls with its lock held, so a call is a few dictionary look-ups.
Rule 2: `now` always comes in, monotonic seconds; a clock is read once, for the distance to the epoch, unless that comes
        in, too.
Rule 3: no measurement is lost, and none raises: a latency out of range is clamped, and counted as such.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.metrics.histogram import (
    HIGHEST_US,
    INDEX_BITS,
    LOWEST_US,
    IntArray,
    index_of,
)
from rocketmq_spark.metrics.measures import MAX_SECONDS, NAME_BITS, NO_OFFSET, Measures, Totals
from rocketmq_spark.metrics.table import SparseTable

# What the keys and values of Measures.queues hold.
_MAX_QUEUES: Final = 1 << NAME_BITS
_MAX_LONG: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What a task hands back: its place, and its measures as bytes.

    Bytes, so that reading one that is damaged, or of another release, fails where it is merged and can be counted, not
    where Spark unpickles it.

    Parameters
    ----------
    write_id : str
        One batch write, or one streaming query.
    batch_id : int
        The micro-batch; -1 in a batch write.
    partition_id : int
    packed : bytes
        For `Measures.unpack`.
    """

    write_id: str
    batch_id: int
    partition_id: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a task of a read hands back.

    Parameters
    ----------
    skipped : mapping of str to int
        How many unreadable messages it left out (``onUnreadable=skip``), by topic.
    """

    skipped: Mapping[str, int]


class BrokerRecorder:
    """The counters of one broker in one task."""

    __slots__ = (
        "clamped", "failures", "isolations", "latency", "max_us", "nbytes", "queues", "reasons", "requests", "retries",
        "rows", "sent_rows",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rows = self.requests = self.nbytes = self.retries = self.failures = self.clamped = self.max_us = 0
        self.sent_rows = 0
        self.latency: dict[int, int] = {}
        # Rows, last offset, -(first offset): the columns of Measures.queues.
        self.queues: dict[MessageQueue, list[int]] = {}
        # Retries and failures.
        self.reasons: dict[str, list[int]] = {}
        # Start and end of every isolation, monotonic seconds; none overlaps another.
        self.isolations: list[tuple[float, float]] = []

    def isolated(self, until: float) -> list[tuple[float, float]]:
        """Return the isolations as far as they lie before `until`."""
        return [(start, min(end, until)) for start, end in self.isolations if start <= until]

    def totals(self, isolated: Sequence[tuple[float, float]]) -> Totals:
        """Return the counters, `isolated` being the isolations that count."""
        return Totals(
            rows=self.rows,
            requests=self.requests,
            nbytes=self.nbytes,
            retries=self.retries,
            failures=self.failures,
            isolated_times=len(isolated),
            isolated_us=round(sum(end - start for start, end in isolated) * 1e6),
            clamped=self.clamped,
            sent_rows=self.sent_rows,
            max_us=self.max_us,
        )


class Recorder:
    """Counts what one task sends, per broker, per second and per queue.

    Parameters
    ----------
    write_id : str
        One batch write, or one streaming query.
    batch_id : int
        The micro-batch; -1 in a batch write.
    partition_id : int
    epoch_offset : float or None, default None
        Seconds from `now`'s zero to the epoch, so that the seconds of tasks on several hosts line up; None: that of
        ``time.monotonic``.
    """

    def __init__(self, write_id: str, batch_id: int, partition_id: int, epoch_offset: float | None = None) -> None:
        self.write_id = write_id
        self.batch_id = batch_id
        self.partition_id = partition_id
        self._epoch_offset = time.time() - time.monotonic() if epoch_offset is None else epoch_offset
        self._brokers: dict[str, BrokerRecorder] = {}
        # By second, then broker: rows, requests, retries, largest latency, isolated: the columns of Measures.timeline.
        self._seconds: dict[int, dict[str, list[int]]] = {}
        # Rows skipped and rows dead-lettered, by rule.
        self._invalid: dict[str, list[int]] = {}
        # The seconds that no longer fit above; merged there, they become coarser.
        self._past = Measures()
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
        """Count a request that a broker acknowledged.

        Parameters
        ----------
        broker : str
        rows, nbytes : int
            What the request held.
        latency_ms : float
            From its last byte written to its acknowledgement.
        queue : MessageQueue
            Where the broker put it; without a receipt if the id is none that a queue can have, as the -1 of gRPC.
        queue_offset : int
            Offset of its first row in the queue; negative if unknown.
        now : float
            Monotonic, seconds.
        """
        entry = self._brokers.get(broker) or self._new_broker(broker)
        latency = latency_ms * 1000
        # Written so that NaN is clamped, too.
        if not latency >= LOWEST_US:
            latency = LOWEST_US
            entry.clamped += 1
        elif latency > HIGHEST_US:
            latency = HIGHEST_US
            entry.clamped += 1
        latency_us = int(latency + 0.5)
        entry.rows += rows
        entry.requests += 1
        entry.nbytes += nbytes
        if latency_us > entry.max_us:
            entry.max_us = latency_us
        index = index_of(latency_us)
        entry.latency[index] = entry.latency.get(index, 0) + 1
        # Both come from the answer: an odd one costs its receipt, and not a task whose rows are stored.
        if 0 <= queue.queue_id < _MAX_QUEUES:
            stored = entry.queues.get(queue)
            if stored is None:
                stored = entry.queues[queue] = [0, NO_OFFSET, NO_OFFSET]
            stored[0] += rows
            if 0 <= queue_offset <= _MAX_LONG - rows:
                stored[1] = max(stored[1], queue_offset + rows - 1)
                stored[2] = max(stored[2], -queue_offset)
        second = self._second(broker, now, latency_us)
        second[0] += rows
        second[1] += 1
        if latency_us > second[3]:
            second[3] = latency_us

    def record_sent(self, broker: str, rows: int, nbytes: int, now: float) -> None:
        """Count a request that nobody will acknowledge: no latency, no offset, and no row that counts as stored."""
        entry = self._brokers.get(broker) or self._new_broker(broker)
        entry.sent_rows += rows
        entry.requests += 1
        entry.nbytes += nbytes
        second = self._second(broker, now)
        second[0] += rows
        second[1] += 1

    def record_retry(self, broker: str, reason: str, now: float) -> None:
        """Count a failed attempt whose bytes will be sent again; `reason` names the error or the status."""
        entry = self._brokers.get(broker) or self._new_broker(broker)
        entry.retries += 1
        entry.reasons.setdefault(reason, [0, 0])[0] += 1
        self._second(broker, now)[2] += 1

    def record_failure(self, broker: str, code: str, now: float) -> None:
        """Count a failed attempt that is given up; `code` names the error or the status."""
        entry = self._brokers.get(broker) or self._new_broker(broker)
        entry.failures += 1
        entry.reasons.setdefault(code, [0, 0])[1] += 1
        self._last_now = max(self._last_now, now)

    def record_isolation(self, broker: str, duration_ms: float, now: float) -> None:
        """Count an isolation that begins now, or a running one's extension by `duration_ms`."""
        entry = self._brokers.get(broker) or self._new_broker(broker)
        self._last_now = max(self._last_now, now)
        if entry.isolations and entry.isolations[-1][1] > now:
            start, end = entry.isolations[-1]
            entry.isolations[-1] = (start, end + duration_ms / 1000)
        else:
            entry.isolations.append((now, now + duration_ms / 1000))

    def record_skipped(self, by_rule: Mapping[str, int]) -> None:
        """Count rows that were left out, by the rule that they break."""
        self._record_invalid(by_rule, 0)

    def record_dead_letters(self, by_rule: Mapping[str, int]) -> None:
        """Count rows that go to the dead-letter topic, by the rule that they break."""
        self._record_invalid(by_rule, 1)

    def _record_invalid(self, by_rule: Mapping[str, int], place: int) -> None:
        for rule, rows in by_rule.items():
            self._invalid.setdefault(rule, [0, 0])[place] += rows

    def snapshot(self) -> PartitionReport:
        """Return everything measured so far; recording may go on.

        An isolation counts as far as the last `now` that was recorded.
        """
        return PartitionReport(self.write_id, self.batch_id, self.partition_id, self.measures().pack())

    def measures(self) -> Measures:
        """Return everything measured so far, as it can be merged."""
        measures = Measures()
        self._move_seconds()
        measures.merge(self._past)
        totals: list[tuple[int, ...]] = []
        latency: list[tuple[int, ...]] = []
        queues: list[tuple[int, ...]] = []
        reasons: list[tuple[int, ...]] = []
        for broker, entry in self._brokers.items():
            number = measures.number(broker)
            base = number << NAME_BITS
            isolated = entry.isolated(self._last_now)
            totals.append((number, *entry.totals(isolated)))
            latency += [(number << INDEX_BITS | index, count) for index, count in entry.latency.items()]
            reasons += [(base | measures.number(name), *row) for name, row in entry.reasons.items()]
            queues += [
                (measures.number(queue.topic) << 2 * NAME_BITS | base | queue.queue_id, *row)
                for queue, row in entry.queues.items()
            ]
            for start, end in isolated:
                self._mark_isolated(measures, number, start, end)
        _add(measures.totals, totals)
        _add(measures.latency, latency)
        _add(measures.queues, queues)
        _add(measures.reasons, reasons)
        _add(measures.invalid, [(measures.number(rule), *row) for rule, row in self._invalid.items()])
        if self._first_now <= self._last_now:
            start, end = (round((now + self._epoch_offset) * 1000) for now in (self._first_now, self._last_now))
            _add(measures.span, [(0, end, -start)])
        measures.limit_timeline()
        return measures

    def lines(self) -> list[str]:
        """Return, for every broker that took something, one line for a message: rows, requests and latencies."""
        measures = self.measures()
        found = []
        for broker, totals in measures.broker_totals().items():
            if totals.sent_rows:
                found.append(f"{broker} {totals.sent_rows} rows in {totals.requests} requests")
            elif totals.requests:
                p50, _, p99, longest = measures.quantiles_ms(broker)
                found.append(
                    f"{broker} {totals.rows} rows in {totals.requests} requests "
                    f"(p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {longest:.1f} ms)"
                )
        return found

    def _new_broker(self, broker: str) -> BrokerRecorder:
        entry = self._brokers[broker] = BrokerRecorder()
        return entry

    def _second(self, broker: str, now: float, latency_us: int = 0) -> list[int]:
        if now - latency_us / 1e6 < self._first_now:
            self._first_now = now - latency_us / 1e6
        if now > self._last_now:
            self._last_now = now
        second = int(now + self._epoch_offset)
        brokers = self._seconds.get(second)
        if brokers is None:
            if len(self._seconds) >= MAX_SECONDS:
                self._move_seconds()
            brokers = self._seconds[second] = {}
        row = brokers.get(broker)
        if row is None:
            row = brokers[broker] = [0, 0, 0, 0, 0]
        return row

    def _move_seconds(self) -> None:
        moved = Measures()
        for second, brokers in self._seconds.items():
            _add(moved.timeline, [(second << NAME_BITS | moved.number(name), *row) for name, row in brokers.items()])
        self._past.merge(moved)
        self._seconds = {}

    def _mark_isolated(self, measures: Measures, number: int, start: float, end: float) -> None:
        first, last = (int(moment + self._epoch_offset) // measures.width for moment in (start, end))
        seconds: IntArray = np.arange(first, last + 1, dtype=np.int64)
        values = np.zeros((len(measures.timeline.values), len(seconds)), np.int64)
        values[-1] = 1
        measures.timeline.add(seconds << NAME_BITS | number, values)

    def __repr__(self) -> str:
        rows = sum(entry.rows for entry in self._brokers.values())
        requests = sum(entry.requests for entry in self._brokers.values())
        return (
            f"<Recorder write={self.write_id} batch={self.batch_id} partition={self.partition_id} "
            f"brokers={len(self._brokers)} rows={rows} requests={requests}>"
        )


def _add(table: SparseTable, rows: list[tuple[int, ...]]) -> None:
    """Add tuples of key, counters, peaks."""
    if rows:
        columns = np.array(rows, np.int64).T
        table.add(columns[0], columns[1:])
