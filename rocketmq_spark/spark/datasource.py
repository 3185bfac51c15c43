"""The class behind ``format("rocketmq")``: checks options and columns on the driver, and makes readers and writers.

Constructors open no connections, because Spark makes the data source and its writer twice per micro-batch. `writer`
asks servers for routes before it returns. `streamWriter` does so for the topics that options name, and keeps the
connection until it was idle for a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
)

from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.options.kinds import load_class
from rocketmq_spark.options.parsing import parse_sink_options, parse_source_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.options.source import SourceOptions, option_warnings
from rocketmq_spark.spark.reader import RAW_READ_SCHEMA, READ_SCHEMA, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.accumulators import Accumulator
    from pyspark.sql.types import StructType

logger = logging.getLogger("rocketmq_spark.spark")


def find_job_files() -> None:
    """Let this process import the modules that the job has added: Spark adds a folder to the path that stays empty."""
    for index, entry in enumerate(sys.path):
        folder, separator, archive = entry.rpartition(f"{os.sep}streaming_job")
        if separator and not os.path.exists(entry) and os.path.exists(folder + archive):
            sys.path[index] = folder + archive
            importlib.invalidate_caches()


class RocketMQDataSource(DataSource):
    """Writes a DataFrame, batch or streaming, to Apache RocketMQ, and reads topics as DataFrames.

    When a write returns, brokers have stored and acknowledged (``SEND_OK``) every row, unless ``onError``,
    ``requireStoreOk`` or ``sendMode=oneway`` allow less. Otherwise the write fails, and says how many rows and why. A
    retry may store a row twice, unless ``delivery`` is ``exactlyOnce``.

    docs/writing.md#columns has the columns of a write, and docs/options.md all options. Names are case-insensitive; an
    unknown option or column is an error.

    >>> metrics = rocketmq_spark.register(spark)
    >>> df.write.format("rocketmq").option("nameServer", "127.0.0.1:9876").option("topic", "orders").save()
    >>> metrics.show()
    >>> orders = spark.read.format("rocketmq").option("nameServer", "127.0.0.1:9876").load("orders")
    """

    # Set on the subclass that `register` makes for a session, because Python workers cannot ask the session. Spark
    # pickles the class into every task.
    _accumulator: ClassVar[Accumulator[Any] | None] = None
    # Whether Spark may run a task twice at once, and how many tasks its cluster runs at once, if known.
    _speculation: ClassVar[bool] = False
    _parallelism: ClassVar[int | None] = None

    @classmethod
    def name(cls) -> str:
        """Return the short name, as in ``format("rocketmq")``."""
        return "rocketmq"

    def schema(self) -> str:
        """Return the columns of a read. Malformed options are errors later, when the read is planned."""
        options = {name.lower(): text.strip().lower() for name, text in self.options.items()}
        columns = RAW_READ_SCHEMA if options.get("onunreadable") == "raw" else READ_SCHEMA
        if options.get("includeproperties") == "false":
            columns = columns.replace("properties map<string,string>, ", "")
        return columns

    def reader(self, schema: StructType) -> DataSourceReader:
        """Check the read, and return the reader of a batch query; `schema` may have fewer columns than a read."""
        from rocketmq_spark.spark.reader import batch_reader

        options = self._reader_options(streaming=False)
        return batch_reader(options, schema, self._parallelism, self._accumulator)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Check the read, and return the reader of a streaming query; the reader's methods raise its errors.

        PySpark would replace an error of this method by its own, because it stops a reader that does not exist.
        """
        from rocketmq_spark.spark.stream_reader import RefusedStreamReader, stream_reader

        find_job_files()
        try:
            options = self._reader_options(streaming=True)
            return stream_reader(options, schema, self._parallelism, self._accumulator)
        except RocketMQError as exc:
            return RefusedStreamReader(exc)

    def _reader_options(self, *, streaming: bool) -> SourceOptions:
        from rocketmq_spark.routing.connect import check_connection

        options = parse_source_options(self.options, os.environ, streaming=streaming)
        check_connection(options.connection)
        for warning in option_warnings(options):
            _warn_once(warning)
        return options

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Check the write, look up one route, and return the writer of a batch query."""
        if overwrite:
            raise OptionError(
                'mode("overwrite"): a RocketMQ topic can only be appended to; use .mode("append"), or delete and '
                "create the topic first (mqadmin deleteTopic, updateTopic)"
            )
        from rocketmq_spark.spark.planning import look_up_route, plan_transaction
        from rocketmq_spark.spark.writer import RocketMQBatchWriter

        columns = arrow_schema(schema)
        options = self._checked_options(columns, logger.warning)
        lookup = look_up_route(options, columns)
        write_id = str(uuid.uuid4())
        plan = plan_transaction(options, lookup, options.write_id or write_id)
        return RocketMQBatchWriter(options, self._accumulator, write_id=write_id, lookup=lookup, plan=plan)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Check the write, look up the route of the option topic, and return the writer of one micro-batch.

        Spark calls this twice per micro-batch, so warnings are logged once, and the route is kept. With `overwrite`
        (complete mode) each trigger appends the whole result, as Spark's Kafka sink does.
        """
        from rocketmq_spark.spark.planning import look_up_route_of_stream, plan_transaction
        from rocketmq_spark.spark.writer import stream_writer

        columns = arrow_schema(schema)
        options = self._checked_options(columns, _warn_once)
        if overwrite:
            _warn_once("outputMode complete: a topic cannot be truncated; every trigger appends the whole result")
        lookup = look_up_route_of_stream(options, columns, self.options.get("checkpointLocation"))
        if options.write_id is not None:
            raise OptionError("writeId is an option of batch writes: a stream has the numbers of its micro-batches")
        return stream_writer(options, self._accumulator, schema, lookup, plan_transaction(options, lookup))

    def _checked_options(self, columns: pa.Schema, warn: Callable[[str], None]) -> SinkOptions:
        from rocketmq_spark.routing.connect import check_connection
        from rocketmq_spark.sink.checks import check_columns

        options = parse_sink_options(self.options, os.environ)
        check_connection(options.connection)
        check_columns(columns, options)
        if options.custom_selector is not None:
            load_class("queueSelector", options.custom_selector, "select")
        if self._speculation and options.effectively_once:
            raise OptionError(
                "spark.speculation is true, and delivery=effectivelyOnce is for one attempt at a task at a time: set "
                "spark.speculation=false, or use delivery=exactlyOnce"
            )
        # A driver commits only the rows of one attempt at each task.
        if self._speculation and not options.row_id and not options.exactly_once:
            warn(
                "spark.speculation is true: a task that Spark starts twice stores its rows twice; set rowId=true, so "
                "that readers can recognise repeats, or spark.speculation=false"
            )
        if options.send_mode == "oneway":
            warn("sendMode=oneway: brokers acknowledge nothing, and rows may be lost unnoticed")
        if options.max_rate_per_second is None or options.max_rate_tasks is not None:
            return options
        # Neither a task nor the process that makes this writer can ask Spark how many tasks run at once.
        if self._parallelism is None:
            raise OptionError(
                "maxRatePerSecond needs to know how many tasks share it: call rocketmq_spark.register(spark) on "
                "classic Spark, or set the option maxRateTasks (how many tasks of the write run at once)"
            )
        return dataclasses.replace(options, max_rate_tasks=self._parallelism)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
