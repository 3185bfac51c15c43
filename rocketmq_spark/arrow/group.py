"""A batch that is being filled: slices of the block that is being encoded, and joined copies of earlier rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.arrow.split import GroupKey
from rocketmq_spark.model.message import EncodedBatch

# Leftovers are copied, and joined into pieces of at least this size, bytes: few enough for one gathering write. A
# growing batch does not copy its old pieces again, as one buffer would.
_PIECE_BYTES: Final = 64 * 1024


@dataclass(eq=False, slots=True)
class Group:
    """A batch that is being filled."""

    key: GroupKey
    since: float  # When its first row came
    rows: int = 0
    nbytes: int = 0
    _joined: list[bytes] = field(default_factory=list)  # Joined copies
    _copies: list[bytes] = field(default_factory=list)
    _copied_bytes: int = 0  # Of `_copies`
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
        if len(piece) >= _PIECE_BYTES:
            self._join()
        self._copies.append(bytes(piece))
        self._copied_bytes += len(piece)
        if self._copied_bytes >= _PIECE_BYTES:
            self._join()

    def _join(self) -> None:
        if self._copies:
            self._joined.append(b"".join(self._copies))
            self._copies.clear()
            self._copied_bytes = 0

    def batch(self, properties: str = "") -> EncodedBatch:
        """Return the batch of all items, with properties for its header."""
        self._join()
        return EncodedBatch(
            self.key.topic,
            (*self._joined, *self._slices),
            self.rows,
            self.nbytes,
            properties=properties,
            sys_flag=self.key.sys_flag,
        )
