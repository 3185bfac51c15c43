"""A batch that is being filled: slices of the block that is being encoded, and copies of earlier rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rocketmq_spark.arrow.split import GroupKey
from rocketmq_spark.model.message import EncodedBatch

# Copies are joined into pieces of at least this size, bytes: few enough for one gathering write.
_PIECE_BYTES: Final = 64 * 1024


@dataclass(eq=False, slots=True)
class Group:
    """A batch that is being filled."""

    key: GroupKey
    since: float  # When its first row came
    rows: int = 0
    nbytes: int = 0
    _copies: list[bytes] = field(default_factory=list)
    _slices: list[memoryview] = field(default_factory=list)

    def append(self, piece: memoryview, rows: int, *, copied: bool) -> None:
        """Take items that are a slice of a block's buffer, or a copy of them."""
        self.rows += rows
        self.nbytes += len(piece)
        if copied:
            self.copy_slices()
            self._copies.append(bytes(piece))
        else:
            self._slices.append(piece)

    def copy_slices(self) -> None:
        """Copy slices of the block's buffer, so that it can be freed. This copies less than one batch per group."""
        if self._slices:
            self._copies += map(bytes, self._slices)
            self._slices.clear()

    def batch(self, properties: str = "") -> EncodedBatch:
        """Return the batch of all items, with properties for its header."""
        return EncodedBatch(
            self.key.topic,
            (*_joined(self._copies), *self._slices),
            self.rows,
            self.nbytes,
            properties=properties,
            sys_flag=self.key.sys_flag,
        )


def _joined(copies: list[bytes]) -> Iterator[bytes]:
    # A buffer that grows with each copy would copy its bytes several times.
    piece: list[bytes] = []
    nbytes = 0
    for copy in copies:
        piece.append(copy)
        nbytes += len(copy)
        if nbytes >= _PIECE_BYTES:
            yield b"".join(piece)
            piece, nbytes = [], 0
    if piece:
        yield b"".join(piece)
