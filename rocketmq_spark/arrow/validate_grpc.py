"""The rules that rows keep beside the others when a proxy takes them over gRPC (spec/grpc.md 5.8), on whole columns.

Rule 1: a proxy refuses a batch whole and does not say which message is wrong, so each of its rules is checked here.
Rule 2: `rocketmq_spark.arrow.validate` checks that texts are UTF-8. A proxy cannot decode a request with other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rocketmq_spark.arrow.columns import ByteColumn, Ints, ListColumn, Mask
from rocketmq_spark.arrow.properties import Property
from rocketmq_spark.arrow.validate import Rule, Violation, check_blank, elements_with, violations
from rocketmq_spark.message_const import DELAY, SHARDING_KEY, TIMER_DELAY_MS, TIMER_DELIVER_MS
from rocketmq_spark.wire.row_hash import ROW_ID

# userPropertiesSizeLimit and userPropertyMaxNum of a proxy's configuration, as they are by default.
MAX_PROPERTIES: Final = 128
MAX_PROPERTY_BYTES: Final = 16_384
_MAX_GROUP: Final = 63

_SHARDING_KEY: Final = SHARDING_KEY.encode()
_ROW_ID: Final = ROW_ID.encode()
# The properties whose bytes count, and what their columns are called.
_COUNTED: Final[Mapping[bytes, str]] = {
    b"KEYS": "keys",
    b"TAGS": "tags",
    _SHARDING_KEY: "shardingKey",
    _ROW_ID: "SPARK_ROW_ID",
}
_DELAYS: Final = frozenset(name.encode() for name in (DELAY, TIMER_DELAY_MS, TIMER_DELIVER_MS))

_DELETE: Final = 0x7F
# In UTF-8 the control characters U+0080 to U+009F are this byte and one from 0x80 to 0x9F.
_C1_LEAD: Final = 0xC2


def check_for_grpc(
    rows: int, properties: Sequence[Property], entries: ListColumn | None, flags: npt.NDArray[np.int64] | None
) -> Iterator[Violation]:
    """Yield what a proxy would refuse, or could not carry.

    Parameters
    ----------
    rows : int
    properties : sequence of Property
        System properties.
    entries : ListColumn or None
        The user's.
    flags : int64 array or None
    """
    counts: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
    sizes: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
    grouped, delayed = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for one in properties:
        if one.name in _DELAYS:
            delayed |= one.valid if one.valid is not None else np.bool_(True)
        if one.name not in _COUNTED:
            continue
        if one.values is None:
            # The option tags: all that is to be said of it but for its size the driver has said.
            sizes += len(one.literal)
            continue
        if one.name == _SHARDING_KEY:
            grouped = np.ones(rows, np.bool_) if one.valid is None else one.valid
        if one.name != _SHARDING_KEY:
            sizes += one.values.sizes
        if one.name == _ROW_ID:
            counts += 1
            sizes += len(_ROW_ID)
        else:
            yield from _check_system(one.name, one.values)
    if entries is not None and entries.names is not None:
        yield from _check_plain("the name of a property", entries.names, entries)
        yield from _check_plain("the value of a property", entries.values, entries)
        counts += entries.offsets[1:] - entries.offsets[:-1]
        ends = np.concatenate([[0], np.cumsum(entries.names.sizes + entries.values.sizes)])[entries.offsets]
        sizes += ends[1:] - ends[:-1]
    if flags is not None:
        rule = Rule("flag is set", "the gRPC protocol carries none: 0 or null is allowed", "put it into properties")
        yield from _found(rule, np.flatnonzero(flags), lambda row: int(flags[row]))
    rule = Rule(
        "shardingKey is set beside a delay",
        "over gRPC a message has an order or a delay",
        "null one of the two, or write over remoting",
    )
    yield from violations(rule, np.flatnonzero(grouped & delayed))
    rule = Rule("too many properties", f"over gRPC {MAX_PROPERTIES} are allowed", "move some into the body")
    yield from _found(rule, np.flatnonzero(counts > MAX_PROPERTIES), lambda row: f"{counts[row]} properties")
    rule = Rule(
        "properties are too long",
        f"keys, tags and properties have {MAX_PROPERTY_BYTES} bytes together over gRPC",
        "move what is long into the body",
    )
    yield from _found(rule, np.flatnonzero(sizes > MAX_PROPERTY_BYTES), lambda row: f"{sizes[row]} bytes")


def _check_system(name: bytes, values: ByteColumn) -> Iterator[Violation]:
    column = _COUNTED[name]
    yield from _check_plain(column, values)
    if name != b"TAGS":
        yield from check_blank(column, values)
    if name == _SHARDING_KEY:
        rule = Rule(
            "shardingKey is too long",
            f"over gRPC it is the message group, of at most {_MAX_GROUP} bytes",
            "use a shorter key, such as a hash of it",
        )
        yield from _found(rule, np.flatnonzero(values.sizes > _MAX_GROUP), lambda row: f"{values.sizes[row]} bytes")


def _check_plain(name: str, column: ByteColumn, entries: ListColumn | None = None) -> Iterator[Violation]:
    """A text holds no control character (``Character.isISOControl``); parameters as of `check_text`."""
    span = column.span
    if span.min(initial=0xFF) >= 0x20 and span.max(initial=0) < _DELETE:
        return
    hits: Mask = (span < 0x20) | (span == _DELETE)
    hits[:-1] |= (span[:-1] == _C1_LEAD) & (span[1:] >= 0x80) & (span[1:] < 0xA0)
    rule = Rule(
        f"{name} holds a control character",
        "over gRPC none is allowed, line feed and tab included",
        "remove or replace it, or move the text into the body",
    )
    yield from violations(rule, elements_with(column, hits), entries)


def _found(rule: Rule, rows: Ints, found: Callable[[int], object]) -> Iterator[Violation]:
    if len(rows):
        yield Violation(rule, rows, found)
