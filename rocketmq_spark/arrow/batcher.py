"""Encodes the rows of a write into batches and single messages (docs/internals/sink.md#sink-batches).

A `Group` is a batch that still takes rows. An *item* is a row, encoded for a batch. Some rows are *bound* to a queue
(`rocketmq_spark.arrow.split`). Rows are encoded in chunks of about 2 MiB. The items of a group that waits or shares a
chunk are copied, because a slice keeps the buffer of its whole chunk alive. Rows of one group keep their order. With
``ordered``, all rows of a queue do: before a row joins a group, the other groups of its queue are completed.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

import numpy as np
import pyarrow as pa

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.arrow.block import item_limit, read_block
from rocketmq_spark.arrow.columns import Ints, Mask
from rocketmq_spark.arrow.encoders import (
    Chunk,
    Items,
    UniqueIds,
    compress_bodies,
    delimited,
    encode_grpc,
    encode_properties,
    encode_remoting,
)
from rocketmq_spark.arrow.gather import Workspace, chunks
from rocketmq_spark.arrow.group import Group
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.invalid_rows import InvalidRows, uncarried_columns
from rocketmq_spark.arrow.model import KnownRows, MessageBlock, Rule, Span
from rocketmq_spark.arrow.split import CustomSelector, GroupKey, Groups, KeyCheck, fill_batches, group_rows
from rocketmq_spark.arrow.validate import DELAY_TOO_LONG, FRAME_TOO_LONG
from rocketmq_spark.model.message import EncodedBatch, Encoding, MessageQueue, Ready
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE
from rocketmq_spark.options.connection import GRPC
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY, MAX_BATCH_ROWS, unique_id

# A batch that is not full is sent once its first row has waited this long, seconds.
LINGER_S: Final = 0.1

# Rows are encoded in chunks of about this size, bytes. It fits a processor's cache and bounds memory, and makes the
# fixed cost of numpy and Arrow calls negligible.
_CHUNK_BYTES: Final = 2 * 1024 * 1024
# A batch's header may carry only this, and the UNIQ_KEY of an inner batch (docs/internals/messages.md#batch).
_NO_WAIT: Final = "WAIT\x01false\x02"


@dataclass(eq=False, repr=False)
class ArrowBatcher(BatchSource[pa.RecordBatch], abc.ABC):
    """Fills batches with the rows of one partition, and makes single messages of rows that cannot be in one."""

    options: SinkOptions
    _: KW_ONLY
    partition_id: int
    queues_of: Callable[[str], Sequence[MessageQueue]]  # Called only for topics with a row that is bound to a queue
    unique_ids: UniqueIds
    # Called with the invalid rows of a batch; the others are sent. None: the first error is raised, and none is sent
    on_invalid: Callable[[InvalidRows], None] | None = None
    row_ids: RowIds | None = None
    attempt: str = ""  # The token that each row gets
    stored: KnownRows | None = None  # Rows of an earlier attempt, which are not sent; `on_stored` gets their places
    on_stored: Callable[[Span], None] | None = None
    custom: CustomSelector | None = None  # Chooses the queues, instead of the option ``queueSelector``
    check_rows: Callable[[pa.RecordBatch], None] | None = None  # Raises for rows that no broker stores as they are
    check_keys: KeyCheck | None = None
    half_properties: str = ""  # Makes every row a half message: its property string gets this end
    max_rows: int = MAX_BATCH_ROWS
    chunk_bytes: int = _CHUNK_BYTES
    # Of batches that are not full
    pending_bytes: int = field(default=0, init=False)
    pending_rows: int = field(default=0, init=False)
    # All rows that `add` received, including those of a refused batch, without skipped invalid rows
    taken_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        options = self.options
        self._limit = min(options.batch_bytes, item_limit(options))
        # An inner batch has one sysFlag, about its whole body (docs/internals/messages.md#compression).
        kind = "NONE" if options.batch_type == "inner" else options.compress_type
        self._compression = CompressionType.__members__.get(kind)
        self._workspace = Workspace()
        self._first_row = 0
        self._groups: dict[GroupKey, Group] = {}
        # The topics of groups that were opened since the last `new_topics`.
        self._opened: set[str] = set()
        # With ``ordered``, of each topic and queue the only group that may be open.
        self._last_of_queue: dict[tuple[str, MessageQueue | None], GroupKey] = {}

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} partition={self.partition_id} rows={self._first_row} groups={len(self._groups)} "
            f"pending={self.pending_rows} rows, {self.pending_bytes} bytes>"
        )

    def add(self, rows: pa.RecordBatch, now: float) -> Iterator[Ready]:
        """Check and take the rows of a batch whose schema has passed `check_schema`, and return the full batches.

        On an InvalidRowError the batch is not taken. A RouteNotFoundException means that the topic of a bound row, or
        of a row without a key, has no queue; the batch may be added again.
        """
        self.taken_rows += rows.num_rows
        if self.check_rows is not None:
            self.check_rows(rows)
        block = read_block(rows, self.options, self.row_ids, self._first_row, self.attempt)
        if self.check_keys is not None:
            block = self.check_keys(block)
        groups = group_rows(block, self.options.queue_selector, self.queues_of, rows, self.custom)
        skipped = None
        if broken := (*block.violations, *groups.violations):
            invalid = InvalidRows.of(rows, block, broken, self.partition_id, self._first_row)
            if self.on_invalid is None:
                raise next(invalid.errors())
            self.on_invalid(invalid)
            self.taken_rows -= len(invalid)
            skipped = invalid.mask
        if self.stored is not None:
            skipped = self._skip_stored(self.stored, block, skipped)
        self._first_row += block.rows
        # Only dead letters have these values.
        uncarried = None if self.on_invalid is None else uncarried_columns(rows)
        return self._encode(block, groups, skipped, uncarried, self.unique_ids.reserve(block.rows), now)

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:  # noqa: ARG002
        """Take back rows that a server rejects, because their delay is too long: `on_invalid` gets them."""
        for message, _ in rejected:
            self._refuse(message, DELAY_TOO_LONG)
        return iter(())

    def _refuse(self, message: EncodedBatch, rule: Rule) -> None:
        """Handle a row, encoded as a single message, that breaks a rule."""
        invalid = InvalidRows.encoded(message, rule, self.options, self.partition_id)
        if self.on_invalid is None:
            raise next(invalid.errors())
        self.taken_rows -= 1
        self.on_invalid(invalid)

    def _skip_stored(self, stored: KnownRows, block: MessageBlock, skipped: Mask | None) -> Mask | None:
        """Return `skipped`, the rows that are not sent, with the stored rows."""
        found = stored.take(block, self._first_row, skipped)
        if found is None:
            return skipped
        self.taken_rows -= int(np.count_nonzero(found.mask))
        if self.on_stored is not None:
            for span in found.spans:
                self.on_stored(span)
        return found.mask if skipped is None else skipped | found.mask

    def expired(self, now: float, known: Callable[[str], bool]) -> Iterator[Ready]:
        # Groups are in the order of `since`: the cost does not grow with the number of topics that wait.
        late = itertools.takewhile(lambda group: now - group.since >= LINGER_S, self._groups.values())
        return map(self._close, [group.key for group in late if known(group.key.topic)])

    def new_topics(self) -> set[str]:
        opened, self._opened = self._opened, set()
        return opened

    def flush(self) -> Iterator[Ready]:
        return map(self._close, list(self._groups))

    def _encode(
        self,
        block: MessageBlock,
        groups: Groups,
        skipped: Mask | None,
        uncarried: pa.RecordBatch | None,
        first_id: int,
        now: float,
    ) -> Iterator[Ready]:
        alone = block.item_sizes > self._limit if self.options.batching else None
        apart = block.single if self.options.ordered else None
        for start, stop in chunks(block.item_sizes, self.chunk_bytes, alone, apart):
            ready: list[Ready] = []
            batched, single = _choose(block, skipped, start, stop)
            compressed, grouped = None, groups
            if self._compression is not None:
                sent = None if skipped is None else ~skipped[start:stop]
                compressed = compress_bodies(block.body.slice(start, stop), sent, self._compression, self.options)
                if compressed is not None and compressed.valid is not None:
                    grouped = groups.with_compressed(slice(start, stop), compressed.valid, self._compression.sys_flag)
            if batched is None or len(batched):
                ready += self._fill(Chunk(block, start, stop, batched, compressed, first_id), grouped, now)
            if single is not None and len(single):
                ready += self._singles(Chunk(block, start, stop, single, compressed, first_id), grouped, uncarried)
            ready += self._trim()
            yield from ready
        for group in self._groups.values():
            group.copy_slices()

    def _fill(self, chunk: Chunk, groups: Groups, now: float) -> Iterator[Ready]:
        keys, borders = groups.keys[:1], [0, len(chunk)]
        if groups.codes is not None:
            rows = np.arange(len(chunk)) if chunk.rows is None else chunk.rows
            rows, keys, borders = groups.sorted_runs(chunk.start, rows, ordered=self.options.ordered)
            chunk = replace(chunk, rows=rows)
        data, ends = self._encode_items(chunk, now)
        runs = zip(keys, itertools.pairwise(borders), itertools.pairwise(ends[borders].tolist()), strict=True)
        shared = len(keys) > 1
        for key, (begin, end), (head, tail) in runs:
            if self.options.ordered:
                yield from self._close_before(key)
            group = self._groups.get(key)
            nbytes, filled = (0, 0) if group is None else (group.nbytes, group.rows)
            # Most runs of a write to many queues or topics are short, and `fill_batches` would take most of their time.
            if nbytes + tail - head < self._limit and filled + end - begin < self.max_rows:
                self._append(group or self._open(key, now), data[head:tail], end - begin, shared)
                continue
            for first, last, full in fill_batches(
                ends, begin, end, limit=self._limit, nbytes=nbytes, rows=filled, max_rows=self.max_rows
            ):
                group = self._groups.get(key) or self._open(key, now)
                if last > first:
                    self._append(group, data[int(ends[first]) : int(ends[last])], last - first, shared)
                if full:
                    yield self._close(key)

    def _open(self, key: GroupKey, now: float) -> Group:
        group = self._groups[key] = Group(key, now)
        self._opened.add(key.topic)
        return group

    def _append(self, group: Group, piece: memoryview, rows: int, shared: bool) -> None:
        group.append(piece, rows, copied=shared)
        self.pending_bytes += len(piece)
        self.pending_rows += rows

    def _singles(self, chunk: Chunk, groups: Groups, uncarried: pa.RecordBatch | None) -> Iterator[Ready]:
        """Yield rows as single messages: one Python object per row, because each row is a separate request."""
        block, compressed, options = chunk.block, chunk.compressed, self.options
        properties = encode_properties(chunk, self.unique_ids, self._workspace)
        half_flag = TRANSACTION_PREPARED_TYPE if self.half_properties else 0
        # Copied: a slice would keep the whole record batch alive until the message is acknowledged.
        rest = None if uncarried is None else uncarried.take(pa.array(chunk.numbers))
        for number, (row, text) in enumerate(zip(chunk.numbers.tolist(), properties, strict=True)):
            key = groups.keys[0 if groups.codes is None else int(groups.codes[row])]
            if options.ordered:
                yield from self._close_before(key, itself=True)
            elif key.queue is not None and key in self._groups and block.item_sizes[row] > item_limit(options):
                # Rows of one shardingKey keep their order, so those before a row too large for a batch go first.
                yield self._close(key)
            # Copied for the same reason.
            compressed_body = None if compressed is None else compressed.value(row - chunk.start)
            body = compressed_body or block.body.value(row) or b""
            message_group = None
            if options.over_grpc and block.sharding_key is not None:
                message_group = block.sharding_key.text(row, "replace")
            message = EncodedBatch(
                key.topic,
                (body,),
                1,
                len(body),
                batch=False,
                properties=text + self.half_properties,
                flag=0 if block.flags is None else int(block.flags[row]),
                sys_flag=key.sys_flag | half_flag,
                message_group=message_group or "",
                # `add` has counted this block. The caller exhausts its batches before it adds another one.
                row=self._first_row - block.rows + row,
                uncarried=None if rest is None else rest.slice(number, 1),
            )
            if len(body) > LARGEST_BODY:
                # What makes it a half message is not the row's.
                self._refuse(replace(message, properties=text), FRAME_TOO_LONG)
                continue
            yield message, key.queue

    def _trim(self) -> Iterator[Ready]:
        """Close the largest batches until the others fit half of ``maxInFlightBytes``."""
        most = self.options.max_in_flight_bytes // 2
        if self.pending_bytes <= most:
            return
        for group in sorted(self._groups.values(), key=lambda group: group.nbytes, reverse=True):
            yield self._close(group.key)
            if self.pending_bytes <= most:
                return

    def _close_before(self, key: GroupKey, *, itself: bool = False) -> Iterator[Ready]:
        """Close the other group that waits for the queue of `key`, and with `itself` its own."""
        other = self._last_of_queue.get((key.topic, key.queue))
        self._last_of_queue[key.topic, key.queue] = key
        if other in self._groups and (itself or other != key):
            yield self._close(other)

    def _close(self, key: GroupKey) -> Ready:
        group = self._groups.pop(key)
        self.pending_bytes -= group.nbytes
        self.pending_rows -= group.rows
        return self._batch(group), key.queue

    @abc.abstractmethod
    def _encode_items(self, chunk: Chunk, now: float) -> Items: ...

    @abc.abstractmethod
    def _batch(self, group: Group) -> EncodedBatch: ...


class RemotingBatcher(ArrowBatcher):
    """Fills batches for brokers; parameters as of `ArrowBatcher`."""

    def _encode_items(self, chunk: Chunk, now: float) -> Items:  # noqa: ARG002
        return encode_remoting(chunk, self.unique_ids, self._workspace)

    def _batch(self, group: Group) -> EncodedBatch:
        key = group.key
        properties = "" if key.wait_store_msg_ok else _NO_WAIT
        if self.options.batch_type == "inner":
            properties += f"UNIQ_KEY\x01{unique_id(self.unique_ids.prefix, self.unique_ids.reserve(1))}\x02"
        return group.batch(properties)


@dataclass(eq=False, repr=False, kw_only=True)
class GrpcBatcher(ArrowBatcher):
    """Fills batches for proxies, which choose the queues; `epoch_offset` is epoch minus monotonic time, seconds."""

    namespace: str = ""
    born_host: str
    epoch_offset: float

    def __post_init__(self) -> None:
        connection = replace(self.options.connection, transport=GRPC)
        self.options = replace(self.options, connection=connection, queue_selector="roundRobin", batch_type="plain")
        super().__post_init__()
        self._namespace = delimited(b"\x0a", self.namespace.encode()) if self.namespace else b""
        self._born_host = delimited(b"\x42", self.born_host.encode())

    def _born_timestamp(self, now: float) -> int:
        return int((now + self.epoch_offset) * 1000)

    def _encode_items(self, chunk: Chunk, now: float) -> Items:
        return encode_grpc(
            chunk,
            self.unique_ids,
            self._workspace,
            namespace=self._namespace,
            born_timestamp=self._born_timestamp(now),
            born_host=self._born_host,
        )

    def _batch(self, group: Group) -> EncodedBatch:
        # A transport that sends much later puts a new timestamp in.
        return replace(group.batch(), encoding=Encoding.GRPC, born_timestamp=self._born_timestamp(group.since))


def _choose(block: MessageBlock, skipped: Mask | None, start: int, stop: int) -> tuple[Ints | None, Ints | None]:
    """Return which rows of a chunk, counted from its start, go into batches (None: all) and which as singles."""
    if block.single is None and skipped is None:
        return None, None
    sent = np.ones(stop - start, np.bool_) if skipped is None else ~skipped[start:stop]
    if block.single is None:
        return np.flatnonzero(sent), None
    single = block.single[start:stop]
    return np.flatnonzero(sent & ~single), np.flatnonzero(sent & single)
