"""A sparse table of counters that adds up with another one: what every measure is kept in.

Rule 1: keys are ascending and unique; counters add, of peaks the largest stays. So merging has no order.
Rule 2: a table never shares its arrays with the one that was merged into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from rocketmq_spark.metrics.histogram import IntArray

_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "b": np.dtype("<i1"),
    "h": np.dtype("<i2"),
    "i": np.dtype("<i4"),
    "q": np.dtype("<i8"),
}


class SparseTable:
    """Integer keys, each with some counters and some peaks.

    Parameters
    ----------
    counters : int
        Counters per key.
    peaks : int, default 0
        Peaks per key.

    Attributes
    ----------
    keys : array of int64, shape (n,)
    values : array of int64, shape (counters + peaks, n)
        One row per counter, then one per peak.
    counters : int
    """

    __slots__ = ("counters", "keys", "values")

    def __init__(self, counters: int, peaks: int = 0) -> None:
        self.counters = counters
        self.keys: IntArray = np.empty(0, np.int64)
        self.values: IntArray = np.empty((counters + peaks, 0), np.int64)

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: IntArray, values: IntArray) -> None:
        """Add columns of values whose keys are unique, in any order."""
        if len(self.keys):
            at = self.keys.searchsorted(keys)
            known = self.keys.take(at, mode="clip") == keys
            # Mostly every key is known, and nothing is moved: this is what keeps the driver's merges short.
            if known.all():
                self._add_at(at, values)
                return
            self._add_at(at[known], values[:, known])
            new = ~known
            keys, values = keys[new], values[:, new]
        keys = np.concatenate((self.keys, keys))
        order = keys.argsort(kind="stable")
        self.keys = keys[order]
        self.values = np.concatenate((self.values, values), axis=1)[:, order]

    def _add_at(self, at: IntArray, values: IntArray) -> None:
        counters = self.counters
        self.values[:counters, at] += values[:counters]
        if counters < len(values):
            self.values[counters:, at] = np.maximum(self.values[counters:, at], values[counters:])

    def rekey(self, keys: IntArray) -> None:
        """Give every column a new key; those that get the same one become one."""
        if not len(keys):
            return
        order = keys.argsort(kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.diff(keys, prepend=keys[0] - 1))
        values = self.values[:, order]
        sums = np.add.reduceat(values[: self.counters], starts, axis=1)
        peaks = np.maximum.reduceat(values[self.counters :], starts, axis=1)
        self.keys = keys[starts]
        self.values = np.concatenate((sums, peaks))

    def columns(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each key with its values, keys ascending."""
        return zip(self.keys.tolist(), self.values.T.tolist(), strict=True)

    def packed(self) -> Iterator[tuple[str, bytes]]:
        """Yield type code and bytes of the keys' differences and of each row of values, as narrow as they allow."""
        for row in (np.diff(self.keys, prepend=0), *self.values):
            low, high = (int(row.min()), int(row.max())) if len(row) else (0, 0)
            code = next(
                code for code, kind in _TYPES.items() if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max
            )
            yield code, row.astype(_TYPES[code]).tobytes()

    def fill(self, data: bytes, at: int, columns: int, codes: str) -> int:
        """Take over what `packed` gave of a table of the same shape, and return where in `data` it ends.

        Raises
        ------
        ValueError, KeyError
            This is not at `data[at:]`.
        """
        if len(codes) != 1 + len(self.values):
            raise ValueError(f"{len(codes)} rows are not those of a table of {len(self.values)} values")
        rows: IntArray = np.empty((len(codes), columns), np.int64)
        for row, code in zip(rows, codes, strict=True):
            kind = _TYPES[code]
            row[:] = np.frombuffer(data, kind, columns, at)
            at += columns * kind.itemsize
        if columns and (rows[0, 0] < 0 or rows[0, 1:].min(initial=1) < 1):
            raise ValueError("keys of a table are not ascending")
        self.keys, self.values = rows[0].cumsum(), rows[1:]
        return at
