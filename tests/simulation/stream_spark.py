"""Spark's part of a streaming query: the logs of its checkpoint, its triggers, its tasks and its sink.

Follows ``MicroBatchExecution.scala`` and ``PythonMicroBatchStream.scala`` of Spark 4.0 to 4.3: the driver writes the
end of a micro-batch to the offset log, runs the micro-batch, and writes the commit log. A driver that starts runs the
last micro-batch again if the commit log lacks it. Offsets go through JSON. A driver may crash before and after each of
these steps, and before and after each request of the connector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import flat, stored_in
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.source.plan import ReadPlan
from rocketmq_spark.source.read import SkippedMessages, rows_over
from rocketmq_spark.source.stream_offsets import StreamOffsets
from rocketmq_spark.spark.reader import ReadPartition
from rocketmq_spark.spark.stream_reader import LimitedStreamReader, RocketMQStreamReader
from tests.simulation.stream_brokers import InlineRuntime, StreamCluster, StreamTransport

T = TypeVar("T")

# How often a query runs micro-batches: again and again, or until it has read what was there at its start.
PROCESSING_TIME, AVAILABLE_NOW = "processing time", "available now"

_SCHEMA: Final = StructType([StructField("queueOffset", LongType()), StructField("body", BinaryType())])
# The number of a message, which is its body, says which queue it is of. Fewer columns take less time.
_ARROW: Final = pa.schema([("queueOffset", pa.int64()), ("body", pa.binary())])
# With onUnreadable=raw.
_RAW_SCHEMA: Final = StructType([*_SCHEMA, StructField("unreadable", StringType())])
_RAW_ARROW: Final = _ARROW.append(pa.field("unreadable", pa.string()))
# Spark's spark.task.maxFailures is 4.
_TASK_ATTEMPTS: Final = 2


class Row(NamedTuple):
    """A row of a micro-batch; `number` is that of its message."""

    queue: MessageQueue
    offset: int
    number: int


class DriverEnd(BaseException):
    """The driver's process ends here."""


@dataclass(eq=False)
class BatchRun:
    """One run of a micro-batch by one driver; `rows` has those of each task in the order of its partitions."""

    batch: int
    start: str
    end: str
    driver: DriverRun
    began: float
    # When its driver began to look for the ends of its queues; `began` if another driver did.
    looked: float
    planned: float = math.inf
    rows: list[list[Row]] = field(default_factory=list)
    # Pairs of two runs of one task that returned different rows, with the time of the second.
    unequal: list[tuple[list[Row], list[Row], float]] = field(default_factory=list)
    # When the sink has got all rows.
    ended: float = math.inf

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all tasks."""
        return [row for rows in self.rows for row in rows]

    @property
    def planned_by(self) -> float:
        """When its plan was complete, or its driver ended before that."""
        return self.planned if math.isfinite(self.planned) else self.driver.ended


class Beginning(NamedTuple):
    """Where a query would begin, with store times, and when `initialOffset` was called and returned."""

    called: float
    returned: float
    offsets: dict[MessageQueue, int]
    times: dict[MessageQueue, int]


class Target(NamedTuple):
    """When `prepareForTriggerAvailableNow` was called, and the ends of all queues before and after it."""

    called: float
    before: dict[MessageQueue, int]
    after: dict[MessageQueue, int]


@dataclass(eq=False)
class DriverRun:
    """One driver: its options, and what happened to it."""

    number: int
    options: SourceOptions
    trigger: str
    legacy: bool
    began: float
    ended: float = math.inf
    error: RocketMQError | None = None
    # Whether Spark ended the query because a Trigger.AvailableNow was done.
    finished: bool = False
    initial: Beginning | None = None
    target: Target | None = None
    # The offsets of its checkpoint.
    known: dict[MessageQueue, int] = field(default_factory=dict)
    # Its last triggers without a micro-batch.
    rest: int = 0


@dataclass(eq=False)
class StreamHistory:
    """Everything that the checks look at."""

    drivers: list[DriverRun] = field(default_factory=list)
    runs: list[BatchRun] = field(default_factory=list)
    # The offset log: the end of each micro-batch, when it was written, and by which driver. The commit log: when.
    ends: list[tuple[str, float, DriverRun]] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    # Offsets that were committed for the consumer group: time, queue, offset, micro-batches in the commit log.
    group_commits: list[tuple[float, MessageQueue, int, int]] = field(default_factory=list)
    warnings: list[tuple[float, str]] = field(default_factory=list)
    # When each call to the reader, and each task, began.
    calls: list[float] = field(default_factory=list)
    # When the last fault has ended.
    calm: float = math.inf


@dataclass(frozen=True)
class Habits:
    """How a driver runs: what Spark does now and then, by its chance."""

    interval: float = 1.0
    # Micro-batches are planned twice, tasks run twice, commits are lost, tasks begin late.
    plans_twice: float = 0.0
    tasks_twice: float = 0.0
    commits_lost: float = 0.0
    late_tasks: float = 0.0


class Driver:
    """One driver's process, from its start until it crashes, fails, is stopped or is done."""

    def __init__(
        self,
        cluster: StreamCluster,
        runtime: InlineRuntime,
        history: StreamHistory,
        run: DriverRun,
        habits: Habits,
        step: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self.cluster, self.world, self.runtime = cluster, cluster.world, runtime
        self.history, self.record, self.habits = history, run, habits
        self.step, self._is_stopped = step, is_stopped
        self._looked = math.inf
        transport: Any = StreamTransport(cluster, runtime, step)
        transport.on_commit = self._on_group_commit
        offsets = StreamOffsets(
            run.options, transport, runtime.clock, "10.0.0.1@spark#17", runtime.sleep, runtime=runtime
        )  # fmt: skip
        # PySpark 4.0 and 4.1 have no limits.
        reader_class = RocketMQStreamReader if run.legacy else LimitedStreamReader
        self.reader = reader_class(run.options, _RAW_SCHEMA if run.options.on_unreadable == "raw" else _SCHEMA)
        self.reader._cluster = offsets

    def run(self) -> None:
        """Run the query. RocketMQError: it has failed. DriverEnd: the driver has crashed."""
        record = self.record
        try:
            limit = None if record.legacy else self._prepare()
            start, end = self._resume()
            while not self._is_stopped():
                due = self.world.now + self.habits.interval
                if end is None:
                    end = self._construct(start, limit)
                if end is None:
                    record.rest += 1
                    record.finished = record.trigger == AVAILABLE_NOW
                else:
                    self._run_batch(start, end)
                    start, end, record.rest = end, None, 0
                    # Before PySpark 4.2 Spark has no target: it runs one micro-batch.
                    record.finished = record.trigger == AVAILABLE_NOW and record.legacy
                if record.finished:
                    return
                if record.trigger == PROCESSING_TIME:
                    self.world.advance(due - self.world.now)
        finally:
            self.reader.stop()

    def _resume(self) -> tuple[str | None, str | None]:
        """Return the start of the next micro-batch (None: of the query), and the end of one that is not complete."""
        history = self.history
        if not history.ends:
            return None, None
        last = history.ends[-1][0]
        self.record.known = flat(json.loads(last))
        self._call("seen", self.reader.partitions, json.loads(last), json.loads(last))
        if len(history.committed) == len(history.ends):
            return last, None
        return history.ends[-2][0] if len(history.ends) > 1 else None, last

    def _prepare(self) -> Any:
        record, reader = self.record, self.reader
        assert isinstance(reader, LimitedStreamReader)
        if record.trigger == AVAILABLE_NOW:
            began, before = self.world.now, self._ends()
            self._call("prepare", reader.prepareForTriggerAvailableNow)
            record.target = Target(began, before, self._ends())
        return self._call("limit", reader.getDefaultReadLimit)

    def _ends(self) -> dict[MessageQueue, int]:
        """Return the ends of the queues that can be read."""
        cluster = self.cluster
        return {queue: len(log.records) for queue, log in cluster.queues() if cluster.is_readable(queue)}

    def _construct(self, start: str | None, limit: Any) -> str | None:
        """Write the end of the next micro-batch to the offset log; return None if there is nothing to read."""
        history, reader = self.history, self.reader
        self._looked = self.world.now
        if self.record.legacy:
            offset = self._call("latestOffset", reader.latestOffset)
        else:
            begin = self._initial() if start is None else json.loads(start)
            offset = self._call("latestOffset", reader.latestOffset, begin, limit)
            self._call("reportLatestOffset", reader.reportLatestOffset)
        end = json.dumps(offset)
        if end == start:
            return None
        self.step("before the offset log")
        history.ends.append((end, self.world.now, self.record))
        self.world.note(f"offset log {len(history.ends) - 1}: {end}")
        self.step("after the offset log")
        if len(history.ends) > 1 and not self._happens("lost commit", self.habits.commits_lost):
            self._call("commit", reader.commit, json.loads(history.ends[-2][0]))
        return end

    def _initial(self) -> Any:
        began = self.world.now
        offset = self._call("initialOffset", self.reader.initialOffset)
        if self.record.initial is None:
            self.record.initial = Beginning(began, self.world.now, flat(offset), stored_in(offset))
        return json.loads(json.dumps(offset))

    def _run_batch(self, start: str | None, end: str) -> None:
        """Run a micro-batch, and write it to the commit log."""
        history, world, rng = self.history, self.world, self.cluster.rng
        begin = self._initial() if start is None else json.loads(start)
        now = world.now
        run = BatchRun(len(history.ends) - 1, json.dumps(begin), end, self.record, now, min(now, self._looked))
        history.runs.append(run)
        partitions: Sequence[InputPartition] = ()
        for _ in range(1 + self._happens("plans twice", self.habits.plans_twice)):
            partitions = self._call("partitions", self.reader.partitions, json.loads(run.start), json.loads(end))
        run.planned = world.now
        for partition in partitions:
            if self._happens("late tasks", self.habits.late_tasks):
                world.advance(rng.random() * rng.choice((2.0, 30.0)))
            run.rows.append(self._task(partition))
        # A sink may read the micro-batch again, and Spark runs tasks again.
        for partition, rows in zip(partitions, run.rows, strict=True):
            if self._happens("tasks twice", self.habits.tasks_twice):
                again = self._task(partition)
                if again != rows:
                    run.unequal.append((rows, again, world.now))
        self.step("before the sink")
        run.ended = world.now
        world.note(f"micro-batch {run.batch}: {len(run.all_rows)} rows")
        self.step("before the commit log")
        history.committed.append(world.now)
        self.step("after the commit log")

    def _happens(self, kind: str, chance: float) -> bool:
        """Draw whether something happens, and count it."""
        happens = self.cluster.rng.random() < chance
        self.cluster.counts[kind] += happens
        return happens

    def _task(self, partition: InputPartition) -> list[Row]:
        """Run a task, again if it fails."""
        assert isinstance(partition, ReadPartition)
        for attempt in range(_TASK_ATTEMPTS):
            self.history.calls.append(self.world.now)
            try:
                return self._read(partition.plan)
            except RocketMQError:
                self.cluster.counts["task failed"] += 1
                if attempt == _TASK_ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _read(self, plan: ReadPlan) -> list[Row]:
        """Return what one attempt at a task reads."""
        options = self.record.options
        transport: Any = StreamTransport(self.cluster, self.runtime, self.step)
        self.step("task")
        rows: list[Row] = []
        records, skipped = self.cluster.records, SkippedMessages(transport.clock)
        schema = _RAW_ARROW if options.on_unreadable == "raw" else _ARROW
        for batch in rows_over(transport, options, plan, schema, skipped.policy(options), self.runtime):
            numbers = map(int, batch.column("body").to_pylist())
            rows += (
                Row(records[number].queue, offset, number)
                for number, offset in zip(numbers, batch.column("queueOffset").to_pylist(), strict=True)
            )
        skipped.close()
        transport.close()
        return rows

    def _call(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        self.history.calls.append(self.world.now)
        self.step(f"before {name}")
        result = call(*arguments)
        self.step(f"after {name}")
        return result

    def _on_group_commit(self, queue: MessageQueue, offset: int) -> None:
        self.history.group_commits.append((self.world.now, queue, offset, len(self.history.committed)))
