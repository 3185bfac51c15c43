"""Where the messages of a time begin: any queue, any answer of the broker."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rocketmq_spark.source.time_search import PULLED, UNKNOWN, Border, Stored, search_border, stored_records
from tests.unit.source.conftest import stored


class Queue:
    """The records of a queue; a pull returns up to `most` of them."""

    def __init__(self, records: Sequence[Stored], most: int = PULLED) -> None:
        self.records = list(records)
        self.most = most
        self.pulls = 0

    def pull(self, offset: int) -> list[Stored]:
        self.pulls += 1
        return [record for record in self.records if record.end > offset][: self.most]

    def border(self, time: int, guess: int, first: int = 0) -> Border:
        return search_border(time, first, self.records[-1].end, guess, self.pull)


def at_times(*times: int) -> Queue:
    return Queue([Stored(offset, offset + 1, time) for offset, time in enumerate(times)])


class LongQueue:
    """As many messages as `count`: those before `older` at time 1, the others at time 2."""

    def __init__(self, older: int, count: int) -> None:
        self.older, self.count, self.pulls = older, count, 0

    def pull(self, offset: int) -> list[Stored]:
        self.pulls += 1
        offsets = range(offset, min(offset + PULLED, self.count))
        return [Stored(one, one + 1, 1 if one < self.older else 2) for one in offsets]


@pytest.mark.parametrize("guess", range(-1, 10))
@pytest.mark.parametrize("time", range(12))
def test_every_answer_of_the_broker_leads_to_the_first_message_of_the_time(time: int, guess: int) -> None:
    stamps = (1, 3, 3, 3, 3, 7, 9, 9)
    expected = sum(stamp < time for stamp in stamps)
    found = at_times(*stamps).border(time, guess)
    assert found.offset == (expected if expected < len(stamps) else None)
    assert found.set_back is None
    if found.offset is None:
        assert found.last == 9


@pytest.mark.parametrize(("time", "guess"), [(3, 1), (4, 5), (0, 0), (10, 8), (6, 4)])
def test_one_pull_is_enough_if_the_broker_returns_a_near_offset(time: int, guess: int) -> None:
    queue = at_times(1, 3, 3, 3, 3, 7, 9, 9)
    assert queue.border(time, guess).offset in {sum(stamp < time for stamp in (1, 3, 3, 3, 3, 7, 9, 9)), None}
    assert queue.pulls == 1


@pytest.mark.parametrize("guess", [0, 1, 123_456, 7_000_000, 9_999_999, 10_000_000])
@pytest.mark.parametrize("older", [0, 1, 32_000, 5_000_000, 9_999_999, 10_000_000])
def test_millions_of_messages_of_one_time_need_few_pulls(older: int, guess: int) -> None:
    queue = LongQueue(older, 10_000_000)
    found = search_border(2, 0, queue.count, guess, queue.pull)
    assert found.offset == (older if older < queue.count else None)
    assert queue.pulls <= 32
    near = LongQueue(older, 10_000_000)
    search_border(2, 0, near.count, older + 30_000, near.pull)
    assert near.pulls <= 24


def test_expired_messages_before_the_first_one_left_are_passed_over() -> None:
    queue = Queue([Stored(offset, offset + 1, 5) for offset in range(100, 110)])
    assert queue.border(5, 0).offset == 100
    assert queue.border(6, 0).offset is None
    # Only an older message shows that no message of the time has expired.
    assert not any(queue.border(5, guess).older for guess in (0, 100, 105, 110))
    assert all(queue.border(6, guess).older for guess in (0, 100, 105, 110))
    assert Queue([]).pull(0) == []
    assert search_border(5, 0, 50, 20, Queue([]).pull) == Border()


def test_messages_stored_after_the_end_was_requested_are_not_used() -> None:
    queue = at_times(1, 2, 3, 4)
    assert search_border(3, 0, 2, 2, queue.pull) == Border(None, 2, older=True)


def test_gap_at_the_end_needs_few_pulls() -> None:
    # A broker drops messages without keys from a compaction topic, and counts them in the queue's end.
    queue = Queue([Stored(0, 1, 5), Stored(3, 4, 8)])
    for guess in (0, 3, 500_000, 1_000_000):
        queue.pulls = 0
        assert search_border(9, 0, 1_000_000, guess, queue.pull) == Border(None, 8, older=True)
        # The offset of the message, or one in the gap before it.
        assert search_border(6, 0, 1_000_000, guess, queue.pull).offset in (1, 2, 3)
        assert queue.pulls <= 60


def test_border_of_batches_is_the_first_offset_of_a_batch() -> None:
    records = [Stored(10 * number, 10 * number + 10, number) for number in range(20)]
    for most in (1, PULLED):
        for guess in range(201):
            assert Queue(records, most).border(7, guess).offset == 70


def test_times_that_go_back_are_reported_where_the_search_sees_them() -> None:
    found = at_times(1, 2, 9, 4, 5, 6).border(4, 3)
    assert found.offset == 2
    assert found.set_back == (Stored(2, 3, 9), Stored(3, 4, 4))
    assert at_times(1, 2, 3, 4, 4, 6).border(4, 3).set_back is None


def random_records(rng: random.Random, *, backwards: int) -> list[Stored]:
    """Records with gaps and batches; a clock goes back by at most `backwards`, relative to all earlier records."""
    records: list[Stored] = []
    offset, now, newest = rng.choice((0, 0, 5)), 100, 100
    for _ in range(rng.randint(1, 60)):
        length = rng.choice((1, 1, 1, 1, 8))
        records.append(Stored(offset, offset + length, now))
        newest = max(newest, now)
        offset += length + rng.choice((0, 0, 0, 0, 3))
        now = max(now + rng.choice((0, 0, 0, 1, 4)), newest - backwards)
        if backwards and rng.random() < 0.1:
            now = newest - rng.randint(0, backwards)
    return records


@pytest.mark.parametrize("seed", range(40))
def test_random_queues_and_answers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        backwards = rng.choice((0, 0, 20))
        queue = Queue(random_records(rng, backwards=backwards), rng.choice((1, 2, PULLED)))
        end, time = queue.records[-1].end, rng.randint(60, 260)
        found = queue.border(time, rng.randint(-5, end + 5), rng.choice((0, queue.records[0].start)))
        before = [record for record in queue.records if found.offset is None or record.start < found.offset]
        after = queue.records[len(before) :]
        # The neighbours of the border.
        assert not after or after[0].time >= time
        assert not before or before[-1].time < time
        if not backwards:
            assert all(record.time < time for record in before)
            assert all(record.time >= time for record in after)
            assert found.set_back is None
        # What is skipped or added is of times less than `backwards` away. So a wider span has everything.
        assert all(record.time < time + backwards for record in before)
        assert all(record.time >= time - backwards for record in after)


@pytest.mark.parametrize("seed", range(20))
def test_no_answers_of_a_hostile_broker_prolong_the_search(seed: int) -> None:
    rng = random.Random(seed)
    most, pulls = 2**63 - 1, 0

    def pull(offset: int) -> list[Stored]:
        nonlocal pulls
        pulls += 1
        number = lambda: rng.choice((0, -1, offset, offset + 1, offset - 1, most, rng.randrange(-most, most)))  # noqa: E731
        return [Stored(number(), number(), number()) for _ in range(rng.randint(0, 5))]

    for _ in range(50):
        pulls = 0
        first, end = sorted((rng.randrange(most), rng.choice((most, rng.randrange(most)))))
        found = search_border(rng.randrange(most), first, end, rng.randrange(-most, most), pull)
        assert found.offset is None or first <= found.offset <= end
        assert pulls <= 100


def test_records_that_cannot_be_decoded_have_no_time() -> None:
    def record(offset: int) -> bytearray:
        return bytearray(stored(offset, time=1_000 + offset))

    unknown_magic = record(8)
    unknown_magic[4:8] = b"\1\2\3\4"
    readable = [Stored(7, 8, 1_007), Stored(9, 10, 1_009)]
    assert stored_records(bytes(record(7) + unknown_magic + record(9))) == readable
    assert stored_records(bytes(record(7) + b"\0\0\0\1" + record(9))) == readable[:1]
    assert stored_records(b"\0") == []


def test_a_record_of_unknown_time_counts_as_new() -> None:
    queue = Queue([Stored(0, 1, 5), Stored(1, 2, UNKNOWN)])
    assert queue.border(9, 0) == Border(1, 5, older=True)
