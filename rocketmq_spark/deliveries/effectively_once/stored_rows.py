"""The rows of a partition that earlier attempts have stored, as a multiset of contents (``delivery=effectivelyOnce``).

Each row of the partition takes one stored row with the same content, whatever the order. Rows with equal contents are
interchangeable. A stored row that no row has taken at the end is a repeat of an equal one, or the input has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from rocketmq_spark.arrow.columns import Ints, Mask
from rocketmq_spark.arrow.content import ContentHash
from rocketmq_spark.arrow.model import FoundRows, MessageBlock, Span
from rocketmq_spark.arrow.numpy_hashes import Hashes
from rocketmq_spark.errors import InputChangedError
from rocketmq_spark.model.message import MessageQueue


@dataclass(frozen=True, slots=True)
class QueueRows:
    """Stored rows of one queue, in the order of their offsets."""

    queue: MessageQueue
    offsets: Ints
    hashes: Hashes  # Of their contents, as `ContentHash` returns them
    numbers: Ints | None = None  # The numbers of the rows in their partition, if the contents are numbered

    def __len__(self) -> int:
        return len(self.offsets)


class StoredRows:
    """The stored rows of a partition, and which of them its rows have taken so far."""

    def __init__(
        self, content: ContentHash, parts: Iterable[QueueRows], partition_id: int = 0, *, only_compares: bool = False
    ) -> None:
        """`only_compares`: no row is sent, because an earlier attempt has found another input."""
        self._content = content
        self._partition_id = partition_id
        self._only_compares = only_compares
        # How many rows would be sent if it did more than compare.
        self.missing = 0
        found = [_each_once(part) for part in parts if len(part)]
        self._queues = list(dict.fromkeys(part.queue for part in found))
        codes = [np.full(len(part), self._queues.index(part.queue), np.int32) for part in found]
        hashes = np.concatenate([np.empty((2, 0), np.uint64), *(part.hashes for part in found)], axis=1)
        order, hashes = _sorted(hashes)
        self._codes = np.concatenate([np.empty(0, np.int32), *codes])[order]
        self._offsets = np.concatenate([np.empty(0, np.int64), *(part.offsets for part in found)])[order]
        differs = (hashes[:, 1:] != hashes[:, :-1]).any(axis=0)
        # The contents that differ, and where the rows of each begin.
        self._firsts = np.flatnonzero(np.append(len(order) > 0, differs))
        self._contents = hashes[:, self._firsts]
        self._counts = np.diff(np.append(self._firsts, len(order)))
        self._taken = np.zeros(len(self._firsts), np.int64)
        # Of numbered contents: their numbers, lowest first, and how many of them are compared.
        numbers = [part.numbers for part in found if part.numbers is not None]
        of_contents = np.concatenate(numbers)[order][self._firsts] if numbers else np.empty(0, np.int64)
        self._by_number = np.argsort(of_contents, kind="stable")
        self._numbers = of_contents[self._by_number]
        self._compared = 0

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def repeats(self) -> int:
        """How many rows were not taken, although an equal one was."""
        return int((self._counts - self._taken)[self._taken > 0].sum())

    def take(self, block: MessageBlock, first_row: int, bad: Mask | None) -> FoundRows | None:
        """Return which rows of a block are not sent, because they are stored; see `KnownRows`.

        Raises an InputChangedError if the content is numbered, and a stored row with such a number has no equal row.
        """
        found = self._take(block, first_row, bad) if len(self) else None
        if len(self._numbers):
            self._check_numbers(first_row + block.rows)
        if not self._only_compares:
            return found
        mask = np.ones(block.rows, np.bool_) if bad is None else ~bad
        self.missing += int(np.count_nonzero(mask)) - (0 if found is None else int(np.count_nonzero(found.mask)))
        return FoundRows(mask, [] if found is None else found.spans)

    def _take(self, block: MessageBlock, first_row: int, bad: Mask | None) -> FoundRows | None:
        rows, places = self._find(self._content.of_block(block, first_row))
        if bad is not None:
            sound = ~bad[rows]
            rows, places = rows[sound], places[sound]
        # Of the rows with one content, as many take a stored row as there are.
        begins = np.searchsorted(places, places)
        number = self._taken[places] + np.arange(len(places)) - begins
        fits = number < self._counts[places]
        rows, stored = rows[fits], (self._firsts[places] + number)[fits]
        if not len(rows):
            return None
        np.add.at(self._taken, places[fits], 1)
        mask = np.zeros(block.rows, np.bool_)
        mask[rows] = True
        return FoundRows(mask, list(self._spans(stored)))

    def _check_numbers(self, stop: int) -> None:
        """Check the stored rows with numbers below `stop`, when all rows with these numbers are known."""
        end = int(np.searchsorted(self._numbers, stop))
        left = self._by_number[self._compared : end]
        self._compared = end
        self._check(left[self._taken[left] == 0])

    def check_end(self) -> None:
        """Raise an InputChangedError if the partition has no row with the content of a stored one."""
        self._check(np.flatnonzero(self._taken == 0))

    def _check(self, left: Ints) -> None:
        """Raise an InputChangedError if there are contents without a row."""
        if not len(left):
            return
        first, count = self._firsts[left[0]], int(self._counts[left].sum())
        place = " with its number" if self._content.numbered else ""
        queue, offset = self._queues[self._codes[first]], self._offsets[first]
        raise InputChangedError(
            f"partition {self._partition_id}: an earlier attempt at this write stored {count} rows that the partition "
            f"does not have now. One of them is at offset {offset} of {queue}: no row has its content{place}. So the "
            "input is not the same at each reading, or has another number of partitions, or another producer stored "
            f"messages with the token of the attempt. {_ADVICE}"
        )

    def _find(self, hashes: Hashes) -> tuple[Ints, Ints]:
        """Return the rows whose content is stored, ordered by content and then by row, and the numbers of contents."""
        high, low = self._contents
        # A search of sorted hashes finds most of what it compares in the processor's cache.
        rows = np.argsort(hashes[0], kind="stable")
        first, second = hashes.take(rows, axis=1)
        places = np.searchsorted(high, first)
        while True:
            found = places < len(high)
            at = np.where(found, places, 0)
            found &= high[at] == first
            # Two contents with one first half are neighbours.
            other = found & (low[at] != second)
            if not other.any():
                break
            places += other
        rows, places = rows[found], places[found]
        order = np.argsort(places, kind="stable")
        return rows[order], places[order]

    def _spans(self, stored: Ints) -> Iterator[Span]:
        codes, offsets = self._codes[stored], self._offsets[stored]
        for code in np.unique(codes).tolist():
            of_queue = offsets[codes == code]
            yield Span(self._queues[code], len(of_queue), int(of_queue.min()), int(of_queue.max()))


def _each_once(part: QueueRows) -> QueueRows:
    """Return rows without repeats of an offset: a damaged queue may return a message twice, and it is stored once."""
    if (np.diff(part.offsets) > 0).all():
        return part
    offsets, firsts = np.unique(part.offsets, return_index=True)
    return QueueRows(
        part.queue, offsets, part.hashes[:, firsts], None if part.numbers is None else part.numbers[firsts]
    )


def _sorted(hashes: Hashes) -> tuple[Ints, Hashes]:
    """Return the order of hashes, and the sorted hashes. The order of equal ones stays: it is that of their offsets."""
    order: Ints = np.argsort(hashes[0], kind="stable")
    high, low = ordered = hashes.take(order, axis=1)
    if np.any((high[1:] == high[:-1]) & (low[1:] != low[:-1])):
        # Contents with one first half may alternate.
        order = np.lexsort((hashes[1], hashes[0]))
        ordered = hashes.take(order, axis=1)
    return order, ordered


RUN_AGAIN: Final = (
    "Stored rows stay visible. Run the write again with the query, the options and the newest checkpoint that it had "
    "before. Do not change its delivery"
)
_ADVICE: Final = (
    f"{RUN_AGAIN}. Later attempts at this partition send nothing until they have all of these rows. If no run has all "
    "of them, compare the rows with the topic, and write what is missing with another writeId (a stream: another "
    "transactionalId and startAnew=true). Later writes need the same input at each reading (for example a table, or a "
    "DataFrame after checkpoint()), or delivery=exactlyOnce"
)
