"""Messages that cannot be read: each policy, and the messages around them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import struct
import zlib
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.arrow.read_columns import UNREADABLE
from rocketmq_spark.arrow.stored import missing_offsets, missing_records
from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt, Pulled
from rocketmq_spark.protocol.compression import MAX_DECOMPRESSED, CompressionType, compress
from rocketmq_spark.protocol.remoting.records import decode_properties, encode_batch
from rocketmq_spark.protocol.remoting.unwrap import Unreadable
from rocketmq_spark.source.read import SkippedMessages
from tests.support.kernels import batches_of
from tests.support.strategies import encode_stored_record
from tests.unit.arrow.test_decode import PLAIN, QUEUE, SCHEMA, decode, decode_rows, regular, sound

pytestmark = pytest.mark.usefixtures("kernel")

RAW = SCHEMA.append(pa.field(UNREADABLE, pa.string()))
ITEMS = encode_batch([Message("orders", b"item %d" % number, 0, {"TAGS": "a"}) for number in range(3)])
INNER = {**PLAIN.properties, "INNER_NUM": "3"}


def overwritten(message: MessageExt, at: int, layout: str, value: int) -> bytes:
    """Return a record with one number replaced, counted from its end if `at` is negative."""
    record = bytearray(encode_stored_record(message))
    struct.pack_into(layout, record, at % len(record), value)
    return bytes(record)


@functools.cache
def body_of_size(size: int) -> bytes:
    stream = zlib.compressobj(1)
    pieces = [stream.compress(bytes(1024 * 1024)) for _ in range(size // (1024 * 1024) + 1)]
    return b"".join([*pieces, stream.flush()])


# The damage of the message at offset 2, and the text of the reason.
DAMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "not zlib": (lambda: record_of(sys_flag=0x301), "decompressing a body of 6 bytes with ZLIB"),
    "not lz4": (lambda: record_of(sys_flag=0x101), "with LZ4"),
    "not zstd": (lambda: record_of(sys_flag=0x201), "with ZSTD"),
    "unknown compression": (lambda: record_of(sys_flag=0x701), "sysFlag 0x701 says compression type 7"),
    "cut off": (lambda: record_of(sys_flag=0x301, body=zlib.compress(bytes(99))[:-4]), "cut off"),
    "too large": (
        lambda: record_of(sys_flag=0x301, body=body_of_size(MAX_DECOMPRESSED)),
        "more than 67108864 bytes",
    ),
    "checksum": (
        lambda: encode_stored_record(dataclasses.replace(regular(3)[2], body_crc=1)),
        "the body has the checksum",
    ),
    "magic": (lambda: overwritten(regular(3)[2], 4, ">I", 0xCBD43194), "magic 0xCBD43194"),
    "body length": (lambda: overwritten(regular(3)[2], 84, ">i", 10_000), "10000 bytes claimed"),
    "topic length": (lambda: overwritten(regular(3)[2], 88 + 6, ">b", -1), "-1 bytes claimed"),
    "properties length": (lambda: overwritten(regular(3)[2], 88 + 6 + 1 + 6, ">h", 30_000), "30000 bytes claimed"),
    # Java reads lengths as signed numbers, so these are negative.
    "long topic": (lambda: with_short_topic_length(b"t" * 200), "-56 bytes claimed"),
    "long properties": (lambda: with_properties(b"k\x01" + b"v" * 33_000 + b"\x02"), "-32533 bytes claimed"),
    "inner batch": (lambda: record_of(sys_flag=0xC0), "message 0 of the inner batch at offset 2"),
    "empty inner batch": (lambda: record_of(sys_flag=0xC0, body=b""), "the inner batch has no messages"),
    "compressed inner batch": (lambda: record_of(sys_flag=0x3C1), "with ZLIB"),
    "topic text": (lambda: record_of().replace(b"orders", b"ord\xffrs"), "the topic is not valid UTF-8"),
    "property text": (lambda: with_properties(b"TAGS\x01b\x02k\x01\xff\x02"), "invalid start byte at byte 9 of 11"),
    "no separator": (lambda: with_properties(b"TAGS\x01b\x02\x1bk=v\x02"), r"name and value: '\x1bk=v'"),
}
# The property string is damaged, so the properties and the tag are unknown.
UNKNOWN_PROPERTIES = {"property text", "no separator"}
BAD_TEXTS = [
    b"\xff\x01v\x02",
    b"TAGS\x01b\x02k\x01\xed\xa0\x80\x02",
    b"TAGS\x01b\x02k",
    b"TAGS\x01b\x02k\x02l\x01v\x02",
]


def with_properties(text: bytes, record: bytes = b"") -> bytes:
    """Return a record, by default the one at offset 2, with another property string."""
    record = record or encode_stored_record(sound(regular(3)[2], properties={}))
    return struct.pack(">i", len(record) + len(text)) + record[4:-2] + struct.pack(">H", len(text)) + text


def with_short_topic_length(topic: bytes) -> bytes:
    """Return the record at offset 2 with a topic whose length has one byte."""
    record = encode_stored_record(sound(regular(3)[2], topic="", properties={}))
    return struct.pack(">i", len(record) + len(topic)) + record[4:-3] + bytes([len(topic)]) + topic + bytes(2)


def item_of(body: bytes, text: bytes) -> bytes:
    """Return an item of a batch body."""
    return (
        struct.pack(">5i", 22 + len(body) + len(text), 0, 0, 7, len(body)) + body + struct.pack(">h", len(text)) + text
    )


def record_of(**changes: object) -> bytes:
    return encode_stored_record(sound(regular(3)[2], **changes))


def answer(record: bytes, start: int = 0, end: int = 5, count: int = 1) -> Pulled:
    """Return an answer of a broker: sound messages around the record at offset 2, which has `count` offsets."""
    around = [
        encode_stored_record(sound(PLAIN, queue_offset=offset, body=b"body %d" % offset))
        for offset in (0, 1, 2 + count, 3 + count)
    ]
    return Pulled(QUEUE, start, end + count - 1, b"".join([*around[:2], record, *around[2:]]))


@pytest.mark.parametrize("kind", DAMAGES)
def test_fail_names_topic_broker_queue_offset_and_the_option(kind: str) -> None:
    damaged, reason = DAMAGES[kind]
    with pytest.raises(RemotingCommandException) as failed:
        decode([answer(damaged())], SCHEMA)
    text = str(failed.value)
    assert text.startswith("reading orders/broker-a/3, the message at offset 2 cannot be read: ")
    assert reason in text
    assert "onUnreadable=skip" in text
    assert "onUnreadable=raw" in text


def skipping_into(skipped: list[Unreadable]) -> Callable[[Unreadable], bool]:
    def skip(message: Unreadable) -> bool:
        skipped.append(message)
        return False

    return skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_skip_omits_only_the_unreadable_message(kind: str) -> None:
    damaged, reason = DAMAGES[kind]
    skipped: list[Unreadable] = []
    (batch,) = batches_of([answer(damaged())], SCHEMA, None, skipping_into(skipped))
    assert batch.column("queueOffset").to_pylist() == [0, 1, 3, 4]
    assert batch.column("body").to_pylist() == [b"body 0", b"body 1", b"body 3", b"body 4"]
    (message,) = skipped
    assert (message.queue, message.start, message.end) == (QUEUE, 2, 3)
    assert reason in message.reason


@pytest.mark.parametrize("kind", DAMAGES)
def test_raw_gives_the_stored_bytes_and_the_reason(kind: str) -> None:
    damaged, reason = DAMAGES[kind]
    record = damaged()
    (batch,) = batches_of([answer(record)], RAW, None, lambda _: True)
    rows = batch.to_pylist()
    assert [row["queueOffset"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row[UNREADABLE] is None for row in rows] == [True, True, False, True, True]
    row = rows[2]
    assert reason in row[UNREADABLE]
    assert (row["topic"], row["brokerName"], row["queueId"]) == ("orders", "broker-a", 3)
    if kind in UNKNOWN_PROPERTIES:
        assert row["body"] == b"body 2"
        assert {name for name, value in row.items() if value is None} == {"tags", "keys", "properties", "msgId"}
    elif row["properties"] is None:
        # The record cannot be decoded, so the row has all of its bytes.
        assert row["body"] == record
        assert {name for name, value in row.items() if value is not None} == {
            "topic", "brokerName", "queueId", "queueOffset", "body", UNREADABLE,
        }  # fmt: skip
    else:
        assert row["body"] in record
        assert (row["tags"], row["keys"], row["msgId"]) == ("a", "k1 k2", "0A0B")


def test_messages_before_the_damage_in_an_inner_batch_are_delivered() -> None:
    # The length of the third item is larger than the batch.
    damaged = bytearray(ITEMS)
    struct.pack_into(">i", damaged, 2 * (len(ITEMS) // 3) + 16, 1000)
    message = sound(PLAIN, queue_offset=2, sys_flag=0xC0, body=bytes(damaged), properties=INNER)
    pull = answer(encode_stored_record(message), count=3)
    (batch,) = batches_of([pull], RAW, None, lambda _: True)
    rows = [(row["queueOffset"], row["body"], row[UNREADABLE]) for row in batch.to_pylist()]
    assert [row[:2] for row in rows] == [
        (0, b"body 0"), (1, b"body 1"), (2, b"item 0"), (3, b"item 1"), (4, bytes(damaged)), (5, b"body 5"),
        (6, b"body 6"),
    ]  # fmt: skip
    assert "message 2 of the inner batch at offset 2" in rows[4][2]


def test_all_offsets_that_a_broker_counted_for_an_inner_batch_are_read_or_reported() -> None:
    # The first of these names only ends with that of the property that brokers count by.
    properties = {"xINNER_NUM": "2", "INNER_NUM": "5"}
    message = sound(PLAIN, queue_offset=2, sys_flag=0xC0, body=ITEMS, properties=properties)
    rows = decoded_by_both(answer(encode_stored_record(message), count=5)).to_pylist()
    assert [row["queueOffset"] for row in rows] == [0, 1, 2, 3, 4, 5, 7, 8]
    assert "has 3 messages and 5 offsets" in rows[5][UNREADABLE]


@pytest.mark.parametrize(("start", "end", "first", "last"), [(0, 5, 2, 4), (3, 5, 3, 4), (0, 4, 2, 3)])
def test_unreadable_inner_batch_covers_only_requested_offsets(start: int, end: int, first: int, last: int) -> None:
    message = sound(PLAIN, queue_offset=2, sys_flag=0x3C1, body=b"no zlib", properties=INNER)
    skipped = SkippedMessages()
    pull = Pulled(QUEUE, start, end, answer(encode_stored_record(message), count=3).body)
    list(batches_of([pull], SCHEMA, None, skipped.skip))
    assert skipped.by_topic == {"orders": last - first + 1}
    with pytest.raises(RemotingCommandException, match=f"the messages {first} to {last} cannot be read"):
        list(batches_of([pull], SCHEMA))


@pytest.mark.parametrize("size", [-1, 0, 50, 100_000])
def test_wrong_record_length_makes_the_rest_of_the_answer_unreadable(size: int) -> None:
    pull = answer(struct.pack(">i", size) + record_of()[4:])
    skipped: list[Unreadable] = []
    (batch,) = batches_of([pull], SCHEMA, None, skipping_into(skipped))
    assert batch.column("queueOffset").to_pylist() == [0, 1]
    (message,) = skipped
    assert (message.start, message.end) == (2, 5)
    assert "no later message of the broker's answer can be located" in message.reason
    assert bytes(pull.body).endswith(message.body)


# Values of INNER_NUM that a broker accepts from any sender, and how many offsets it then gives the record.
COUNTS = {None: 1, "0": 1, "-3": 1, "1": 1, "3": 3, "+3": 3, "00000003": 3, "\N{ARABIC-INDIC DIGIT THREE}": 3, "5": 5}


@pytest.mark.parametrize("items", [1, 3, 5])
@pytest.mark.parametrize("sys_flag", [0xC0, 0x3C1, 0x80])
@pytest.mark.parametrize("value", COUNTS)
def test_reads_of_a_record_with_chosen_offsets_agree(value: str | None, sys_flag: int, items: int) -> None:
    count = COUNTS[value]
    body = encode_batch([Message("orders", b"item %d" % number) for number in range(items)])
    if sys_flag & 1:
        body = compress(body, CompressionType.ZLIB)
    # Other names that end with the real one are no numbers of offsets.
    properties = {"AINNER_NUM": "4", **({} if value is None else {"INNER_NUM": value}), "ZINNER_NUM": "2"}
    record = encode_stored_record(sound(PLAIN, queue_offset=2, sys_flag=sys_flag, body=body, properties=properties))
    whole = answer(record, count=count)

    def rows_of(pull: Pulled) -> dict[int, bytes | None]:
        """Return the body of each offset, None if it is unreadable."""
        unreadable: list[Unreadable] = []
        found: dict[int, bytes | None] = {}
        for batch in batches_of([pull], SCHEMA, None, skipping_into(unreadable)):
            for row in batch.to_pylist():
                assert found.setdefault(row["queueOffset"], row["body"]) == row["body"]
        spans = [range(one.start, one.end) for one in unreadable]
        assert found.keys().isdisjoint(itertools.chain(*spans))
        return found | dict.fromkeys(itertools.chain(*spans))

    expected = rows_of(whole)
    assert expected.keys() == set(range(whole.end))
    sound_items = items if sys_flag & 0xC0 == 0xC0 else 1
    assert (None in expected.values()) == (sound_items != count)
    at = bytes(whole.body).index(record)
    for start, end in [(first, last) for first in range(whole.end) for last in (first + 1, whole.end)]:
        # A broker's answer begins with the record that has the first offset.
        begin = 0 if start < 2 else at if start < 2 + count else at + len(record)
        pull = Pulled(QUEUE, start, end, bytes(whole.body)[begin:])
        assert rows_of(pull) == {offset: row for offset, row in expected.items() if start <= offset < end}
        assert missing_offsets(pull) == missing_records(pull) == []


@pytest.mark.parametrize("value", ["999999", "-1", "x", "9" * 5000])
def test_inner_batch_size_claimed_by_a_sender_is_bounded(value: str) -> None:
    message = sound(PLAIN, queue_offset=2, sys_flag=0xC0, body=b"x", properties={"INNER_NUM": value})
    skipped = SkippedMessages()
    list(batches_of([Pulled(QUEUE, 0, 10**6, encode_stored_record(message))], SCHEMA, None, skipped.skip))
    assert skipped.by_topic["orders"] <= 65_535


def test_claimed_range_of_unreadable_messages_takes_no_memory() -> None:
    # After a wrong record length all offsets up to the next offset are unreadable. The broker chooses the next offset.
    records = b"".join(encode_stored_record(message) for message in regular(5) if message.queue_offset != 2)
    pull = Pulled(QUEUE, 0, 2**40, records + struct.pack(">i", 1))
    assert missing_offsets(pull) == missing_records(pull) == [(2, 3)]


@pytest.mark.parametrize("end", [b"", struct.pack(">i", 1)])
def test_records_are_missing_before_between_and_after_others(end: bytes) -> None:
    def missing(*parts: bytes, stop: int) -> list[tuple[int, int]]:
        return missing_records(Pulled(QUEUE, 3, stop, b"".join(parts) + end))

    at = {message.queue_offset: encode_stored_record(message) for message in regular(9)}
    # A broker counts the messages of an inner batch, which may begin before the pull. It is not unpacked.
    fields = {"sys_flag": 0xC1, "body": b"?", "properties": {"INNER_NUM": "4"}}
    inner = {offset: encode_stored_record(sound(PLAIN, queue_offset=offset, **fields)) for offset in (1, 5)}
    assert missing(at[3], at[4], stop=5) == []
    assert missing(at[2], at[3], at[4], stop=5) == []
    assert missing(at[4], at[6], stop=7) == [(3, 4), (5, 6)]
    assert missing(at[8], stop=6) == [(3, 6)]
    assert missing(inner[1], inner[5], stop=9) == []
    assert missing(inner[1], at[6], stop=7) == [(5, 6)]
    # After a wrong length, nothing is known to be missing.
    assert missing(inner[1], stop=9) == ([(5, 9)] if not end else [])
    assert missing(stop=9) == ([(3, 9)] if not end else [])


# Entries that a client may write: values with 0x01 or NUL, empty names or values, repeated names, any valid Unicode.
ENTRIES = st.sampled_from(
    [
        "a\x01b",
        "a\x01",
        "\x01b",
        "\x01",
        "",
        "TAGS\x01a",
        "k\x01a\x01b",
        "k\x01\0",
        "k\x01\ufffd\uffff",
        "\U0010ffff\x01\U0001f600",
    ]
)


def decoded_by_both(pull: Pulled, schema: pa.Schema = RAW, tags: frozenset[str] | None = None) -> pa.RecordBatch:
    """Return the batch that the vectorised and the plain decoder agree on."""
    batch = decode([pull], schema, tags, on_unreadable=lambda _: True)
    assert batch.equals(decode_rows([pull], schema, tags, on_unreadable=lambda _: True))
    return batch


@given(st.lists(ENTRIES, max_size=4), st.sampled_from(["", "\x02"]), st.booleans())
def test_properties_that_a_client_can_write_are_readable(entries: list[str], last: str, inner: bool) -> None:
    text = ("\x02".join(entries) + last).encode()
    record = with_properties(text)
    if inner:
        record = encode_stored_record(sound(PLAIN, queue_offset=2, sys_flag=0xC0, body=item_of(b"body 2", text)))
    batch = decoded_by_both(answer(record))
    assert batch.column(UNREADABLE).null_count == 5
    assert dict(batch.column("properties").to_pylist()[2]) == decode_properties(text)


PIECES = st.sampled_from(
    [b"\x01", b"\x02", b"a", b"TAGS\x01a\x02", "é".encode(), b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\0"]
)


@given(st.lists(st.lists(PIECES, max_size=6).map(b"".join), max_size=6), st.booleans())
def test_bad_property_text_is_unreadable_to_both_decoders(texts: list[bytes], inner: bool) -> None:
    def bad(text: bytes) -> bool:
        try:
            return any(entry and "\x01" not in entry for entry in text.decode().split("\x02"))
        except UnicodeDecodeError:
            return True

    items = [item_of(b"body %d" % at, text) for at, text in enumerate(texts)]
    records = [
        with_properties(text, encode_stored_record(sound(PLAIN, queue_offset=at, properties={})))
        for at, text in enumerate(texts)
    ]
    if inner and items:
        counted = {"INNER_NUM": str(len(items))}
        records = [encode_stored_record(sound(PLAIN, sys_flag=0xC0, body=b"".join(items), properties=counted))]
    pull = Pulled(QUEUE, 0, len(texts), b"".join(records))
    rows = decoded_by_both(pull).to_pylist()
    assert [(row["queueOffset"], row[UNREADABLE] is not None) for row in rows] == list(enumerate(map(bad, texts)))
    rows = decoded_by_both(pull, RAW, frozenset("a")).to_pylist()
    tagged = [at for at, text in enumerate(texts) if bad(text) or decode_properties(text).get("TAGS") == "a"]
    assert [row["queueOffset"] for row in rows] == tagged


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_bad_properties_of_one_item_keep_the_rest_of_an_inner_batch(text: bytes) -> None:
    items = [item_of(b"item %d" % number, b"TAGS\x01a\x02" if number != 1 else text) for number in range(3)]
    message = sound(PLAIN, queue_offset=2, sys_flag=0xC0, body=b"".join(items), properties=INNER)
    rows = decoded_by_both(answer(encode_stored_record(message), count=3)).to_pylist()
    assert [row["queueOffset"] for row in rows if row[UNREADABLE]] == [3]
    assert [row["body"] for row in rows[2:5]] == [b"item 0", b"item 1", b"item 2"]
    assert rows[3][UNREADABLE].startswith("message 1 of the inner batch at offset 2: the property string ")
    assert (rows[3]["flag"], rows[3]["tags"], rows[3]["properties"], rows[3]["msgId"]) == (7, None, None, None)


def test_a_long_bad_entry_is_shortened_in_the_reason() -> None:
    (row,) = decoded_by_both(answer(with_properties(b"x" * 30_000)), RAW).slice(2, 1).to_pylist()
    assert len(row[UNREADABLE]) < 250


def test_properties_that_no_column_needs_are_not_parsed() -> None:
    pull = answer(with_properties(BAD_TEXTS[0]))
    for names in (["queueOffset"], ["body", "queueOffset", "offsetMsgId"]):
        schema = pa.schema([SCHEMA.field(name) for name in names])
        for decoder in (decode, decode_rows):
            assert decoder([pull], schema).column("queueOffset").to_pylist() == [0, 1, 2, 3, 4]
    # The column of reasons, or a filter, needs the properties.
    assert decoded_by_both(pull, pa.schema([RAW.field(UNREADABLE)])).column(0).null_count == 4
    for decoder in (decode, decode_rows):
        with pytest.raises(RemotingCommandException, match="offset 2"):
            decoder([pull], pa.schema([SCHEMA.field("queueOffset")]), frozenset("a"))


@pytest.mark.parametrize("kind", DAMAGES)
def test_reasons_do_not_depend_on_the_other_columns(kind: str) -> None:
    batch = decoded_by_both(answer(DAMAGES[kind][0]()), pa.schema([RAW.field("queueOffset"), RAW.field(UNREADABLE)]))
    assert [reason is not None for reason in batch.column(1).to_pylist()] == [False, False, True, False, False]


def test_a_tag_filter_excludes_unreadable_messages_of_other_tags() -> None:
    message = sound(regular(3)[2], sys_flag=0x701, properties={"TAGS": "b"})
    pull = answer(encode_stored_record(message))
    (batch,) = batches_of([pull], SCHEMA, frozenset("a"))
    assert batch.column("queueOffset").to_pylist() == [0, 1, 3, 4]
    for tags in (frozenset("b"), frozenset("ab")):
        with pytest.raises(RemotingCommandException, match="offset 2"):
            list(batches_of([pull], SCHEMA, tags))
    # The tag of a record that cannot be decoded is unknown.
    with pytest.raises(RemotingCommandException, match="offset 2"):
        list(batches_of([answer(DAMAGES["magic"][0]())], SCHEMA, frozenset("b")))
    # The tag is unknown too if the properties cannot be parsed.
    for kind in UNKNOWN_PROPERTIES:
        with pytest.raises(RemotingCommandException, match="offset 2"):
            list(batches_of([answer(DAMAGES[kind][0]())], SCHEMA, frozenset("c")))


def test_a_body_that_no_column_needs_is_not_decompressed() -> None:
    offsets = pa.schema([("queueOffset", pa.int64())])
    pull = answer(record_of(sys_flag=0x701))
    for decoder in (decode, decode_rows):
        assert decoder([pull], offsets).column("queueOffset").to_pylist() == [0, 1, 2, 3, 4]


def test_properties_of_unreadable_messages_count_for_the_size_of_a_batch() -> None:
    names = {f"{number:x}": "v" for number in range(300)}
    bad = [dataclasses.replace(sound(PLAIN, queue_offset=at, properties=names), body_crc=1) for at in range(10)]
    pull = Pulled(QUEUE, 0, 10, b"".join(map(encode_stored_record, bad)))
    # A property is a Python object of some 200 bytes.
    found = list(batches_of([pull], SCHEMA, None, lambda _: True, most_unpacked=150_000))
    assert [batch.num_rows for batch in found] == [2] * 5


def test_each_unreadable_message_is_reported_once_where_batches_are_split() -> None:
    flag = CompressionType.ZLIB.sys_flag
    good = [sound(PLAIN, queue_offset=at, sys_flag=flag, body=zlib.compress(bytes(400))) for at in (0, 1, 3, 4)]
    bad = sound(PLAIN, queue_offset=2, sys_flag=flag, body=b"no zlib")
    pull = Pulled(QUEUE, 0, 5, b"".join(map(encode_stored_record, [*good[:2], bad, *good[2:]])))
    skipped = SkippedMessages()
    batches = list(batches_of([pull], SCHEMA, None, skipped.skip, most_unpacked=1_000))
    assert len(batches) > 1
    assert [offset for batch in batches for offset in batch.column("queueOffset").to_pylist()] == [0, 1, 3, 4]
    assert skipped.by_topic == {"orders": 1}


@given(st.data(), st.sampled_from([*DAMAGES]).filter(lambda kind: kind != "too large"))
def test_after_any_bit_flip_every_offset_is_read_or_reported(data: st.DataObject, kind: str) -> None:
    body = bytearray(answer(DAMAGES[kind][0]()).body)
    # No damage in the five queue offsets, which identify the records.
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= 1 << data.draw(st.integers(0, 7))
    offsets = [
        int.from_bytes(body[place : place + 8], "big") for place in offsets_at(bytes(answer(DAMAGES[kind][0]()).body))
    ]
    if offsets != [0, 1, 2, 3, 4]:
        return
    covered: set[int] = set()

    def skip(message: Unreadable) -> bool:
        covered.update(range(message.start, message.end))
        return False

    for batch in batches_of([Pulled(QUEUE, 0, 5, bytes(body))], SCHEMA, None, skip):
        covered.update(batch.column("queueOffset").to_pylist())
    assert covered == {0, 1, 2, 3, 4}


def offsets_at(body: bytes) -> list[int]:
    at, places = 0, []
    while at < len(body):
        places.append(at + 20)
        at += int.from_bytes(body[at : at + 4], "big")
    return places


def test_warnings_of_skipped_messages_are_one_per_second_with_a_last_sum(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    skipped = SkippedMessages(lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            skipped.skip(Unreadable(QUEUE, number, number + 1, "reason", b""))
            now += 0.1
        skipped.close()
        skipped.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 6
    assert texts[0] == (
        "onUnreadable=skip: this task has left out 1 messages so far; the newest: orders/broker-a/3, the message at "
        "offset 0 cannot be read: reason"
    )
    assert "left out 50 messages so far; the newest: orders/broker-a/3, the message at offset 49" in texts[-1]
