"""The reader of ``spark.read``: plans offset ranges on the driver, and yields record batches in the tasks.

Each time Spark plans a query, the driver asks name servers and brokers for routes and offsets, and then disconnects.
The reader holds no connections, because Spark pickles it into every task; a task opens its own. `PartitionReader` is
also the base of the stream's reader. Follows ``KafkaBatch.scala``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from rocketmq_spark.errors import SchemaError
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.spark.spark_api import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql.types import StructType

    from rocketmq_spark.model.route import TopicRouteData
    from rocketmq_spark.source.ranges import OffsetRange
    from rocketmq_spark.source.topic_queues import TopicQueues

logger = logging.getLogger("rocketmq_spark.spark")


@dataclasses.dataclass(frozen=True, eq=False)
class RangesPartition(InputPartition):
    """The ranges that one task reads, of different queues, and the routes of their brokers.

    A task asks a name server only if a broker does not answer. With `filters_here` the task filters by tags, not the
    broker. Spark pickles the reader before it asks for partitions, so this is no attribute of the reader.
    """

    ranges: tuple[OffsetRange, ...]
    routes: dict[str, TopicRouteData]
    filters_here: bool


class PartitionReader:
    """The base of batch and stream readers; `read` runs in every task.

    SchemaError: a read cannot have this `schema`. The `accumulator` gets the numbers of messages that a task skipped.
    """

    def __init__(
        self,
        options: SourceOptions,
        schema: StructType,
        parallelism: int | None = None,
        accumulator: Accumulator[Any] | None = None,
    ) -> None:
        _check_columns(schema, raw=options.on_unreadable == "raw")
        self._options = options
        self._parallelism = parallelism
        self._accumulator = accumulator
        self._schema: pa.Schema = arrow_schema(schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition (runs in a task)."""
        # If `partitions` returned none, Spark passes a plain `InputPartition`.
        if not isinstance(partition, RangesPartition):
            return
        from rocketmq_spark.metrics import ReadReport
        from rocketmq_spark.source.read import SkippedMessages, read_rows

        skipped = SkippedMessages()
        try:
            yield from read_rows(
                self._options,
                partition.ranges,
                self._schema,
                partition.routes,
                filters_here=partition.filters_here,
                on_unreadable=skipped.policy(self._options),
            )
        finally:
            skipped.close()
            if skipped.by_topic and self._accumulator is not None:
                self._accumulator.add(ReadReport(dict(skipped.by_topic)))

    def _tasks(self, ranges: list[OffsetRange], known: TopicQueues) -> list[InputPartition]:
        from rocketmq_spark.source.ranges import tasks_of

        options = self._options
        tasks = tasks_of(ranges, options.min_partitions, options.max_records_per_partition, self._parallelism)
        filters_here = known.filters_in_reader(part.queue for part in ranges if part.size > 0)
        routes = known.routes([part.queue for part in ranges])
        partitions: list[InputPartition] = []
        for task in tasks:
            brokers: dict[str, set[str]] = {}
            for part in task:
                brokers.setdefault(part.queue.topic, set()).add(part.queue.broker_name)
            # Only the routes of the task's brokers: a topic may have hundreds of brokers.
            of_task = {topic: routes[topic].only(names) for topic, names in brokers.items() if topic in routes}
            partitions.append(RangesPartition(task, of_task, filters_here))
        return partitions


class RocketMQBatchReader(PartitionReader, DataSourceReader):
    """The reader of ``spark.read``.

    It has no ``pushFilters``: Spark would use the narrowed ranges in every plan of the same DataFrame, so a union, a
    join or a later action would lack rows. Spark evaluates all filters.
    """

    def partitions(self) -> list[InputPartition]:
        """Ask the cluster for offsets, and return what each task reads (runs on the driver)."""
        from rocketmq_spark.source.offset_resolver import OffsetResolver
        from rocketmq_spark.source.read import reading_transport
        from rocketmq_spark.source.topic_queues import TopicQueues

        options = self._options
        with contextlib.closing(reading_transport(options)) as transport:
            known = TopicQueues(options, transport, time.monotonic)
            ranges = OffsetResolver(options, transport, known, time.monotonic).ranges(known.find())
            return self._tasks(ranges, known)


def _check_columns(schema: StructType, *, raw: bool) -> None:
    from rocketmq_spark.arrow.read_columns import COLUMNS_BY_NAME, column_names, spark_schema_of

    known = column_names(raw=raw)
    if not schema.names:
        raise SchemaError("schema: it names no column; leave .schema(...) out, or name the columns to read")
    for field in schema:
        kind = field.dataType.simpleString()
        if field.name == "unreadable" and not raw:
            raise SchemaError(
                "schema: only reads with onUnreadable=raw have the column unreadable; set it, or drop the column"
            )
        if field.name not in known:
            raise SchemaError(f"schema: a read has no column {field.name}; its columns are {spark_schema_of(known)}")
        column = COLUMNS_BY_NAME[field.name]
        if kind != column.type.spark:
            raise SchemaError(
                f"schema: column {field.name} is {column.type.spark} in a read, not {kind}; leave .schema(...) out, or "
                "cast after the read"
            )
        if column.nullable and not field.nullable:
            raise SchemaError(
                f"schema: column {field.name} may be null, because messages may lack it; make it nullable"
            )
        if raw and not field.nullable and column.of_unreadable is None:
            raise SchemaError(
                f"schema: with onUnreadable=raw column {field.name} is null for a record that cannot be decoded; make "
                "it nullable"
            )
    if raw and "unreadable" not in schema.names:
        raise SchemaError(
            "schema: with onUnreadable=raw the column unreadable (string) is required, because without it stored bytes "
            "look like bodies; add it, or set onUnreadable=skip"
        )
    if len(set(schema.names)) != len(schema.names):
        raise SchemaError(f"schema: a column is named twice in {', '.join(schema.names)}; name each once")
