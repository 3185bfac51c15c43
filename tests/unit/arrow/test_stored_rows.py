"""Which rows an earlier attempt has stored, by their ids."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.arrow.block import MessageBlock, read_block
from rocketmq_spark.arrow.columns import byte_cells
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.stored_rows import NONE_STORED, StoredRows, places_of
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.options.parsing import parse_sink_options

OPTIONS = parse_sink_options({"nameServer": "127.0.0.1:1", "topic": "T", "rowId": "true"}, {})
IDS = RowIds("write", 3, 2)
PLACE = "write/3/2/"


def block_of(bodies: list[bytes], first_row: int = 0) -> MessageBlock:
    batch = pa.record_batch({"body": pa.array(bodies, pa.binary())})
    return read_block(batch, OPTIONS, IDS, first_row)


def ids_of(block: MessageBlock) -> list[str]:
    (prop,) = [prop for prop in block.properties if prop.name == "SPARK_ROW_ID"]
    values = prop.column(block.rows)
    return [values.text(row) or "" for row in range(block.rows)]


def stored(ids: list[str | None]) -> StoredRows:
    return StoredRows.of([StoredRows.of_ids(pa.array(ids, pa.string()), PLACE)])


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
    parts = [StoredRows.of_ids(pa.array(part), PLACE) for part in (ids, ids[:2], ids[:1])]
    assert StoredRows.of(parts).repeats == 3
    assert len(StoredRows.of(parts)) == 3
    assert StoredRows.of([]).repeats == len(StoredRows.of([])) == 0


def test_places_of_several_partitions() -> None:
    ids = [
        "write/3/2/5/0123456789abcdef",
        None,
        "write/3/11/0/0123456789abcdef",
        "write/3/x/0/0123456789abcdef",
        "write/3/",
    ]
    assert places_of(pa.array(ids), "write/3/").tolist() == [[2, 5], [11, 0]]
    assert places_of(pa.array([], pa.string()), "write/3/").shape == (0, 2)


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
    assert StoredRows.of_ids(ids, PLACE).numbers.tolist() == [1, 2]
    assert len(byte_cells(ids)) == 2
