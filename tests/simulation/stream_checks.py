"""What must hold for a streaming query: pure functions of what was stored, read, logged and reported."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from rocketmq_spark.errors import (
    DataLossError,
    MQBrokerException,
    OptionError,
    ReadError,
    RemotingCommandException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import beginnings_in, flat, stored_in
from tests.simulation.stream_brokers import EXPIRED, Record, StreamCluster
from tests.simulation.stream_spark import AVAILABLE_NOW, BatchRun, DriverRun, Row, StreamHistory

if TYPE_CHECKING:
    from tests.simulation.stream_model import StreamPlan

# The reports of lost data, as docs/reading.md describes them.
_GAP: Final = re.compile(r"messages (\d+) to (\d+) of (\S+) are not there any more")
_REPORTS: Final = {
    "gone": re.compile(r"queue (\S+) is gone: "),
    "ends": re.compile(r"queue (\S+) ends at offset (\d+), (?:but|before)"),
    "other": re.compile(r"queue (\S+) has another message at offset (\d+)"),
    "after": re.compile(r"queue (\S+) continues at offset (\d+), the first stored after"),
    "may skip": re.compile(r"queue (\S+) continues at (?:its end, )?offset (\d+),.* and may skip"),
    "waits": re.compile(r"queue (\S+) waits for its broker"),
    "begins": re.compile(r"new queue (\S+) begins at offset (\d+)"),
}
# Routes are up to date again after so many seconds.
_FRESH: Final = 2.0


class Report(NamedTuple):
    """A report of lost data: its time, and the begin of the call that it is of. A gap ends before `end`."""

    at: float
    since: float
    kind: str
    queue: str
    offset: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of the offset log."""

    written: float
    offsets: dict[MessageQueue, int]
    begins: dict[MessageQueue, int]
    times: dict[MessageQueue, int]
    driver: DriverRun


class StreamChecks:
    """The checks of one schedule."""

    def __init__(self, plan: StreamPlan, cluster: StreamCluster, history: StreamHistory) -> None:
        self.plan, self.cluster, self.history = plan, cluster, history
        self.entries = [LogEntry(at, *parsed(text), driver) for text, at, driver in history.ends]
        self.reports = [*self._reports()]
        self.of_queue: defaultdict[str, list[Report]] = defaultdict(list)
        for report in self.reports:
            self.of_queue[report.queue].append(report)
        self.by_number = cluster.records
        # The first complete run of each micro-batch: what its sink keeps.
        self.kept: dict[int, BatchRun] = {}
        for run in history.runs:
            if math.isfinite(run.ended):
                self.kept.setdefault(run.batch, run)
        self.counts: Counter[str] = Counter()
        expression = plan.options.get("sub_expression")
        # The tags that the query selects; None: all messages.
        self.tags = None if expression is None else {tag.strip() for tag in expression.split("||")}

    def problems(self) -> Iterator[str]:
        """Yield a text for everything that a promise does not allow."""
        yield from self.problems_of_rows()
        yield from self.problems_of_reruns()
        yield from self.problems_of_offsets()
        yield from self.problems_of_start()
        yield from self.problems_of_delivery()
        yield from self.problems_of_reports()
        yield from self.problems_of_errors()
        yield from self.problems_of_commits()
        yield from self.problems_of_available_now()

    def _reports(self) -> Iterator[Report]:
        history = self.history
        texts = [*history.warnings]
        texts += [(driver.ended, str(driver.error)) for driver in history.drivers if driver.error is not None]
        for at, text in texts:
            since = history.calls[max(0, bisect.bisect_left(history.calls, at) - 1)] if history.calls else 0.0
            for first, last, queue in _GAP.findall(text):
                yield Report(at, since, "gap", queue, int(first), int(last) + 1)
            for kind, pattern in _REPORTS.items():
                for match in pattern.finditer(text):
                    yield Report(at, since, kind, *_queue_and_offset(match.groups()))

    def problems_of_rows(self) -> Iterator[str]:
        """Rows are of the range, in order, and what the queue had there. A task that runs again returns the same."""
        for run in self.history.runs:
            start, end, begins = parsed(run.start)[0], *parsed(run.end)[:2]
            for rows in run.rows:
                newest: dict[MessageQueue, int] = {}
                for queue, offset, number in rows:
                    record = self.by_number[number]
                    if record.offset != offset:
                        yield f"micro-batch {run.batch}: {queue}/{offset} has the message of offset {record.offset}"
                    if self.tags is not None and record.tag not in self.tags:
                        yield f"micro-batch {run.batch}: {queue}/{offset} has the tag {record.tag}"
                    if record.is_damaged and run.driver.options.on_unreadable != "raw":
                        yield f"micro-batch {run.batch}: {queue}/{offset} is unreadable"
                    if offset <= newest.get(queue, -1):
                        yield f"micro-batch {run.batch}: {queue}/{offset} came after {newest[queue]}"
                    newest[queue] = offset
                    begin = min(start.get(queue, 0), begins.get(queue, math.inf))
                    if not (begin <= offset or self._continues_at(run, queue) <= offset) or offset >= end.get(queue, 0):
                        yield f"micro-batch {run.batch}: {queue}/{offset} is not in its range"
            places = Counter((queue, offset) for rows in run.rows for queue, offset, _ in rows)
            if repeated := [place for place, count in places.items() if count > 1]:
                yield f"micro-batch {run.batch} has {repeated[0]} twice"
            for first, again, at in run.unequal:
                yield from self._unequal(f"a task of micro-batch {run.batch}", first, again, run, at)

    def _continues_at(self, run: BatchRun, queue: MessageQueue) -> float:
        """Return the least offset at which a queue with replaced messages continues in a run of a micro-batch."""
        reports = self.of_queue[str(queue)]
        planned = run.planned if math.isfinite(run.planned) else run.driver.ended
        return min(
            (report.offset for report in reports if report.kind == "after" and run.began <= report.at <= planned),
            default=math.inf,
        )

    def problems_of_reruns(self) -> Iterator[str]:
        """A micro-batch that runs again has the same rows."""
        for run in self.history.runs:
            kept = self.kept.get(run.batch)
            if kept is None or kept is run or math.isinf(run.ended):
                continue
            first = sorted(row for rows in kept.rows for row in rows)
            again = sorted(row for rows in run.rows for row in rows)
            if first != again:
                yield from self._unequal(f"micro-batch {run.batch}", first, again, run, run.ended)

    def _unequal(
        self, what: str, first: Sequence[Row], again: Sequence[Row], run: BatchRun, at: float
    ) -> Iterator[str]:
        """A second run may only lack messages that are gone, or whose queue was reported as gone."""
        strict = run.driver.options.fail_on_data_loss
        since = run.began
        for row in sorted({*first} - {*again}):
            record = self.by_number[row[2]]
            if self._late_incarnation(self.kept.get(run.batch, run), record):
                continue
            gone = record.gone_at <= at or self._reported(row[0], ("gone",), since, at)
            if not gone or (strict and record.gone_by == EXPIRED):
                yield f"{what}: a second run lacks {row[0]}/{row[1]}"
        for row in sorted({*again} - {*first}):
            if self._replaced_since(row, since) or self._reported(row[0], ("gone", "gap"), 0.0, at):
                continue
            if not self._had_no_messages(row, run.batch):
                yield f"{what}: only a second run has {row[0]}/{row[1]}"

    def _had_no_messages(self, row: Row, batch: int) -> bool:
        """Return whether the last message of a micro-batch had expired, and its queue was replaced after a run of it.

        The offset log has no store time of this message to compare.
        """
        queue, kept, stored_at = row[0], self.kept.get(batch), self.by_number[row[2]].stored_at
        damaged = self.cluster.damaged.get(queue, ())
        late = kept is not None and any(kept.ended <= at <= stored_at for at in damaged)
        return late and queue not in self.entries[batch].times

    def problems_of_offsets(self) -> Iterator[str]:
        """The offset log keeps every queue; an offset goes back only for a queue that was reported."""
        for number in range(1, len(self.entries)):
            last, entry = self.entries[number - 1], self.entries[number]
            for queue, offset in last.offsets.items():
                if queue not in entry.offsets:
                    yield f"the offsets of micro-batch {number} lack {queue}"
                elif entry.offsets[queue] < offset and not self._reported(queue, ("ends", "gone"), 0, entry.written):
                    yield f"{queue} goes back from {offset} to {entry.offsets[queue]} in micro-batch {number}"
                elif queue in entry.begins and entry.begins[queue] != offset and number > 1:
                    yield f"{queue} begins again in micro-batch {number}"
            for queue, begin in entry.begins.items():
                log_first = self._first_at(queue, entry.written)
                # Perhaps its topic was created again after the driver had asked for the beginning.
                if (
                    queue not in last.offsets
                    and begin > log_first
                    and not self._is_damaged(queue, last.written, entry.written)
                ):
                    yield f"new queue {queue} begins at {begin}, and its first message is {log_first}"

    def _first_at(self, queue: MessageQueue, at: float) -> float:
        """Return the first offset whose message a queue had at a time; infinite without one."""
        records = [record for record in self.cluster.records if record.queue == queue]
        return min((record.offset for record in records if record.stored_at <= at < record.gone_at), default=math.inf)

    def problems_of_start(self) -> Iterator[str]:
        """A query begins where the options say."""
        if not self.entries or self.plan.legacy:
            return
        entry = self.entries[0]
        initial = entry.driver.initial
        if initial is None:
            yield "the first micro-batch was planned without a start"
            return
        names = {queue.broker_name for queue in initial[2]}
        required = entry.driver.options.require_brokers is not None and self.plan.selection != "assign"
        # A topic that is deleted after the check of the brokers has no queues.
        deleted = any(
            entry.driver.began <= at <= entry.written for times in self.cluster.damaged.values() for at in times
        )
        if required and not (deleted and not names) and names != set(self.cluster.brokers):
            yield f"the query began with {sorted(names)}, and requires all brokers"
        for queue, offset in entry.offsets.items():
            if queue not in initial[2]:
                continue
            begin = entry.begins.get(queue)
            if begin is None:
                yield f"the first micro-batch has no beginning of {queue}"
            elif begin != initial[2][queue] and not (offset == begin < initial[2][queue]):
                yield f"{queue} begins at {begin}, and the query at {initial[2][queue]}"

    def _may_precede(self, record: Record, begin: int) -> bool:
        """Return whether the options leave out a message before the begin of its queue in the first micro-batch."""
        driver = self.entries[0].driver
        options = driver.options
        ended = self.entries[0].written if driver.initial is None else driver.initial[1]
        if options.starting_timestamp is not None:
            return record.stored_ms < options.starting_timestamp
        if options.starting_offsets_by_timestamp:
            return record.stored_ms < dict(options.starting_offsets_by_timestamp)[record.queue]
        spec = options.starting_offsets
        word = spec.word
        if word is None:
            offset = spec.offset_of(record.queue)
            assert offset is not None
            word = {-2: "earliest", -1: "latest"}.get(offset)
            if word is None:
                return record.offset < offset
        if word == "earliest":
            return record.gone_at <= ended
        if word == "committed":
            # What the group has read, or by the fallback.
            return record.offset < begin and record.stored_at <= ended
        return record.stored_at <= ended

    def problems_of_delivery(self) -> Iterator[str]:
        """Each message is in one micro-batch, in the order of its queue, or a report says why not."""
        delivered: dict[int, BatchRun] = {}
        newest: dict[tuple[MessageQueue, int], int] = {}
        for batch in sorted(self.kept):
            run = self.kept[batch]
            for queue, offset, number in sorted(row for rows in run.rows for row in rows):
                if number in delivered:
                    if not self._late_incarnation(delivered[number], self.by_number[number]):
                        yield f"{queue}/{offset} is in the micro-batches {delivered[number].batch} and {batch}"
                    continue
                delivered[number] = run
                if self._late_incarnation(run, self.by_number[number]):
                    continue
                life = queue, self.by_number[number].incarnation
                if offset < newest.get(life, -1):
                    yield f"{queue}/{offset} of micro-batch {batch} came after {newest[life]}"
                newest[life] = max(offset, newest.get(life, -1))
        if not self.entries:
            return
        reads = self.history.drivers[-1].options.reads
        for record in self.cluster.records:
            if self.tags is not None and record.tag not in self.tags:
                continue
            if record.number not in delivered and reads(record.queue):
                excuse = self._excuse(record)
                self.counts[f"left out: {excuse}"] += 1
                if not excuse:
                    yield f"{record.queue}/{record.offset} (message {record.number}) was skipped silently"

    def _late_incarnation(self, run: BatchRun, record: Record) -> bool:
        """Whether a message replaced another one while the micro-batch that has it was planned, or later."""
        late = record.stored_at >= run.looked and any(
            at >= run.looked and at <= run.ended for at in self.cluster.damaged.get(record.queue, ())
        )
        self.counts["replaced while a micro-batch was planned or ran"] += late
        return late

    def _excuse(self, record: Record) -> str:
        """Return why a message is in no micro-batch; "" if there is no reason."""
        queue, offset = record.queue, record.offset
        if record.is_damaged and self._is_left_out(record):
            return "unreadable"
        begins = [(number, entry) for number, entry in enumerate(self.entries) if queue in entry.offsets]
        broker = self.cluster.brokers[queue.broker_name]
        is_removed = queue.queue_id >= broker.topics.get(queue.topic, (0, 0))[0]
        if not begins:
            return "queue never existed for the query" if record.gone_at < math.inf or is_removed else ""
        number, entry = begins[0]
        begin = entry.begins.get(queue, 0)
        if offset < begin and record.stored_at <= entry.written:
            if number == 0 and queue in self._initial_queues(entry):
                if self._may_precede(record, begin):
                    return "before the start"
                if self._is_of_the_start(record, entry):
                    return "replaced while the start was planned"
                if queue not in entry.times and self._has_expired(queue, begin - 1):
                    return "replaced, and the last message before the start has expired"
            elif record.gone_at <= entry.written:
                return "expired before the query knew the queue"
        for report in self.of_queue[str(queue)]:
            if report.kind == "gap" and report.offset <= offset < report.end and record.gone_at <= report.at:
                return "reported gap"
            if report.kind == "may skip" and offset < report.offset:
                return "warning that messages may be skipped"
            if report.kind == "after" and offset < report.offset and record.gone_at <= report.at:
                return "expired before the query knew that its queue was replaced"
        if record.gone_at < math.inf:
            return self._excuse_of_lost(record)
        for run in self.history.runs:
            start, end = parsed(run.start)[0], parsed(run.end)[0]
            # Of a queue that was replaced, also the messages before the start.
            is_left = start.get(queue, 0) <= offset or any(
                at <= record.stored_at <= run.began for at in self.cluster.damaged.get(queue, ())
            )
            planned = run.planned if math.isfinite(run.planned) else run.driver.ended
            if is_left and offset < end.get(queue, 0) and self._reported(queue, ("gone",), run.began, planned):
                return "queue left out of a repeated micro-batch"
        if self._is_removed_at_its_end(queue):
            return "in a queue that was replaced by one of the same length, and removed"
        if is_removed and self._reported(queue, ("gone",), 0.0, math.inf):
            return "in a queue that was removed"
        known = self._known_at(record.stored_at)
        if known is not None and offset < known.offsets.get(queue, 0):
            log = self.cluster.log(queue)
            if queue not in known.times:
                return "replaced, and the last message read was unknown"
            if log is not None and log.first >= known.offsets[queue]:
                return "replaced, and the last message read has expired"
        return ""

    def _is_left_out(self, record: Record) -> bool:
        """Return whether a micro-batch that leaves out unreadable messages has the place of a message."""
        queue = record.queue
        return any(
            min(parsed(run.start)[0].get(queue, 0), self._continues_at(run, queue)) <= record.offset
            and record.offset < parsed(run.end)[0].get(queue, 0)
            for run in self.kept.values()
            if run.driver.options.on_unreadable == "skip"
        )

    def _is_of_the_start(self, record: Record, entry: LogEntry) -> bool:
        """Return whether a message was stored in a replaced queue, both while a new query planned its start."""
        damaged, initial = self.cluster.damaged.get(record.queue, ()), entry.driver.initial
        if initial is None:
            return False
        # Before PySpark 4.2 the first end is requested first, and has the start.
        began, ended = (entry.driver.began, entry.written) if entry.driver.legacy else initial[:2]
        return any(began <= at <= record.stored_at <= ended for at in damaged)

    def _has_expired(self, queue: MessageQueue, offset: int) -> bool:
        """Return whether a message at this offset has expired when a new query planned its start, or before."""
        initial = self.entries[0].driver.initial
        return initial is not None and any(
            (record.queue, record.offset, record.gone_by) == (queue, offset, EXPIRED) and record.gone_at <= initial[1]
            for record in self.cluster.records
        )

    def _initial_queues(self, entry: LogEntry) -> set[MessageQueue]:
        initial = entry.driver.initial
        return set(entry.offsets) if initial is None else set(initial[2])

    def _excuse_of_lost(self, record: Record) -> str:
        """Return why nothing reports a message that was deleted before it was read."""
        reports = [report for report in self.of_queue[str(record.queue)] if report.at >= record.gone_at]
        if record.gone_by != EXPIRED and any(
            report.kind in ("gone", "ends", "other", "after", "gap") for report in reports
        ):
            return "reported loss"
        known = self._known_at(record.gone_at)
        offset = None if known is None else known.offsets.get(record.queue)
        if known is None or offset is None:
            return "deleted before the query knew the queue"
        planned = [
            number
            for number, (last, entry) in enumerate(itertools.pairwise(self.entries), 1)
            if last.offsets.get(record.queue, 0) <= record.offset < entry.offsets.get(record.queue, 0)
            and record.stored_at <= entry.written <= record.gone_at
        ]
        if record.gone_by != EXPIRED and not planned:
            if record.queue not in known.times:
                return "replaced, and the last message read was unknown"
            if record.gone_by == "lost":
                return "lost before the query knew it"
            if self._is_removed_at_its_end(record.queue):
                return "in a queue that was replaced by one of the same length, and removed"
            log = self.cluster.log(record.queue)
            if log is not None and log.first >= offset:
                return "replaced, and the last message read has expired"
            if log is None and any(report.kind == "waits" for report in reports):
                return "waits for a broker that has its topic no more"
        if record.gone_by != EXPIRED and any(self._has_another(number, record) for number in planned):
            return "replaced before a task read it, and the last message read has expired"
        if record.gone_by == EXPIRED and self.cluster.damaged.get(record.queue):
            # Its queue was replaced afterwards.
            return "expired in a queue that was replaced"
        return ""

    def _has_another(self, batch: int, record: Record) -> bool:
        """Return whether a micro-batch has another message at this place, and the last one of the queue has expired."""
        run, log, end = self.kept.get(batch), self.cluster.log(record.queue), self.entries[batch].offsets[record.queue]
        rows = [row for rows in run.rows for row in rows] if run is not None else []
        has_another = any(row[:2] == (record.queue, record.offset) and row[2] != record.number for row in rows)
        return has_another and log is not None and log.first >= end

    def _is_removed_at_its_end(self, queue: MessageQueue) -> bool:
        """Return whether a queue is removed, and ends where the query has read it to; brokers reject its pulls."""
        log, topics = self.cluster.log(queue), self.cluster.brokers[queue.broker_name].topics
        removed = queue.queue_id >= topics.get(queue.topic, (0, 0))[0]
        return removed and log is not None and self.entries[-1].offsets.get(queue) == len(log.records)

    def _known_at(self, at: float) -> LogEntry | None:
        """Return the last entry of the offset log that was written before a time."""
        number = bisect.bisect_left(self.entries, at, key=lambda entry: entry.written)
        return self.entries[number - 1] if number else None

    def _reported(self, queue: MessageQueue, kinds: Sequence[str], since: float, until: float) -> bool:
        return any(report.kind in kinds and since <= report.at <= until for report in self.of_queue[str(queue)])

    def _replaced_since(self, row: Row, since: float) -> bool:
        return self.by_number[row[2]].stored_at >= since

    def problems_of_reports(self) -> Iterator[str]:
        """Only data that is lost is reported as lost."""
        by_place: defaultdict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in self.cluster.records if self.reports else ():
            by_place[str(record.queue), record.offset].append(record)
        damaged = {str(queue): times for queue, times in self.cluster.damaged.items()}
        for report in self.reports:
            if report.kind == "gap":
                for offset in range(report.offset, report.end):
                    records = by_place[report.queue, offset]
                    if records and records[-1].stored_at < report.since and records[-1].gone_at > report.at:
                        yield f"{report.queue}/{offset} was reported as lost, and the broker has it"
                        break
            elif report.kind in ("ends", "other", "after", "may skip"):
                if not any(at <= report.at for at in damaged.get(report.queue, ())) and not self._begins_empty(report):
                    yield f"{report.queue} was reported ({report.kind}), and has lost nothing"
            elif report.kind == "gone":
                broker = report.queue.split("/")[1]
                unlisted = self.cluster.unlisted.get(broker, ())
                if not any(at <= report.at for at in (*damaged.get(report.queue, ()), *unlisted)):
                    yield f"{report.queue} was reported as gone, and is there"

    def _begins_empty(self, report: Report) -> bool:
        """Return whether a repeated micro-batch warns of a new queue from which it reads nothing."""
        return report.kind == "may skip" and any(
            str(queue) == report.queue and begin == entry.offsets[queue] == report.offset
            for entry in self.entries
            for queue, begin in entry.begins.items()
        )

    def problems_of_errors(self) -> Iterator[str]:
        """A query fails only for lost data, or while a server does not answer."""
        calm = self.history.calm
        for driver in self.history.drivers:
            error = driver.error
            if error is None:
                continue
            if isinstance(error, DataLossError):
                if not driver.options.fail_on_data_loss:
                    yield f"failOnDataLoss=false, and driver {driver.number} failed: {error}"
            elif isinstance(error, RemotingCommandException):
                if driver.options.on_unreadable != "fail" or "onUnreadable=skip" not in str(error):
                    yield f"driver {driver.number} failed: {error}"
            elif driver.began >= calm and not self._is_explained(driver, error):
                yield f"driver {driver.number} failed without a fault: {type(error).__name__}: {error}"
            elif not (error.retriable or isinstance(error, ReadError | OptionError | MQBrokerException)):
                yield f"driver {driver.number} failed with {type(error).__name__}: {error}"

    def _is_explained(self, driver: DriverRun, error: RocketMQError) -> bool:
        topics = {topic for broker in self.cluster.brokers.values() for topic in broker.topics}
        missing = [topic for topic in driver.options.subscribe if topic not in topics]
        if isinstance(error, ReadError) and self.entries:
            # A broker of the checkpoint that has no queue of the topic any more may come back.
            return any(
                driver.options.reads(queue) and queue.topic not in self.cluster.brokers[queue.broker_name].topics
                for queue in self.entries[-1].offsets
            )
        if isinstance(error, RouteNotFoundException):
            return bool(missing) or bool(driver.options.assign)
        # Before the first micro-batch, all queues that the options name must exist.
        return isinstance(error, OptionError) and not self._began_before(driver)

    def _began_before(self, driver: DriverRun) -> bool:
        return bool(self.entries) and self.entries[0].written < driver.began

    def problems_of_commits(self) -> Iterator[str]:
        """The group's offsets are those of micro-batches in the commit log."""
        for at, queue, offset, committed in self.history.group_commits:
            if not committed:
                initial = [driver.initial[2].get(queue) for driver in self.history.drivers if driver.initial]
                if offset not in initial:
                    yield f"{queue}: offset {offset} was committed before the first micro-batch was complete"
                continue
            end = self.entries[committed - 1].offsets.get(queue)
            if offset != end:
                yield f"{queue}: {offset} was committed at {at:.3f} s, and micro-batch {committed - 1} ends at {end}"

    def problems_of_available_now(self) -> Iterator[str]:
        """Trigger.AvailableNow reads what was there when it began, and nothing that came later."""
        for driver in self.history.drivers:
            if driver.trigger != AVAILABLE_NOW or driver.prepared is None or not driver.finished:
                continue
            began, _, before, after = driver.prepared
            last = self._known_at(driver.ended + 1e-9)
            offsets = {} if last is None else last.offsets
            for queue, end in before.items():
                if not driver.options.reads(queue) or self._is_damaged(queue, began, driver.ended):
                    continue
                if self._reported(queue, ("gone",), driver.began, driver.ended):
                    continue
                at, name = offsets.get(queue, 0), f"Trigger.AvailableNow of driver {driver.number}"
                is_disturbed = self._is_disturbed(queue, began, driver.ended)
                # With failOnDataLoss it waits for the brokers of its checkpoint.
                must = driver.options.fail_on_data_loss and queue in driver.known
                if at < end and self.cluster.log(queue) is not None and (must or not is_disturbed):
                    yield f"{name} ended at {at} of {queue}, and {end} messages were there"
                most = max(after.get(queue, end), driver.known.get(queue, 0), self._initial_of(queue))
                if at > most and not is_disturbed:
                    yield f"{name} read {queue} to {at}, and {most} messages were there"

    def _initial_of(self, queue: MessageQueue) -> int:
        return max((driver.initial[2].get(queue, 0) for driver in self.history.drivers if driver.initial), default=0)

    def _is_disturbed(self, queue: MessageQueue, began: float, ended: float) -> bool:
        """Return whether a fault of a queue's broker may have been under way."""
        return any(start <= ended and began <= end for start, end in self.cluster.disturbances(queue))

    def _is_damaged(self, queue: MessageQueue, began: float, ended: float) -> bool:
        """Return whether a queue lost messages, or a driver could see it so late that it did."""
        return any(at <= ended and began <= at + _FRESH for at in self.cluster.damaged.get(queue, ()))


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> tuple[dict[MessageQueue, int], dict[MessageQueue, int], dict[MessageQueue, int]]:
    """Return the offsets, beginnings and store times of an offset of the stream."""
    offset = json.loads(text)
    return flat(offset), beginnings_in(offset), stored_in(offset)


def _queue_and_offset(groups: Sequence[str]) -> tuple[str, int]:
    return groups[0], int(groups[1]) if len(groups) > 1 else 0


def problems_of_stream(plan: StreamPlan, cluster: StreamCluster, history: StreamHistory) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    checks = StreamChecks(plan, cluster, history)
    problems = [*checks.problems()]
    cluster.counts += checks.counts
    return problems
