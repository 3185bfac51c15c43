"""Requests encoded from columns equal those of message objects; errors name rows that a proxy would reject."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.arrow.batcher import GrpcBatcher
from rocketmq_spark.arrow.encoders import MessageIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.arrow.invalid_rows import InvalidRows
from rocketmq_spark.errors import InvalidRowError
from rocketmq_spark.model.message import EncodedBatch, Encoding, MessageQueue
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.batches import lone_message, split_batch
from rocketmq_spark.protocol.compression import CompressionType, compress
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2
from rocketmq_spark.protocol.remoting.records import decode_properties
from tests.support.encoding import batch_options

EPOCH_OFFSET = 1_700_000_000.25
NOW = 50.5
BORN_MS = 1_700_000_050_750

# Without control characters, and not blank.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60).filter(
    lambda text: any(character > " " for character in text)
)
bodies = st.binary(min_size=1, max_size=40) | st.sampled_from([127, 128, 16_383, 16_384]).map(lambda size: b"b" * size)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


rows = st.fixed_dictionaries(
    {
        "body": bodies,
        "topic": st.sampled_from(["orders", "invoices_of_a_long_name", "t"]),
        # Tags with a blank at an end are invalid.
        "tags": optional(texts.filter(lambda text: "|" not in text and text[0] > " " and text[-1] > " ")),
        "keys": optional(texts),
        "properties": optional(st.dictionaries(texts.map(lambda text: "p" + text), texts, max_size=4)),
    }
)


def new_ids(wall_clock: Any = lambda: 1_700_000_000.0) -> MessageIds:
    return MessageIds(pid=0x12345, wall_clock=wall_clock, rng=random.Random(4))


def new_batcher(batch_settings: SinkOptions, **more: Any) -> GrpcBatcher:
    arguments: dict[str, Any] = {
        "partition_id": 3,
        "queues_of": lambda topic: [MessageQueue(topic, "proxy:8081", 0)],
        "unique_ids": new_ids(),
        "born_host": "worker-1",
        "epoch_offset": EPOCH_OFFSET,
    }
    return GrpcBatcher(batch_settings, **(arguments | more))


def table_of(some: Sequence[dict[str, Any]], *without: str) -> pa.RecordBatch:
    types = {
        "body": pa.binary(),
        "topic": pa.string(),
        "tags": pa.string(),
        "keys": pa.string(),
        "shardingKey": pa.string(),
        "liteTopic": pa.string(),
        "flag": pa.int32(),
        "properties": pa.map_(pa.string(), pa.string()),
    }
    names = [name for name in types if name not in without and any(name in row for row in some)]
    return pa.record_batch(
        {
            name: pa.array(
                [list(v.items()) if isinstance(v := row.get(name), dict) else v for row in some], types[name]
            )
            for name in names
        }
    )


def encode(batch: pa.RecordBatch, batch_settings: SinkOptions, **more: Any) -> list[EncodedBatch]:
    batcher = new_batcher(batch_settings, **more)
    return [one for one, _ in [*batcher.add(batch, NOW), *batcher.flush()]]


def parsed(batch: EncodedBatch) -> list[pb.Message]:
    assert (batch.batch, batch.encoding) == (True, Encoding.GRPC)
    assert batch.nbytes == len(b"".join(batch.body))
    messages = list(service_pb2.SendMessageRequest.FromString(b"".join(batch.body)).messages)
    assert len(messages) == batch.rows
    return messages


def plain(row: dict[str, Any], topic: str, message_id: str, namespace: str = "") -> pb.Message:
    """Return a row as a message object, field by field."""
    message = pb.Message(topic=pb.Resource(name=topic, resource_namespace=namespace), body=row["body"])
    message.user_properties.update(row.get("properties") or {})
    system = message.system_properties
    if row.get("tags"):
        system.tag = row["tags"]
    if row.get("keys"):
        system.keys.append(row["keys"])
    system.message_id = message_id
    system.body_encoding = pb.IDENTITY
    system.message_type = pb.NORMAL
    system.born_timestamp.FromMilliseconds(BORN_MS)
    system.born_host = "worker-1"
    return message


def ids_of(count: int) -> list[str]:
    ids = new_ids()
    first = ids.reserve(count)
    return [f"{ids.prefix.hex().upper()}{first + row:016X}" for row in range(count)]


@settings(max_examples=150)
@given(
    st.lists(rows, min_size=1, max_size=12), st.booleans(), st.sampled_from(["", "ns"]), st.sampled_from([1024, 65536])
)
def test_columnar_requests_equal_requests_of_single_messages(
    some: list[dict[str, Any]], by_column: bool, namespace: str, batch_bytes: int
) -> None:
    batch_settings = batch_options(topic=None if by_column else "orders", batch_bytes=batch_bytes)
    done = encode(table_of(some), batch_settings, namespace=namespace)
    found = {message.system_properties.message_id: message for one in done for message in parsed(one)}
    wanted = [
        plain(row, row["topic"] if by_column else "orders", message_id, namespace)
        for row, message_id in zip(some, ids_of(len(some)), strict=True)
    ]
    assert [found[message.system_properties.message_id] for message in wanted] == wanted
    assert len(found) == len(some)
    for one in done:
        assert one.born_timestamp == BORN_MS
        assert {message.topic.name for message in parsed(one)} == {one.topic}
        assert one.nbytes <= batch_bytes or one.rows == 1
        if one.rows == 1:
            [system] = [message.system_properties for message in parsed(one)]
            lone = lone_message(one)
            assert lone is not None
            assert (lone.unique_id, lone.tags or "") == (system.message_id, system.tag)
            keys: list[str | None] = [*system.keys]
            assert [lone.keys] == (keys or [None])


@pytest.mark.parametrize("without", [(), ("tags",), ("keys",), ("properties",), ("tags", "keys", "properties")])
def test_rows_keep_their_order_and_columns_may_be_missing(without: tuple[str, ...]) -> None:
    some = [
        {"body": b"%d" % number, "tags": "t" * (number % 3) or None, "keys": f"k{number}", "properties": {"a": "1"}}
        for number in range(5000)
    ]
    done = encode(table_of(some, *without), batch_options(topic="orders", batch_bytes=50_000))
    messages = [message for one in done for message in parsed(one)]
    kept = [{name: value for name, value in row.items() if name not in without} for row in some]
    assert messages == [plain(row, "orders", i) for row, i in zip(kept, ids_of(len(some)), strict=True)]
    assert len(done) > 5


def test_option_tags_is_the_default_for_null_tags() -> None:
    done = encode(
        table_of([{"body": b"1", "tags": None}, {"body": b"2", "tags": "own"}]),
        batch_options(topic="o", tags="default"),
    )
    assert [m.system_properties.tag for one in done for m in parsed(one)] == ["default", "own"]
    done = encode(table_of([{"body": b"1"}]), batch_options(topic="o", tags="default"))
    assert [m.system_properties.tag for one in done for m in parsed(one)] == ["default"]


def test_compressed_bodies_go_in_separate_batches_marked_as_gzip() -> None:
    some = [{"body": b"z" * 5000}, {"body": b"short"}, {"body": b"y" * 9000}]
    done = encode(table_of(some), batch_options(topic="o", compress_type=CompressionType.ZLIB))
    by_flag = {one.sys_flag: parsed(one) for one in done}
    zlib_flag = CompressionType.ZLIB.sys_flag
    assert {flag: [m.system_properties.body_encoding for m in messages] for flag, messages in by_flag.items()} == {
        0: [pb.IDENTITY],
        zlib_flag: [pb.GZIP, pb.GZIP],
    }
    assert [m.body for m in by_flag[zlib_flag]] == [
        compress(some[row]["body"], CompressionType.ZLIB, 5) for row in (0, 2)
    ]


def test_row_ids_are_user_properties_and_equal_those_of_remoting() -> None:
    row = {"body": b"1", "keys": "k", "properties": {"a": "1"}}
    ids = RowIds("write", 7, 3, None)
    [one] = encode(table_of([row]), batch_options(topic="o"), row_ids=ids)
    [message] = parsed(one)
    from rocketmq_spark.protocol.remoting.records import decode_batch
    from tests.support.encoding import encode as encode_for_brokers
    from tests.support.encoding import joined

    [(batch, _)] = encode_for_brokers([table_of([row])], batch_options(topic="o"), row_ids=RowIds("write", 7, 3, None))
    [stored] = decode_batch(joined(batch), "o")
    assert dict(message.user_properties) == {"a": "1", "SPARK_ROW_ID": stored.properties["SPARK_ROW_ID"]}


@pytest.mark.parametrize("keep", [False, True])
def test_an_id_among_the_properties_is_dropped_unless_rows_are_copied(keep: bool) -> None:
    row = {"body": b"1", "properties": {"a": "1", "SPARK_ROW_ID": "older"}}
    [one] = encode(table_of([row]), batch_options(topic="o", keep_row_id=keep))
    [message] = parsed(one)
    assert dict(message.user_properties) == {"a": "1"} | ({"SPARK_ROW_ID": "older"} if keep else {})


def test_rows_with_message_group_or_delay_are_sent_alone() -> None:
    some: list[dict[str, Any]] = [
        {"body": b"1", "shardingKey": "red"},
        {"body": b"2", "shardingKey": None},
        {"body": b"3", "shardingKey": ""},
        {"body": b"4", "shardingKey": "grün"},
    ]
    done = encode(table_of(some), batch_options(topic="o"))
    singles = [one for one in done if not one.batch]
    assert [(one.body[0], one.message_group) for one in singles] == [(b"1", "red"), (b"4", "grün")]
    assert {one.encoding for one in singles} == {Encoding.REMOTING}
    assert [decode_properties(one.properties.encode()) for one in singles] == [
        {"__SHARDINGKEY": key, "UNIQ_KEY": ids_of(4)[row]} for key, row in (("red", 0), ("grün", 3))
    ]
    assert [m.body for one in done if one.batch for m in parsed(one)] == [b"2", b"3"]
    delayed = pa.record_batch({"body": pa.array([b"1", b"2"]), "delayMs": pa.array([None, 5000], pa.int64())})
    done = encode(delayed, batch_options(topic="o"))
    assert [(one.batch, one.rows) for one in done] == [(False, 1), (True, 1)]


def test_wait_store_msg_ok_does_not_split_batches() -> None:
    table = pa.record_batch({"body": pa.array([b"1", b"2"]), "waitStoreMsgOK": pa.array([True, False])})
    [one] = encode(table, batch_options(topic="o"))
    assert [m.body for m in parsed(one)] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"keys": "a\tb"}, "keys holds a control character"),
        ({"keys": "  "}, "keys is blank"),
        ({"tags": "a\x7f"}, "tags holds a control character"),
        ({"properties": {"a\n": "1"}}, "the name of a property holds a control character"),
        ({"properties": {"a": "x\x85"}}, "the value of a property holds a control character"),
        ({"flag": 3}, "flag is set"),
        ({"shardingKey": "k" * 64}, "shardingKey is too long"),
        ({"shardingKey": "k\r"}, "shardingKey holds a control character"),
        ({"liteTopic": ""}, "liteTopic is empty"),
        ({"properties": {f"p{n}": "1" for n in range(129)}}, "too many properties"),
        ({"properties": {"p": "v" * 16_384}}, "properties are too long"),
        ({"keys": "k" * 16_385}, "properties are too long"),
    ],
)
def test_row_that_a_proxy_would_reject_is_an_error_before_sending(row: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRowError, match=said) as caught:
        encode(table_of([{"body": b"fine"}, {"body": b"1", **row}]), batch_options(topic="o"))
    assert caught.value.row == 1


@pytest.mark.parametrize(
    "row",
    [
        {"keys": "a b"},
        {"keys": "¡ÿ€", "tags": "Â"},
        {"shardingKey": "k" * 63},
        {"properties": {f"p{n}": "1" for n in range(128)}},
        {"properties": {"p": "v" * 16_383}},
        {"flag": 0},
    ],
)
def test_row_at_the_limits_of_a_proxy_is_accepted(row: dict[str, Any]) -> None:
    assert sum(one.rows for one in encode(table_of([{"body": b"1", **row}]), batch_options(topic="o"))) == 1


# Bytes that Arrow's string columns may hold: valid characters, and bytes that are invalid UTF-8.
_PIECES = [
    b"a",
    "\u00e9\u20ac".encode(),
    "\U0001f600".encode(),
    b"\xe9",
    b"\xc3",
    b"\x80",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
]
octets = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=4).map(b"".join)


def is_text(value: bytes | None) -> bool:
    return value is None or value.decode("utf-8", "ignore").encode() == value


@settings(max_examples=150)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "tags": optional(octets),
                "keys": optional(octets),
                "shardingKey": optional(octets),
                "properties": optional(st.dictionaries(octets, octets, max_size=3)),
            }
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 3),
)
def test_row_with_text_that_is_not_utf_8_is_invalid_and_others_are_sent(some: list[dict[str, Any]], lead: int) -> None:
    padded = [
        {"tags": b"\xff", "keys": b"\xff", "shardingKey": b"\xff", "properties": {b"\xff": b"\xff"}}
    ] * lead + some
    columns = {
        name: pa.array([row[name] for row in padded], pa.binary()).view(pa.string())
        for name in ("tags", "keys", "shardingKey")
    }
    columns["properties"] = pa.MapArray.from_arrays(
        [0, *itertools.accumulate(len(row["properties"] or ()) for row in padded)],
        *(
            pa.array([each for row in padded for each in getattr(row["properties"] or {}, part)()], pa.binary()).view(
                pa.string()
            )
            for part in ("keys", "values")
        ),
    )
    bodies = pa.array([b"%d" % number for number in range(-lead, len(some))])
    table = pa.record_batch({"body": bodies, **columns}).slice(lead)
    wanted = {
        number: next(name for name, is_good in checks.items() if not is_good)
        for number, row in enumerate(some)
        if not all(
            (
                checks := {
                    "keys": is_text(row["keys"]),
                    "tags": is_text(row["tags"]),
                    "shardingKey": is_text(row["shardingKey"]),
                    "the name of a property": all(map(is_text, row["properties"] or ())),
                    "the value of a property": all(map(is_text, (row["properties"] or {}).values())),
                }
            ).values()
        )
    }
    found: dict[int, str] = {}

    def on_invalid(invalid: InvalidRows) -> None:
        found.update((error.row, error.rule) for error in invalid.errors())

    done = encode(table, batch_options(topic="o"), on_invalid=on_invalid)
    assert found == {number: f"{name} is not valid UTF-8" for number, name in wanted.items()}
    sent = [message.body for one in done if one.batch for message in parsed(one)]
    sent += [b"".join(one.body) for one in done if not one.batch]
    assert sorted(map(int, sent)) == sorted(set(range(len(some))) - wanted.keys())


def test_text_that_is_not_utf_8_is_an_error_unless_it_lies_under_a_null() -> None:
    def texts(*values: bytes | None) -> pa.Array:
        return pa.array(values, pa.binary()).view(pa.string())

    table = pa.record_batch({"body": [b"1", b"2"], "keys": texts("gr\u00fcn".encode(), b"caf\xe9")})
    with pytest.raises(InvalidRowError, match=r"row 1 .*keys is not valid UTF-8 \(caf\\xe9\)") as caught:
        encode(table, batch_options(topic="o"))
    assert caught.value.row == 1
    entries = pa.MapArray.from_arrays([0, 1, 3], texts(b"a", b"b", b"c"), texts(b"fine", b"fine", b"caf\xe9"))
    with pytest.raises(InvalidRowError, match=r"row 1 .*value of a property is not valid UTF-8 \(caf\\xe9\)"):
        encode(pa.record_batch({"body": [b"1", b"2"], "properties": entries}), batch_options(topic="o"))
    valid = pa.py_buffer(b"\x01")
    hidden = pa.Array.from_buffers(pa.string(), 2, [valid, *texts(b"gr\xc3\xbcn", b"\xe9").buffers()[1:]])
    [one] = encode(pa.record_batch({"body": [b"1", b"2"], "keys": hidden}), batch_options(topic="o"))
    assert [list(message.system_properties.keys) for message in parsed(one)] == [["gr\u00fcn"], []]


@pytest.mark.parametrize("name", ["delayMs", "deliverTime"])
def test_row_with_sharding_key_and_delay_is_invalid_and_others_are_sent(name: str) -> None:
    delays = pa.array([None, 5000, 5000, 5000], pa.timestamp("ms") if name == "deliverTime" else pa.int64())
    table = pa.record_batch({"body": [b"1", b"2", b"3", b"4"], "shardingKey": ["red", None, "red", ""], name: delays})
    found: list[tuple[int, str]] = []
    done = encode(
        table,
        batch_options(topic="o"),
        on_invalid=lambda invalid: found.extend((error.row, error.rule) for error in invalid.errors()),
    )
    assert found == [(2, "shardingKey is set beside a delay")]
    assert [(one.batch, one.body[0]) for one in done] == [(False, b"1"), (False, b"2"), (False, b"4")]


def test_option_tags_counts_towards_the_length_of_properties() -> None:
    some = [{"body": b"1", "keys": "k" * 16_380}, {"body": b"2", "keys": "k" * 16_381}]
    for table in (table_of(some), table_of([{**row, "tags": None} for row in some])):
        with pytest.raises(InvalidRowError, match=r"properties are too long \(16385 bytes\)") as caught:
            encode(table, batch_options(topic="o", tags="tags"))
        assert caught.value.row == 1


def test_message_ids_have_34_digits_and_carry_into_the_seconds() -> None:
    ids = new_ids(lambda: 1_609_459_200.0 + 7)
    assert ids.reserve(0) == 7 << 32
    assert ids.prefix[0] == 1
    assert ids.prefix[7:] == b"\x23\x45"
    assert len(ids.prefix) * 2 + 16 == MessageIds.LENGTH == 34
    ids.reserve(0xFFFF_FFFE)
    some = [{"body": b"1"}] * 5
    found = [
        m.system_properties.message_id
        for one in encode(table_of(some), batch_options(topic="o"), unique_ids=ids)
        for m in parsed(one)
    ]
    assert found == [f"{ids.prefix.hex().upper()}{(7 << 32) + 0xFFFF_FFFE + row:016X}" for row in range(5)]
    assert new_ids().prefix == new_ids().prefix
    assert MessageIds(pid=1, wall_clock=lambda: 0.0, rng=random.Random(5)).prefix[1:7] != new_ids().prefix[1:7]


def test_halves_of_a_batch_are_valid_requests() -> None:
    some = [{"body": b"x" * (1 + 40 * number), "properties": {"n": str(number)}} for number in range(101)]
    [one] = encode(table_of(some), batch_options(topic="o"))
    halves = split_batch(one)
    assert halves is not None
    assert [m.user_properties["n"] for half in halves for m in parsed(half)] == [str(number) for number in range(101)]


def test_body_too_large_for_a_batch_is_sent_alone() -> None:
    some = [{"body": b"1"}, {"body": b"L" * (4 * 1024 * 1024)}, {"body": b"3"}]
    done = encode(table_of(some), batch_options(topic="o"))
    assert [(one.batch, one.rows) for one in sorted(done, key=lambda one: one.batch)] == [(False, 1), (True, 2)]
