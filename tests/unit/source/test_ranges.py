"""The ranges of each task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import ReadError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.source.ranges import MOST_ROWS, ROWS_WORTH_A_TASK, Gaps, OffsetRange, in_turns, limited, tasks_of

QUEUES = [MessageQueue("orders", broker, number) for broker in "abc" for number in range(4)]
starts = st.integers(0, 10**12)
sizes = st.one_of(st.integers(0, 5), st.integers(0, 3 * ROWS_WORTH_A_TASK), st.integers(0, 10**9))


@st.composite
def ranges(draw: st.DrawFn, size: st.SearchStrategy[int] = sizes) -> list[OffsetRange]:
    queues = draw(st.lists(st.sampled_from(QUEUES), unique=True))
    return [OffsetRange(queue, start := draw(starts), start + draw(size)) for queue in queues]


def joined(parts: Sequence[OffsetRange]) -> list[OffsetRange]:
    """Join adjacent parts; fail at a gap or an overlap."""
    found = []
    for queue, of_queue in itertools.groupby(parts, key=lambda part: part.queue):
        mine = list(of_queue)
        assert [part.end for part in mine[:-1]] == [part.start for part in mine[1:]]
        found.append(OffsetRange(queue, mine[0].start, mine[-1].end))
    return found


@given(starts, st.integers(1, 10**6), st.integers(1, 200))
def test_range_is_split_into_nearly_equal_parts(start: int, size: int, parts: int) -> None:
    whole = OffsetRange(QUEUES[0], start, start + size)
    cut = whole.cut(parts)
    assert joined(cut) == [whole]
    assert len(cut) == min(parts, size)
    found = {part.size for part in cut}
    assert min(found) > 0
    assert max(found) - min(found) <= 1


@given(
    ranges(st.one_of(st.integers(0, 5), st.integers(0, 10_000))),
    st.none() | st.integers(1, 300),
    st.none() | st.integers(100, 10**6),
)
def test_every_offset_is_read_once_and_in_the_order_of_its_queue(
    found: list[OffsetRange], min_partitions: int | None, max_records: int | None
) -> None:
    tasks = tasks_of(found, min_partitions, max_records)
    parts = sorted((part for task in tasks for part in task), key=lambda part: (part.queue, part.start))
    assert joined(parts) == sorted((one for one in found if one.size), key=lambda one: one.queue)
    # A task has at most one part of a queue, and at least one part.
    assert all(len({part.queue for part in task}) == len(task) >= 1 for task in tasks)


@given(ranges(st.integers(0, 5000)), st.integers(1, 300))
def test_number_of_tasks_is_at_least_min_partitions(found: list[OffsetRange], wanted: int) -> None:
    tasks = tasks_of(found, min_partitions=wanted)
    queues = sum(one.size > 0 for one in found)
    assert len(tasks) >= min(wanted, sum(one.size for one in found))
    # And not many more: each queue rounds up by less than one.
    assert len(tasks) <= max(wanted + queues, queues)


@given(ranges(st.integers(0, 10**6)), st.integers(5000, 10**6), st.none() | st.integers(1, 50))
def test_no_task_exceeds_max_records(found: list[OffsetRange], most: int, wanted: int | None) -> None:
    tasks = tasks_of(found, min_partitions=wanted, max_records=most)
    assert all(sum(part.size for part in task) <= most for task in tasks)


@given(ranges())
def test_small_ranges_are_combined_up_to_twice_the_task_size(found: list[OffsetRange]) -> None:
    total = sum(one.size for one in found)
    full = min(max(math.isqrt(total * ROWS_WORTH_A_TASK), ROWS_WORTH_A_TASK), MOST_ROWS)
    tasks = tasks_of(found)
    assert all(len(task) == 1 or sum(part.size for part in task) <= 2 * full for task in tasks)
    # Two adjacent parts would be too large for one task, so there are few small tasks.
    both = [sum(part.size for part in (*left, *right)) for left, right in itertools.pairwise(tasks)]
    assert all(size > full for size in both)


@pytest.mark.parametrize(
    ("rows", "tasks"), [(10_000, 1), (200_000, 2), (1_000_000, 4), (3_200_000, 8), (10_000_000, 16)]
)
def test_number_of_tasks_grows_with_the_square_root_of_the_messages(rows: int, tasks: int) -> None:
    # A task costs as much as 50,000 messages: four times as many messages are worth twice as many tasks.
    found = [OffsetRange(MessageQueue("orders", "a", number), 0, rows // 16) for number in range(16)]
    assert len(tasks_of(found)) == tasks


def test_few_messages_of_many_queues_are_one_task() -> None:
    found = [OffsetRange(QUEUES[number % 12], 0, 10) for number in range(12)]
    assert tasks_of(found) == [in_turns(found)]


def test_empty_ranges_make_no_task() -> None:
    empty = OffsetRange(QUEUES[0], 7, 7)
    assert tasks_of([empty]) == tasks_of([empty], 5, 10) == tasks_of([], 5) == []


@st.composite
def offsets(draw: st.DrawFn) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int]]:
    found = draw(ranges())
    return {one.queue: one.start for one in found}, {one.queue: one.end for one in found}


Offsets = dict[MessageQueue, int]


@given(offsets(), st.integers(1, 20) | st.integers(1, 10**7))
def test_limit_is_shared_in_proportion_to_the_waiting_messages(spans: tuple[Offsets, Offsets], limit: int) -> None:
    start, end = spans
    stop = limited(start, end, limit)
    assert list(stop) == list(end)
    assert all(start[queue] <= stop[queue] <= end[queue] for queue in end)
    sizes = {queue: end[queue] - start[queue] for queue in end}
    shares = {queue: stop[queue] - start[queue] for queue in end}
    waiting = sum(sizes.values())
    # Queues whose proportional share is below one message.
    small = sum(0 < size * limit < waiting for size in sizes.values())
    assert min(limit, waiting) <= sum(shares.values()) <= min(limit + small, waiting)
    if waiting > limit:
        assert all(abs(shares[queue] - size * limit / waiting) <= 1.001 for queue, size in sizes.items())


@given(offsets(), st.integers(1, 20) | st.integers(1, 10**7))
def test_every_queue_with_messages_advances_in_every_micro_batch(spans: tuple[Offsets, Offsets], limit: int) -> None:
    start, end = spans
    stop = limited(start, end, limit)
    assert {queue for queue in end if stop[queue] > start[queue]} == {q for q in end if end[q] > start[q]}


def test_small_queue_gets_one_message_although_others_use_up_the_limit() -> None:
    large, larger, small = QUEUES[:3]
    stop = limited(dict.fromkeys(QUEUES[:3], 0), {large: 10**6, larger: 2 * 10**6, small: 1}, 2)
    assert stop[small] == 1
    assert 2 <= sum(stop.values()) <= 3 + 2


def test_queue_whose_end_moved_back_does_not_reduce_other_shares() -> None:
    one, two = QUEUES[:2]
    assert limited({one: 50, two: 0}, {one: 10, two: 8}, 5) == {one: 10, two: 5}
    assert limited({one: 50, two: 0}, {one: 10, two: 8}, 8) == {one: 10, two: 8}


def test_impossible_offsets_make_a_bounded_number_of_tasks() -> None:
    lie = OffsetRange(QUEUES[0], 0, 2**63 - 1)
    assert tasks_of([lie]) == [(lie,)]
    assert len(tasks_of([lie], 100)) == 100
    with pytest.raises(ReadError, match=r"maxRecordsPerPartition=1000: .* 1000000 are allowed"):
        tasks_of([lie], None, 1000)


class Compared(MessageQueue):
    """A queue that counts how often two such queues are compared."""

    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return super().__eq__(other)

    __hash__ = MessageQueue.__hash__


def test_gaps_of_a_queue_are_not_compared_with_those_of_others() -> None:
    gaps, queues = Gaps(SourceOptions.of(fail_on_data_loss=False)), [Compared("t", "a", each) for each in range(100)]
    Compared.times = 0
    for queue in queues:
        gaps.add(queue, 0, 5)
    gaps.report(dict.fromkeys(queues, 5))
    assert Compared.times < 100
