"""`dedupe(df)`: keeps one of the rows with equal row ids and contents, because a retry may have stored a row again.

A row without an id, or whose content does not fit the hash in its id, always stays. Such rows need neither state nor
shuffle. Other rows are compared by a SHA-256 of id and content, because every user with the right to write to the
topic can construct another row with the same 64-bit hash.

A stream forgets rows after a time. Its watermark follows the time of the micro-batch, unless the user names a column. A
watermark from the messages' timestamps would lose rows: one queue may be read hours behind another, and Spark drops
rows that are older than the watermark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import OptionError, SchemaError
from rocketmq_spark.model.hashes import NOT_HASHED, ROW_ID, is_repeatable
from rocketmq_spark.spark.spark_api import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ID: Final = "__rocketmq_row_id"
_ARRIVAL: Final = "__rocketmq_arrival"

# Spark's metadata key of a column with a watermark (EventTimeWatermark.delayKey).
_WATERMARK: Final = "spark.watermarkDelayMs"


def dedupe(
    df: DataFrame, within: str | None = None, event_time: str | None = None, *, topic: str | None = None
) -> DataFrame:
    """Drop repeats of rows that were written with ``rowId``: of rows with equal ``SPARK_ROW_ID`` and content one stays.

    The content is topic, body, flag and properties, except for properties that brokers and clients set. Rows without
    an id stay. So do rows whose content does not fit the hash in their id: they were made from another row, because ids
    are copied when rows are read, changed and written. (An id of ``rowId=columns:...`` has no such hash.) A repeat with
    another id stays: the input came in another order or with other partitions.

    `df` is batch or streaming, and has the columns ``topic``, ``body``, ``flag`` and ``properties`` of a read;
    otherwise a SchemaError is raised. A column ``SPARK_ROW_ID`` replaces that entry of ``properties``, and `topic` the
    column ``topic``: the first topic of rows that were copied (``keepRowId=true``). `df` is evaluated twice, for rows
    with an id and for those without: in batch, ``cache`` what is expensive. A stream reads its source twice.

    A stream requires `within`, such as "1 hour": how long an id is remembered at least; later repeats stay. Without it,
    or with a watermark already, an OptionError is raised. If an aggregation follows, `event_time` is the timestamp
    column for the watermark of `within` (Spark allows one watermark). **Rows older than the watermark are then
    dropped**, as in any such query. Otherwise rows are timed by their micro-batch, so that none is late unless the
    driver's clock is set back by more than `within`.

    >>> orders = rocketmq_spark.dedupe(stream, within="1 hour")  # doctest: +SKIP
    """
    marked = _marked(df, topic)
    with_id = marked.where(f"{_ID} IS NOT NULL")
    if not df.isStreaming:
        once = with_id.dropDuplicates([_ID])
    else:
        if within is None:
            raise OptionError(
                'dedupe of a stream requires within (such as within="1 hour"): how long an id is remembered, which '
                "takes memory"
            )
        timed = [field.name for field in df.schema.fields if _WATERMARK in (field.metadata or {})]
        if timed:
            raise OptionError(
                f"dedupe: the stream has a watermark on {', '.join(timed)} already, and Spark allows no second one; "
                f"remove withWatermark, and call dedupe(df, within=..., event_time={timed[0]!r}) instead"
            )
        if event_time is None:
            with_id = with_id.selectExpr("*", f"current_timestamp() AS {_ARRIVAL}")
        once = with_id.withWatermark(event_time or _ARRIVAL, within).dropDuplicatesWithinWatermark([_ID]).drop(_ARRIVAL)
    return once.union(marked.where(f"{_ID} IS NULL")).drop(_ID)


# The user's entries of `properties` as sorted text, which differs for any two different maps.
_ENTRIES: Final = (
    "coalesce(array_join(transform(array_sort(map_entries(map_filter(properties, "
    f"(name, text) -> name NOT IN ({', '.join(map(repr, sorted(NOT_HASHED)))})))), "
    "entry -> concat(hex(binary(entry.key)), ':', coalesce(hex(binary(entry.value)), 'null'))), ','), '')"
)


def _marked(df: DataFrame, topic: str | None) -> DataFrame:
    """Return the rows with a column that repeats share, null for rows that cannot be repeats."""
    if ROW_ID not in df.columns and "properties" not in df.columns:
        raise SchemaError(
            f"dedupe: there is no column {ROW_ID}, nor a column properties that could hold it. The columns are "
            f"{', '.join(df.columns)}; keep one of the two until repeats are dropped"
        )
    row_id = ROW_ID if ROW_ID in df.columns else f"try_element_at(properties, '{ROW_ID}')"
    needed = ("body", "flag", "properties") if topic is not None else ("topic", "body", "flag", "properties")
    missing = [name for name in needed if name not in df.columns]
    if missing:
        raise SchemaError(
            f"dedupe: there is no column {' and no column '.join(missing)}: a row is dropped only if its topic, body, "
            "flag and properties fit the hash in its id. Call dedupe on what a read returns, before columns are "
            "selected or changed"
        )
    from pyspark.sql.types import BooleanType

    functions: Any
    if is_connect(df.sparkSession):
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions
    own_id, *columns = map(functions.expr, (f"string({row_id})", "binary(body)", "int(flag)", "properties"))
    topics = functions.expr("string(topic)") if topic is None else functions.lit(topic)
    if hasattr(functions, "arrow_udf"):
        from rocketmq_spark.arrow.hashes import repeatable

        fits = functions.arrow_udf(repeatable, BooleanType())
    else:
        # In PySpark 4.0 functions on Arrow arrays need pandas.
        fits = functions.udf(is_repeatable, BooleanType())
    body, flag, _ = columns
    parts = (own_id.cast("binary"), topics.cast("binary"), body, functions.expr(_ENTRIES).cast("binary"))
    # Digests have the same length, so that two different rows never give the same text.
    digests = [functions.sha2(part, 256) for part in parts]
    content = functions.concat(*digests, functions.coalesce(flag, functions.lit(0)).cast("string"))
    key = functions.unhex(functions.sha2(content.cast("binary"), 256))
    return df.withColumn(_ID, functions.when(fits(own_id, topics, *columns), key))
