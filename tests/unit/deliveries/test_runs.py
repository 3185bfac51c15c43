"""Which requests without an answer are stored, by the contents of the rows in their queues."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from rocketmq_spark.arrow.numpy_hashes import Hashes
from rocketmq_spark.deliveries.effectively_once.runs import NOT_STORED, PARTLY, Sought, find_runs
from rocketmq_spark.deliveries.effectively_once.stored_rows import QueueRows
from rocketmq_spark.model.message import MessageQueue

QUEUE, OTHER = MessageQueue("T", "b0", 1), MessageQueue("T", "b0", 0)


def hashes(rows: str) -> Hashes:
    """Return a hash for each letter."""
    numbers = np.array([ord(row) for row in rows], np.uint64)
    return np.stack([numbers, numbers * np.uint64(3)])


def sought(rows: str, start: int = 0, queue: MessageQueue = QUEUE) -> Sought:
    return Sought(queue, start, hashes(rows))


def stored(rows: str, first: int = 0, queue: MessageQueue = QUEUE) -> QueueRows:
    """Return rows that are stored one after the other; a blank is another producer's message."""
    offsets = [first + place for place, row in enumerate(rows) if row != " "]
    return QueueRows(queue, np.array(offsets, np.int64), hashes(rows.replace(" ", "")))


@pytest.mark.parametrize(
    ("requests", "rows", "taken", "found"),
    [
        (["abc"], "abc", [], [0]),
        (["abc"], "xx  abc", [], [4]),
        (["abc"], "", [], [NOT_STORED]),
        (["abc"], "xyz", [], [NOT_STORED]),
        (["abc"], "ab", [], [PARTLY]),
        # A request is stored as a whole.
        (["abc"], "ab c", [], [PARTLY]),
        (["abc"], "cba", [], [PARTLY]),
        # No two requests share a run.
        (["aa", "aa"], "aa", [], [0, NOT_STORED]),
        (["aa", "aa"], "aaaa", [], [0, 2]),
        (["aa", "aaa"], "aaa", [], [NOT_STORED, 0]),
        (["aa", "aaa"], "aaaaa", [], [3, 0]),
        (["aa"], "aaaa", [(0, 2)], [2]),
        (["aa"], "aaa", [(0, 2)], [PARTLY]),
        (["aa"], "aa", [(0, 2)], [NOT_STORED]),
        (["ab", "cd"], "abcd", [(0, 2)], [NOT_STORED, 2]),
        # Another producer has copied rows.
        (["abc"], "ab abc abc", [], [3]),
        (["abc", "abc"], "ab abc abc", [], [3, 7]),
    ],
)
def test_requests_have_runs_of_their_own(
    requests: Sequence[str], rows: str, taken: Sequence[tuple[int, int]], found: Sequence[int]
) -> None:
    runs = [(QUEUE, *run) for run in taken]
    assert find_runs([sought(rows) for rows in requests], [stored(rows)], runs) == found
    shifted = [(QUEUE, first + 7, stop + 7) for first, stop in taken]
    expected = [first + 7 if first >= 0 else first for first in found]
    # In parts, as they are decoded.
    parts = [stored(rows[: len(rows) // 2], 7), stored(rows[len(rows) // 2 :], 7 + len(rows) // 2)]
    assert find_runs([sought(rows) for rows in requests], parts, shifted) == expected


def test_rows_before_the_start_of_a_request_are_not_its_own() -> None:
    assert find_runs([sought("ab", 2)], [stored("ab")], []) == [NOT_STORED]
    assert find_runs([sought("ab", 1)], [stored("abab")], []) == [2]
    assert find_runs([sought("ab", 2), sought("ab")], [stored("abab")], []) == [2, 0]


def test_rows_of_other_queues_are_not_its_own() -> None:
    assert find_runs([sought("ab")], [stored("ab", 0, OTHER)], []) == [NOT_STORED]
    parts = [stored("ab", 3, OTHER), stored("ab", 5)]
    assert find_runs([sought("ab"), sought("ab", 0, OTHER)], parts, [(OTHER, 5, 7)]) == [5, 3]


def test_as_many_requests_are_found_as_are_stored() -> None:
    rng = random.Random(3)
    for _ in range(300):
        requests = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 6))]
        there = [rng.random() < 0.5 for _ in requests]
        rows = " ".join(request for request, is_stored in zip(requests, there, strict=True) if is_stored)
        found = find_runs([sought(request) for request in requests], [stored(rows)], [])
        covered: set[int] = set()
        for request, first in zip(requests, found, strict=True):
            if first >= 0:
                assert rows[first : first + len(request)] == request
                run = set(range(first, first + len(request)))
                assert not covered & run
                covered |= run
        # Without a partly stored request, as many rows count as stored as there are.
        if PARTLY not in found:
            assert len(covered) == len(rows.replace(" ", ""))
