"""What must hold for a streaming query: pure functions of what was stored, read, logged and reported."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

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
from tests.simulation.stream_brokers import EXPIRED, FRESH_AFTER, Record, StreamCluster
from tests.simulation.stream_excuses import Excuses
from tests.simulation.stream_facts import Report, StreamFacts, parsed
from tests.simulation.stream_spark import AVAILABLE_NOW, BatchRun, DriverRun, Row, StreamHistory

if TYPE_CHECKING:
    from tests.simulation.stream_model import StreamPlan


class StreamChecks:
    """The checks of one schedule."""

    def __init__(self, plan: StreamPlan, cluster: StreamCluster, history: StreamHistory) -> None:
        self.plan, self.cluster, self.history = plan, cluster, history
        self.facts = StreamFacts(cluster, history)
        self.entries, self.kept = self.facts.entries, self.facts.kept
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

    def problems_of_rows(self) -> Iterator[str]:
        """Rows are of the range, in order, and what the queue had there. A task that runs again returns the same."""
        for run in self.history.runs:
            start, (end, begins, _) = parsed(run.start).offsets, parsed(run.end)
            for rows in run.rows:
                newest: dict[MessageQueue, int] = {}
                for queue, offset, number in rows:
                    record = self.cluster.records[number]
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
                    is_early = offset < begin and offset < self.facts.continues_at(run, queue)
                    if is_early or offset >= end.get(queue, 0):
                        yield f"micro-batch {run.batch}: {queue}/{offset} is not in its range"
            places = Counter((row.queue, row.offset) for row in run.all_rows)
            if repeated := [place for place, count in places.items() if count > 1]:
                yield f"micro-batch {run.batch} has {repeated[0]} twice"
            for first, again, at in run.unequal:
                yield from self._unequal(f"a task of micro-batch {run.batch}", first, again, run, at)

    def problems_of_reruns(self) -> Iterator[str]:
        """A micro-batch that runs again has the same rows."""
        for run in self.history.runs:
            kept = self.kept.get(run.batch)
            if kept is None or kept is run or math.isinf(run.ended):
                continue
            first, again = sorted(kept.all_rows), sorted(run.all_rows)
            if first != again:
                yield from self._unequal(f"micro-batch {run.batch}", first, again, run, run.ended)

    def _unequal(
        self, what: str, first: Sequence[Row], again: Sequence[Row], run: BatchRun, at: float
    ) -> Iterator[str]:
        """A second run may only lack messages that are gone, or whose queue was reported as gone."""
        strict = run.driver.options.fail_on_data_loss
        for queue, offset, number in sorted({*first} - {*again}):
            record = self.cluster.records[number]
            if self._late_incarnation(self.kept.get(run.batch, run), record):
                continue
            gone = record.gone_at <= at or self.facts.is_reported(queue, ("gone",), run.began, at)
            if not gone or (strict and record.gone_by == EXPIRED):
                yield f"{what}: a second run lacks {queue}/{offset}"
        for queue, offset, number in sorted({*again} - {*first}):
            record = self.cluster.records[number]
            if record.stored_at >= run.began or self.facts.is_reported(queue, ("gone", "gap"), 0.0, at):
                continue
            if not self._had_no_messages(record, run.batch):
                yield f"{what}: only a second run has {queue}/{offset}"

    def _had_no_messages(self, record: Record, batch: int) -> bool:
        """Return whether the last message of a micro-batch had expired, and its queue was replaced after a run of it.

        The offset log has no store time of this message to compare.
        """
        kept, damaged = self.kept.get(batch), self.cluster.damaged.get(record.queue, ())
        late = kept is not None and any(kept.ended <= at <= record.stored_at for at in damaged)
        return late and record.queue not in self.entries[batch].times

    def problems_of_offsets(self) -> Iterator[str]:
        """The offset log keeps every queue; an offset goes back only for a queue that was reported."""
        is_reported = self.facts.is_reported
        for number, (last, entry) in enumerate(itertools.pairwise(self.entries), 1):
            for queue, offset in last.offsets.items():
                if queue not in entry.offsets:
                    yield f"the offsets of micro-batch {number} lack {queue}"
                elif entry.offsets[queue] < offset and not is_reported(queue, ("ends", "gone"), 0, entry.written):
                    yield f"{queue} goes back from {offset} to {entry.offsets[queue]} in micro-batch {number}"
                elif queue in entry.begins and entry.begins[queue] != offset and number > 1:
                    yield f"{queue} begins again in micro-batch {number}"
            for queue, begin in entry.begins.items():
                # Perhaps its topic was created again after the driver had asked for the beginning.
                if queue in last.offsets or self._is_damaged(queue, last.written, entry.written):
                    continue
                if begin > (log_first := self._first_at(queue, entry.written)):
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
        names = {queue.broker_name for queue in initial.offsets}
        required = entry.driver.options.require_brokers is not None and self.plan.selection != "assign"
        if required and names != set(self.cluster.brokers):
            yield f"the query began with {sorted(names)}, and requires all brokers"
        for queue, offset in entry.offsets.items():
            if queue not in initial.offsets:
                continue
            begin = entry.begins.get(queue)
            if begin is None:
                yield f"the first micro-batch has no beginning of {queue}"
            elif (
                begin != initial.offsets[queue]
                and not (offset == begin < initial.offsets[queue])
                and not self._continues_at(queue, begin, initial.returned, entry.written)
            ):
                yield f"{queue} begins at {begin}, and the query at {initial.offsets[queue]}"

    def _continues_at(self, queue: MessageQueue, offset: int, since: float, until: float) -> bool:
        """Return whether a warning of a time says that a queue with replaced messages continues at an offset."""
        return any(
            report.kind == "after" and report.offset == offset and since <= report.at <= until
            for report in self.facts.reports_of[str(queue)]
        )

    def problems_of_delivery(self) -> Iterator[str]:
        """Each message is in one micro-batch, in the order of its queue, or a report says why not."""
        delivered: dict[int, BatchRun] = {}
        newest: dict[tuple[MessageQueue, int], int] = {}
        for batch in sorted(self.kept):
            run = self.kept[batch]
            for queue, offset, number in sorted(run.all_rows):
                record = self.cluster.records[number]
                if number in delivered:
                    if not self._late_incarnation(delivered[number], record):
                        yield f"{queue}/{offset} is in the micro-batches {delivered[number].batch} and {batch}"
                    continue
                delivered[number] = run
                if self._late_incarnation(run, record):
                    continue
                life = queue, record.incarnation
                if offset < newest.get(life, -1):
                    yield f"{queue}/{offset} of micro-batch {batch} came after {newest[life]}"
                newest[life] = max(offset, newest.get(life, -1))
        if not self.entries:
            return
        reads, excuses = self.history.drivers[-1].options.reads, Excuses(self.facts)
        for record in self.cluster.records:
            if self.tags is not None and record.tag not in self.tags:
                continue
            if record.number not in delivered and reads(record.queue):
                excuse = excuses.of(record)
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

    def problems_of_reports(self) -> Iterator[str]:
        """Only data that is lost is reported as lost."""
        by_place: defaultdict[tuple[str, int], list[Record]] = defaultdict(list)
        for record in self.cluster.records if self.facts.reports else ():
            by_place[str(record.queue), record.offset].append(record)
        damaged = {str(queue): times for queue, times in self.cluster.damaged.items()}
        for report in self.facts.reports:
            if report.kind == "gap":
                for offset in range(report.offset, report.end):
                    records = by_place[report.queue, offset]
                    if records and records[-1].stored_at < report.since and records[-1].gone_at > report.at:
                        yield f"{report.queue}/{offset} was reported as lost, and the broker has it"
                        break
            elif report.kind in ("ends", "other", "after", "may skip", "expired"):
                if not any(at <= report.at for at in damaged.get(report.queue, ())) and not self._begins_empty(report):
                    yield f"{report.queue} was reported ({report.kind}), and has lost nothing"
                if report.kind == "expired" and any(
                    (str(record.queue) == report.queue and record.offset < report.offset)
                    and record.stored_at < report.since
                    and record.gone_at > report.at
                    for record in self.cluster.records
                ):
                    yield f"{report.queue} was reported as expired before {report.offset}, and its broker has messages"
            elif report.kind == "gone" and not any(at <= report.at for at in damaged.get(report.queue, ())):
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
                initial = [driver.initial.offsets.get(queue) for driver in self.history.drivers if driver.initial]
                if offset not in initial:
                    yield f"{queue}: offset {offset} was committed before the first micro-batch was complete"
                continue
            end = self.entries[committed - 1].offsets.get(queue)
            if offset != end:
                yield f"{queue}: {offset} was committed at {at:.3f} s, and micro-batch {committed - 1} ends at {end}"

    def problems_of_available_now(self) -> Iterator[str]:
        """Trigger.AvailableNow reads what was there when it began, and nothing that came later."""
        for driver in self.history.drivers:
            target = driver.target
            if driver.trigger != AVAILABLE_NOW or target is None or not driver.finished:
                continue
            began = target.called
            last = self.facts.known_at(driver.ended + 1e-9)
            offsets = {} if last is None else last.offsets
            for queue, end in target.before.items():
                if not driver.options.reads(queue) or self._is_damaged(queue, began, driver.ended):
                    continue
                if self.facts.is_reported(queue, ("gone",), driver.began, driver.ended):
                    continue
                at, name = offsets.get(queue, 0), f"Trigger.AvailableNow of driver {driver.number}"
                is_disturbed = self._is_disturbed(queue, began, driver.ended)
                # With failOnDataLoss it waits for the brokers of its checkpoint.
                must = driver.options.fail_on_data_loss and queue in driver.known
                if at < end and self.cluster.log(queue) is not None and (must or not is_disturbed):
                    yield f"{name} ended at {at} of {queue}, and {end} messages were there"
                most = max(target.after.get(queue, end), driver.known.get(queue, 0), self._initial_of(queue))
                if at > most and not is_disturbed:
                    yield f"{name} read {queue} to {at}, and {most} messages were there"

    def _initial_of(self, queue: MessageQueue) -> int:
        """Return the last offset at which a driver would begin a queue."""
        beginnings = [driver.initial for driver in self.history.drivers if driver.initial is not None]
        return max((beginning.offsets.get(queue, 0) for beginning in beginnings), default=0)

    def _is_disturbed(self, queue: MessageQueue, began: float, ended: float) -> bool:
        """Return whether a fault of a queue's broker may have been under way."""
        return any(start <= ended and began <= end for start, end in self.cluster.disturbances(queue))

    def _is_damaged(self, queue: MessageQueue, began: float, ended: float) -> bool:
        """Return whether a queue lost messages, or a driver could see it so late that it did."""
        return any(at <= ended and began <= at + FRESH_AFTER for at in self.cluster.damaged.get(queue, ()))


def problems_of_stream(plan: StreamPlan, cluster: StreamCluster, history: StreamHistory) -> list[str]:
    """Return a text for everything that a promise does not allow."""
    checks = StreamChecks(plan, cluster, history)
    problems = [*checks.problems()]
    cluster.counts += checks.counts
    return problems
