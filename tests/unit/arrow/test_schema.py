from __future__ import annotations

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.schema import (
    check_grpc,
    check_message_types,
    check_own_type,
    check_schema,
    check_transactional,
)
from rocketmq_spark.errors import SchemaError

EVERY_COLUMN = pa.schema(
    {
        "body": pa.binary(),
        "topic": pa.dictionary(pa.int32(), pa.string()),
        "tags": pa.large_string(),
        "keys": pa.list_(pa.string()),
        "properties": pa.map_(pa.string(), pa.string()),
        "flag": pa.int16(),
        "shardingKey": pa.string_view(),
        "queueId": pa.int32(),
        "brokerName": pa.string(),
        "waitStoreMsgOK": pa.bool_(),
        "delayTimeLevel": pa.int8(),
        "delayMs": pa.int64(),
        "deliverTime": pa.timestamp("us", "UTC"),
        "msgId": pa.string(),
        "offsetMsgId": pa.string(),
        "queueOffset": pa.int64(),
        "bornTimestamp": pa.timestamp("us", "UTC"),
        "storeTimestamp": pa.timestamp("us", "UTC"),
        "bornHost": pa.string(),
        "reconsumeTimes": pa.int32(),
    }
)


def refusal(schema: dict[str, pa.DataType], topic: str | None = "orders", selector: str | None = None) -> str:
    with pytest.raises(SchemaError) as raised:
        check_schema(pa.schema(schema), topic=topic, queue_selector=selector)
    return str(raised.value)


@pytest.mark.parametrize("selector", [None, "hash", "column", "roundRobin", "random", "my.module:Selector"])
def test_every_known_column_does_not_raise(selector: str | None) -> None:
    check_schema(EVERY_COLUMN, topic=None, queue_selector=selector)


@pytest.mark.parametrize("payload", ["body", "value"])
@pytest.mark.parametrize(
    "arrow_type",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int8(), pa.large_binary()),
        pa.null(),
    ],
)
def test_payload_of_any_string_or_binary_type_does_not_raise(payload: str, arrow_type: pa.DataType) -> None:
    check_schema(pa.schema({payload: arrow_type}), topic="orders", queue_selector=None)


def test_void_type_of_any_column_does_not_raise() -> None:
    check_schema(pa.schema(dict.fromkeys(EVERY_COLUMN.names, pa.null())), topic=None, queue_selector="hash")


def test_a_payload_is_needed() -> None:
    text = refusal({"tags": pa.string(), "keys": pa.string()})
    assert text == (
        "no column body (or value) among tags, keys: it is the payload and must be string or binary; "
        "build it from the other columns with to_json(struct(...)) AS body"
    )


def test_error_of_an_empty_schema_mentions_missing_columns() -> None:
    assert "among no columns at all" in refusal({})


def test_body_and_value_columns_together_are_rejected() -> None:
    assert "columns body and value are both present" in refusal({"body": pa.string(), "value": pa.string()})


def test_a_name_twice_is_refused() -> None:
    schema = pa.schema([("body", pa.string()), ("tags", pa.string()), ("tags", pa.string())])
    with pytest.raises(SchemaError, match=r"^column tags occurs more than once: drop or rename all but one$"):
        check_schema(schema, topic="orders", queue_selector=None)


@pytest.mark.parametrize(
    ("name", "near"), [("tag", "tags"), ("key", "keys"), ("storetime", "storeTimestamp"), ("shardKey", "shardingKey")]
)
def test_unknown_column_error_suggests_the_nearest_name(name: str, near: str) -> None:
    text = refusal({"body": pa.string(), name: pa.string()})
    assert text.startswith(f"unknown column {name}: did you mean {near}?; ")
    assert "to_json(struct(...)) AS body" in text


def test_unknown_column_error_lists_known_columns() -> None:
    text = refusal({"body": pa.string(), "amount": pa.float64()})
    assert text.startswith("unknown column amount: known are body, value, topic, tags, keys, properties, flag, ")
    assert "to_json(struct(...)) AS body" in text


@pytest.mark.parametrize(("name", "right"), [("Body", "body"), ("shardingkey", "shardingKey"), ("TOPIC", "topic")])
def test_wrong_case_of_a_column_error_suggests_the_correct_name(name: str, right: str) -> None:
    text = refusal({name: pa.string(), "value": pa.string()})
    assert f"unknown column {name}: column names are case-sensitive, rename it to {right}" in text


@pytest.mark.parametrize(
    ("name", "arrow_type", "allowed", "cast"),
    [
        ("body", pa.int32(), "string or binary", "col('body').cast('string')"),
        ("body", pa.struct({"a": pa.int32()}), "string or binary", "to_json(col('body'))"),
        ("topic", pa.int64(), "string", "col('topic').cast('string')"),
        ("tags", pa.list_(pa.string()), "string", "col('tags').cast('string')"),
        ("keys", pa.list_(pa.int32()), "string or array<string>", ".cast('array<string>')"),
        ("properties", pa.map_(pa.string(), pa.int32()), "map<string,string>", "map<string,string>"),
        ("properties", pa.string(), "map<string,string>", "from_json(col('properties'), 'map<string,string>')"),
        ("flag", pa.string(), "int", "col('flag').cast('int')"),
        ("shardingKey", pa.int64(), "string", "col('shardingKey').cast('string')"),
        ("queueId", pa.float64(), "int", "col('queueId').cast('int')"),
        ("waitStoreMsgOK", pa.string(), "boolean", "cast('boolean')"),
        ("delayMs", pa.string(), "long", "cast('long')"),
        ("deliverTime", pa.int64(), "timestamp with a time zone", "timestamp_millis(deliverTime) if it has millis"),
        ("deliverTime", pa.timestamp("us"), "timestamp with a time zone", "cast('timestamp')"),
        ("deliverTime", pa.date32(), "timestamp with a time zone", "cast('timestamp')"),
    ],
)
def test_unsupported_column_type_error_suggests_a_cast(
    name: str, arrow_type: pa.DataType, allowed: str, cast: str
) -> None:
    text = refusal({"body": pa.string()} | {name: arrow_type})
    assert text.startswith(f"column {name} is {arrow_type}: it must be {allowed}; use ")
    assert cast in text


@pytest.mark.parametrize("name", ["delayMs", "delayTimeLevel"])
@pytest.mark.parametrize("arrow_type", [pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32(), pa.duration("us")])
def test_a_time_as_a_delay_advises_the_column_for_times(name: str, arrow_type: pa.DataType) -> None:
    text = refusal({"body": pa.string()} | {name: arrow_type})
    assert "use the column deliverTime" in text
    assert "cast(" not in text


def test_topic_option_or_column_is_required() -> None:
    # The text is that of Spark's Kafka sink.
    assert refusal({"body": pa.string()}, topic=None) == (
        "topic option required when no 'topic' column is present. Use the topic option for setting a topic."
    )


@pytest.mark.parametrize(("selector", "column"), [("hash", "shardingKey"), ("column", "queueId")])
def test_selector_without_its_column_is_rejected(selector: str, column: str) -> None:
    text = refusal({"body": pa.string(), "brokerName": pa.string()}, selector=selector)
    assert text.startswith(f"queueSelector={selector} needs the column {column}, which is missing: ")


def types_refusal(schema: dict[str, pa.DataType], *message_types: str) -> str:
    with pytest.raises(SchemaError) as raised:
        check_message_types(pa.schema({"body": pa.string(), **schema}), "orders", frozenset(message_types))
    return str(raised.value)


DELAYED = {"delayMs": pa.int64(), "deliverTime": pa.timestamp("us", "UTC")}
KEYED = {"shardingKey": pa.string()}


@pytest.mark.parametrize(
    ("schema", "message_types"),
    [
        ({}, ["NORMAL"]),
        (KEYED, ["FIFO"]),
        (DELAYED, ["DELAY"]),
        ({**KEYED, **DELAYED}, ["NORMAL", "FIFO", "DELAY", "TRANSACTION"]),
        ({}, ["NORMAL", "FIFO"]),
        # An all-null column has no effect on the type of messages, and an unknown type of a later release is not
        # checked.
        (dict.fromkeys((*KEYED, *DELAYED), pa.null()), ["NORMAL"]),
        ({}, ["NORMAL", "LITE"]),
    ],
)
def test_columns_that_a_topic_accepts_do_not_raise(schema: dict[str, pa.DataType], message_types: list[str]) -> None:
    check_message_types(pa.schema({"body": pa.string(), **schema}), "orders", frozenset(message_types))


@pytest.mark.parametrize("schema", [{}, KEYED, DELAYED])
def test_unknown_message_types_of_a_topic_do_not_raise(schema: dict[str, pa.DataType]) -> None:
    check_message_types(pa.schema({"body": pa.string(), **schema}), "orders", frozenset())


@pytest.mark.parametrize(
    ("schema", "accepted", "column", "message_type"),
    [
        (KEYED, "NORMAL", "shardingKey", "FIFO"),
        (KEYED, "DELAY", "shardingKey", "FIFO"),
        (DELAYED, "NORMAL", "delayMs", "DELAY"),
        ({**KEYED, "deliverTime": pa.timestamp("us", "UTC")}, "FIFO", "deliverTime", "DELAY"),
    ],
)
def test_column_with_unsupported_message_type_is_an_error_with_advice(
    schema: dict[str, pa.DataType], accepted: str, column: str, message_type: str
) -> None:
    assert types_refusal(schema, accepted) == (
        f"column {column} makes {message_type} messages, and topic orders accepts messages of the type {accepted} "
        "only: drop the column, or write to a topic made for them "
        f"(rocketmq-spark create-topic NAME --type {message_type}, "
        f"or mqadmin updateTopic -t NAME -a +message.type={message_type})"
    )


@pytest.mark.parametrize(
    ("message_types", "advice"),
    [
        (["FIFO"], "add the column shardingKey, or write to"),
        (["DELAY"], "add the column delayMs or deliverTime, or write to"),
        (["FIFO", "DELAY"], "add the column shardingKey or delayMs or deliverTime, or write to"),
        (["TRANSACTION"], "NORMAL messages: write to"),
    ],
)
def test_plain_rows_are_rejected_for_a_topic_without_normal_messages(message_types: list[str], advice: str) -> None:
    message = types_refusal({}, *message_types)
    assert message.startswith(f"topic orders accepts messages of the type {' and '.join(sorted(message_types))} only")
    assert advice in message
    assert types_refusal(dict.fromkeys(KEYED, pa.null()), *message_types) == message


def test_delay_level_column_is_rejected_over_grpc() -> None:
    with pytest.raises(SchemaError, match=r"column delayTimeLevel: .*use delayMs or deliverTime"):
        check_grpc(pa.schema({"body": pa.string(), "delayTimeLevel": pa.int32()}))
    check_grpc(pa.schema({"body": pa.string(), "delayTimeLevel": pa.null(), "delayMs": pa.int64(), "flag": pa.int32()}))


OWN_TYPES = {"priority": ("PRIORITY", pa.int32()), "liteTopic": ("LITE", pa.string())}


@pytest.mark.parametrize("name", OWN_TYPES)
def test_columns_of_one_topic_type_need_a_topic_of_that_type(name: str) -> None:
    message_type, arrow_type = OWN_TYPES[name]
    schema = pa.schema({"body": pa.string(), name: arrow_type})
    assert f"column {name} needs the option topic" in refusal(
        {"body": pa.string(), "topic": pa.string(), name: arrow_type}, topic=None
    )
    check_schema(schema, topic="orders", queue_selector=None)
    check_own_type(schema, "orders", {"broker-a": message_type, "broker-b": message_type})
    with pytest.raises(
        SchemaError, match=rf"column {name} makes {message_type} .* type NORMAL on broker-b.*--type {message_type}"
    ):
        check_own_type(schema, "orders", {"broker-a": message_type, "broker-b": "NORMAL"})
    with pytest.raises(SchemaError, match=f"column {name}: not available with delivery=exactlyOnce"):
        check_transactional(schema, "exactlyOnce")
    without = pa.schema({"body": pa.string(), "topic": pa.string(), name: pa.null()})
    check_schema(without, topic=None, queue_selector=None)
    check_own_type(without, "orders", {"broker-a": "NORMAL"})
