"""Measures what one task sends.

One thread at a time: the sender calls with its lock held. No measurement raises: a latency out of range is clamped, and
counted as such.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.metrics.histogram import HIGHEST_US, LOWEST_US, index_of
from rocketmq_spark.metrics.measures import NO_OFFSET, BrokerMeasures, Measures
from rocketmq_spark.model.message import MessageQueue

# A broker may answer with any queue id and offset.
_MAX_QUEUES: Final = 1 << 20
_MAX_LONG: Final = 2**63 - 1


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
        self._measures = Measures()
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
        entry = self._measures.brokers.get(broker) or self._new_broker(broker)
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
        index = index_of(latency_us)
        entry.latency[index] = entry.latency.get(index, 0) + 1
        if 0 <= queue.queue_id < _MAX_QUEUES:
            key = queue.topic, queue.queue_id
            stored = entry.queues.get(key)
            if stored is None:
                stored = entry.queues[key] = [0, NO_OFFSET, NO_OFFSET]
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
        """Count a request that no broker acknowledges (``sendMode=oneway``)."""
        entry = self._measures.brokers.get(broker) or self._new_broker(broker)
        entry.sent_rows += rows
        entry.requests += 1
        entry.nbytes += nbytes
        second = self._second(broker, now)
        second[0] += rows
        second[1] += 1

    def record_retry(self, broker: str, reason: str, now: float) -> None:
        """Count a failed attempt whose bytes will be sent again; `reason` names the error or the status."""
        entry = self._measures.brokers.get(broker) or self._new_broker(broker)
        entry.retries += 1
        entry.reasons.setdefault(reason, [0, 0])[0] += 1
        self._second(broker, now)[2] += 1

    def record_failure(self, broker: str, code: str, now: float) -> None:
        """Count a failed attempt after which its batch is given up; `code` names the error or the status."""
        entry = self._measures.brokers.get(broker) or self._new_broker(broker)
        entry.failures += 1
        entry.reasons.setdefault(code, [0, 0])[1] += 1
        self._last_now = max(self._last_now, now)

    def record_isolation(self, broker: str, duration_ms: float, now: float) -> None:
        """Count an isolation that begins now, or extend a running one by `duration_ms`."""
        if broker not in self._measures.brokers:
            self._new_broker(broker)
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
            self._measures.invalid.setdefault(rule, [0, 0])[0] += rows

    def record_dead_letters(self, by_rule: Mapping[str, int]) -> None:
        """Count rows that go to the dead-letter topic, by the rule that they break."""
        for rule, rows in by_rule.items():
            self._measures.invalid.setdefault(rule, [0, 0])[1] += rows

    def snapshot(self) -> PartitionReport:
        """Return the measurements so far, packed; recording may continue."""
        return PartitionReport(self.write_id, self.batch_id, self.partition_id, self._so_far().pack())

    def lines(self) -> list[str]:
        """Return a line of rows, requests and latencies for every broker that took a request."""
        measures = self._so_far()
        found = []
        for name, broker in sorted(measures.brokers.items()):
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
        measures = Measures()
        measures.merge(self._measures)
        for name, isolations in self._isolations.items():
            past = [(start, min(end, self._last_now)) for start, end in isolations if start <= self._last_now]
            broker = measures.brokers[name]
            broker.isolated_times = len(past)
            broker.isolated_us = round(sum(end - start for start, end in past) * 1e6)
            for start, end in past:
                first, last = int(start + self._epoch_offset), int(end + self._epoch_offset)
                for second in (*range(first, last, measures.width), last):
                    measures.second(second).setdefault(name, [0, 0, 0, 0, 0])[4] = 1
        if self._first_now <= self._last_now:
            first_ms, last_ms = (round((now + self._epoch_offset) * 1000) for now in (self._first_now, self._last_now))
            measures.span_ms = first_ms, last_ms
        return measures

    def _new_broker(self, name: str) -> BrokerMeasures:
        broker = self._measures.brokers[name] = BrokerMeasures()
        return broker

    def _second(self, broker: str, now: float, latency_us: int = 0) -> list[int]:
        # Comparisons instead of min and max: with single messages this runs once per row.
        if now - latency_us / 1e6 < self._first_now:
            self._first_now = now - latency_us / 1e6
        if now > self._last_now:
            self._last_now = now
        measures = self._measures
        second = int(now + self._epoch_offset)
        brokers = measures.timeline.get(second // measures.width)
        if brokers is None:
            brokers = measures.second(second)
        row = brokers.get(broker)
        if row is None:
            row = brokers[broker] = [0, 0, 0, 0, 0]
        return row

    def __repr__(self) -> str:
        brokers = self._measures.brokers.values()
        rows, requests = sum(each.rows for each in brokers), sum(each.requests for each in brokers)
        return (
            f"<Recorder write={self.write_id} batch={self.batch_id} partition={self.partition_id} "
            f"brokers={len(brokers)} rows={rows} requests={requests}>"
        )
