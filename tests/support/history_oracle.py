"""The rules of history_rules.py once more, slow and obvious: one operation after the other."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from tests.support.history import GAP, NO_ACCOUNT, NONE, TABLES, History, Outcome
from tests.support.history_rules import Kind

Line = dict[str, Any]


def violations_of(history: History) -> Counter[Kind]:
    """Return how often each kind of violation is in a history."""
    return +Counter(kind for rule in (_rows, _accounts, _order, _attempts, _reads) for kind in rule(_Log(history)))


class _Log:
    def __init__(self, history: History) -> None:
        def lines(name: str) -> list[Line]:
            table = history.table(name)
            return [
                dict(zip(TABLES[name], values, strict=True))
                for values in zip(*(table[column].tolist() for column in TABLES[name]), strict=True)
            ]

        self.offers, self.batches, self.sends, self.ends = map(lines, ("offer", "batch", "send", "end"))
        self.counts, self.finishes, self.reads, self.expects = map(lines, ("count", "finish", "read", "expect"))
        self.lost = {line["row"] for line in lines("lose")}
        self.write_of = {line["row"]: line["write"] for line in self.offers}
        # The row of each offset, as the first consumer in the history has it.
        self.messages: dict[tuple[int, int], Line] = {}
        for line in self.reads:
            if line["row"] != GAP:
                self.messages.setdefault((line["queue"], line["offset"]), line)
        self.copies = Counter(line["row"] for line in self.messages.values())
        self.there = set(self.copies) | self.lost
        self.end_of: dict[int, Line] = {}
        for line in self.ends:
            self.end_of.setdefault(line["attempt"], line)

    def attempts(self, row: int) -> list[Line]:
        """Return the attempts to store a row."""
        batches = [line["batch"] for line in self.batches if line["row"] == row]
        return [send for batch in batches for send in self.sends if send["batch"] == batch]

    def outcome(self, send: Line) -> Outcome:
        end = self.end_of.get(send["attempt"])
        return Outcome.MAYBE_STORED if end is None else Outcome(end["outcome"])

    def allowed(self, row: int) -> int:
        """Return how many attempts may have stored a row."""
        return sum(self.outcome(send) is not Outcome.NOT_STORED for send in self.attempts(row))


def _rows(log: _Log) -> Iterator[Kind]:
    finished = {line["write"] for line in log.finishes if line["finished"]}
    counted = Counter(line["row"] for line in log.counts)
    for row, write in log.write_of.items():
        if write in finished and row not in log.there:
            yield Kind.MISSING
    for row, times in counted.items():
        if row not in log.there or row not in log.write_of:
            yield Kind.COUNTED_MISSING
        if times > 1:
            yield Kind.COUNTED_TWICE
    for row, times in log.copies.items():
        if row not in log.write_of or (log.sends and not log.attempts(row)):
            yield Kind.NEVER_SENT
        elif log.sends and times > log.allowed(row):
            yield Kind.TOO_MANY_COPIES
    for _ in {line["row"] for line in log.batches} - log.write_of.keys():
        yield Kind.NEVER_OFFERED


def _accounts(log: _Log) -> Iterator[Kind]:
    finishes = {line["write"]: line for line in log.finishes}
    for _ in set(log.write_of.values()) - finishes.keys():
        yield Kind.NO_END_OF_WRITE
    counted = {line["row"] for line in log.counts}
    for write, finish in finishes.items():
        if finish["stored"] == NO_ACCOUNT:
            continue
        rows = {row for row, of in log.write_of.items() if of == write}
        there, most = len(rows & log.there), finish["stored"] + finish["unknown"]
        right = (
            finish["stored"] + finish["not_sent"] + finish["unknown"] == len(rows) and finish["stored"] <= there <= most
        )
        if finish["finished"]:
            right &= finish["not_sent"] + finish["unknown"] <= 0
        if counted:
            right &= len(rows & counted) == finish["stored"]
        if log.sends and (counted or not any(line["stored"] for line in finishes.values() if line["stored"] >= 0)):
            others = rows - counted
            right &= sum(log.allowed(row) > 0 for row in others) <= finish["unknown"]
            right &= finish["unknown"] <= sum(bool(log.attempts(row)) for row in others)
        if not right:
            yield Kind.WRONG_ACCOUNT


def _order(log: _Log) -> Iterator[Kind]:
    places = {line["row"]: place for place, line in enumerate(log.offers)}
    keys = {line["row"]: (line["write"], line["key"]) for line in log.offers if line["key"] != NONE}
    newest: dict[tuple[Any, int], int] = {}
    seen = set[tuple[int, int]]()
    queues = defaultdict[Any, set[int]](set)
    for (queue, _), line in sorted(log.messages.items()):
        row = line["row"]
        if row not in keys or row in log.lost or (queue, row) in seen:
            continue
        seen.add((queue, row))
        if places[row] < newest.get((keys[row], queue), -1):
            yield Kind.ORDER
        newest[keys[row], queue] = places[row]
        queues[keys[row]].add(queue)
    for of_key in queues.values():
        yield from [Kind.KEY_IN_QUEUES] * (len(of_key) - 1)


def _attempts(log: _Log) -> Iterator[Kind]:
    times = Counter(line["attempt"] for line in log.ends)
    timeouts = {line["write"]: line["delivery_timeout"] for line in log.finishes}
    for send in log.sends:
        if not times[send["attempt"]]:
            yield Kind.NO_END
        elif log.end_of[send["attempt"]]["at"] > send["deadline"]:
            yield Kind.LATE_END
        if times[send["attempt"]] > 1:
            yield Kind.TWO_ENDS
    for batch in {send["batch"] for send in log.sends}:
        sends = sorted((send for send in log.sends if send["batch"] == batch), key=lambda send: send["at"])
        rows = [line["row"] for line in log.batches if line["batch"] == batch and line["row"] in log.write_of]
        timeout = timeouts.get(log.write_of[rows[-1]], math.inf) if rows else math.inf
        for first, second in itertools.pairwise(sends):
            end = log.end_of.get(first["attempt"])
            if end is None or second["at"] < end["at"]:
                yield Kind.OVERLAP
            elif end["outcome"] == Outcome.ACKNOWLEDGED:
                yield Kind.SENT_AGAIN
        for send in sends:
            if send["at"] - sends[0]["at"] > timeout:
                yield Kind.LATE_START


def _reads(log: _Log) -> Iterator[Kind]:
    offsets = defaultdict[tuple[int, int], list[int]](list)
    for line in log.reads:
        offsets[line["consumer"], line["queue"]].append(line["offset"])
    due = {place: set(range(min(read), max(read) + 1)) for place, read in offsets.items()}
    for line in log.expects:
        due.setdefault((line["consumer"], line["queue"]), set()).update(range(line["start"], line["end"]))
    for place, wanted in due.items():
        yield from [Kind.OFFSET_TWICE] * (len(offsets[place]) - len(set(offsets[place])))
        yield from [Kind.HOLE] * len(wanted - set(offsets[place]))
    row_at: dict[tuple[int, int], int] = {}
    for line in log.reads:
        place = line["queue"], line["offset"]
        if line["row"] != GAP and row_at.setdefault(place, line["row"]) != line["row"]:
            yield Kind.TWO_ROWS
            row_at[place] = line["row"]
    mark_of: dict[int, int] = {}
    differ = set[int]()
    for _, line in sorted(log.messages.items()):
        if line["row"] in log.write_of and mark_of.setdefault(line["row"], line["mark"]) != line["mark"]:
            differ.add(line["row"])
    yield from [Kind.MARKS_DIFFER] * len(differ)
    for mark, rows in Counter(mark_of.values()).items():
        if mark != NONE:
            yield from [Kind.MARK_SHARED] * (rows - 1)
