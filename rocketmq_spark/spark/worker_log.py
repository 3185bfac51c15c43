"""Metrics of batch writes on Spark Connect, which has no accumulators: records in Spark's log of Python workers.

From PySpark 4.1 on, with `SETTING`, Spark keeps what Python workers log, and `TableValuedFunction.python_worker_logs`
returns it to the session. The worker that commits or aborts a batch write logs one record: a line of JSON with the
merged measures of the tasks. Streams log none: they run in a clone of their session, whose log no session can read.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import MetricsUnavailableError
from rocketmq_spark.metrics import Measures, PartitionReport, merge_into
from rocketmq_spark.spark.report import MAX_LATENCY_BITS, Metrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("rocketmq_spark.record")

SETTING: Final = "spark.sql.pyspark.worker.logging.enabled"

# Spark sets it for Python workers whose log it keeps.
_KEPT: Final = "PYSPARK_SPARK_SESSION_UUID"
_VERSION: Final = 1
# Of the measures, before base64. A larger record lacks queues, reasons and the timeline.
_RECORD_BYTES: Final = 1 << 20

_UNAVAILABLE: Final = (
    "Spark Connect has no accumulators, so metrics come from Spark's log of Python workers. This needs PySpark 4.1 or "
    f'newer on client and server, and spark.conf.set("{SETTING}", "true") before the write. '
    "Without it, rocketmq_spark.write(df) returns the figures of a write. The option metricsPath writes those of "
    "writes and micro-batches to a file. The log of the Spark server's driver has them, too (rocketmq_spark.spark)"
)
_OF_TASKS: Final = (
    "Spark Connect has no accumulators, so the numbers of messages that reads skip are not available: see the logs of "
    "the tasks"
)
_SCOPE: Final = f"Only batch writes with {SETTING}=true; option metricsPath has the figures of streams."


def is_kept() -> bool:
    """Return whether Spark keeps the log of this process, which is a Python worker."""
    return _KEPT in os.environ


def log_record(metrics_id: str, write_id: str, batch_id: int, measures: Measures) -> None:
    """Log the measures of a batch write for the metrics that have this id."""
    packed = measures.pack()
    if len(packed) > _RECORD_BYTES:
        packed = measures.incomplete().totals_only(MAX_LATENCY_BITS).pack()
    fields = {"record": uuid.uuid4().hex, "write_id": write_id, "batch_id": batch_id}
    # Workers show warnings only, if nothing else sets the level.
    logger.setLevel(logging.INFO)
    logger.info(
        "%s", _beginning(metrics_id) + json.dumps({**fields, "measures": base64.b64encode(packed).decode()})[1:]
    )


def _beginning(metrics_id: str) -> str:
    """Return how the records of these metrics begin. No row's text can: the id is random, and no task logs it."""
    return json.dumps({"rocketmq_spark_metrics": _VERSION, "id": metrics_id})[:-1] + ", "


class _Summary(Metrics):
    """The records that were read."""

    def notes(self, write_id: str | None = None) -> list[str]:
        return [*super().notes(write_id), _SCOPE]


class LoggedMetrics(Metrics):
    """The metrics of a session of Spark Connect. Each method first reads the new records.

    If the log is not available, every method raises `MetricsUnavailableError`. They never read zero for that reason.
    `read` returns the times and texts of all records that begin so.
    """

    def __init__(self, read: Callable[[str], list[tuple[Any, str]]], metrics_id: str) -> None:
        """Start from zero. All measures are in another object, which has the methods of the summary."""
        self._read = read
        self._id = metrics_id
        self._seen: set[str] = set()
        self._summary = _Summary()
        self._reading = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        if name.startswith("__") or not (hasattr(Metrics, name) or name in ("reports", "dropped_reports")):
            return get(name)
        if name == "skipped_by_reads":
            raise MetricsUnavailableError(_OF_TASKS)
        get("_update")()
        return getattr(get("_summary"), name)

    def _update(self) -> None:
        beginning = _beginning(self._id)
        with self._reading:
            for _, text in sorted(self._read(beginning)):
                found = json.loads(text)
                if found["record"] not in self._seen:
                    self._seen.add(found["record"])
                    packed = base64.b64decode(found["measures"])
                    merge_into(self._summary, PartitionReport(found["write_id"], found["batch_id"], 0, packed))

    def __repr__(self) -> str:
        # Debuggers and tracebacks print it, so it asks no server.
        return f"<Metrics of Spark Connect: {self._summary!r}>"


def records_of(spark: SparkSession) -> Callable[[str], list[tuple[Any, str]]]:
    """Return a function that returns time and text of a session's records that begin so."""

    def read(beginning: str) -> list[tuple[Any, str]]:
        from pyspark.errors import AnalysisException

        try:
            logs = spark.tvf.python_worker_logs()
            mine = logs.where((logs.logger == logger.name) & logs.msg.startswith(beginning))
            return [(row.ts, row.msg) for row in mine.select("ts", "msg").collect()]
        except (AttributeError, AnalysisException) as exc:
            raise MetricsUnavailableError(f"{_UNAVAILABLE} ({type(exc).__name__})") from exc

    return read
