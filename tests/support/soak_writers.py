"""The writers of the soak: programs in own processes, what they have written, and which rows they may have repeated."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.cluster.process import Watchdog
from tests.support.auditor import ROW_ID, SHARDING_KEY, Audit, Row
from tests.support.drivers import Driver
from tests.support.processes import PROGRAMS
from tests.tools.flatness import Sample

GROUPS: Final = 20
TAGS: Final = 3
HEAP_MB: Final = 512
# Seconds of the rows of a batch write.
PERIOD: Final = 5

# Spark's JVM grows for a long time without a leak: its heap up to -Xmx, and other memory by classes, compiled code,
# threads and network buffers. Here the whole heap is allocated at the start, and the other memory has a ceiling.
_CONF: Final = {
    "spark.master": "local[2,4]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The query's exception says why it ended.
    "spark.log.level": "OFF",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": f"{HEAP_MB}m",
    "spark.driver.extraJavaOptions": f"-Xms{HEAP_MB}m -XX:+AlwaysPreTouch",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Small limits, so that Spark's records of finished jobs reach their final size soon.
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "20",
    # `Writer.note` reads these files more often than Spark deletes them.
    "spark.sql.streaming.minBatchesToRetain": "100",
}


@dataclass
class Writer:
    """One delivery to one topic, by a program that is restarted after its end until all rows are written.

    Attributes
    ----------
    form : str
        ``stream``, ``batch`` or ``producer`` (tests/programs/soak_writer.py).
    options : dict
        Those of the write.
    seconds, rate : int
        The rows count from 0 to ``seconds * rate``.
    spared : bool
        Whether no fault kills the program or its JVM.
    is_done : bool
        Whether all rows are written.
    """

    delivery: str
    form: str
    topic: str
    folder: Path
    options: dict[str, str]
    seconds: int
    rate: int
    watchdog: Watchdog
    spared: bool = False
    is_done: bool = False
    drivers: list[Driver] = field(default_factory=list)
    # The last second of the rows of micro-batches, and those that a fault may have repeated (both ends included).
    _ends: dict[int, int] = field(default_factory=lambda: {-1: 0})
    _at_risk: list[tuple[int, int]] = field(default_factory=list)
    # What was written when the program was started.
    _before: int = -1

    @property
    def name(self) -> str:
        return f"{self.delivery} {self.form}"

    @property
    def rows(self) -> int:
        return self.seconds * self.rate

    @property
    def driver(self) -> Driver:
        return self.drivers[-1]

    @property
    def is_ordered(self) -> bool:
        return self.options.get("ordered") == "true"

    def start(self) -> None:
        """Start the program."""
        self.folder.mkdir(exist_ok=True)
        arguments = {
            "form": self.form,
            "folder": str(self.folder),
            "rate": self.rate,
            "seconds": self.seconds,
            "period": PERIOD,
            "restarts": 20,
            "options": self.options,
            "conf": _CONF,
        }
        command = [sys.executable, str(PROGRAMS / "soak_writer.py"), json.dumps(arguments)]
        self._before = self.written
        output = self.folder / f"driver-{len(self.drivers)}.out"
        self.drivers.append(Driver(command, {**os.environ, "PYSPARK_PYTHON": sys.executable}, output, self.watchdog))

    def tend(self) -> None:
        """Restart the program if it was killed; fail if it has failed. At its end, all rows are written."""
        if self.is_done or self.driver.is_alive:
            return
        self.is_done = self.driver.wait() == 0
        if not self.is_done:
            self.driver.check()
            self.start()

    @property
    def is_settled(self) -> bool:
        """Whether the present program has written a batch."""
        return self.written > self._before

    def close(self) -> None:
        for driver in self.drivers:
            driver.end()

    def note(self) -> None:
        """Record the rows of the present micro-batches, whose files Spark deletes later."""
        for file in self.folder.glob("checkpoint/offsets/[0-9]*"):
            if file.name.isdigit() and int(file.name) not in self._ends:
                lines = file.read_text().splitlines()
                if len(lines) > 2:
                    self._ends[int(file.name)] = int(lines[-1])

    @property
    def written(self) -> int:
        """The number of the last batch that is complete; -1 before it."""
        if self.form == "stream":
            return _last_batch(self.folder / "checkpoint" / "commits")
        file = self.folder / "written"
        return int(file.read_text()) - 1 if file.exists() else -1

    @property
    def begun(self) -> int:
        """The number of the last batch of which rows may be stored."""
        return _last_batch(self.folder / "checkpoint" / "offsets") if self.form == "stream" else self.written + 1

    def risk(self, first: int) -> None:
        """Record that batches from `first` to the present one may be repeated because of a fault."""
        self._at_risk.append((first, self.begun))

    def _rows_of(self, first: int, last: int) -> range:
        """Return the numbers of the rows of batches."""
        if self.form != "stream":
            size = self.rate * PERIOD
            return range(first * size, (last + 1) * size)
        since = max(end for batch, end in self._ends.items() if batch < first)
        until = min((end for batch, end in self._ends.items() if batch >= last), default=self.seconds)
        return range(since * self.rate, until * self.rate)

    def _retried(self) -> Iterator[int]:
        """Yield the batches of which requests were repeated, as the write's own metrics say."""
        for file in self.folder.glob("metrics*.jsonl"):
            for line in file.read_text().splitlines():
                commit = json.loads(line)
                if any(broker["retries"] for broker in commit["brokers"].values()):
                    yield commit["batch_id"] if self.form == "stream" else int(file.stem.partition("-")[2])

    def may_repeat(self) -> bytearray:
        """Return for each row whether it may be stored twice.

        With ``atLeastOnce`` these are the rows of batches that ran during a fault, or of which requests were repeated.
        """
        marks = bytearray(self.rows)
        if self.delivery == "atLeastOnce":
            for first, last in [*self._at_risk, *((batch, batch) for batch in self._retried())]:
                rows = self._rows_of(first, last)
                rows = range(rows.start, min(rows.stop, self.rows))
                marks[rows.start : rows.stop] = b"\1" * len(rows)
        return marks

    def audit(self) -> Audit:
        """Return the comparison of the topic with the rows."""
        if self.delivery == "exactlyOnce":
            # Each run of the program writes other bodies. Those of a batch are all of one run.
            return Audit(self._given(), identity=[r":(\d+)\.+ \w+"], variant=r":\d+\.+ (\w+)")
        # A repeated micro-batch has the row ids of the first one, a repeated call of `save` has others.
        marks = [ROW_ID] if "rowId" in self.options and self.form == "stream" else []
        return Audit(self._given(), marks=marks)

    def _given(self) -> Iterator[Row]:
        repeats, units = self.may_repeat(), self._units()
        # The rules of `audit` find the row in the body.
        by_body = self.delivery == "exactlyOnce"
        for number in range(self.rows):
            group = f"group-{number % GROUPS}" if self.is_ordered else None
            yield Row(
                self.topic,
                str(number) if by_body else f"k{number}",
                None if by_body else str(number).ljust(100, ".").encode(),
                tag=f"tag-{number % TAGS}",
                keys=f"k{number}",
                properties={SHARDING_KEY: group} if group else None,
                order=group,
                repeats=bool(repeats[number]),
                unit=str(next(units)) if by_body else None,
            )

    def _units(self) -> Iterator[int]:
        """Yield the batch of each row."""
        if self.form != "stream":
            yield from (number // (self.rate * PERIOD) for number in range(self.rows))
            return
        before = 0
        for batch, end in sorted(self._ends.items()):
            yield from (batch for _ in range(before * self.rate, min(end * self.rate, self.rows)))
            before = max(before, end)
        yield from (max(self._ends) + 1 for _ in range(before * self.rate, self.rows))

    def samples(self) -> list[Sample]:
        """Return the figures that the programs have recorded, each after its first write: before, it starts."""
        file = self.folder / "figures.jsonl"
        found, before = [], dict[int, int]()
        for line in file.read_text().splitlines() if file.exists() else ():
            # A killed program may leave half a line.
            if line.endswith("}"):
                sample = json.loads(line)
                if sample["done"] > before.setdefault(sample["pid"], sample["done"]):
                    found.append(Sample(sample["at"], sample["figures"]))
        return found

    def printed(self, pattern: str) -> Sequence[str]:
        """Return the lines of all outputs that match a regular expression."""
        return [
            line.strip()
            for driver in self.drivers
            for line in driver.output.read_text(errors="replace").splitlines()
            if re.search(pattern, line)
        ]


def new_writers(
    name_server: str, folder: Path, seconds: int, rate: int, forms: Sequence[str], watchdog: Watchdog
) -> list[Writer]:
    """Return the writers: each delivery with Spark, in a form of `forms`, and a producer without Spark."""
    deliveries = ("atLeastOnce", "effectivelyOnce", "exactlyOnce", "effectivelyOnce")
    writers = []
    for number, (delivery, form) in enumerate(zip(deliveries, [*forms, "producer"], strict=True)):
        topic = f"soak-{number}-{delivery}-{form}"
        options: dict[str, Any] = {
            "nameServer": name_server,
            "topic": topic,
            "delivery": delivery,
            # Small batches, so that each micro-batch has rows for both brokers.
            "batchBytes": "16k",
        }
        if delivery != "atLeastOnce":
            options["transactionalId"] = f"job-{topic}"
        if delivery == "exactlyOnce":
            # After an outage a micro-batch has the rows of all its seconds. On a slow machine these need long.
            options["transactionTimeoutMs"] = "120000"
        if delivery == "atLeastOnce":
            options["rowId"] = "true"
        if form == "stream":
            # A batch write does not know the queues of a broker without a master.
            options |= {"ordered": "true", "metricsPath": str(folder / topic / "metrics.jsonl")}
        writers.append(Writer(delivery, form, topic, folder / topic, options, seconds, rate, watchdog))
    return writers


def _last_batch(folder: Path) -> int:
    """Return the newest micro-batch in a log of a checkpoint; -1 without one."""
    return max((int(file.name) for file in folder.glob("[0-9]*") if file.name.isdigit()), default=-1)
