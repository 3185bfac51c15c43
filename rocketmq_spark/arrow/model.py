"""The messages of a record batch, column by column, and the rules that its rows break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask
from rocketmq_spark.arrow.gather import Frame
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.properties import WAIT


@dataclass(frozen=True, slots=True)
class Rule:
    """What is wrong with a row (without its data), what is allowed, and what to do about it."""

    broken: str
    allowed: str
    todo: str


@dataclass(frozen=True, slots=True)
class Violation:
    """Rows of one block that break one rule, ascending; `found` returns a row's wrong value for the error's text."""

    rule: Rule
    rows: Ints
    found: Callable[[int], object] | None = None


@dataclass(frozen=True, slots=True)
class Property:
    """One system property of the rows of a block."""

    name: str  # ASCII
    values: ByteColumn | Frame | None  # None: every row that has the property has `literal` as its value
    valid: Mask | None  # Which rows have it; None: all
    literal: bytes = b""  # Begins each value

    def present(self, rows: int) -> Mask:
        """Return which of all rows have the property."""
        return np.ones(rows, np.bool_) if self.valid is None else self.valid

    def column(self, rows: int) -> ByteColumn:
        """Return the values of all rows."""
        if isinstance(self.values, Frame):
            return self.values.column(rows)
        assert self.values is not None
        return self.values

    def sizes(self, rows: int) -> Ints:
        """Return how many bytes the property takes in each row's property string."""
        fixed = len(self.name) + 2 + len(self.literal)
        if self.values is None:
            return self.present(rows) * fixed
        if isinstance(self.values, Frame):
            return np.full(rows, fixed + len(self.values.template))
        return self.values.sizes + fixed if self.valid is None else self.values.sizes + self.valid * fixed


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """The messages of one RecordBatch, column by column."""

    rows: int
    topics: list[str]
    topic_codes: Ints | None  # Which of `topics` each row has, -1 where null; None: every row has the only one
    body: ByteColumn
    keys: ByteColumn | None
    sharding_key: ByteColumn | None
    lite_topic: ByteColumn | None
    properties: tuple[Property, ...]  # System properties except UNIQ_KEY, in their order
    unique_key: bool  # Whether the rows have a UNIQ_KEY
    user: ByteColumn | None  # The user's properties as property strings
    user_entries: ListColumn | None  # The same, each property by itself
    user_fields: ByteColumn | None  # The user's properties as fields of a gRPC message; None for other protocols
    flags: npt.NDArray[np.int64] | None  # None: all 0
    # With ``queueSelector=column``: queue ids and which rows have one, and broker names as `topic_codes` and `topics`
    queue_ids: tuple[npt.NDArray[np.int64], Mask | None] | None
    broker_names: tuple[Ints, list[str]] | None
    property_sizes: Ints  # Bytes of each row's whole property string
    item_sizes: npt.NDArray[np.int64]  # Bytes of each row as an item of a batch
    single: Mask | None  # Rows that go as single messages; None: none
    violations: tuple[Violation, ...]

    def topic(self, row: int) -> str | None:
        """Return the topic of one row, None where it is null."""
        code = 0 if self.topic_codes is None else int(self.topic_codes[row])
        return None if code < 0 else self.topics[code]

    def topics_of(self, rows: Mask) -> list[int]:
        """Return the codes of the topics of valid rows, at least one."""
        return [0] if self.topic_codes is None else np.flatnonzero(np.bincount(self.topic_codes[rows])).tolist()

    def of_topic(self, code: int, rows: Mask) -> Mask:
        """Return which of `rows` have the topic with this code."""
        return rows if self.topic_codes is None else rows & (self.topic_codes == code)

    @property
    def no_wait(self) -> Mask | None:
        """Which rows have ``waitStoreMsgOK`` false; None: none, or the protocol does not carry it."""
        return next((prop.valid for prop in self.properties if prop.name == WAIT), None)

    def bad_rows(self) -> Mask | None:
        """Return which rows break a rule; None: none does."""
        if not self.violations:
            return None
        bad = np.zeros(self.rows, np.bool_)
        for violation in self.violations:
            bad[violation.rows] = True
        return bad


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one queue, from the first offset to the last one."""

    queue: MessageQueue
    rows: int
    first: int
    last: int


class FoundRows(NamedTuple):
    """Rows of a block that are stored, and one span for each queue that has some of them."""

    mask: Mask
    spans: Sequence[Span]


class KnownRows(Protocol):
    """Rows of a partition that are stored before it is sent."""

    def take(self, block: MessageBlock, first_row: int, bad: Mask | None) -> FoundRows | None:
        """Return which rows of a block, from number `first_row` on, are stored; None: none.

        Each takes a stored row. `bad` rows are not looked for.
        """
