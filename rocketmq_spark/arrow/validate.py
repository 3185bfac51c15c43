"""The rules that every row keeps, checked on whole columns.

Rule 1: a check first screens its column with one cheap pass that a good column passes; only a column that fails the
        screen is searched for rows, so that exactness costs nothing where all is well.
Rule 2: a check reports all rows that break a rule, not the first: the caller raises, skips or diverts them.
Rule 3: a rule's text says what is wrong, what is allowed, and what to do.

Follows ``Validators.java`` and ``Message.putUserProperty`` (spec/producer.md 3.3 to 3.5), with the additions of
spec/remoting.md 5 and 16 that keep a row from corrupting its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask
from rocketmq_spark.names import FORBIDDEN_TOPICS, MAX_TOPIC_LENGTH, is_blank, is_legal, java_length

_SPACE: Final = 0x20
_PIPE: Final = ord("|")
_LAST_ASCII: Final = 0x7F


@dataclass(frozen=True, slots=True)
class Rule:
    """What is wrong with a row (none of its data in it), what is allowed, and what to do about it."""

    broken: str
    allowed: str
    todo: str


@dataclass(frozen=True, slots=True)
class Violation:
    """Rows of one block that break one rule, ascending; `found` gives what is in such a row, for the error's text."""

    rule: Rule
    rows: Ints
    found: Callable[[int], object] | None = None


def topic_rule(topic: str) -> Rule | None:
    """Return the rule that `topic` breaks as the target of a message, None if it keeps them all."""
    if is_blank(topic):
        return TOPIC_BLANK
    if java_length(topic) > MAX_TOPIC_LENGTH:
        return TOPIC_TOO_LONG
    if not is_legal(topic):
        return TOPIC_ILLEGAL
    return TOPIC_FORBIDDEN if topic in FORBIDDEN_TOPICS else None


TOPIC_NULL: Final = Rule("topic is null", "every row needs a topic", "fill the column, or set the option topic")
TOPIC_BLANK: Final = Rule("topic is blank", "a topic has 1 to 127 characters", "name one, or set the option topic")
TOPIC_TOO_LONG: Final = Rule(
    "topic is too long", f"{MAX_TOPIC_LENGTH} characters are allowed", "use a topic with a shorter name"
)
TOPIC_ILLEGAL: Final = Rule(
    "topic has an illegal character", "letters, digits and % | _ - are allowed", "replace the others (a dot, a slash)"
)
TOPIC_FORBIDDEN: Final = Rule("topic is the broker's own", "clients may not send to it", "use a topic of yours")


def check_body(body: ByteColumn | None, rows: int, max_message_size: int) -> Iterator[Violation]:
    """Bodies are there, hold at least one byte and at most `max_message_size`."""
    allowed = f"a body has 1 to {max_message_size} bytes"
    todo = "filter such rows out, or set onError to skip or deadLetter"
    null = Rule("body is null", allowed, todo)
    if body is None:
        if rows:
            yield Violation(null, np.arange(rows))
        return
    if body.sizes.min(initial=1) < 1:
        there = np.ones(rows, np.bool_) if body.valid is None else body.valid
        if not there.all():
            yield Violation(null, np.flatnonzero(~there))
        empty = np.flatnonzero(there & (body.sizes == 0))
        if len(empty):
            yield Violation(Rule("body is empty", allowed, todo), empty)
    if body.sizes.max(initial=0) > max_message_size:
        rule = Rule(
            "body is longer than maxMessageSize",
            f"{max_message_size} bytes are allowed",
            "send less per row, or raise maxMessageSize here and on every broker",
        )
        sizes = body.sizes
        yield Violation(rule, np.flatnonzero(sizes > max_message_size), lambda row: f"{sizes[row]} bytes")


def check_text(
    name: str, column: ByteColumn, *, blank: bool = False, pipe: bool = False, entries: ListColumn | None = None
) -> Iterator[Violation]:
    """A text that becomes part of a property string is UTF-8 without separators, and what else is asked of it.

    Parameters
    ----------
    name : str
        For the rule's text: ``tags``, ``the value of a property``.
    column : ByteColumn
        One text a row; with `entries`, one an entry.
    blank : bool, default False
        Refuse strings of nothing but characters up to U+0020, as Java's ``trim`` has it, and empty ones.
    pipe : bool, default False
        Refuse ``|``: a consumer's subscription takes it for "or".
    entries : ListColumn or None
        Says to which rows the elements of `column` belong.
    """
    lowest = int(column.span.min(initial=0xFF))
    if lowest <= 2:
        rule = Rule(
            f"{name} holds the character 0x01 or 0x02",
            "any other is allowed: these two separate properties",
            "remove or replace it",
        )
        yield from violations(rule, elements_with(column, (column.span - 1) < 2), entries)
    if blank:
        yield from check_blank(name, column, entries)
    if pipe and (hits := column.span == _PIPE).any():
        rule = Rule(f"{name} holds '|'", "one tag a message is allowed", "put the others into keys or properties")
        yield from violations(rule, elements_with(column, hits), entries)
    if int(column.span.max(initial=0)) > _LAST_ASCII:
        yield from _check_utf8(name, column, entries)


def _check_utf8(name: str, column: ByteColumn, entries: ListColumn | None) -> Iterator[Violation]:
    """A text is UTF-8: a string of Spark can hold any bytes (``cast(binary as string)``), which readers refuse."""
    texts = column.to_arrow()
    try:
        texts.cast(pa.large_string() if pa.types.is_large_binary(texts.type) else pa.string())
    except pa.ArrowInvalid:
        pass
    else:
        return
    # Arrow does not name the element. Only such a block is searched, one non-ASCII text at a time.
    beyond_ascii = elements_with(column, column.span > _LAST_ASCII).tolist()
    elements = np.array([element for element in beyond_ascii if not _is_utf8(column, element)], np.int64)
    rows = elements if entries is None else entries.rows_of(elements)
    rule = Rule(
        f"{name} is not valid UTF-8",
        "every text is",
        "decode the bytes with their own charset, or move them into the body",
    )
    if len(rows):
        yield Violation(rule, np.unique(rows), lambda row: column.text(int(elements[np.searchsorted(rows, row)])))


def _is_utf8(column: ByteColumn, element: int) -> bool:
    try:
        (column.value(element) or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def check_blank(name: str, column: ByteColumn, entries: ListColumn | None = None) -> Iterator[Violation]:
    """A text has something above U+0020 in it; parameters as of `check_text`."""
    if int(column.span.min(initial=0xFF)) <= _SPACE or _has_empty(column):
        rule = Rule(f"{name} is blank", "at least one visible character is needed", "use null where there is none")
        yield from violations(rule, _blank_elements(column), entries)


def check_key_items(items: ListColumn) -> Iterator[Violation]:
    """Items of ``keys`` arrays are joined by one space: each is there, is not empty, and holds no space itself."""
    values = items.values
    todo = "clean the array, or join it into one string yourself"
    yield from check_text("keys", values, entries=items)
    if (hits := values.span == _SPACE).any():
        rule = Rule("an item of keys holds a space", "the space separates keys", todo)
        yield from violations(rule, elements_with(values, hits), items)
    rule = Rule("an item of keys is null or empty", "each item is a key of at least one character", todo)
    yield from violations(rule, np.flatnonzero(values.sizes == 0), items)


def check_range(
    name: str, values: Ints, valid: Mask | None, low: int, high: int | None, todo: str
) -> Iterator[Violation]:
    """Whole numbers lie between `low` and `high`, both allowed; `high` None: as large as they like."""
    outside = values < low
    if high is not None:
        outside |= values > high
    if valid is not None:
        outside &= valid
    if outside.any():
        allowed = f"{low} to {high} is allowed" if high is not None else f"{low} or more is allowed"
        rule = Rule(f"{name} is out of range", allowed, todo)
        yield Violation(rule, np.flatnonzero(outside), lambda row: values[row])


def violations(rule: Rule, elements: Ints, entries: ListColumn | None = None) -> Iterator[Violation]:
    """Yield the rows that `elements` are, or in whose lists they are, unless there are none."""
    if len(elements):
        yield Violation(rule, elements if entries is None else np.unique(entries.rows_of(elements)))


def _not_null(column: ByteColumn, elements: Ints) -> Ints:
    return elements if column.valid is None else elements[column.valid[elements]]


def elements_with(column: ByteColumn, hits: Mask) -> Ints:
    """Return the elements in which one of the marked bytes of the column's span lies, ascending."""
    positions = np.flatnonzero(hits) + int(column.offsets[0])
    return _not_null(column, np.unique(np.searchsorted(column.offsets, positions, side="right") - 1))


def _has_empty(column: ByteColumn) -> bool:
    empty = column.sizes == 0
    return bool(empty.any() if column.valid is None else (empty & column.valid).any())


def _blank_elements(column: ByteColumn) -> Ints:
    """Return the elements without a byte above 0x20; a null is not one of them."""
    empty = column.offsets[1:] == column.offsets[:-1]
    # An empty element's first byte is its neighbour's, or lies behind the last one: any will do.
    heads = column.data[np.minimum(column.offsets[:-1], len(column.data) - 1)] if len(column.data) else np.uint8(0)
    suspects: Ints = _not_null(column, np.flatnonzero(empty | (heads <= _SPACE)))
    if len(suspects) == 0:
        return suspects
    visible = np.concatenate([[0], np.cumsum(column.span > _SPACE)])
    ends = column.offsets - int(column.offsets[0])
    blank: Mask = visible[ends[suspects + 1]] == visible[ends[suspects]]
    return suspects[blank]
