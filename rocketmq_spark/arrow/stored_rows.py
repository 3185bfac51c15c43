"""Which rows of a partition are stored, by the ids that an earlier attempt gave them (``delivery=effectivelyOnce``).

An id has the place of a row: the write, the micro-batch, the partition and the number of the row. Its last part is a
hash of the row. So a row that is stored under the same place with another hash shows that the input has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import Ints, Mask, Octets, byte_cells, to_arrow, to_numpy
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.model.properties import ROW_ID

# A slash and a hash end an id.
_DIGITS: Final = 16
_NUMBER_AND_HASH: Final = r"^[0-9]{1,18}/[0-9a-f]{16}$"
_PARTITION_TOO: Final = r"^[0-9]{1,18}/[0-9]{1,18}/[0-9a-f]{16}$"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows that are stored, in ascending order of their numbers, each once."""

    numbers: npt.NDArray[np.int64]
    digits: Octets  # The hash of each row: 16 hex digits
    repeats: int = 0  # Rows that are stored a second time, or more often

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, parts: Iterable[StoredRows]) -> StoredRows:
        """Return the rows of several reads together."""
        own = [NONE_STORED, *parts]
        numbers = np.concatenate([part.numbers for part in own])
        digits = np.concatenate([part.digits for part in own])
        ascending, first = np.unique(numbers, return_index=True)
        repeats = sum(part.repeats for part in own) + len(numbers) - len(first)
        return cls(ascending, digits[first], repeats)

    @classmethod
    def of_ids(cls, ids: pa.StringArray, place: str) -> StoredRows:
        """Return the rows whose ids begin with the `place` of a partition; other ids may be null or malformed."""
        ends = _after(place, ids, _NUMBER_AND_HASH)
        numbers = to_numpy(pc.utf8_slice_codeunits(ends, 0, -_DIGITS - 1).cast(pa.int64()))
        column = byte_cells(pc.utf8_slice_codeunits(ends, -_DIGITS).cast(pa.binary()))
        return cls(numbers, column.span.reshape(-1, _DIGITS))

    def among(self, block: MessageBlock, first_row: int, partition_id: int) -> Mask | None:
        """Return which rows of a block, from number `first_row` on, are stored; None: none.

        Raises an InputChangedError if a row differs from the one that is stored in its place.
        """
        begin, end = np.searchsorted(self.numbers, [first_row, first_row + block.rows]).tolist()
        if begin == end:
            return None
        places: Ints = self.numbers[begin:end] - first_row
        ids = next(prop.column(block.rows) for prop in block.properties if prop.name == ROW_ID)
        own = ids.data[ids.offsets[1:][places][:, None] + np.arange(-_DIGITS, 0)]
        changed = np.flatnonzero((own != self.digits[begin:end]).any(axis=1))
        if len(changed):
            row = int(self.numbers[begin + int(changed[0])])
            raise InputChangedError(
                f"row {row} of partition {partition_id}: an earlier attempt at this write stored another row in this "
                f"place ({len(changed)} of the next {end - begin} stored rows differ), so the input is not the same at "
                f"each reading. {_ADVICE}"
            )
        stored = np.zeros(block.rows, np.bool_)
        stored[places] = True
        return stored

    def check_end(self, rows: int, partition_id: int) -> None:
        """Raise an InputChangedError if a row is stored that the partition, which has so many rows, does not have."""
        if len(self) and self.numbers[-1] >= rows:
            raise InputChangedError(
                f"partition {partition_id}: an earlier attempt at this write stored row {self.numbers[-1]}, and the "
                f"partition has {rows} rows now, so the input is not the same at each reading. {_ADVICE}"
            )


def _after(prefix: str, ids: pa.StringArray, pattern: str) -> pa.StringArray:
    """Return what follows a prefix in the ids that begin with it, if it has a pattern."""
    ends = pc.utf8_slice_codeunits(ids.filter(pc.starts_with(ids, prefix)), len(prefix))
    return ends.filter(pc.match_substring_regex(ends, pattern))


def places_of(ids: pa.StringArray, prefix: str) -> npt.NDArray[np.int64]:
    """Return partition and number of the rows whose ids begin with a write and a micro-batch, one row per id."""
    parts = pc.split_pattern(_after(prefix, ids, _PARTITION_TOO), "/").flatten()
    # The third part is the hash.
    columns = [to_numpy(parts.take(to_arrow(np.arange(first, len(parts), 3))).cast(pa.int64())) for first in (0, 1)]
    return np.stack(columns, axis=1)


_ADVICE: Final = (
    "Make it so (for example, write a table, or a DataFrame after checkpoint()), or use delivery=exactlyOnce. Stored "
    "rows stay visible"
)

NONE_STORED: Final = StoredRows(np.empty(0, np.int64), np.empty((0, _DIGITS), np.uint8))
