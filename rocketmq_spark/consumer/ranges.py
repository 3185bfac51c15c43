"""Offset ranges: what is to be read, cut into what one task reads.

Rule 1: a range is cut only where the user's options say so, and put together with others only where it is too small
        to be worth a task.
Rule 2: of one queue the ranges come in the order of their offsets.

Follows ``KafkaOffsetRangeCalculator.scala`` (minPartitions, maxRecordsPerPartition) and the rate limit of
``KafkaMicroBatchStream.scala``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rocketmq_spark.errors import ReadError
from rocketmq_spark.message import MessageQueue

# A task of Spark's costs about as much as reading so many messages (0.1 s).
ROWS_WORTH_A_TASK: Final = 50_000

_MOST_TASKS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The messages of one queue from one offset up to another.

    Parameters
    ----------
    queue : MessageQueue
        With the topic as the user knows it.
    start, end : int
        The end is not in it.
    compacted : bool, default False
        The topic is compacted (``cleanup.policy=COMPACTION``): missing offsets are not lost data.
    """

    queue: MessageQueue
    start: int
    end: int
    compacted: bool = False

    @property
    def size(self) -> int:
        """How many offsets; not all of them need be messages."""
        return self.end - self.start

    def cut(self, parts: int) -> list[OffsetRange]:
        """Return so many ranges of nearly equal size, none of them empty."""
        parts = min(parts, self.size)
        borders = [self.start + self.size * part // parts for part in range(parts + 1)]
        return [replace(self, start=low, end=high) for low, high in itertools.pairwise(borders)]


def tasks_of(
    ranges: Sequence[OffsetRange],
    min_partitions: int | None = None,
    max_records: int | None = None,
    parallelism: int | None = None,
) -> list[tuple[OffsetRange, ...]]:
    """Return what each task reads.

    Parameters
    ----------
    ranges : sequence of OffsetRange
        One of each queue.
    min_partitions : int or None
        So many tasks at least, if there are so many messages; None: as many as there are queues worth one.
    max_records : int or None
        Offsets of one task at most.
    parallelism : int or None
        How many tasks run at once, as far as it is known: more than two for each are of no use.

    Raises
    ------
    ReadError
        `max_records` makes more than 1,000,000 tasks: brokers tell offsets up to 2**63, and a driver holds its tasks.
    """
    found = [one for one in ranges if one.size > 0]
    if max_records is not None:
        tasks = sum(-(-one.size // max_records) for one in found)
        if tasks > _MOST_TASKS:
            raise ReadError(
                f"maxRecordsPerPartition={max_records}: {sum(one.size for one in found)} offsets make {tasks} tasks, "
                f"{_MOST_TASKS} are allowed; give a higher one, and see whether the topic can hold so many messages: "
                "its brokers say so"
            )
        found = [part for one in found for part in one.cut(-(-one.size // max_records))]
    if min_partitions is not None and len(found) < min_partitions:
        total = sum(one.size for one in found)
        found = [part for one in found for part in one.cut(max(1, -(-one.size * min_partitions // total)))]
    if min_partitions is not None or max_records is not None:
        return [(one,) for one in found]
    share = 0 if parallelism is None else sum(one.size for one in found) // (2 * parallelism)
    return _together(found, max(share, ROWS_WORTH_A_TASK))


def _together(ranges: Sequence[OffsetRange], full: int) -> list[tuple[OffsetRange, ...]]:
    tasks: list[list[OffsetRange]] = []
    room = 0
    for one in ranges:
        # Half of a range more than a task's share is better than a task for little.
        if one.size > 2 * room:
            tasks.append([])
            room = full
        tasks[-1].append(one)
        room -= one.size
    return [tuple(task) for task in tasks]


def limited(start: Mapping[MessageQueue, int], end: Mapping[MessageQueue, int], most: int) -> dict[MessageQueue, int]:
    """Return where a micro-batch stops so that it reads about `most` offsets, shared in proportion to queue sizes.

    Every queue with messages gets at least one offset, as in Kafka's source. The result therefore exceeds `most` by at
    most the number of queues whose proportional share is below one.

    Parameters
    ----------
    start, end : mapping of MessageQueue to int
        Every queue of `end` is in `start`.
    most : int
        At least 1.
    """
    sizes = {queue: max(0, offset - start[queue]) for queue, offset in end.items()}
    total = sum(sizes.values())
    if total <= most:
        return dict(end)
    shares = {queue: size * most // total for queue, size in sizes.items()}
    rests = {queue: size * most % total for queue, size in sizes.items() if size * most % total}
    starving = sum(shares[queue] == 0 for queue in rests)
    # What rounding down has left: first to queues with a share of 0, then to those with the largest remainders.
    left = max(most - sum(shares.values()), starving)
    for queue in sorted(rests, key=lambda queue: (shares[queue] > 0, -rests[queue]))[:left]:
        shares[queue] += 1
    # A queue that ends before it begins has lost the messages in between.
    return {queue: min(start[queue], end[queue]) + shares[queue] for queue in end}
