"""A data source that drops its rows; it shows Spark's own part of the time of a small write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import datasource
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter, WriterCommitMessage

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class _Nothing:
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class NothingWriter(_Nothing, DataSourceArrowWriter):
    """For batches."""


# PySpark 4.0 has no Arrow writer for streams.
_STREAM_WRITER: type[DataSourceStreamWriter] = getattr(
    datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter
)


class NothingStreamWriter(_Nothing, _STREAM_WRITER):
    """For streams."""


class NothingDataSource(DataSource):
    """``format("nothing")``."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def writer(self, schema: StructType, overwrite: bool) -> NothingWriter:
        return NothingWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> NothingStreamWriter:  # noqa: N802 - Spark's name
        return NothingStreamWriter()
