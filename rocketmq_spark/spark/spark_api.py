"""Classes of PySpark's data source API, for modules that also run on PySpark 3.5, which has no such API."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage
    from pyspark.sql.types import StructType

    STREAM_ARROW_WRITER: type[DataSourceStreamWriter] | None
else:
    try:
        import pyspark.sql.datasource as _api
        from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

        # PySpark 4.0 has no streaming Arrow writer.
        STREAM_ARROW_WRITER = getattr(_api, "DataSourceStreamArrowWriter", None)
    except ImportError:
        DataSourceArrowWriter = DataSourceStreamWriter = WriterCommitMessage = object
        STREAM_ARROW_WRITER = None

QUERY_ID: Final = "sql.streaming.queryId"
"""The local property with the id of a query, in the query's thread and tasks."""

__all__ = ["STREAM_ARROW_WRITER", "DataSourceArrowWriter", "DataSourceStreamWriter", "WriterCommitMessage"]


@dataclass(frozen=True)
class SessionFacts:
    """What `register` knows of a session, and Python workers cannot ask."""

    accumulator: Accumulator[Any] | None = None
    speculation: bool = False  # Spark may run a task twice at once
    parallelism: int | None = None  # How many tasks the cluster runs at once
    metrics_id: str = ""  # On Spark Connect, of the metrics that read records of writes
    query_id: str = ""  # Of the query in whose thread this is; empty in other threads, and on Spark Connect

    @classmethod
    def of(
        cls, session: SparkSession, accumulator: Accumulator[Any] | None = None, metrics_id: str = ""
    ) -> SessionFacts:
        """Return the facts of a session. A session of Spark Connect does not know its parallelism."""
        speculation = (session.conf.get("spark.speculation", "false") or "").lower() == "true"
        if is_connect(session):
            return cls(accumulator, speculation, metrics_id=metrics_id)
        context = session.sparkContext
        query_id = context.getLocalProperty(QUERY_ID) or ""
        return cls(accumulator, speculation, context.defaultParallelism, metrics_id, query_id)


def is_connect(session: SparkSession) -> bool:
    """Return whether a session is one of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect.")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark uses for `schema` between the JVM and Python.

    Raises a SchemaError for a column of a type that Spark cannot convert, which Spark's own error does not name.
    """
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType as Columns

    # Newer releases require a time zone for timestamps; older ones have no such parameter, and use UTC.
    required: dict[str, Any] = (
        {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
    )
    try:
        return to_arrow_schema(schema, **required)
    except Exception:
        for field in schema.fields:
            try:
                to_arrow_schema(Columns([field]), **required)
            except Exception as exc:
                name, kind = field.name, field.dataType.simpleString()
                remedy = f"CAST({name} AS STRING)"
                if kind == "map<void,void>":
                    remedy = f"CAST({name} AS MAP<STRING,STRING>)"
                raise SchemaError(
                    f"column {name} is {kind}, which Spark cannot convert to Arrow: drop it, or use {remedy}"
                ) from exc
        raise
