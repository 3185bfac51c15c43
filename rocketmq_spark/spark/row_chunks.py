"""Collects single rows for record batches: PySpark 4.0 passes the rows of a stream one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from rocketmq_spark.options.kinds import MIB

if TYPE_CHECKING:
    from pyspark.sql import Row

# At most this many rows or bytes become a record batch. 10,000 is the default of
# spark.sql.execution.arrow.maxRecordsPerBatch; 10,000 rows of 4 MiB would be 40 GiB.
_ROWS_PER_BATCH = 10_000
_BYTES_PER_BATCH = 4 * MIB


def chunks_of(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists, each up to the row that reaches `_ROWS_PER_BATCH` or `_BYTES_PER_BATCH`."""
    chunk: list[Row] = []
    nbytes = 0
    for row in rows:
        chunk.append(row)
        nbytes += _nbytes(row)
        if len(chunk) >= _ROWS_PER_BATCH or nbytes >= _BYTES_PER_BATCH:
            yield chunk
            chunk, nbytes = [], 0
    if chunk:
        yield chunk


def _nbytes(value: object) -> int:
    """Return the memory of a row's value, with everything that it contains."""
    inner: Iterable[object] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        inner = chain(value, value.values())
    return sys.getsizeof(value) + sum(map(_nbytes, inner))
