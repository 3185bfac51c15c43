"""RecordBatches -> EncodedBatches; what is less than a batch waits for more rows.

Rule 1: a full batch is a few slices of larger buffers, which nobody joins; where groups share a chunk, each copies
        its part out, or a small batch that waits would keep a whole chunk alive.
Rule 2: what is left of a block when `RemotingBatcher.add` ends is copied out, so nothing keeps the block alive.
Rule 3: rows of one group keep their order; between groups there is none, nor between a delayed row and others. With
        ``ordered`` the rows of one queue keep theirs, whatever their groups: what waits for it goes first.
Rule 4: long bodies are compressed, a chunk at a time; compressed rows and plain ones are groups of their own.
Rule 5: what goes as a single message (a delay, a body too large for a batch) is yielded as soon as it is met.
Rule 6: no clock and no queue choice here: `now` comes in, and a queue goes out only where a row is bound to it.
Rule 7: nor any protocol's layout: `encode_remoting` and `encode_grpc` have one each.

Follows ``MessageBatch.generateFromList`` (spec/producer.md 3.8) and the limits of spec/remoting.md 6.4 and 16.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask
from rocketmq_spark.arrow.compress import compress_bodies
from rocketmq_spark.arrow.custom_selector import CustomSelector
from rocketmq_spark.arrow.gather import Workspace, chunks
from rocketmq_spark.arrow.invalid import InvalidRows
from rocketmq_spark.arrow.items import encode_properties
from rocketmq_spark.arrow.row_id import RowIds
from rocketmq_spark.arrow.settings import BatchSettings
from rocketmq_spark.arrow.split import GroupKey, Groups, fill_batches, group_rows
from rocketmq_spark.arrow.unique_id import UniqueIds
from rocketmq_spark.arrow.validate_keys import KeyCheck
from rocketmq_spark.message import Buffer, EncodedBatch, MessageQueue

Ready: TypeAlias = "tuple[EncodedBatch, MessageQueue | None]"

# A batch that is not full goes anyway once its first row has waited so long, seconds (design.md section 2).
LINGER_S: Final = 0.1

# Rows are encoded in chunks of about this size, bytes: small enough for a processor's cache and to bound memory,
# large enough that numpy's and Arrow's fixed cost per call does not count.
_CHUNK_BYTES: Final = 2 * 1024 * 1024

# Copied leftovers are collected in pieces of at least this size, bytes: few enough for one gathering write, and none is
# copied again and again while its batch grows, as one buffer for all would be.
_PIECE_BYTES: Final = 64 * 1024


class ArrowBatcher(abc.ABC):
    """Fills batches with the rows of one partition.

    Parameters
    ----------
    settings : BatchSettings
    partition_id : int
        For the texts of errors.
    queues_of : callable
        Returns the writable queues of a topic; asked only for topics of which a row is bound to a queue.
    unique_ids : UniqueIds
        Gives row k of the partition the k-th id.
    on_invalid : callable or None, default None
        Called with the `InvalidRows` of a batch, which are left out; the other rows go on. None: the first error is
        raised, and nothing of that batch is sent.
    row_ids : RowIds or None, default None
        Gives each row the property SPARK_ROW_ID.
    custom : CustomSelector or None, default None
        Chooses the queues, instead of the settings' `queue_selector`.
    check_keys : KeyCheck or None, default None
        None: no topic requires keys.
    chunk_bytes : int, default 2 MiB
        Rows are encoded in chunks of about this size.

    Attributes
    ----------
    pending_bytes, pending_rows : int
        What waits in batches that are not full.
    taken_rows : int
        Every row ever handed to `add`, those of a batch that was refused included, without those left out.
    """

    def __init__(
        self,
        settings: BatchSettings,
        *,
        partition_id: int,
        queues_of: Callable[[str], Sequence[MessageQueue]],
        unique_ids: UniqueIds,
        on_invalid: Callable[[InvalidRows], None] | None = None,
        row_ids: RowIds | None = None,
        custom: CustomSelector | None = None,
        check_keys: KeyCheck | None = None,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._settings = settings
        self._limit = min(settings.batch_bytes, settings.item_limit)
        self._partition_id = partition_id
        self._queues_of = queues_of
        self._ids = unique_ids
        self._on_invalid = on_invalid
        self._row_ids = row_ids
        self._custom = custom
        self._check_keys = check_keys
        self._chunk_bytes = chunk_bytes
        self._workspace = Workspace()
        self._first_row = 0
        self._groups: dict[GroupKey, Group] = {}
        self.pending_bytes = 0
        self.pending_rows = 0
        self.taken_rows = 0

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} partition={self._partition_id} rows={self._first_row} groups={len(self._groups)} "
            f"pending={self.pending_rows} rows, {self.pending_bytes} bytes>"
        )

    def add(self, batch: pa.RecordBatch, now: float) -> Iterator[Ready]:
        """Take the rows of one batch and return the batches that are full.

        Rows are checked, and queues asked for, before this returns; what it returns must be iterated to its end.

        Parameters
        ----------
        batch : pyarrow.RecordBatch
            Of a schema that has passed `check_schema`.
        now : float
            Seconds, monotonic.

        Raises
        ------
        InvalidRowError
            A row that no broker could store as it is; the batch is not taken.
        RouteNotFoundException
            The topic of a bound row, or of a row without a key, has no queue; the batch is not taken and may be added
            again.
        """
        self.taken_rows += batch.num_rows
        block = MessageBlock.of(batch, self._settings, self._row_ids, self._first_row)
        if self._check_keys is not None:
            block = self._check_keys(block)
        groups = group_rows(block, self._settings.queue_selector, self._queues_of, batch, self._custom)
        invalid = InvalidRows.of(batch, block, groups.violations, self._partition_id, self._first_row)
        if invalid is not None:
            if self._on_invalid is None:
                raise next(invalid.errors())
            self._on_invalid(invalid)
            self.taken_rows -= len(invalid)
        self._first_row += block.rows
        bad = None if invalid is None else invalid.mask
        return self._encode(block, groups, bad, self._ids.take(block.rows), now)

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        """Return the batches of `known` topics whose first row has waited for `LINGER_S` or longer."""
        # Groups are in the order of `since`: the cost does not grow with the number of topics that wait.
        late = itertools.takewhile(lambda group: now - group.since >= LINGER_S, self._groups.values())
        return map(self._close, [group.key for group in late if known(group.key.topic)])

    def flush(self) -> Iterator[Ready]:
        """Return all batches that are being filled."""
        return map(self._close, list(self._groups))

    def _encode(
        self, block: MessageBlock, groups: Groups, bad: Mask | None, first_id: int, now: float
    ) -> Iterator[Ready]:
        alone = block.item_sizes > self._limit if self._settings.batching else None
        apart = block.single if self._settings.ordered else None
        for start, stop in chunks(block.item_sizes, self._chunk_bytes, alone, apart):
            ready: list[Ready] = []
            batched, single = _choose(block, bad, start, stop)
            packed = compress_bodies(
                block.body.slice(start, stop), None if bad is None else ~bad[start:stop], self._settings
            )
            grouped = groups if packed is None else self._compressed_apart(groups, start, stop, packed)
            if batched is None or len(batched):
                ready += self._fill(block, grouped, start, stop, batched, packed, first_id, now)
            if single is not None and len(single):
                ready += self._singles(block, grouped, start, stop, single, packed, first_id)
            ready += self._trim()
            yield from ready
        for group in self._groups.values():
            group.settle()

    def _compressed_apart(self, groups: Groups, start: int, stop: int, packed: ByteColumn) -> Groups:
        kind = self._settings.compress_type
        if kind is None or packed.valid is None:
            return groups
        return groups.apart(slice(start, stop), packed.valid, kind.sys_flag)

    def _fill(
        self,
        block: MessageBlock,
        groups: Groups,
        start: int,
        stop: int,
        rows: Ints | None,
        packed: ByteColumn | None,
        first_id: int,
        now: float,
    ) -> Iterator[Ready]:
        count = stop - start if rows is None else len(rows)
        runs = [(groups.keys[0], 0, count)]
        if groups.codes is not None:
            rows = np.arange(count) if rows is None else rows
            rows, runs = _sorted_runs(groups, start, rows, ordered=self._settings.ordered)
        data, ends = self._encode_items(block, start, stop, rows, first_id, packed, now)
        for key, begin, end in runs:
            if self._settings.ordered:
                yield from self._close_before(key)
            group = self._groups.get(key)
            nbytes, filled = (0, 0) if group is None else (group.nbytes, group.rows)
            for first, last, full in fill_batches(
                ends, begin, end, limit=self._limit, nbytes=nbytes, rows=filled, max_rows=self._settings.max_rows
            ):
                group = self._groups.get(key)
                if group is None:
                    group = self._groups[key] = Group(key, now)
                piece = data[int(ends[first]) : int(ends[last])]
                group.append(piece, last - first)
                if len(runs) > 1:
                    group.settle()
                self.pending_bytes += len(piece)
                self.pending_rows += last - first
                if full:
                    yield self._close(key)

    def _singles(
        self,
        block: MessageBlock,
        groups: Groups,
        start: int,
        stop: int,
        rows: Ints,
        packed: ByteColumn | None,
        first_id: int,
    ) -> Iterator[Ready]:
        """Yield rows as single messages: one Python object a row, as each is a request of its own."""
        properties = encode_properties(block, start, stop, rows, self._ids, first_id, self._workspace)
        for row, text in zip((rows + start).tolist(), properties, strict=True):
            key = groups.keys[0 if groups.codes is None else int(groups.codes[row])]
            if self._settings.ordered:
                yield from self._close_before(key, itself=True)
            elif key.queue is not None and key in self._groups and block.item_sizes[row] > self._settings.item_limit:
                # Rows of one shardingKey keep their order: the ones before a row too large for a batch go before it.
                yield self._close(key)
            # Copied: a slice would keep the whole block alive while the message is under way.
            short = None if packed is None else packed.value(row - start)
            body = short or block.body.value(row) or b""
            flag = 0 if block.flags is None else int(block.flags[row])
            yield (
                EncodedBatch(
                    key.topic,
                    (body,),
                    1,
                    len(body),
                    batch=False,
                    properties=text,
                    flag=flag,
                    sys_flag=key.sys_flag,
                    message_group=_message_group(block, row) if self._settings.over_grpc else "",
                ),
                key.queue,
            )

    def _trim(self) -> Iterator[Ready]:
        """Close the largest batches until the others fit ``max_pending_bytes``."""
        if self.pending_bytes <= self._settings.max_pending_bytes:
            return
        for group in sorted(self._groups.values(), key=lambda group: group.nbytes, reverse=True):
            yield self._close(group.key)
            if self.pending_bytes <= self._settings.max_pending_bytes:
                return

    def _close_before(self, key: GroupKey, *, itself: bool = False) -> Iterator[Ready]:
        """Close what waits for the queue of `key` in other groups, and in its own too if `itself`."""
        for other in list(self._groups):
            if (other.topic, other.queue) == (key.topic, key.queue) and (itself or other != key):
                yield self._close(other)

    def _close(self, key: GroupKey) -> Ready:
        group = self._groups.pop(key)
        self.pending_bytes -= group.nbytes
        self.pending_rows -= group.rows
        return self._batch(group), key.queue

    @abc.abstractmethod
    def _encode_items(
        self,
        block: MessageBlock,
        start: int,
        stop: int,
        rows: Ints | None,
        first_id: int,
        packed: ByteColumn | None,
        now: float,
    ) -> tuple[memoryview, npt.NDArray[np.int64]]:
        """Encode rows of a range back to back; parameters and result as of `items.encode_items`."""

    @abc.abstractmethod
    def _batch(self, group: Group) -> EncodedBatch:
        """Return the batch of what `_encode_items` gave."""


class Group:
    """A batch that is being filled; `since` is when its first row came."""

    def __init__(self, key: GroupKey, since: float) -> None:
        self.key = key
        self.since = since
        self.rows = 0
        self.nbytes = 0
        self._settled: list[bytearray] = []
        self._slices: list[memoryview] = []

    def append(self, piece: memoryview, rows: int) -> None:
        """Take items that are slices of a block's buffer."""
        if rows:
            self._slices.append(piece)
            self.rows += rows
            self.nbytes += len(piece)

    def settle(self) -> None:
        """Copy what is still a slice, so that the buffer behind it can go; less than one batch per group and block."""
        for piece in self._slices:
            if self._settled and len(self._settled[-1]) < _PIECE_BYTES:
                self._settled[-1] += piece
            else:
                self._settled.append(bytearray(piece))
        self._slices.clear()

    @property
    def body(self) -> tuple[Buffer, ...]:
        """What it holds, in pieces."""
        settled: tuple[Buffer, ...] = tuple(memoryview(piece).toreadonly() for piece in self._settled)
        return settled + tuple(self._slices)


def _message_group(block: MessageBlock, row: int) -> str:
    """Return the group whose order a single message keeps, empty for none."""
    key = None if block.sharding_key is None else block.sharding_key.value(row)
    return (key or b"").decode("utf-8", "replace")


def _choose(block: MessageBlock, bad: Mask | None, start: int, stop: int) -> tuple[Ints | None, Ints | None]:
    """Return which rows of a chunk, counted from its start, go into batches (None: all) and which as singles."""
    if block.single is None and bad is None:
        return None, None
    good = np.ones(stop - start, np.bool_) if bad is None else ~bad[start:stop]
    if block.single is None:
        return np.flatnonzero(good), None
    single = block.single[start:stop]
    return np.flatnonzero(good & ~single), np.flatnonzero(good & single)


def _sorted_runs(
    groups: Groups, start: int, rows: Ints, *, ordered: bool
) -> tuple[Ints, list[tuple[GroupKey, int, int]]]:
    """Sort rows of a chunk by group, keeping their order within one, and return where each group lies.

    With `ordered` they are sorted by queue only: a queue's groups take turns as its rows do.
    """
    codes = groups.codes[start + rows] if groups.codes is not None else np.zeros(len(rows), np.uint16)
    order = np.argsort(_queue_codes(groups)[codes] if ordered else codes, kind="stable")
    codes = codes[order]
    borders: npt.NDArray[np.intp] = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    starts = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(codes)]
    return rows[order], [(groups.keys[int(codes[begin])], begin, end) for begin, end in zip(starts, ends, strict=True)]


def _queue_codes(groups: Groups) -> Ints:
    """Return, for each group, a number that the groups of its queue share."""
    numbers: dict[tuple[str, MessageQueue | None], int] = {}
    return np.array([numbers.setdefault((key.topic, key.queue), len(numbers)) for key in groups.keys])
