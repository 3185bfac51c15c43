"""Searches the offset in a queue where the messages of a time begin: a broker's answer, verified by pulls around it.

Brokers of release 4.9.7 answer with the nearest message, or with any message of the time
(docs/internals/reads.md#search-by-time). So the answer is only the place where `search_border` begins.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.records import decode_record_with_text, record_at
from rocketmq_spark.protocol.remoting.unwrap import offsets_of

# The messages of one pull: a border needs two, and the nearest message may be the one before it.
PULLED: Final = 3
# The time of a record that cannot be decoded, if no later record has a known time. It is later than any other time, so
# a read from a time never skips the record.
UNKNOWN: Final = sys.maxsize
# The distance to the broker's answer grows by this factor: many thousand messages may have the same time.
_FARTHER: Final = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored record: its first offset in the queue, the offset after its last, and its store time (epoch, ms)."""

    start: int
    end: int
    time: int


@dataclass(frozen=True, slots=True)
class Border:
    """The result of `search_border`.

    If all messages are older than the time, `offset` is None, and `last` is the time of the queue's last message. An
    empty queue has neither. `set_back` has two messages: the second has the higher offset and the lower store time.
    `older`: the queue has a message older than the time, so none directly before `offset` was deleted.
    """

    offset: int | None = None
    last: int | None = None
    set_back: tuple[Stored, Stored] | None = None
    older: bool = False


def search_border(time: int, first: int, end: int, guess: int, pull: Callable[[int], Sequence[Stored]]) -> Border:
    """Return the offset of a message stored at `time` or later, whose predecessor in the queue is older.

    If store times are in order, there is one such message at most. `first` and `end` are the queue's offsets, and
    `pull` returns the first messages from an offset on. With a right `guess` it is called once.
    """
    # The last existing message before `low` is older than `time`. The first message from `high` on is not.
    low, high, border = first, end, None
    seen: dict[int, Stored] = {}
    at, distance = guess - 1, PULLED
    while low < high:
        at = min(max(at, low), high - 1)
        records = [record for record in pull(at) if record.start < high]
        seen.update((record.start, record) for record in records if record.time != UNKNOWN)
        if not records:
            high = at
        older = False
        for record in records:
            if record.time >= time:
                # The records of one pull follow each other, so no message is between an older one and this one.
                border = low if older else max(low, record.start)
                high = low if older else max(low, min(at, record.start))
                break
            low, older = min(max(at + 1, record.end), high), True
        if high == end:
            at = low + distance - PULLED
        elif low == first:
            at = high - distance
        else:
            at = (low + high) // 2
        distance *= _FARTHER
    in_order = [seen[start] for start in sorted(seen)]
    backwards = [(before, after) for before, after in itertools.pairwise(in_order) if before.time > after.time]
    set_back = max(backwards, key=lambda pair: pair[0].time - pair[1].time, default=None)
    return Border(border, in_order[-1].time if in_order else None, set_back, older=low > first)


def stored_records(body: Buffer) -> list[Stored]:
    """Return the decodable records of a pull's body."""
    records: list[Stored] = []
    data, at = memoryview(body), 0
    while at < len(data):
        try:
            record = record_at(data, at)
        except RemotingCommandException:
            # No later record can be located.
            return records
        at += len(record)
        try:
            message = decode_record_with_text(record, 0)[0]
        except RemotingCommandException:
            # The task that reads it reports it (``onUnreadable``).
            continue
        first = message.queue_offset
        records.append(Stored(first, first + offsets_of(message), message.store_timestamp))
    return records
