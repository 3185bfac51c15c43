"""The reader of ``spark.read``: plans offset ranges on the driver, and yields record batches in the tasks.

Each time Spark plans a query, the driver queries name servers and brokers for routes and offsets, and then disconnects.
The reader holds no connections, because Spark pickles it into every task; a task opens its own. `PartitionReader` is
also the base of the stream's reader. Follows ``KafkaBatch.scala``.
"""

from __future__ import annotations

import dataclasses
import logging
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

    from rocketmq_spark.source.plan import ReadPlan

logger = logging.getLogger("rocketmq_spark.spark")


@dataclasses.dataclass(frozen=True, eq=False)
class ReadPartition(InputPartition):
    """What one task reads. Spark pickles the reader before it requests them, so this is no attribute of the reader."""

    plan: ReadPlan


class PartitionReader:
    """The base of batch and stream readers; `read` runs in every task.

    SchemaError: a read cannot have this `schema`. The `accumulator` gets the numbers of messages that a task skipped.
    """

    def __init__(
        self,
        options: SourceOptions,
        schema: StructType,
        accumulator: Accumulator[Any] | None = None,
    ) -> None:
        _check_columns(schema, raw=options.on_unreadable == "raw")
        self._options = options
        self._accumulator = accumulator
        self._schema: pa.Schema = arrow_schema(schema)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one partition (runs in a task)."""
        # If `partitions` returned none, Spark passes a plain `InputPartition`.
        if not isinstance(partition, ReadPartition):
            return
        from rocketmq_spark.metrics import ReadReport
        from rocketmq_spark.source.read import SkippedMessages, read_rows

        skipped = SkippedMessages()
        try:
            yield from read_rows(self._options, partition.plan, self._schema, skipped.policy(self._options))
        finally:
            skipped.close()
            if skipped.by_topic and self._accumulator is not None:
                self._accumulator.add(ReadReport(dict(skipped.by_topic)))

    def _partitions_of(self, plan: ReadPlan) -> list[InputPartition]:
        return [ReadPartition(task) for task in plan.tasks(self._options)]


class RocketMQBatchReader(PartitionReader, DataSourceReader):
    """The reader of ``spark.read``.

    It has no ``pushFilters``: Spark would use the narrowed ranges in every plan of the same DataFrame, so a union, a
    join or a later action would lack rows. Spark evaluates all filters.
    """

    def partitions(self) -> list[InputPartition]:
        """Ask the cluster for offsets, and return what each task reads (runs on the driver)."""
        from rocketmq_spark.source.plan import plan_read

        return self._partitions_of(plan_read(self._options))


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
                f"schema: column {field.name} may be null, because messages may lack it, or have a time that does not "
                "fit; make it nullable"
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
