"""`WriteSummary`: the merged measurements of writes, as numbers, tables and plots.

`register` returns one for the later writes of a Spark session. `Producer.send_arrow` returns one for its rows.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import IO, TYPE_CHECKING, Any, Final

from rocketmq_spark.display.optional import require
from rocketmq_spark.display.tables import Layout, html_table, print_table
from rocketmq_spark.errors import OptionError
from rocketmq_spark.metrics.measures import (
    HIGHEST_US,
    LOWEST_US,
    SIGNIFICANT_DIGITS,
    BrokerTotals,
    Measures,
    Metric,
    lowest_us,
)
from rocketmq_spark.metrics.openmetrics import families, render
from rocketmq_spark.metrics.recorder import PartitionReport, ReadReport

if TYPE_CHECKING:
    import pandas as pd
    from hdrh.histogram import HdrHistogram
    from matplotlib.axes import Axes

logger = logging.getLogger("rocketmq_spark.metrics")

_COUNTS: Final = {
    "rows": "rows", "sent_rows": "sent_rows", "requests": "requests", "bytes": "nbytes", "retries": "retries",
    "failures": "failures",
}  # fmt: skip
_QUANTILES: Final = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
_COLUMNS: Final = (*_COUNTS, *_QUANTILES, "isolated_times", "isolated_ms")
_HEADINGS: Final = (
    "broker", "rows", "requests", "MiB", "retries", "failures", "isolated", "p50 ms", "p90 ms", "p99 ms", "max ms",
)  # fmt: skip
_LAYOUT: Final = Layout(right=_HEADINGS[1:], spare=("p90 ms", "isolated", "MiB", "p50 ms", "requests", "failures"))
_EMPTY: Final = "No task has ended yet."


class WriteSummary:
    """The measurements of the writes of a session or of one `Producer.send_arrow`, without failed or running tasks.

    A `write_id` of None means all writes. An unknown one has no data; showing or drawing it raises `OptionError`. The
    newest `keep` writes and micro-batches are separate; older ones are merged and have no write id. `reports` is the
    number of merged reports, `dropped_reports` of those with an error, which is logged.
    """

    def __init__(self, keep: int = 1_000) -> None:
        self.reports = 0
        self.dropped_reports = 0
        self._keep = keep
        self._lock = threading.Lock()
        self._writes: dict[tuple[str, int], Measures] = {}
        self._older = Measures()
        self._skipped_by_reads: Counter[str] = Counter()

    def keys(self) -> list[tuple[str, int]]:
        """Return write id and batch id (-1 in a batch write) of the separate writes, oldest first."""
        with self._lock:
            return list(self._writes)

    def measures(self, write_id: str | None = None) -> Measures:
        """Return a merged copy of all measurements."""
        merged = Measures()
        with self._lock:
            if write_id is None:
                merged.merge(self._older)
            for key, measures in self._writes.items():
                if write_id in (None, key[0]):
                    merged.merge(measures)
        return merged

    def to_dict(self, write_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the measurements of every broker, by name.

        They are ``rows`` (stored), ``sent_rows`` (with ``sendMode=oneway``, perhaps stored), ``requests``, ``bytes``,
        ``retries``, ``failures``, ``p50_ms``, ``p90_ms``, ``p99_ms``, ``max_ms`` (None without a successful attempt),
        ``retries_by_reason``, ``failures_by_code``, ``queues``, ``incomplete``, ``isolated_times`` and ``isolated_ms``
        (summed over tasks). ``queues`` is ``{topic: {queue id: {"rows", "first_offset", "last_offset"}}}``, with ids as
        text for JSON, and None for an unknown offset. It also has the rows that were found stored after a fault. Over
        gRPC ``queues`` is empty, because proxies return neither queues nor offsets. ``incomplete`` is True for each
        broker if ``queues`` lacks rows.
        """
        measures = self.measures(write_id)
        by_broker: dict[str, dict[str, Any]] = {
            name: {
                **_counts([broker]),
                **_quantiles(measures, name),
                "retries_by_reason": {},
                "failures_by_code": {},
                "queues": {},
                "incomplete": measures.total(Metric.INCOMPLETE) > 0,
                "isolated_times": broker.isolated_times,
                "isolated_ms": broker.isolated_us / 1000,
            }
            for name, broker in measures.brokers.items()
        }
        for key, metric in (("retries_by_reason", Metric.REASON_RETRIES), ("failures_by_code", Metric.REASON_FAILURES)):
            for name, reason, _, _, count in measures.entries(metric, metric):
                if name in by_broker:
                    by_broker[name][key][reason] = count
        for (name, topic, queue_id), span in measures.queues().items():
            if name in by_broker:
                by_broker[name]["queues"].setdefault(topic, {})[str(queue_id)] = span
        return by_broker

    def by_write(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return the sums over all brokers for each separate write and micro-batch, oldest first.

        They are ``write_id``, ``batch_id`` (-1 in a batch write), ``start`` (of the first request, epoch seconds),
        ``duration_s`` (until the last answer), and ``rows`` to ``max_ms`` as in `to_dict`. Without a request ``start``
        and ``duration_s`` are None. ``pandas.DataFrame(...)`` accepts the list.
        """
        with self._lock:
            return [_of_write(*key, measures) for key, measures in self._writes.items() if write_id in (None, key[0])]

    def invalid_rows(self, write_id: str | None = None) -> dict[str, Any]:
        """Return the numbers of invalid rows.

        With ``onError=skip`` they are ``skipped`` and ``skipped_by_rule`` (``{rule: rows}``). With
        ``onError=deadLetter`` they are ``dead_lettered`` and ``dead_lettered_by_rule``, and also count as ``rows``.
        """
        measures = self.measures(write_id)
        skipped, dead_lettered = measures.by_detail(Metric.SKIPPED), measures.by_detail(Metric.DEAD_LETTERED)
        return {
            "skipped": sum(skipped.values()),
            "skipped_by_rule": skipped,
            "dead_lettered": sum(dead_lettered.values()),
            "dead_lettered_by_rule": dead_lettered,
        }

    def recovered_rows(self, write_id: str | None = None) -> dict[str, int]:
        """Return the rows that tasks found stored after a fault (``recovered``), and the repeats that they found.

        Recovered rows do not count as ``rows``. Only ``delivery=effectivelyOnce`` has them.
        """
        measures = self.measures(write_id)
        return {"recovered": measures.total(Metric.RECOVERED), "repeated": measures.total(Metric.REPEATED)}

    def skipped_writes(self, write_id: str | None = None) -> list[str]:
        """Return the writes that were completed or decided before, so that none of their rows was written again.

        Each is a text such as ``write orders-2026-11-24``, with the ``writeId`` of the write.
        """
        return [*self.measures(write_id).by_detail(Metric.SKIPPED_WRITES)]

    def skipped_by_reads(self) -> dict[str, int]:
        """Return the messages that reads skipped (``onUnreadable=skip``), by topic. Every run of a task counts."""
        with self._lock:
            return dict(sorted(self._skipped_by_reads.items()))

    def timeline(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return one row per bucket of time and broker, oldest first.

        It has ``second`` (epoch seconds of the bucket's start), ``width_s``, ``broker``, ``rows`` (with
        ``sendMode=oneway`` those sent), ``requests``, ``retries``, ``max_ms``, ``isolated``.
        """
        measures = self.measures(write_id)
        buckets: dict[tuple[int, str], list[int]] = {}
        for broker, _, metric, bucket, value in measures.entries(Metric.SECOND_ROWS, Metric.SECOND_ISOLATED):
            buckets.setdefault((bucket, broker), [0] * 5)[metric - Metric.SECOND_ROWS] = value
        timeline = []
        for (bucket, broker), (rows, requests, retries, max_us, isolated) in sorted(
            buckets.items(), key=lambda item: item[0][0]
        ):
            place = {"second": bucket * measures.width, "width_s": measures.width, "broker": broker}
            counts = {"rows": rows, "requests": requests, "retries": retries}
            timeline.append({**place, **counts, "max_ms": max_us / 1000, "isolated": bool(isolated)})
        return timeline

    def latencies(self, broker: str, write_id: str | None = None) -> HdrHistogram:
        """Return a broker's successful latencies in microseconds; empty for an unknown broker."""
        from hdrh.histogram import HdrHistogram

        histogram = HdrHistogram(LOWEST_US, HIGHEST_US, SIGNIFICANT_DIGITS)
        for index, count in zip(*self.measures(write_id).latencies(broker), strict=True):
            histogram.record_value(lowest_us(int(index)), int(count))
        return histogram

    def to_openmetrics(self, write_id: str | None = None) -> str:
        """Return the measurements as OpenMetrics text, for Prometheus: counters since the start or the last `reset`.

        Names begin with ``rocketmq_spark_``. The latencies are a histogram in seconds. A web server returns the text
        with the type ``application/openmetrics-text; version=1.0.0; charset=utf-8``.
        """
        unreadable = self.skipped_by_reads() if write_id is None else None
        return render(families(self.measures(write_id), unreadable=unreadable, lost_reports=self.dropped_reports))

    def to_pandas(self, write_id: str | None = None) -> pd.DataFrame:
        """Return the numbers of `to_dict` as a pandas DataFrame indexed by broker."""
        rows = [[name, *(numbers[column] for column in _COLUMNS)] for name, numbers in self.to_dict(write_id).items()]
        types = {name: "float64" if name.endswith("_ms") else "int64" for name in _COLUMNS}
        frame = require("pandas", "to_pandas()").DataFrame(rows, columns=["broker", *_COLUMNS])
        typed: pd.DataFrame = frame.set_index("broker").astype(types)
        return typed

    def show(self, file: IO[str] | None = None, write_id: str | None = None) -> None:
        """Print a table of all brokers, by default to stdout."""
        self._require(write_id)
        notes = self.notes(write_id)
        print_table(_HEADINGS, self._cells(write_id), _LAYOUT, notes=notes, empty=_EMPTY, file=file)

    def plot(self, ax: Axes | None = None, write_id: str | None = None) -> Axes:
        """Draw each broker's cumulative latency distribution."""
        from rocketmq_spark.metrics import plots

        self._require(write_id)
        measures = self.measures(write_id)
        return plots.plot_latencies({broker: measures.latencies(broker) for broker in measures.brokers}, ax)

    def plot_timeline(self, axes: Sequence[Axes] | None = None, write_id: str | None = None) -> list[Axes]:
        """Draw rows per second, largest latency, retries and isolation of each broker into 3 axes, or 2 (no retries).

        By default the axes are new; there are 2 if no batch was sent again.
        """
        from rocketmq_spark.metrics import plots

        self._require(write_id)
        return plots.plot_timeline(self.timeline(write_id), list(self.measures(write_id).brokers), axes)

    def notes(self, write_id: str | None = None) -> list[str]:
        """Return sentences that explain the numbers."""
        measures = self.measures(write_id)
        notes = row_notes(measures)
        if write_id is None and (skipped := self.skipped_by_reads()):
            topics = ", ".join(f"{topic} {count}" for topic, count in skipped.items())
            notes.append(f"{sum(skipped.values())} unreadable messages skipped by reads: {topics}.")
        notes += ["Latencies cover successful attempts only; numbers appear as tasks end.", *sent_notes(measures)]
        if self.dropped_reports:
            lost = f"{self.dropped_reports} reports of tasks could not be read (see the log)"
            notes.append(f"{lost}: their rows are missing in these numbers.")
        if clamped := sum(broker.clamped for broker in measures.brokers.values()):
            notes.append(f"{clamped} latencies lay outside 1 us .. 1 hour and count as the nearer end.")
        return notes

    def reset(self) -> None:
        """Remove all measurements. Running tasks will still report their measurements."""
        with self._lock:
            self._writes.clear()
            self._older = Measures()
            self._skipped_by_reads.clear()
            self.reports = self.dropped_reports = 0

    def _require(self, write_id: str | None) -> None:
        """Raise `OptionError` for an unknown write."""
        known = list(dict.fromkeys(key for key, _ in self.keys()))
        if write_id is None or write_id in known:
            return
        newest = f"the newest are {', '.join(known[-5:])}" if known else "no task of a write has ended"
        raise OptionError(f"write_id={write_id!r} is not a known write: {newest}")

    def _merge(self, report: PartitionReport | ReadReport) -> None:
        if isinstance(report, ReadReport):
            with self._lock:
                self._skipped_by_reads.update(report.skipped)
            return
        measures = Measures.unpack(report.packed)
        with self._lock:
            self._writes.setdefault((report.write_id, report.batch_id), Measures()).merge(measures)
            self.reports += 1
            while len(self._writes) > self._keep:
                self._older.merge(self._writes.pop(next(iter(self._writes))))

    def _cells(self, write_id: str | None) -> list[list[str]]:
        cells = []
        for name, numbers in self.to_dict(write_id).items():
            row = [f"{numbers[key]:,}" for key in ("rows", "requests", "retries", "failures", "isolated_times")]
            row.insert(2, f"{numbers['bytes'] / 1024**2:,.1f}")
            row += ["-" if numbers[key] is None else f"{numbers[key]:,.1f}" for key in _QUANTILES]
            cells.append([name, *row])
        return cells

    def _repr_html_(self) -> str:
        return html_table(_HEADINGS, self._cells(None), notes=self.notes(), empty=_EMPTY)

    def __repr__(self) -> str:
        return f"<WriteSummary writes={len(self._writes)} reports={self.reports} {self.measures()!r}>"


def merge_into(summary: WriteSummary, report: object) -> None:
    """Add a task's report to `summary`; count and log a report that cannot be merged. Never raises."""
    try:
        if not isinstance(report, PartitionReport | ReadReport):
            raise TypeError(f"a PartitionReport was expected, not {type(report).__name__}")
        summary._merge(report)
    except Exception as exc:
        # Every error is caught, because Spark's scheduler waits for this call, and the rows are stored.
        with summary._lock:
            summary.dropped_reports += 1
        logger.warning(
            "a task's report could not be read (%s: %s): the metrics lack its rows, but the rows are not lost",
            type(exc).__name__,
            exc,
        )


def row_notes(measures: Measures) -> list[str]:
    """Return sentences on writes that were completed before, on recovered rows, and on invalid rows, if any."""
    skipped_writes = measures.by_detail(Metric.SKIPPED_WRITES)
    notes = [f"{write} was completed or decided before: its rows were not written." for write in skipped_writes]
    recovered, repeated = measures.total(Metric.RECOVERED), measures.total(Metric.REPEATED)
    if recovered:
        repeats = f", {repeated} of them twice or more often" if repeated else ""
        notes.append(f"{recovered} rows were found stored after a fault{repeats}.")
    for fate, metric in (("skipped", Metric.SKIPPED), ("sent to the dead-letter topic", Metric.DEAD_LETTERED)):
        if by_rule := measures.by_detail(metric):
            rules = ", ".join(f"{rows} {rule}" for rule, rows in sorted(by_rule.items(), key=lambda item: -item[1]))
            notes.append(f"{sum(by_rule.values())} invalid rows {fate}: {rules}.")
    return notes


def sent_notes(measures: Measures) -> list[str]:
    """Return a sentence on rows without an acknowledgement (``sendMode=oneway``), if any."""
    sent = {name: broker.sent_rows for name, broker in measures.brokers.items() if broker.sent_rows}
    if not sent:
        return []
    brokers = ", ".join(f"{broker} {rows}" for broker, rows in sent.items())
    text = f"{sum(sent.values())} rows were sent with sendMode=oneway ({brokers}), without an acknowledgement"
    return [f"{text}: it is unknown whether they are stored."]


def _counts(brokers: Collection[BrokerTotals]) -> dict[str, int]:
    return {name: sum(getattr(broker, attribute) for broker in brokers) for name, attribute in _COUNTS.items()}


def _quantiles(measures: Measures, broker: str | None) -> dict[str, float | None]:
    return dict(zip(_QUANTILES, measures.quantiles_ms(broker) or (None,) * 4, strict=True))


def _of_write(write_id: str, batch_id: int, measures: Measures) -> dict[str, Any]:
    span = measures.span_ms()
    return {
        "write_id": write_id,
        "batch_id": batch_id,
        "start": None if span is None else span[0] / 1000,
        "duration_s": None if span is None else span[1] / 1000 - span[0] / 1000,
        **_counts(measures.brokers.values()),
        **_quantiles(measures, None),
    }
