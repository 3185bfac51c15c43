"""Divides rows into groups that may share a batch, and cuts a group's rows into batches.

docs/internals/sink.md#sink-batches has the limits. Over remoting a row can be bound to a queue: by the hash of its
shardingKey, by columns, or by the user's selector (docs/internals/routing.md#selectors). The sink chooses the queue of
any other row when it sends it. Over gRPC the proxy chooses all queues. `KeyCheck` finds rows that a compaction topic
does not store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.arrow.columns import Ints, Mask, filtered, to_arrow
from rocketmq_spark.arrow.hashes import string_hashes
from rocketmq_spark.arrow.model import MessageBlock, Rule, Violation
from rocketmq_spark.arrow.validate import NO_BODY, NO_TOPIC, rows_without_key, violations
from rocketmq_spark.errors import MQClientException, RouteNotFoundException
from rocketmq_spark.model.hashes import consistent_hash, queue_index
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.references import new_instance
from rocketmq_spark.protocol.remoting.records import MAX_BATCH_ROWS


class RowSelector(Protocol):
    """The interface of a class for ``queueSelector`` (Java: ``MessageQueueSelector``), made without arguments."""

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> Any:
        """Return an index into `queues` for each of `rows`, -1 or null for any queue, as an array of whole numbers.

        `queues` are all writable queues of one topic. `rows` are valid rows for it, with all columns of the write.
        """
        ...


class CustomSelector:
    """Calls a user's selector, named ``module:Class``, and checks what it returns."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._selector: RowSelector = new_instance("queueSelector", name, "select")

    def select(self, queues: Sequence[MessageQueue], rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return an index into `queues` for each row, -1 for any; raises a MQClientException for a failed selector."""
        call = f"queueSelector={self._name}, choosing among {len(queues)} queues of {queues[0].topic}"
        try:
            answer = self._selector.select(queues, rows)
            array = answer if isinstance(answer, (pa.Array, pa.ChunkedArray)) else pa.array(answer)
        except Exception as exc:
            raise MQClientException(f"{call} for {len(rows)} rows failed: {exc!r}") from exc
        if len(array) != len(rows) or not (pa.types.is_integer(array.type) or pa.types.is_null(array.type)):
            raise MQClientException(
                f"{call}: it returned {len(array)} values of type {array.type}; return {len(rows)} whole numbers, "
                "one per row"
            )
        chosen: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy()
        wrong = np.flatnonzero((chosen < -1) | (chosen >= len(queues)))
        if len(wrong):
            raise MQClientException(
                f"{call}: it returned {chosen[wrong[0]]} for row {wrong[0]} of {len(rows)}; allowed is 0 to "
                f"{len(queues) - 1}, and -1 or null for any queue"
            )
        return chosen


class GroupKey(NamedTuple):
    """What all rows of a batch have in common; `queue` None: any queue of the topic."""

    topic: str
    queue: MessageQueue | None = None
    wait_store_msg_ok: bool = True
    sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """The group of each row."""

    keys: list[GroupKey]
    codes: Ints | None  # Which of `keys` each row has, undefined for a bad row; None: every row has the only one
    violations: list[Violation]  # Rows that name a queue which does not exist

    def with_compressed(self, rows: slice, compressed: Mask, sys_flag: int) -> Groups:
        """Return groups of a range of rows, undefined elsewhere: `compressed` rows have their own, with `sys_flag`."""
        twice = len(self.keys) * 2
        codes = np.zeros(rows.stop, np.uint16 if twice < 0x10000 else np.int64)
        codes[rows] = compressed
        if self.codes is not None:
            codes[rows] += self.codes[rows].astype(codes.dtype) * codes.dtype.type(2)
        keys = [key._replace(sys_flag=flag) for key in self.keys for flag in (0, sys_flag)]
        return Groups(keys, codes, self.violations)

    def sorted_runs(self, start: int, rows: Ints, *, ordered: bool) -> tuple[Ints, list[GroupKey], list[int]]:
        """Sort rows of a chunk, counted from `start`, by group, stable.

        Returns the rows, the key of each run of rows with one key, and where each run begins and the last one ends.
        With `ordered`, rows are sorted by queue only, because a queue's groups alternate as its rows do.
        """
        codes = np.zeros(len(rows), np.uint16) if self.codes is None else self.codes[start + rows]
        by = codes
        if ordered:
            numbers: dict[tuple[str, MessageQueue | None], int] = {}
            of_key = [numbers.setdefault((key.topic, key.queue), len(numbers)) for key in self.keys]
            by = np.array(of_key, codes.dtype)[codes]
        order = np.argsort(by, kind="stable")
        codes = codes[order]
        borders = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
        return rows[order], [self.keys[code] for code in codes[borders[:-1]].tolist()], borders


def group_rows(
    block: MessageBlock,
    queue_selector: str | None,
    queues_of: Callable[[str], Sequence[MessageQueue]],
    rows: pa.RecordBatch,
    custom: CustomSelector | None = None,
) -> Groups:
    """Return which rows of `block`, made of `rows`, may share a batch; `custom` chooses instead of `queue_selector`.

    Raises a RouteNotFoundException if a row is to be bound and its topic has no queue now.
    """
    broken: list[Violation] = []
    keys, codes = list(map(GroupKey, block.topics)), block.topic_codes
    bound = _bound_rows(block, queue_selector, custom)
    if bound is not None and bound.any():
        queues = _queues_of_rows(block, bound, queues_of)
        if custom is not None:
            slots = _slots_by_choice(block, bound, queues, rows, custom)
        elif queue_selector == "column":
            slots = _slots_by_column(block, bound, queues, broken)
        else:
            slots = _slots_by_hash(block, bound, queues)
        # Of each topic first "any queue", which is slot 0, then its queues.
        first = np.cumsum([0, *(1 + len(topic_queues) for topic_queues in queues)])[:-1]
        targets = zip(block.topics, queues, strict=True)
        keys = [GroupKey(topic, queue) for topic, of_topic in targets for queue in (None, *of_topic)]
        codes = slots if codes is None else first[codes] + slots
    no_wait = block.no_wait
    if no_wait is not None:
        codes = no_wait * 1 if codes is None else codes * 2 + no_wait
        keys = [GroupKey(key.topic, key.queue, wait) for key in keys for wait in (True, False)]
    if codes is not None and len(keys) < 0x10000:
        codes = codes.astype(np.uint16)  # numpy sorts numbers of 16 bits by radix: several times faster
    return Groups(keys, codes if len(keys) > 1 else None, broken)


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
    """Cut the items from `start` to `stop` into pieces of batches; item k ends at byte ``ends[k + 1]``.

    Yields each piece's first item, the one after its last, and whether it completes the batch. The first piece may be
    empty and complete a batch. Only the last one may leave its batch open. The open batch already holds `nbytes` and
    `rows`. An item of more than `limit` bytes is a batch alone.
    """
    while start < stop:
        fits = int(np.searchsorted(ends, ends[start] + (limit - nbytes), side="right")) - 1
        cut = max(start, min(fits, start + max_rows - rows, stop))
        if cut == start and rows == 0:
            cut = start + 1
        nbytes += int(ends[cut] - ends[start])
        rows += cut - start
        # Full to the last byte or row, or the next item does not fit.
        full = cut < stop or nbytes >= limit or rows >= max_rows
        yield start, cut, full
        start, nbytes, rows = cut, 0, 0


def _bound_rows(block: MessageBlock, queue_selector: str | None, custom: CustomSelector | None) -> Mask | None:
    """Return which rows are to be bound to a queue, None for none."""
    if custom is not None:
        valid = None
    elif queue_selector in (None, "hash") and (block.sharding_key or block.lite_topic):
        columns = [column for column in (block.sharding_key, block.lite_topic) if column is not None]
        masks = [column.valid for column in columns if column.valid is not None]
        valid = np.logical_or.reduce(masks) if len(masks) == len(columns) else None
    elif queue_selector == "column" and block.queue_ids is not None:
        valid = block.queue_ids[1]
    else:
        return None
    bound = np.ones(block.rows, np.bool_) if valid is None else valid
    bad = block.bad_rows()
    return bound if bad is None else bound & ~bad


def _queues_of_rows(
    block: MessageBlock, bound: Mask, queues_of: Callable[[str], Sequence[MessageQueue]]
) -> list[Sequence[MessageQueue]]:
    """Return the queues of each topic that has a row to bind, and an empty sequence for any other topic."""
    queues: list[Sequence[MessageQueue]] = [()] * len(block.topics)
    for code in block.topics_of(bound):
        topic = block.topics[code]
        queues[code] = queues_of(topic)
        if not queues[code]:
            raise RouteNotFoundException(
                f"binding rows to queues of topic {topic}: it has no writable queue just now; "
                "check the topic's permissions and that its brokers are up"
            )
    return queues


def _slots_by_hash(block: MessageBlock, bound: Mask, queues: list[Sequence[MessageQueue]]) -> Ints:
    """Bind rows to the queue that Java's hash of their key selects, or as proxies do by their lite topic."""
    slots: Ints = np.zeros(block.rows, np.int64)
    if block.sharding_key is not None:
        sizes = np.array([max(len(topic_queues), 1) for topic_queues in queues])
        hashes = string_hashes(block.sharding_key).astype(np.int64)
        slots = (queue_index(hashes, sizes if block.topic_codes is None else sizes[block.topic_codes]) + 1) * bound
    if block.lite_topic is not None:
        # The driver rejects lite topics for several topics.
        (topic_queues,) = queues
        for row in np.flatnonzero(bound & (block.lite_topic.sizes > 0)).tolist():
            slots[row] = consistent_hash(block.lite_topic.text(row) or "", len(topic_queues)) + 1
    return slots


def _slots_by_choice(
    block: MessageBlock,
    bound: Mask,
    queues: list[Sequence[MessageQueue]],
    batch: pa.RecordBatch,
    custom: CustomSelector,
) -> Ints:
    """Bind rows as a user's selector chooses; it is called once per topic."""
    slots = np.zeros(block.rows, np.int64)
    for code, topic_queues in enumerate(queues):
        of_topic = block.of_topic(code, bound)
        if of_topic.any():
            slots[of_topic] = custom.select(topic_queues, _rows_of(batch, of_topic)) + 1
    return slots


def _rows_of(batch: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    if mask.all():
        return batch
    keep = to_arrow(mask)
    return pa.RecordBatch.from_arrays([filtered(column, keep) for column in batch.columns], batch.schema.names)


def _slots_by_column(
    block: MessageBlock, bound: Mask, queues: list[Sequence[MessageQueue]], broken: list[Violation]
) -> Ints:
    """Bind rows to the queue that they name; the broker's name may be null where the topic has one broker."""
    assert block.queue_ids is not None
    ids = block.queue_ids[0]
    broker_codes, names = block.broker_names or (np.full(block.rows, -1), [])
    slots = np.zeros(block.rows, np.int64)

    def shown(row: int) -> str:
        code = broker_codes[row]
        return f"brokerName {names[code] if code >= 0 else 'null'}, queueId {ids[row]}"

    for code, topic_queues in enumerate(queues):
        rows = np.flatnonzero(block.of_topic(code, bound))
        if len(rows) == 0:
            continue
        brokers = sorted({queue.broker_name for queue in topic_queues})
        # The number of each of the rows' broker names among the topic's brokers; the last one is for null.
        number = {name: position for position, name in enumerate(brokers)}
        of_name = np.array([number.get(name, -1) for name in names] + [0 if len(brokers) == 1 else -1])
        known = np.array([number[queue.broker_name] << 32 | queue.queue_id for queue in topic_queues])
        named = of_name[broker_codes[rows]] << 32 | ids[rows]
        order = np.argsort(known)
        places = order[np.minimum(np.searchsorted(known, named, sorter=order), len(known) - 1)]
        slots[rows] = places + 1
        ids_of = {name: [queue.queue_id for queue in topic_queues if queue.broker_name == name] for name in brokers}
        rule = Rule(
            "the row names a queue that does not exist, or queueId without brokerName",
            f"the topic's writable queues are {', '.join(f'{name}: {_ranges(ids_of[name])}' for name in brokers)}",
            "correct queueId and brokerName (null is allowed if the topic has one broker), or set queueId to null for "
            "any queue",
        )
        broken += violations(rule, rows[known[places] != named], None, shown)
    return slots


def _ranges(ids: Sequence[int]) -> str:
    """Return queue ids as text, ``0..3`` where they are consecutive from 0."""
    whole = sorted(ids)
    return f"0..{whole[-1]}" if len(whole) > 1 and whole == list(range(len(whole))) else ", ".join(map(str, whole))


KeysRequired: TypeAlias = Callable[[Sequence[str]], Mapping[str, "bool | None"]]
"""Returns, by topic, whether its rows need a key; None if that is unknown."""

_NO_KEY: Final = Rule(
    "keys is null or blank",
    "a compaction topic (cleanup.policy=COMPACTION) needs a key in every row",
    "fill the column keys, or write to another topic",
)

_INNER_BATCH: Final = Rule(
    "batchType=inner to a compaction topic",
    "a compaction topic (cleanup.policy=COMPACTION) keeps no inner batches",
    "leave the option batchType out",
)


@dataclass(slots=True)
class KeyCheck:
    """Finds rows without a key whose topics require one (docs/internals/reads.md#compaction-topics).

    With `inner_batches` every row counts as one without a key, because compaction topics drop inner batches. A row
    without a body is valid for a compaction topic: it deletes its key. Brokers accept it only in a batch.
    """

    keys_required: KeysRequired
    inner_batches: bool = False
    _probed: set[str] = field(default_factory=set, init=False)

    def __call__(self, block: MessageBlock) -> MessageBlock:
        """Return the block with a violation for each row that lacks a required key.

        If a topic's configuration is unknown, its first row without a key goes alone. A compaction topic rejects it.
        """
        rule = _INNER_BATCH if self.inner_batches else _NO_KEY
        keyless = rows_without_key(None if self.inner_batches else block.keys, block.rows)
        if any(violation.rule.broken in NO_BODY for violation in block.violations):
            block = self._with_deletions(block, keyless)
        bad = block.bad_rows()
        if bad is not None:
            keyless &= ~bad
        if not keyless.any():
            return block
        violations, single = list(block.violations), block.single
        for topic, rows, required in self._by_topic(block, keyless):
            if required:
                violations.append(Violation(rule, np.flatnonzero(rows)))
            elif required is None and topic not in self._probed:
                self._probed.add(topic)
                single = np.zeros(block.rows, np.bool_) if single is None else single.copy()
                single[rows.argmax()] = True
        return replace(block, violations=tuple(violations), single=single)

    def _by_topic(self, block: MessageBlock, rows: Mask) -> Iterator[tuple[str, Mask, bool | None]]:
        """Yield each topic of `rows`, at least one, with its rows, and whether these need a key."""
        codes = {block.topics[code]: code for code in block.topics_of(rows)}
        required = self.keys_required(list(codes))
        for topic, code in codes.items():
            yield topic, block.of_topic(code, rows), required.get(topic)

    def _with_deletions(self, block: MessageBlock, keyless: Mask) -> MessageBlock:
        """Return the block without the violations of rows that delete the key of a compaction topic."""
        candidates = np.zeros(block.rows, np.bool_)
        for violation in block.violations:
            candidates[violation.rows] |= violation.rule.broken in NO_BODY
        for violation in block.violations:
            # There is no configuration of such a topic.
            candidates[violation.rows] &= violation.rule.broken not in NO_TOPIC
        candidates &= ~keyless
        if block.single is not None:
            candidates &= ~block.single
        if not candidates.any():
            return block
        kept = np.ones(block.rows, np.bool_)
        for _, rows, required in self._by_topic(block, candidates):
            if required:
                kept &= ~rows
        violations: list[Violation] = []
        for violation in block.violations:
            if violation.rule.broken in NO_BODY:
                violation = replace(violation, rows=violation.rows[kept[violation.rows]])
            if len(violation.rows):
                violations.append(violation)
        return replace(block, violations=tuple(violations))
