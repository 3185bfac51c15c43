"""``delivery=exactlyOnce``: tasks store half messages, and the driver commits them.

docs/internals/exactly-once.md has the protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from rocketmq_spark.deliveries.base import OpenInstance, PartitionResult, PartitionTask, TaskResults, Write
from rocketmq_spark.deliveries.exactly_once.commit import TwoPhaseCommit, group_of, new_run_id
from rocketmq_spark.deliveries.exactly_once.half_sender import half_rules
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, Halves, concat
from rocketmq_spark.deliveries.exactly_once.report import CommitReport
from rocketmq_spark.deliveries.exactly_once.settings import findings
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import (
    LoggedDelivery,
    LogPlan,
    check_newest,
    check_stream,
    mark_of,
    read_log,
    warn_of_other_rows,
)
from rocketmq_spark.errors import DataLossError, DeliveryError, RocketMQError
from rocketmq_spark.model.message import MessageQueue

logger = logging.getLogger("rocketmq_spark.producer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionPlan(LogPlan):
    """What tasks need to know of an exactly-once write."""

    run_id: str

    def is_done(self, write: Write) -> bool:
        """Return whether a driver has decided a write before, so that tasks have nothing to send."""
        return self.done if self.write is not None else write == self.newest


@dataclass(frozen=True, slots=True)
class Prepared(PartitionResult):
    """What a task has prepared: the group of its half messages, and the half messages as bytes."""

    group: str  # Empty if the write was decided before, so that the task has only counted its rows
    halves: bytes
    counted_rows: int = 0


@dataclass(frozen=True, repr=False)
class ExactlyOnce(LoggedDelivery[Prepared, TransactionPlan]):
    """Rows become visible when the driver commits the write."""

    NEEDS_TOPIC: ClassVar[str] = "the driver must read it before the first commit"
    NEEDS_SPARK: ClassVar[str] = "whose driver commits the rows"
    NOT_OVER_GRPC: ClassVar[str] = "do not answer whether a commit came in time"
    RESULT: ClassVar[type[PartitionResult]] = Prepared
    broker_findings: ClassVar = staticmethod(findings)
    ALLOWED: ClassVar = (
        ("send_mode", ("async", "sync"), "one-way sends have no acknowledgements"),
        ("batch_type", ("plain",), "each row is a message of its own"),
        ("require_store_ok", (True,), "a row that is not flushed or replicated could be lost after its commit"),
        ("enable_trace", (False,), "a trace would show rows that are not committed"),
        ("unique_key", (True,), "the unique id identifies a half message"),
        ("recall_path", (None,), "its rows have no time of delivery, and only delayed rows can be recalled"),
    )

    @classmethod
    def _plan(
        cls, brokers: Brokers, log: DecisionLog, write: Write | None, queues: Sequence[MessageQueue] | None
    ) -> TransactionPlan:
        """Read the log and check the brokers; raise an MQClientException if one cannot do exactly-once writes."""
        commit, topic = TwoPhaseCommit(brokers, log, new_run_id()), brokers.options.topic
        commit.prepare(() if topic is None else brokers.routes().look_up(topic).broker_names)
        is_first = not log.writes
        try:
            read_log(log, brokers, everything=write is not None)
        except DataLossError as exc:
            # A new process would not know the lost records either, and `check_stream` refuses to continue without any.
            logger.warning("%s; reading the rest of the log", exc)
            log.open(brokers, everything=write is not None)
        if is_first and topic is not None:
            # Only a recovery reads the topic. A missing right must show before the first decision.
            brokers.check_readable(brokers.routes().look_up(topic).queues[0])
        newest = log.newest if write is None else None
        done, key_id = write in log.writes, log.keys.signs
        return TransactionPlan(run_id=commit.run_id, write=write, done=done, newest=newest, key_id=key_id)

    def write_partition(self, task: PartitionTask) -> Prepared | None:
        """Send the rows as half messages. Of a write that was decided before, only count those of a micro-batch.

        Skipped invalid rows are in no decision. So with ``onError=skip`` the rows are not counted.
        """
        write = self.planned.write_of(task.recorder.write_id, task.recorder.batch_id)
        check_stream(self.options, self.planned, write)
        if self.planned.is_done(write):
            task.recorder.record_skipped_write(str(write))
            if not write.query or self.options.on_error == "skip":
                return None
            # With an older copy of its checkpoint, Spark plans a micro-batch again with other rows.
            return Prepared("", b"", sum(batch.num_rows for batch in task.rows))
        group, collector = self._group(write), HalfCollector()
        if (first := next(task.rows, None)) is not None:
            rules = half_rules(group, self.options.transaction_timeout_ms, collector.append)
            task.send(chain([first], task.rows), rules=rules)
        return Prepared(group, collector.halves().to_bytes())

    def complete(self, open_instance: OpenInstance, done: TaskResults[Prepared]) -> CommitReport:
        """Commit what the tasks have prepared; see `TwoPhaseCommit.commit`."""
        write = self._write_of(done)
        with self._opened(self.options, open_instance) as (brokers, log):
            read_log(log, brokers, everything=self.planned.write is not None)
            if self.planned.write is None:
                # Another query may have committed with this id since the plan of the tasks, or the home is down now.
                check_newest(self.options, log.newest, write)
            two_phase = TwoPhaseCommit(brokers, log, self.planned.run_id)
            prepared = [part for part in done.results if part.group]
            if not prepared:
                # The tasks have seen the decision, in a plan that may be older than this one.
                if done.results and write in log.writes:
                    warn_of_other_rows(write, log.writes[write], sum(part.counted_rows for part in done.results))
                return two_phase.finish(write)
            halves, group = self._together(write, prepared)
            return two_phase.commit(write, halves, group)

    def abort(self, open_instance: OpenInstance, done: TaskResults[Prepared]) -> None:
        """Roll back what the finished tasks of a failed write have prepared, unless the write was decided."""
        prepared = [part for part in done.results if part.group]
        if not prepared:
            return
        write = self._write_of(done)
        try:
            with self._opened(self.options, open_instance) as (brokers, log):
                read_log(log, brokers, everything=self.planned.write is not None)
                halves, group = self._together(write, prepared)
                state = log.writes.get(write)
                if state is None or all(one.group != group for one in state.decisions.values()):
                    TwoPhaseCommit(brokers, log, self.planned.run_id).roll_back(halves, group)
        except RocketMQError as exc:
            # A rollback only saves space, and must not hide the error of the write.
            logger.warning("rolling back %s failed; its rows stay invisible: %s", write, exc)

    def _together(self, write: Write, prepared: Sequence[Prepared]) -> tuple[Halves, str]:
        """Return the half messages of all tasks and their group."""
        groups = {part.group for part in prepared}
        if len(groups) > 1:
            raise DeliveryError(
                f"committing {write}: its tasks belong to several runs ({', '.join(sorted(groups))}), so no row is "
                "committed; this is a bug in rocketmq_spark, report it"
            )
        return concat([Halves.from_bytes(part.halves) for part in prepared]), groups.pop()

    def _group(self, write: Write) -> str:
        return group_of(str(self.options.transactional_id), write, 1, self.planned.run_id + mark_of(self.write))
