"""The columns that a write accepts, their types, and the message properties that they make.

The checks read no rows, so the driver can reject a write before any task starts. An unknown column is an error, because
ignoring it would lose data. A write accepts the columns in `READ_ONLY` without sending them, so that a copy of a
topic works. It rejects the column ``unreadable`` of a read. Names are case-sensitive.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from rocketmq_spark.arrow.read_columns import column_names
from rocketmq_spark.errors import SchemaError
from rocketmq_spark.model import properties

DELAY_COLUMNS: Final = ("delayTimeLevel", "delayMs", "deliverTime")

_TEXTS: Final = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BINARIES: Final = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


def _is_one_of(arrow_type: pa.DataType, kinds: Iterable[Callable[[pa.DataType], bool]]) -> bool:
    plain = arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type
    return any(is_kind(plain) for is_kind in kinds)


def is_text(arrow_type: pa.DataType) -> bool:
    """Return whether values of `arrow_type` are UTF-8 text."""
    return _is_one_of(arrow_type, _TEXTS)


def _is_payload(arrow_type: pa.DataType) -> bool:
    return _is_one_of(arrow_type, (*_TEXTS, *_BINARIES))


def _is_keys(arrow_type: pa.DataType) -> bool:
    if is_list(arrow_type):
        return is_text(arrow_type.value_type) or bool(pa.types.is_null(arrow_type.value_type))
    return is_text(arrow_type)


def _is_properties(arrow_type: pa.DataType) -> bool:
    if not pa.types.is_map(arrow_type):
        return False
    item_type = arrow_type.item_type
    return is_text(arrow_type.key_type) and (is_text(item_type) or bool(pa.types.is_null(item_type)))


def is_int(arrow_type: pa.DataType) -> bool:
    """Return whether values of `arrow_type` are whole numbers."""
    return _is_one_of(arrow_type, (pa.types.is_integer,))


def is_list(arrow_type: pa.DataType) -> bool:
    """Return whether values of `arrow_type` are lists."""
    return bool(pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type))


def is_instant(arrow_type: pa.DataType) -> bool:
    """Return whether values of `arrow_type` are points in time."""
    return bool(pa.types.is_timestamp(arrow_type)) and arrow_type.tz is not None


@dataclass(frozen=True, slots=True)
class Column:
    """A column that a write takes."""

    allowed: str  # The type, for an error
    fits: Callable[[pa.DataType], bool]
    cast: str  # How to cast to the type, for an error
    makes: str = ""  # The message property that holds its values
    bounds: tuple[int, int | None] | None = (
        None  # Of whole numbers. None as the upper bound: the broker's limit applies
    )
    advice: str = "use null for no delay"  # For the error about a number out of bounds
    message_type: str = "NORMAL"  # The type of a row's message if the column has a value
    only_own_type: bool = False  # Brokers ignore the property in topics of other types, also over remoting
    not_over_grpc: str = ""  # For the error where gRPC does not support the property


_TEXT: Final = Column("string", is_text, "{name}.cast('string')")
_INT: Final = Column("int", is_int, "{name}.cast('int')")
_LONG: Final = Column("long", is_int, "{name}.cast('long')")
_INSTANT: Final = Column("timestamp with a time zone", is_instant, "{name}.cast('timestamp')")
_PAYLOAD: Final = Column("string or binary", _is_payload, "{name}.cast('string'), or to_json({name}) if it is a struct")

COLUMNS: Final[Mapping[str, Column]] = {
    "body": _PAYLOAD,
    "value": _PAYLOAD,
    "topic": _TEXT,
    "tags": replace(_TEXT, makes=properties.TAGS),
    "keys": Column(
        "string or array<string>", _is_keys, "{name}.cast('string') or .cast('array<string>')", properties.KEYS
    ),
    "properties": Column(
        "map<string,string>",
        _is_properties,
        "{name}.cast('map<string,string>') if it is a map, from_json({name}, 'map<string,string>') if it is JSON text",
    ),
    "flag": replace(_INT, bounds=(-(2**31), 2**31 - 1), advice="use a number of 32 bits"),
    "shardingKey": replace(_TEXT, makes=properties.SHARDING_KEY, message_type="FIFO"),
    "queueId": replace(_INT, bounds=(0, 2**31 - 1), advice="use null for any queue"),
    "brokerName": _TEXT,
    "waitStoreMsgOK": Column("boolean", pa.types.is_boolean, "{name}.cast('boolean')", properties.WAIT),
    "delayTimeLevel": replace(
        _INT,
        makes=properties.DELAY,
        bounds=(1, 18),
        not_over_grpc="over gRPC a message has a time of delivery, and no delay level; use delayMs or deliverTime",
    ),
    "delayMs": replace(
        _LONG, makes=properties.TIMER_DELAY_MS, bounds=(1, properties.MAX_DELAY_MS), message_type="DELAY"
    ),
    "deliverTime": replace(_INSTANT, makes=properties.TIMER_DELIVER_MS, bounds=(1, None), message_type="DELAY"),
    "priority": replace(
        _INT,
        makes=properties.PRIORITY,
        bounds=(0, 2**31 - 1),
        advice="use null for no priority",
        message_type="PRIORITY",
        only_own_type=True,
    ),
    "liteTopic": replace(_TEXT, makes=properties.LITE_TOPIC, message_type="LITE", only_own_type=True),
}

NUMBER_COLUMNS: Final = tuple(name for name, column in COLUMNS.items() if column.makes and column.bounds is not None)
"""The columns of whole numbers that make properties."""

# Columns that brokers ignore in topics of another type.
_OWN_TYPES: Final = {name: column.message_type for name, column in COLUMNS.items() if column.only_own_type}

DELAYS: Final = frozenset(COLUMNS[name].makes for name in DELAY_COLUMNS)

COLUMN_OF: Final[Mapping[str, str]] = {column.makes: name for name, column in COLUMNS.items() if column.makes}
"""The column that makes a property."""

READ_ONLY: Final = tuple(name for name in column_names() if name not in COLUMNS)
"""The columns that only a read returns."""

_KNOWN: Final = (*COLUMNS, *READ_ONLY)

# The types of a column that is part of a row id.
_ID_TYPES: Final = (_is_payload, _is_keys, is_int, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_null)


def reserved_names(columns: Iterable[str], *, row_id: bool) -> frozenset[str]:
    """Return the names that a user property may not have in a write of these columns."""
    made = {COLUMNS[name].makes for name in columns if name in COLUMNS}
    return (
        properties.RESERVED_PROPERTIES | properties.INNER_PROPERTIES | made | ({properties.ROW_ID} if row_id else set())
    ) - {""}


def check_schema(schema: pa.Schema, *, topic: str | None, queue_selector: str | None) -> None:
    """Raise a SchemaError for a schema that a write could not send in full; any column may have the ``null`` type."""
    names = list(schema.names)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SchemaError(f"column {twice[0]} occurs more than once: drop or rename all but one")
    check_columns(names)
    if "body" in names and "value" in names:
        raise SchemaError("columns body and value are both present, and both mean the payload: drop one of them")
    if "body" not in names and "value" not in names:
        raise SchemaError(
            f"no column body (or value) among {', '.join(names) or 'no columns at all'}: it is the payload and must be "
            "string or binary; build it from the other columns with to_json(struct(...)) AS body"
        )
    for field in schema:
        column = COLUMNS.get(field.name)
        if column is not None and not pa.types.is_null(field.type) and not column.fits(field.type):
            raise SchemaError(f"column {field.name} is {field.type}: it must be {column.allowed}; {_remedy(field)}")
    if topic is None and "topic" not in names:
        raise SchemaError(
            "topic option required when no 'topic' column is present. Use the topic option for setting a topic."
        )
    for name in own_types(schema) if topic is None else ():
        raise SchemaError(
            f"column {name} needs the option topic, so that the driver can check the topic's type: write the rows of "
            "each topic separately"
        )
    needed = {"hash": "shardingKey", "column": "queueId"}.get(queue_selector or "")
    if needed is not None and needed not in names:
        raise SchemaError(
            f"queueSelector={queue_selector} needs the column {needed}, which is missing: add it, or choose another "
            "queueSelector"
        )


def _remedy(field: pa.Field) -> str:
    """Return how to make a column of another type one that a write accepts."""
    name, column = field.name, COLUMNS[field.name]
    if name in DELAY_COLUMNS and column.fits is is_int and pa.types.is_temporal(field.type):
        return "for a time of delivery use the column deliverTime, because a cast of a time to a number gives no delay"
    if column.fits is is_instant and is_int(field.type):
        return f"use timestamp_millis({name}) if it has milliseconds since 1970, timestamp_seconds({name}) if seconds"
    cast = column.cast.format(name=f"col('{name}')")
    return f"use {cast}"


def check_columns(names: Iterable[str]) -> None:
    """Raise a SchemaError for the first column that neither a write nor a read has."""
    for name in names:
        if name in _KNOWN:
            continue
        folded = {known.lower(): known for known in _KNOWN}
        near = difflib.get_close_matches(name.lower(), folded, n=1)
        if name.lower() in folded:
            hint = f"column names are case-sensitive, rename it to {folded[name.lower()]}"
        elif near:
            hint = f"did you mean {folded[near[0]]}?"
        else:
            hint = f"known are {', '.join(COLUMNS)} and what a read returns"
        raise SchemaError(
            f"unknown column {name}: {hint}; drop it, or add its data to the payload with to_json(struct(...)) AS body"
        )


def check_grpc(schema: pa.Schema) -> None:
    """Raise a SchemaError for a column whose property gRPC does not support."""
    for name in sorted(_filled(schema) & COLUMNS.keys()):
        column = COLUMNS[name]
        if column.makes and properties.CARRIED[column.makes].grpc is properties.Carried.REFUSED:
            advice = column.not_over_grpc or f"over gRPC no message has {column.makes}; drop it, or write over remoting"
            raise SchemaError(f"column {name}: {advice}")


def check_transactional(schema: pa.Schema, delivery: str) -> None:
    """Raise a SchemaError for a column that a delivery with a decision log does not support."""
    whys = dict.fromkeys(DELAY_COLUMNS, "brokers keep delayed rows in another topic until their time")
    whys |= dict.fromkeys(_OWN_TYPES, "brokers choose the queue of such a row, or copy it to another one")
    whys["waitStoreMsgOK"] = "a row that is not flushed or replicated could be lost after it was counted"
    for name in sorted(_filled(schema) & whys.keys()):
        raise SchemaError(f"column {name}: not available with delivery={delivery}, because {whys[name]}; drop it")


def check_message_types(schema: pa.Schema, topic: str, message_types: Collection[str]) -> None:
    """Raise a SchemaError for columns whose messages `topic` does not accept; empty `message_types` are unknown."""
    if not message_types:
        return
    filled = _filled(schema)
    types = {name: column.message_type for name, column in COLUMNS.items() if column.message_type != "NORMAL"}
    made = {name: message_type for name, message_type in types.items() if name in filled}
    accepted = f"topic {topic} accepts messages of the type {' and '.join(sorted(message_types))} only"
    for name, message_type in made.items():
        if message_type not in message_types:
            raise SchemaError(
                f"column {name} makes {message_type} messages, and {accepted}: drop the column, or write to a topic "
                f"made for them ({_creating(message_type)})"
            )
    if not {"NORMAL", *made.values()} & set(message_types):
        makers = [name for name, message_type in types.items() if message_type in message_types]
        add = f"add the column {' or '.join(makers)}, or " if makers else ""
        raise SchemaError(
            f"{accepted}, and rows of these columns are NORMAL messages: {add}write to a topic made for them "
            f"({_creating('NORMAL')})"
        )


def check_own_type(schema: pa.Schema, topic: str, message_types: Mapping[str, str]) -> None:
    """Raise a SchemaError for a column that the brokers of `topic`, whose type each of them reports, would ignore."""
    for name, message_type in own_types(schema).items():
        for broker_name, of_topic in sorted(message_types.items()):
            if of_topic != message_type:
                raise SchemaError(
                    f"column {name} makes {message_type} messages, and topic {topic} has the type {of_topic} on "
                    f"{broker_name}, which would ignore the column: drop it, or write to a topic made for such "
                    f"messages ({_creating(message_type)})"
                )


def own_types(schema: pa.Schema) -> dict[str, str]:
    """Return the columns that brokers ignore in topics of another type than theirs, with this type."""
    filled = _filled(schema)
    return {name: message_type for name, message_type in _OWN_TYPES.items() if name in filled}


def check_timers(schema: pa.Schema, topic: str, old: Mapping[str, str]) -> None:
    """Raise a SchemaError for a time of delivery that brokers would ignore; `old` are releases before 5.0, by broker.

    Brokers before 5.0 have no timers, and show such a row to consumers at once.
    """
    for name in timers(schema) if old else ():
        broker_name, release = next(iter(old.items()))
        raise SchemaError(
            f"column {name}: broker {broker_name} of topic {topic} has RocketMQ {release}, which ignores times of "
            "delivery and would deliver the rows at once: use delayTimeLevel, or brokers of RocketMQ 5"
        )


def timers(schema: pa.Schema) -> list[str]:
    """Return the columns of times of delivery that may hold a value."""
    return sorted(_filled(schema) & {"delayMs", "deliverTime"})


def check_keys(schema: pa.Schema, topic: str) -> None:
    """Raise a SchemaError if rows for a compaction topic have no column ``keys``, or all of it is null."""
    if "keys" not in _filled(schema):
        raise SchemaError(
            f"column keys is missing, and topic {topic} is a compaction topic (cleanup.policy=COMPACTION). Its brokers "
            "drop rows without a key, and keep the newest row of each key. Add the column, or write to another topic"
        )


def check_row_id(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Raise a SchemaError for a column of ``rowId=columns:...`` that is missing, or is no text, number or time."""
    for name in columns:
        if name not in schema.names:
            text = f"rowId=columns:{','.join(columns)}: there is no column {name} among {schema.names}"
            raise SchemaError(f"{text}; correct this option")
        arrow_type = schema.field(name).type
        if not any(is_kind(arrow_type) for is_kind in _ID_TYPES):
            raise SchemaError(
                f"rowId=columns:{','.join(columns)}: column {name} is {arrow_type}. Use strings, binaries, arrays of "
                "strings, whole numbers, booleans or timestamps"
            )


def _filled(schema: pa.Schema) -> set[str]:
    """Return the columns that may hold a value."""
    return {field.name for field in schema if not pa.types.is_null(field.type)}


def _creating(message_type: str) -> str:
    return (
        f"rocketmq-spark create-topic NAME --type {message_type}, or mqadmin updateTopic -t NAME -a "
        f"+message.type={message_type}"
    )
