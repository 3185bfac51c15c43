"""`register(spark)`: registers the data source in a session, and wraps methods of Spark's writers once per process.

For the format "rocketmq", ``DataFrameWriter.save`` gets the mode "append", because Spark rejects its default mode
(error if exists) for every Python data source. An explicit ``mode("error")`` looks like the default, so it appends,
too.

In classic Spark, this ``save`` and every ``DataStreamWriter.start`` activate the writer's session first. Spark looks
for a Python data source in the active session of the JVM's thread (``DataSource.lookupDataSource``). A JVM thread that
Py4J starts for another Python thread, or after an interrupt, has no active session.

An interrupted ``save`` cancels its jobs, and logs the rows that are known to be stored (`interrupts`).

``save``, ``StreamingQuery.awaitTermination`` and ``processAllAvailable`` log the error of this package that caused
Spark's exception, as one line.

``DataStreamWriter.start`` also rejects the continuous trigger, with which Spark passes no row to the sink
(docs/internals/continuous-trigger.md). The Python workers that plan a stream do not know its trigger.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.interrupts import METRICS, cancelled_by_interrupt
from rocketmq_spark.spark.report import Metrics, ReportAccumulatorParam, report_cause
from rocketmq_spark.spark.spark_api import SessionFacts, is_connect
from rocketmq_spark.spark.worker_log import LoggedMetrics, records_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

logger = logging.getLogger("rocketmq_spark.spark")

# Append, and the names of Spark's default.
_APPENDING: Final = ("append", "", "error", "errorifexists", "default")

_LOCAL: Final = re.compile(r"local(\[.*\])?")
_OTHER, _MISSING = 3, 4
# Finds the package without importing it, which would take as long as the interpreter's start. Python 2 runs it, too.
_ASK: Final = (
    f"import sys; sys.version_info[:2] == {sys.version_info[:2]} or sys.exit({_OTHER}); "
    f"import importlib.util; sys.exit({_MISSING} * (importlib.util.find_spec('rocketmq_spark') is None))"
)
_TIMEOUT: Final = 10.0


def fault_of_workers(context: SparkContext) -> str | None:
    """Return what is wrong with the Python interpreter of a context's workers; None if nothing is known to be."""
    if not _LOCAL.fullmatch(context.master or "") or context._python_includes or "PYTHONPATH" in context.environment:
        return None
    interpreter = shutil.which(context.pythonExec)
    if interpreter is None:
        return f"{context.pythonExec}, which Spark's workers should run, does not exist"
    # Paths, not programs: two virtual environments may link to the same program.
    if os.path.abspath(interpreter) == os.path.abspath(sys.executable):
        return None
    try:
        done = subprocess.run(
            [interpreter, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    faults = {
        _OTHER: f"is not Python {sys.version_info[0]}.{sys.version_info[1]}, as the driver is",
        _MISSING: "does not find rocketmq_spark",
    }
    fault = faults.get(done.returncode)
    return fault and f"{interpreter}, which Spark's workers run, {fault}"


def register(spark: SparkSession) -> Metrics:
    """Make ``format("rocketmq")`` known to a session, and return the metrics of its future writes.

    Numbers appear as tasks end. On Spark Connect they appear as batch writes end, and only with the setting
    ``spark.sql.pyspark.worker.logging.enabled``: otherwise the methods of the metrics raise `MetricsUnavailableError`.
    Each call returns new metrics from zero; earlier ones keep their values. ``spark.newSession()`` needs its own
    `register`. A warning is logged if the interpreter of a local session's workers lacks this package, has another
    release, or does not exist.
    """
    for writer_class, method, around in _hooks():
        original = getattr(writer_class, method)
        if not hasattr(original, "_rocketmq_original"):
            hooked = around(original)
            hooked._rocketmq_original = original
            setattr(writer_class, method, hooked)
    accumulator = None
    if is_connect(spark):
        metrics_id = uuid.uuid4().hex
        metrics: Metrics = LoggedMetrics(records_of(spark), metrics_id)
    else:
        metrics_id = ""
        context = spark.sparkContext
        fault = fault_of_workers(context)
        if fault is not None:
            text = "%s: reads and writes will fail; set PYSPARK_PYTHON=%s before the session is made"
            logger.warning(text, fault, sys.executable)
        metrics = Metrics()
        accumulator = context.accumulator(metrics, ReportAccumulatorParam())
        METRICS[spark] = metrics

    # A class made here is pickled by value, with its accumulator; its base is pickled by reference.
    class SessionRocketMQDataSource(RocketMQDataSource):
        _session = SessionFacts.of(spark, accumulator, metrics_id)

    spark.dataSource.register(SessionRocketMQDataSource)
    return metrics


def unregister() -> None:
    """Remove the hooks from Spark's writers. The data source stays registered, because Spark cannot remove one.

    Then Spark rejects ``.save()`` without ``.mode("append")``, and a write in a thread without a session.
    """
    for writer_class, method, _ in _hooks():
        hooked = getattr(writer_class, method)
        setattr(writer_class, method, getattr(hooked, "_rocketmq_original", hooked))


def _hooks() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return Spark's classes, their methods, and the wrapper of each."""
    from pyspark.sql.readwriter import DataFrameWriter
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    batch_writers: list[Any] = [DataFrameWriter]
    stream_writers: list[Any] = [DataStreamWriter]
    queries: list[Any] = [StreamingQuery]
    # Without its dependencies there are no sessions of Spark Connect.
    with contextlib.suppress(ImportError):
        from pyspark.sql.connect.readwriter import DataFrameWriter as ConnectDataFrameWriter
        from pyspark.sql.connect.streaming.query import StreamingQuery as ConnectStreamingQuery
        from pyspark.sql.connect.streaming.readwriter import DataStreamWriter as ConnectDataStreamWriter

        batch_writers.append(ConnectDataFrameWriter)
        stream_writers.append(ConnectDataStreamWriter)
        queries.append(ConnectStreamingQuery)
    of_streams = {"format": _keeping_format, "trigger": _keeping_trigger, "start": _starting}
    return [
        *((writer, "save", _appending) for writer in batch_writers),
        *((writer, method, around) for writer in stream_writers for method, around in of_streams.items()),
        *((query, method, _awaiting) for query in queries for method in ("awaitTermination", "processAllAvailable")),
    ]


def _appending(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def save_appending(
        self: Any,
        path: str | None = None,
        format: str | None = None,  # noqa: A002 - Spark's name
        mode: str | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        if hasattr(self, "_jwrite"):
            own_format, own_mode = str(self._jwrite.source()), str(self._jwrite.curmode().name())
        else:
            own_format, own_mode = self._write.source, self._write.mode
        if (format or own_format or "").lower() == "rocketmq":
            chosen = (mode or own_mode or "").lower()
            if chosen not in _APPENDING:
                raise OptionError(
                    f'mode("{chosen}"): a RocketMQ topic can only be appended to; leave the mode out or use '
                    '.mode("append")'
                )
            _activate(self)
            with _cause_reported("the write"), cancelled_by_interrupt(self._spark, METRICS.get(self._spark)):
                save(self, path, format, "append", *args, **options)
            return
        save(self, path, format, mode, *args, **options)

    return save_appending


def _keeping_format(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def keep_format(self: Any, source: str) -> Any:
        self._rocketmq_format = source
        return method(self, source)

    return keep_format


def _keeping_trigger(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def keep_trigger(self: Any, **trigger: Any) -> Any:
        self._rocketmq_continuous = trigger.get("continuous")
        return method(self, **trigger)

    return keep_trigger


def _starting(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def start_in_its_session(
        self: Any,
        path: str | None = None,
        format: str | None = None,  # noqa: A002 - Spark's name
        *args: Any,
        **options: Any,
    ) -> Any:
        chosen = format or getattr(self, "_rocketmq_format", None) or ""
        continuous = getattr(self, "_rocketmq_continuous", None)
        if continuous is not None and chosen.lower() == "rocketmq":
            raise OptionError(
                f'trigger(continuous="{continuous}"): with this trigger, Spark passes no row to a sink in Python, so '
                'all rows would be lost. Use a trigger of micro-batches, such as trigger(processingTime="1 second")'
            )
        # The writer of Spark Connect has another attribute, and needs no active session.
        if hasattr(self, "_spark"):
            _activate(self)
        return start(self, path, format, *args, **options)

    return start_in_its_session


def _awaiting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def await_query(self: Any, *args: Any, **options: Any) -> Any:
        with _cause_reported(f"query {self.id}"):
            return method(self, *args, **options)

    return await_query


@contextlib.contextmanager
def _cause_reported(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        report_cause(exc, what)
        raise


def _activate(writer: Any) -> None:
    """Make the session of a writer's rows the active one of its thread, as ``createDataFrame`` does."""
    session = writer._spark
    if not is_connect(session):
        session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)
