"""Finds out which requests without an answer are stored, by the contents of the rows behind the last known offset.

A broker stores the rows of a request one after the other. So a request is stored if its rows stand so in the queue, in
a run that no other request of the attempt has. Requests with equal rows have different runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rocketmq_spark.arrow.columns import Ints, Mask
from rocketmq_spark.arrow.numpy_hashes import Hashes
from rocketmq_spark.deliveries.effectively_once.stored_rows import QueueRows
from rocketmq_spark.model.message import MessageQueue

PARTLY = -2
NOT_STORED = -1


@dataclass(frozen=True, slots=True)
class Sought:
    """A request without an answer."""

    queue: MessageQueue
    start: int  # Its rows have this offset or higher ones
    hashes: Hashes


def find_runs(
    sought: Sequence[Sought], stored: Iterable[QueueRows], taken: Iterable[tuple[MessageQueue, int, int]]
) -> list[int]:
    """Return for each request the offset of its first row; `PARTLY` if only some rows are there, or `NOT_STORED`.

    `stored` has the rows of the attempt behind the lowest start of each queue. `taken` has the runs of other requests:
    first offset, and the one after the last row.
    """
    parts: defaultdict[MessageQueue, list[QueueRows]] = defaultdict(list)
    for part in stored:
        parts[part.queue].append(part)
    queues: dict[MessageQueue, tuple[Ints, Hashes]] = {
        queue: (np.concatenate([one.offsets for one in of]), np.concatenate([one.hashes for one in of], axis=1))
        for queue, of in parts.items()
    }
    free: dict[MessageQueue, Mask] = {queue: np.ones(len(offsets), np.bool_) for queue, (offsets, _) in queues.items()}
    for queue, first, stop in taken:
        if queue in queues:
            begin, end = np.searchsorted(queues[queue][0], [first, stop])
            free[queue][begin:end] = False
    found = [NOT_STORED] * len(sought)
    # The longest first: a run of equal rows may begin with a shorter one.
    for number in sorted(range(len(sought)), key=lambda number: -sought[number].hashes.shape[1]):
        one = sought[number]
        if one.queue not in queues:
            continue
        offsets, hashes = queues[one.queue]
        at = _find(one, offsets, hashes, free[one.queue])
        if at is not None:
            free[one.queue][at : at + one.hashes.shape[1]] = False
            found[number] = int(offsets[at])
    for number, one in enumerate(sought):
        if found[number] == NOT_STORED and one.queue in queues:
            offsets, hashes = queues[one.queue]
            rest = free[one.queue] & (offsets >= one.start)
            if np.isin(hashes[0][rest], one.hashes[0]).any():
                found[number] = PARTLY
    return found


def _find(one: Sought, offsets: Ints, hashes: Hashes, free: Mask) -> int | None:
    """Return the place of the first run of free rows that are those of a request."""
    rows = one.hashes.shape[1]
    last = len(offsets) - rows + 1
    if last <= 0:
        return None
    begins = (hashes[:, :last] == one.hashes[:, :1]).all(axis=0) & (offsets[:last] >= one.start)
    begins &= offsets[rows - 1 :] - offsets[:last] == rows - 1
    # A loop over places: there is more than one only where rows are equal, or copied.
    for at in np.flatnonzero(begins).tolist():
        part = slice(at, at + rows)
        if free[part].all() and (hashes[:, part] == one.hashes).all():
            return int(at)
    return None
