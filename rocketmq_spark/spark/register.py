"""`register(spark)`: the data source with its way back to the driver, and `.save()` without a mode.

Rule 1: the accumulator rides on a subclass made for the session; Spark pickles the class into every task. So does the
        session's default parallelism, by which tasks share ``maxRatePerSecond``.
Rule 2: the hook on ``DataFrameWriter.save`` acts only when the source is ``rocketmq``, is put on once, and comes off.

Why the hook: Spark refuses the default save mode (error if exists) for every Python data source before our code runs,
and a topic can only be appended to (anchors/connectors.md section 6; design.md section 3). On classic Spark an
explicit ``mode("error")`` can't be told from the default, and is taken for it.
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
from rocketmq_spark.spark.workers import lacking_interpreter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger("rocketmq_spark.spark")

_SOURCE = "rocketmq"
_DEFAULT_MODES = frozenset({"", "error", "errorifexists", "default"})


def register(spark: SparkSession) -> Metrics:
    """Make ``format("rocketmq")`` known to a session, and return the metrics of what it will write.

    Calling it again begins new metrics from zero; the former ones keep their values. ``spark.newSession()`` needs its
    own `register`. Where the workers of a local session run an interpreter without this package, it logs a warning.

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
    _allow_default_mode()
    speculation = (spark.conf.get("spark.speculation", "false") or "").lower() == "true"
    if is_connect(spark):
        spark.dataSource.register(_session_source(None, speculation))
        return Metrics(None)
    lacking = lacking_interpreter(spark.sparkContext)
    if lacking is not None:
        logger.warning(
            "%s, which Spark's workers run, does not find rocketmq_spark: reads and writes will fail with "
            "ModuleNotFoundError; set PYSPARK_PYTHON=%s before the session is made",
            lacking,
            sys.executable,
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
    """Take the hook off ``DataFrameWriter.save`` again: ``.save()`` without ``.mode("append")`` is then Spark's error.

    The data source stays known to its sessions; Spark has no way to take one out.
    """
    for writer_class in _writer_classes():
        writer_class.save = getattr(writer_class.save, "_rocketmq_original", writer_class.save)


def _allow_default_mode() -> None:
    for writer_class in _writer_classes():
        if not hasattr(writer_class.save, "_rocketmq_original"):
            writer_class.save = _appending(writer_class.save)


def _writer_classes() -> list[Any]:
    from pyspark.sql.readwriter import DataFrameWriter

    classes: list[Any] = [DataFrameWriter]
    try:
        from pyspark.sql.connect.readwriter import DataFrameWriter as ConnectDataFrameWriter
    except ImportError:
        # Spark Connect's own dependencies are not installed: no session of that kind can exist here.
        return classes
    return [*classes, ConnectDataFrameWriter]


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
        save(self, path, format, mode, *args, **options)

    save_appending._rocketmq_original = save  # type: ignore[attr-defined]
    return save_appending


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
