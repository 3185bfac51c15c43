"""Makes dead letters of invalid rows (docs/delivery.md#invalid-rows).

They are made row by row, because invalid rows are usually rare. All rows may be invalid, so a slice has at most 1,000
dead letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.arrow.columns import (
    ByteColumn,
    byte_column,
    false_rows,
    int_column,
    list_column,
)
from rocketmq_spark.arrow.grpc_limits import MAX_PROPERTIES, MAX_PROPERTY_BYTES
from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.arrow.schema import (
    COLUMNS,
    READ_ONLY,
    is_instant,
    is_int,
    is_text,
    reserved_names,
)
from rocketmq_spark.model.hashes import ROW_ID
from rocketmq_spark.model.message import Ready
from rocketmq_spark.model.names import trim
from rocketmq_spark.model.properties import ATTEMPT

PREFIX: Final = "DEAD_LETTER_"
_LEFT_OUT: Final = f"{PREFIX}leftOut"
_LEFT_OUT_SIZE: Final = len(_LEFT_OUT) + 12

_NULL_BODY: Final = b"(null)"
_EMPTY_BODY: Final = b"(empty)"

# The most that one slice of dead letters holds.
_SLICE_ROWS: Final = 1_000
_SLICE_BYTES: Final = 8 * 1024 * 1024

# Moved values are cut to this many characters. Keys and tags are moved if they are longer than this many bytes.
_CUT: Final = 200
_LONGEST_KEYS: Final = 8_000
_LONGEST_TAGS: Final = 1_000

# The columns whose values are moved to properties of the dead letter.
_TEXTS: Final = tuple(
    name for name, column in COLUMNS.items() if column.fits is is_text and name not in ("topic", "tags")
)
_NUMBERS: Final = tuple(name for name, column in COLUMNS.items() if column.fits in (is_int, is_instant))


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of a protocol for keys, tags and properties."""

    room: int  # Bytes of all together
    most: int  # Number of properties, without keys and tags
    forbidden: Mapping[int, str]  # Characters that no text may hold, and their replacements
    blank_keys: bool

    def takes(self, text: str, most: float = math.inf) -> bool:
        return text == text.translate(self.forbidden) and len(text.encode()) <= most

    def cleaned(self, value: object) -> str:
        return str(value)[:_CUT].translate(self.forbidden)


# Room is left for what the broker and the encoder add (block.py); a proxy counts before that.
_REMOTING: Final = _Limits(30_000, 30_000, dict.fromkeys((1, 2), "\ufffd"), blank_keys=True)
_GRPC: Final = _Limits(
    MAX_PROPERTY_BYTES, MAX_PROPERTIES, dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), "\ufffd"), blank_keys=False
)

_TEXT: Final = pa.string()
_SCHEMA: Final = pa.schema(
    {"body": pa.large_binary(), "keys": _TEXT, "tags": _TEXT, "properties": pa.map_(_TEXT, _TEXT)}
)


@dataclass(frozen=True)
class DeadLetterBatcher(BatchSource[pa.RecordBatch]):
    """Batches the good rows of one partition, and its invalid ones as dead letters."""

    rows: BatchSource[pa.RecordBatch]  # Passes its invalid rows to the `add` of `letters`
    dead: BatchSource[pa.RecordBatch]  # Of the dead-letter topic; gets valid rows only
    letters: DeadLetters

    @property
    def pending_bytes(self) -> int:
        return self.rows.pending_bytes + self.dead.pending_bytes

    @property
    def taken_rows(self) -> int:
        return self.rows.taken_rows + self.dead.taken_rows + self.letters.waiting_rows

    def add(self, rows: pa.RecordBatch, now: float) -> Iterator[Ready]:
        # `add` checks the rows before the caller iterates the result.
        return chain(self.rows.add(rows, now), self._dead_letters(now))

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        return chain(self.rows.reject(rejected, now), self._dead_letters(now))

    def _dead_letters(self, now: float) -> Iterator[Ready]:
        return chain.from_iterable(self.dead.add(letters, now) for letters in self.letters.slices())

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        return chain(self.rows.expired(now, known), self.dead.expired(now, known))

    def new_topics(self) -> set[str]:
        return {*self.rows.new_topics(), *self.dead.new_topics()}

    def flush(self) -> Iterator[Ready]:
        return chain(self.rows.flush(), self.dead.flush())


@dataclass
class DeadLetters:
    """Turns invalid rows into valid ones."""

    max_message_size: int  # Longer bodies are cut, bytes
    write_id: str
    batch_id: int  # The micro-batch; -1 in a batch write
    _: KW_ONLY
    over_grpc: bool = False
    tags: str | None = None  # The option of that name: the tag of a letter without its own
    waiting_rows: int = field(default=0, init=False)  # Taken and not yet yielded
    _taken: list[InvalidRows] = field(default_factory=list, init=False, repr=False)

    def add(self, invalid: InvalidRows) -> None:
        """Take the invalid rows of one batch."""
        self._taken.append(invalid)
        self.waiting_rows += len(invalid)

    def slices(self) -> Iterator[pa.RecordBatch]:
        """Yield the taken rows as record batches of a bounded size, for the schema of a write without ``topic``."""
        while self._taken:
            letters: list[dict[str, Any]] = []
            nbytes = 0
            for letter in self._letters_of(self._taken.pop(0)):
                letters.append(letter)
                nbytes += len(letter["body"])
                if len(letters) == _SLICE_ROWS or nbytes >= _SLICE_BYTES:
                    yield self._record_batch(letters)
                    letters, nbytes = [], 0
            if letters:
                yield self._record_batch(letters)

    def _record_batch(self, letters: list[dict[str, Any]]) -> pa.RecordBatch:
        self.waiting_rows -= len(letters)
        return pa.RecordBatch.from_pylist(letters, _SCHEMA)

    def _letters_of(self, invalid: InvalidRows) -> Iterator[dict[str, Any]]:
        """Yield the columns of `_SCHEMA` for each row."""
        reader = _RowReader(invalid, _GRPC if self.over_grpc else _REMOTING)
        for place, row in enumerate(invalid.rows.tolist()):
            properties = {f"{PREFIX}rule": invalid.rule(place).broken, f"{PREFIX}writeId": self.write_id}
            if self.batch_id >= 0:
                properties[f"{PREFIX}batchId"] = str(self.batch_id)
            properties[f"{PREFIX}partition"] = str(invalid.partition_id)
            properties[f"{PREFIX}row"] = str(invalid.first_row + row)
            body = invalid.block.body.value(row)
            if body is not None:
                properties[f"{PREFIX}bodySize"] = str(len(body))
            # A body of one byte is allowed whatever maxMessageSize is.
            body = (body or (_NULL_BODY if body is None else _EMPTY_BODY))[: self.max_message_size]
            keys, tags = reader.add_columns(row, properties)
            reader.add_user_properties(row, properties, len(f"{keys}{tags or self.tags or ''}".encode()))
            yield {"body": body, "keys": keys, "tags": tags, "properties": list(properties.items())}


class _RowReader:
    """Reads rows of one batch as Python values; invalid UTF-8 becomes U+FFFD."""

    def __init__(self, invalid: InvalidRows, limits: _Limits) -> None:
        self._limits = limits
        self._block = invalid.block
        batch = invalid.batch
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        self._tags = byte_column(columns.get("tags"))
        self._texts = {name: byte_column(columns.get(name)) for name in _TEXTS}
        self._numbers = {name: int_column(columns.get(name)) for name in _NUMBERS}
        self._no_wait = false_rows(columns.get("waitStoreMsgOK"))
        self._properties = list_column(columns.get("properties"))
        self._row_id = next(
            (prop.column(self._block.rows) for prop in self._block.properties if prop.name == ROW_ID), None
        )
        self._reserved = reserved_names(columns, row_id=self._row_id is not None)
        self._dropped = set(self._reserved) if any(name in columns for name in READ_ONLY) else set()
        self._dropped.add(ATTEMPT)
        if self._row_id is None:
            # The id of another message: a dead letter is no copy of it.
            self._dropped.add(ROW_ID)

    def add_columns(self, row: int, properties: dict[str, str]) -> tuple[str | None, str | None]:
        """Move columns that a dead letter does not have to its properties; return keys and tags if they stay."""
        block, limits = self._block, self._limits
        keys, tags = _text(block.keys, row), _text(self._tags, row)
        moved: dict[str, object] = {"topic": block.topic(row)}
        if keys is not None and not (
            _is_utf8(block.keys, row) and limits.takes(keys, _LONGEST_KEYS) and (limits.blank_keys or trim(keys))
        ):
            moved["keys"], keys = keys, None
        if tags is not None and not (
            _is_utf8(self._tags, row)
            and limits.takes(tags, _LONGEST_TAGS)
            and trim(tags) == tags != ""
            and "|" not in tags
        ):
            moved["tags"], tags = tags, None
        for name, column in self._texts.items():
            moved[name] = _text(column, row)
        for name, numbers in self._numbers.items():
            if numbers is not None and (numbers[1] is None or numbers[1][row]):
                moved[name] = int(numbers[0][row])
        if self._no_wait is not None and self._no_wait[row]:
            moved["waitStoreMsgOK"] = "false"
        if self._row_id is not None:
            properties[ROW_ID] = _text(self._row_id, row) or ""
        for name, value in moved.items():
            if value is not None and trim(text := limits.cleaned(value)):
                properties[f"{PREFIX}{name}"] = text
        return keys, tags

    def add_user_properties(self, row: int, properties: dict[str, str], used: int) -> None:
        """Add the row's own properties that are valid and fit."""
        entries, limits = self._properties, self._limits
        if entries is None:
            return
        left_out = 0
        used += sum(map(_size_of, properties.items()))
        for entry in range(int(entries.offsets[row]), int(entries.offsets[row + 1])):
            name, value = _text(entries.names, entry) or "", _text(entries.values, entry)
            if name in self._dropped:
                continue
            if name in self._reserved or not limits.takes(name):
                name, value = f"{PREFIX}{limits.cleaned(name)}", limits.cleaned(value or "")
            text = (value or "").translate(limits.forbidden)
            size = _size_of((name, text))
            # Keep room for the property that counts the omitted values.
            full = used + size + _LEFT_OUT_SIZE > limits.room or len(properties) + 1 >= limits.most
            if not (trim(name) and trim(text)) or name in properties or full:
                left_out += 1
            else:
                properties[name] = text
                used += size
        if left_out:
            properties[_LEFT_OUT] = str(left_out)


def _text(column: ByteColumn | None, row: int) -> str | None:
    return None if column is None else column.text(row, "replace")


def _is_utf8(column: ByteColumn | None, row: int) -> bool:
    text = _text(column, row)
    return column is None or text is None or text.encode() == column.value(row)


def _size_of(entry: tuple[str, str]) -> int:
    return sum(len(text.encode()) + 1 for text in entry)
