"""What `dedupe` asks Spark for, as plans of Spark Connect, which need no JVM. tests/spark/test_dedupe.py runs them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import StructType

from rocketmq_spark import dedupe
from rocketmq_spark.errors import OptionError, SchemaError
from tests.support.sessions import ConnectSession

pytest.importorskip("grpc")


@pytest.fixture(autouse=True)
def connect_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PySpark make functions of Spark Connect, as its sessions do."""
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")


READ = {"topic": "string", "body": "binary", "flag": "integer", "properties": "string", "time": "timestamp"}


def frame_of(*columns: str, streaming: bool = False, watermark: str | None = None) -> Any:
    """Return a DataFrame of Spark Connect with these columns; `watermark` names one with a watermark."""
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.plan import Range

    schema = StructType()
    for name in columns:
        schema.add(name, READ.get(name, "string"), metadata={"spark.watermarkDelayMs": 1} if name == watermark else {})

    class Client:
        """Answers what `dedupe` asks about the frame; sends nothing."""

        def _set_relation_in_plan(self, plan: Any, relation: Any) -> None:
            """Do nothing, because no plan is sent."""

        def schema(self, *_: Any, **__: Any) -> StructType:
            return schema

        def _analyze(self, method: str, **_: Any) -> Any:
            assert method == "is_streaming"
            return SimpleNamespace(is_streaming=streaming)

    session: Any = ConnectSession()
    session.client = Client()
    return DataFrame(Range(0, 1, 1), session)


def chain(relation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and values of each relation, from the last one to the first, or to a union."""
    while True:
        kind = relation.WhichOneof("rel_type")
        values = getattr(relation, kind)
        yield kind, values
        if not hasattr(values, "input"):
            return
        relation = values.input


def parts_of(frame: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the relations of the two united parts: rows with an id, and rows without."""
    (drop, _), (union, united) = chain(frame._plan.plan(frame.sparkSession.client))
    assert (drop, union, united.set_op_type) == ("drop", "set_op", united.SET_OP_TYPE_UNION)
    assert united.is_all
    return list(chain(united.left_input)), list(chain(united.right_input))


def names(part: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in part]


def test_batch_drops_repeats_among_rows_with_an_id_only() -> None:
    with_id, without = parts_of(dedupe(frame_of(*READ)))
    assert names(with_id) == ["deduplicate", "filter", "with_columns", "range"]
    assert names(without) == ["filter", "with_columns", "range"]
    deduplicated = with_id[0][1]
    assert not deduplicated.within_watermark
    conditions = [part.condition.expression_string.expression for part in (with_id[1][1], without[0][1])]
    (column,) = deduplicated.column_names
    assert conditions == [f"{column} IS NOT NULL", f"{column} IS NULL"]


def test_stream_remembers_ids_by_the_time_of_their_micro_batch() -> None:
    with_id, without = parts_of(dedupe(frame_of(*READ, streaming=True), within="1 hour"))
    assert names(with_id) == ["drop", "deduplicate", "with_watermark", "project", "filter", "with_columns", "range"]
    assert names(without) == ["filter", "with_columns", "range"]
    values = dict(with_id)
    assert values["deduplicate"].within_watermark
    assert values["with_watermark"].delay_threshold == "1 hour"
    added = values["project"].expressions[-1].expression_string.expression
    assert added == f"current_timestamp() AS {values['with_watermark'].event_time}"


def test_stream_uses_the_column_that_the_user_names_for_its_watermark() -> None:
    with_id, _ = parts_of(dedupe(frame_of(*READ, streaming=True), within="1 hour", event_time="time"))
    values = dict(with_id)
    assert values["with_watermark"].event_time == "time"
    assert "project" not in values


def test_stream_without_a_time_or_with_a_watermark_is_rejected() -> None:
    with pytest.raises(OptionError, match="dedupe of a stream requires within"):
        dedupe(frame_of(*READ, streaming=True))
    with pytest.raises(OptionError, match=r"the stream has a watermark on time already.*event_time='time'"):
        dedupe(frame_of(*READ, streaming=True, watermark="time"), within="1 hour")


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (["topic", "body", "flag"], "there is no column SPARK_ROW_ID, nor a column properties"),
        (["body", "flag", "properties"], "there is no column topic: a row is dropped only if"),
        (["SPARK_ROW_ID", "topic"], "there is no column body and no column flag and no column properties"),
    ],
)
def test_frame_without_the_hashed_columns_is_rejected(columns: list[str], text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        dedupe(frame_of(*columns))


@pytest.mark.parametrize(
    ("columns", "topic", "row_id"),
    [
        (["topic", "body", "flag", "properties"], None, "string(try_element_at(properties, 'SPARK_ROW_ID'))"),
        (["SPARK_ROW_ID", "topic", "body", "flag", "properties"], None, "string(SPARK_ROW_ID)"),
        (["body", "flag", "properties"], "orders", "string(try_element_at(properties, 'SPARK_ROW_ID'))"),
    ],
)
def test_row_id_and_topic_are_compared_with_the_hash(columns: list[str], topic: str | None, row_id: str) -> None:
    with_id, _ = parts_of(dedupe(frame_of(*columns), topic=topic))
    (marked,) = dict(with_id)["with_columns"].aliases
    condition = marked.expr.unresolved_function.arguments[0]
    given = condition.common_inline_user_defined_function.arguments
    assert given[0].expression_string.expression == row_id
    if topic is None:
        assert given[1].expression_string.expression == "string(topic)"
    else:
        assert given[1].literal.string == topic
