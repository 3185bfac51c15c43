"""Checks the rows of a write over gRPC by the limits of a proxy (docs/internals/grpc-messages.md#limits)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, ListColumn, Mask
from rocketmq_spark.arrow.model import Property, Rule, Violation
from rocketmq_spark.arrow.schema import COLUMN_OF, DELAYS
from rocketmq_spark.arrow.validate import PROPERTY_NAME, check_blank, check_sizes, elements_with, violations
from rocketmq_spark.model.properties import CARRIED, ROW_ID, SHARDING_KEY, TAGS, Carried

# userPropertiesSizeLimit and userPropertyMaxNum of a proxy's configuration, as they are by default.
MAX_PROPERTIES: Final = 128
MAX_PROPERTY_BYTES: Final = 16_384
_MAX_GROUP: Final = 63

# In UTF-8 the control characters U+0080 to U+009F are this byte and one from 0x80 to 0x9F.
_C1_LEAD: Final = 0xC2
_SPACE: Final = 0x20
_DELETE: Final = 0x7F


def check_for_grpc(
    rows: int, properties: Sequence[Property], entries: ListColumn | None, flags: npt.NDArray[np.int64] | None
) -> Iterator[Violation]:
    """Check system `properties`, the user's `entries` and flags by docs/internals/grpc-messages.md#limits."""
    counts, sizes = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    grouped, delayed = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for prop in properties:
        name = prop.name
        if name in DELAYS:
            delayed |= prop.present(rows)
        elif prop.values is None:
            # The driver has checked the option tags.
            sizes += prop.present(rows) * len(prop.literal)
        elif name == ROW_ID:
            counts += 1
            # The separators of a property string do not count.
            sizes += prop.sizes(rows) - 2
        else:
            values = prop.column(rows)
            if name == SHARDING_KEY:
                grouped = prop.present(rows)
            else:
                sizes += values.sizes
            if CARRIED[name].grpc is Carried.PROPERTY:
                counts += prop.present(rows)
                sizes += prop.present(rows) * len(name)
            column = COLUMN_OF.get(name, name)
            yield from _check_plain(column, values)
            if name != TAGS:
                yield from check_blank(column, values)
            if name == SHARDING_KEY:
                rule = Rule(
                    "shardingKey is too long",
                    f"over gRPC it is the message group, of at most {_MAX_GROUP} bytes",
                    "use a shorter key, such as a hash of it",
                )
                yield from check_sizes(rule, values.sizes, _MAX_GROUP)
    if entries is not None and entries.names is not None:
        yield from _check_plain(PROPERTY_NAME, entries.names, entries)
        yield from _check_plain("the value of a property", entries.values, entries)
        counts += entries.counts
        ends = np.concatenate([[0], np.cumsum(entries.names.sizes + entries.values.sizes)])[entries.offsets]
        sizes += ends[1:] - ends[:-1]
    if flags is not None:
        rule = Rule("flag is set", "gRPC messages have no flag: only 0 or null is allowed", "put it into properties")
        yield from violations(rule, np.flatnonzero(flags), None, lambda row: int(flags[row]))
    rule = Rule(
        "shardingKey is set beside a delay",
        "over gRPC a message cannot have both",
        "set one of the two to null, or write over remoting",
    )
    yield from violations(rule, np.flatnonzero(grouped & delayed))
    rule = Rule("too many properties", f"over gRPC {MAX_PROPERTIES} are allowed", "move some into the body")
    yield from check_sizes(rule, counts, MAX_PROPERTIES, "properties")
    rule = Rule(
        "properties are too long",
        f"over gRPC keys, tags and properties may have {MAX_PROPERTY_BYTES} bytes together",
        "move long values into the body",
    )
    yield from check_sizes(rule, sizes, MAX_PROPERTY_BYTES)


def _check_plain(name: str, column: ByteColumn, entries: ListColumn | None = None) -> Iterator[Violation]:
    """Check that texts hold no control character (``Character.isISOControl``)."""
    span = column.span
    if span.min(initial=0xFF) >= _SPACE and span.max(initial=0) < _DELETE:
        return
    hits: Mask = (span < _SPACE) | (span == _DELETE)
    hits[:-1] |= (span[:-1] == _C1_LEAD) & (span[1:] >= 0x80) & (span[1:] < 0xA0)
    rule = Rule(
        f"{name} holds a control character",
        "over gRPC none is allowed, line feed and tab included",
        "remove or replace it, or move the text into the body",
    )
    yield from violations(rule, elements_with(column, hits), entries)
