"""A data source that drops its rows and returns ten others: Spark's own part of the time of small writes and reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql import datasource
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

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
if TYPE_CHECKING:
    _StreamWriter = DataSourceStreamWriter
else:
    _StreamWriter = getattr(datasource, "DataSourceStreamArrowWriter", DataSourceStreamWriter)


class NothingStreamWriter(_Nothing, _StreamWriter):
    """For streams."""


class TenRowsReader(DataSourceReader):
    """Returns ten rows with the columns ``body`` and ``keys``."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"body": [b"x" * 100] * 10, "keys": ["key"] * 10})


class NothingDataSource(DataSource):
    """``format("nothing")``."""

    def schema(self) -> str:
        return "body binary, keys string"

    def reader(self, schema: StructType) -> TenRowsReader:
        return TenRowsReader()

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def writer(self, schema: StructType, overwrite: bool) -> NothingWriter:
        return NothingWriter()

    def streamWriter(self, schema: StructType, overwrite: bool) -> NothingStreamWriter:  # noqa: N802 - Spark's name
        return NothingStreamWriter()
