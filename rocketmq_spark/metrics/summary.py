"""The driver's side: what the tasks of many writes measured, merged as they end, for the user to read.

Rule 1: a merge never raises, whatever it is given: it runs where Spark waits for it. What can't be merged is counted.
Rule 2: writes and micro-batches stay apart; the newest are kept, older ones are folded into one.
Rule 3: one lock guards merging and reading.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rocketmq_spark.errors import OptionError
from rocketmq_spark.metrics.histogram import to_hdr
from rocketmq_spark.metrics.measures import NAME_BITS, NO_OFFSET, Measures, Totals
from rocketmq_spark.metrics.recorder import PartitionReport, ReadReport

if TYPE_CHECKING:
    import pandas as pd
    from hdrh.histogram import HdrHistogram
    from matplotlib.axes import Axes

logger = logging.getLogger("rocketmq_spark.metrics")

_KEPT = 1_000
# Of write ids in an error.
_SHOWN = 5
_MASK = (1 << NAME_BITS) - 1


class WriteSummary:
    """What every write of a session measured so far.

    Latencies cover successful attempts only, and everything appears as tasks end: a running task, and an attempt of a
    task that failed, are not in it. Wherever a method takes a `write_id`, None means all writes; one
    that is not among `keys` has no data, and can be neither shown nor drawn (`OptionError`).

    Parameters
    ----------
    keep : int, default 1000
        How many writes and micro-batches are kept apart; older ones are folded into one, which has no write id.

    Attributes
    ----------
    reports : int
        How many reports were merged.
    dropped_reports : int
        How many reports could not be merged; the reason was logged.
    """

    def __init__(self, keep: int = _KEPT) -> None:
        self.reports = 0
        self.dropped_reports = 0
        self._keep = keep
        self._lock = threading.Lock()
        self._writes: dict[tuple[str, int], Measures] = {}
        self._older = Measures()
        self._skipped_by_reads: Counter[str] = Counter()

    def keys(self) -> list[tuple[str, int]]:
        """Return write id and batch id (-1 in a batch write) of what is kept apart, oldest first."""
        with self._lock:
            return list(self._writes)

    def measures(self, write_id: str | None = None) -> Measures:
        """Return everything measured, merged, as a copy."""
        merged = Measures()
        with self._lock:
            if write_id is None:
                merged.merge(self._older)
            for _, measures in self._of(write_id):
                merged.merge(measures)
        return merged

    def _of(self, write_id: str | None) -> list[tuple[tuple[str, int], Measures]]:
        return [(key, measures) for key, measures in self._writes.items() if write_id in (None, key[0])]

    def _require(self, write_id: str | None) -> None:
        """Refuse to show a write that is not there. Who asks for data may be waiting for it, and gets none."""
        known = list(dict.fromkeys(key for key, _ in self.keys()))
        if write_id is None or write_id in known:
            return
        shown = f"the newest are {', '.join(known[-_SHOWN:])}" if known else "no task of any has ended yet"
        raise OptionError(f"write_id={write_id!r} is no write that is kept apart: {shown}")

    def to_dict(self, write_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the measures of every broker, by name.

        Returns
        -------
        dict
            Per broker: ``rows`` (stored), ``sent_rows`` (``sendMode=oneway``: nobody knows whether they are stored),
            ``requests``, ``bytes``, ``retries``, ``failures``, ``p50_ms``, ``p90_ms``,
            ``p99_ms``, ``max_ms`` (None without a successful attempt), ``retries_by_reason``, ``failures_by_code``,
            ``queues`` (``{topic: {queue id: {"rows", "first_offset", "last_offset"}}}``, ids as text so that it is
            JSON; an unknown offset is None; empty over gRPC, where a proxy tells neither), ``isolated_times``,
            ``isolated_ms`` (both summed over tasks).
        """
        return _by_broker(self.measures(write_id))

    def by_write(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return the sums over all brokers for each write and micro-batch that is kept apart, oldest first.

        Returns
        -------
        list of dict
            ``write_id``, ``batch_id`` (-1 in a batch write), ``start`` (epoch seconds: the first request was written),
            ``duration_s`` (until the last one was answered), then ``rows`` to ``max_ms`` as in `to_dict`. A write of no
            request has None for ``start`` and ``duration_s``. ``pandas.DataFrame(...)`` takes it as it is.
        """
        with self._lock:
            return [_of_write(*key, measures) for key, measures in self._of(write_id)]

    def invalid_rows(self, write_id: str | None = None) -> dict[str, Any]:
        """Return how many rows no broker could store as they were.

        Returns
        -------
        dict
            ``skipped`` (``onError=skip``: in no topic), ``skipped_by_rule`` (``{rule: rows}``), ``dead_lettered``
            (``onError=deadLetter``: stored in the dead-letter topic, and among its broker's ``rows``),
            ``dead_lettered_by_rule``.
        """
        skipped, dead_lettered = self.measures(write_id).invalid_rows()
        return {
            "skipped": sum(skipped.values()),
            "skipped_by_rule": skipped,
            "dead_lettered": sum(dead_lettered.values()),
            "dead_lettered_by_rule": dead_lettered,
        }

    def skipped_by_reads(self) -> dict[str, int]:
        """Return how many unreadable messages reads with ``onUnreadable=skip`` have left out, by topic.

        Each run of a task counts: two actions on one DataFrame count its messages twice.
        """
        with self._lock:
            return dict(sorted(self._skipped_by_reads.items()))

    def timeline(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return what happened when: one row per bucket of time and broker, oldest first.

        Returns
        -------
        list of dict
            ``second`` (epoch seconds of the bucket's start), ``width_s``, ``broker``, ``rows`` (with oneway, those
            sent), ``requests``, ``retries``, ``max_ms``, ``isolated``.
        """
        measures = self.measures(write_id)
        width = measures.width
        return [
            {
                "second": (key >> NAME_BITS) * width,
                "width_s": width,
                "broker": measures.names[key & _MASK],
                "rows": rows,
                "requests": requests,
                "retries": retries,
                "max_ms": max_us / 1000,
                "isolated": bool(isolated),
            }
            for key, (rows, requests, retries, max_us, isolated) in measures.timeline.columns()
        ]

    def latencies(self, broker: str, write_id: str | None = None) -> HdrHistogram:
        """Return the latencies of a broker's successful attempts, in microseconds; empty for an unknown broker."""
        return to_hdr(*self.measures(write_id).latencies(broker))

    def to_pandas(self, write_id: str | None = None) -> pd.DataFrame:
        """Return the numbers of `to_dict`, one row per broker, as a pandas DataFrame indexed by broker.

        Raises
        ------
        ImportError
            pandas is not installed: ``pip install 'rocketmq-spark[notebook]'``.
        """
        from rocketmq_spark.metrics import view

        return view.data_frame(self.to_dict(write_id))

    def show(self, file: IO[str] | None = None, write_id: str | None = None) -> None:
        """Print a table of all brokers, by default to stdout."""
        from rocketmq_spark.metrics import view

        self._require(write_id)
        view.print_table(self.to_dict(write_id), self.notes(write_id), file)

    def plot(self, ax: Axes | None = None, write_id: str | None = None) -> Axes:
        """Draw each broker's cumulative latency distribution and return the axes.

        Raises
        ------
        ImportError
            matplotlib is not installed: ``pip install 'rocketmq-spark[notebook]'``.
        """
        from rocketmq_spark.metrics import plots

        self._require(write_id)
        measures = self.measures(write_id)
        return plots.plot_latencies({broker: measures.latencies(broker) for broker in measures.broker_totals()}, ax)

    def plot_timeline(self, axes: Sequence[Axes] | None = None, write_id: str | None = None) -> list[Axes]:
        """Draw over time, per broker, rows per second, largest latency and retries; shaded: the broker is isolated.

        Parameters
        ----------
        axes : sequence of three Axes, optional
            Where to draw; by default a new figure.
        write_id : str, optional

        Returns
        -------
        list of Axes
            The three.

        Raises
        ------
        ImportError
            matplotlib is not installed: ``pip install 'rocketmq-spark[notebook]'``.
        """
        from rocketmq_spark.metrics import plots

        self._require(write_id)
        return plots.plot_timeline(self.timeline(write_id), list(self.measures(write_id).broker_totals()), axes)

    def notes(self, write_id: str | None = None) -> list[str]:
        """Return what a reader of the numbers must know."""
        measures = self.measures(write_id)
        notes = measures.invalid_rows().lines()
        skipped = self.skipped_by_reads() if write_id is None else {}
        if skipped:
            topics = ", ".join(f"{topic} {count}" for topic, count in skipped.items())
            notes.append(f"{sum(skipped.values())} unreadable messages skipped by reads: {topics}.")
        notes += ["Latencies cover successful attempts only; numbers appear as tasks end."]
        notes += sent_notes(measures.broker_totals())
        if self.dropped_reports:
            notes.append(
                f"{self.dropped_reports} reports of tasks could not be read (see the log): their rows are missing."
            )
        clamped = sum(totals.clamped for totals in measures.broker_totals().values())
        if clamped:
            notes.append(f"{clamped} latencies lay outside 1 us .. 1 hour and count as the nearer end.")
        return notes

    def reset(self) -> None:
        """Forget everything; tasks that are still running will report all of theirs when they end."""
        with self._lock:
            self._writes.clear()
            self._older = Measures()
            self._skipped_by_reads.clear()
            self.reports = self.dropped_reports = 0

    def _merge(self, report: PartitionReport | ReadReport) -> None:
        if isinstance(report, ReadReport):
            with self._lock:
                self._skipped_by_reads.update(report.skipped)
            return
        measures = Measures.unpack(report.packed)
        key = (report.write_id, report.batch_id)
        with self._lock:
            known = self._writes.get(key) or Measures()
            known.merge(measures)
            self._writes[key] = known
            self.reports += 1
            while len(self._writes) > self._keep:
                self._older.merge(self._writes.pop(next(iter(self._writes))))

    def _repr_html_(self) -> str:
        from rocketmq_spark.metrics import view

        return view.html_table(self.to_dict(), self.notes())

    def __repr__(self) -> str:
        return f"<WriteSummary writes={len(self._writes)} reports={self.reports} {self.measures()!r}>"


def merge_into(summary: WriteSummary, report: object) -> None:
    """Add a task's report to `summary`, in place.

    Never raises: what can't be merged is counted in ``dropped_reports`` and logged, and changes nothing else.
    """
    try:
        if not isinstance(report, PartitionReport | ReadReport):
            raise TypeError(f"a PartitionReport was expected, not {type(report).__name__}")
        summary._merge(report)
    except Exception as exc:
        # The one place that catches every error: Spark's scheduler waits for this, and the rows are stored anyway.
        with summary._lock:
            summary.dropped_reports += 1
        logger.warning("the metrics of a task are lost, its rows are not: %s: %s", type(exc).__name__, exc)


def sent_notes(totals: Mapping[str, Totals]) -> list[str]:
    """Return what is to be said of rows that nobody acknowledged, if there are any."""
    sent = {broker: counts.sent_rows for broker, counts in totals.items() if counts.sent_rows}
    if not sent:
        return []
    brokers = ", ".join(f"{broker} {rows}" for broker, rows in sent.items())
    text = f"{sum(sent.values())} rows were sent with sendMode=oneway ({brokers}): nobody acknowledged them"
    return [f"{text}, whether they are stored is unknown."]


def _counts(totals: Totals) -> dict[str, int]:
    return {
        "rows": totals.rows,
        "sent_rows": totals.sent_rows,
        "requests": totals.requests,
        "bytes": totals.nbytes,
        "retries": totals.retries,
        "failures": totals.failures,
    }


def _quantiles(measures: Measures, broker: str | None) -> dict[str, float | None]:
    quantiles = measures.quantiles_ms(broker) if len(measures.latencies(broker)[0]) else (None,) * 4
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), quantiles, strict=True))


def _of_write(write_id: str, batch_id: int, measures: Measures) -> dict[str, Any]:
    start, end = measures.first_and_last() or (None, None)
    return {
        "write_id": write_id,
        "batch_id": batch_id,
        "start": start,
        "duration_s": None if start is None or end is None else end - start,
        **_counts(Totals(*measures.totals.values.sum(axis=1).tolist())),
        **_quantiles(measures, None),
    }


def _by_broker(measures: Measures) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for broker, totals in measures.broker_totals().items():
        found[broker] = {
            **_counts(totals),
            **_quantiles(measures, broker),
            "retries_by_reason": {},
            "failures_by_code": {},
            "queues": {},
            "isolated_times": totals.isolated_times,
            "isolated_ms": totals.isolated_us / 1000,
        }
    table = measures.reasons
    for key, (retries, failures) in table.columns():
        broker, reason = measures.names[key >> NAME_BITS], measures.names[key & _MASK]
        for name, count in (("retries_by_reason", retries), ("failures_by_code", failures)):
            if count:
                found[broker][name][reason] = count
    table = measures.queues
    for key, (rows, last, first) in table.columns():
        topic, broker = measures.names[key >> 2 * NAME_BITS], measures.names[key >> NAME_BITS & _MASK]
        found[broker]["queues"].setdefault(topic, {})[str(key & _MASK)] = {
            "rows": rows,
            "first_offset": None if first == NO_OFFSET else -first,
            "last_offset": None if last == NO_OFFSET else last,
        }
    return found
