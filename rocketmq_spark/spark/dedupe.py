"""`dedupe(df)`: rows that a retry has stored twice, read back once.

Rule 1: a row without an id is no repeat, nor is one whose content does not fit the hash in its id: ids travel along
        where rows are read, changed and written. Such rows bypass the removal in a branch of their own, so that no
        state and no shuffle can take one for another; `df` is evaluated in both branches.
Rule 2: of rows with one id one stays; which one is Spark's choice, as they say the same.
Rule 3: a stream forgets an id no sooner than `within` after it came. Rows are timed by their arrival, not by their
        storing: of two queues one may be read hours behind the other, and Spark drops what its watermark calls late.

The ids are those of `rocketmq_spark.arrow.row_id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import OptionError, SchemaError
from rocketmq_spark.spark.register import is_connect
from rocketmq_spark.wire.row_hash import ROW_ID, is_repeatable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ID: Final = "__rocketmq_row_id"
_ARRIVAL: Final = "__rocketmq_arrival"

# What Spark leaves on a column that a watermark is on (EventTimeWatermark.delayKey).
_WATERMARK: Final = "spark.watermarkDelayMs"


def dedupe(
    df: DataFrame, within: str | None = None, event_time: str | None = None, *, topic: str | None = None
) -> DataFrame:
    """Drop repeats of rows that were written with ``rowId``: of rows with equal ``SPARK_ROW_ID`` one stays.

    Rows without an id all stay, and so do rows whose topic, body, flag and properties do not fit the hash in their id:
    they were made of another row. An id is never given to two rows of one write (with ``rowId=columns:...`` rows equal
    in these columns are one row, and nothing is verified), so nothing but a repeat is dropped; where a repeat has
    another id, because the input came in another order or with other partitions, it stays.

    `df` is evaluated twice, once for rows with an id and once for those without: in batch, ``cache`` what is dear; a
    stream reads its source twice, and counts it so in its progress.

    Parameters
    ----------
    df : pyspark.sql.DataFrame
        Batch or streaming, Classic or Connect, with the columns ``topic``, ``body``, ``flag`` and ``properties`` as a
        read returns them. A column ``SPARK_ROW_ID`` takes the place of that entry of ``properties``.
    within : str or None, default None
        Of a stream, and required there: how long an id is remembered at least, as in "1 hour"; a repeat that comes
        later stays. A batch DataFrame is looked at as a whole, whatever this says.
    event_time : str or None, default None
        Of a stream: the timestamp column to set the watermark of `within` on, for an aggregation that follows (Spark
        allows one watermark on the way). **Rows older than the watermark are then dropped**, as in any such query.
        None: rows are timed by the micro-batch that they come with, so that none is late as long as the driver's clock
        is not set back by more than `within`.
    topic : str or None, default None
        The topic that the rows were first written to, where `df` is of a copy (``keepRowId=true``). None: the column
        ``topic``.

    Returns
    -------
    pyspark.sql.DataFrame
        With the columns of `df`.

    Raises
    ------
    SchemaError
        A column is missing.
    OptionError
        A stream without `within`, or one that has a watermark already.

    Examples
    --------
    >>> orders = rocketmq_spark.dedupe(stream, within="1 hour")  # doctest: +SKIP
    """
    marked = _marked(df, topic)
    with_id = marked.where(f"{_ID} IS NOT NULL")
    if not df.isStreaming:
        once = with_id.dropDuplicates([_ID])
    else:
        if within is None:
            raise OptionError(
                'dedupe of a stream needs within (such as within="1 hour"): how long an id is remembered; each takes '
                "memory until then"
            )
        _refuse_second_watermark(df)
        if event_time is None:
            with_id = with_id.selectExpr("*", f"current_timestamp() AS {_ARRIVAL}")
        once = with_id.withWatermark(event_time or _ARRIVAL, within).dropDuplicatesWithinWatermark([_ID]).drop(_ARRIVAL)
    return once.union(marked.where(f"{_ID} IS NULL")).drop(_ID)


def _marked(df: DataFrame, topic: str | None) -> DataFrame:
    """Return the rows with a column of their ids, null where a row is no repeat of any other."""
    row_id = _row_id(df)
    needed = ("body", "flag", "properties") if topic is not None else ("topic", "body", "flag", "properties")
    missing = [name for name in needed if name not in df.columns]
    if missing:
        raise SchemaError(
            f"dedupe: there is no column {' and no column '.join(missing)}: a row is dropped only if its topic, body, "
            "flag and properties fit the hash in its id. Call dedupe on what a read returns, before columns are "
            "selected or changed"
        )
    functions: Any
    if is_connect(df.sparkSession):
        from pyspark.sql.connect import functions
    else:
        from pyspark.sql import functions
    own_id, *columns = map(functions.expr, (f"string({row_id})", "binary(body)", "int(flag)", "properties"))
    topics = functions.expr("string(topic)") if topic is None else functions.lit(topic)
    return df.withColumn(_ID, functions.when(_verification(functions)(own_id, topics, *columns), own_id))


def _verification(functions: Any) -> Any:
    if not hasattr(functions, "arrow_udf"):
        # In PySpark 4.0 only functions that need pandas take Arrow arrays.
        return functions.udf(is_repeatable, "boolean")
    from rocketmq_spark.arrow.row_id import repeatable

    return functions.arrow_udf(repeatable, "boolean")


def _row_id(df: DataFrame) -> str:
    if ROW_ID in df.columns:
        return ROW_ID
    if "properties" in df.columns:
        return f"try_element_at(properties, '{ROW_ID}')"
    raise SchemaError(
        f"dedupe: there is no column {ROW_ID}, nor a column properties that could hold it; there are "
        f"{', '.join(df.columns)}: keep one of the two until repeats are dropped"
    )


def _refuse_second_watermark(df: DataFrame) -> None:
    on = [field.name for field in df.schema.fields if _WATERMARK in (field.metadata or {})]
    if on:
        raise OptionError(
            f"dedupe sets a watermark, and Spark allows no second one after that on {', '.join(on)}: call dedupe on "
            f"the stream without it, as in dedupe(df, within=..., event_time={on[0]!r})"
        )
