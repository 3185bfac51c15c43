"""A batch that is being filled: slices of the block that is being encoded, and copies of earlier rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.arrow.split import GroupKey
from rocketmq_spark.model.message import EncodedBatch

# Leftovers are copied into pieces of at least this size, bytes: few enough for one gathering write. A growing batch
# does not copy its old pieces again, as one buffer would.
_PIECE_BYTES: Final = 64 * 1024


@dataclass(eq=False, slots=True)
class Group:
    """A batch that is being filled."""

    key: GroupKey
    since: float  # When its first row came
    rows: int = 0
    nbytes: int = 0
    _copies: list[bytearray] = field(default_factory=list)
    _slices: list[memoryview] = field(default_factory=list)

    def append(self, piece: memoryview, rows: int, *, copied: bool) -> None:
        """Take items that are a slice of a block's buffer, or a copy of them."""
        self.rows += rows
        self.nbytes += len(piece)
        if copied:
            self.copy_slices()
            self._copy(piece)
        else:
            self._slices.append(piece)

    def copy_slices(self) -> None:
        """Copy slices of the block's buffer, so that it can be freed. This copies less than one batch per group."""
        if self._slices:
            for piece in self._slices:
                self._copy(piece)
            self._slices.clear()

    def _copy(self, piece: memoryview) -> None:
        if self._copies and len(self._copies[-1]) < _PIECE_BYTES:
            self._copies[-1] += piece
        else:
            self._copies.append(bytearray(piece))

    def batch(self, properties: str = "") -> EncodedBatch:
        """Return the batch of all items, with properties for its header."""
        return EncodedBatch(
            self.key.topic,
            (*(memoryview(copy) for copy in self._copies), *self._slices),
            self.rows,
            self.nbytes,
            properties=properties,
            sys_flag=self.key.sys_flag,
        )
