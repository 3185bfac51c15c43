"""`read_arrow`: reads topics as Arrow record batches in this process, without Spark.

It plans as the driver of a batch read, and reads all ranges as one task.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

import pyarrow as pa

from rocketmq_spark.arrow.read_columns import UNREADABLE, arrow_schema_of, column_names
from rocketmq_spark.errors import SchemaError
from rocketmq_spark.options.kinds import option_texts
from rocketmq_spark.options.parsing import parse_source_options
from rocketmq_spark.options.source import SourceOptions, option_warnings
from rocketmq_spark.source.plan import plan_read
from rocketmq_spark.source.read import SkippedMessages, read_rows

logger = logging.getLogger("rocketmq_spark.source")


def read_arrow(
    topic: str | None = None, *, columns: Sequence[str] | None = None, **options: str | int | bool | None
) -> pa.RecordBatchReader:
    """Read topics from the oldest message to the newest one, as record batches of about 10,000 rows.

    `options` are those of ``spark.read``, such as ``nameServer``, ``startingOffsets`` and ``subExpression``; None
    means not given. `columns` are the columns to read, by default all; fewer columns take less time. With
    ``onUnreadable="raw"`` the column ``unreadable`` is added. The end of the read is fixed at the call. Each read of
    the same offsets returns the same rows in the same order.

    Raises an OptionError, a SchemaError for an unknown column, and the errors of ``spark.read``: those of the plan at
    the call, those of the read at the next record batch.

    >>> table = rocketmq_spark.read_arrow("orders", nameServer="127.0.0.1:9876").read_all()  # doctest: +SKIP
    """
    texts = option_texts(options)
    if topic is not None:
        texts["path"] = topic
    parsed = parse_source_options(texts, os.environ, streaming=False)
    for warning in option_warnings(parsed):
        logger.warning("%s", warning)
    schema = _schema(parsed, columns)
    plan = plan_read(parsed)

    def batches() -> Iterator[pa.RecordBatch]:
        with contextlib.closing(SkippedMessages()) as skipped:
            yield from read_rows(parsed, plan, schema, skipped.policy(parsed))

    return pa.RecordBatchReader.from_batches(schema, batches())


def _schema(options: SourceOptions, columns: Sequence[str] | None) -> pa.Schema:
    raw = options.on_unreadable == "raw"
    known = column_names(raw=raw)
    if columns is None:
        names = column_names(raw=raw, properties=options.include_properties)
    else:
        names = [*columns, *([UNREADABLE] if raw and UNREADABLE not in columns else [])]
    if unknown := [name for name in names if name not in known]:
        raise SchemaError(f"columns: a read has no column {', '.join(unknown)}; its columns are {', '.join(known)}")
    if not names or len(set(names)) < len(names):
        raise SchemaError(f"columns: name at least one column, and each once, not {names}")
    return arrow_schema_of(names)
