"""Which rows of a partition are stored, and where, by the ids that earlier requests gave them
(``delivery=effectivelyOnce``).

An id has the place of a row: the write, the micro-batch, the partition and the number of the row. Any producer may
store a message with such an id. So the content is taken from the message itself: its hash is computed here, and the
hash in the id is not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.columns import Ints, Mask, filled, to_arrow, to_numpy
from rocketmq_spark.arrow.hashes import Hashes, stored_hashes
from rocketmq_spark.arrow.model import MessageBlock, Span
from rocketmq_spark.arrow.read_columns import ROW_IDS, arrow_schema_of
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.properties import ROW_ID

# A slash and a hash end an id.
_DIGITS: Final = 16
_NUMBER_AND_HASH: Final = r"^[0-9]{1,18}/[0-9a-f]{16}$"
_PARTITION_TOO: Final = r"^[0-9]{1,18}/[0-9]{1,18}/[0-9a-f]{16}$"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows that are stored, in ascending order of their numbers; rows with one number have different hashes."""

    # The columns of messages that `in_batch` needs.
    SCHEMA: ClassVar = arrow_schema_of((ROW_IDS, "queueOffset", "body", "flag", "properties"))

    numbers: Ints
    hashes: Hashes  # Of the content
    queues: tuple[MessageQueue, ...]
    codes: Ints  # The place of each row's queue in `queues`
    offsets: Ints
    repeats: int = 0  # Rows that are stored a second time, or more often

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def concat(cls, parts: Iterable[StoredRows]) -> StoredRows:
        """Return the rows of several reads together."""
        own = [part for part in parts if len(part)]
        if not own:
            return NONE_STORED
        queues = tuple(dict.fromkeys(queue for part in own for queue in part.queues))
        codes = np.concatenate([np.array([queues.index(queue) for queue in part.queues])[part.codes] for part in own])
        numbers, hashes, offsets = (
            np.concatenate([getattr(part, name) for part in own]) for name in ("numbers", "hashes", "offsets")
        )
        order = np.lexsort((hashes, numbers))
        numbers, hashes = numbers[order], hashes[order]
        first = np.append(True, (numbers[1:] != numbers[:-1]) | (hashes[1:] != hashes[:-1]))
        repeats = sum(part.repeats for part in own) + int(np.count_nonzero(~first))
        return cls(numbers[first], hashes[first], queues, codes[order][first], offsets[order][first], repeats)

    @classmethod
    def in_batch(cls, messages: pa.RecordBatch, queue: MessageQueue, place: str) -> StoredRows:
        """Return the rows whose ids begin with the `place` of a partition; other ids may be null or malformed."""
        found = messages.filter(_are_of(messages.column(ROW_IDS), place, _NUMBER_AND_HASH))
        ids, offsets, *content = found.columns
        numbers = pc.utf8_slice_codeunits(ids, len(place), -_DIGITS - 1).cast(pa.int64())
        topics = pa.array([queue.topic]).take(pa.array(np.zeros(len(found), np.int32)))
        hashes = stored_hashes(topics, *content) if len(found) else np.empty(0, np.uint64)
        return cls(to_numpy(numbers), hashes, (queue,), np.zeros(len(found), np.int64), to_numpy(offsets))

    def among(self, block: MessageBlock, first_row: int, partition_id: int) -> Mask | None:
        """Return which rows of a block, from number `first_row` on, are stored; None: none.

        Raises an InputChangedError if a row differs from one that is stored in its place.
        """
        begin, end = np.searchsorted(self.numbers, [first_row, first_row + block.rows]).tolist()
        if begin == end:
            return None
        places: Ints = self.numbers[begin:end] - first_row
        ids = next(prop.column(block.rows) for prop in block.properties if prop.name == ROW_ID)
        own = _hashes_of(ids.data[ids.offsets[1:][places][:, None] + np.arange(-_DIGITS, 0)].tobytes())
        changed = np.flatnonzero(own != self.hashes[begin:end])
        if len(changed):
            at = begin + int(changed[0])
            raise InputChangedError(
                f"row {self.numbers[at]} of partition {partition_id}: an earlier attempt at this write stored another "
                f"row in this place, at offset {self.offsets[at]} of {self.queues[self.codes[at]]} ({len(changed)} of "
                f"the next {end - begin} stored rows differ), so the input is not the same at each reading, or another "
                f"producer stored messages with ids of this write. {_ADVICE}"
            )
        stored = np.zeros(block.rows, np.bool_)
        stored[places] = True
        return stored

    def spans(self, first_row: int, rows: int) -> Iterator[Span]:
        """Yield one span per queue of the stored rows among `rows` rows from number `first_row` on."""
        begin, end = np.searchsorted(self.numbers, [first_row, first_row + rows]).tolist()
        codes, offsets = self.codes[begin:end], self.offsets[begin:end]
        for code in np.unique(codes).tolist():
            of_queue = offsets[codes == code]
            yield Span(self.queues[code], len(of_queue), int(of_queue.min()), int(of_queue.max()))

    def places_of(self, messages: Iterable[Message]) -> list[tuple[MessageQueue, int] | None]:
        """Return queue and offset of each message that is stored with its id and its content, else None."""
        ids = [message.properties[ROW_ID] for message in messages]
        own = [(int(row_id.split("/")[-2]), int(row_id[-_DIGITS:], 16)) for row_id in ids]
        wanted = [number for number, _ in own]
        part = slice(*np.searchsorted(self.numbers, [min(wanted), max(wanted) + 1]).tolist())
        rows = zip(self.numbers[part].tolist(), self.hashes[part].tolist(), strict=True)
        places = zip(self.codes[part].tolist(), self.offsets[part].tolist(), strict=True)
        stored = dict(zip(rows, ((self.queues[code], offset) for code, offset in places), strict=True))
        return [stored.get(row) for row in own]

    def check_end(self, rows: int, partition_id: int) -> None:
        """Raise an InputChangedError if a stored row has a number that the partition of `rows` rows does not have."""
        if len(self) and self.numbers[-1] >= rows:
            raise InputChangedError(
                f"partition {partition_id}: an earlier attempt at this write stored row {self.numbers[-1]}, and the "
                f"partition has {rows} rows now, so the input is not the same at each reading. {_ADVICE}"
            )


def _are_of(ids: pa.StringArray, prefix: str, pattern: str) -> pa.BooleanArray:
    """Return which ids begin with a prefix, and end with a pattern."""
    begins = filled(pc.starts_with(ids, prefix), False)
    rest = pc.if_else(begins, pc.utf8_slice_codeunits(ids, len(prefix)), "")
    return filled(pc.match_substring_regex(rest, pattern), False)


def _hashes_of(digits: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(bytes.fromhex(digits.decode()), ">u8").astype(np.uint64)


def places_of(messages: pa.RecordBatch, _: MessageQueue, prefix: str) -> npt.NDArray[np.int64]:
    """Return partition and number of the messages whose ids begin with a write and a micro-batch."""
    ids = messages.column(ROW_IDS)
    ends = pc.utf8_slice_codeunits(ids.filter(_are_of(ids, prefix, _PARTITION_TOO)), len(prefix))
    parts = pc.split_pattern(ends, "/").flatten()
    # The third part is the hash.
    columns = [to_numpy(parts.take(to_arrow(np.arange(first, len(parts), 3))).cast(pa.int64())) for first in (0, 1)]
    return np.stack(columns, axis=1)


_ADVICE: Final = (
    "Make it so (for example, write a table, or a DataFrame after checkpoint()), or use delivery=exactlyOnce. Stored "
    "rows stay visible"
)

_NO_NUMBERS: Final = np.empty(0, np.int64)
NONE_STORED: Final = StoredRows(_NO_NUMBERS, np.empty(0, np.uint64), (), _NO_NUMBERS, _NO_NUMBERS)
