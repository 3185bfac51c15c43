"""Writes with ``delivery=effectivelyOnce``: an attempt reads which rows earlier attempts have stored.

The driver notes the maximum offset of each queue before a write (the floors). Each task stores a record that it begins
its partition. If the log has an earlier record of this partition, the task reads the queues from the floors on, and
sends the rows that are missing. docs/internals/effectively-once.md has the protocol, and why it works.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias, TypeVar

import pyarrow as pa

from rocketmq_spark.deliveries.effectively_once.settling_sender import Resumption, lost_tail
from rocketmq_spark.deliveries.effectively_once.stored import (
    count_repeats,
    most_queues,
    queues_of,
    read_stored,
    row_id_name,
    row_id_prefix,
    starts_of,
)
from rocketmq_spark.deliveries.effectively_once.stored_rows import StoredRows
from rocketmq_spark.deliveries.exactly_once.commit import warn_of_complete
from rocketmq_spark.deliveries.exactly_once.plan import check_stream, log_of, read_log
from rocketmq_spark.deliveries.log.brokers import Brokers
from rocketmq_spark.deliveries.log.decision_log import DecisionLog, Floors
from rocketmq_spark.deliveries.log.records import Begun, Write
from rocketmq_spark.errors import DataLossError, InputChangedError
from rocketmq_spark.metrics import Measures, Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.client_instance import ClientInstance

T = TypeVar("T")

logger = logging.getLogger("rocketmq_spark.producer")

# After a broker has answered, it may store requests that it received before this much later, seconds.
_BARRIER_WAIT: Final = 1.0


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What tasks need to know of an effectively-once write; Spark pickles it."""

    log_name: str
    home: MessageQueue
    position: int  # Up to this offset the driver has read the home
    planned_at: float  # Epoch seconds; attempts in `begun` began before
    write: Write | None  # The batch write with ``writeId``
    done: bool  # Whether it was completed before
    newest: Write | None  # The newest micro-batch that was completed
    since: int  # An offset of the home from which all records follow that a new plan needs
    floors: tuple[Floors, ...]
    begins: Begun  # What the tasks of this plan record
    begun: Mapping[Write, Mapping[int, Sequence[Begun]]]  # What earlier tasks have recorded, by partition

    def write_of(self, name: str, batch_id: int) -> Write:
        """Return the write that a task belongs to; `name` is a query id."""
        return self.write or Write(str(batch_id), name)

    def is_decided(self, write: Write) -> bool:
        """Return whether the batch write was completed before, so that tasks have nothing to send."""
        return self.done and write == self.write

    def floors_of(self, write: Write) -> Floors | None:
        """Return the newest floors below all rows of a write; None if they have expired."""
        return next((floors for floors in reversed(self.floors) if floors.after != write), None)


@dataclass(frozen=True, slots=True)
class Attempted:
    """What a task tells the driver: its partition, whether it had rows, and whether it looked for stored rows."""

    partition_id: int
    begun: bool
    recovered: bool


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What the end of a write found: rows that are stored twice."""

    NAME: ClassVar[str] = "effectively_once"  # In the lines of ``metricsPath``

    repeated_rows: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        repeats = f", {self.repeated_rows} rows are stored twice" if self.repeated_rows else ""
        return f"completed in {self.seconds:.2f} s{repeats}"


def plan(
    brokers: Brokers, log: DecisionLog, write: Write | None, queues: Sequence[MessageQueue] | None = None
) -> ResumePlan:
    """Return the plan of a batch write with ``writeId``, or of another write (None), by the log.

    `queues` are those of an ordered write.

    Raises an MQClientException or another RocketMQError if the user may not read the topic, or not store records.
    """
    info = brokers.routes().look_up(str(brokers.options.topic))
    names = info.broker_names.union(queue.broker_name for queue in queues or ())
    brokers.ensure_topic(log.topic, names)
    is_first = not (log.writes or log.floors)
    read_log(log, brokers, everything=write is not None)
    if is_first and not info.template:
        # Only a recovery reads the topic. A missing right must show before the first row.
        brokers.check_readable(info.queues[0])
    existing = () if info.template else info.queues
    ends = None
    if not log.floors if write is None else write not in log.writes:
        ends = brokers.max_offsets(existing)
        claim = None
        if not (log.writes or log.floors):
            claim = log.claim_home(brokers, write or Write(""), names)
        log.append_floors(brokers, write, ends, claim)
    known_nums = most_queues({queue.broker_name: queue.queue_id + 1} for queue in (*info.queues, *(queues or ())))
    queue_nums = {name: known_nums.get(name, 0) for name in names}
    known, done = tuple(log.floors), False
    if write is not None:
        # Read after the floors were stored: another driver may have completed the write while this one was frozen.
        state = log.writes[write]
        done = state.done
        # Floors after other writes may be too high. So a write whose own floors have expired has none.
        known = () if state.floors is None else (Floors(None, state.floors, state.since),)
    assert log.home is not None
    if ends is None:
        # A process that has not read the log before may follow a failure of brokers.
        asked = existing if is_first else [q for q in existing if any(q not in floors.by_queue for floors in known)]
        ends = brokers.ends_at_once(asked)
    begun = {
        other: {part: tuple(attempts.values()) for part, attempts in state.begun.items()}
        for other, state in log.writes.items()
        if state.begun
    }
    since = log.floors[0].offset if log.floors else 0
    # After the last record was read: a driver may have been frozen since it began to plan.
    planned_at = brokers.runtime.wall_clock()
    return ResumePlan(
        log.transactional_id,
        log.home,
        log.position,
        planned_at,
        write,
        done,
        log.newest,
        since,
        known,
        Begun(queue_nums, _corrected(brokers, known, ends)),
        begun,
    )


def _corrected(brokers: Brokers, known: Sequence[Floors], ends: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
    """Return the ends of queues that lack a known floor, or whose floor is above their end."""
    corrected = {}
    for queue, end in ends.items():
        highest = max((floors.by_queue.get(queue, -1) for floors in known), default=-1)
        if highest > end:
            brokers.warn_of_lost_tail(queue, highest, end, "Rows of this write are looked for from there on")
        if highest > end or any(queue not in floors.by_queue for floors in known):
            corrected[queue] = end
    return corrected


Send: TypeAlias = Callable[[Recorder, Iterator[pa.RecordBatch], str, Resumption], None]
"""Sends the record batches of a partition, without the rows that the resumption knows. The text begins row ids."""


def send_missing(
    write: Callable[..., None],
    recorder: Recorder,
    batches: Iterator[pa.RecordBatch],
    write_id: str,
    resumption: Resumption,
) -> None:
    """Send the rows that are not stored by `write`, which has the last parameters of `write_rows`.

    Raises an InputChangedError if a stored row differs, or the partition has fewer rows than are stored.
    """
    rows = 0

    def counted() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in batches:
            rows += batch.num_rows
            yield batch

    write(recorder, counted(), write_id=write_id, rules=resumption.rules())
    if resumption.stored is not None:
        resumption.stored.check_end(rows, recorder.partition_id)


@dataclass(eq=False, repr=False)
class Attempt:
    """One attempt at a partition, in its task."""

    brokers: Brokers
    plan: ResumePlan
    write: Write
    partition_id: int
    # No other attempt sends from this time on (epoch seconds); None: there was no other attempt.
    alone_since: float | None = field(default=None, init=False)
    # Whether its record is in the log, and whether it has looked for stored rows.
    begun: bool = field(default=False, init=False)
    recovered: bool = field(default=False, init=False)
    # Where queues ended when it looked for rows of earlier attempts.
    _ends: Mapping[MessageQueue, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.brokers.rng.getrandbits(64):016x}"
        self._log = DecisionLog(self.plan.log_name, self.brokers.options.transaction_topic)
        self._log.home, self._log.position = self.plan.home, self.plan.position

    def run(self, recorder: Recorder, rows: Iterator[pa.RecordBatch], send: Send) -> Attempted | None:
        """Send the rows of the partition that no earlier attempt has stored.

        Return None if the write was completed before. Raises as `write_rows`, an InputChangedError if the rows are not
        those of an earlier attempt, and an OptionError or DataLossError if the log does not continue with this write.
        """
        self._check()
        if self.plan.done:
            recorder.record_incomplete()
            return None
        if (first := next(rows, None)) is not None:
            stored = self._begin()
            if self._completed_since:
                recorder.record_incomplete()
                return None
            if stored is not None:
                recorder.record_repeats(stored.repeats)
            floors = {**self._floors, **self.plan.begins.floors}
            names = frozenset(self.plan.begins.queue_nums)
            resumption = Resumption(self._settle, floors, self._ends, names, stored)
            name = row_id_name(self.brokers.options, self.write)
            send(recorder, itertools.chain([first], rows), name, resumption)
        elif self.partition_id in self.plan.begun.get(self.write, {}):
            raise _shrunk(self.write, [self.partition_id])
        return Attempted(self.partition_id, self.begun, self.recovered)

    def _check(self) -> None:
        """Raise if the log does not continue with this write."""
        check_stream(self.brokers.options, self.plan, self.write)
        if self.plan.floors_of(self.write) is None and not self.plan.done:
            raise DataLossError(
                f"{self.write}: the records before it in the decision log of transactionalId="
                f"{self._log.transactional_id} have expired, so it is unknown which of its rows are stored. Compare "
                "them with the topic, and use another transactionalId"
            )

    def _begin(self) -> StoredRows | None:
        """Store that the attempt begins; return the rows that earlier attempts have stored, None if there are none."""
        plan, part = self.plan, self.partition_id
        self._log.append_begun(self.brokers, self.write, part, self.id, plan.begins, plan.since)
        self.begun = True
        if self._completed_since:
            return None
        before_plan = plan.begun.get(self.write, {}).get(part, ())
        attempts = self._log.writes[self.write].begun[part]
        since_plan = [attempts[name] for name in itertools.takewhile(self.id.__ne__, attempts)]
        earlier = [*before_plan, *since_plan]
        if not earlier:
            return None
        now = self.brokers.runtime.wall_clock()
        # Attempts that the plan knows ended before it.
        self.alone_since = now if since_plan else min(plan.planned_at, now)
        self.recovered = True
        logger.warning("%s, partition %d: an earlier attempt began it; reading its rows", self.write, part)
        names = most_queues(one.queue_nums for one in earlier).keys()
        self._pass_fence(names, self.alone_since + self.brokers.options.fence_ms / 1000 - now)
        floors = queues_of(self.brokers, earlier, self._floors)
        self._ends = ends = self.brokers.max_offsets(floors)
        return self._read(starts_of(self.brokers, self.write, floors, ends), ends)

    @property
    def _completed_since(self) -> bool:
        """Whether another driver has completed the batch write since the plan, for example while this one was frozen.

        The log has no attempts of a completed batch write any more. Those of a micro-batch remain.
        """
        return not self.write.query and self._log.writes[self.write].done

    def _settle(self, floors: Mapping[MessageQueue, int], late: bool) -> StoredRows:
        """Return the rows of this partition that queues have; see `Settle`."""
        self.recovered = True
        text = "%s, partition %d: reading queues %s, because the outcome of requests is unknown"
        logger.warning(text, self.write, self.partition_id, ", ".join(sorted(map(str, floors))))
        self._pass_fence({queue.broker_name for queue in floors}, self.brokers.options.fence_ms / 1000 if late else 0.0)
        ends = self.brokers.max_offsets(floors)
        for queue, floor in floors.items():
            if ends[queue] < floor:
                # Acknowledged or recovered rows may be lost. The next attempt reads the queue again.
                raise lost_tail(queue, floor, ends[queue])
        return self._read(floors, ends)

    def _pass_fence(self, broker_names: Collection[str], seconds: float) -> None:
        pass_fence(self.brokers, self._log, self.write, broker_names, seconds)

    def _read(self, starts: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int]) -> StoredRows:
        prefix = row_id_prefix(self.brokers.options, self.write, self.partition_id)
        return read_stored(self.brokers, starts, ends, prefix)

    @property
    def _floors(self) -> Mapping[MessageQueue, int]:
        """Offsets below all rows of the write, by queue. Attempts have recorded those of other queues."""
        floors = self.plan.floors_of(self.write)
        return {} if floors is None else floors.by_queue


def complete(
    brokers: Brokers,
    log: DecisionLog,
    plan: ResumePlan,
    write: Write,
    attempts: Sequence[Attempted],
    broker_names: Collection[str],
) -> ResumeReport:
    """Record that all rows of a write are stored; after faults, count those that are stored twice.

    `broker_names` are the brokers that have acknowledged rows.

    Raises an InputChangedError if an earlier attempt had rows in a partition that the write does not have now, and as
    `DecisionLog.check_only`.
    """
    options, started = brokers.options, brokers.clock()
    read_log(log, brokers, everything=plan.write is not None)
    state = log.writes.get(write)
    if write == Write("") or plan.done or (plan.write is not None and state is not None and state.done):
        if state is not None and state.done and not (plan.done or attempts):
            # Another driver has completed it since the plan.
            warn_of_complete(write, state)
        return ResumeReport()
    log.check_current(write)
    log.check_only(brokers)
    begun = {attempt.partition_id for attempt in attempts if attempt.begun}
    if state is not None and (gone := sorted(set(state.begun) - begun)):
        raise _shrunk(write, gone)
    repeated = 0
    known_attempts = {} if state is None else state.begun
    recovered = [
        attempt.partition_id
        for attempt in attempts
        if attempt.recovered or len(known_attempts.get(attempt.partition_id, ())) > 1
    ]
    known = plan.floors_of(write)
    if recovered:
        assert state is not None
        all_begun = [one for part in recovered for one in state.begun[part].values()]
        # All rows are readable then.
        pass_fence(brokers, log, write, most_queues(one.queue_nums for one in all_begun).keys(), 0.0)
        floors = queues_of(brokers, all_begun, {} if known is None else known.by_queue)
        ends = brokers.max_offsets(floors)
        starts = starts_of(brokers, write, floors, ends)
        repeated = count_repeats(brokers, starts, ends, row_id_prefix(options, write), recovered)
        if repeated:
            logger.warning(
                "%s: %d rows are stored twice, because a broker stored requests of a failed attempt later than "
                "fenceMs=%d after it, or another producer stored messages with their ids. Remove repeats with "
                "rocketmq_spark.dedupe, or raise fenceMs",
                *(write, repeated, options.fence_ms),
            )
    assert log.home is not None
    log.append_homes(brokers, write, set(broker_names) - {log.home.broker_name})
    # The floors of other brokers, which may be down, stay. A queue that is gone has no floor when it comes back.
    queues = brokers.routes().look_up(str(options.topic)).queues
    used = brokers.max_offsets(queue for queue in queues if queue.broker_name in broker_names)
    old = {} if known is None else {queue: known.by_queue[queue] for queue in queues if queue in known.by_queue}
    for queue, end in used.items():
        if end < old.get(queue, 0) and queue not in plan.begins.floors:
            brokers.warn_of_lost_tail(queue, old[queue], end, "Rows of this write may be stored twice")
    log.append_done_at(brokers, write, {**old, **used}, plan.since)
    return ResumeReport(repeated, brokers.clock() - started)


def write_once(
    options: SinkOptions,
    instance: ClientInstance,
    recorder: Recorder,
    rows: Iterator[pa.RecordBatch],
    queues: Sequence[MessageQueue] | None,
    send: Send,
) -> None:
    """Write one partition in this process, without Spark: plan, send and complete. `queues` are as of `plan`.

    A call with the ``writeId`` of a failed one continues it. Raises as `plan`, `Attempt.run` and `complete`.
    """
    brokers, log, write = Brokers(options, instance), log_of(options), Write(str(options.write_id))
    planned = plan(brokers, log, write, queues)
    if planned.done:
        warn_of_complete(write, log.writes[write])
    attempted = Attempt(brokers, planned, write, recorder.partition_id).run(recorder, rows, send)
    if attempted is None:
        recorder.record_skipped_write(str(write))
    else:
        names = Measures.unpack(recorder.snapshot().packed).brokers.keys()
        complete(brokers, log, planned, write, [attempted], names)


def pass_fence(brokers: Brokers, log: DecisionLog, write: Write, broker_names: Collection[str], seconds: float) -> None:
    """Return when all that these brokers will store of earlier requests is stored safely, and can be read.

    The caller vouches that no such request is stored `seconds` from now on, or 1 s after the broker has answered.
    """
    if not broker_names:
        return
    brokers.ask_all(sorted(broker_names), lambda name: brokers.max_offsets([MessageQueue(log.topic, name, 0)]))
    brokers.runtime.sleep(max(seconds, _BARRIER_WAIT))
    brokers.await_listed(log.topic, broker_names)
    # A broker acknowledges this record only after it has flushed and replicated what it stored before.
    stored = log.append_homes(brokers, write, set(broker_names))
    brokers.ask_all(stored, lambda queue: brokers.await_readable(queue, stored[queue]))


def _shrunk(write: Write, partitions: Sequence[int]) -> InputChangedError:
    return InputChangedError(
        f"{write}: an earlier attempt stored rows of partition {', '.join(map(str, partitions))}, and now the write "
        "has no rows there, so the input is not the same at each reading, or has other partitions. Make it so, or use "
        "delivery=exactlyOnce. Stored rows stay visible"
    )
