"""Joins small record batches, because encoding one has a fixed cost: as much as encoding 1,500 rows of 100 bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.arrow.batcher import LINGER_S
from rocketmq_spark.arrow.columns import distinct_texts
from rocketmq_spark.model.message import Ready

# Held rows are encoded from this many rows or bytes on. A record batch of half as much is not held.
_ROWS: Final = 8_000
_BYTES: Final = 1024 * 1024


class JoiningBatcher(BatchSource[pa.RecordBatch]):
    """Holds small record batches for a batcher until they are worth encoding; rows keep their order.

    Only rows of topics that `new_topics` has returned are held: the caller finds the routes of these topics. Invalid
    rows raise errors later than `batcher` would raise them.
    """

    def __init__(
        self,
        batcher: BatchSource[pa.RecordBatch],
        topic: str | None,
        max_rows: int = _ROWS,
        max_bytes: int = _BYTES,
    ) -> None:
        self._batcher = batcher
        self._topic = topic  # None: the column ``topic`` has the topics
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._found: set[str] = set()
        self._held: list[pa.RecordBatch] = []
        self._since = 0.0  # When the first held batch arrived
        self._rows = 0  # Not yet passed to the batcher: of the held batches; within `add`, also of its batch
        self._nbytes = 0  # Of the held batches

    def __repr__(self) -> str:
        return f"<{type(self).__name__} held={self._rows} rows, {self._nbytes} bytes, {self._batcher!r}>"

    @property
    def pending_bytes(self) -> int:
        return self._nbytes + self._batcher.pending_bytes

    @property
    def taken_rows(self) -> int:
        return self._rows + self._batcher.taken_rows

    def add(self, rows: pa.RecordBatch, now: float) -> Iterator[Ready]:
        nbytes, schema = rows.nbytes, rows.schema
        self._rows += rows.num_rows
        few, short = rows.num_rows < self._max_rows // 2, nbytes < self._max_bytes // 2
        small = few and short and self._topics_of([rows]) <= self._found
        if self._held and not (small and schema.equals(self._held[0].schema)):
            yield from self._encode()
        # The schema of a batch that joins others is theirs.
        if not small or not (self._held or _is_joinable(schema)):
            yield from self._pass_on(rows, now)
            return
        if not self._held:
            self._since = now
        self._held.append(rows)
        self._nbytes += nbytes
        if self._rows >= self._max_rows or self._nbytes >= self._max_bytes:
            yield from self._encode()

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        if self._held and now - self._since >= LINGER_S and all(map(known, self._topics_of(self._held))):
            yield from self._encode()
        yield from self._batcher.expired(now, known)

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        return self._batcher.reject(rejected, now)

    def new_topics(self) -> list[str]:
        """Return each topic once."""
        new = sorted(set(self._batcher.new_topics()) - self._found)
        self._found.update(new)
        return new

    def flush(self) -> Iterator[Ready]:
        yield from self._encode()
        yield from self._batcher.flush()

    def _topics_of(self, batches: Sequence[pa.RecordBatch]) -> set[str]:
        if self._topic is not None:
            return {self._topic}
        return set().union(*(distinct_texts(batch.column("topic")) for batch in batches))

    def _encode(self) -> Iterator[Ready]:
        held, self._held, self._nbytes = self._held, [], 0
        if len(held) > 1:
            held = pa.Table.from_batches(held).combine_chunks().to_batches()
        for batch in held:
            yield from self._pass_on(batch, self._since)

    def _pass_on(self, batch: pa.RecordBatch, now: float) -> Iterator[Ready]:
        self._rows -= batch.num_rows
        yield from self._batcher.add(batch, now)


def _is_joinable(schema: pa.Schema) -> bool:
    # The union of dictionaries may need more bits than their indices have.
    return not any(map(_has_dictionary, schema.types))


def _has_dictionary(column: pa.DataType) -> bool:
    inner = (column.field(number).type for number in range(column.num_fields))
    return pa.types.is_dictionary(column) or any(map(_has_dictionary, inner))
