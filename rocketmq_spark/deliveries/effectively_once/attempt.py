"""One attempt at a partition of an effectively-once write, in its task.

The task stores a record that it begins its partition. If the log has an earlier record of this partition, the task
reads the queues from their ends before the write on, and sends the rows that are missing.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.deliveries.base import PartitionResult, Send, Write
from rocketmq_spark.deliveries.effectively_once.lease import Lease, attempt_id, driver_of, fence_seconds, instant
from rocketmq_spark.deliveries.effectively_once.plan import ResumePlan
from rocketmq_spark.deliveries.effectively_once.resolving_sender import SEND_MISSING, Resumption
from rocketmq_spark.deliveries.effectively_once.stored import (
    floors_now,
    floors_of,
    most_queues,
    read_stored,
    row_id_name,
)
from rocketmq_spark.deliveries.effectively_once.stored_rows import RUN_AGAIN, QueueRows, StoredRows
from rocketmq_spark.deliveries.effectively_once.tokens import attempt_token
from rocketmq_spark.deliveries.log.brokers import COMPARE, Brokers
from rocketmq_spark.deliveries.log.decision_log import BARRIER_WAIT, DecisionLog
from rocketmq_spark.deliveries.log.delivery import check_stream
from rocketmq_spark.deliveries.log.keys import keys_of
from rocketmq_spark.deliveries.log.scan import Floor, Known
from rocketmq_spark.deliveries.log.state import WriteState
from rocketmq_spark.errors import DataLossError, DeliveryError, InputChangedError, RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.sink.failures import lost_tail

logger = logging.getLogger("rocketmq_spark.producer")


@dataclass(frozen=True, slots=True)
class Attempted(PartitionResult):
    """What a task tells the driver: its partition, whether it had rows, and whether it looked for stored rows."""

    partition_id: int
    # Its id; empty if it had no rows.
    attempt: str
    recovered: bool
    rows: int  # How many rows of the partition are stored, each of them counted once
    # The spans of `Recorder.stored` as JSON: Spark's messages to the driver have no receipt.
    spans: bytes


@dataclass(eq=False, repr=False)
class Attempt:
    """One attempt at a partition, in its task."""

    brokers: Brokers
    plan: ResumePlan
    write: Write
    partition_id: int
    # From the record that it begins on.
    lease: Lease = field(init=False)
    # Whether it has looked for stored rows.
    recovered: bool = field(default=False, init=False)
    # Where queues ended when it looked for rows of earlier attempts.
    _ends: Mapping[MessageQueue, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.id = attempt_id(self.brokers, self.plan.driver)
        keys = keys_of(self.brokers.options).signing_with(self.plan.key_id)
        self._log = DecisionLog(self.plan.log_name, self.brokers.options.transaction_topic, keys)
        self._content = ContentHash(numbered=self.brokers.options.ordered)
        begun = {part: dict(attempts) for part, attempts in self.plan.begun.get(self.write, {}).items()}
        state = WriteState(self.plan.since, done=self.write in self.plan.completed, begun=begun)
        self._log.resume(self.plan.home, self.plan.position, self.write, state)
        self._own_token = self._token(self.id, keys.signs)

    def run(self, recorder: Recorder, rows: Iterator[pa.RecordBatch], send: Send) -> Attempted | None:
        """Send the rows of the partition that no earlier attempt has stored.

        Return None if the write was completed before. Raises as `write_rows`, an InputChangedError if the rows are not
        those of an earlier attempt, and an OptionError or DataLossError if the log does not continue with this write.
        """
        self._check()
        if self.plan.done:
            recorder.record_incomplete()
            return None
        begun = ""
        if (first := next(rows, None)) is not None:
            if self.write in self.plan.completed and self.partition_id not in self._log.writes[self.write].begun:
                raise InputChangedError(
                    f"{self.write} was completed without rows in partition {self.partition_id}, and now it has some, "
                    "so the input is not the same at each reading, or has more partitions. No row of this partition is "
                    "sent. If they are new rows, write them as another write. Do not change the delivery of this one"
                )
            stored = self._begin()
            if self._completed_since:
                recorder.record_incomplete()
                return None
            offsets = {**self._start_offsets, **self.plan.begins.start_offsets}
            resumption = Resumption(
                self._read_stored,
                self._own_token,
                self._content,
                {queue: Known(offset) for queue, offset in offsets.items()},
                self._ends,
                self.plan.begins.queue_nums,
                stored,
                self.lease,
            )
            begun = self.id
            name = row_id_name(self.brokers.options, self.write)
            try:
                send(itertools.chain([first], rows), row_id_name=name, rules=resumption.rules())
                if stored is not None:
                    stored.check_end()
            except InputChangedError:
                self._record_changed(changed=True)
                raise
            if stored is not None:
                recorder.record_repeats(stored.repeats)
                if stored.missing:
                    self._record_changed(changed=False)
                    raise DeliveryError(
                        f"{self.write}, partition {self.partition_id}: an earlier attempt had other rows than the "
                        "stored ones, so this attempt has only compared its rows. They are the same now, and "
                        f"{stored.missing} are missing. The next attempt sends them"
                    )
        elif self.partition_id in self.plan.begun.get(self.write, {}):
            gone = [self.partition_id]
            record_changed(self.brokers, self._log, self.plan, self.write, gone, changed=True)
            raise shrunk(self.write, gone)
        stored_rows, spans = recorder.stored(str(self.brokers.options.topic))
        return Attempted(self.partition_id, begun, self.recovered, stored_rows, json.dumps(spans).encode())

    def _check(self) -> None:
        """Raise if the log does not continue with this write."""
        check_stream(self.brokers.options, self.plan, self.write, self.plan.begun)
        if self.plan.start_offsets_of(self.write) is None and not self.plan.done:
            raise DataLossError(
                f"{self.write}: its first records in the decision log of transactionalId={self._log.transactional_id} "
                f"(queue {self.plan.home}) have expired (fileReservedTime). {COMPARE}"
            )

    def _begin(self) -> StoredRows | None:
        """Store that the attempt begins; return the rows that earlier attempts have stored, None if there are none."""
        plan, part, asked = self.plan, self.partition_id, instant(self.brokers.runtime)
        self._log.append_begun(self.brokers, self.write, part, self.id, plan.begins, plan.since)
        if self._completed_since:
            return None
        was_done = self.write in plan.completed
        self.lease = Lease(self.brokers, self._log, self.write, part, self.id, asked, was_done)
        attempts = self._log.writes[self.write].begun[part]
        earlier = {name: attempts[name] for name in itertools.takewhile(self.id.__ne__, attempts)}
        if not earlier:
            return None
        self.recovered = True
        logger.warning("%s, partition %d: an earlier attempt began it; reading its rows", self.write, part)
        verdicts = [one.changed for one in earlier.values() if one.changed is not None]
        names = most_queues(one.queue_nums for one in earlier.values()).keys()
        # Its record is readable, so leases of earlier attempts end within this time. Each has a fence of its own.
        fences = [one.fence_ms / 1000 for one in earlier.values()]
        self._pass_fence(names, max(fence_seconds(self.brokers.options), *fences))
        floors = floors_of(self.brokers, list(earlier.values()), self._start_offsets)
        self._ends = ends = self.brokers.max_offsets(floors)
        tokens = {self._token(name, one.key_id) for name, one in earlier.items() if one.changed is None}
        floors = floors_now(self.brokers, floors, ends, tokens)
        rows = read_stored(self.brokers, floors, ends, tokens, self._content)
        return StoredRows(self._content, rows, part, only_compares=verdicts[-1:] == [True])

    def _record_changed(self, *, changed: bool) -> None:
        """Store whether this attempt had other rows than the stored ones; see `record_changed`."""
        partitions = [self.partition_id]
        record_changed(self.brokers, self._log, self.plan, self.write, partitions, changed=changed, lease=self.lease)

    @property
    def _completed_since(self) -> bool:
        """Whether another driver has completed the batch write since the plan, for example while this one was frozen.

        The log has no attempts of a completed batch write any more. Those of a micro-batch remain.
        """
        return not self.write.query and self._log.writes[self.write].done

    def _read_stored(self, floors: Mapping[MessageQueue, Floor], late: bool) -> list[QueueRows]:
        """Return the rows of this attempt that queues have; see `ReadStored`."""
        self.recovered = True
        text = "%s, partition %d: reading queues %s, because the outcome of requests is unknown"
        logger.warning(text, self.write, self.partition_id, ", ".join(sorted(map(str, floors))))
        self._pass_fence({queue.broker_name for queue in floors}, fence_seconds(self.brokers.options) if late else 0.0)
        ends = self.brokers.max_offsets(floors)
        for queue, floor in floors.items():
            if isinstance(floor, Known) and ends[queue] < floor.offset:
                # Acknowledged or recovered rows may be lost. The next attempt reads the queue again.
                raise lost_tail(queue, floor.offset, ends[queue], SEND_MISSING)
        return read_stored(self.brokers, floors, ends, {self._own_token}, self._content)

    def _pass_fence(self, broker_names: Collection[str], seconds: float) -> None:
        pass_fence(self.brokers, self._log, self.write, broker_names, seconds)

    def _token(self, attempt_id: str, key_id: str) -> str:
        return attempt_token(self._log.keys, key_id, self.plan.log_name, self.write, self.partition_id, attempt_id)

    @property
    def _start_offsets(self) -> Mapping[MessageQueue, int]:
        """Offsets below all rows of the write, by queue. Attempts have recorded those of other queues."""
        start_offsets = self.plan.start_offsets_of(self.write)
        return {} if start_offsets is None else start_offsets.by_queue


def pass_fence(brokers: Brokers, log: DecisionLog, write: Write, broker_names: Collection[str], seconds: float) -> None:
    """Return when all that these brokers will store of earlier requests is stored safely, and can be read.

    The caller vouches that no such request is stored `seconds` from now on, or 1 s after the broker has answered.
    """
    if not broker_names:
        return
    brokers.for_each(sorted(broker_names), lambda name: brokers.max_offsets([MessageQueue(log.topic, name, 0)]))
    brokers.runtime.sleep(max(seconds, BARRIER_WAIT))
    log.await_stored(brokers, write, broker_names)


def record_changed(
    brokers: Brokers,
    log: DecisionLog,
    plan: ResumePlan,
    write: Write,
    partitions: Sequence[int],
    *,
    changed: bool,
    lease: Lease | None = None,
) -> None:
    """Store whether attempts had other rows than the stored ones. After True, the next attempts send none.

    It stores nothing if the `lease` of the attempt has ended, or another driver has begun a partition since the plan.
    """
    verdict, known = replace(plan.begins, changed=changed), plan.begun.get(write, {})
    try:
        log.refresh(brokers)
        log.check_current(write)
        if lease is not None:
            lease.check()
        newest = {part: next(reversed(log.writes[write].begun.get(part, {})), "") for part in partitions}
        for part, attempt in newest.items():
            if attempt not in known.get(part, {}) and driver_of(attempt) != plan.driver:
                raise DeliveryError(f"another driver has begun partition {part} since, or has completed the write")
        for part in partitions:
            log.append_begun(brokers, write, part, attempt_id(brokers, plan.driver), verdict, plan.since)
    except RocketMQError as exc:
        text = "%s: it is not recorded whether the input has changed, so the next attempts do not know it: %s"
        logger.warning(text, write, exc)


def shrunk(write: Write, partitions: Sequence[int]) -> InputChangedError:
    """Return the error of a write that has no rows in partitions which had some."""
    return InputChangedError(
        f"{write}: an earlier attempt stored rows of partition {', '.join(map(str, partitions))}, and now the write "
        f"has no rows there, so the input is not the same at each reading, or has other partitions. {RUN_AGAIN}"
    )
