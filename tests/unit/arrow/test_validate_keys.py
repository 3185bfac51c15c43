"""Rows without a key: invalid for a compaction topic, and sent alone as a probe while the topic's type is unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.columns import byte_column
from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.arrow.split import KeyCheck
from rocketmq_spark.arrow.validate import rows_without_key
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.protocol.compression import CompressionType, decompress
from rocketmq_spark.protocol.remoting.records import decode_batch
from tests.support.encoding import batch_options, encode, joined, new_batcher

# Rows of a batch that a 5.5.0 broker kept in a compaction topic, and rows that it dropped.
KEPT = ("k", " k", "k ", "\u3000k", "\u00a0", "\u2007", "\u202f", "\u200b", "\x00", "\x1b", "\x85", "\u3042", "\u4e2d")
DROPPED = (None, "", " ", "\t", "\x0b", "\x1c", " \t ", "\u3000", "\u2003", "\u1680", "\u2028", "\u205f", " \u3000")


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def check(asked: list[str]) -> Callable[..., KeyCheck]:
    def make(required: Mapping[str, bool | None], *, inner_batches: bool = False) -> KeyCheck:
        def keys_required(topics: Sequence[str]) -> Mapping[str, bool | None]:
            asked.extend(topics)
            return required

        return KeyCheck(keys_required, inner_batches=inner_batches)

    return make


def batch(**columns: Any) -> pa.RecordBatch:
    rows = max(len(values) for values in columns.values())
    return pa.RecordBatch.from_pydict({"body": [str(row) for row in range(rows)], **columns})


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_keys_that_a_broker_would_drop_count_as_missing(arrow_type: pa.DataType) -> None:
    values = [*KEPT, *DROPPED]
    column = byte_column(pa.array(["x", *values]).cast(arrow_type).slice(1))
    assert rows_without_key(column, len(values)).tolist() == [False] * len(KEPT) + [True] * len(DROPPED)
    assert rows_without_key(byte_column(pa.array(["\u3000"])), 1).tolist() == [True]
    assert rows_without_key(None, 2).tolist() == [True, True]
    assert rows_without_key(byte_column(pa.array(["\xe1"[:1]])), 1).tolist() == [False]


def test_rows_without_a_key_are_invalid_for_a_compaction_topic(check: Any) -> None:
    rows = batch(keys=["a", None, "b", " "])
    with pytest.raises(
        InvalidRowError, match=r"row 1 .*keys is null or blank; a compaction topic .*needs a key"
    ) as bad:
        encode([rows], check_keys=check({"orders": True}))
    assert bad.value.row == 1
    invalid: list[InvalidRows] = []
    [(sent, _)] = encode([rows], check_keys=check({"orders": True}), on_invalid=invalid.append)
    assert [message.body for message in decode_batch(joined(sent))] == [b"0", b"2"]
    assert [one.rows.tolist() for one in invalid] == [[1, 3]]
    with pytest.raises(InvalidRowError, match="keys is null"):
        encode([batch(body=["x"])], check_keys=check({"orders": True}))


def test_rows_of_inner_batches_are_invalid_for_a_compaction_topic(check: Any) -> None:
    with pytest.raises(InvalidRowError, match="batchType=inner to a compaction topic"):
        encode([batch(keys=["a"])], check_keys=check({"orders": True}, inner_batches=True))


def test_configuration_is_not_needed_while_every_row_has_a_key(check: Any, asked: list[str]) -> None:
    encode([batch(keys=["a", "b"])], check_keys=check({"orders": True}))
    assert asked == []
    encode([batch(keys=["a", None])], check_keys=check({"orders": False}))
    assert asked == ["orders"]


def test_keys_are_required_topic_by_topic(check: Any, asked: list[str]) -> None:
    rows = batch(topic=["plain", "compact", "plain", "keyed", "compact"], keys=[None, "k", "k", "k", None])
    invalid: list[InvalidRows] = []
    sent = encode(
        [rows],
        batch_options(),
        check_keys=check({"plain": False, "compact": True}),
        on_invalid=invalid.append,
    )
    assert sorted(asked) == ["compact", "plain"]
    assert [one.rows.tolist() for one in invalid] == [[4]]
    assert sum(ready.rows for ready, _ in sent) == 4


def test_rows_that_are_invalid_already_are_not_checked_for_a_key(check: Any, asked: list[str]) -> None:
    rows = batch(body=[b"", b"x", b"y", b"z"], topic=["a", "b/illegal", None, "a"], keys=[None, None, None, "k"])
    invalid: list[InvalidRows] = []
    sent = encode([rows], batch_options(), check_keys=check({}), on_invalid=invalid.append)
    assert asked == []
    assert [one.rows.tolist() for one in invalid] == [[0, 1, 2]]
    assert [ready.batch for ready, _ in sent] == [True]


def test_rows_without_a_body_and_a_valid_topic_are_invalid(check: Any, asked: list[str]) -> None:
    rows = batch(body=[None, b"", None], topic=[None, "b/illegal", "compact"], keys=["k", "k", "k"])
    invalid: list[InvalidRows] = []
    [(sent, _)] = encode([rows], batch_options(), check_keys=check({"compact": True}), on_invalid=invalid.append)
    assert (sent.topic, sent.rows) == ("compact", 1)
    assert [one.rows.tolist() for one in invalid] == [[0, 1]]
    assert asked == ["compact"]


@pytest.mark.parametrize("ordered", [False, True])
def test_first_row_without_a_key_goes_alone_if_configuration_is_unknown(check: Any, *, ordered: bool) -> None:
    settings = batch_options(ordered=ordered)
    columns = {"topic": ["a", "b", "a", "b", "a"], "keys": ["k", None, None, None, "k"], "shardingKey": ["s"] * 5}
    batcher = new_batcher(settings, check_keys=check({}))
    sent = [*batcher.add(batch(**columns), 0.0), *batcher.add(batch(**columns), 0.0), *batcher.flush()]
    alone = [(ready.topic, joined(ready)) for ready, _ in sent if not ready.batch]
    assert sorted(alone) == [("a", b"2"), ("b", b"1")]
    assert sum(ready.rows for ready, _ in sent) == 10


def test_rows_without_a_body_delete_keys_of_compaction_topics_only(check: Any, asked: list[str]) -> None:
    rows = batch(
        body=[b"v", None, b"", None, None, b"w"],
        topic=["compact", "compact", "compact", "plain", "compact", "plain"],
        keys=["a", "a", "b", "a", None, None],
    )
    invalid: list[InvalidRows] = []
    sent = encode(
        [rows], batch_options(), check_keys=check({"plain": False, "compact": True}), on_invalid=invalid.append
    )
    found = [(ready.topic, message.body, message.keys) for ready, _ in sent for message in decode_batch(joined(ready))]
    assert sorted(found, key=str) == [
        ("compact", b"", "a"),
        ("compact", b"", "b"),
        ("compact", b"v", "a"),
        ("plain", b"w", None),
    ]
    assert [one.rows.tolist() for one in invalid] == [[3, 4]]
    with pytest.raises(InvalidRowError, match=r"row 3 .*body is null"):
        encode([rows], batch_options(), check_keys=check({"plain": False, "compact": True}))


def test_a_deletion_has_no_body_if_bytes_lie_under_its_null(check: Any) -> None:
    masked, long = b"masked", b"z" * 5000
    bodies = pa.array([masked, long])
    hidden = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), *bodies.buffers()[1:]])
    assert hidden.to_pylist() == [None, long]
    rows = pa.RecordBatch.from_pydict({"body": hidden, "keys": ["a", "b"]})
    settings = batch_options(topic="orders", compress_type=CompressionType.ZLIB)
    sent = encode([rows], settings, check_keys=check({"orders": True}))
    bodies_of = {message.keys: message.body for ready, _ in sent for message in decode_batch(joined(ready))}
    assert bodies_of["a"] == b""
    assert decompress(bodies_of["b"], CompressionType.ZLIB.sys_flag) == long


def test_rows_without_a_body_are_invalid_where_they_cannot_be_in_a_batch(check: Any) -> None:
    rows = batch(body=[None], keys=["a"], delayMs=[5])
    with pytest.raises(InvalidRowError, match="body is null"):
        encode([rows], check_keys=check({"orders": True}))
    with pytest.raises(InvalidRowError, match="body is null"):
        encode([batch(body=[None], keys=["a"])], check_keys=check({"orders": None}))
