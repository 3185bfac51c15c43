"""``delivery=effectivelyOnce``: after a fault, tasks read which rows are stored, and send only the others.

docs/internals/effectively-once.md has the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rocketmq_spark.deliveries.base import OpenInstance, PartitionResult, PartitionTask, TaskResults, Write
from rocketmq_spark.deliveries.effectively_once.attempt import Attempt, Attempted
from rocketmq_spark.deliveries.effectively_once.complete import ResumeReport, complete
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan, plan_write
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import LoggedDelivery
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions


@dataclass(frozen=True, repr=False)
class EffectivelyOnce(LoggedDelivery[Attempted, ResumePlan]):
    """Rows are visible at once, and a retry sends only the missing rows."""

    RESULT: ClassVar[type[PartitionResult]] = Attempted
    NOT_OVER_GRPC: ClassVar[str] = "do not show a queue's rows"
    ALLOWED: ClassVar = (
        ("send_mode", ("async", "sync"), "one-way sends have no acknowledgements"),
        ("require_store_ok", (True,), "a row that is not flushed or replicated could be lost after it was counted"),
        ("on_error", ("fail", "skip"), "a retry would repeat dead letters"),
        ("recall_path", (None,), "its rows have no time of delivery, and only delayed rows can be recalled"),
    )

    @classmethod
    def log_name(cls, options: SinkOptions) -> str:
        """Return the name of the log of a write: each topic has its own."""
        return f"{options.transactional_id}#{options.topic}"

    @classmethod
    def contradictions(cls, options: SinkOptions) -> Iterator[str]:
        """Yield an error text for each option that this delivery does not allow, or lacks."""
        if options.topic is None:
            yield (
                "delivery=effectivelyOnce requires the option topic, because after a fault tasks read the queues of "
                "one topic: write each topic separately"
            )
        yield from super().contradictions(options)

    @classmethod
    def speculation_warning(cls, options: SinkOptions) -> str:
        """Raise an OptionError."""
        raise OptionError(
            "spark.speculation is true, and with delivery=effectivelyOnce the second attempt at a task stops the first "
            "one and waits fenceMs, so slow tasks would become slower: set spark.speculation=false, or use "
            "delivery=exactlyOnce"
        )

    @classmethod
    def _plan(
        cls, brokers: Brokers, log: DecisionLog, write: Write | None, queues: Sequence[MessageQueue] | None
    ) -> ResumePlan:
        return plan_write(brokers, log, write, queues)

    def write_partition(self, task: PartitionTask) -> Attempted | None:
        """Send the rows that no earlier attempt has stored; return None if the write was completed before."""
        recorder = task.recorder
        write = self.planned.write_of(recorder.write_id, recorder.batch_id)
        with task.open_instance() as instance:
            attempt = Attempt(Brokers(self.options, instance), self.planned, write, recorder.partition_id)
            attempted = attempt.run(recorder, task.rows, task.send)
        if attempted is None:
            recorder.record_skipped_write(str(write))
        return attempted

    def complete(self, open_instance: OpenInstance, done: TaskResults[Attempted]) -> ResumeReport:
        """Record that all rows are stored; after faults, count the rows that are stored twice."""
        with self._opened(self.options, open_instance) as (brokers, log):
            return complete(brokers, log, self.planned, self._write_of(done), done.results, done.broker_names())
