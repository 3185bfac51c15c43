from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.gather import chunks
from rocketmq_spark.arrow.split import fill_batches
from rocketmq_spark.protocol.remoting.records import MAX_BATCH_ROWS

item_sizes = st.lists(st.integers(1, 50), max_size=40)


@given(item_sizes, st.integers(1, 120), st.integers(0, 120), st.integers(0, 5))
def test_filled_batches_are_contiguous_and_within_their_limit(
    sizes: list[int], limit: int, nbytes: int, rows: int
) -> None:
    nbytes = min(nbytes, limit - 1) if rows else 0
    ends = np.cumsum([0, *sizes])
    pieces = list(fill_batches(ends, 0, len(sizes), limit=limit, nbytes=nbytes, rows=rows))
    assert [piece[0] for piece in pieces] == [0, *(piece[1] for piece in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == len(sizes)
    for start, stop, full in pieces:
        nbytes, rows = nbytes + sum(sizes[start:stop]), rows + stop - start
        assert nbytes <= limit or rows == 1
        if not full:
            assert stop == len(sizes)
        elif stop < len(sizes):
            assert nbytes + sizes[stop] > limit
        if full:
            nbytes = rows = 0


def test_pending_rows_count_towards_the_row_limit() -> None:
    ends = np.arange(11)
    assert list(fill_batches(ends, 0, 10, limit=1000, nbytes=5, rows=MAX_BATCH_ROWS - 4)) == [
        (0, 4, True),
        (4, 10, False),
    ]


def test_exactly_full_batch_is_complete() -> None:
    assert list(fill_batches(np.array([0, 5, 10]), 0, 2, limit=10, nbytes=0, rows=0)) == [(0, 2, True)]


@given(item_sizes, st.integers(1, 200), st.sets(st.integers(0, 39)))
def test_chunks_cover_every_row_once_and_isolate_marked_rows(sizes: list[int], limit: int, apart: set[int]) -> None:
    alone = np.array([row in apart for row in range(len(sizes))], np.bool_)
    found = list(chunks(np.array(sizes, np.int64), limit, alone))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(len(sizes)))
    for start, stop in found:
        most = limit + limit // 2 if stop == len(sizes) or alone[stop] else limit
        assert stop - start == 1 or (sum(sizes[start:stop]) <= most and not alone[start:stop].any())
