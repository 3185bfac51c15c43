"""Which rows of a partition are stored, as a multiset of contents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.block import read_block
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.model import MessageBlock, Span
from rocketmq_spark.arrow.numpy_hashes import Hashes
from rocketmq_spark.deliveries.effectively_once.stored_rows import QueueRows, StoredRows
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options

OPTIONS = parse_sink_options({"nameServer": "127.0.0.1:1", "topic": "T"}, {})
QUEUE, OTHER = MessageQueue("T", "b0", 1), MessageQueue("T", "b1", 0)
CONTENT = ContentHash()


def block_of(bodies: Sequence[bytes]) -> MessageBlock:
    return read_block(pa.record_batch({"body": pa.array(bodies, pa.binary())}), OPTIONS)


def part(
    bodies: Sequence[bytes], queue: MessageQueue = QUEUE, first: int = 0, content: ContentHash = CONTENT
) -> QueueRows:
    return QueueRows(queue, np.arange(first, first + len(bodies)), content.of_block(block_of(bodies), 0))


def taken(known: StoredRows, bodies: Sequence[bytes], bad: Sequence[int] = ()) -> list[int]:
    """Return the numbers of the rows that are stored."""
    mask = np.isin(np.arange(len(bodies)), bad) if bad else None
    found = known.take(block_of(bodies), 0, mask)
    if found is None:
        return []
    assert sum(span.rows for span in found.spans) == found.mask.sum() > 0
    rows: list[int] = np.flatnonzero(found.mask).tolist()
    return rows


@given(
    st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=30),
    st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=30),
    st.integers(1, 7),
    st.integers(1, 7),
)
def test_rows_take_equal_stored_rows_whatever_the_order_and_the_blocks(
    stored: list[bytes], own: list[bytes], cut_stored: int, cut_own: int
) -> None:
    known = StoredRows(CONTENT, (part(stored[at : at + cut_stored]) for at in range(0, len(stored), cut_stored)))
    sent: Counter[bytes] = Counter()
    for at in range(0, len(own), cut_own):
        some = own[at : at + cut_own]
        found = taken(known, some)
        sent.update(body for row, body in enumerate(some) if row not in found)
    assert sent == Counter(own) - Counter(stored)
    gone = set(stored) - set(own)
    surplus = Counter({body: count for body, count in (Counter(stored) - Counter(own)).items() if body not in gone})
    assert known.repeats == surplus.total()
    if gone:
        with pytest.raises(InputChangedError, match="the partition does not have now"):
            known.check_end()
    else:
        known.check_end()


def test_a_message_that_a_damaged_queue_returns_twice_is_one_stored_row() -> None:
    once = part([b"a", b"b"])
    twice = QueueRows(QUEUE, once.offsets[[0, 0, 1]], once.hashes[:, [0, 0, 1]], np.array([0, 0, 1]))
    known = StoredRows(CONTENT, [twice])
    assert len(known) == 2
    assert taken(known, [b"a", b"a", b"b"]) == [0, 2]
    known.check_end()
    assert known.repeats == 0


def test_many_rows_are_found_by_their_contents() -> None:
    bodies = [b"body %d" % row for row in range(2_000)]
    rng = random.Random(1)
    chosen = rng.sample(range(2_000), 600)
    known = StoredRows(CONTENT, [part([bodies[row] for row in chosen])])
    assert len(known) == 600
    assert taken(known, bodies) == sorted(chosen)
    assert taken(known, bodies) == []
    known.check_end()
    assert known.repeats == 0


def test_invalid_rows_take_none() -> None:
    known = StoredRows(CONTENT, [part([b"a", b"b"])])
    assert taken(known, [b"a", b"b", b"a"], bad=[0]) == [1, 2]


def test_the_places_of_rows_are_known() -> None:
    known = StoredRows(CONTENT, [part([b"d", b"e"], OTHER, 50), part([b"a", b"b", b"a"], QUEUE, 7)])
    found = known.take(block_of([b"b", b"e", b"x", b"a"]), 0, None)
    assert found is not None
    assert found.mask.tolist() == [True, True, False, True]
    assert set(found.spans) == {Span(QUEUE, 2, 7, 8), Span(OTHER, 1, 51, 51)}
    found = known.take(block_of([b"a", b"a"]), 0, None)
    assert found is not None
    assert list(found.spans) == [Span(QUEUE, 1, 9, 9)]


def test_a_stored_row_that_is_gone_is_named() -> None:
    known = StoredRows(CONTENT, [part([b"a", b"b", b"b", b"c"], QUEUE, 40)], partition_id=2)
    taken(known, [b"a", b"c"])
    with pytest.raises(InputChangedError, match=r"partition 2: .* stored 2 rows .* at offset 41 of T/b0/1"):
        known.check_end()
    empty = StoredRows(CONTENT, [])
    assert taken(empty, [b"a"]) == []
    empty.check_end()
    assert empty.repeats == 0


def test_numbers_of_rows_count_with_numbered_contents() -> None:
    content = ContentHash(numbered=True)
    bodies = [b"same"] * 5
    hashes = content.of_block(block_of(bodies), 10)
    stored = QueueRows(QUEUE, np.arange(2), hashes[:, 2:4], np.array([12, 13]))
    known = StoredRows(content, [stored])
    found = known.take(block_of(bodies), 10, None)
    assert found is not None
    assert found.mask.tolist() == [False, False, True, True, False]
    known = StoredRows(content, [stored])
    assert known.take(block_of(bodies), 0, None) is None
    with pytest.raises(InputChangedError, match="no row has its content with its number"):
        known.check_end()


def test_numbered_contents_are_compared_before_later_rows_are_known() -> None:
    content = ContentHash(numbered=True)
    hashes = content.of_block(block_of([b"a", b"b", b"c", b"d", b"e"]), 0)
    stored = QueueRows(QUEUE, np.arange(3), hashes[:, [3, 1, 4]], np.array([3, 1, 4]))
    known = StoredRows(content, [stored])
    assert known.take(block_of([b"a"]), 0, None) is None
    with pytest.raises(InputChangedError, match=r"stored 1 rows .* at offset 1 of"):
        known.take(block_of([b"c", b"b"]), 1, None)
    known = StoredRows(content, [stored])
    for row, body in enumerate([b"a", b"b", b"x", b"d", b"e"]):
        known.take(block_of([body]), row, None)
    known.check_end()


def test_rows_that_are_only_compared_are_all_left_out() -> None:
    bad = np.array([False, False, True, False])
    for parts, missing, spans in ([part([b"a"], QUEUE, 5)], 2, [Span(QUEUE, 1, 5, 5)]), ([], 3, []):
        known = StoredRows(CONTENT, parts, only_compares=True)
        found = known.take(block_of([b"x", b"a", b"y", b"z"]), 0, bad)
        assert found is not None
        assert found.mask.tolist() == [True, True, False, True]
        assert list(found.spans) == spans
        assert known.missing == missing


def test_contents_that_share_one_half_of_their_hashes_differ() -> None:
    hashes = CONTENT.of_block(block_of([b"a", b"b", b"c", b"d"]), 0)
    hashes[0] = 7
    own = hashes[:, [3, 0, 1]]

    class Shared(ContentHash):
        def of_block(self, block: MessageBlock, first_row: int) -> Hashes:
            return own

    known = StoredRows(Shared(), [QueueRows(QUEUE, np.arange(3), hashes[:, :3])])
    assert taken(known, [b"d", b"a", b"b"]) == [1, 2]
