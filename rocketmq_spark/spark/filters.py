"""Turns the filters that Spark pushes down into narrower offset ranges and a tag expression.

Filters on `topic`, `brokerName`, `queueId`, `queueOffset`, `storeTimestamp` and `tags` can be translated, but not a
timestamp without a time zone. Other filters have no effect here. This is safe, because Spark evaluates every filter
again. Times get a margin of a minute, because a broker's clock may have been set back between two messages.
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

# The method `OffsetResolver.at`.
_FirstOffsets: TypeAlias = "Callable[[Mapping[MessageQueue, int], dict[MessageQueue, int]], dict[MessageQueue, int]]"

# A broker's clock may have been set back between two messages.
_MARGIN_MS: Final = 60_000
_FIELDS: Final = {"topic": "topic", "brokerName": "broker_name", "queueId": "queue_id"}
_LOWER: Final = (EqualTo, GreaterThan, GreaterThanOrEqual)
_UPPER: Final = (EqualTo, LessThan, LessThanOrEqual)
# An expression cannot escape its own characters, and brokers strip blanks from each tag.
_PLAIN_TAG: Final = re.compile(r"[^|*\s\x00-\x20]+")


def narrowed(ranges: Sequence[OffsetRange], filters: Iterable[Filter], at: _FirstOffsets) -> list[OffsetRange]:
    """Return the parts of the ranges that all filters may let through."""
    parts = list(ranges)
    for each in filters:
        column, values = _column(each), _allowed_values(each)
        if column in _FIELDS and values is not None:
            parts = [part for part in parts if getattr(part.queue, _FIELDS[column]) in values]
        elif column == "queueOffset" and _compares_with(each, int):
            parts = [_between(part, *_bounds(each)) for part in parts]
        elif column == "storeTimestamp" and _compares_with(each, datetime.datetime):
            parts = _by_time(parts, each, at)
    return [part for part in parts if part.size > 0]


def tag_expression(filters: Iterable[Filter]) -> str | None:
    """Return the filters' tags as an expression for brokers, None without such a filter."""
    for each in filters:
        values = _allowed_values(each) if _column(each) == "tags" else None
        if values and all(isinstance(value, str) and _PLAIN_TAG.fullmatch(value) for value in values):
            return " || ".join(values)
    return None


def _column(one_filter: Filter) -> str | None:
    attribute: tuple[str, ...] = getattr(one_filter, "attribute", ())
    return attribute[0] if len(attribute) == 1 else None


def _allowed_values(one_filter: Filter) -> tuple[Any, ...] | None:
    """Return the values that a filter allows; None for a filter of another kind."""
    if isinstance(one_filter, In):
        return tuple(one_filter.value)
    return (one_filter.value,) if isinstance(one_filter, EqualTo) else None


def _compares_with(one_filter: Any, kind: type) -> bool:
    return isinstance(one_filter, (*_LOWER, *_UPPER)) and isinstance(one_filter.value, kind)


def _bounds(comparison: Any) -> tuple[int | None, int | None]:
    """Return the first number that a comparison lets through, and the number after the last one."""
    value = comparison.value
    low = value + isinstance(comparison, GreaterThan) if isinstance(comparison, _LOWER) else None
    high = value + isinstance(comparison, (EqualTo, LessThanOrEqual)) if isinstance(comparison, _UPPER) else None
    return low, high


def _between(part: OffsetRange, low: int | None, high: int | None) -> OffsetRange:
    start = part.start if low is None else max(part.start, low)
    end = part.end if high is None else min(part.end, high)
    return replace(part, start=start, end=max(start, end))


def _by_time(parts: list[OffsetRange], comparison: Any, at: _FirstOffsets) -> list[OffsetRange]:
    if comparison.value.tzinfo is None:
        return parts
    low, high = _bounds(replace(comparison, value=int(comparison.value.timestamp() * 1000)))
    latest = {part.queue: part.end for part in parts}
    if low is not None:
        starts = at(dict.fromkeys(latest, max(0, low - _MARGIN_MS)), latest)
        parts = [_between(part, starts.get(part.queue, part.end), None) for part in parts]
    if high is not None:
        ends = at(dict.fromkeys(latest, max(0, high + _MARGIN_MS)), latest)
        parts = [_between(part, None, ends.get(part.queue)) for part in parts]
    return parts
