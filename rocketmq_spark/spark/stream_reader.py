"""What ``spark.readStream`` needs: offsets that Spark keeps in its checkpoint, and the ranges of each micro-batch.

Rule 1: an offset names every queue that was ever seen, so that none is read twice; a queue that is new is read from its
        earliest message on.
Rule 2: a queue that nobody answers for stays where it is, and the others go on; after ``readTimeoutMs`` it is an error.
Rule 3: what is gone (a queue, expired messages) is reported by ``failOnDataLoss``; what was read is never read again.
Rule 4: an offset, once given to Spark, says the same for ever: a micro-batch that is run again reads the same messages.
        It has the beginnings of queues that are new in its micro-batch. Spark stores the end of a micro-batch only, and
        asks for the start of a query's first micro-batch each time it plans it.

Follows ``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.offset_json import beginnings_in, flat, nested
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.spark.reader import PartitionReader

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    # PySpark before 4.2: no limits, and Spark itself takes care of Trigger.AvailableNow.
    _LIMITS = False
else:
    _LIMITS = True

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql.types import StructType

    from rocketmq_spark.consumer.cluster import SourceCluster

logger = logging.getLogger("rocketmq_spark.spark")

Offsets: TypeAlias = "dict[MessageQueue, int]"


class RocketMQStreamReader(PartitionReader, DataSourceStreamReader):
    """The reader of one streaming query, on the driver while the query runs; parameters as of `PartitionReader`."""

    def __init__(
        self,
        options: ReaderOptions,
        schema: StructType,
        parallelism: int | None = None,
        accumulator: Accumulator[Any] | None = None,
    ) -> None:
        super().__init__(options, schema, parallelism, accumulator)
        self._cluster: SourceCluster | None = None
        # The offset where a new query begins.
        self._initial: dict[str, Any] | None = None
        # The last offset that Spark has mentioned.
        self._last: dict[str, Any] = {}
        self._available: Offsets | None = None
        self._target: Offsets | None = None
        self._batch_at: float | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a new query begins."""
        if self._initial is None:
            self._initial = self._last = nested(self._asked().starts())
        return self._initial

    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Return how far the next micro-batch goes. (Releases before 4.2 tell neither where it begins nor a limit.)"""
        last = self._last if start is None else start
        known = flat(last)
        cluster = self._asked()
        # All before that is done with; Spark itself says so no sooner than with the next micro-batch.
        self._tell(known)
        # Before 4.2 a query that goes on is told where it was by `partitions` of an empty range; not though where Spark
        # wraps a source for Trigger.AvailableNow, which is off by default: then every queue has to answer.
        unknown = not known and self._target is None
        if self._target is not None:
            self._target = cluster.completed(self._target, known)
        self._available = available = cluster.latest() if unknown else cluster.available(known, self._target)
        starts = cluster.begun(known, available)
        ends = self._limited(starts, available, limit)
        # Spark compares texts: the same offset in another form would be an empty micro-batch.
        if ends == known:
            return last
        new = starts if last == self._initial else starts.keys() - known.keys()
        return nested(ends, {queue: starts[queue] for queue in new})

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return what there was when the last micro-batch was planned, for the query's progress."""
        return None if self._available is None else nested(self._available)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return what each task of a micro-batch reads."""
        starts = flat(start)
        # Spark passes an empty range when a query restarts; its beginnings belong to an earlier micro-batch.
        if start != end:
            starts |= beginnings_in(end)
        ranges = self._asked().ranges(starts, flat(end))
        self._last = end
        return self._tasks(ranges, self._asked().queues)

    def commit(self, end: dict[str, Any]) -> None:
        """Tell the brokers how far the group has read, with ``commitOffsets``."""
        self._tell(flat(end))

    def stop(self) -> None:
        """Close the connections of the driver."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _tell(self, offsets: Offsets) -> None:
        if self._options.commit_offsets:
            self._asked().commit(offsets)

    def _limited(self, starts: Offsets, available: Offsets, limit: Any) -> Offsets:
        from rocketmq_spark.consumer.ranges import limited

        if not _LIMITS or limit is None or isinstance(limit, ReadAllAvailable):
            return available
        waiting = sum(max(0, end - starts[queue]) for queue, end in available.items())
        now = time.monotonic()
        fewest, delay = self._options.min_offsets_per_trigger, self._options.max_trigger_delay / 1000
        if self._batch_at is None:
            self._batch_at = now
        # With Trigger.AvailableNow what is there is all there will be.
        if fewest is not None and self._target is None and waiting < fewest and now - self._batch_at < delay:
            return starts
        if waiting:
            self._batch_at = now
        return limited(starts, available, limit.max_rows) if isinstance(limit, ReadMaxRows) else available

    def _asked(self) -> SourceCluster:
        # Not before Spark asks: a reader is made in processes that only pickle it.
        if self._cluster is None:
            from rocketmq_spark.client.connect import client_id_of
            from rocketmq_spark.client.read_rows import reading_transport
            from rocketmq_spark.consumer.cluster import SourceCluster

            options = self._options
            client_id = client_id_of(options, f"{options.instance_name or 'spark'}#{os.getpid()}")
            self._cluster = SourceCluster(options, reading_transport(options), time.monotonic, client_id)
        return self._cluster


class RefusedStreamReader(DataSourceStreamReader):
    """Stands for a reader that there can't be; whatever Spark asks of it raises why.

    Parameters
    ----------
    error : RocketMQError
    """

    def __init__(self, error: RocketMQError) -> None:
        self._error = error

    def initialOffset(self) -> NoReturn:  # noqa: N802 - Spark's name
        """Refuse a new query."""
        raise self._error

    def latestOffset(self, start: Any = None, limit: Any = None) -> NoReturn:  # noqa: ARG002, N802 - Spark's name
        """Refuse a query that goes on."""
        raise self._error

    def partitions(self, start: Any, end: Any) -> NoReturn:  # noqa: ARG002 - Spark's names
        """Refuse a query that goes on with a micro-batch that was cut short."""
        raise self._error

    def read(self, partition: InputPartition) -> NoReturn:  # noqa: ARG002 - Spark's name
        """Refuse a task, which there can't be."""
        raise self._error


if _LIMITS:

    class LimitedStreamReader(RocketMQStreamReader, SupportsTriggerAvailableNow):
        """The same on PySpark 4.2 and newer, which know limits and Trigger.AvailableNow."""

        def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
            """Return what the options say of a micro-batch's size."""
            options = self._options
            if options.max_offsets_per_trigger is not None:
                return ReadMaxRows(options.max_offsets_per_trigger)
            fewest = options.min_offsets_per_trigger
            return ReadAllAvailable() if fewest is None else ReadMinRows(fewest)

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """Take note of what there is now: the query ends when it has read that."""
            self._target = self._asked().target()


def stream_reader(
    options: ReaderOptions,
    schema: StructType,
    parallelism: int | None,
    accumulator: Accumulator[Any] | None = None,
) -> RocketMQStreamReader:
    """Return the reader of a streaming query; parameters as of `PartitionReader`.

    Raises
    ------
    OptionError
        This release of PySpark can't limit a micro-batch.
    """
    if _LIMITS:
        return LimitedStreamReader(options, schema, parallelism, accumulator)
    for name, value in (
        ("maxOffsetsPerTrigger", options.max_offsets_per_trigger),
        ("minOffsetsPerTrigger", options.min_offsets_per_trigger),
    ):
        if value is not None:
            raise OptionError(f"{name} needs PySpark 4.2 or newer, which can limit a micro-batch; leave it out here")
    return RocketMQStreamReader(options, schema, parallelism, accumulator)
