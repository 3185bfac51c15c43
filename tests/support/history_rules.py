"""The check of a history: what docs/delivery.md promises of its rows, attempts and reads, in whole columns.

A rule about something that the history does not record (attempts, counted rows, accounts, marks) finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.history import GAP, NO_ACCOUNT, NONE, Column, Columns, History, Outcome

Indices = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_FEW = 5


class Kind(str, Enum):
    """What is wrong."""

    MISSING = "row of a finished write is not stored"
    COUNTED_MISSING = "row counted as stored is not stored"
    COUNTED_TWICE = "row counted as stored twice"
    WRONG_ACCOUNT = "account of a write is wrong"
    NO_END_OF_WRITE = "write without end"
    TOO_MANY_COPIES = "row stored more often than attempts allow"
    NEVER_SENT = "row read that was never sent"
    NEVER_OFFERED = "row sent that was never offered"
    ORDER = "order of a key broken"
    KEY_IN_QUEUES = "key in several queues"
    NO_END = "attempt without end"
    TWO_ENDS = "attempt with two ends"
    LATE_END = "attempt ended after its deadline"
    LATE_START = "attempt started after the delivery timeout"
    OVERLAP = "two attempts of one batch at once"
    SENT_AGAIN = "batch sent again after its acknowledgement"
    OFFSET_TWICE = "offset read twice"
    HOLE = "offset not read"
    TWO_ROWS = "offset with two rows"
    MARKS_DIFFER = "copies of a row with different marks"
    MARK_SHARED = "different rows with one mark"


@dataclass(frozen=True, slots=True)
class Violation:
    """One kind of fault: how often, the first rows that it concerns, and a sentence. An empty tuple has no row."""

    kind: Kind
    count: int
    rows: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def check(history: History) -> list[Violation]:
    """Return what the history must not hold.

    Raises
    ------
    ValueError
        An id that must be unique is there twice, or an end has no attempt.
    """
    facts = _Facts(history)
    return [violation for rule in _RULES for violation in rule(facts)]


class _Index:
    """Finds the positions of ids in a column of unique ids."""

    def __init__(self, ids: Column, what: str) -> None:
        self._order: Indices | None = None if bool(np.all(ids[1:] > ids[:-1])) else np.argsort(ids, kind="stable")
        self._ids = ids if self._order is None else ids[self._order]
        if (again := self._ids[1:] == self._ids[:-1]).any():
            raise ValueError(f"{what} {self._ids[1:][again][0]} is there twice")

    def find(self, ids: Column) -> Indices:
        """Return the position of each id, and -1 for an unknown id."""
        if not len(self._ids):
            return np.full(len(ids), -1)
        first = int(self._ids[0])
        if int(self._ids[-1]) - first == len(self._ids) - 1:
            known = (ids >= first) & (ids <= int(self._ids[-1]))
            places = np.where(known, ids - first, 0)
        else:
            # Sorted ids are found many times faster, because memory is read in order.
            order = np.argsort(ids)
            places = np.empty(len(ids), np.intp)
            places[order] = np.minimum(np.searchsorted(self._ids, ids[order]), len(self._ids) - 1)
            known = self._ids[places] == ids
        return np.where(known, places if self._order is None else self._order[places], -1)


class _Facts:
    """The tables of a history, and the columns that several rules need. Rows are positions in the table `offer`."""

    def __init__(self, history: History) -> None:
        self.offer = history.table("offer")
        self.ids = self.offer["row"]
        index = _Index(self.ids, "row")

        self.read = read = history.table("read")
        self.read_rows = index.find(read["row"])
        # The messages of all queues, each once however many consumers read it, by queue and offset.
        stored = np.flatnonzero(read["row"] != GAP)
        stored = stored[np.lexsort((read["offset"][stored], read["queue"][stored]))]
        self.reads_by_offset = stored
        self.again = _equal_to_previous(read["queue"][stored], read["offset"][stored])
        self.messages = stored[~self.again]
        self.message_rows = self.read_rows[self.messages]
        self.copies = self._times(self.message_rows)
        self.there: Mask = self.copies > 0
        lost = index.find(history.table("lose")["row"])
        self.lost: Mask = np.zeros(len(self.ids), np.bool_)
        self.lost[lost[lost >= 0]] = True
        self.there |= self.lost

        self.count = history.table("count")
        self.count_rows = index.find(self.count["row"])
        self.finish = history.table("finish")
        writes, of_both = np.unique(np.concatenate([self.offer["write"], self.finish["write"]]), return_inverse=True)
        self.writes, self.write_of_row, self.write_of_finish = (
            writes,
            of_both[: len(self.ids)],
            of_both[len(self.ids) :],
        )
        _Index(self.finish["write"], "end of write")

        self.send = send = history.table("send")
        batch = history.table("batch")
        self.batches, of_both = np.unique(np.concatenate([batch["batch"], send["batch"]]), return_inverse=True)
        self.batch_of_send = of_both[len(batch["batch"]) :]
        of_rows = of_both[: len(batch["batch"])]
        self.expect = history.table("expect")
        self._match_ends(history.table("end"))

        sent_rows = index.find(batch["row"])
        self.write_of_batch = np.full(len(self.batches), -1)
        offered = sent_rows >= 0
        self.never_offered = batch["row"][~offered]
        sent_rows, of_rows = sent_rows[offered], of_rows[offered]
        self.write_of_batch[of_rows] = self.write_of_row[sent_rows]
        in_batches = np.bincount(self.batch_of_send, minlength=len(self.batches))
        storing = np.bincount(self.batch_of_send[self.may_store], minlength=len(self.batches))
        # How many attempts each row had, and how many of them may have stored it.
        self.tried = self._times(sent_rows, in_batches[of_rows])
        self.allowed = self._times(sent_rows, storing[of_rows])

    def _match_ends(self, end: Columns) -> None:
        send = self.send["attempt"]
        places = _Index(send, "attempt").find(end["attempt"])
        if (unknown := places < 0).any():
            raise ValueError(f"attempt {end['attempt'][unknown][0]} has an end and no start")
        self.ends = np.bincount(places, minlength=len(send))
        self.ended = np.full(len(send), np.inf)
        outcomes = np.full(len(send), int(Outcome.MAYBE_STORED))
        # The first end of an attempt is written last.
        self.ended[places[::-1]] = end["at"][::-1]
        outcomes[places[::-1]] = end["outcome"][::-1]
        self.may_store: Mask = outcomes != Outcome.NOT_STORED
        self.acknowledged: Mask = outcomes == Outcome.ACKNOWLEDGED

    def _times(self, rows: Indices, times: Column | None = None) -> Indices:
        known = rows >= 0
        weights = None if times is None else times[known]
        return np.bincount(rows[known], weights, minlength=len(self.ids)).astype(np.intp)

    def per_write(self, rows: Mask) -> Indices:
        """Return the number of these rows of each write."""
        return np.bincount(self.write_of_row[rows], minlength=len(self.writes))

    def counted(self) -> Mask:
        """Return whether each row was counted as stored."""
        return self._times(self.count_rows) > 0


def _equal_to_previous(*columns: Column) -> Mask:
    """Return for each line whether it equals the line before."""
    equal = np.zeros(len(columns[0]), np.bool_)
    if len(equal):
        equal[1:] = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
    return equal


def _violation(kind: Kind, count: int, rows: Column, text: str) -> Iterator[Violation]:
    if count:
        yield Violation(kind, int(count), tuple(map(int, rows[:_FEW])), text)


def _rows(kind: Kind, rows: Column, text: str) -> Iterator[Violation]:
    """Yield a violation of rows; its text ends with the first of them."""
    few = ", ".join(map(str, rows[:_FEW].tolist()))
    yield from _violation(kind, len(rows), rows, f"{_number(len(rows), 'row')} {text}: {few}")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _stored(facts: _Facts) -> Iterator[Violation]:
    """Every row of a finished write and every counted row is stored, and is counted once."""
    finished = np.zeros(len(facts.writes), np.bool_)
    finished[facts.write_of_finish] = facts.finish["finished"]
    missing = finished[facts.write_of_row] & ~facts.there
    yield from _rows(Kind.MISSING, facts.ids[missing], "of finished writes are not stored")
    rows = facts.count["row"]
    known = facts.count_rows >= 0
    gone = ~known
    gone[known] = ~facts.there[facts.count_rows[known]]
    yield from _rows(Kind.COUNTED_MISSING, np.unique(rows[gone]), "are counted as stored, and are not stored")
    values, times = np.unique(rows, return_counts=True)
    yield from _rows(Kind.COUNTED_TWICE, values[times > 1], "are counted as stored twice")


def _accounts(facts: _Facts) -> Iterator[Violation]:
    """The account of a write fits its rows."""
    ended = np.zeros(len(facts.writes), np.bool_)
    ended[facts.write_of_finish] = True
    text = f"{_number(int((~ended).sum()), 'write')} did not end: {facts.writes[~ended][:_FEW].tolist()}"
    yield from _violation(Kind.NO_END_OF_WRITE, (~ended).sum(), facts.ids[~ended[facts.write_of_row]], text)
    accounted = facts.finish["stored"] != NO_ACCOUNT
    writes = facts.write_of_finish[accounted]
    stored, not_sent, unknown, finished = (
        facts.finish[name][accounted] for name in ("stored", "not_sent", "unknown", "finished")
    )
    counted = facts.counted()
    taken = facts.per_write(np.ones(len(facts.ids), np.bool_))[writes]
    there = facts.per_write(facts.there)[writes]
    faults = [
        (stored + not_sent + unknown != taken, "its rows are {taken}"),
        (finished & (not_sent + unknown > 0), "it has finished"),
        (there < stored, "{there} are there"),
        (there > stored + unknown, "{there} are there"),
    ]
    if len(facts.count["row"]):
        faults.append((facts.per_write(counted)[writes] != stored, "it counted other rows"))
    if len(facts.send["attempt"]):
        at_least = facts.per_write(~counted & (facts.allowed > 0))[writes]
        at_most = facts.per_write(~counted & (facts.tried > 0))[writes]
        if len(facts.count["row"]) or not stored.any():
            faults.append((unknown < at_least, "attempts may have stored {at_least} more"))
            faults.append((unknown > at_most, "only {at_most} more were sent"))
    wrong = np.logical_or.reduce([fault for fault, _ in faults])
    texts = []
    for place in np.flatnonzero(wrong)[:_FEW]:
        figures = {"taken": taken[place], "there": there[place]}
        if len(facts.send["attempt"]):
            figures |= {"at_least": at_least[place], "at_most": at_most[place]}
        reasons = ", ".join(reason.format(**figures) for fault, reason in faults if fault[place])
        account = f"{stored[place]} stored, {not_sent[place]} not sent, {unknown[place]} unknown"
        texts.append(f"write {facts.writes[writes[place]]} reports {account}, and {reasons}")
    yield from _violation(Kind.WRONG_ACCOUNT, wrong.sum(), facts.ids[:0], "; ".join(texts))


def _copies(facts: _Facts) -> Iterator[Violation]:
    """A row is stored at most as often as attempts may have stored it, and only if it was offered and sent."""
    names = [facts.read["row"][facts.messages][facts.message_rows < 0]]
    if len(facts.send["attempt"]):
        names.append(facts.ids[(facts.copies > 0) & (facts.tried == 0)])
        many = np.flatnonzero((facts.copies > facts.allowed) & (facts.tried > 0))
        few = [f"row {facts.ids[row]} {facts.copies[row]} times, not {facts.allowed[row]}" for row in many[:_FEW]]
        text = f"{_number(len(many), 'row')} are stored more often than attempts allow: {', '.join(few)}"
        yield from _violation(Kind.TOO_MANY_COPIES, len(many), facts.ids[many], text)
    yield from _rows(Kind.NEVER_SENT, np.unique(np.concatenate(names)), "were read, and never sent")
    yield from _rows(Kind.NEVER_OFFERED, np.unique(facts.never_offered), "were sent, and never offered")


def _order(facts: _Facts) -> Iterator[Violation]:
    """The first copies of a key's rows are in one queue, and in the order in which their write took them.

    Lost rows have no order: the copies that are left may be later ones.
    """
    have_order = (facts.offer["key"] != NONE) & ~facts.lost
    if not have_order.any():
        return
    keyed = facts.message_rows >= 0
    keyed[keyed] = have_order[facts.message_rows[keyed]]
    messages, rows = facts.messages[keyed], facts.message_rows[keyed]
    queues = np.unique(facts.read["queue"][messages], return_inverse=True)[1]
    # Only a row with several copies can have more than one in a queue.
    several = np.flatnonzero(facts.copies[rows] > 1)
    first = np.ones(len(rows), np.bool_)
    first[several] = False
    first[several[np.unique(queues[several] * len(facts.ids) + rows[several], return_index=True)[1]]] = True
    rows, queues = rows[first], queues[first]
    keys = np.lexsort((facts.offer["key"], facts.write_of_row))
    groups = np.empty(len(keys), np.intp)
    groups[keys] = np.cumsum(~_equal_to_previous(facts.offer["key"][keys], facts.write_of_row[keys]))
    of_message = groups[rows]
    order = np.lexsort((queues, of_message))
    rows, queues, of_message = rows[order], queues[order], of_message[order]
    broken = _equal_to_previous(queues, of_message)
    broken[1:] &= rows[1:] < rows[:-1]
    places = np.flatnonzero(broken)
    few = [f"row {facts.ids[rows[place]]} after row {facts.ids[rows[place - 1]]}" for place in places[:_FEW]]
    text = f"{_number(len(places), 'row')} of a key are stored after later rows of their queue: {', '.join(few)}"
    yield from _violation(Kind.ORDER, len(places), facts.ids[rows[places]], text)
    moved = np.flatnonzero(_equal_to_previous(of_message) & ~_equal_to_previous(queues, of_message))
    yield from _rows(Kind.KEY_IN_QUEUES, facts.ids[rows[moved]], "are in another queue than other rows of their key")


def _attempts(facts: _Facts) -> Iterator[Violation]:
    """Every attempt ends once and in time."""
    send = facts.send

    def found(kind: Kind, wrong: Mask, text: str) -> Iterator[Violation]:
        few = [f"attempt {send['attempt'][place]} at {send['at'][place]:g} s" for place in np.flatnonzero(wrong)[:_FEW]]
        yield from _violation(
            kind, wrong.sum(), facts.ids[:0], f"{_number(int(wrong.sum()), 'attempt')} {text}: {', '.join(few)}"
        )

    yield from found(Kind.NO_END, facts.ends == 0, "have no end")
    yield from found(Kind.TWO_ENDS, facts.ends > 1, "have two ends")
    late = (facts.ended > send["deadline"]) & (facts.ends > 0)
    acknowledged = int((late & facts.acknowledged).sum())
    yield from found(Kind.LATE_END, late, f"ended after their deadline, {acknowledged} of them acknowledged")
    order = np.lexsort((send["at"], facts.batch_of_send))
    batches, at = facts.batch_of_send[order], send["at"][order]
    wrong = np.zeros((3, len(order)), np.bool_)
    again = _equal_to_previous(batches)
    early = again.copy()
    early[1:] &= at[1:] < facts.ended[order][:-1]
    wrong[0, order] = early
    after = again & ~early
    after[1:] &= facts.acknowledged[order][:-1]
    wrong[1, order] = after
    if len(order):
        timeouts = np.full(len(facts.writes) + 1, np.inf)
        timeouts[facts.write_of_finish] = facts.finish["delivery_timeout"]
        first = at[np.flatnonzero(~again)][np.cumsum(~again) - 1]
        wrong[2, order] = at - first > timeouts[facts.write_of_batch[batches]]
    yield from found(Kind.OVERLAP, wrong[0], "started before the end of another attempt of their batch")
    yield from found(Kind.SENT_AGAIN, wrong[1], "of a batch started after its acknowledgement")
    yield from found(Kind.LATE_START, wrong[2], "started after the delivery timeout")


def _offsets(facts: _Facts) -> Iterator[Violation]:
    """A consumer reads each offset once, and skips none."""
    read = facts.read
    order = np.lexsort((read["offset"], read["queue"], read["consumer"]))
    consumer, queue, offset, rows = (read[name][order] for name in ("consumer", "queue", "offset", "row"))
    same_queue = _equal_to_previous(consumer, queue)
    step = np.diff(offset, prepend=offset[:1])
    twice = np.flatnonzero(same_queue & (step == 0))
    text = f"{_number(len(twice), 'message')} were read again by the same consumer: "
    text += ", ".join(f"queue {queue[place]} at {offset[place]}" for place in twice[:_FEW])
    yield from _violation(Kind.OFFSET_TWICE, len(twice), rows[twice][rows[twice] != GAP], text)
    skipped = np.flatnonzero(same_queue & (step > 1))
    holes = [(int(queue[place]), int(offset[place - 1] + 1), int(offset[place])) for place in skipped[:_FEW]]
    count = int((step[skipped] - 1).sum())
    if len(facts.expect["queue"]):
        starts = np.flatnonzero(~same_queue)
        ends = np.append(starts[1:], len(order))[: len(starts)] - 1
        names = zip(consumer[starts].tolist(), queue[starts].tolist(), strict=True)
        spans = dict(zip(names, zip(offset[starts].tolist(), offset[ends].tolist(), strict=True), strict=True))
        for hole in _not_reached(facts.expect, spans):
            holes.append(hole)
            count += hole[2] - hole[1]
    few = ", ".join(f"queue {of} from {begin} to {until - 1}" for of, begin, until in holes[:_FEW])
    yield from _violation(Kind.HOLE, count, rows[:0], f"{_number(count, 'offset')} were not read: {few}")
    places, again = facts.reads_by_offset, facts.again.copy()
    again[1:] &= read["row"][places[1:]] != read["row"][places[:-1]]
    changed = places[again]
    text = f"{_number(len(changed), 'offset')} had different rows: "
    text += ", ".join(f"queue {read['queue'][place]} at {read['offset'][place]}" for place in changed[:_FEW])
    yield from _violation(Kind.TWO_ROWS, len(changed), read["row"][changed], text)


def _not_reached(expect: Columns, spans: dict[tuple[int, int], tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield queue, start and end of what is before the first and after the last offset that a consumer read."""
    done = set[tuple[int, int]]()
    for consumer, queue, start, end in zip(*(column.tolist() for column in expect.values()), strict=True):
        if (consumer, queue) in done:
            raise ValueError(f"consumer {consumer} has two ranges of queue {queue}")
        done.add((consumer, queue))
        first, last = spans.get((consumer, queue), (end, end - 1))
        for begin, until in ((start, min(first, end)), (max(last + 1, start), end)):
            if begin < until:
                yield queue, begin, until


def _marks(facts: _Facts) -> Iterator[Violation]:
    """All copies of a row have one mark, and no two rows."""
    known = facts.message_rows >= 0
    marks, rows = facts.read["mark"][facts.messages[known]], facts.message_rows[known]
    mark_of = np.full(len(facts.ids), NONE)
    mark_of[rows[::-1]] = marks[::-1]
    differ = np.zeros(len(facts.ids), np.bool_)
    differ[rows[marks != mark_of[rows]]] = True
    yield from _rows(Kind.MARKS_DIFFER, facts.ids[differ], "have copies with different marks")
    marked = np.flatnonzero(mark_of != NONE)
    order = marked[np.argsort(mark_of[marked], kind="stable")]
    shared = _equal_to_previous(mark_of[order])
    yield from _rows(Kind.MARK_SHARED, facts.ids[order[shared]], "have the mark of another row")


_RULES: tuple[Callable[[Any], Iterator[Violation]], ...] = (
    _stored, _accounts, _copies, _order, _attempts, _offsets, _marks,
)  # fmt: skip
