"""Cancels the jobs of a batch write that Ctrl-C interrupts, and logs what is known to be stored.

PySpark's handler of SIGINT cancels all jobs by a call of the JVM. While the main thread waits for a write, this call
fails (``reentrant call``), because the write waits on the same connection. So the write would continue in the JVM.
This module cancels after the interrupted call, and only the jobs of the write, by a tag.

On Spark Connect the client itself interrupts the operation.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rocketmq_spark.spark.spark_api import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rocketmq_spark.metrics import WriteSummary

logger = logging.getLogger("rocketmq_spark.spark")

# The newest metrics of each classic session, whose accumulator gets the reports of its tasks.
METRICS: Final[weakref.WeakKeyDictionary[SparkSession, WriteSummary]] = weakref.WeakKeyDictionary()

_NEXT: Final = (
    "The next run stores its rows again, except with delivery=effectivelyOnce or exactlyOnce and the same writeId"
)


@contextlib.contextmanager
def cancelled_by_interrupt(session: SparkSession, metrics: WriteSummary | None = None) -> Iterator[None]:
    """Cancel the jobs of the block if a KeyboardInterrupt ends it, and log the rows that `metrics` have got."""
    connect = is_connect(session)
    tag = f"rocketmq-spark-{uuid.uuid4().hex}"
    before = metrics.keys() if metrics is not None else []
    if not connect:
        session.sparkContext.addJobTag(tag)
    try:
        yield
    except KeyboardInterrupt:
        outcome = "Spark was told to cancel it"
        if not connect:
            try:
                _close_connection(session)
                session.sparkContext.cancelJobsWithTag(tag)
            except Exception as exc:
                # Py4J raises errors of all kinds if the JVM is gone.
                outcome = f"it could not be cancelled ({type(exc).__name__}), and continues if Spark still runs"
        logger.warning("the write was interrupted, and %s. %s%s", outcome, _reported(metrics, before), _NEXT)
        raise
    finally:
        if not connect:
            with contextlib.suppress(Exception):
                session.sparkContext.removeJobTag(tag)


def _close_connection(session: SparkSession) -> None:
    """Close this thread's connection to the JVM, so that no later call gets the answer of the interrupted one.

    Py4J does the same, unless a second Ctrl-C interrupts that.
    """
    gateway = session.sparkContext._gateway
    # Py4J without pinned threads takes another connection for each call.
    find = getattr(gateway and gateway._gateway_client, "get_thread_connection", None)
    if find is not None and (connection := find()) is not None:
        connection.close()


def _reported(metrics: WriteSummary | None, before: list[tuple[str, int]]) -> str:
    """Return a sentence about the batch writes that have got reports since `before`."""
    if metrics is None:
        return "How many rows are stored is not known here. "
    # Streams have a number of the micro-batch. If other threads write batches meanwhile, the sentence includes theirs.
    new = set(metrics.keys()).difference(before)
    rows = sum(
        broker["rows"] for write_id, batch_id in new if batch_id < 0 for broker in metrics.to_dict(write_id).values()
    )
    if not rows:
        return "No task has reported stored rows, but running tasks may have stored some. "
    return (
        f"Tasks that had finished report {rows} acknowledged rows (with delivery=exactlyOnce, readers see none of them "
        "before the commit). Rows of other tasks may be stored, too. "
    )
