"""Why a streaming query may have a message in no micro-batch."""

from __future__ import annotations

import itertools
import math

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import EARLIEST, LATEST
from tests.simulation.stream_brokers import EXPIRED, LOST, Record
from tests.simulation.stream_facts import LogEntry, StreamFacts, parsed

# Reports of lost data that explain why a message was deleted before it was read.
_LOSSES = ("gone", "ends", "other", "after", "gap")


class Excuses:
    """The excuses of one schedule for messages that its micro-batches lack."""

    def __init__(self, facts: StreamFacts) -> None:
        self.facts, self.cluster = facts, facts.cluster

    def of(self, record: Record) -> str:
        """Return why a message is in no micro-batch; "" if there is no reason."""
        queue = record.queue
        if record.is_damaged and self._is_left_out(record):
            return "unreadable"
        first = next((number for number, entry in enumerate(self.facts.entries) if queue in entry.offsets), None)
        if first is None:
            is_gone = record.gone_at < math.inf or not self.cluster.is_readable(queue)
            return "queue never existed for the query" if is_gone else ""
        excuse = self._of_the_beginning(record, first) or self._of_a_report(record)
        if excuse:
            return excuse
        return self._of_a_deletion(record) if record.gone_at < math.inf else self._of_a_present_message(record)

    def _of_the_beginning(self, record: Record, first: int) -> str:
        """Return why the query begins after a message; `first` is the first micro-batch that has its queue."""
        queue, entry = record.queue, self.facts.entries[first]
        begin, initial = entry.begins.get(queue, 0), entry.driver.initial
        if record.offset >= begin or record.stored_at > entry.written:
            return ""
        if first == 0 and queue in (entry.offsets if initial is None else initial.offsets):
            if self._may_precede(record, begin):
                return "before the start"
            if self._is_of_the_start(record, entry):
                return "replaced while the start was planned"
            if self._is_of_an_untimed_start(record, begin, entry):
                return "replaced, and the last message before the start has expired"
        elif record.gone_at <= entry.written:
            return "expired before the query knew the queue"
        return ""

    def _of_a_report(self, record: Record) -> str:
        """Return which report says that a message is left out."""
        for report in self.facts.reports_of[str(record.queue)]:
            if report.kind == "gap" and report.offset <= record.offset < report.end and record.gone_at <= report.at:
                return "reported gap"
            if report.kind == "may skip" and record.offset < report.offset:
                return "warning that messages may be skipped"
            if report.kind == "expired" and record.offset < report.offset and record.gone_at <= report.at:
                return "expired before the query knew that its queue was replaced"
        return ""

    def _of_a_left_out_queue(self, record: Record) -> str:
        """Return an excuse if a repeated micro-batch left out the queue of a message, which was reported as gone."""
        queue, offset, facts = record.queue, record.offset, self.facts
        for run in facts.history.runs:
            start, end = parsed(run.start).offsets, parsed(run.end).offsets
            # Of a queue that was replaced, also the messages before the start.
            is_left = start.get(queue, 0) <= offset or any(
                at <= record.stored_at <= run.began for at in self.cluster.damaged.get(queue, ())
            )
            is_gone = facts.is_reported(queue, ("gone",), run.began, run.planned_by)
            if is_left and offset < end.get(queue, 0) and is_gone:
                return "queue left out of a repeated micro-batch"
        return ""

    def _is_reported_gone(self, queue: MessageQueue) -> bool:
        """Return whether a queue is removed, and was reported."""
        return not self.cluster.is_readable(queue) and self.facts.is_reported(queue, ("gone",), 0.0, math.inf)

    def _of_a_present_message(self, record: Record) -> str:
        """Return why a message that its broker has is not read."""
        queue, offset, facts = record.queue, record.offset, self.facts
        if excuse := self._of_a_left_out_queue(record):
            return excuse
        if self._is_removed_at_its_end(queue):
            return "in a queue that was replaced by one of the same length, and removed"
        if self._is_reported_gone(queue):
            return "in a queue that was removed"
        known = facts.known_at(record.stored_at)
        if known is not None and offset < known.offsets.get(queue, 0):
            log = self.cluster.log(queue)
            if queue not in known.times:
                return "replaced, and the last message read was unknown"
            if log is not None and log.first >= known.offsets[queue]:
                return "replaced, and the last message read has expired"
        return ""

    def _of_a_deletion(self, record: Record) -> str:
        """Return why nothing reports a message that was deleted before it was read."""
        facts, queue = self.facts, record.queue
        kinds = {report.kind for report in facts.reports_of[str(queue)] if report.at >= record.gone_at}
        if record.gone_by != EXPIRED and not kinds.isdisjoint(_LOSSES):
            return "reported loss"
        known = facts.known_at(record.gone_at)
        offset = None if known is None else known.offsets.get(queue)
        if known is None or offset is None:
            return "deleted before the query knew the queue"
        if record.gone_by == EXPIRED:
            return self._of_an_expired_replacement(record)
        planned = [
            number
            for number, (last, entry) in enumerate(itertools.pairwise(facts.entries), 1)
            if last.offsets.get(queue, 0) <= record.offset < entry.offsets.get(queue, 0)
            and record.stored_at <= entry.written <= record.gone_at
        ]
        if not planned:
            if queue not in known.times:
                return "replaced, and the last message read was unknown"
            if record.gone_by == LOST:
                return "lost before the query knew it"
            if self._is_removed_at_its_end(queue):
                return "in a queue that was replaced by one of the same length, and removed"
            log = self.cluster.log(queue)
            if log is not None and log.first >= offset:
                return "replaced, and the last message read has expired"
            if self._is_replaced_twice(record):
                return "replaced twice, and all messages in between have expired"
            if log is None and "waits" in kinds:
                return "waits for a broker that has its topic no more"
        is_replaced = any(self._has_another(number, record) for number in planned)
        return "replaced before a task read it, and the last message read has expired" if is_replaced else ""

    def _of_an_expired_replacement(self, record: Record) -> str:
        """Return why the query did not report a message that has expired in a queue that was replaced or removed."""
        queue, facts = record.queue, self.facts
        if any(at >= record.gone_at for at in self.cluster.damaged.get(queue, ())):
            return "expired in a queue that was replaced afterwards"
        if excuse := self._of_a_left_out_queue(record):
            return excuse
        if self._is_reported_gone(queue):
            return "in a queue that was removed"
        # The message may have been stored while a micro-batch was planned.
        for known in (facts.known_at(record.stored_at), facts.known_at(record.gone_at)):
            if known is None or record.offset >= known.offsets.get(queue, 0):
                continue
            if queue not in known.times:
                return "replaced, and the last message read was unknown"
            if self._has_expired(queue, known):
                return "replaced, and the last message read has expired"
        return ""

    def _has_expired(self, queue: MessageQueue, known: LogEntry) -> bool:
        """Return whether the last message of a micro-batch had expired when a query compared it with the queue's."""
        facts, last = self.facts, known.offsets[queue] - 1
        # The queue is compared when a micro-batch is planned that reads it.
        compared = next(
            (
                facts.kept[number].planned_by
                for number, entry in enumerate(facts.entries)
                if entry.written > known.written
                and entry.offsets.get(queue) != known.offsets[queue]
                and number in facts.kept
            ),
            math.inf,
        )
        at_last = (other for other in self.cluster.records if (other.queue, other.offset) == (queue, last))
        stored = [other for other in at_last if other.stored_at <= compared]
        newest = max(stored, key=lambda other: other.stored_at, default=None)
        return newest is not None and newest.gone_by == EXPIRED and newest.gone_at <= compared

    def _has_another(self, batch: int, record: Record) -> bool:
        """Return whether a micro-batch has another message at this place, and the last one of the queue has expired."""
        run, log = self.facts.kept.get(batch), self.cluster.log(record.queue)
        place = record.queue, record.offset
        has_another = run is not None and any(
            (row.queue, row.offset) == place and row.number != record.number for row in run.all_rows
        )
        return has_another and log is not None and log.first >= self.facts.entries[batch].offsets[record.queue]

    def _is_replaced_twice(self, record: Record) -> bool:
        """Return whether a queue was replaced, and again before the tasks of a micro-batch read a message's place.

        All messages of this micro-batch, and the one before, had expired when it was planned, so none was compared.
        """
        queue, facts = record.queue, self.facts
        of_queue = [other for other in self.cluster.records if other.queue == queue]
        for batch, (last, entry) in enumerate(itertools.pairwise(facts.entries), 1):
            start, end, run = last.offsets.get(queue, 0), entry.offsets.get(queue, 0), facts.kept.get(batch)
            if run is None or not start <= record.offset < end or queue in entry.times:
                continue
            life = max((other.incarnation for other in of_queue if other.stored_at <= entry.written), default=0)
            expired = {
                other.offset
                for other in of_queue
                if other.incarnation == life > record.incarnation
                and other.gone_by == EXPIRED
                and other.gone_at <= entry.written
            }
            again = [at for at in self.cluster.damaged.get(queue, ()) if entry.written <= at <= run.ended]
            has_another = any(
                (row.queue, row.offset) == (queue, record.offset)
                and any(at <= self.cluster.records[row.number].stored_at for at in again)
                for row in run.all_rows
            )
            if has_another and expired.issuperset(range(max(0, start - 1), end)):
                return True
        return False

    def _is_removed_at_its_end(self, queue: MessageQueue) -> bool:
        """Return whether a queue is removed, and ends where the query has read it to; brokers reject its pulls."""
        log, read_to = self.cluster.log(queue), self.facts.entries[-1].offsets.get(queue)
        return not self.cluster.is_readable(queue) and log is not None and read_to == len(log.records)

    def _may_precede(self, record: Record, begin: int) -> bool:
        """Return whether the options leave out a message before the begin of its queue in the first micro-batch."""
        driver = self.facts.entries[0].driver
        options = driver.options
        ended = self.facts.entries[0].written if driver.initial is None else driver.initial.returned
        if options.starting_timestamp is not None:
            return record.stored_ms < options.starting_timestamp
        if options.starting_offsets_by_timestamp:
            return record.stored_ms < dict(options.starting_offsets_by_timestamp)[record.queue]
        spec = options.starting_offsets
        word = spec.word
        if word is None:
            offset = spec.offset_of(record.queue)
            assert offset is not None
            word = {EARLIEST: "earliest", LATEST: "latest"}.get(offset)
            if word is None:
                return record.offset < offset
        if word == "earliest":
            return record.gone_at <= ended
        if word == "committed":
            # What the group has read, or by the fallback.
            return record.offset < begin and record.stored_at <= ended
        return record.stored_at <= ended

    def _is_left_out(self, record: Record) -> bool:
        """Return whether a micro-batch that leaves out unreadable messages has the place of a message."""
        queue = record.queue
        return any(
            min(parsed(run.start).offsets.get(queue, 0), self.facts.continues_at(run, queue)) <= record.offset
            and record.offset < parsed(run.end).offsets.get(queue, 0)
            for run in self.facts.kept.values()
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

    def _is_of_an_untimed_start(self, record: Record, begin: int, entry: LogEntry) -> bool:
        """Return whether a message was stored in a queue that was replaced after a new query had requested its start.

        The message before the start had expired by then, so the start has no store time to compare.
        """
        queue, initial = record.queue, entry.driver.initial
        if initial is None or queue in initial.times:
            return False
        expired = any(
            (other.queue, other.offset) == (queue, begin - 1)
            and other.gone_by == EXPIRED
            and other.gone_at <= initial.returned
            for other in self.cluster.records
        )
        damaged = self.cluster.damaged.get(queue, ())
        return expired and any(initial.called <= at <= record.stored_at for at in damaged)
