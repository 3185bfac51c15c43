"""Small record batches are encoded together, with the same messages as if each were encoded alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.batcher import LINGER_S, RemotingBatcher
from rocketmq_spark.arrow.joiner import JoiningBatcher
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.model.message import Ready
from rocketmq_spark.protocol.remoting.records import decode_batch
from tests.support.encoding import batch_options, joined, new_batcher, new_ids, queues_of

DAYS = 86_400.0


class CountingBatcher(RemotingBatcher):
    """Notes the rows of each record batch that it encodes."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.encoded: list[int] = []

    def add(self, rows: pa.RecordBatch, now: float) -> Iterator[Ready]:
        self.encoded.append(rows.num_rows)
        return super().add(rows, now)


def joining(topic: str | None = "orders", known: Sequence[str] = ("orders",), **limits: int) -> JoiningBatcher:
    """Return a batcher whose caller has found the routes of the `known` topics."""
    batcher = JoiningBatcher(new_batcher(batch_options(topic=topic)), topic, **limits)
    first = pa.RecordBatch.from_pydict({"body": ["first"] * len(known), "topic": known})
    assert [*batcher.add(first, 0.0), *batcher.flush()]
    assert set(batcher.new_topics()) == set(known)
    return batcher


def numbered(first: int, count: int, size: int = 1, **more: object) -> pa.RecordBatch:
    """Return rows whose bodies are their numbers, of `size` characters."""
    return pa.RecordBatch.from_pydict({"body": [str(first + row).zfill(size) for row in range(count)], **more})


def bodies(ready: list[Ready]) -> list[int]:
    messages = itertools.chain(*(decode_batch(joined(batch), batch.topic) for batch, _ in ready))
    return [int(message.body.lstrip(b"0") or b"0") for message in messages]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 10, 39, 40, 90]), st.sampled_from([6, 500]), st.booleans()),
        max_size=6,
    )
)
def test_rows_keep_their_order_and_their_number(parts: list[tuple[int, int, bool]]) -> None:
    # A hundredth of the usual limits.
    batcher = joining(max_rows=80, max_bytes=10_000)
    ready: list[Ready] = []
    first = 0
    for count, size, tagged in parts:
        tags = {"tags": pa.array(["t"] * count).dictionary_encode()} if tagged else {}
        ready += batcher.add(numbered(first, count, size, **tags), 0.0)
        first += count
        assert batcher.taken_rows == 1 + first
    ready += batcher.flush()
    assert bodies(ready) == list(range(first))
    assert batcher.pending_bytes == 0
    assert batcher.taken_rows == 1 + first


def test_small_record_batches_are_encoded_together() -> None:
    batcher = CountingBatcher(batch_options(topic="orders"), partition_id=3, queues_of=queues_of, unique_ids=new_ids())
    joins = JoiningBatcher(batcher, "orders")
    ready: list[Ready] = []
    for first in range(0, 20_000, 100):
        ready += joins.add(numbered(first, 100), 0.0)
        assert joins.new_topics() == ([] if first else ["orders"])
    assert batcher.encoded == [100, 8_000, 8_000]
    ready += joins.flush()
    assert batcher.encoded == [100, 8_000, 8_000, 3_900]
    assert bodies(ready) == list(range(20_000))


def test_large_rows_are_not_held_until_they_are_many() -> None:
    batcher = joining()
    ready = [batcher.add(numbered(row, 1, 200_000), 0.0) for row in range(6)]
    assert bodies(list(itertools.chain(*ready))) == list(range(5))


def test_held_rows_are_sent_after_the_linger_time() -> None:
    batcher = joining()
    assert list(batcher.add(numbered(0, 3), DAYS)) == []
    assert list(batcher.add(numbered(3, 3), DAYS + LINGER_S)) == []
    assert list(batcher.expired(DAYS + LINGER_S * 0.9, lambda _topic: True)) == []
    assert bodies(list(batcher.expired(DAYS + LINGER_S * 1.1, lambda _topic: True))) == list(range(6))


def test_held_rows_of_a_topic_that_has_lost_its_route_wait() -> None:
    batcher = joining(None, ["kept", "lost"])
    assert list(batcher.add(numbered(0, 2, topic=["kept", "lost"]), DAYS)) == []
    late = DAYS + 2 * LINGER_S
    assert list(batcher.expired(late, lambda topic: topic == "kept")) == []
    assert sorted(bodies(list(batcher.expired(late, lambda _topic: True)))) == [0, 1]


@pytest.mark.parametrize("topics", [["known", "new"], ["known", None]])
def test_rows_of_topics_without_a_known_route_are_not_held(topics: list[str | None]) -> None:
    batcher = JoiningBatcher(new_batcher(batch_options(topic=None), on_invalid=lambda _: None), None)
    list(batcher.add(numbered(0, 1, topic=["known"]), DAYS))
    assert batcher.new_topics() == ["known"]
    list(batcher.add(numbered(1, 1, topic=["known"]), DAYS))
    assert batcher.new_topics() == []
    list(batcher.add(numbered(2, 2, topic=topics), DAYS))
    assert batcher.new_topics() == [topic for topic in topics[1:] if topic]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_a_topic_that_is_no_utf8_makes_an_invalid_row(kind: pa.DataType) -> None:
    # As of `cast(binary as string)` in Spark.
    valid, other = numbered(0, 2, topic=["known", "known"]), pa.array([b"known", b"\xff\xfe"])
    plain = pa.Array.from_buffers(pa.string(), 2, other.buffers())
    rules: list[dict[str, int]] = []
    batcher = JoiningBatcher(
        new_batcher(batch_options(topic=None), on_invalid=lambda rows: rules.append(rows.by_rule())), None
    )
    list(batcher.add(valid, DAYS))
    assert batcher.new_topics() == ["known"]
    ready = [*batcher.add(numbered(2, 2, topic=_as(plain, kind)), DAYS), *batcher.flush()]
    assert bodies(ready) == [0, 1, 2]
    assert rules == [{"topic has an illegal character": 1}]


def _as(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)


def _dictionary(first: int) -> pa.Array:
    texts = pa.array([f"key-{first + number}" for number in range(100)])
    return pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), texts)


@pytest.mark.parametrize("column", ["keys", "properties"])
def test_lists_and_maps_of_dictionaries_are_not_joined(column: str) -> None:
    # 8 bits number the 100 texts of each record batch, and not the 300 texts of all.
    batcher, ends = joining(), pa.array(range(101), pa.int32())
    ready: list[Ready] = []
    for first in (0, 100, 200):
        of = _dictionary(first)
        listed = pa.ListArray.from_arrays(ends, of)
        more = listed if column == "keys" else pa.MapArray.from_arrays(ends, pa.array(["name"] * 100), of)
        ready += batcher.add(numbered(first, 100, **{column: more}), DAYS)
    ready += batcher.flush()
    messages = [message for batch, _ in ready for message in decode_batch(joined(batch), batch.topic)]
    name = "KEYS" if column == "keys" else "name"
    assert [message.properties[name] for message in messages] == [f"key-{number}" for number in range(300)]


def test_an_invalid_held_row_is_named_by_its_number_in_the_partition() -> None:
    batcher = joining()
    list(batcher.add(numbered(0, 7), 0.0))
    list(batcher.add(pa.RecordBatch.from_pydict({"body": ["x", ""]}), 0.0))
    with pytest.raises(InvalidRowError, match="row 9"):
        list(batcher.flush())
    assert batcher.taken_rows == 10


def test_rows_read_before_an_invalid_one_was_found_count_as_taken() -> None:
    batcher = joining()
    list(batcher.add(pa.RecordBatch.from_pydict({"body": ["x", ""]}), 0.0))
    with pytest.raises(InvalidRowError):
        list(batcher.add(numbered(0, 9_000), 0.0))
    assert batcher.taken_rows == 1 + 2 + 9_000
