"""What the driver plans before the tasks of an exactly-once write, and how it ends the write after them.

Spark plans a write, runs its tasks, and commits it in calls that share nothing but the pickled writer. So each call
reads the decision log. A process keeps what it has read, so that the next call reads only new records.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocketmq_spark.deliveries.exactly_once.commit import CommitReport, TwoPhaseCommit, group_of, new_run_id
from rocketmq_spark.deliveries.exactly_once.halves import Halves, concat
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.records import Write
from rocketmq_spark.errors import DataLossError, DeliveryError, OptionError
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.client_instance import ClientInstance

if TYPE_CHECKING:
    from rocketmq_spark.deliveries.effectively_once.attempt import ResumePlan

logger = logging.getLogger("rocketmq_spark.producer")

# The logs that this process has read, by connection, topic and transactional id.
_logs: dict[tuple[str, str, str], DecisionLog] = {}
_MOST_LOGS = 100


@dataclass(frozen=True, slots=True)
class TransactionPlan:
    """What tasks need to know of an exactly-once write; Spark pickles it."""

    run_id: str
    # The batch write; None for a stream, whose tasks know the micro-batch.
    write: Write | None
    # Whether the batch write was decided before.
    decided: bool
    # The newest micro-batch in the log.
    newest: Write | None

    def is_decided(self, write: Write) -> bool:
        """Return whether a driver has decided a write before, so that tasks have nothing to send."""
        return self.decided if self.write is not None else write == self.newest

    def write_of(self, query: str, batch_id: int) -> Write:
        """Return the write that a task belongs to."""
        return self.write or Write(str(batch_id), query)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a task has prepared: the group of its half messages, and the half messages as bytes."""

    group: str
    halves: bytes


def plan(options: SinkOptions, instance: ClientInstance, write: Write | None) -> TransactionPlan:
    """Return the plan of a batch write, or of a stream (`write` None), by the log. Also check the brokers.

    Raises an MQClientException if a broker cannot do exactly-once writes.
    """
    commit = _commit(options, instance, new_run_id())
    names: set[str] = set()
    if options.topic is not None:
        names = set(commit.brokers.routes().look_up(options.topic).broker_names)
    commit.prepare(names)
    log = commit.log
    is_first = not log.writes
    try:
        read_log(commit.log, commit.brokers, everything=write is not None)
    except DataLossError as exc:
        # A new process would not know the lost records either, and `check_stream` refuses to continue without any.
        logger.warning("%s; reading the rest of the log", exc)
        log.open(commit.brokers, everything=write is not None)
    if is_first and options.topic is not None:
        # Only a recovery reads the topic. A missing right must show before the first decision.
        commit.brokers.check_readable(commit.brokers.routes().look_up(options.topic).queues[0])
    return TransactionPlan(
        commit.run_id, write, write is not None and write in log.writes, log.newest if write is None else None
    )


def check_stream(options: SinkOptions, plan: TransactionPlan | ResumePlan, write: Write) -> None:
    """Raise an OptionError if the log does not continue with a micro-batch; each task checks this."""
    newest, name = plan.newest, options.transactional_id
    if plan.write is not None:
        return
    if newest is None:
        if write.batch_id > 0 and not options.start_anew:
            raise OptionError(
                f"{write}: the decision log has no record of transactionalId={name}, so it is unknown whether the "
                "micro-batch was committed: the log has expired, or its broker is not registered. Start the broker, or "
                "set startAnew=true if repeated rows are acceptable"
            )
        return
    check_query(options, newest, write.query, str(write))
    if newest.query == write.query and write.batch_id < newest.batch_id:
        raise OptionError(
            f"{write}: the decision log of transactionalId={name} has micro-batch {newest.batch_id} already, so the "
            "checkpoint is an old copy. Restore the newest checkpoint, or use another transactionalId and "
            "startAnew=true if repeated rows are acceptable"
        )


def check_query(options: SinkOptions, newest: Write, query: str, write: str) -> None:
    """Raise an OptionError if the `newest` micro-batch of the log is not of this query, unless ``startAnew`` is set."""
    if newest.query != query and not options.start_anew:
        raise OptionError(
            f"{write}: transactionalId={options.transactional_id} belongs to query {newest.query}, which has another "
            "checkpoint. Give each query its own transactionalId, or set startAnew=true if the old checkpoint was "
            "deleted on purpose"
        )


def commit(
    options: SinkOptions, instance: ClientInstance, plan: TransactionPlan, write: Write, prepared: Sequence[Prepared]
) -> CommitReport:
    """Commit what the tasks have prepared; see `TwoPhaseCommit.commit`."""
    two_phase = _commit(options, instance, plan.run_id)
    read_log(two_phase.log, two_phase.brokers, everything=plan.write is not None)
    if plan.write is None and two_phase.log.newest is not None:
        # Another query may have committed with this id since the plan.
        check_query(options, two_phase.log.newest, write.query, str(write))
    halves, group = _together(options, plan, write, prepared)
    if halves is None:
        return two_phase.finish(write)
    return two_phase.commit(write, halves, group)


def roll_back(
    options: SinkOptions, instance: ClientInstance, plan: TransactionPlan, write: Write, prepared: Sequence[Prepared]
) -> None:
    """Roll back what the finished tasks of a failed write have prepared, unless the write was decided."""
    if not prepared:
        return
    two_phase = _commit(options, instance, plan.run_id)
    read_log(two_phase.log, two_phase.brokers, everything=plan.write is not None)
    halves, group = _together(options, plan, write, prepared)
    state = two_phase.log.writes.get(write)
    if halves is not None and (state is None or all(one.group != group for one in state.decisions.values())):
        two_phase.roll_back(halves, group)


def _together(
    options: SinkOptions, plan: TransactionPlan, write: Write, prepared: Sequence[Prepared]
) -> tuple[Halves | None, str]:
    """Return the half messages of all tasks and their group; None if the tasks had nothing to send."""
    if not prepared and plan.is_decided(write):
        return None, ""
    groups = {part.group for part in prepared}
    if len(groups) > 1:
        raise DeliveryError(
            f"committing {write}: its tasks belong to several runs ({', '.join(sorted(groups))}), so no row is "
            "committed; this is a bug in rocketmq_spark, report it"
        )
    group = groups.pop() if groups else group_of(str(options.transactional_id), write, 1, plan.run_id)
    return concat([Halves.from_bytes(part.halves) for part in prepared]), group


def log_of(options: SinkOptions) -> DecisionLog:
    """Return the log of an id, with what this process has read of it. Effectively-once writes have one per topic."""
    name = f"{options.transactional_id}#{options.topic}" if options.effectively_once else str(options.transactional_id)
    # The repr of the connection has no secrets, and names the servers.
    key = repr(options.connection), options.transaction_topic, name
    if key not in _logs:
        if len(_logs) >= _MOST_LOGS:
            _logs.clear()
        _logs[key] = DecisionLog(name, options.transaction_topic)
    return _logs[key]


def _commit(options: SinkOptions, instance: ClientInstance, run_id: str) -> TwoPhaseCommit:
    return TwoPhaseCommit(Brokers(options, instance), log_of(options), run_id)


def read_log(log: DecisionLog, brokers: Brokers, *, everything: bool) -> None:
    """Read the records of the log that are new to this process."""
    # Without a record, the home is only drawn, and another process may have drawn another one since.
    if not (log.writes or log.floors) or (everything and not log.everything):
        log.open(brokers, everything=everything)
    else:
        log.refresh(brokers)
