"""Brings the reports of tasks to the driver.

The user's metrics come by accumulator. The log line of a write or micro-batch and the file in ``metricsPath`` come from
reports in commit messages. So do the metrics on Spark Connect, which has no accumulators (`worker_log`). On the driver
the accumulator's value is one `Metrics`; in a task it is a list of reports. Adding to the accumulator never raises,
because an exception would reach Spark's scheduler (``pyspark/accumulators.py``).
"""

from __future__ import annotations

import json
import logging
import pickle
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from pyspark.accumulators import AccumulatorParam

from rocketmq_spark.errors import DeliveryError, cause
from rocketmq_spark.metrics import Measures, PartitionReport, WriteSummary, merge_into
from rocketmq_spark.metrics.openmetrics import BEGINNING, Family, added, families, last_commit
from rocketmq_spark.metrics.summary import row_notes, sent_notes
from rocketmq_spark.options.references import PATH, allowed
from rocketmq_spark.spark.spark_api import WriterCommitMessage

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from rocketmq_spark.deliveries.base import PartitionResult, TaskResults, WriteReport

logger = logging.getLogger("rocketmq_spark.spark")

# For 20 brokers. Spark keeps every commit message until `commit`.
COMMIT_MESSAGE_BYTES: Final = 1024
# For metrics on Spark Connect, with queues and timeline: 20 brokers for a minute, or 2 for ten minutes.
WHOLE_MESSAGE_BYTES: Final = 8192

# The beginning of every line of `metricsPath`.
_LINE: Final = b'{"write_id": '

# Halving the resolution this often leaves one bucket per octave.
MAX_LATENCY_BITS: Final = 7


class ReportAccumulatorParam(AccumulatorParam[Any]):
    """Adds reports to the `Metrics` on the driver, and in a task to a plain list, which is cheap to pickle."""

    def zero(self, value: Any) -> list[PartitionReport]:  # noqa: ARG002 - Spark's signature
        """Return the initial value in a task."""
        return []

    def addInPlace(self, value1: Any, value2: Any) -> Any:  # noqa: N802 - Spark's name
        """Add a report, or the list that a task sends back, and return `value1`. Never raises."""
        for report in value2 if isinstance(value2, list) else [value2]:
            if isinstance(value1, list):
                value1.append(report)
            else:
                merge_into(value1, report)
        return value1


class Metrics(WriteSummary):
    """The measurements of a session's writes, per broker, and messages that reads skipped, as tasks report them.

    With Spark Connect there are only batch writes, and only if Spark keeps the log of Python workers. Otherwise every
    method raises `MetricsUnavailableError`, which names the setting.
    """

    @property
    def summary(self) -> WriteSummary:
        """Everything measured so far."""
        return self

    def writes(self) -> list[tuple[str, int]]:
        """Return write id and batch id (-1 in a batch write) of the newest writes and micro-batches, oldest first."""
        return self.keys()

    def __repr__(self) -> str:
        return f"<Metrics {super().__repr__()}>"


@dataclass(frozen=True, slots=True)
class CommitMessage(PartitionReport, WriterCommitMessage):
    """The report of a task that succeeded; with `histograms` there is no accumulator, and no other report."""

    histograms: bool
    result: PartitionResult | None = None  # What the task's delivery tells the driver

    @classmethod
    def of(
        cls,
        report: PartitionReport,
        *,
        histograms: bool,
        latencies: bool = False,
        whole: bool = False,
        result: PartitionResult | None = None,
    ) -> CommitMessage:
        """Return a task's message; with `latencies` it includes them although there is an accumulator.

        Totals are exact. Latencies lose as much resolution as `COMMIT_MESSAGE_BYTES` requires, down to octaves. With
        `whole` the message has all measures, unless it exceeds `WHOLE_MESSAGE_BYTES`.
        """
        measures = Measures.unpack(report.packed)
        ids = report.write_id, report.batch_id, report.partition_id
        if whole:
            message = cls(*ids, report.packed, histograms)
            if len(pickle.dumps(message)) <= WHOLE_MESSAGE_BYTES:
                return replace(message, result=result)
            measures = measures.incomplete()
        if not (histograms or latencies):
            return cls(*ids, measures.totals_only().pack(), histograms, result)
        for bits in range(MAX_LATENCY_BITS + 1):
            message = cls(*ids, measures.totals_only(bits).pack(), histograms)
            if len(pickle.dumps(message)) <= COMMIT_MESSAGE_BYTES:
                break
        return replace(message, result=result)


def summarise(messages: Iterable[WriterCommitMessage | None]) -> WriteSummary:
    """Return the merged commit messages; a task that did not finish has None instead."""
    summary = WriteSummary()
    for message in _finished(messages):
        merge_into(summary, message)
    return summary


def check_complete(messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> None:
    """Raise a DeliveryError if the message of a task is missing, so that its rows may not be stored.

    `batch_id` is the micro-batch or epoch of a stream, None for a batch write. Spark runs at least one task for each of
    them (SPARK-23271), also if the DataFrame has no partition.
    """
    partitions = {message.partition_id for message in _finished(messages)}
    expected = max(len(messages), 1, *(number + 1 for number in partitions))
    if len(partitions) == expected == len(messages):
        return
    name, advice = "a write", "This is an error of Spark: run the write again"
    if batch_id is not None:
        name = f"micro-batch or epoch {batch_id}"
        advice = (
            "Spark's continuous trigger (trigger(continuous=...)) passes no row to a sink in Python. Use a trigger of "
            "micro-batches, such as trigger(processingTime=...)"
        )
    raise DeliveryError(
        f"committing {name}: {expected - len(partitions)} of at least {expected} tasks sent no message, so their rows "
        f"may not be stored, and nothing is committed. {advice}"
    )


def _finished(messages: Iterable[WriterCommitMessage | None]) -> list[CommitMessage]:
    return [message for message in messages if isinstance(message, CommitMessage)]


def results_of(messages: Iterable[WriterCommitMessage | None], batch_id: int | None) -> TaskResults[Any]:
    """Return what the tasks tell the driver; `batch_id` is None for a batch write."""
    from rocketmq_spark.deliveries.base import TaskResults

    finished = _finished(messages)
    return TaskResults(
        [message.result for message in finished if message.result is not None],
        next((message.write_id for message in finished), ""),
        -1 if batch_id is None else batch_id,
        lambda: summarise(finished).to_dict().keys(),
    )


def micro_batch_of(messages: Iterable[WriterCommitMessage | None]) -> int | None:
    """Return the micro-batch of a write within ``foreachBatch``, which only its tasks know; None for other writes."""
    return next((message.batch_id for message in _finished(messages) if message.batch_id >= 0), None)


def log_summary(
    messages: Sequence[WriterCommitMessage | None],
    batch_id: int | None = None,
    *,
    aborted: bool = False,
    report: WriteReport | None = None,
) -> None:
    """Log one line about a write (`batch_id` None) or a micro-batch, and its end."""
    finished = _finished(messages)
    summary = summarise(finished)
    name = "write" if batch_id is None else f"micro-batch {batch_id}"
    if finished:
        name += f" of {finished[0].write_id}"
    if aborted:
        logger.log(
            logging.WARNING if finished else logging.INFO,
            "aborted %s: %d of %d tasks had finished and stored %s; what the others stored is in their errors, "
            "and unknown for tasks that Spark cancelled",
            *(name, len(finished), len(messages), _account(summary)),
        )
        return
    # Commit runs in a Python worker, which shows warnings only. Without an accumulator this line is the only report.
    # Skipped rows always get a warning.
    warn = any(message.histograms for message in finished) or summary.invalid_rows()["skipped"]
    level = logging.WARNING if warn else logging.INFO
    committed = "" if report is None else f"; {report}"
    logger.log(level, "%s: %d tasks stored %s%s", name, len(finished), _account(summary), committed)


def report_cause(exc: BaseException, what: str) -> None:
    """Log the error of this package that caused Spark's exception, and add it as a note, if there is one.

    Spark's text has hundreds of lines of tracebacks, and Spark does not tell `abort` why a write failed. Python prints
    the note after the traceback, from 3.11 on.
    """
    found = cause(exc)
    if found is None or found is exc:
        return
    text = f"{what} failed: {type(found).__name__}: {found}"
    logger.error("%s", text)
    if hasattr(exc, "add_note"):
        exc.add_note(text)


def _account(summary: WriteSummary) -> str:
    by_broker = summary.to_dict()
    measures = summary.measures()
    invalid = "".join(f"; {line}" for line in row_notes(measures))
    if not by_broker:
        return f"nothing{invalid}"
    brokers = []
    for broker, numbers in by_broker.items():
        text = f"{broker} {numbers['rows']} rows"
        if numbers["retries"] or numbers["failures"]:
            text += f", {numbers['retries']} retries, {numbers['failures']} failures"
        if numbers["p50_ms"] is not None:
            latencies = (f"{name} {numbers[f'{name}_ms']:.1f}" for name in ("p50", "p90", "p99", "max"))
            text += f", {' '.join(latencies)} ms"
        brokers.append(text)
    names = ("rows", "requests", "bytes", "retries", "failures")
    totals = ", ".join(f"{sum(numbers[name] for numbers in by_broker.values())} {name}" for name in names)
    sent = "".join(f". {note}" for note in sent_notes(summary.measures()))
    return f"{totals} ({'; '.join(brokers)}){invalid}{sent}"


def record_commit(
    path: str,
    messages: Sequence[WriterCommitMessage | None],
    write_id: str,
    batch_id: int | None,
    *,
    now: float,
    report: WriteReport | None = None,
    openmetrics: bool = False,
    resolve: Callable[[str], tuple[FileSystem, str]] | None = None,
) -> None:
    """Append one commit's figures to the file at `path`, which may be a URI; a failure is only logged.

    With `openmetrics` they are added to the sums in the file. `write_id` is empty in a stream. `now` is in epoch
    seconds. `resolve` replaces `pyarrow.fs.FileSystem.from_uri`.
    """
    try:
        allowed("metricsPath", f"{PATH}{path}", "(not shown)")
        if openmetrics:
            measures, repeated = summarise(_finished(messages)).measures(), report.repeated_rows if report else 0
            _add(path, [*families(measures, repeated=repeated), last_commit(now)], resolve)
            return
        line = _line(_finished(messages), write_id, batch_id, now)
        if report is not None:
            line[report.NAME] = asdict(report)
        _append(path, line, resolve)
    except Exception as exc:
        # pyarrow passes on whatever its file systems' libraries raise.
        logger.warning(
            "the figures of a commit could not be written to metricsPath %s: %s: %s (its rows are stored; metrics and "
            "log have the figures)",
            *(path, type(exc).__name__, exc),
        )


def _line(finished: Sequence[CommitMessage], write_id: str, batch_id: int | None, now: float) -> dict[str, Any]:
    summary = summarise(finished)
    brokers = summary.to_dict()
    for numbers in brokers.values():
        # Commit messages do not carry these.
        for name in ("queues", "retries_by_reason", "failures_by_code"):
            numbers.pop(name)
    return {
        "write_id": finished[0].write_id if finished else write_id,
        "batch_id": -1 if batch_id is None else batch_id,
        "save_id": write_id or None,
        "time": datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds"),
        "tasks": len(finished),
        "brokers": brokers,
        **summary.invalid_rows(),
        "skipped_writes": summary.skipped_writes(),
    }


def _add(path: str, found: list[Family], resolve: Callable[[str], tuple[FileSystem, str]] | None) -> None:
    """Add metrics to the sums in a file."""
    from pyarrow import fs

    filesystem, place = (resolve or fs.FileSystem.from_uri)(path)
    old = b""
    if filesystem.get_file_info(place).type is not fs.FileType.NotFound:
        with filesystem.open_input_stream(place, compression=None) as stream:
            old = stream.read()
    try:
        text = added(old.decode(), found).encode()
    except ValueError as exc:
        if not old.startswith(BEGINNING.encode()):
            raise
        kept = f"{place}.{uuid.uuid4().hex}.bad"
        filesystem.move(place, kept)
        text = added("", found).encode()
        logger.warning("metricsPath %s is damaged, so its sums begin at zero: %s. The old file is %s", path, exc, kept)
    target = place
    if isinstance(filesystem, fs.LocalFileSystem):
        filesystem.create_dir(place.rpartition("/")[0] or "/", recursive=True)
        # A monitor that reads meanwhile sees the old file or the new one.
        target = f"{place}.{uuid.uuid4().hex}.tmp"
    with filesystem.open_output_stream(target, compression=None) as stream:
        stream.write(text)
    if target != place:
        filesystem.move(target, place)


def _append(path: str, line: dict[str, Any], resolve: Callable[[str], tuple[FileSystem, str]] | None) -> None:
    from pyarrow import fs

    filesystem, place = (resolve or fs.FileSystem.from_uri)(path)
    # The path may name a file that a shell executes. So no name of a broker in it can be a command.
    text = (json.dumps(line).replace("$", "\\u0024").replace("`", "\\u0060") + "\n").encode()
    if isinstance(filesystem, fs.LocalFileSystem):
        filesystem.create_dir(place.rpartition("/")[0] or "/", recursive=True)
        if filesystem.get_file_info(place).type is fs.FileType.File:
            with filesystem.open_input_stream(place, compression=None) as stream:
                begins = stream.read(len(_LINE))
            if begins not in (b"", _LINE):
                raise ValueError("the file has other content than metrics of rocketmq-spark: name another file")
        # One write per line, so that two concurrent commits add two whole lines.
        with filesystem.open_append_stream(place, compression=None) as stream:
            stream.write(text)
        return
    name = f"{line['write_id'] or 'unknown'}-{line['batch_id']}"
    if line["save_id"] not in (None, line["write_id"]):
        name += f"-{line['save_id']}"
    with filesystem.open_output_stream(f"{place.rstrip('/')}/{name}.json", compression=None) as stream:
        stream.write(text)
