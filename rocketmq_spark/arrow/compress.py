"""Long bodies of a chunk, compressed one by one: the one loop over rows on the write path.

Rule 1: a body that does not shrink stays as it is.
Rule 2: all that is held compressed is one chunk's, and no more than the chunk has plain.

Follows design.md section 3 and spec/remoting.md section 7: the bits of a batch's sysFlag count for every item, so items
are compressed one by one, and plain ones go in other batches.
"""

from __future__ import annotations

import numpy as np

from rocketmq_spark.arrow.columns import ByteColumn, Mask
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.compression import compress


def compress_bodies(bodies: ByteColumn, good: Mask | None, settings: BatchSettings) -> ByteColumn | None:
    """Return the bodies that are smaller compressed, null in all other rows; None if none is.

    Parameters
    ----------
    bodies : ByteColumn
    good : bool array or None
        Which rows are sent; None: all.
    settings : BatchSettings
    """
    kind = settings.compress_type
    # The bits of an inner batch's record mean its whole body, not the items in it (spec/remoting.md 6.5).
    if kind is None or settings.inner_batches or bodies.sizes.max(initial=0) < settings.compress_over:
        return None
    long = bodies.sizes >= max(1, settings.compress_over)
    packed_sizes = np.zeros(len(bodies), np.int64)
    pieces: list[bytes] = []
    for row in np.flatnonzero(long if good is None else long & good).tolist():
        body = bodies.data[int(bodies.offsets[row]) : int(bodies.offsets[row + 1])].data
        piece = compress(body, kind, settings.compress_level)
        if len(piece) < len(body):
            packed_sizes[row] = len(piece)
            pieces.append(piece)
    if not pieces:
        return None
    ends = np.concatenate([[0], np.cumsum(packed_sizes)])
    return ByteColumn(ends, np.frombuffer(b"".join(pieces), np.uint8), packed_sizes > 0)
