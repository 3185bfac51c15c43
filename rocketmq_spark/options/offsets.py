"""Parses the offsets of queues that options, checkpoints of streams and receipts of writes have as JSON.

    offsets    {"topic": {"broker": {"0": 23, "1": -2}}}       -2 is the earliest offset, -1 the latest
    a stream   {"topic": {"broker": {"0": 23, "1": [0, 7],     queue 1 is new in this micro-batch, which reads 0 to 6
                 "storeTimestamp": {"0": 1764230400123}}}}     when message 22 of queue 0 was stored
    queues     {"topic": {"broker": [0, 1]}}
    a receipt  {"broker": {"rows": 5, "queues": {"topic": {"0": {"first_offset": 3, "last_offset": 7}}}}}

`nested` makes the JSON of offsets and streams. A receipt is `WriteSummary.to_dict` as JSON; its other entries are
ignored. A text of another shape raises an error that says where it is wrong. So does a name that occurs twice in an
object, because Python's parser would silently use the last value.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, TypeVar

from rocketmq_spark.model.message import MessageQueue

EARLIEST: Final = -2
LATEST: Final = -1
COMMITTED: Final = "committed"

_MAX_LONG: Final = 2**63 - 1
_MAX_QUEUE_ID: Final = 2**31 - 1
_MOST_DIGITS: Final = 40
_SHOWN: Final = 60
_NO_OFFSETS: Final = (
    "receipts of writes over gRPC have no offsets, because proxies do not report them. Give startingTimestamp instead"
)
_INCOMPLETE: Final = (
    "rows were stored over gRPC, with sendMode=oneway or delivery=exactlyOnce, or by another driver of the same write, "
    "and their offsets are unknown. Give the receipt of one write (metrics.to_dict(write_id)), or startingTimestamp "
    "instead"
)

WORDS: Final = ("earliest", "latest")
# The key beside the queues of a stream; see `nested`.
_STORED: Final = "storeTimestamp"

_Leaf = TypeVar("_Leaf")


@dataclass(frozen=True, slots=True)
class OffsetSpec:
    """Where a read begins or ends (exclusive): one word for all queues, or offsets."""

    word: str | None = None
    offsets: tuple[tuple[MessageQueue, int], ...] = ()  # Sorted. `EARLIEST` and `LATEST` are allowed
    receipt: bool = False  # The read includes no other queue

    def offset_of(self, queue: MessageQueue) -> int | None:
        """Return the offset of a queue, or None."""
        place = bisect_left(self.offsets, queue, key=itemgetter(0))
        entry = self.offsets[place : place + 1]
        return entry[0][1] if entry and entry[0][0] == queue else None

    def __str__(self) -> str:
        return self.word or json.dumps(nested(dict(self.offsets)))


# Functions that parse raise a ValueError with the cause and the place in the JSON.
def parse_start(text: str) -> OffsetSpec:
    """Return where a read begins: one of the words, offsets, or the first offsets of a receipt."""
    return _spec(text, (*WORDS, COMMITTED), lambda span: span[0])


def parse_end(text: str) -> OffsetSpec:
    """Return where a read ends, as `parse_start` without ``committed``; a receipt ends after its last offsets."""
    return _spec(text, WORDS, lambda span: span[1] + 1)


def parse_numbers(text: str, lowest: int) -> dict[MessageQueue, int]:
    """Return a number, such as a time, for each queue from a text of the shape of offsets."""
    return _leaves(_load(text), lambda value, where: _integer(value, where, lowest, _MAX_LONG))


def parse_queues(text: str) -> frozenset[MessageQueue]:
    """Return the queues that a text names."""
    queues = []
    for topic, broker, ids, where in _brokers(_load(text)):
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{where}: {_shown(ids)} is not a non-empty list of queue ids, as in [0, 1]")
        for queue_id in ids:
            queues.append(MessageQueue(topic, broker, _integer(queue_id, where, 0, _MAX_QUEUE_ID)))
        if len(set(ids)) < len(ids):
            raise ValueError(f"{where}: {_shown(ids)} contains a queue id twice")
    return frozenset(queues)


def nested(
    offsets: Mapping[MessageQueue, int],
    beginnings: Mapping[MessageQueue, int] | None = None,
    stored: Mapping[MessageQueue, int] | None = None,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return offsets as JSON, sorted by topic, broker and the queue id's text.

    `beginnings` has the first offsets of queues that are new in a stream. `stored` has the time (epoch, ms) at which a
    broker stored the message before the offset.
    """
    tree: dict[str, dict[str, dict[str, Any]]] = {}
    for queue in sorted(offsets):
        by_queue = tree.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})
        end = offsets[queue]
        begin = None if beginnings is None else beginnings.get(queue)
        # A slave that is behind reports an end before the beginning.
        by_queue[str(queue.queue_id)] = end if begin is None else [min(begin, end), end]
    for queue in sorted(stored or {}):
        tree[queue.topic][queue.broker_name].setdefault(_STORED, {})[str(queue.queue_id)] = (stored or {})[queue]
    return tree


def flat(offsets: Mapping[str, Any]) -> dict[MessageQueue, int]:
    """Return the `offsets` that `nested` wrote. No offset may be negative; the JSON may be empty."""
    return {queue: end for queue, (_, end) in _of_stream(offsets).items()}


def beginnings_in(offsets: Mapping[str, Any]) -> dict[MessageQueue, int]:
    """Return the `beginnings` that `nested` wrote."""
    return {queue: begin for queue, (begin, _) in _of_stream(offsets).items() if begin is not None}


def stored_in(offsets: Mapping[str, Any]) -> dict[MessageQueue, int]:
    """Return the times that `nested` wrote as `stored`; a time of a queue without an offset is an error."""
    times = {}
    for topic, broker, by_queue, where in _brokers(offsets) if offsets else ():
        queues = dict(_object(by_queue, where, "queue id"))
        below = queues.get(_STORED)
        if below is not None:
            times.update(_leaves({topic: {broker: below}}, lambda value, at: _integer(value, at, 0, _MAX_LONG)))
            if alone := [text for text in below if text not in queues]:
                raise ValueError(f"{where}: queue {alone[0]} is in {_STORED} and has no offset: add it, or remove both")
    return times


def _of_stream(offsets: Mapping[str, Any]) -> dict[MessageQueue, tuple[int | None, int]]:
    return {} if offsets == {} else _leaves(offsets, _begin_and_end, of_stream=True)


def _spec(text: str, words: tuple[str, ...], chosen: Callable[[tuple[int, int]], int]) -> OffsetSpec:
    word = text.strip().lower()
    if word in words:
        return OffsetSpec(word)
    if not word.startswith("{"):
        raise ValueError(f"it is neither {', '.join(words)} nor a JSON object")
    tree = _load(text)
    if not tree:
        raise ValueError("it has no offsets; neither has the receipt of a write without rows")
    receipt = _is_receipt(tree)
    if receipt:
        offsets = {queue: chosen(span) for queue, span in receipt_spans(tree).items()}
    else:
        # An offset of a stream, copied from its progress or checkpoint, is also allowed.
        offsets = _leaves(tree, lambda value, where: _begin_and_end(value, where, EARLIEST)[1], of_stream=True)
    return OffsetSpec(None, tuple(sorted(offsets.items())), receipt)


def _is_receipt(tree: Mapping[str, Any]) -> bool:
    # Offsets of a broker named "queues" have numbers where a receipt has objects.
    queues = [broker.get("queues") for broker in tree.values() if isinstance(broker, dict)]
    return any(isinstance(held, dict) and all(isinstance(topic, dict) for topic in held.values()) for held in queues)


def receipt_spans(tree: Mapping[str, Any]) -> dict[MessageQueue, tuple[int, int]]:
    """Return the first and last offset of each queue in a receipt; a missing one is an error."""
    spans = {}
    for broker, held in tree.items():
        queues = held.get("queues") if isinstance(held, dict) else None
        if not broker or not isinstance(queues, dict):
            raise ValueError(f'broker {broker!r} has no object "queues". Give the receipt of a write unchanged')
        if not queues and held.get("rows"):
            raise ValueError(f"broker {broker!r} has rows but no queues: {_NO_OFFSETS}")
        # A receipt has brokers first, then topics; offsets have topics first.
        for topic, by_queue in queues.items():
            spans.update(_leaves({topic: {broker: by_queue}}, _span))
    if not spans:
        raise ValueError("the receipt has no queues: no row was acknowledged with an offset")
    if any(held.get("incomplete") for held in tree.values()):
        raise ValueError(f"the receipt is incomplete: {_INCOMPLETE}")
    return spans


def _span(value: Any, where: str) -> tuple[int, int]:
    if not isinstance(value, dict):
        raise ValueError(f'{where}: {_shown(value)} is not an object with "first_offset" and "last_offset"')
    names = ("first_offset", "last_offset")
    for name in names:
        if name not in value:
            raise ValueError(f"{where}: {name} is missing")
        if value[name] is None:
            raise ValueError(f"{where}: {name} is unknown (null): {_NO_OFFSETS}")
    # The read ends one after the last offset, which must therefore be below the maximum.
    first, last = (_integer(value[name], where, 0, _MAX_LONG - 1) for name in names)
    if first > last:
        raise ValueError(f"{where}: first_offset {first} is above last_offset {last}")
    return first, last


def _leaves(tree: Any, leaf: Callable[[Any, str], _Leaf], *, of_stream: bool = False) -> dict[MessageQueue, _Leaf]:
    leaves = {}
    for topic, broker, by_queue, where in _brokers(tree):
        for text, value in _object(by_queue, where, "queue id"):
            if of_stream and text == _STORED:
                continue
            # Leading zeros are not allowed, so that each queue has a single text.
            if not re.fullmatch("0|[1-9][0-9]{0,9}", text) or int(text) > _MAX_QUEUE_ID:
                raise ValueError(f"{where}: {text!r} is not a queue id, which is a quoted number from 0")
            leaves[MessageQueue(topic, broker, int(text))] = leaf(value, f"{where}, queue {text}")
    return leaves


def _begin_and_end(value: Any, where: str, lowest: int = 0) -> tuple[int | None, int]:
    """Return the begin and end of a queue in a stream's offset; only a queue that is new there has a begin."""
    if not isinstance(value, list):
        return None, _integer(value, where, lowest, _MAX_LONG)
    if len(value) != 2:
        raise ValueError(f"{where}: {_shown(value)} must be one offset, or a list of two: [begin, end]")
    begin, end = (_integer(offset, where, 0, _MAX_LONG) for offset in value)
    if begin > end:
        raise ValueError(f"{where}: in {_shown(value)} begin must not be above end")
    return begin, end


def _brokers(tree: Any) -> Iterator[tuple[str, str, Any, str]]:
    """Yield each topic, broker, the value below them, and the name of the place for errors."""
    for topic, brokers in _object(tree, "the JSON", "topic"):
        for broker, below in _object(brokers, f"topic {topic!r}", "broker"):
            yield topic, broker, below, f"topic {topic!r}, broker {broker!r}"


def _object(value: Any, where: str, holds: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where}: {_shown(value)} is not an object with a {holds} as key, as in {{{json.dumps(holds)}: ...}}"
        )
    if not value:
        raise ValueError(f"{where}: the object is empty; give at least one {holds}")
    for name in value:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: {name!r} is not the name of a {holds}")
    return list(value.items())


def _integer(value: Any, where: str, lowest: int, highest: int) -> int:
    # bool is an int to Python.
    if type(value) is not int:
        raise ValueError(f"{where}: {_shown(value)} is not an integer")
    if not lowest <= value <= highest:
        raise ValueError(f"{where}: {_shown(value)} is not from {lowest} to {highest}")
    return value


def _load(text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_number)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is not valid JSON: {exc}") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{_shown(tree)} is not a JSON object")
    return tree


def _number(digits: str) -> int:
    # int() also has a limit, but its error text is about Python.
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"the number {digits[:_MOST_DIGITS]}... has {len(digits)} digits, allowed are {_MOST_DIGITS}")
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} occurs twice in one object")
        result[name] = value
    return result


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
