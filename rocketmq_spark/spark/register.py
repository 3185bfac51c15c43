"""`register(spark)`: the data source with its way back to the driver, `.save()` without a mode, writes from any thread.

Rule 1: the accumulator rides on a subclass made for the session; Spark pickles the class into every task. So does the
        session's default parallelism, by which tasks share ``maxRatePerSecond``.
Rule 2: the hooks on ``DataFrameWriter.save`` and ``DataStreamWriter.start`` are put on once, and come off. The first
        acts only when the source is ``rocketmq``; the second does what is right for every source.

Why a mode: Spark refuses the default save mode (error if exists) for every Python data source before our code runs,
and a topic can only be appended to (anchors/connectors.md section 6; design.md section 3). On classic Spark an
explicit ``mode("error")`` can't be told from the default, and is taken for it.

Why a session: classic Spark looks for a write's Python data source in the active session of the JVM's thread
(``DataSource.lookupDataSource``), which a thread that was just begun does not have; Py4J begins one for each thread of
Python, and anew after an interrupt.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.report import Metrics, ReportAccumulatorParam, new_summary
from rocketmq_spark.spark.workers import fault_of_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("rocketmq_spark.spark")

_SOURCE = "rocketmq"
_DEFAULT_MODES = frozenset({"", "error", "errorifexists", "default"})


def register(spark: SparkSession) -> Metrics:
    """Make ``format("rocketmq")`` known to a session, and return the metrics of what it will write.

    Calling it again begins new metrics from zero; the former ones keep their values. ``spark.newSession()`` needs its
    own `register`. Where the workers of a local session run an interpreter without this package, of another
    release, or one that is not there, it logs a warning.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession
        Classic or Connect.

    Returns
    -------
    Metrics
        Fills as tasks end. On Spark Connect there is no way back to the client: its methods raise
        `MetricsUnavailableError`.
    """
    _put_hooks_on()
    speculation = (spark.conf.get("spark.speculation", "false") or "").lower() == "true"
    if is_connect(spark):
        spark.dataSource.register(_session_source(None, speculation))
        return Metrics(None)
    fault = fault_of_workers(spark.sparkContext)
    if fault is not None:
        logger.warning(
            "%s: reads and writes will fail; set PYSPARK_PYTHON=%s before the session is made", fault, sys.executable
        )
    accumulator = spark.sparkContext.accumulator(new_summary(), ReportAccumulatorParam())
    source = _session_source(accumulator, speculation, spark.sparkContext.defaultParallelism)
    spark.dataSource.register(source)
    return Metrics(accumulator)


def _session_source(accumulator: Any, speculation: bool, parallelism: int | None = None) -> type[RocketMQDataSource]:
    # A class made here is pickled by value, so that its accumulator goes along; its base goes by reference.
    class SessionRocketMQDataSource(RocketMQDataSource):
        _accumulator = accumulator
        _speculation = speculation
        _parallelism = parallelism

    return SessionRocketMQDataSource


def is_connect(spark: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def unregister() -> None:
    """Take the hooks off Spark's writers again.

    ``.save()`` without ``.mode("append")`` is then Spark's error, and so is a write in a thread without a session. The
    data source stays known to its sessions; Spark has no way to take one out.
    """
    for writer_class, method, _ in _hooks():
        hooked = getattr(writer_class, method)
        setattr(writer_class, method, getattr(hooked, "_rocketmq_original", hooked))


def _put_hooks_on() -> None:
    for writer_class, method, around in _hooks():
        found = getattr(writer_class, method)
        if not hasattr(found, "_rocketmq_original"):
            hooked = around(found)
            hooked._rocketmq_original = found
            setattr(writer_class, method, hooked)


def _hooks() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the classes of Spark, their methods, and what is put around each."""
    from pyspark.sql.readwriter import DataFrameWriter
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    hooks: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (DataFrameWriter, "save", _appending),
        (DataStreamWriter, "start", _in_its_session),
    ]
    try:
        from pyspark.sql.connect.readwriter import DataFrameWriter as ConnectDataFrameWriter
    except ImportError:
        # Spark Connect's own dependencies are not installed: no session of that kind can exist here.
        return hooks
    return [*hooks, (ConnectDataFrameWriter, "save", _appending)]


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
        if (format or _source_of(self) or "").lower() == _SOURCE:
            mode = _append_mode(mode or _mode_of(self))
            _activate(self)
        save(self, path, format, mode, *args, **options)

    return save_appending


def _in_its_session(start: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start)
    def start_in_its_session(self: Any, *args: Any, **options: Any) -> Any:
        _activate(self)
        return start(self, *args, **options)

    return start_in_its_session


def _activate(writer: Any) -> None:
    """Make the session of a writer's rows the active one of its thread, as ``createDataFrame`` does."""
    session = writer._spark
    if not is_connect(session):
        session._jvm.org.apache.spark.sql.SparkSession.setActiveSession(session._jsparkSession)


def _append_mode(mode: str | None) -> str:
    asked = (mode or "").lower()
    if asked == "append" or asked in _DEFAULT_MODES:
        return "append"
    raise OptionError(
        f'mode("{asked}"): a RocketMQ topic can only be appended to; leave the mode out or use .mode("append")'
    )


def _source_of(writer: Any) -> str | None:
    if hasattr(writer, "_jwrite"):
        return str(writer._jwrite.source())
    return writer._write.source  # type: ignore[no-any-return]


def _mode_of(writer: Any) -> str | None:
    if hasattr(writer, "_jwrite"):
        return str(writer._jwrite.curmode().name())
    return writer._write.mode  # type: ignore[no-any-return]
