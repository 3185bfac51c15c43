"""What the checks of a stream know: the entries of the offset log, the reports of lost data, and what the sink kept."""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.offsets import beginnings_in, flat, stored_in
from tests.simulation.stream_brokers import StreamCluster
from tests.simulation.stream_spark import BatchRun, DriverRun, StreamHistory

# The reports of lost data, as docs/reading.md describes them.
_GAP: Final = re.compile(r"messages (\d+) to (\d+) of (\S+) are not there any more")
_REPORTS: Final = {
    "gone": re.compile(r"queue (\S+) is gone: "),
    "ends": re.compile(r"queue (\S+) ends at offset (\d+), (?:but|before)"),
    "other": re.compile(r"queue (\S+) has another message at offset (\d+)"),
    "after": re.compile(r"queue (\S+) continues at offset (\d+), the first stored after"),
    "may skip": re.compile(r"queue (\S+) continues at (?:its end, )?offset (\d+),.* and may skip"),
    "expired": re.compile(r"queue (\S+) has no messages before offset (\d+) any more"),
    "waits": re.compile(r"queue (\S+) waits for its broker"),
}


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


class StreamFacts:
    """One schedule, as its checks look at it."""

    def __init__(self, cluster: StreamCluster, history: StreamHistory) -> None:
        self.cluster, self.history = cluster, history
        self.entries = [LogEntry(at, *parsed(text), driver) for text, at, driver in history.ends]
        self.reports = [*self._reports()]
        self.reports_of: defaultdict[str, list[Report]] = defaultdict(list)
        for report in self.reports:
            self.reports_of[report.queue].append(report)
        # The first complete run of each micro-batch: what its sink keeps.
        self.kept: dict[int, BatchRun] = {}
        for run in history.runs:
            if math.isfinite(run.ended):
                self.kept.setdefault(run.batch, run)

    def known_at(self, at: float) -> LogEntry | None:
        """Return the last entry of the offset log that was written before a time."""
        number = bisect.bisect_left(self.entries, at, key=lambda entry: entry.written)
        return self.entries[number - 1] if number else None

    def is_reported(self, queue: MessageQueue, kinds: Collection[str], since: float, until: float) -> bool:
        """Return whether lost data of a queue was reported in a time."""
        return any(report.kind in kinds and since <= report.at <= until for report in self.reports_of[str(queue)])

    def continues_at(self, run: BatchRun, queue: MessageQueue) -> float:
        """Return the least offset at which a queue with replaced messages continues in a run of a micro-batch."""
        return min(
            (
                report.offset
                for report in self.reports_of[str(queue)]
                if report.kind == "after" and run.began <= report.at <= run.planned_by
            ),
            default=math.inf,
        )

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
                    yield Report(at, since, kind, match[1], int(match[2]) if pattern.groups > 1 else 0)


class ParsedOffset(NamedTuple):
    """An offset of the stream: offsets, beginnings and store times by queue."""

    offsets: dict[MessageQueue, int]
    begins: dict[MessageQueue, int]
    times: dict[MessageQueue, int]


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> ParsedOffset:
    """Return an offset from its JSON."""
    offset = json.loads(text)
    return ParsedOffset(flat(offset), beginnings_in(offset), stored_in(offset))
