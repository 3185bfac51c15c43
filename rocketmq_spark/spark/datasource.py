"""The class behind ``format("rocketmq")``: checks options and columns on the driver, and makes readers and writers.

Constructors open no connections, because Spark makes the data source and its writer twice per micro-batch. `writer`
asks servers for routes before it returns. `streamWriter` does so for the topics that options name, and keeps the
connection until it was idle for a minute.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
)

from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.options.parsing import parse_source_options
from rocketmq_spark.options.source import SourceOptions, option_warnings
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema

if TYPE_CHECKING:
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
    retry may store a row twice, unless ``delivery`` is ``effectivelyOnce`` or ``exactlyOnce``.

    docs/writing.md#columns has the columns of a write, and docs/options.md all options. Names are case-insensitive; an
    unknown option or column is an error.

    >>> metrics = rocketmq_spark.register(spark)
    >>> df.write.format("rocketmq").option("nameServer", "127.0.0.1:9876").option("topic", "orders").save()
    >>> metrics.show()
    >>> orders = spark.read.format("rocketmq").option("nameServer", "127.0.0.1:9876").load("orders")
    """

    # Set on the subclass that `register` makes for a session, because Python workers cannot ask the session. Spark
    # pickles the class into every task.
    _session: ClassVar[SessionFacts] = SessionFacts()

    @classmethod
    def name(cls) -> str:
        """Return the short name, as in ``format("rocketmq")``."""
        return "rocketmq"

    def schema(self) -> str:
        """Return the columns of a read. Malformed options are errors later, when the read is planned."""
        from rocketmq_spark.arrow.read_columns import column_names, spark_schema_of

        options = {name.lower(): text.strip().lower() for name, text in self.options.items()}
        raw, properties = options.get("onunreadable") == "raw", options.get("includeproperties") != "false"
        return spark_schema_of(column_names(raw=raw, properties=properties))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Check the read, and return the reader of a batch query; `schema` may have fewer columns than a read."""
        from rocketmq_spark.spark.reader import RocketMQBatchReader

        options = self._reader_options(streaming=False)
        return RocketMQBatchReader(options, schema, self._session.accumulator)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Check the read, and return the reader of a streaming query; the reader's methods raise its errors.

        PySpark would replace an error of this method by its own, because it stops a reader that does not exist.
        """
        from rocketmq_spark.spark.stream_reader import RefusedStreamReader, stream_reader

        find_job_files()
        try:
            options = self._reader_options(streaming=True)
            return stream_reader(options, schema, self._session.accumulator)
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
        from rocketmq_spark.spark.planning import plan_batch_write

        return plan_batch_write(self.options, arrow_schema(schema), self._session, logger.warning)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Check the write, look up the route of the option topic, and return the writer of one micro-batch.

        Spark calls this twice per micro-batch, so warnings are logged once, and the route is kept. With `overwrite`
        (complete mode) each trigger appends the whole result, as Spark's Kafka sink does.
        """
        from rocketmq_spark.spark.planning import plan_stream_write

        writer = plan_stream_write(self.options, schema, self._session, _warn_once)
        if overwrite:
            _warn_once("outputMode complete: a topic cannot be truncated; every trigger appends the whole result")
        return writer


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)
