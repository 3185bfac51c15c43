"""``delivery=atLeastOnce``: a task sends its rows, and a retry may send them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from rocketmq_spark.deliveries.base import Delivery, OpenInstance, PartitionResult, PartitionTask, Write
from rocketmq_spark.options.sink import SINK_SPELLING, SinkOptions

if TYPE_CHECKING:
    from rocketmq_spark.model.message import MessageQueue


A = TypeVar("A", bound="AtLeastOnce")


@dataclass(frozen=True, repr=False)
class AtLeastOnce(Delivery[PartitionResult]):
    """Needs neither an identity nor an end of a write."""

    options: SinkOptions
    write: Write | None = None

    @classmethod
    def contradictions(cls, options: SinkOptions) -> Iterator[str]:
        """Yield an error text for each option of the other deliveries."""
        for field in ("transactional_id", "write_id", "transactional_key"):
            if getattr(options, field) is not None:
                name = SINK_SPELLING(field)
                yield f"{name} is given without delivery=exactlyOnce or effectivelyOnce: set delivery, or remove {name}"

    @classmethod
    def speculation_warning(cls, options: SinkOptions) -> str:
        """Return a warning, unless readers can recognise repeats."""
        if options.row_id:
            return ""
        return (
            "spark.speculation is true: a task that Spark starts twice stores its rows twice; set rowId=true, so "
            "that readers can recognise repeats, or spark.speculation=false"
        )

    @classmethod
    def plan(
        cls: type[A],
        options: SinkOptions,
        open_instance: OpenInstance,
        write: Write | None = None,
        queues: Sequence[MessageQueue] | None = None,
    ) -> A:
        """Return the delivery of a write. Nothing is planned."""
        return cls(options)

    def write_partition(self, task: PartitionTask) -> None:
        """Send the rows. A task without rows opens no connection."""
        if (first := next(task.rows, None)) is not None:
            task.send(chain([first], task.rows))
