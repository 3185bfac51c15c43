"""`read_arrow`: reads topics as Arrow record batches in this process, without Spark.

It plans as the driver of a batch read, and reads all ranges as one task.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from rocketmq_spark.arrow.decode import UNREADABLE
from rocketmq_spark.errors import SchemaError
from rocketmq_spark.options.kinds import option_text
from rocketmq_spark.options.parsing import parse_source_options
from rocketmq_spark.options.source import SourceOptions, option_warnings
from rocketmq_spark.source.offset_resolver import OffsetResolver
from rocketmq_spark.source.read import SkippedMessages, read_rows, reading_transport
from rocketmq_spark.source.topic_queues import TopicQueues

logger = logging.getLogger("rocketmq_spark.source")

_TIME: Final = pa.timestamp("us", "UTC")
# The columns of `spark.read`, as Spark makes them from Arrow.
SCHEMA: Final = pa.schema(
    {
        "topic": pa.string(),
        "body": pa.binary(),
        "tags": pa.string(),
        "keys": pa.string(),
        "properties": pa.map_(pa.string(), pa.string()),
        "flag": pa.int32(),
        "brokerName": pa.string(),
        "queueId": pa.int32(),
        "queueOffset": pa.int64(),
        "msgId": pa.string(),
        "offsetMsgId": pa.string(),
        "bornTimestamp": _TIME,
        "storeTimestamp": _TIME,
        "bornHost": pa.string(),
        "reconsumeTimes": pa.int32(),
    }
)


def read_arrow(
    topic: str | None = None, *, columns: Sequence[str] | None = None, **options: str | int | bool
) -> pa.RecordBatchReader:
    """Read topics from the oldest message to the newest one, as record batches of about 10,000 rows.

    `options` are those of ``spark.read``, such as ``nameServer``, ``startingOffsets`` and ``subExpression``. `columns`
    are the columns to read, by default all; fewer columns take less time. With ``onUnreadable="raw"`` the column
    ``unreadable`` is added. The end of the read is fixed at the call. Rows of one queue are in order, and those of
    different queues alternate.

    Raises an OptionError, a SchemaError for an unknown column, and the errors of ``spark.read``: those of the plan at
    the call, those of the read at the next record batch.

    >>> table = rocketmq_spark.read_arrow("orders", nameServer="127.0.0.1:9876").read_all()  # doctest: +SKIP
    """
    texts = {name: option_text(value) for name, value in options.items()}
    if topic is not None:
        texts["path"] = topic
    parsed = parse_source_options(texts, os.environ, streaming=False)
    for warning in option_warnings(parsed):
        logger.warning("%s", warning)
    schema = _schema(parsed, columns)
    with contextlib.closing(reading_transport(parsed)) as transport:
        known = TopicQueues(parsed, transport, time.monotonic)
        ranges = OffsetResolver(parsed, transport, known, time.monotonic).ranges(known.find())
        filters_here = known.filters_in_reader(part.queue for part in ranges if part.size > 0)
        routes = known.routes(part.queue for part in ranges)

    def batches() -> Iterator[pa.RecordBatch]:
        with contextlib.closing(SkippedMessages()) as skipped:
            policy = skipped.policy(parsed)
            yield from read_rows(parsed, ranges, schema, routes, filters_here=filters_here, on_unreadable=policy)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _schema(options: SourceOptions, columns: Sequence[str] | None) -> pa.Schema:
    raw = options.on_unreadable == "raw"
    allowed = SCHEMA.append(pa.field(UNREADABLE, pa.string())) if raw else SCHEMA
    if columns is None:
        names = [name for name in allowed.names if options.include_properties or name != "properties"]
    else:
        names = [*columns, *([UNREADABLE] if raw and UNREADABLE not in columns else [])]
    if unknown := [name for name in names if name not in allowed.names]:
        raise SchemaError(
            f"columns: a read has no column {', '.join(unknown)}; its columns are {', '.join(allowed.names)}"
        )
    if not names or len(set(names)) < len(names):
        raise SchemaError(f"columns: name at least one column, and each once, not {names}")
    return pa.schema([allowed.field(name) for name in names])
