"""How far a streaming query is behind its topics, and a listener that logs each micro-batch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from rocketmq_spark.admin.answers import QueueLag
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import MetricsUnavailableError
from rocketmq_spark.metrics import WriteSummary
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import flat

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger("rocketmq_spark.spark")


def lag(query: StreamingQuery, name_server: str | Sequence[str] | None = None, **connection: Any) -> Table[QueueLag]:
    """Return how many messages of each queue a streaming query has not read, by topic, broker and queue.

    With `name_server` or the environment variable ``NAMESRV_ADDR`` the brokers are queried now; `connection` are the
    other arguments of `Admin`. Otherwise the ends of the queues are from the plan of the last micro-batch (PySpark 4.2
    and newer).

    Raises a MetricsUnavailableError before the query's first micro-batch, for a query without this source, and without
    the ends of its queues; with `name_server` as `Admin.offsets`.

    >>> rocketmq_spark.lag(query).print()  # doctest: +SKIP
    """
    progress = query.lastProgress
    if progress is None:
        raise MetricsUnavailableError("the query has no progress yet: call again after its first micro-batch")
    read, ends = _offsets(progress)
    if not read:
        raise MetricsUnavailableError("the query reads no RocketMQ topic, or its first micro-batch has not ended")
    if name_server or connection or os.environ.get("NAMESRV_ADDR"):
        ends = _ends_now({queue.topic for queue in read}, name_server, connection)
    elif not ends:
        raise MetricsUnavailableError(
            "the query does not report the ends of its queues (PySpark before 4.2): give name_server"
        )
    return Table(QueueLag, _lags(read, ends))


class ProgressListener(StreamingQueryListener):
    """Logs a line per micro-batch: rows read and stored, duration, latency, retries, and messages not read yet.

    The logger is ``rocketmq_spark.spark``. `metrics` is what `register` returned; without it, as on Spark Connect, the
    line has nothing about writes. The number of unread messages needs this package's source and PySpark 4.2.

    >>> spark.streams.addListener(rocketmq_spark.ProgressListener(metrics))  # doctest: +SKIP
    """

    def __init__(self, metrics: WriteSummary | None = None, level: int = logging.INFO) -> None:
        self._metrics = metrics
        self._level = level

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Log the start of a query."""
        logger.log(self._level, "query %s has started", _name(event))

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Log a micro-batch."""
        progress = event.progress
        line = f"{progress.numInputRows} rows in {progress.durationMs.get('triggerExecution', 0)} ms"
        line += self._written(str(progress.id), progress.batchId)
        read, ends = _offsets(progress)
        if read and ends:
            behind = _lags(read, ends)
            line += f"; {sum(one.messages for one in behind)} messages not read"
            most = max(behind, key=lambda one: one.messages)
            if most.messages:
                line += f", {most.messages} of them in {most.queue}"
        logger.log(self._level, "query %s, micro-batch %d: %s", _name(progress), progress.batchId, line)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing: a query without messages logs nothing."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Log the end of a query, and its error."""
        text = f" with an error: {event.exception}" if event.exception else ""
        logger.log(self._level, "query %s has ended%s", _name(event), text)

    def _written(self, query_id: str, batch_id: int) -> str:
        if self._metrics is None:
            return ""
        for write in self._metrics.by_write(query_id):
            if write["batch_id"] == batch_id:
                latency = "" if write["p99_ms"] is None else f", p99 {write['p99_ms']:.1f} ms"
                return f"; {write['rows']} stored{latency}, {write['retries']} retries, {write['failures']} failures"
        return ""


def _name(event: Any) -> str:
    name = getattr(event, "name", None)
    return f"{name} ({event.id})" if name else str(event.id)


def _lags(read: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> list[QueueLag]:
    # A queue that the query has not seen yet is read from its beginning, which the progress does not have.
    return [QueueLag(queue, offset, ends.get(queue, offset)) for queue, offset in sorted(read.items())]


def _offsets(progress: Any) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]]:
    """Return, of this package's sources in a progress, the offsets up to which they have read, and the queues' ends."""
    read: dict[MessageQueue, int] = {}
    ends: dict[MessageQueue, int] = {}
    for source in progress["sources"] if isinstance(progress, dict) else progress.sources:
        # In PySpark 4.0 the values of `lastProgress` are Python's texts of dicts instead of JSON.
        report = json.loads(source.json) if hasattr(source, "json") else source
        for which, offsets in (("endOffset", read), ("latestOffset", ends)):
            value = report.get(which)
            # Other sources have other offsets.
            with contextlib.suppress(TypeError, ValueError):
                offsets.update(flat(json.loads(value) if isinstance(value, str) else value or {}))
    return read, ends


def _ends_now(topics: set[str], name_server: str | Sequence[str] | None, connection: Mapping[str, Any]) -> Any:
    from rocketmq_spark.admin.admin import Admin

    with Admin(name_server, **connection) as admin:
        return {one.queue: one.max_offset for topic in sorted(topics) for one in admin.offsets(topic)}
