"""Spark's filters as narrower ranges of offsets, and as an expression for tags.

A filter that is not understood narrows nothing, and Spark evaluates every filter again. Times have a margin, because a
broker's clock may have been set back between two messages.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.source.ranges import OffsetRange

# Returns, for each queue, the offset of the first message stored at a time (epoch, ms) or later, or None.
_FirstOffsets: TypeAlias = "Callable[[Mapping[MessageQueue, int]], Mapping[MessageQueue, int | None]]"

_MARGIN_MS: Final = 60_000
_FIELDS: Final = {"topic": "topic", "brokerName": "broker_name", "queueId": "queue_id"}
_LOWER: Final = (EqualTo, GreaterThan, GreaterThanOrEqual)
_UPPER: Final = (EqualTo, LessThan, LessThanOrEqual)
# An expression cannot escape its own characters, and brokers strip blanks from each tag.
_PLAIN_TAG: Final = re.compile(r"[^|*\s\x00-\x20]+")


def narrowed(ranges: Sequence[OffsetRange], filters: Iterable[Filter], at: _FirstOffsets) -> list[OffsetRange]:
    """Return the parts of the ranges that all filters may let through."""
    found = list(ranges)
    for one in filters:
        column, values = _column(one), _one_of(one)
        if column in _FIELDS and values is not None:
            found = [part for part in found if getattr(part.queue, _FIELDS[column]) in values]
        elif column == "queueOffset" and _compares_with(one, int):
            found = [_between(part, *_bounds(one)) for part in found]
        elif column == "storeTimestamp" and _compares_with(one, datetime.datetime):
            found = _by_time(found, one, at)
    return [part for part in found if part.size > 0]


def tag_expression(filters: Iterable[Filter]) -> str | None:
    """Return the filters' tags as an expression for brokers, None without such a filter."""
    for one in filters:
        values = _one_of(one) if _column(one) == "tags" else None
        if values and all(isinstance(value, str) and _PLAIN_TAG.fullmatch(value) for value in values):
            return " || ".join(values)
    return None


def _column(one: Filter) -> str | None:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    return attribute[0] if len(attribute) == 1 else None


def _one_of(one: Filter) -> tuple[Any, ...] | None:
    """Return the values that a filter allows; None for a filter of another kind."""
    if isinstance(one, In):
        return tuple(one.value)
    return (one.value,) if isinstance(one, EqualTo) else None


def _compares_with(one: Any, kind: type) -> bool:
    return isinstance(one, (*_LOWER, *_UPPER)) and isinstance(one.value, kind)


def _bounds(one: Any) -> tuple[int | None, int | None]:
    """Return the first number that a comparison lets through, and the number after the last one."""
    low = one.value + isinstance(one, GreaterThan) if isinstance(one, _LOWER) else None
    high = one.value + isinstance(one, (EqualTo, LessThanOrEqual)) if isinstance(one, _UPPER) else None
    return low, high


def _between(part: OffsetRange, low: int | None, high: int | None) -> OffsetRange:
    start = part.start if low is None else max(part.start, low)
    end = part.end if high is None else min(part.end, high)
    return replace(part, start=start, end=max(start, end))


def _by_time(parts: Sequence[OffsetRange], one: Any, at: _FirstOffsets) -> list[OffsetRange]:
    if one.value.tzinfo is None:
        return list(parts)
    low, high = _bounds(replace(one, value=int(one.value.timestamp() * 1000)))
    queues = [part.queue for part in parts]
    found = list(parts)
    if low is not None:
        starts = at(dict.fromkeys(queues, max(0, low - _MARGIN_MS)))
        found = [_between(part, part.end if (start := starts[part.queue]) is None else start, None) for part in found]
    if high is not None:
        ends = at(dict.fromkeys(queues, max(0, high + _MARGIN_MS)))
        found = [_between(part, None, ends[part.queue]) for part in found]
    return found
