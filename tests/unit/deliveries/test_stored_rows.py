"""Which rows an earlier attempt has stored, by their ids."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.arrow.block import read_block
from rocketmq_spark.arrow.columns import byte_column_or_nulls
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.model import MessageBlock, Span
from rocketmq_spark.deliveries.effectively_once.stored_rows import NONE_STORED, StoredRows, places_of
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options

OPTIONS = parse_sink_options({"nameServer": "127.0.0.1:1", "topic": "T", "rowId": "true"}, {})
IDS = RowIds("write", 3, 2)
PLACE = "write/3/2/"
QUEUE, OTHER = MessageQueue("T", "b0", 1), MessageQueue("T", "b1", 0)
# The bodies of the rows of `block_of`, by their ids.
BODIES: dict[str, bytes] = {}


def block_of(bodies: list[bytes], first_row: int = 0) -> MessageBlock:
    batch = pa.record_batch({"body": pa.array(bodies, pa.binary())})
    block = read_block(batch, OPTIONS, IDS, first_row)
    BODIES.update(zip(ids_of(block), bodies, strict=True))
    return block


def ids_of(block: MessageBlock) -> list[str]:
    (prop,) = [prop for prop in block.properties if prop.name == "SPARK_ROW_ID"]
    values = prop.column(block.rows)
    return [values.text(row) or "" for row in range(block.rows)]


def messages(
    ids: Sequence[str | None], bodies: Sequence[bytes] | None = None, first_offset: int = 0, **fields: object
) -> pa.RecordBatch:
    """Return messages as a recovery reads them; without `bodies` they have the content that `block_of` hashed."""
    if bodies is None:
        bodies = [BODIES.get(row_id or "", b"x") for row_id in ids]
    columns = {
        "rowId": ids,
        "queueOffset": range(first_offset, first_offset + len(ids)),
        "body": bodies,
        "flag": [0] * len(ids),
        "properties": [[("SPARK_ROW_ID", row_id or ""), ("UNIQ_KEY", "A1"), ("TRACE_ON", "true")] for row_id in ids],
        **fields,
    }
    return pa.record_batch({field.name: pa.array(columns[field.name], field.type) for field in StoredRows.SCHEMA})


def stored(ids: Sequence[str | None], bodies: Sequence[bytes] | None = None) -> StoredRows:
    return StoredRows.concat([StoredRows.in_batch(messages(ids, bodies), QUEUE, PLACE)])


def test_rows_are_found_by_their_numbers() -> None:
    bodies = [b"body %d" % row for row in range(1_000)]
    ids = ids_of(block_of(bodies))
    rng = random.Random(1)
    chosen = sorted(rng.sample(range(1_000), 300))
    shuffled = [ids[row] for row in rng.sample(chosen, len(chosen))]
    known = stored([*shuffled, None])
    assert known.numbers.tolist() == chosen
    assert known.repeats == 0
    for start, stop in ((0, 1), (0, 1_000), (137, 512), (999, 1_000)):
        found = known.among(block_of(bodies[start:stop], start), start, 2)
        rows = [] if found is None else (np.flatnonzero(found) + start).tolist()
        assert rows == [row for row in chosen if start <= row < stop]


@pytest.mark.parametrize(
    "other",
    [
        "write/3/21/0/0123456789abcdef",
        "write/3/2/-1/0123456789abcdef",
        "write/3/2/0/0123456789abcde",
        "write/3/2/0/0123456789ABCDEF",
        "write/3/2/0/0123456789abcdef/x",
        "write/3/2/" + "9" * 40 + "/0123456789abcdef",
        "write/3/2/",
        "wrote/3/2/0/0123456789abcdef",
        "",
        None,
        "é" * 40,
    ],
)
def test_other_ids_are_left_out(other: str | None) -> None:
    assert len(stored([other])) == 0


def test_repeats_are_counted() -> None:
    ids = ids_of(block_of([b"a", b"b", b"c"]))
    parts = [StoredRows.in_batch(messages(part), QUEUE, PLACE) for part in (ids, ids[:2], ids[:1])]
    assert StoredRows.concat(parts).repeats == 3
    assert len(StoredRows.concat(parts)) == 3
    assert StoredRows.concat([]).repeats == len(StoredRows.concat([])) == 0


def test_places_of_several_partitions() -> None:
    ids = [
        "write/3/2/5/0123456789abcdef",
        None,
        "write/3/11/0/0123456789abcdef",
        "write/3/x/0/0123456789abcdef",
        "write/3/",
    ]
    assert places_of(messages(ids), QUEUE, "write/3/").tolist() == [[2, 5], [11, 0]]
    assert places_of(messages([]), QUEUE, "write/3/").shape == (0, 2)


def test_the_places_of_rows_are_known() -> None:
    bodies = [b"a", b"b", b"c", b"d", b"e"]
    ids = ids_of(block_of(bodies))
    parts = [
        StoredRows.in_batch(messages(ids[3:], first_offset=50), OTHER, PLACE),
        StoredRows.in_batch(messages(ids[:2], first_offset=7), QUEUE, PLACE),
    ]
    known = StoredRows.concat(parts)
    assert list(known.spans(1, 4)) == [Span(OTHER, 2, 50, 51), Span(QUEUE, 1, 8, 8)]
    assert list(known.spans(2, 1)) == []
    sent = [Message("T", body, 0, {"SPARK_ROW_ID": row_id}) for row_id, body in zip(ids, bodies, strict=True)]
    assert known.places_of(sent) == [(QUEUE, 7), (QUEUE, 8), None, (OTHER, 50), (OTHER, 51)]
    assert NONE_STORED.places_of(sent) == [None] * 5


def test_a_message_with_the_id_of_a_row_and_another_content_is_another_row() -> None:
    (row_id,) = ids_of(block_of([b"a"]))
    sent = Message("T", b"a", 0, {"SPARK_ROW_ID": row_id})
    original = messages([row_id])
    others = [
        messages([row_id], [b"b"]),
        messages([row_id], flag=[1]),
        messages([row_id], properties=[[("SPARK_ROW_ID", row_id), ("colour", "red")]]),
        messages([row_id[:-1] + ("0" if row_id[-1] != "0" else "1")], [b"b"]),
    ]
    for other in others:
        forged = StoredRows.concat([StoredRows.in_batch(other, QUEUE, PLACE)])
        assert len(forged) == 1
        assert forged.places_of([sent]) == [None]
        with pytest.raises(InputChangedError, match=r"row 0 of partition 2: .* at offset 0 of T/b0/1"):
            forged.among(block_of([b"a"]), 0, 2)
        # In any order, the row itself is found beside it.
        for both in ([original, other], [other, original]):
            found = StoredRows.concat([StoredRows.in_batch(batch, QUEUE, PLACE) for batch in both])
            assert (len(found), found.repeats) == (2, 0)
            assert found.places_of([sent]) == [(QUEUE, 0)]
            with pytest.raises(InputChangedError, match="another producer stored messages with ids of this write"):
                found.among(block_of([b"a"]), 0, 2)


def test_a_changed_row_is_named() -> None:
    known = stored([*ids_of(block_of([b"a", b"b", b"c"]))])
    with pytest.raises(InputChangedError, match=r"row 1 of partition 2: .* \(1 of the next 3 stored rows differ\)"):
        known.among(block_of([b"a", b"B", b"c"]), 0, 2)


def test_rows_that_are_gone_are_named() -> None:
    known = stored(list(ids_of(block_of([b"a", b"b", b"c"]))))
    known.check_end(3, 2)
    NONE_STORED.check_end(0, 2)
    with pytest.raises(InputChangedError, match="stored row 2, and the partition has 2 rows now"):
        known.check_end(2, 2)


def test_ids_of_columns_share_memory_safely() -> None:
    # A column of ids may be a slice of a longer one.
    ids = pa.array(ids_of(block_of([b"a", b"b", b"c"]))).slice(1, 2)
    batch = messages(["x", *ids.to_pylist()]).slice(1, 2)
    assert StoredRows.in_batch(batch, QUEUE, PLACE).numbers.tolist() == [1, 2]
    assert len(byte_column_or_nulls(ids)) == 2
