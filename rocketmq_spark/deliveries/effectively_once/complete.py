"""Completes an effectively-once write: the driver records that all of its rows are stored, and looks for repeats."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rocketmq_spark.deliveries.base import Write, WriteReport
from rocketmq_spark.deliveries.effectively_once.attempt import Attempted, pass_fence, record_changed, shrunk
from rocketmq_spark.deliveries.effectively_once.lease import attempt_id, driver_of, fence_seconds
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.effectively_once.stored import (
    count_stored,
    floors_now,
    floors_of,
    has_others,
    most_queues,
)
from rocketmq_spark.deliveries.effectively_once.tokens import attempt_token
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog
from rocketmq_spark.deliveries.log.delivery import read_log, warn_of_complete
from rocketmq_spark.deliveries.log.records import ANY_WRITE, Begun
from rocketmq_spark.deliveries.log.scan import LOST_TAIL, warn_of_lost_tail
from rocketmq_spark.errors import DataLossError, DeliveryError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.remoting.command import loads

logger = logging.getLogger("rocketmq_spark.producer")


@dataclass(slots=True)
class ResumeReport(WriteReport):
    """What the end of a write has found: rows that are stored twice."""

    NAME: ClassVar[str] = "effectively_once"

    repeated_rows: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        repeats = f", {self.repeated_rows} rows are stored twice" if self.repeated_rows else ""
        return f"completed in {self.seconds:.2f} s{repeats}"


def complete(
    brokers: Brokers,
    log: DecisionLog,
    plan: ResumePlan,
    write: Write,
    attempts: Sequence[Attempted],
    broker_names: Collection[str],
) -> ResumeReport:
    """Record that all rows of a write are stored; after faults, count the rows that are stored twice.

    `broker_names` are the brokers that have acknowledged rows.

    Raises an InputChangedError if an earlier attempt had rows in a partition that the write does not have now, a
    DeliveryError if another driver writes the same, a DataLossError if a queue ends before a row that its broker has
    acknowledged, and as `DecisionLog.check_only`.
    """
    options, started = brokers.options, brokers.clock()
    read_log(log, brokers, everything=plan.write is not None)
    state = log.writes.get(write)
    if write == ANY_WRITE or plan.done or (plan.write is not None and state is not None and state.done):
        if state is not None and state.done and not (plan.done or attempts):
            # Another driver has completed it since the plan.
            warn_of_complete(write, state)
        return ResumeReport()
    log.check_current(write)
    log.check_only(brokers)
    ended = {attempt.partition_id: attempt.attempt for attempt in attempts if attempt.attempt}
    if state is not None and (gone := sorted(set(state.begun) - set(ended))):
        record_changed(brokers, log, plan, write, sorted(state.begun), changed=True)
        raise shrunk(write, gone)
    drivers = {plan.driver, *map(driver_of, ended.values())}
    _stop_others(brokers, log, plan, write, ended, drivers)
    checked, repeated = brokers.clock(), 0
    begun = {} if state is None else state.begun
    recovered = {
        attempt.partition_id: attempt.rows
        for attempt in attempts
        # A second attempt may have stored rows, too.
        if attempt.recovered or len(begun.get(attempt.partition_id, ())) > 1
    }
    if uncounted := _with_expired_records(brokers, log, plan, write, recovered):
        logger.warning(
            "%s: the records of the attempts at partition %s have expired (fileReservedTime), so it is unknown whether "
            "rows of it are stored twice. All of its rows are stored",
            *(write, ", ".join(map(str, uncounted))),
        )
    known = plan.start_offsets_of(write)
    start_offsets = {} if known is None else known.by_queue
    if counted := {part: rows for part, rows in recovered.items() if part not in uncounted}:
        repeated = _count_repeats(brokers, log, write, begun, counted, start_offsets)
        if repeated:
            logger.warning(
                "%s: %d rows are stored twice, because a broker stored requests of a failed attempt later than "
                "fenceMs=%d after it, or another producer stored messages with the token of an attempt. Raise fenceMs. "
                "With rowId=true, rocketmq_spark.dedupe removes repeats",
                *(write, repeated, options.fence_ms),
            )
    log.append_homes(brokers, write, set(broker_names) - {log.require_home().broker_name})
    if brokers.clock() - checked > fence_seconds(options) / 3:
        log.refresh(brokers)
        log.check_current(write)
        _stop_others(brokers, log, plan, write, ended, drivers)
    # The start offsets of other brokers, which may be down, stay. A queue that is gone has none when it comes back.
    queues = brokers.routes().look_up(str(options.topic)).queues
    used = _ends(brokers, log, write, attempts, {queue for queue in queues if queue.broker_name in broker_names})
    corrected = plan.begins.start_offsets
    for queue, end in used.items():
        if end < start_offsets.get(queue, 0) and queue not in corrected:
            warn_of_lost_tail(queue, start_offsets[queue], end, "Rows of this write may be stored twice")
    old = {queue: start_offsets[queue] for queue in queues if queue in start_offsets}
    lower = {queue: corrected[queue] for queue in old if corrected.get(queue, old[queue]) < old[queue]}
    log.append_done_at(brokers, write, {**old, **lower, **used}, plan.since)
    return ResumeReport(repeated, brokers.clock() - started)


def _with_expired_records(
    brokers: Brokers, log: DecisionLog, plan: ResumePlan, write: Write, partitions: Collection[int]
) -> list[int]:
    """Return those of the partitions for which the log may not have the records of all attempts any more."""
    # The plan has the attempts before it. Records of later ones may have expired if the one at its position has.
    if partitions and brokers.first_offset(log.require_home()) > plan.position:
        return sorted(partitions)
    state, planned = log.writes.get(write), plan.begun.get(write, {})
    begun = {} if state is None else state.begun
    return sorted(part for part in partitions if part not in begun or planned.get(part, {}).keys() - begun[part].keys())


def _stop_others(
    brokers: Brokers,
    log: DecisionLog,
    plan: ResumePlan,
    write: Write,
    ended: dict[int, str],
    drivers: Collection[str],
) -> None:
    """Return when no attempt sends any more, by the log; `ended` has the last ones by partition, and gets new ones.

    `drivers` are the ids of this driver's plans: Spark plans the end of a micro-batch again. Raises a DeliveryError if
    another driver has begun a partition later than this one, and an InputChangedError if this one has begun more.
    """
    state = log.writes.get(write)
    newest = {} if state is None else {part: next(reversed(begun)) for part, begun in state.begun.items()}
    others = sorted(part for part, attempt in newest.items() if attempt != ended.get(part))
    if foreign := [part for part in others if driver_of(newest[part]) not in drivers]:
        raise DeliveryError(
            f"completing {write}: another driver of transactionalId={brokers.options.transactional_id} has begun "
            f"partition {', '.join(map(str, foreign))} later than this driver, and may still send rows. So this driver "
            "does not complete the write. The other driver finds the rows that are stored. Run only one driver"
        )
    if gone := [part for part in others if part not in ended]:
        raise shrunk(write, gone)
    if others:
        # Spark has repeated a stage, and used the result of the older task. The later one stops at these records.
        text = "%s: Spark has also started partition %s again; waiting until these attempts send no more"
        logger.warning(text, write, ", ".join(map(str, others)))
        for part in others:
            ended[part] = attempt_id(brokers, plan.driver)
            log.append_begun(brokers, write, part, ended[part], plan.begins, plan.since)
        brokers.runtime.sleep(fence_seconds(brokers.options))


def _ends(
    brokers: Brokers, log: DecisionLog, write: Write, attempts: Sequence[Attempted], queues: Collection[MessageQueue]
) -> dict[MessageQueue, int]:
    """Return where queues of the route end; raise a DataLossError if rows of the attempts are lost, in any queue."""
    topic = str(brokers.options.topic)
    spans: dict[MessageQueue, tuple[int, int, int]] = {}
    for name, queue_id, span in itertools.chain.from_iterable(loads(attempt.spans) for attempt in attempts):
        queue = MessageQueue(topic, name, queue_id)
        rows, first, last = spans.get(queue, (0, span["first_offset"], span["last_offset"]))
        spans[queue] = rows + span["rows"], min(first, span["first_offset"]), max(last, span["last_offset"])
    for queue, (rows, first, last) in spans.items():
        # Each row has an offset of its own, unless a broker has lost rows, and given their offsets to later ones.
        if rows > (offsets := last - first + 1):
            what = f"the broker of queue {queue} has acknowledged {rows} rows, which have only {offsets} offsets"
            raise _lost(f"{write}: {what}")
    lasts = {queue: last for queue, (*_, last) in spans.items()}
    # The records of some attempts may have expired since, so that their tokens are unknown.
    begun = {} if (state := log.writes.get(write)) is None else state.begun
    all_known = all(one.attempt in begun.get(one.partition_id, ()) for one in attempts if one.attempt)
    tokens = _tokens(log, write, begun) if all_known else {}

    def end_of(queue: MessageQueue) -> tuple[int, bool]:
        """Return where a queue ends, and whether another message is in the place of its last row."""
        is_listed = queue in queues
        if not is_listed and (end := brokers.max_offsets([queue])[queue]) <= lasts[queue]:
            return end, False
        try:
            pulled, end = brokers.message_at(queue, lasts[queue])
        except RocketMQError as exc:
            # Without its topic or queue a broker refuses a pull, and still says where the queue ends.
            if is_listed or exc.retriable:
                raise
            return end, False
        return end, bool(tokens) and has_others(pulled, tokens)

    found = brokers.for_each(lasts, end_of)
    if late := [queue for queue, (end, _) in found.items() if end <= lasts[queue]]:
        # A broker builds its queues after the acknowledgement. Those of rows before a readable record are built.
        log.await_stored(brokers, write, {queue.broker_name for queue in late})
        found |= brokers.for_each(late, end_of)
    for queue, (end, is_other) in found.items():
        what = f"{write}: the broker of queue {queue} has acknowledged the row at offset {lasts[queue]}, and"
        if end <= lasts[queue]:
            raise _lost(f"{what} its queue ends at {end} now")
        # Another producer may have stored a message in its place. An expired one is no loss.
        if is_other:
            raise _lost(f"{what} another message is there now")
    ends = brokers.max_offsets(set(queues) - set(found))
    return ends | {queue: end for queue, (end, _) in found.items() if queue in queues}


def _tokens(log: DecisionLog, write: Write, begun: Mapping[int, Mapping[str, Begun]]) -> dict[str, int]:
    """Return the tokens of attempts, each with its partition."""
    return {
        attempt_token(log.keys, one.key_id, log.transactional_id, write, part, attempt_id): part
        for part, attempts in begun.items()
        for attempt_id, one in attempts.items()
    }


def _lost(what: str) -> DataLossError:
    return DataLossError(f"{what}: {LOST_TAIL}. Run the job again: it sends the rows that are missing")


def _count_repeats(
    brokers: Brokers,
    log: DecisionLog,
    write: Write,
    begun: Mapping[int, Mapping[str, Begun]],
    recovered: Mapping[int, int],
    start_offsets: Mapping[MessageQueue, int],
) -> int:
    """Return how many messages of partitions are stored beyond the rows that `recovered` counts."""
    all_begun = [one for part in recovered for one in begun[part].values()]
    # All rows are readable then.
    pass_fence(brokers, log, write, most_queues(one.queue_nums for one in all_begun).keys(), 0.0)
    floors = floors_of(brokers, all_begun, start_offsets)
    ends = brokers.max_offsets(floors)
    tokens = _tokens(log, write, {part: begun[part] for part in recovered})
    stored = dict.fromkeys(recovered, 0)
    for token, count in count_stored(brokers, floors_now(brokers, floors, ends, tokens), ends, tokens).items():
        stored[tokens[token]] += count
    for part, rows in recovered.items():
        if stored[part] < rows:
            what = f"brokers have acknowledged {rows} rows, and the queues have {stored[part]} of them now"
            raise _lost(f"{write}, partition {part}: {what}")
    return sum(stored.values()) - sum(recovered.values())
