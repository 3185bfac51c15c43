"""What a sender needs of the object that makes batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol, TypeVar

from rocketmq_spark.model.message import Ready

RowsT = TypeVar("RowsT", contravariant=True)


class BatchSource(Protocol[RowsT]):
    """Takes the rows of one partition, and gives encoded batches.

    The caller exhausts each returned iterator before the next call. `now` is monotonic seconds.
    """

    @property
    def pending_bytes(self) -> int:
        """The bytes of rows that were taken and not yet given out."""

    @property
    def taken_rows(self) -> int:
        """The rows that `add` received, without skipped invalid rows."""

    def add(self, rows: RowsT, now: float) -> Iterator[Ready]:
        """Take rows, and return the batches that are full."""

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        """Return the batches of `known` topics whose first row has waited long enough."""

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        """Take back rows that servers rejected as invalid, and return batches that are full."""

    def new_topics(self) -> Collection[str]:
        """Return the topics of batches that were begun since the last call; the caller finds their routes."""

    def flush(self) -> Iterator[Ready]:
        """Return all batches that are not full."""
