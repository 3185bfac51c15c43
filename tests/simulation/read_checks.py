"""What a read has done, and what must hold for it: pure data and pure functions, so that tests can plant errors."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rocketmq_spark.errors import DataLossError, ReadError, RocketMQError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.source.puller import WINDOW
from rocketmq_spark.source.ranges import OffsetRange

_GAP = re.compile(r"messages (\d+) to (\d+) of (\S+) are not there any more")
_SILENT = re.compile(r"reading (\S+) up to offset \d+: nothing came from offset \d+ on for readTimeoutMs")
_TRUSTED = re.compile(r"the master of (\S+) has not answered for readTimeoutMs")
_MOST_NAMED = 3


class Stored(NamedTuple):
    """A message that a master has stored at an offset."""

    body: bytes
    tag: str
    stored_ms: int


class Row(NamedTuple):
    """A message that a task has returned."""

    queue: MessageQueue
    offset: int
    body: bytes


@dataclass(eq=False)
class PlanRead:
    """One plan of a read on the driver; times are seconds."""

    began: float
    ended: float = math.inf
    # The end of each queue when the plan began, and the first message that was left when it ended.
    ends: dict[MessageQueue, int] = field(default_factory=dict)
    first_left: dict[MessageQueue, int] = field(default_factory=dict)
    ranges: list[OffsetRange] = field(default_factory=list)
    error: RocketMQError | None = None


@dataclass(eq=False)
class TaskRead:
    """One attempt of a task: its rows in the order in which it returned them, and how it ended."""

    number: int
    ranges: tuple[OffsetRange, ...]
    began: float
    rows: list[Row] = field(default_factory=list)
    error: RocketMQError | None = None
    ended: float = math.inf
    # When the consumer was ready for more after the last records of each queue.
    progress: dict[MessageQueue, float] = field(default_factory=dict)
    # The seconds that its transport was polled: until the last answer with records of each queue, and in all.
    polled: dict[MessageQueue, float] = field(default_factory=dict)
    polled_in_all: float = math.inf
    most_in_flight: int = 0
    # Bytes of answers that waited, and of the largest answer.
    most_waiting: int = 0
    largest: int = 0


@dataclass(eq=False)
class ReadHistory:
    """Everything that the checks of a read look at."""

    # The options of the read.
    tags: frozenset[str] | None
    fail_on_data_loss: bool
    read_timeout: float
    # What a read may need after the last fault, beyond ``readTimeoutMs``.
    slack: float
    # How long the requests for one message take, if the others of the window run at the same time.
    per_message: float
    most_bytes: int
    # The offsets of a queue's turn.
    turn: int
    # For each queue, where the user begins and ends; empty for the earliest and the latest offset.
    starts: Mapping[MessageQueue, int]
    ends: Mapping[MessageQueue, int]
    # The time (ms) at which the read begins, or None.
    starting_ms: int | None
    # When the last fault ended.
    calm: float
    # All that a master ever had at an offset: after a failover that lost messages, an offset has several.
    stored: dict[MessageQueue, dict[int, list[Stored]]] = field(default_factory=lambda: defaultdict(dict))
    # The first offset that each queue's master still has, and that of its slaves.
    deleted: dict[MessageQueue, int] = field(default_factory=dict)
    deleted_on_slaves: dict[MessageQueue, int] = field(default_factory=dict)
    # Brokers that have lost the end of their queues.
    shortened: set[str] = field(default_factory=set)
    # When brokers may have been in no route: name, begin and end.
    absences: list[tuple[str, float, float]] = field(default_factory=list)
    # Warnings of the reads, with their times.
    warnings: list[tuple[float, str]] = field(default_factory=list)
    plans: list[PlanRead] = field(default_factory=list)
    tasks: list[TaskRead] = field(default_factory=list)

    def matches(self, stored: Stored) -> bool:
        """Return whether the filter lets a message pass."""
        return self.tags is None or stored.tag in self.tags


def problems_of_read(history: ReadHistory) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    problems = [*_problems_of_plans(history), *_problems_of_reports(history)]
    for task in history.tasks:
        problems += _problems_of_rows(history, task)
        problems += _problems_of_order(history, task)
        problems += _problems_of_gaps(history, task)
        problems += _problems_of_end(history, task)
        problems += _problems_of_memory(history, task)
    return problems


def _reported(history: ReadHistory, since: float = -math.inf, until: float = math.inf) -> dict[str, set[int]]:
    """Return the offsets that were reported as lost in a time, by the name of the queue."""
    errors = [(plan.ended, str(plan.error)) for plan in history.plans]
    errors += [(task.ended, str(task.error)) for task in history.tasks]
    gaps: dict[str, set[int]] = defaultdict(set)
    for text in (text for at, text in (*history.warnings, *errors) if since <= at <= until):
        for start, end, queue in _GAP.findall(text):
            gaps[queue].update(range(int(start), int(end) + 1))
    return gaps


def _problems_of_plans(history: ReadHistory) -> Iterator[str]:
    """A plan begins and ends where the user says, and includes everything that was there when it began."""
    trusted = _trusted(history)
    for plan in history.plans:
        if plan.error is not None:
            lost = isinstance(plan.error, DataLossError)
            if plan.began > history.calm and not lost and not history.shortened:
                yield f"a plan without a fault failed: {plan.error}"
            if lost and not history.fail_on_data_loss:
                yield f"failOnDataLoss=false, and a plan failed: {plan.error}"
            continue
        reported = _reported(history, plan.began, plan.ended)
        planned = {part.queue for part in plan.ranges}
        absent = {name for name, start, end in history.absences if start <= plan.ended and plan.began <= end}
        if missing := [queue for queue in plan.ends if queue not in planned and queue.broker_name not in absent]:
            yield f"a plan leaves out {missing[0]}"
        for part in plan.ranges:
            queue = part.queue
            if queue in history.ends and part.end != history.ends[queue]:
                yield f"the range of {queue} ends at {part.end}, and the user asked for {history.ends[queue]}"
            asked = range(history.starts.get(queue, part.start), part.start)
            if skipped := [offset for offset in asked if offset not in reported.get(str(queue), ())]:
                yield f"a plan skipped messages {skipped[:_MOST_NAMED]} of {queue} silently"
            if queue.broker_name in trusted | history.shortened:
                # A slave's offsets, or those of a master that has lost messages.
                continue
            if queue not in history.ends and part.end < plan.ends[queue]:
                yield f"the range of {queue} ends at {part.end}, and {plan.ends[queue]} messages were there"
            latest = history.starts.get(queue, 0)
            if history.starting_ms is not None:
                # A queue without such a message begins at its end, which may move while the plan is made.
                there = ((at, history.stored[queue][at][0].stored_ms) for at in range(plan.ends[queue]))
                new = (at for at, stamp in there if stamp >= history.starting_ms)
                latest = min(new, default=part.end)
            first = max(latest, plan.first_left[queue])
            if part.start > min(first, part.end):
                yield f"the range of {queue} begins at {part.start}, and its first message is {first}"


def _problems_of_reports(history: ReadHistory) -> Iterator[str]:
    """Only messages that a broker has deleted are reported as lost."""
    trusted = _trusted(history)
    queues = {str(queue): queue for queue in history.stored}
    for name, offsets in _reported(history).items():
        queue = queues[name]
        first = history.deleted.get(queue, 0)
        if queue.broker_name in trusted:
            first = max(first, history.deleted_on_slaves.get(queue, 0))
        if present := sorted(offset for offset in offsets if offset >= first):
            yield f"{queue}: messages {present[:_MOST_NAMED]} were reported as lost, and the broker has them"


def _problems_of_rows(history: ReadHistory, task: TaskRead) -> Iterator[str]:
    """Rows are in order, none is repeated, and each is what a broker had at its offset."""
    ranges = {part.queue: part for part in task.ranges}
    newest: dict[MessageQueue, int] = {}
    for row in task.rows:
        part = ranges.get(row.queue)
        if part is None or not part.start <= row.offset < part.end:
            yield f"task {task.number}: offset {row.offset} of {row.queue} is not in its ranges"
        if row.offset <= newest.get(row.queue, -1):
            yield f"task {task.number}: offset {row.offset} of {row.queue} came after {newest[row.queue]}"
        newest[row.queue] = row.offset
        stored = [entry for entry in history.stored[row.queue].get(row.offset, ()) if entry.body == row.body]
        if not stored:
            yield f"task {task.number}: offset {row.offset} of {row.queue} never had the body {row.body!r}"
        elif not any(map(history.matches, stored)):
            yield f"task {task.number}: offset {row.offset} of {row.queue} does not match the filter"


def _problems_of_order(history: ReadHistory, task: TaskRead) -> Iterator[str]:
    """The order of rows depends only on the ranges: each queue in turn returns the rows of as many offsets."""
    places = {part.queue: (place, part.begin) for place, part in enumerate(task.ranges)}
    turns = []
    for row in task.rows:
        if row.queue in places:
            place, begin = places[row.queue]
            turns.append(((row.offset - begin) // history.turn, place, row))
    for (turn, place, row), (later, other, next_row) in itertools.pairwise(turns):
        if (turn, place) > (later, other):
            yield f"task {task.number}: {next_row.queue}/{next_row.offset} came after {row.queue}/{row.offset}"


def _problems_of_gaps(history: ReadHistory, task: TaskRead) -> Iterator[str]:
    """Every offset of a range is a row, is rejected by the filter, or is reported; a failed task has a beginning."""
    reported = _reported(history, task.began, task.ended)
    returned: dict[MessageQueue, set[int]] = defaultdict(set)
    for row in task.rows:
        returned[row.queue].add(row.offset)
    for part in task.ranges:
        here = returned[part.queue]
        end = part.end if task.error is None else max(here, default=part.start - 1) + 1
        lost = reported.get(str(part.queue), set())
        # A filtered read may report every message before the first one left, whether it was rejected or not.
        if history.tags is None and (both := sorted(here & lost)[:_MOST_NAMED]):
            yield f"task {task.number}: messages {both} of {part.queue} were returned, and reported as lost"
        skipped = [
            offset
            for offset in range(part.start, end)
            if offset not in here and offset not in lost and not _is_rejected(history, part.queue, offset)
        ]
        if skipped:
            yield f"task {task.number}: messages {skipped[:_MOST_NAMED]} of {part.queue} were skipped silently"


def _is_rejected(history: ReadHistory, queue: MessageQueue, offset: int) -> bool:
    return any(not history.matches(entry) for entry in history.stored[queue].get(offset, ()))


def _problems_of_end(history: ReadHistory, task: TaskRead) -> Iterator[str]:
    """A task fails only for lost messages, or after ``readTimeoutMs`` without an answer."""
    error, name = task.error, f"task {task.number}"
    if math.isinf(task.ended):
        yield f"{name} has not ended"
    elif isinstance(error, DataLossError):
        if not history.fail_on_data_loss:
            yield f"{name}: failOnDataLoss=false, and it failed: {error}"
        if not _GAP.search(str(error)):
            yield f"{name}: the error names no range: {error}"
    elif isinstance(error, ReadError) and (silent := _SILENT.match(str(error))):
        queue = next(part.queue for part in task.ranges if str(part.queue) == silent[1])
        waited = task.polled_in_all - task.polled.get(queue, 0.0)
        if waited < history.read_timeout:
            yield f"{name}: it gave up after {waited:.1f} s without messages of {queue}"
        late = task.ended > history.calm + history.read_timeout + history.slack
        if late and queue.broker_name not in history.shortened:
            yield f"{name}: it failed {task.ended - history.calm:.1f} s after the last fault: {error}"
    elif error is not None:
        yield f"{name}: it failed with {type(error).__name__}: {error}"
    if not math.isinf(task.ended):
        last = max([task.began, *task.progress.values()])
        # Messages that the broker's filter rejects are no progress.
        longest = history.read_timeout + history.slack + history.per_message * sum(part.size for part in task.ranges)
        if task.ended > last + longest and task.ended > history.calm + history.slack:
            yield f"{name}: it waited {task.ended - last:.1f} s for messages"


def _problems_of_memory(history: ReadHistory, task: TaskRead) -> Iterator[str]:
    """Answers that wait are bounded, apart from the next one of each queue."""
    most = 2 * history.most_bytes + (len(task.ranges) + 1) * task.largest
    if task.most_waiting > most:
        yield f"task {task.number}: answers of {task.most_waiting} bytes waited, and {most} are allowed"
    if task.most_in_flight > WINDOW:
        yield f"task {task.number}: {task.most_in_flight} requests were in flight"


def _trusted(history: ReadHistory) -> set[str]:
    """Return the brokers whose slaves the read has trusted."""
    return {name for _, text in history.warnings for name in _TRUSTED.findall(text)}
