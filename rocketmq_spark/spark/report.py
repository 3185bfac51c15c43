"""The way back to the driver: the accumulator that the user's metrics read, and the commit message.

Rule 1: on the driver the accumulator's value is a `WriteSummary`, always the same object; in a task it is a list of
        reports. Adding to either never raises: Spark's scheduler waits for it.
Rule 2: a commit message is at most 1 KiB (20 brokers): Spark keeps every one until `commit`.
Rule 3: where there is no accumulator, metrics raise and say where the numbers are; they never read zero.

Follows pyspark/accumulators.py and design.md section 6.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.sql.datasource import WriterCommitMessage

from rocketmq_spark.errors import MetricsUnavailableError
from rocketmq_spark.metrics import Measures, PartitionReport, WriteSummary, merge_into
from rocketmq_spark.metrics.summary import sent_notes

if TYPE_CHECKING:
    import pandas as pd
    from hdrh.histogram import HdrHistogram
    from matplotlib.axes import Axes

COMMIT_MESSAGE_BYTES: Final = 1024

# Halving the resolution this often leaves one bucket per octave.
_MAX_LATENCY_BITS: Final = 7

_UNAVAILABLE: Final = (
    "the metrics of this session have no way back to it: Spark Connect has no accumulators. The summary of each write "
    "and micro-batch is in the log of the Spark server's driver, in a line of the logger rocketmq_spark.spark"
)


def new_summary() -> WriteSummary:
    """Return the value that the accumulator of a session begins with, on the driver."""
    return WriteSummary()


class ReportAccumulatorParam(AccumulatorParam[Any]):
    """How reports add up: `WriteSummary` on the driver, a plain list in a task.

    PySpark pickles ``zero(value)`` into every task, lets the task add to it, and adds what the task has then to the
    driver's value. A summary as zero would have to be picklable, lock included, and a task would merge its one report
    only for the driver to merge it again. A list costs nothing to pickle, and the report passes through it untouched.
    """

    def zero(self, value: Any) -> list[PartitionReport]:  # noqa: ARG002 - Spark's signature
        """Return what a task begins with."""
        return []

    def addInPlace(self, value1: Any, value2: Any) -> Any:  # noqa: N802 - Spark's name
        """Add a report, or the list that a task sends back, and return `value1`. Never raises."""
        reports = value2 if isinstance(value2, list) else [value2]
        if isinstance(value1, list):
            value1.extend(reports)
        else:
            for report in reports:
                merge_into(value1, report)
        return value1


class Metrics:
    """What the writes of a session measured, per broker; `register` returns it.

    Latencies cover successful attempts only, and numbers appear as tasks end. Wherever a method takes a `write_id`,
    None means all writes; one of which nothing has come yet has no data, and can be neither shown nor drawn
    (`OptionError`). Without an accumulator (Spark Connect) every method raises `MetricsUnavailableError`, which says
    where the numbers are.

    Parameters
    ----------
    accumulator : pyspark.Accumulator or None
        Of `new_summary` and `ReportAccumulatorParam`; None where the session has none.
    """

    def __init__(self, accumulator: Accumulator[Any] | None) -> None:
        self._accumulator = accumulator

    @property
    def summary(self) -> WriteSummary:
        """Everything measured so far.

        Raises
        ------
        MetricsUnavailableError
        """
        if self._accumulator is None:
            raise MetricsUnavailableError(_UNAVAILABLE)
        summary: WriteSummary = self._accumulator.value
        return summary

    def writes(self) -> list[tuple[str, int]]:
        """Return write id and batch id (-1 in a batch write) of the newest writes and micro-batches, oldest first."""
        return self.summary.keys()

    def show(self, file: IO[str] | None = None, write_id: str | None = None) -> None:
        """Print a table of all brokers, by default to stdout."""
        self.summary.show(file, write_id)

    def to_dict(self, write_id: str | None = None) -> dict[str, dict[str, Any]]:
        """Return everything by broker; see `WriteSummary.to_dict`."""
        return self.summary.to_dict(write_id)

    def to_pandas(self, write_id: str | None = None) -> pd.DataFrame:
        """Return one row of numbers per broker."""
        return self.summary.to_pandas(write_id)

    def by_write(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return the sums over all brokers, a row per write and micro-batch; see `WriteSummary.by_write`."""
        return self.summary.by_write(write_id)

    def invalid_rows(self, write_id: str | None = None) -> dict[str, Any]:
        """Return how many rows were skipped and dead-lettered; see `WriteSummary.invalid_rows`."""
        return self.summary.invalid_rows(write_id)

    def skipped_by_reads(self) -> dict[str, int]:
        """Return how many unreadable messages reads have left out, by topic; see `WriteSummary.skipped_by_reads`."""
        return self.summary.skipped_by_reads()

    def timeline(self, write_id: str | None = None) -> list[dict[str, Any]]:
        """Return what happened when, a row per second and broker; see `WriteSummary.timeline`."""
        return self.summary.timeline(write_id)

    def latencies(self, broker: str, write_id: str | None = None) -> HdrHistogram:
        """Return the latencies of one broker, microseconds."""
        return self.summary.latencies(broker, write_id)

    def plot(self, ax: Axes | None = None, write_id: str | None = None) -> Axes:
        """Draw each broker's cumulative latency distribution."""
        return self.summary.plot(ax, write_id)

    def plot_timeline(self, axes: Sequence[Axes] | None = None, write_id: str | None = None) -> list[Axes]:
        """Draw rows per second, latency, retries and isolation over time; see `WriteSummary.plot_timeline`."""
        return self.summary.plot_timeline(axes, write_id)

    def reset(self) -> None:
        """Begin from zero; tasks that are still running will report all of theirs when they end."""
        self.summary.reset()

    def _repr_html_(self) -> str:
        return self.summary._repr_html_()

    def __repr__(self) -> str:
        # The one that does not raise: a debugger and a traceback print it, too.
        if self._accumulator is None:
            return f"<Metrics unavailable: {_UNAVAILABLE}>"
        return f"<Metrics {self.summary!r}>"


@dataclass(frozen=True, slots=True)
class CommitMessage(WriterCommitMessage):
    """What a task that succeeded tells `commit`.

    Parameters
    ----------
    write_id : str
    batch_id : int
        -1 in a batch write.
    partition_id : int
    packed : bytes
        For `Measures.unpack`: totals per broker, and latencies if `histograms` or if the driver needs them.
    histograms : bool
        There is no accumulator: this message is all that the driver will know.
    """

    write_id: str
    batch_id: int
    partition_id: int
    packed: bytes
    histograms: bool

    @classmethod
    def of(cls, report: PartitionReport, *, histograms: bool, latencies: bool = False) -> CommitMessage:
        """Return a task's message; `latencies` puts them in although there is an accumulator.

        Totals are exact always. Latencies lose as much resolution as `COMMIT_MESSAGE_BYTES` asks for, down to octaves;
        beyond some 20 brokers the message grows by what the totals of each need.
        """
        measures = Measures.unpack(report.packed)
        place = (report.write_id, report.batch_id, report.partition_id)
        if not (histograms or latencies):
            return cls(*place, measures.totals_only().pack(), histograms)
        for bits in range(_MAX_LATENCY_BITS + 1):
            message = cls(*place, measures.totals_only(bits).pack(), histograms)
            if len(pickle.dumps(message)) <= COMMIT_MESSAGE_BYTES:
                break
        return message


def summarise(messages: Iterable[WriterCommitMessage | None]) -> WriteSummary:
    """Return what the tasks measured, by their commit messages; None, of a task that did not finish, is passed over."""
    summary = new_summary()
    for message in messages:
        if isinstance(message, CommitMessage):
            merge_into(
                summary, PartitionReport(message.write_id, message.batch_id, message.partition_id, message.packed)
            )
    return summary


def micro_batch_of(messages: Iterable[WriterCommitMessage | None]) -> int | None:
    """Return the micro-batch that the tasks of a batch write within ``foreachBatch`` saw; None outside of one.

    Spark tells a batch write nothing of it, and a write of no task has nobody that saw it.
    """
    seen = (message.batch_id for message in messages if isinstance(message, CommitMessage))
    return next((batch_id for batch_id in seen if batch_id >= 0), None)


def log_summary(
    logger: logging.Logger,
    messages: Sequence[WriterCommitMessage | None],
    batch_id: int | None = None,
    *,
    aborted: bool = False,
) -> None:
    """Log in one line what a write, or one micro-batch, did.

    Parameters
    ----------
    logger : logging.Logger
    messages : sequence of CommitMessage or None
        None for a task that did not finish.
    batch_id : int or None, default None
        The micro-batch; None in a batch write.
    aborted : bool, default False
    """
    finished = [message for message in messages if isinstance(message, CommitMessage)]
    what = "write" if batch_id is None else f"micro-batch {batch_id}"
    if finished:
        what += f" of {finished[0].write_id}"
    if aborted:
        logger.log(
            logging.WARNING if finished else logging.INFO,
            "aborted %s: %d of %d tasks had finished and stored %s; what the others stored, only their errors tell",
            what,
            len(finished),
            len(messages),
            _account(summarise(finished)),
        )
        return
    # Commit runs in a Python worker, whose log level nobody can set: what is less than a warning is never seen. Where
    # an accumulator feeds the user's metrics that is well; elsewhere this line is all there is.
    summary = summarise(finished)
    # Rows that are in no topic are worth a warning wherever the numbers go.
    alone = any(message.histograms for message in finished) or summary.invalid_rows()["skipped"]
    level = logging.WARNING if alone else logging.INFO
    logger.log(level, "%s: %d tasks stored %s", what, len(finished), _account(summary))


def _account(summary: WriteSummary) -> str:
    by_broker = summary.to_dict()
    invalid = "".join(f"; {line}" for line in summary.measures().invalid_rows().lines())
    if not by_broker:
        return f"nothing{invalid}"
    rows, requests, nbytes, retries, failures = (
        sum(numbers[name] for numbers in by_broker.values())
        for name in ("rows", "requests", "bytes", "retries", "failures")
    )
    brokers = "; ".join(_broker_account(broker, numbers) for broker, numbers in by_broker.items())
    sent = "".join(f". {note}" for note in sent_notes(summary.measures().broker_totals()))
    return (
        f"{rows} rows, {requests} requests, {nbytes} bytes, {retries} retries, {failures} failures "
        f"({brokers}){invalid}{sent}"
    )


def _broker_account(broker: str, numbers: dict[str, Any]) -> str:
    text = f"{broker} {numbers['rows']} rows"
    if numbers["retries"] or numbers["failures"]:
        text += f", {numbers['retries']} retries, {numbers['failures']} failures"
    if numbers["p50_ms"] is not None:
        text += ", " + " ".join(f"{name} {numbers[f'{name}_ms']:.1f}" for name in ("p50", "p90", "p99", "max")) + " ms"
    return text
