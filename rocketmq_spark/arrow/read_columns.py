"""The columns of a read: names, types, when they are null, and their values in a stored message.

Spark's schema, that of `read_arrow` and the decoder use this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.properties import ATTEMPT, KEYS, TAGS, UNIQ_KEY
from rocketmq_spark.protocol.remoting.unwrap import Unreadable

US_PER_MS: Final = 1000
# A sender can set any time. Milliseconds beyond this do not fit a timestamp and become null.
LAST_TIME: Final = (2**63 - 1) // US_PER_MS


class _Type(NamedTuple):
    arrow: pa.DataType
    spark: str


_TEXT: Final = _Type(pa.string(), "string")
_BYTES: Final = _Type(pa.binary(), "binary")
_INT: Final = _Type(pa.int32(), "int")
_LONG: Final = _Type(pa.int64(), "bigint")
_TIME: Final = _Type(pa.timestamp("us", "UTC"), "timestamp")
_MAP: Final = _Type(pa.map_(pa.string(), pa.string()), "map<string,string>")


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """A column; `value` returns properties and times in the form that Arrow's constructor accepts."""

    name: str
    type: _Type
    value: Callable[[MessageQueue, MessageExt], Any]
    # The value for a message that cannot be read. None: `value` of its decoded part, or null if that lacks it.
    of_unreadable: Callable[[MessageQueue, Unreadable], Any] | None = None
    nullable: bool = False  # A message may lack it, or have a value that does not fit
    property: str = ""  # The message property that has the value


def _instant(time: int) -> int | None:
    return time * US_PER_MS if abs(time) <= LAST_TIME else None


def _of_property(column: str, name: str) -> ReadColumn:
    return ReadColumn(column, _TEXT, lambda _, message: message.properties.get(name), nullable=True, property=name)


# The column with the ``SPARK_ATTEMPT``, by which an effectively-once write finds its stored rows.
ATTEMPTS: Final = "attempt"
# The column that says why a message is unreadable, null in all other rows (``onUnreadable=raw``).
UNREADABLE: Final = "unreadable"

_COLUMNS: Final = (
    ReadColumn("topic", _TEXT, lambda queue, _: queue.topic, lambda queue, _: queue.topic),
    ReadColumn("body", _BYTES, lambda _, message: message.body, lambda _, message: message.body),
    _of_property("tags", TAGS),
    _of_property("keys", KEYS),
    ReadColumn("properties", _MAP, lambda _, message: list(message.properties.items())),
    ReadColumn("flag", _INT, lambda _, message: message.flag),
    ReadColumn("brokerName", _TEXT, lambda queue, _: queue.broker_name, lambda queue, _: queue.broker_name),
    ReadColumn("queueId", _INT, lambda queue, _: queue.queue_id, lambda queue, _: queue.queue_id),
    ReadColumn("queueOffset", _LONG, lambda _, message: message.queue_offset, lambda _, message: message.start),
    # As MessageClientExt.getMsgId
    ReadColumn("msgId", _TEXT, lambda _, message: message.unique_id or message.offset_msg_id, property=UNIQ_KEY),
    ReadColumn("offsetMsgId", _TEXT, lambda _, message: message.offset_msg_id),
    ReadColumn("bornTimestamp", _TIME, lambda _, message: _instant(message.born_timestamp), nullable=True),
    ReadColumn("storeTimestamp", _TIME, lambda _, message: _instant(message.store_timestamp), nullable=True),
    ReadColumn("bornHost", _TEXT, lambda _, message: message.born_host),
    ReadColumn("reconsumeTimes", _INT, lambda _, message: message.reconsume_times),
)
_SPECIAL: Final = (
    _of_property(ATTEMPTS, ATTEMPT),
    ReadColumn(UNREADABLE, _TEXT, lambda *_: None, lambda _, message: message.explanation, nullable=True),
)

COLUMNS_BY_NAME: Final[Mapping[str, ReadColumn]] = {column.name: column for column in (*_COLUMNS, *_SPECIAL)}

FROM_PROPERTIES: Final = frozenset(
    name for name, column in COLUMNS_BY_NAME.items() if column.property or name == "properties"
)
"""The columns that need the properties of a message."""


def column_names(*, raw: bool = False, properties: bool = True) -> list[str]:
    """Return the columns of a read, with `raw` also ``unreadable``."""
    names = [column.name for column in _COLUMNS if properties or column.name != "properties"]
    return [*names, UNREADABLE] if raw else names


def arrow_schema_of(names: Iterable[str]) -> pa.Schema:
    """Return the schema of these columns."""
    return pa.schema([(name, COLUMNS_BY_NAME[name].type.arrow) for name in names])


def spark_schema_of(names: Iterable[str]) -> str:
    """Return the schema of these columns as Spark's DDL text."""
    return ", ".join(f"{name} {COLUMNS_BY_NAME[name].type.spark}" for name in names)
