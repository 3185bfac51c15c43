"""Dead letters: every invalid row becomes a valid message."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.batcher import GrpcBatcher
from rocketmq_spark.arrow.dead_letter import DeadLetterBatcher, DeadLetters
from rocketmq_spark.arrow.encoders import MessageIds
from rocketmq_spark.arrow.split import KeyCheck
from rocketmq_spark.deliveries.exactly_once.halves import half_properties
from rocketmq_spark.model.message import EncodedBatch, Encoding, Message
from rocketmq_spark.model.properties import RESERVED_PROPERTIES
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.compression import CompressionType
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest
from rocketmq_spark.protocol.remoting.records import LARGEST_BODY, MAX_PROPERTIES, decode_batch, decode_properties
from tests.support.encoding import batch_options, joined, new_batcher, queues_of

PROPERTIES = pa.map_(pa.string(), pa.string())


def grpc_batcher(settings_: SinkOptions, **more: Any) -> GrpcBatcher:
    ids = MessageIds(pid=1, wall_clock=lambda: 1_700_000_000.0, rng=random.Random(0))
    common: dict[str, Any] = {"queues_of": queues_of, "unique_ids": ids, "born_host": "worker", "epoch_offset": 0.0}
    return GrpcBatcher(settings_, partition_id=3, **common, **more)


def dead_letter_batcher(settings_: SinkOptions, *, over_grpc: bool = False, **more: Any) -> DeadLetterBatcher:
    letters = DeadLetters(settings_.max_message_size, "write-1", 7, over_grpc=over_grpc, tags=settings_.tags)
    dead = batch_options(topic="dead", tags=settings_.tags, max_message_size=settings_.max_message_size)
    make = grpc_batcher if over_grpc else new_batcher
    return DeadLetterBatcher(make(settings_, on_invalid=letters.add, **more), make(dead), letters)


def properties_of(message: pb.Message) -> dict[str, str]:
    system = message.system_properties
    fields = {"TAGS": system.tag, "KEYS": " ".join(system.keys), "UNIQ_KEY": system.message_id}
    return {**message.user_properties, **{name: value for name, value in fields.items() if value}}


def messages_of(one: EncodedBatch) -> list[Message]:
    if one.encoding is Encoding.GRPC:
        sent = SendMessageRequest.FromString(joined(one)).messages
        return [Message(one.topic, message.body, 0, properties_of(message)) for message in sent]
    if one.batch:
        return decode_batch(joined(one), one.topic)
    return [Message(one.topic, joined(one), one.flag, decode_properties(one.properties.encode()))]


def written(
    batch: pa.RecordBatch, settings_: SinkOptions | None = None, *, over_grpc: bool = False
) -> tuple[list[Message], list[Message]]:
    """Return the messages of the rows and the dead letters."""
    batcher = dead_letter_batcher(settings_ or batch_options(topic="orders"), over_grpc=over_grpc)
    done = [one for one, _ in batcher.add(batch, 0.0)] + [one for one, _ in batcher.flush()]
    assert batcher.taken_rows == batch.num_rows
    assert batcher.pending_bytes == 0
    messages = [message for one in done for message in messages_of(one)]
    dead = [message for message in messages if message.topic == "dead"]
    return [message for message in messages if message.topic != "dead"], dead


def dead_letter(*, over_grpc: bool = False, **columns: Any) -> tuple[bytes, dict[str, str]]:
    """Return body and properties, UNIQ_KEY aside, of the letter that one invalid row becomes."""
    typed = {name: values if isinstance(values, pa.Array) else pa.array([values]) for name, values in columns.items()}
    typed.setdefault("body", pa.array([b"payload"]))
    good, (letter,) = written(pa.RecordBatch.from_pydict(typed), over_grpc=over_grpc)
    assert good == []
    properties = dict(letter.properties)
    del properties["UNIQ_KEY"]
    return letter.body, properties


FACTS = {
    "DEAD_LETTER_writeId": "write-1",
    "DEAD_LETTER_batchId": "7",
    "DEAD_LETTER_partition": "3",
    "DEAD_LETTER_row": "0",
    "DEAD_LETTER_topic": "orders",
}


def test_valid_rows_go_to_their_topic_and_dead_letters_carry_their_row() -> None:
    batch = pa.RecordBatch.from_pydict({"body": [b"a", None, b"c", b""], "keys": ["k0", "k1", "k2", "k3"]})
    good, dead = written(batch)
    assert [(message.body, message.properties["KEYS"]) for message in good] == [(b"a", "k0"), (b"c", "k2")]
    assert [
        (
            letter.body,
            letter.properties["KEYS"],
            letter.properties["DEAD_LETTER_row"],
            letter.properties["DEAD_LETTER_rule"],
        )
        for letter in dead
    ] == [(b"(null)", "k1", "1", "body is null"), (b"(empty)", "k3", "3", "body is empty")]


def test_a_null_body_has_no_size_and_an_empty_one_has_size_0() -> None:
    assert dead_letter(body=pa.array([None], pa.binary())) == (b"(null)", FACTS | {"DEAD_LETTER_rule": "body is null"})
    empty = FACTS | {"DEAD_LETTER_rule": "body is empty", "DEAD_LETTER_bodySize": "0"}
    assert dead_letter(body=b"") == (b"(empty)", empty)


@pytest.mark.parametrize("limit", [1, 5, 200])
def test_dead_letter_of_a_too_long_body_is_cut_and_has_its_size(limit: int) -> None:
    batch = pa.RecordBatch.from_pydict({"body": [b"x" * (limit + 1), None]})
    _, (long, null) = written(batch, batch_options(topic="orders", max_message_size=limit))
    assert (long.body, long.properties["DEAD_LETTER_bodySize"]) == (b"x" * limit, str(limit + 1))
    assert null.body == b"(null)"[:limit]


def test_a_dead_letter_does_not_carry_the_properties_of_a_half_message() -> None:
    settings_ = batch_options(topic="orders", batching=False, max_message_size=2 * LARGEST_BODY)
    batcher = dead_letter_batcher(settings_)
    batcher.letters.max_message_size = LARGEST_BODY
    batcher.rows.half_properties = half_properties("job#write#1#run", 60_000)  # type: ignore[attr-defined]
    row = pa.RecordBatch.from_pydict({"body": pa.array([bytes(LARGEST_BODY + 1)]), "keys": ["k"]})
    ((letter, _),) = batcher.add(row, 0.0)
    (message,) = messages_of(letter)
    assert message.properties["DEAD_LETTER_rule"] == "body is too long for a frame"
    assert not [name for name in message.properties if "TRAN_MSG" in name or "PGROUP" in name or "IMMUNITY" in name]


def test_valid_values_of_a_dead_letter_stay_and_invalid_become_properties() -> None:
    body, properties = dead_letter(
        tags="a|b",
        keys="k\x01x",
        flag=7,
        shardingKey="s",
        delayMs=0,
        waitStoreMsgOK=False,
        properties=pa.array([[("a", "1"), ("KEYS", "mine"), ("b", "x\x02y"), ("c", " "), ("d\x01", "2")]], PROPERTIES),
    )
    assert body == b"payload"
    assert properties == FACTS | {
        "DEAD_LETTER_rule": "keys holds the character 0x01 or 0x02",
        "DEAD_LETTER_bodySize": "7",
        "DEAD_LETTER_keys": "k\ufffdx",
        "DEAD_LETTER_tags": "a|b",
        "DEAD_LETTER_flag": "7",
        "DEAD_LETTER_shardingKey": "s",
        "DEAD_LETTER_delayMs": "0",
        "DEAD_LETTER_waitStoreMsgOK": "false",
        "a": "1",
        "DEAD_LETTER_KEYS": "mine",
        "b": "x\ufffdy",
        "DEAD_LETTER_d\ufffd": "2",
        "DEAD_LETTER_leftOut": "1",
    }


def test_dead_letter_over_grpc_has_no_control_character_or_blank_keys() -> None:
    _, properties = dead_letter(
        over_grpc=True,
        tags="a\tb",
        keys=" ",
        shardingKey="s\x85",
        properties=pa.array([[("note", "two\nlines"), ("a\x7fb", "1"), ("plain", "\u00a0")]], PROPERTIES),
    )
    assert properties == FACTS | {
        "DEAD_LETTER_rule": "keys is blank",
        "DEAD_LETTER_bodySize": "7",
        "DEAD_LETTER_tags": "a\ufffdb",
        "DEAD_LETTER_shardingKey": "s\ufffd",
        "note": "two\ufffdlines",
        "DEAD_LETTER_a\ufffdb": "1",
        "plain": "\u00a0",
    }


@pytest.mark.parametrize("over_grpc", [False, True])
def test_keys_and_tags_of_a_dead_letter_are_those_of_the_row_or_move(over_grpc: bool) -> None:
    row = {"keys": pa.array([b"k\xff"], pa.binary()), "tags": pa.array([b"t\xff"], pa.binary())}
    _, properties = dead_letter(over_grpc=over_grpc, **row)
    assert {"KEYS", "TAGS"}.isdisjoint(properties)
    assert (properties["DEAD_LETTER_keys"], properties["DEAD_LETTER_tags"]) == ("k\ufffd", "t\ufffd")
    # A row may hold the character that stands for other bytes.
    _, properties = dead_letter(over_grpc=over_grpc, body=b"", keys="k\ufffd", tags="t\ufffd")
    assert (properties["KEYS"], properties["TAGS"]) == ("k\ufffd", "t\ufffd")


@pytest.mark.parametrize("tags", [None, "bad\ttag", "own"])
@pytest.mark.parametrize("over_grpc", [False, True])
def test_the_option_tags_takes_room_in_a_dead_letter(tags: str | None, over_grpc: bool) -> None:
    # With another letter that has a different tag, and alone.
    for others in ([], ["own"]):
        texts = pa.array([tags, *others], pa.string())
        properties = [[(f"p{number}", "v" * 300) for number in range(200)]] * len(texts)
        batch = pa.RecordBatch.from_pydict(
            {
                "body": pa.array([None] * len(texts), pa.binary()),
                "tags": texts,
                "properties": pa.array(properties, PROPERTIES),
            }
        )
        _, dead = written(batch, batch_options(topic="orders", tags="t" * 990), over_grpc=over_grpc)
        assert len(dead) == len(texts)
        wanted = "own" if tags == "own" else tags if tags and not over_grpc else "t" * 990
        assert {message.properties["TAGS"] for message in dead} == {wanted, *others}


@pytest.mark.parametrize(("entries", "size", "kept"), [(200, 1, 128 - 7 - 1), (20, 3_000, 5)])
def test_over_grpc_a_dead_letter_keeps_as_many_properties_as_a_proxy_takes(entries: int, size: int, kept: int) -> None:
    properties = pa.array([[(f"n{number}", "v" * size) for number in range(entries)]], PROPERTIES)
    _, found = dead_letter(over_grpc=True, properties=properties)
    assert sum(name.startswith("n") for name in found) == kept
    assert found["DEAD_LETTER_leftOut"] == str(entries - kept)


def test_dead_letter_of_a_copy_job_omits_broker_properties() -> None:
    properties = pa.array([[("MSG_REGION", "x"), ("mine", "1")]], PROPERTIES)
    _, found = dead_letter(body=b"", properties=properties, queueOffset=5)
    assert ("MSG_REGION" in found, "DEAD_LETTER_MSG_REGION" in found, found["mine"]) == (False, False, "1")


def test_too_long_properties_are_omitted_and_counted() -> None:
    properties = pa.array([[(f"n{number}", "v" * 3_000) for number in range(20)]], PROPERTIES)
    _, found = dead_letter(properties=properties, keys="k" * 9_000)
    assert (len(found["DEAD_LETTER_keys"]), "KEYS" in found) == (200, False)
    kept = [name for name in found if name.startswith("n")]
    assert int(found["DEAD_LETTER_leftOut"]) + len(kept) == 20
    assert len(kept) == 9


def test_dead_letter_of_a_dead_letter_replaces_its_facts() -> None:
    properties = pa.array([[("DEAD_LETTER_row", "99"), ("DEAD_LETTER_rule", "an older one")]], PROPERTIES)
    _, found = dead_letter(body=b"", properties=properties)
    assert (found["DEAD_LETTER_row"], found["DEAD_LETTER_rule"], found["DEAD_LETTER_leftOut"]) == (
        "0",
        "body is empty",
        "2",
    )


def test_memory_for_many_dead_letters_is_bounded() -> None:
    batcher = dead_letter_batcher(batch_options(topic="orders", max_message_size=100))
    rows = pa.array([b"y" * 101] * 10_000)
    ready = batcher.add(pa.RecordBatch.from_pydict({"body": rows}), 0.0)
    assert (batcher.taken_rows, batcher.pending_bytes) == (10_000, 0)
    highest, sent = 0, 0
    for one, _ in ready:
        highest = max(highest, batcher.pending_bytes)
        sent += one.rows
        assert batcher.taken_rows == 10_000
    assert sent + sum(one.rows for one, _ in batcher.flush()) == 10_000
    assert highest <= 2 * 1024 * 1024


# Values that a column may hold: separators, blanks, pipes, reserved names, invalid UTF-8.
texts = st.none() | st.text(st.sampled_from("ab |\x00\x01\x02\t\x7f\x85\u3000é𐍈"), max_size=6) | st.just("long" * 3_000)
ill_formed = st.sampled_from([b"caf\xe9", b"\xff\x01", b"\xed\xa0\x80"])
names = st.sampled_from([*sorted(RESERVED_PROPERTIES), "INNER_NUM", "__SHARDINGKEY", "DEAD_LETTER_row", ""])
any_row = st.fixed_dictionaries(
    {
        "body": st.none() | st.binary(max_size=60),
        "topic": texts | st.sampled_from(["orders", "SCHEDULE_TOPIC_XXXX", "t" * 128]),
        "tags": texts,
        "keys": st.none() | st.lists(texts, max_size=3),
        "shardingKey": texts,
        "properties": st.none()
        | st.lists(st.tuples(names | texts.filter(lambda text: text is not None), texts), max_size=6),
        "flag": st.none() | st.integers(-(2**62), 2**62),
        "delayMs": st.none() | st.integers(-5, 5),
        "delayTimeLevel": st.none() | st.integers(-1, 20),
    }
)


def column_of(name: str, values: list[Any], bad: bytes | None) -> pa.Array:
    if name == "properties":
        return pa.array(values, PROPERTIES)
    if name == "keys":
        return pa.array(values, pa.list_(pa.string()))
    if name in ("flag", "delayMs", "delayTimeLevel"):
        return pa.array(values, pa.int64())
    if name == "body":
        return pa.array(values, pa.binary())
    raw = pa.array(
        [bad if bad and row == 0 else value and value.encode() for row, value in enumerate(values)], pa.binary()
    )
    return raw.view(pa.string())


@given(
    st.lists(any_row, min_size=1, max_size=6),
    st.lists(
        st.sampled_from(["tags", "keys", "shardingKey", "properties", "flag", "delayMs", "delayTimeLevel"]), unique=True
    ),
    st.none() | ill_formed,
    st.booleans(),
    st.integers(1, 50),
    st.booleans(),
)
def test_dead_letter_of_any_invalid_row_is_valid(
    rows: list[dict[str, Any]], columns: list[str], bad: bytes | None, batching: bool, limit: int, over_grpc: bool
) -> None:
    batch = pa.RecordBatch.from_pydict(
        {name: column_of(name, [row[name] for row in rows], bad) for name in ["body", "topic", *columns]}
    )
    good, dead = written(batch, batch_options(max_message_size=limit, batching=batching), over_grpc=over_grpc)
    assert len(good) + len(dead) == len(rows)
    for letter in dead:
        assert 1 <= len(letter.body) <= limit
        size = sum(len(f"{name}{value}".encode()) + 2 for name, value in letter.properties.items())
        assert size <= MAX_PROPERTIES
        row = rows[int(letter.properties["DEAD_LETTER_row"])]
        if row["body"]:
            assert letter.body == row["body"][:limit]
            assert letter.properties["DEAD_LETTER_bodySize"] == str(len(row["body"]))


@pytest.mark.parametrize("over_grpc", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_dead_letter_does_not_carry_the_id_of_another_row(over_grpc: bool, keep: bool) -> None:
    given = [[("SPARK_ROW_ID", "older"), ("a", "1")]] * 2
    batch = pa.RecordBatch.from_pydict({"body": [b"x", b""], "properties": pa.array(given, PROPERTIES)})
    (row,), (letter,) = written(batch, batch_options(topic="orders", keep_row_id=keep), over_grpc=over_grpc)
    assert row.properties.get("SPARK_ROW_ID") == ("older" if keep else None)
    assert "SPARK_ROW_ID" not in letter.properties
    assert letter.properties["a"] == "1"


any_delayed = {
    "tags": st.sampled_from([None, "a"]),
    "keys": st.sampled_from([None, "k", "k1 k2"]),
    "flag": st.sampled_from([None, 0]),
    "queueId": st.sampled_from([None, 0, 1]),
    "brokerName": st.sampled_from([None, "broker-a", "gr\u00fcn"]),
    "waitStoreMsgOK": st.sampled_from([None, True, False]),
    "properties": st.sampled_from([None, [("a", "1")], [("SPARK_ROW_ID", "older"), ("b", "2")]]),
}


@given(
    st.lists(st.fixed_dictionaries(any_delayed), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(any_delayed)), unique=True),
    st.booleans(),
    st.booleans(),
)
def test_a_dead_letter_has_the_whole_row_also_if_a_server_rejects_it(
    rows: list[dict[str, Any]], columns: list[str], over_grpc: bool, keep_row_id: bool
) -> None:
    types = {"properties": PROPERTIES, "waitStoreMsgOK": pa.bool_(), "flag": pa.int32(), "queueId": pa.int32()}
    typed = {name: pa.array([row[name] for row in rows], types.get(name, pa.string())) for name in columns}
    batch = pa.RecordBatch.from_pydict({"body": ["x" * 99] * len(rows), "delayMs": [5] * len(rows), **typed})
    settings_ = batch_options(
        topic="orders", tags="t", keep_row_id=keep_row_id, compress_type=CompressionType.ZLIB, compress_over=1
    )

    def letters(**more: Any) -> list[tuple[bytes, dict[str, str]]]:
        batcher = dead_letter_batcher(settings_, over_grpc=over_grpc, **more)
        sent = [ready for ready in batcher.add(batch, 0.0) if ready[0].topic == "orders"]
        done = [*batcher.reject(sent, 0.0), *batcher.flush()]
        dead = sorted(
            (one for ready, _ in done for one in messages_of(ready)), key=lambda one: one.properties["UNIQ_KEY"]
        )
        left_out = {"UNIQ_KEY", "DEAD_LETTER_rule"}
        return [
            (letter.body, {name: text for name, text in letter.properties.items() if name not in left_out})
            for letter in dead
        ]

    rejected = letters()
    assert len(rejected) == len(rows)
    # Each row breaks a rule that its values do not decide.
    assert rejected == letters(check_keys=KeyCheck(lambda topics: dict.fromkeys(topics, True), inner_batches=True))


@pytest.mark.parametrize("of", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_a_single_message_does_not_keep_its_record_batch(of: pa.DataType) -> None:
    columns = {
        "body": pa.array(["x"] * 100),
        "delayMs": pa.array([5 if row == 60 else None for row in range(100)]),
        "flag": pa.array(range(100), pa.int32()),
        "brokerName": pa.array([f"the name of the broker {row}" for row in range(100)]).cast(of),
        "waitStoreMsgOK": pa.array([row == 60 for row in range(100)]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    batcher = new_batcher(batch_options(topic="orders"), on_invalid=lambda _: None)
    (row,) = (one.uncarried for one, _ in batcher.add(batch, 0.0) if one.uncarried is not None)
    assert [column.cast(pa.string()).to_pylist() for column in row.columns] == [
        ["60"],
        ["the name of the broker 60"],
        ["true"],
    ]
    used = {buffer.address for column in batch.columns for buffer in column.buffers() if buffer is not None}
    assert used.isdisjoint(
        buffer.address for column in row.columns for buffer in column.buffers() if buffer is not None
    )


@pytest.mark.parametrize("tag", ["a ", "\ta", " ", "a|b"])
def test_a_tag_without_any_subscription_becomes_a_dead_letter_property(tag: str) -> None:
    _, properties = dead_letter(tags=tag)
    assert "TAGS" not in properties
    assert properties.get("DEAD_LETTER_tags") == (tag if tag.strip() else None)
