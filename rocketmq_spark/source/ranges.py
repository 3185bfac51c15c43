"""Offset ranges, their division among tasks, and the reports of gaps: offsets whose messages the broker does not have.

With ``minPartitions`` or ``maxRecordsPerPartition``, `tasks_of` cuts ranges much as
``KafkaOffsetRangeCalculator.scala`` does. Without them small ranges share a task. `limited`, the limit of a
micro-batch, follows ``KafkaMicroBatchStream.scala``. A gap is an error, or with ``failOnDataLoss=false`` a warning.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rocketmq_spark.errors import DataLossError, ReadError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.source import SourceOptions

logger = logging.getLogger("rocketmq_spark.source")

# Spark's overhead of a task (0.1 s) equals the time for reading this many messages.
ROWS_WORTH_A_TASK: Final = 50_000
# The overhead of a task with this many messages is a tenth of its time. Other cores wait for it for about a second.
MOST_ROWS: Final = 500_000

_MOST_TASKS: Final = 1_000_000

# How many gaps one error names. A broker that deletes files leaves one gap per queue.
_MOST_NAMED: Final = 1_000


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Messages `start` to `end` - 1 of a queue (with the user's topic). If `compacted`, gaps are not lost data.

    The `expired` offsets before `start` were not there any more when the range was planned. They count for the tasks
    and for the turns of queues: a repeated micro-batch has the same ones, whatever has expired by then.
    """

    queue: MessageQueue
    start: int
    end: int
    compacted: bool = False
    expired: int = 0

    @property
    def size(self) -> int:
        """The number of offsets, which may be more than the number of messages."""
        return self.end - self.start

    @property
    def begin(self) -> int:
        """The first of the `expired` offsets, or `start`."""
        return self.start - self.expired

    @property
    def planned(self) -> int:
        """The number of offsets, with the expired ones."""
        return self.end - self.begin

    def cut(self, parts: int) -> list[OffsetRange]:
        """Return `parts` ranges of nearly equal size, or fewer if some would be empty."""
        parts = min(parts, self.planned)
        borders = [self.begin + self.planned * part // parts for part in range(parts + 1)]
        return [self._part(low, high) for low, high in itertools.pairwise(borders)]

    def _part(self, begin: int, end: int) -> OffsetRange:
        start = min(max(begin, self.start), end)
        return replace(self, start=start, end=end, expired=start - begin)


def tasks_of(
    ranges: Iterable[OffsetRange], min_partitions: int | None = None, max_records: int | None = None
) -> list[tuple[OffsetRange, ...]]:
    """Return the ranges that each task reads; a range is cut only for `min_partitions` or `max_records`.

    Without either, small ranges share a task. The result depends only on the arguments, and not on the order of
    `ranges`: a micro-batch that is repeated, also by another cluster, has the same tasks. Raises a ReadError for more
    than 1,000,000 tasks: a broker can report offsets up to 2**63, and the driver keeps its tasks in memory.
    """
    parts = sorted((part for part in ranges if part.planned > 0), key=lambda part: part.queue)
    total = sum(part.planned for part in parts)
    if max_records is not None:
        count = sum(-(-part.planned // max_records) for part in parts)
        if count > _MOST_TASKS:
            raise ReadError(
                f"maxRecordsPerPartition={max_records}: {total} offsets make {count} tasks, and at most {_MOST_TASKS} "
                "are allowed. Set a higher value, and check that the offsets that the brokers report are plausible"
            )
        parts = [piece for part in parts for piece in part.cut(-(-part.planned // max_records))]
    if min_partitions is not None and len(parts) < min_partitions:
        parts = [piece for part in parts for piece in part.cut(max(1, -(-part.planned * min_partitions // total)))]
    if min_partitions is not None or max_records is not None:
        return [(part,) for part in parts]
    # n tasks cost the overhead of n tasks, and the longest takes total / n. The sum is least with this many messages a
    # task. More tasks would use more cores, at the cost of processor time: a cluster with many sets minPartitions.
    share = min(max(math.isqrt(total * ROWS_WORTH_A_TASK), ROWS_WORTH_A_TASK), MOST_ROWS)
    tasks: list[list[OffsetRange]] = []
    room = 0
    for part in parts:
        # A task may exceed its share by half of a range: that is better than a task with little to read.
        if part.planned > 2 * room:
            tasks.append([])
            room = share
        tasks[-1].append(part)
        room -= part.planned
    return [in_turns(task) for task in tasks]


def in_turns(ranges: Iterable[OffsetRange]) -> tuple[OffsetRange, ...]:
    """Return ranges in the order of their turns. Neighbours are of different brokers, which answer at the same time."""
    return tuple(sorted(ranges, key=lambda part: (part.queue.queue_id, part.queue)))


def limited(start: Mapping[MessageQueue, int], end: Mapping[MessageQueue, int], most: int) -> dict[MessageQueue, int]:
    """Return where a micro-batch stops so that it reads about `most` offsets, shared in proportion to queue sizes.

    Every queue with messages gets at least one offset, as in Kafka's source, even if that exceeds `most`.
    """
    sizes = {queue: max(0, offset - start[queue]) for queue, offset in end.items()}
    total = sum(sizes.values())
    if total <= most:
        return dict(end)
    shares = {queue: size * most // total for queue, size in sizes.items()}
    rests = {queue: size * most % total for queue, size in sizes.items() if size * most % total}
    # The offsets lost by rounding down go to queues with a share of 0, then to those with the largest remainders.
    left = max(most - sum(shares.values()), sum(shares[queue] == 0 for queue in rests))
    for queue in sorted(rests, key=lambda queue: (shares[queue] > 0, -rests[queue]))[:left]:
        shares[queue] += 1
    # A queue that ends before it begins has lost the messages in between.
    return {queue: min(start[queue], end[queue]) + shares[queue] for queue in end}


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets `start` to `end` - 1 of a queue (with the user's topic), before the `first_left` that its broker has."""

    queue: MessageQueue
    start: int
    end: int
    first_left: int

    def __str__(self) -> str:
        return (
            f"messages {self.start} to {self.end - 1} of {self.queue} are not there any more, the first one left is "
            f"{self.first_left}"
        )


def lost(options: SourceOptions, text: str) -> None:
    """Raise `DataLossError`, or with ``failOnDataLoss=false`` log it."""
    if options.fail_on_data_loss:
        raise DataLossError(f"{text}. To read the remaining messages, set failOnDataLoss=false")
    logger.warning("%s; the read continues because of failOnDataLoss=false", text)


def expired(options: SourceOptions, gaps: Sequence[Gap]) -> None:
    """Raise one `DataLossError` that names all gaps, or with ``failOnDataLoss=false`` log each."""
    cause = "they expired (fileReservedTime), or the topic was deleted and created again"
    if gaps and options.fail_on_data_loss:
        more = f"; and {len(gaps) - _MOST_NAMED} more gaps" if len(gaps) > _MOST_NAMED else ""
        lost(options, f"{'; '.join(map(str, gaps[:_MOST_NAMED]))}{more}: {cause}")
    for gap in gaps:
        lost(options, f"{gap}: {cause}")


@dataclass(slots=True, repr=False)
class Gaps:
    """The gaps that a task has found and not reported yet. Adjacent gaps of a queue are one."""

    options: SourceOptions
    # By queue: a task may read thousands of queues, each with a gap.
    _gaps: dict[MessageQueue, list[Gap]] = field(default_factory=dict)

    def add(self, queue: MessageQueue, start: int, end: int) -> None:
        """Add missing offsets; those of a queue come in order."""
        gaps = self._gaps.setdefault(queue, [])
        if gaps and gaps[-1].end == start:
            gaps[-1] = replace(gaps[-1], end=end, first_left=end)
        else:
            gaps.append(Gap(queue, start, end, end))

    def report(self, reached: Mapping[MessageQueue, int] | None = None) -> None:
        """Report the gaps that end before the offset that the read has reached in their queue; by default all."""
        closed: list[Gap] = []
        for queue in list(self._gaps if reached is None else reached):
            gaps = self._gaps.pop(queue, [])
            end = math.inf if reached is None else reached[queue]
            closed += [gap for gap in gaps if gap.end < end]
            if later := [gap for gap in gaps if gap.end >= end]:
                self._gaps[queue] = later
        if closed and self.options.fail_on_data_loss:
            closed += itertools.chain.from_iterable(self._gaps.values())
        expired(self.options, closed)
