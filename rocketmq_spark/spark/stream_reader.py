"""The reader of ``spark.readStream``: makes the offsets that Spark keeps in its checkpoint, and plans each micro-batch.

An offset keeps every queue that the query has seen, so that none is read from its beginning again. A queue that appears
later is read from its earliest message. A queue whose broker does not answer keeps its offset; after ``readTimeoutMs``
the query fails, unless ``failOnDataLoss=false``. A repeated micro-batch must read the same messages. If a queue is new
in it, no earlier offset has the queue's beginning, so the end offset has it, too. In the first micro-batch all queues
are new. Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import beginnings_in, flat, nested, stored_in
from rocketmq_spark.options.source import SOURCE_SPELLING, SourceOptions
from rocketmq_spark.spark.reader import PartitionReader

try:
    import pyspark.sql.streaming.datasource as limits
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    _LIMITS = True
except ImportError:
    # PySpark before 4.2 has no limits, and handles Trigger.AvailableNow itself.
    _LIMITS = False

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql.types import StructType

    from rocketmq_spark.source.stream_offsets import StreamOffsets

logger = logging.getLogger("rocketmq_spark.spark")

Offsets: TypeAlias = "dict[MessageQueue, int]"


class RocketMQStreamReader(PartitionReader, DataSourceStreamReader):
    """The reader of one streaming query, on the driver while the query runs."""

    _cluster: StreamOffsets | None = None
    # The offset where a new query begins, and whether Spark has asked for it.
    _initial: dict[str, Any] | None = None
    _initial_asked = False
    # The last offset that Spark has passed; None before the first.
    _last: dict[str, Any] | None = None
    _available: Offsets | None = None
    _target: Offsets | None = None
    _batch_at: float | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins."""
        self._initial_asked = True
        if self._initial is None and self._last is not None:
            # Spark has passed the end of a first micro-batch that it repeats. The end has the beginnings, and topics
            # may be gone since then.
            self._initial = {}
        if self._last is None:
            self._last = self._beginning()
        return self._beginning()

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: limits.ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return the end of the next micro-batch. (Releases before 4.2 pass neither its start nor a limit.)"""
        from rocketmq_spark.source.last_messages import MicroBatch

        passed = self._last if start is None else start
        # Before 4.2 a new query asks for this end before its start. A restarted query first passes its offset to
        # `partitions`, as an empty range; not where Spark wraps a source for Trigger.AvailableNow (off by default).
        # Then this end has the beginnings of a new query, which `partitions` takes into account.
        last = self._beginning() if passed is None else passed
        known = flat(last)
        cluster = self._offsets()
        if passed is not None:
            # All earlier messages are processed; Spark itself commits them only with the next micro-batch.
            self.commit(passed)
        if self._target is not None:
            self._target = cluster.completed(self._target, known)
        is_new = not known and self._target is None
        self._available = available = cluster.latest() if is_new else cluster.available(known, self._target)
        starts = cluster.begun(known, available)
        limited = self._limited(starts, available, limit)
        times = stored_in(last)
        ends, stored = cluster.last_messages.ended(limited, known, times)
        if self._target is not None:
            # Otherwise each micro-batch would report again that a queue ends before its target.
            self._target |= {queue: end for queue, end in ends.items() if end < limited[queue]}
        # Spark compares texts: an equal offset with another text would cause an empty micro-batch.
        if ends == known and all(times.get(queue, time) == time for queue, time in stored.items()):
            return last
        if last != self._initial:
            return nested(ends, {queue: starts[queue] for queue in starts.keys() - known.keys()}, stored)
        # After the ends, because a log only grows: a queue that still has its start's message had it at the end, too.
        return nested(ends, cluster.last_messages.first_starts(MicroBatch(starts, ends, times, stored)), stored)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the offsets available when the last micro-batch was planned, for the query's progress."""
        return None if self._available is None else nested(self._available)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return what each task of a micro-batch reads."""
        from rocketmq_spark.source.plan import plan_of

        passed, ends = flat(start), flat(end)
        starts = dict(passed)
        # Spark passes an empty range when a query restarts; its beginnings belong to an earlier micro-batch.
        if start != end:
            # Only the start of a query's first micro-batch is computed again, after a restart, so `end` overrides only
            # that one.
            first = self._initial_asked and start == self._initial and self._available is None
            begun = beginnings_in(end)
            if first and begun:
                # Release 1.0.0rc1 wrote no beginning for a queue without new messages.
                starts |= ends | begun
            else:
                # An end that was made before the checkpoint was passed may begin after messages that are not read yet.
                starts |= {queue: at for queue, at in begun.items() if queue not in starts and at < ends[queue]}
        # An overridden start has no store time.
        times = {queue: time for queue, time in stored_in(start).items() if starts[queue] == passed[queue]}
        end_times = stored_in(end)
        ranges = self._offsets().ranges(starts, ends, times, end_times)
        self._last = end
        # Without ``failOnDataLoss`` a range may end earlier.
        lasts = {part.queue: end_times.get(part.queue) for part in ranges if part.end == ends[part.queue]}
        return self._partitions_of(plan_of(ranges, self._offsets().requests, lasts))

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the group's offsets to the brokers, with ``commitOffsets``."""
        if self._options.commit_offsets:
            self._offsets().commit(flat(end))

    def stop(self) -> None:
        """Close the driver's connections."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _beginning(self) -> dict[str, Any]:
        if self._initial is None:
            # A first micro-batch without messages has this offset as its end.
            cluster = self._offsets()
            starts, times = cluster.last_messages.begun(cluster.starts())
            self._initial = nested(starts, starts, times)
        return self._initial

    def _limited(self, starts: Offsets, available: Offsets, limit: Any) -> Offsets:
        from rocketmq_spark.source.ranges import limited

        if not _LIMITS or limit is None or isinstance(limit, limits.ReadAllAvailable):
            return available
        waiting = sum(max(0, end - starts[queue]) for queue, end in available.items())
        now = self._offsets().clock()
        fewest, delay = self._options.min_offsets_per_trigger, self._options.max_trigger_delay / 1000
        if self._batch_at is None:
            self._batch_at = now
        if any(end < starts[queue] for queue, end in available.items()):
            # Otherwise each look for new messages would report again that the end is lost.
            delay = 0.0
        # With Trigger.AvailableNow no more messages will be read.
        if fewest is not None and self._target is None and waiting < fewest and now - self._batch_at < delay:
            return starts
        if waiting:
            self._batch_at = now
        most = limit.max_rows if isinstance(limit, limits.ReadMaxRows) else waiting
        if self._options.max_bytes_per_trigger is not None and waiting:
            nbytes = self._offsets().stored_bytes(starts, available)
            # A message may be larger than the limit.
            most = min(most, max(1, int(waiting * min(1.0, self._options.max_bytes_per_trigger / nbytes))))
        return limited(starts, available, most)

    def _offsets(self) -> StreamOffsets:
        # Connect only now: a reader is also made in processes that merely pickle it.
        if self._cluster is None:
            from rocketmq_spark.routing.connect import client_id_of
            from rocketmq_spark.source.plan import reading_transport
            from rocketmq_spark.source.stream_offsets import StreamOffsets

            options = self._options
            client_id = client_id_of(options.connection, f"{options.instance_name or 'spark'}#{os.getpid()}")
            self._cluster = StreamOffsets(options, reading_transport(options), time.monotonic, client_id)
        return self._cluster


class RefusedStreamReader(DataSourceStreamReader):
    """Raises the error of a reader that could not be made, when Spark asks for offsets, partitions or rows."""

    def __init__(self, error: RocketMQError) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815 - Spark's names


if _LIMITS:

    class LimitedStreamReader(RocketMQStreamReader, SupportsTriggerAvailableNow):
        """The reader on PySpark 4.2 and newer, with limits and Trigger.AvailableNow."""

        def getDefaultReadLimit(self) -> limits.ReadLimit:  # noqa: N802 - Spark's name
            """Return the options' limit of a micro-batch."""
            most, fewest = self._options.max_offsets_per_trigger, self._options.min_offsets_per_trigger
            if most is not None:
                return limits.ReadMaxRows(most)
            if self._options.max_bytes_per_trigger is not None:
                return limits.ReadMaxBytes(self._options.max_bytes_per_trigger)
            return limits.ReadAllAvailable() if fewest is None else limits.ReadMinRows(fewest)

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """Keep the present ends of the queues: the query ends when it has read them."""
            self._target = self._offsets().target()


def stream_reader(
    options: SourceOptions, schema: StructType, accumulator: Accumulator[Any] | None = None
) -> RocketMQStreamReader:
    """Return the reader of a streaming query; raises an OptionError for limits that this PySpark does not support."""
    if _LIMITS:
        return LimitedStreamReader(options, schema, accumulator)
    for field in ("max_offsets_per_trigger", "max_bytes_per_trigger", "min_offsets_per_trigger"):
        if getattr(options, field) is not None:
            name = SOURCE_SPELLING(field)
            raise OptionError(f"{name} requires PySpark 4.2 or newer, which can limit a micro-batch; leave it out")
    return RocketMQStreamReader(options, schema, accumulator)
