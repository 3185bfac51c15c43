"""What a reader of the decision log keeps of its records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.records import Begun, Decision, HomeRecord, Record
from rocketmq_spark.model.message import MessageQueue


def shown_time(epoch_ms: int) -> str:
    """Return the text of a time in a record."""
    # numpy accepts any number; `datetime` rejects years after 9999.
    return str(np.datetime64(epoch_ms // 1000, "s")).replace("T", " ") + " UTC"


@dataclass(frozen=True, slots=True)
class StartOffsets:
    """Offsets of queues, and a write: all rows of later writes have these offsets or higher ones."""

    after: Write | None  # None: the first record of the log
    by_queue: Mapping[MessageQueue, int]
    offset: int  # Of the record, in the home


@dataclass(slots=True)
class WriteState:
    """What the log says about a write."""

    since: int
    decisions: dict[int, Decision] = field(default_factory=dict)  # By round
    done: bool = False
    done_ms: int = 0  # When the broker stored that it is done, epoch milliseconds
    # Of a batch write with ``writeId`` that is not done, see `StartOffsets`.
    start_offsets: Mapping[MessageQueue, int] | None = None
    # The attempts by partition and by their ids, in the order of records.
    begun: dict[int, dict[str, Begun]] = field(default_factory=dict)

    @property
    def last(self) -> Decision:
        """The decision of the last round."""
        return self.decisions[max(self.decisions)]


def homes_in(queue: MessageQueue, records: Iterable[Record]) -> dict[MessageQueue, bool]:
    """Return the home of a queue's newest record, or all homes claimed there, with whether it has a decision.

    `records` are those of the queue, the newest first.
    """
    # All claims: the newest one may be of a driver that has failed because of an older one.
    claimed: dict[MessageQueue, bool] = {}
    # The highest claim of the first decisions so far: they are void if another home was named since then.
    first = -1
    for record in records:
        home = record.home_in(queue)
        if record.offset + (home != queue) <= first:
            break
        if home != queue:
            first = -1
        if isinstance(record, HomeRecord) and record.is_claim:
            claimed[home] = False
        elif (claim := record.claim) is None:
            return {home: True}
        else:
            first = max(first, claim)
    return claimed if first < 0 else {queue: True}
