"""A 64-bit hash of byte strings by the thousand; `rocketmq_spark.wire.row_hash` is the same, plainly.

Strings are padded with zeros to whole 64-bit words and laid out back to back, so that a few numpy operations over all
words replace a loop over strings. Words are mixed with their place before they are added up, and the sum is mixed with
the length: neither order nor padding is lost.

pyarrow has no such hash, and Python's own is neither stable nor vectorised.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn
from rocketmq_spark.arrow.gather import Choice, Frame, Part, Workspace, assemble, chunks
from rocketmq_spark.wire.row_hash import STEP

Hashes = npt.NDArray[np.uint64]

_STEP: Final = np.uint64(STEP)
_ROUNDS: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_PADS: Final = tuple(bytes(count) for count in range(8))

# Words are worked on in pieces of about this size, bytes: they stay in a processor's cache, and memory is bounded.
_PIECE: Final = 256 * 1024


def byte_hashes(
    column: ByteColumn, head: bytes, tail: bytes, seed: int = 0, workspace: Workspace | None = None
) -> Hashes:
    """Return the hash of ``head + string + tail`` for each string of a column, and 0 where there is none.

    Parameters
    ----------
    column : ByteColumn
    head, tail : bytes
        Not both empty.
    seed : int, default 0
        Another seed is another hash.
    workspace : Workspace or None, default None
        None: one for this call.
    """
    hashes = np.zeros(len(column), np.uint64)
    workspace = workspace or Workspace()
    for start, stop in chunks(column.sizes.astype(np.int64) + len(head) + len(tail), _PIECE, None):
        hashes[start:stop] = _hashes(column.slice(start, stop), head, tail, seed, workspace)
    return hashes if column.valid is None else hashes * column.valid


def _hashes(column: ByteColumn, head: bytes, tail: bytes, seed: int, workspace: Workspace) -> Hashes:
    sizes = column.sizes.astype(np.int64) + (len(head) + len(tail))
    pads = -sizes & 7
    counts = (sizes + pads) >> 3
    ends = np.cumsum(counts)
    total = int(ends[-1])
    starts = ends - counts
    parts: list[Part] = [Frame(head), column, Frame(tail), Choice(_PADS, pads)]
    data = assemble(parts, len(sizes), total * 8, None, workspace)
    # STEP, 2 * STEP, ... in each string: a running sum that falls back where a string begins.
    words = workspace.array("words", total, np.uint64)
    words[:] = _STEP
    words[starts[1:]] -= counts[:-1].astype(np.uint64) * _STEP
    np.cumsum(words, out=words)
    words += np.frombuffer(data, "<u8")
    words ^= np.uint64(seed)
    _mix(words, workspace.array("shifted", total, np.uint64))
    sums: Hashes = np.add.reduceat(words, starts)
    sums += sizes.astype(np.uint64)
    _mix(sums, np.empty_like(sums))
    return sums


def _mix(words: Hashes, shifted: Hashes) -> None:
    """Mix each word in place (the finaliser of SplitMix64); `shifted` is memory of the same size."""
    for shift, factor in _ROUNDS:
        np.right_shift(words, shift, out=shifted)
        words ^= shifted
        words *= factor
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
