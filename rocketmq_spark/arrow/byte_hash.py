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
from rocketmq_spark.arrow.gather import Choice, Frame, Workspace, assemble, chunks
from rocketmq_spark.wire.row_hash import STEP

Hashes = npt.NDArray[np.uint64]

_PADS: Final = tuple(bytes(count) for count in range(8))

# Words are worked on in pieces of about this size, bytes: they stay in a processor's cache, and memory is bounded.
_PIECE: Final = 512 * 1024


def byte_hashes(column: ByteColumn, head: bytes, tail: bytes, seed: int = 0) -> Hashes:
    """Return the hash of ``head + string + tail`` for each string of a column, and 0 where there is none.

    Parameters
    ----------
    column : ByteColumn
    head, tail : bytes
        Not both empty.
    seed : int, default 0
        Another seed is another hash.
    """
    hashes = np.zeros(len(column), np.uint64)
    workspace = Workspace()
    for start, stop in chunks(column.sizes.astype(np.int64) + len(head) + len(tail), _PIECE, None):
        hashes[start:stop] = _hashes(column.slice(start, stop), head, tail, seed, workspace)
    return hashes if column.valid is None else hashes * column.valid


def _hashes(column: ByteColumn, head: bytes, tail: bytes, seed: int, workspace: Workspace) -> Hashes:
    sizes = column.sizes.astype(np.int64) + (len(head) + len(tail))
    pads = -sizes & 7
    counts = (sizes + pads) >> 3
    ends = np.cumsum(counts)
    starts = ends - counts
    data = assemble(
        [Frame(head), column, Frame(tail), Choice(_PADS, pads)], len(sizes), int(ends[-1]) * 8, None, workspace
    )
    # Places count from 1 in each string.
    places = np.arange(1, int(ends[-1]) + 1, dtype=np.uint64)
    places -= np.repeat(starts, counts).astype(np.uint64)
    places *= np.uint64(STEP)
    places += np.frombuffer(data, "<u8")
    places ^= np.uint64(seed)
    return mixed(np.add.reduceat(mixed(places), starts) + sizes.astype(np.uint64))


def mixed(words: Hashes) -> Hashes:
    """Mix each word, in place (the finaliser of SplitMix64)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
