"""What a reader of the decision log keeps of its records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.log.records import Begun, Decision
from rocketmq_spark.model.message import MessageQueue


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
