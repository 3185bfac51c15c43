"""SPARK_ATTEMPT: each row of an effectively-once write has it, and no other row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.model.hashes import row_hash
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.records import messages_in
from tests.support.encoding import batch_options, encode

MAP = pa.map_(pa.string(), pa.string())
TOKEN = "abcdefghijklmnopqrstuv"


def rows(count: int, **columns: Any) -> pa.RecordBatch:
    bodies = pa.array([b"%d" % row for row in range(count)], pa.binary())
    return pa.record_batch({"body": bodies, **columns})


def sent(batches: list[pa.RecordBatch], options: SinkOptions, **more: Any) -> list[Mapping[str, str]]:
    """Return the properties of all messages, in the order of their rows."""
    messages = [message for batch, _ in encode(batches, options, **more) for message in messages_in(batch)]
    return [message.properties for message in sorted(messages, key=lambda message: message.properties["UNIQ_KEY"])]


@pytest.mark.parametrize("batching", [True, False])
def test_each_row_has_the_token_of_its_attempt(batching: bool) -> None:
    options = batch_options(topic="T", batching=batching, tags="t")
    found = sent([rows(3, keys=pa.array(["a", None, "b"])), rows(2)], options, attempt=TOKEN)
    assert [properties["SPARK_ATTEMPT"] for properties in found] == [TOKEN] * 5
    assert [properties.get("KEYS") for properties in found] == ["a", None, "b", None, None]
    assert not any("SPARK_ROW_ID" in properties for properties in found)
    assert not any("SPARK_ATTEMPT" in properties for properties in sent([rows(3)], options))


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("before", [0, 995, 9_990, 12_345])
def test_rows_of_an_ordered_write_have_their_numbers(before: int, batching: bool) -> None:
    options = batch_options(topic="T", ordered=True, queue_selector="hash", batching=batching)
    keys = pa.array(["k"] * 20)
    skipped = rows(before, shardingKey=pa.array(["k"] * before)) if before else None
    batches = [*([skipped] if skipped else []), rows(20, shardingKey=keys), rows(3, shardingKey=keys[:3])]
    found = sent(batches, options, attempt=TOKEN)[before:]
    assert [properties["SPARK_ATTEMPT"] for properties in found] == [f"{TOKEN}/{before + row}" for row in range(23)]


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "T"},
        {"topic": "T", "batching": False},
        {"topic": "T", "keep_row_id": True},
        {"topic": "T", "on_error": "skip"},
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_the_token_of_another_write_is_dropped(options: dict[str, Any], copied: bool) -> None:
    entries = [[("SPARK_ATTEMPT", "earlier"), ("a", "1")], [("SPARK_ATTEMPT", "earlier")], [("b", "2")], []]
    more = {"queueOffset": pa.array([1, 2, 3, 4])} if copied else {}
    batch = rows(4, properties=pa.array(entries, MAP), **more)
    found = sent([batch], batch_options(**options))
    assert [{name: value for name, value in one.items() if name != "UNIQ_KEY"} for one in found] == [
        {"a": "1"},
        {},
        {"b": "2"},
        {},
    ]
    found = sent([batch], batch_options(**options), attempt=TOKEN)
    assert {properties["SPARK_ATTEMPT"] for properties in found} == {TOKEN}


def test_the_token_is_no_part_of_a_row_id() -> None:
    assert row_hash("T", b"x", {"SPARK_ATTEMPT": TOKEN, "a": "1"}) == row_hash("T", b"x", {"a": "1"})
