"""Histories of writes and reads: their operations as columns, and files of them. history_rules.py checks them.

A test or a tool records what happened; `check` returns what no promise of docs/delivery.md allows. All ids are 64-bit
integers that the recorder chooses. Ids of rows, attempts, batches and writes are unique in a history.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zipfile
from collections.abc import Mapping
from enum import IntEnum
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Columns = Mapping[str, Column]
Values = npt.ArrayLike

# The row of an offset that a consumer reported as missing.
GAP = int(np.iinfo(np.int64).min)
# The key of rows without an order, and the mark of messages without one.
NONE = -1
# The figures of a write that gave no account.
NO_ACCOUNT = -1


class Outcome(IntEnum):
    """How an attempt ended."""

    ACKNOWLEDGED = 0
    # An error that does not say whether the rows are stored, or a status such as FLUSH_DISK_TIMEOUT.
    MAYBE_STORED = 1
    NOT_STORED = 2


_INT, _FLOAT = np.dtype(np.int64), np.dtype(np.float64)

TABLES: Mapping[str, Mapping[str, np.dtype[Any]]] = {
    "offer": {"write": _INT, "row": _INT, "key": _INT},
    "batch": {"batch": _INT, "row": _INT},
    "send": {"attempt": _INT, "batch": _INT, "queue": _INT, "at": _FLOAT, "deadline": _FLOAT},
    "end": {"attempt": _INT, "outcome": _INT, "at": _FLOAT},
    "count": {"write": _INT, "row": _INT},
    "finish": {
        "write": _INT,
        "finished": np.dtype(np.bool_),
        "stored": _INT,
        "not_sent": _INT,
        "unknown": _INT,
        "delivery_timeout": _FLOAT,
    },
    "lose": {"row": _INT},
    "read": {"consumer": _INT, "queue": _INT, "offset": _INT, "row": _INT, "mark": _INT},
    "expect": {"consumer": _INT, "queue": _INT, "start": _INT, "end": _INT},
}


class History:
    """A stream of operations. Each method adds a block of them; a single value applies to the whole block."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[Columns]] = {name: [] for name in TABLES}

    def __len__(self) -> int:
        return sum(len(next(iter(block.values()))) for blocks in self._blocks.values() for block in blocks)

    def offer(self, write: Values, rows: Values, keys: Values = NONE) -> None:
        """Add rows that a write takes, in this order. Rows of one key of a write keep their order in one queue."""
        self._add("offer", write, rows, keys)

    def batch(self, batch: Values, rows: Values) -> None:
        """Add rows that are sent together."""
        self._add("batch", batch, rows)

    def send(self, attempt: Values, batch: Values, queue: Values, at: Values, deadline: Values = np.inf) -> None:
        """Add attempts to store a batch, with the times (seconds) of their start, and by which they must have ended."""
        self._add("send", attempt, batch, queue, at, deadline)

    def end(self, attempt: Values, outcome: Values, at: Values) -> None:
        """Add ends of attempts, with their `Outcome` and time."""
        self._add("end", attempt, outcome, at)

    def count(self, write: Values, rows: Values) -> None:
        """Add rows that a write counts as stored."""
        self._add("count", write, rows)

    def finish(
        self,
        write: Values,
        finished: Values = True,
        stored: Values = NO_ACCOUNT,
        not_sent: Values = NO_ACCOUNT,
        unknown: Values = NO_ACCOUNT,
        delivery_timeout: Values = np.inf,
    ) -> None:
        """Add ends of writes, their accounts if they gave any, and the seconds in which attempts of a batch start."""
        self._add("finish", write, finished, stored, not_sent, unknown, delivery_timeout)

    def lose(self, rows: Values) -> None:
        """Add stored rows that the servers lost in a way that the promise excludes."""
        self._add("lose", rows)

    def read(self, consumer: Values, queue: Values, offset: Values, rows: Values, mark: Values = NONE) -> None:
        """Add messages that a consumer read. The mark is an id that repeats of a row share; see `id_of`."""
        self._add("read", consumer, queue, offset, rows, mark)

    def expect(self, consumer: Values, queue: Values, start: Values, end: Values) -> None:
        """Add the offsets that a consumer had to read, without `end`; at most once for a consumer and queue."""
        self._add("expect", consumer, queue, start, end)

    def table(self, name: str) -> Columns:
        """Return all operations of a kind, in the order in which they were added."""
        blocks = self._blocks[name]
        if len(blocks) != 1:
            whole = {
                column: np.concatenate([np.empty(0, kind), *(block[column] for block in blocks)])
                for column, kind in TABLES[name].items()
            }
            self._blocks[name] = blocks = [whole]
        return blocks[0]

    def add_to(self, path: str | PathLike[str]) -> None:
        """Add the operations to a ``.npz`` file. Several processes may add to one file, one after the other.

        A process that may be killed meanwhile writes a separate file, because an interrupted addition damages the
        file.
        """
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with zipfile.ZipFile(file, "a") as archive:
                number = len({name.partition("/")[0] for name in archive.namelist()})
                for name in TABLES:
                    for column, values in self.table(name).items():
                        with archive.open(f"{number:06d}/{name}.{column}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, np.ascontiguousarray(values), allow_pickle=False)

    @classmethod
    def of(cls, *paths: str | PathLike[str]) -> History:
        """Return the operations of files, in the order of the files and of the additions to each."""
        history = cls()
        for path in paths:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                archive = np.load(file, allow_pickle=False)
                for number in sorted({name.partition("/")[0] for name in archive.files}):
                    for name, columns in TABLES.items():
                        history._add(name, *(archive[f"{number}/{name}.{column}"] for column in columns))
        return history

    def _add(self, name: str, *values: Values) -> None:
        columns = TABLES[name]
        arrays = [np.asarray(value, kind) for value, kind in zip(values, columns.values(), strict=True)]
        block = np.broadcast_arrays(*map(np.atleast_1d, arrays))
        if block[0].size:
            self._blocks[name].append(dict(zip(columns, block, strict=True)))


def id_of(text: str | bytes) -> int:
    """Return an id of 63 bits of a text, the same in every process."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
