"""Rows -> groups that may share a batch, and groups -> batches within the limits. Nothing is encoded here.

- A batch has one topic, one queue (or any queue), one ``waitStoreMsgOK``, and bodies that are all compressed or plain.
- A row is bound to a queue by the hash of its shardingKey (selectors ``hash`` and None), by its queueId (``column``),
  or by a user's class (``module:Class``). Any other row is not bound, and the producer chooses its queue.
- The queues of a topic are looked up only if one of its rows is to be bound.

Follows ``SelectMessageQueueByHash.java`` as of 5.x and, for a user's class, ``MessageQueueSelector.java``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.block import MessageBlock
from rocketmq_spark.arrow.columns import ByteColumn, Ints, Mask, to_arrow
from rocketmq_spark.arrow.ids import string_hashes
from rocketmq_spark.arrow.validate import Rule, Violation
from rocketmq_spark.errors import MQClientException, RouteNotFoundException
from rocketmq_spark.model.hashes import queue_index
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.kinds import load_class, make
from rocketmq_spark.protocol.remoting.records import MAX_BATCH_ROWS

_ScalarT = TypeVar("_ScalarT", bound="np.generic[Any]")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a block that are encoded together."""

    block: MessageBlock
    # start, stop: A range of the block's rows
    start: int
    stop: int
    # Rows of the range, counted from `start`, in the order of the result; None: all of them. At least one.
    rows: Ints | None
    packed: ByteColumn | None  # Compressed bodies of the range; null where a row keeps the block's
    first_id: int  # The id of the block's first row; row k has the k-th after it

    @property
    def numbers(self) -> Ints:
        """The rows' numbers within the block."""
        return np.arange(self.start, self.stop) if self.rows is None else self.rows + self.start

    def picked(self, values: npt.NDArray[_ScalarT]) -> npt.NDArray[_ScalarT]:
        """Return values of the range in the order of the result."""
        return values if self.rows is None else values[self.rows]

    def bodies(self) -> tuple[list[ByteColumn], Ints]:
        """Return columns that together hold one body per row, null in the others, and the bodies' sizes."""
        bodies = self.block.body.slice(self.start, self.stop)
        if self.packed is None or self.packed.valid is None:
            return [bodies], bodies.sizes
        plain = replace(bodies, valid=~self.packed.valid)
        return [plain, self.packed], plain.sizes + self.packed.sizes


class RowSelector(Protocol):
    """The interface of a class for ``queueSelector``, which is made without arguments."""

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
        """Return an index into `queues` for each of `rows`, -1 or null for any queue, as an array of whole numbers.

        Parameters
        ----------
        queues : sequence of MessageQueue
            The writable queues of one topic, at least one.
        rows : pyarrow.RecordBatch
            Valid rows for that topic, at least one, with all columns of the write.
        """
        ...


def check_selector(name: str) -> None:
    """Raise an OptionError if the class cannot be imported. The driver calls this before any task starts."""
    load_class("queueSelector", name, "select")


class CustomSelector:
    """Calls a user's selector and checks what it returns.

    Parameters
    ----------
    name : str
        The option's ``module:Class``; an OptionError if it cannot be imported or made.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._selector: RowSelector = make("queueSelector", name, "select")

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return an index into `queues` for each of `rows`, -1 for any.

        Raises
        ------
        MQClientException
            The selector failed, or did not return one valid index for each row.
        """
        what = f"queueSelector={self._name}, choosing among {len(queues)} queues of {queues[0].topic}"
        try:
            answer = self._selector.select(queues, rows)
            array = answer if isinstance(answer, (pa.Array, pa.ChunkedArray)) else pa.array(answer)
        except Exception as exc:
            raise MQClientException(f"{what} for {len(rows)} rows failed: {exc!r}") from exc
        if len(array) != len(rows) or not (pa.types.is_integer(array.type) or pa.types.is_null(array.type)):
            raise MQClientException(
                f"{what}: it returned {len(array)} values of type {array.type}; return {len(rows)} whole numbers, one "
                "a row"
            )
        chosen: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy()
        wrong = np.flatnonzero((chosen < -1) | (chosen >= len(queues)))
        if len(wrong):
            raise MQClientException(
                f"{what}: it returned {chosen[wrong[0]]} for row {wrong[0]} of {len(rows)}; allowed is 0 to "
                f"{len(queues) - 1}, and -1 or null for any queue"
            )
        return chosen


@dataclass(frozen=True, slots=True)
class GroupKey:
    """What all rows of a batch have in common; `queue` None: any queue of the topic."""

    topic: str
    queue: MessageQueue | None = None
    wait_store_msg_ok: bool = True
    sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each row."""

    keys: list[GroupKey]
    # Shape (rows,): Which of `keys` each row has; None: every row has the only one. Undefined for rows that break a
    # rule.
    codes: Ints | None
    violations: list[Violation]  # Rows that name a queue which does not exist

    def apart(self, rows: slice, compressed: Mask, sys_flag: int) -> Groups:
        """Return groups in which the `compressed` rows of a range are apart and have `sys_flag`.

        The groups of rows outside the range are undefined in the result.
        """
        twice = len(self.keys) * 2
        codes = np.zeros(rows.stop, np.uint16 if twice < 0x10000 else np.int64)
        codes[rows] = compressed
        if self.codes is not None:
            codes[rows] += self.codes[rows].astype(codes.dtype) * codes.dtype.type(2)
        keys = [replace(key, sys_flag=flag) for key in self.keys for flag in (0, sys_flag)]
        return Groups(keys, codes, self.violations)


def group_rows(
    block: MessageBlock,
    queue_selector: str | None,
    queues_of: Callable[[str], Sequence[MessageQueue]],
    rows: pa.RecordBatch,
    custom: CustomSelector | None = None,
) -> Groups:
    """Return which rows of `block` may share a batch.

    Parameters
    ----------
    queues_of : callable
        Returns the writable queues of a topic, in the producer's order.
    rows : pyarrow.RecordBatch
        What `block` was made of.
    custom : CustomSelector or None, default None
        Chooses instead of `queue_selector`.

    Raises
    ------
    RouteNotFoundException
        A row is to be bound and its topic has no queue now.
    """
    bad = block.bad_rows()
    targets = _Targets(block, queues_of)
    if custom is not None:
        targets.bind_by_choice(_usable(None, bad, block.rows), rows, custom)
    elif queue_selector in (None, "hash") and block.sharding_key is not None:
        targets.bind_by_hash(_usable(block.sharding_key.valid, bad, block.rows))
    elif queue_selector == "column" and block.queue_ids is not None:
        targets.bind_by_column(_usable(block.queue_ids[1], bad, block.rows))
    keys, codes = targets.keys, targets.codes
    no_wait = block.no_wait
    if no_wait is not None:
        codes = no_wait * 1 if codes is None else codes * 2 + no_wait
        keys = [GroupKey(key.topic, key.queue, wait) for key in keys for wait in (True, False)]
    if codes is not None and len(keys) < 0x10000:
        codes = codes.astype(np.uint16)  # numpy sorts numbers of 16 bits by radix: several times faster
    return Groups(keys, codes if len(keys) > 1 else None, targets.violations)


def fill_batches(
    ends: npt.NDArray[np.int64],
    start: int,
    stop: int,
    *,
    limit: int,
    nbytes: int,
    rows: int,
    max_rows: int = MAX_BATCH_ROWS,
) -> Iterator[tuple[int, int, bool]]:
    """Cut a run of items into pieces of batches.

    Parameters
    ----------
    ends : int64 array
        Item k takes ``ends[k + 1] - ends[k]`` bytes.
    start, stop : int
        The run.
    limit : int
        Bytes that a batch may have; an item that is larger gets a batch of its own.
    nbytes, rows : int
        What the batch that is being filled holds already.

    Yields
    ------
    tuple of (int, int, bool)
        The items from, up to, and whether they complete the batch; the first may be an empty piece that does. Only the
        last one may leave its batch open.
    """
    while start < stop:
        fits = int(np.searchsorted(ends, ends[start] + (limit - nbytes), side="right")) - 1
        cut = max(start, min(fits, start + max_rows - rows, stop))
        if cut == start and rows == 0:
            cut = start + 1
        nbytes += int(ends[cut] - ends[start])
        rows += cut - start
        # Full to the last byte or row, or the next item doesn't fit: no reason to wait for more.
        full = cut < stop or nbytes >= limit or rows >= max_rows
        yield start, cut, full
        start, nbytes, rows = cut, 0, 0


def _usable(valid: Mask | None, bad: Mask | None, rows: int) -> Mask:
    usable = np.ones(rows, np.bool_) if valid is None else valid
    return usable if bad is None else usable & ~bad


class _Targets:
    """Numbers every (topic, queue or None) that rows of a block go to; those of one topic are consecutive."""

    def __init__(self, block: MessageBlock, queues_of: Callable[[str], Sequence[MessageQueue]]) -> None:
        self._block = block
        self._queues_of = queues_of
        self.keys = [GroupKey(topic) for topic in block.topics]
        self.codes: Ints | None = block.topic_codes
        self.violations: list[Violation] = []

    def bind_by_hash(self, bound: Mask) -> None:
        """Bind rows to the queue that Java's hash of their key selects."""
        key = self._block.sharding_key
        if key is None or not bound.any():
            return
        queues = self._queues_of_rows(bound)
        sizes = np.array([max(len(topic_queues), 1) for topic_queues in queues])
        codes = self._block.topic_codes
        index = queue_index(string_hashes(key).astype(np.int64), sizes if codes is None else sizes[codes])
        self._bind(queues, (index + 1) * bound)

    def bind_by_column(self, bound: Mask) -> None:
        """Bind rows to the queue that they name; the broker's name may be null where the topic has one broker."""
        block = self._block
        if block.queue_ids is None or not bound.any():
            return
        queues = self._queues_of_rows(bound)
        topic_codes = np.zeros(block.rows, np.int64) if block.topic_codes is None else block.topic_codes
        broker_codes, names = block.broker_names or (np.full(block.rows, -1), [])
        slots = np.zeros(block.rows, np.int64)
        for code, topic_queues in enumerate(queues):
            rows = np.flatnonzero(bound & (topic_codes == code))
            if len(rows) == 0:
                continue
            brokers = sorted({queue.broker_name for queue in topic_queues})
            # The number of each of the rows' broker names among the topic's brokers; the last one is for null.
            number = {name: position for position, name in enumerate(brokers)}
            of_name = np.array([number.get(name, -1) for name in names] + [0 if len(brokers) == 1 else -1])
            known = np.array([number[queue.broker_name] << 32 | queue.queue_id for queue in topic_queues])
            named = of_name[broker_codes[rows]] << 32 | block.queue_ids[0][rows]
            order = np.argsort(known)
            places = order[np.minimum(np.searchsorted(known, named, sorter=order), len(known) - 1)]
            missing = rows[known[places] != named]
            slots[rows] = places + 1
            if len(missing):
                self.violations.append(self._no_such_queue(missing, topic_queues))
        self._bind(queues, slots)

    def bind_by_choice(self, bound: Mask, batch: pa.RecordBatch, custom: CustomSelector) -> None:
        """Bind rows as a user's selector chooses; it is called once per topic."""
        if not bound.any():
            return
        codes = self._block.topic_codes
        slots = np.zeros(self._block.rows, np.int64)
        queues = self._queues_of_rows(bound)
        for code, topic_queues in enumerate(queues):
            of_topic = bound if codes is None else bound & (codes == code)
            if of_topic.any():
                rows = batch if of_topic.all() else batch.filter(to_arrow(of_topic))
                slots[of_topic] = custom.select(topic_queues, rows) + 1
        self._bind(queues, slots)

    def _no_such_queue(self, rows: Ints, queues: Sequence[MessageQueue]) -> Violation:
        per_broker: dict[str, list[int]] = {}
        for queue in queues:
            per_broker.setdefault(queue.broker_name, []).append(queue.queue_id)
        listed = ", ".join(f"{broker}: {_ranges(ids)}" for broker, ids in sorted(per_broker.items()))
        rule = Rule(
            "the row names a queue that does not exist, or queueId without brokerName",
            f"the topic's writable queues are {listed}",
            "correct queueId and brokerName (it may be null where there is one broker), or use null for any queue",
        )
        block = self._block
        codes, names = block.broker_names or (np.full(block.rows, -1), [])
        ids = block.queue_ids[0] if block.queue_ids is not None else codes
        return Violation(
            rule, rows, lambda row: f"brokerName {names[codes[row]] if codes[row] >= 0 else 'null'}, queueId {ids[row]}"
        )

    def _queues_of_rows(self, bound: Mask) -> list[Sequence[MessageQueue]]:
        """Return the queues of each topic that has a row to bind, and nothing for any other topic."""
        codes = self._block.topic_codes
        bound_topics = {0} if codes is None else set(np.unique(codes[bound]).tolist())
        queues: list[Sequence[MessageQueue]] = []
        for code, topic in enumerate(self._block.topics):
            queues.append(self._queues_of(topic) if code in bound_topics else ())
            if code in bound_topics and not queues[-1]:
                raise RouteNotFoundException(
                    f"binding rows to queues of topic {topic}: it has no writable queue just now; "
                    "check the topic's permissions and that its brokers are up"
                )
        return queues

    def _bind(self, queues: list[Sequence[MessageQueue]], slots: Ints) -> None:
        """Renumber the targets: of each topic first "any queue" (slot 0), then its queues (slot 1 and on)."""
        keys: list[GroupKey] = []
        first: list[int] = []
        for topic, topic_queues in zip(self._block.topics, queues, strict=True):
            first.append(len(keys))
            keys.append(GroupKey(topic))
            keys += (GroupKey(topic, queue) for queue in topic_queues)
        self.keys = keys
        codes = self._block.topic_codes
        self.codes = slots if codes is None else np.array(first)[codes] + slots


def _ranges(ids: Sequence[int]) -> str:
    """Return queue ids as text, ``0..3`` where they are consecutive from 0."""
    whole = sorted(ids)
    return f"0..{whole[-1]}" if len(whole) > 1 and whole == list(range(len(whole))) else ", ".join(map(str, whole))
