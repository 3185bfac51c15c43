"""Compares what is stored in topics with the rows that writes took. RocketMQ's own consumer reads each offset.

The program ``Auditor.java`` shares nothing with this package: it reads all queues from their first offsets to their
last ones, and compares hashes. It knows a message as one of the rows by rules, and else by its body. A rule is the name
of a property, a colon, and a regular expression for the whole property, whose group is the `row` of a `Row`. Without a
name, the expression is for the body.

Findings:

* ``missing``, ``repeated``: a row has fewer or more copies than its writes stored;
* ``changedBody``, ``bodyOfAnotherRow``, ``wrongTag``, ``wrongKeys``, ``lostProperty``, ``addedProperty``,
  ``changedProperty``: a message differs from its row;
* ``wrongTopic``, ``wrongQueue``, ``foreign``: a message is in a place of other rows, or is none of the rows;
* ``order``, ``keyInTwoQueues``: a row is after later rows of its `order`; an `order` has rows in several queues;
* ``gap``, ``unreadable``, ``logOrder``: offsets without a message, with one that the consumer cannot decode, or with
  one that is earlier in the commit log than the message before;
* ``marksDiffer``, ``markShared``: copies of a row have different marks, or two rows have the same one;
* ``mixedVariants``: in a `unit`, the group of the rule `variant` has several values.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.java import Java, b64

ROW_ID = "SPARK_ROW_ID"
SHARDING_KEY = "__SHARDINGKEY"
BY_KEYS = ("KEYS:(.*)",)
BY_NUMBER = (":(\\d+).*",)


@dataclass(frozen=True, slots=True)
class Row:
    """A row that a write took.

    Attributes
    ----------
    row : str
        Its name. No other row of an audit has it.
    body : bytes, optional
        None means any body.
    queue : str, optional
        The broker's name and the queue's id, as in ``broker-a/0``. Default: any queue.
    order : str, optional
        Rows with the same text keep the order in which they are given, and share a queue.
    repeats : bool
        Whether it may be stored again.
    optional : bool
        Whether it may be missing.
    times : int
        How often writes stored it on purpose.
    unit : str, optional
        What it shares a variant with.
    """

    topic: str
    row: str
    body: bytes | None = None
    tag: str | None = None
    keys: str | None = None
    properties: Mapping[str, str] | None = None
    queue: str | None = None
    order: str | None = None
    repeats: bool = False
    optional: bool = False
    times: int = 1
    unit: str | None = None

    def to_line(self) -> str:
        """Return the row as the program takes it."""
        fields: dict[str, Any] = {"topic": self.topic, "row": self.row}
        if self.body is not None:
            fields["body"] = b64(self.body)
        for name in ("tag", "keys", "properties", "queue", "order", "unit", "repeats", "optional"):
            if value := getattr(self, name):
                fields[name] = value
        if self.times != 1:
            fields["times"] = self.times
        return json.dumps(fields)


@dataclass(frozen=True)
class Found:
    """What an audit found.

    Attributes
    ----------
    rows, messages : int
        How many rows were given, and how many messages were read.
    found : int
        How many of the rows are stored.
    repeats : int
        How many copies of rows are stored beyond those that writes stored on purpose.
    most : int
        How often the most repeated row is stored.
    offsets : dict
        The first and next offset of each queue, by topic, broker's name and queue id.
    findings : dict
        By their kind, ``count`` and ``examples``.
    """

    rows: int
    messages: int
    found: int
    repeats: int
    most: int
    offsets: dict[str, list[int]]
    findings: dict[str, dict[str, Any]]

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings of each kind."""
        return {kind: finding["count"] for kind, finding in self.findings.items()}

    def check(self, *accepted: str) -> None:
        """Raise an AssertionError with all findings, unless their kinds are accepted."""
        wrong = list(self.lines(*accepted))
        figures = f"{self.rows} rows, {self.messages} messages of {self.found} rows, {self.repeats} repeats"
        assert not wrong, "\n".join([figures, *wrong])

    def lines(self, *accepted: str) -> Iterator[str]:
        """Yield all findings as text, unless their kinds are accepted."""
        for kind, finding in self.findings.items():
            if kind not in accepted:
                yield f"{kind}: {finding['count']}"
                yield from (f"  {json.dumps(example)}" for example in finding["examples"])


@dataclass(frozen=True)
class Audit:
    """Rows, and the topics to compare with them.

    Attributes
    ----------
    topics : sequence of str
        Topics to read; those of the rows are read anyway.
    identity : sequence of str
        Rules that find the row of a message. The first one that finds a row counts.
    ignored, compared : sequence of str
        Properties of users that are not compared, and properties of the system that are.
    marks : sequence of str
        Properties that copies of a row share, and different rows do not.
    variant : str, optional
        A rule for the variant of a message.
    examples : int
        How many examples of a kind of findings to return.
    settles, within : float
        The audit begins when nothing was stored for `settles` seconds, and all rows can be there or `within` seconds
        have passed. Brokers build their queues in the background, and again after a crash.
    """

    rows: Iterable[Row]
    topics: Sequence[str] = ()
    identity: Sequence[str] = BY_KEYS
    ignored: Sequence[str] = (ROW_ID, "SPARK_ATTEMPT")
    compared: Sequence[str] = (SHARDING_KEY,)
    marks: Sequence[str] = ()
    variant: str | None = None
    examples: int = 5
    settles: float = 1.0
    within: float = 60.0

    def to_request(self, path: Path) -> dict[str, Any]:
        """Write the rows to a file, and return the request."""
        names, count = set(self.topics), 0
        with path.open("w", encoding="ascii") as file:
            for row in self.rows:
                file.write(row.to_line() + "\n")
                names.add(row.topic)
                count += 1
        named = {name: list(getattr(self, name)) for name in ("identity", "ignored", "compared", "marks")}
        times = {"settlesMs": int(self.settles * 1000), "withinMs": int(self.within * 1000)}
        rules = {"variant": self.variant, "examples": self.examples}
        return {"topics": sorted(names), "rows": str(path), "count": count, **named, **times, **rules}


def numbered_rows(
    topic: str, numbers: Iterable[int], width: int, *, groups: int = 0, keyed: bool = True, **fields: Any
) -> Iterator[Row]:
    """Yield rows with their numbers as bodies, filled up with dots, and as keys.

    With `groups`, sharding keys give the rows of each a queue and an order.
    """
    for number in numbers:
        name, group = f"k{number}", f"group-{number % groups}" if groups else None
        yield Row(
            topic,
            name if keyed else str(number),
            str(number).ljust(width, ".").encode(),
            keys=name if keyed else None,
            properties={SHARDING_KEY: group} if group else None,
            order=group,
            **fields,
        )


def run_audits(java: Java, name_server: str, audits: Iterable[Audit]) -> list[Found]:
    """Return what each audit finds, all from one run of the program."""
    with tempfile.TemporaryDirectory() as folder:
        requests = [
            {"nameServer": name_server, **audit.to_request(Path(folder) / str(number))}
            for number, audit in enumerate(audits)
        ]
        return [Found(**answer) for answer in java.run("Auditor", requests)]


def audit(java: Java, name_server: str, rows: Iterable[Row], **settings: Any) -> Found:
    """Return what one `Audit` finds. `Found.check` raises an error if anything is wrong."""
    (found,) = run_audits(java, name_server, [Audit(rows, **settings)])
    return found
