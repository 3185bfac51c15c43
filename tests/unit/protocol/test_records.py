from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import MQClientException, RemotingCommandException
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import (
    ITEM_OVERHEAD,
    MAX_BATCH_ROWS,
    MAX_PROPERTIES,
    decode_batch,
    decode_properties,
    decode_records,
    encode_batch,
    encode_properties,
    encode_record,
    unique_id,
    unique_id_prefix,
)
from tests.support.strategies import batches, encode_stored_record, properties, property_texts, stored_messages
from tests.vectors import load

JAVA = load("java_codecs.json")


@given(properties)
def test_properties_round_trip_in_order(values: dict[str, str]) -> None:
    decoded = decode_properties(encode_properties(values))
    assert list(decoded.items()) == list(values.items())


@given(properties)
def test_property_string_is_name_0x01_value_0x02(values: dict[str, str]) -> None:
    assert encode_properties(values).decode() == "".join(f"{name}\x01{value}\x02" for name, value in values.items())


def test_property_without_a_value_is_omitted() -> None:
    assert encode_properties({"a": None, "b": "2", "c": None}) == b"b\x012\x02"
    assert encode_properties({}) == encode_properties({"a": None}) == b""


@pytest.mark.parametrize("vector", JAVA["properties"], ids=lambda vector: vector["hex"] or "empty")
def test_property_strings_are_read_as_java_reads_them(vector: dict[str, Any]) -> None:
    assert decode_properties(bytes.fromhex(vector["hex"])) == vector["properties"]


def test_property_text_that_is_not_utf_8_is_replaced_not_refused() -> None:
    assert decode_properties(b"k\x01\xffv\x02") == {"k": "\ufffdv"}


@given(property_texts, property_texts, st.sampled_from("\x01\x02"), st.booleans(), st.integers(0, 20))
def test_separators_inside_properties_are_refused(
    name: str, value: str, separator: str, in_name: bool, at: int
) -> None:
    if in_name:
        name = name[:at] + separator + name[at:]
    else:
        value = value[:at] + separator + value[at:]
    with pytest.raises(MQClientException, match="0x01 or 0x02") as caught:
        encode_properties({name: value})
    assert caught.value.response_code == ResponseCode.MESSAGE_ILLEGAL


def test_properties_up_to_32767_bytes_are_accepted() -> None:
    assert len(encode_properties({"k": "ä" * 16_382})) == MAX_PROPERTIES
    with pytest.raises(MQClientException, match="32768 bytes") as caught:
        encode_properties({"kk": "ä" * 16_382})
    assert caught.value.response_code == ResponseCode.MESSAGE_ILLEGAL


def test_lone_surrogate_in_a_property_is_refused() -> None:
    with pytest.raises(MQClientException, match=r"\['k'\]"):
        encode_properties({"k": "\ud83d"})


def test_small_batch_item_vector() -> None:
    item = bytes.fromhex("000000180000000000000000000000000000000262300000")
    assert encode_batch([Message("T", b"b0")]) == item
    assert decode_batch(item) == [Message("", b"b0")]


def test_batch_equals_that_of_java() -> None:
    vector = JAVA["batch"]
    messages = [
        Message("T", bytes.fromhex(item["body_hex"]), item["flag"], dict(item["properties"]))
        for item in vector["messages"]
    ]
    assert encode_batch(messages).hex() == vector["hex"]
    assert decode_batch(bytes.fromhex(vector["hex"]), "T") == messages


@given(batches())
def test_batch_round_trips(messages: list[Message]) -> None:
    assert decode_batch(memoryview(encode_batch(messages)), messages[0].topic) == messages


@given(batches())
def test_batch_is_its_items_one_after_the_other(messages: list[Message]) -> None:
    items = [encode_batch([message]) for message in messages]
    assert encode_batch(iter(messages)) == b"".join(items)
    for message, item in zip(messages, items, strict=True):
        size = ITEM_OVERHEAD + len(message.body) + len(encode_properties(message.properties))
        assert (len(item), *struct.unpack_from(">iii", item)) == (size, size, 0, 0)


@given(batches(max_size=3), st.data())
def test_truncated_batch_is_refused(messages: list[Message], data: st.DataObject) -> None:
    body = encode_batch(messages)
    boundaries = [
        len(b"".join(encode_batch([message]) for message in messages[:count])) for count in range(len(messages) + 1)
    ]
    cut = data.draw(st.integers(1, len(body) - 1))
    if cut in boundaries:
        assert decode_batch(body[:cut], messages[0].topic) == messages[: boundaries.index(cut)]
    else:
        with pytest.raises(RemotingCommandException, match="a batch body"):
            decode_batch(body[:cut])


@pytest.mark.parametrize(
    "item",
    [
        struct.pack(">iiiiih", 22, 0, 0, 0, -1, 0),
        struct.pack(">iiiiih", 22, 0, 0, 0, 2**31 - 1, 0),
        struct.pack(">iiiiih", 22, 0, 0, 0, 0, -1),
        struct.pack(">iiiiih", 22, 0, 0, 0, 0, 32_767),
    ],
    ids=["body negative", "body too long", "properties negative", "properties too long"],
)
def test_batch_item_with_a_wrong_length_is_refused(item: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="bytes claimed"):
        decode_batch(item)


def test_empty_batch_body_has_no_messages() -> None:
    assert decode_batch(b"") == []


@pytest.mark.parametrize("rows", [0, MAX_BATCH_ROWS + 1])
def test_batch_of_no_or_too_many_rows_is_refused(rows: int) -> None:
    with pytest.raises(MQClientException, match=f"a batch of {rows} messages") as caught:
        encode_batch([Message("T", b"")] * rows)
    assert caught.value.response_code == ResponseCode.MESSAGE_ILLEGAL


def test_row_limit_of_a_batch_fits_a_broker_queue() -> None:
    assert MAX_BATCH_ROWS <= 32_767
    assert len(encode_batch([Message("T", b"")] * MAX_BATCH_ROWS)) == ITEM_OVERHEAD * MAX_BATCH_ROWS


def test_batch_of_several_topics_is_refused() -> None:
    with pytest.raises(MQClientException, match=r"\['A', 'B'\]"):
        encode_batch([Message("B", b"x"), Message("A", b"x")])


@pytest.mark.parametrize("flag", [2**31, -(2**31) - 1])
def test_flag_beyond_32_bits_is_refused(flag: int) -> None:
    with pytest.raises(MQClientException, match=str(flag)):
        encode_batch([Message("T", b"x", flag)])


@pytest.mark.parametrize("vector", JAVA["records"], ids=lambda vector: vector["name"])
def test_records_are_read_as_java_wrote_them(vector: dict[str, Any]) -> None:
    meaning = dict(vector["meaning"])
    body = bytes.fromhex(meaning.pop("body_hex"))
    (record,) = decode_records(bytes.fromhex(vector["hex"]))
    assert dataclasses.asdict(record) == {**meaning, "body": body}
    assert record.offset_msg_id == vector["offset_msg_id"]


@given(st.lists(stored_messages(), max_size=4))
def test_records_of_both_magics_and_address_families_decode(messages: list[MessageExt]) -> None:
    assert decode_records(memoryview(b"".join(map(encode_stored_record, messages)))) == messages


@given(stored_messages())
def test_records_round_trip_and_equal_those_of_brokers(message: MessageExt) -> None:
    encoded = encode_record(message)
    assert decode_records(encoded) == [message]
    if len(message.topic.encode()) > 127:
        assert encoded == encode_stored_record(message)


@given(st.lists(stored_messages(), min_size=1, max_size=3), st.data())
def test_truncated_records_are_refused_whole(messages: list[MessageExt], data: st.DataObject) -> None:
    records = [encode_stored_record(message) for message in messages]
    body = b"".join(records)
    boundaries = [len(b"".join(records[:count])) for count in range(len(records) + 1)]
    cut = data.draw(st.integers(1, len(body) - 1).filter(lambda at: at not in boundaries))
    with pytest.raises(RemotingCommandException, match="bytes claimed"):
        decode_records(body[:cut])


@given(stored_messages(), st.data())
def test_record_whose_size_is_too_small_is_refused(message: MessageExt, data: st.DataObject) -> None:
    record = encode_stored_record(message)
    size = data.draw(st.integers(-(2**31), len(record) - 1))
    with pytest.raises(RemotingCommandException, match="stored record"):
        decode_records(struct.pack(">i", size) + record[4:])


@pytest.mark.parametrize("magic", [0xCBD43194, 0, 0xDAA320A8, 0xFFFFFFFF])
def test_record_of_an_unknown_magic_is_refused(magic: int) -> None:
    record = bytearray.fromhex(JAVA["records"][0]["hex"])
    good = bytes(record)
    record[4:8] = struct.pack(">I", magic)
    with pytest.raises(RemotingCommandException, match=f"byte {len(good)}, .*0x{magic:08X}"):
        decode_records(good + bytes(record))


@pytest.mark.parametrize(("at", "layout"), [(84, ">i"), (93, ">b"), (100, ">h")], ids=["body", "topic", "properties"])
def test_record_with_a_negative_length_is_refused(at: int, layout: str) -> None:
    # IPv4 hosts: 84 bytes, body length 4, body 5, topic length 1, topic 6, properties length 2.
    record = bytearray.fromhex(JAVA["records"][0]["hex"])
    struct.pack_into(layout, record, at, -1)
    with pytest.raises(RemotingCommandException, match="-1 bytes claimed"):
        decode_records(bytes(record))


@given(st.binary(max_size=200))
def test_any_bytes_are_records_or_refused(data: bytes) -> None:
    try:
        records = decode_records(data)
    except RemotingCommandException:
        return
    assert data == b"" or records


def test_unique_id_consists_of_address_pid_loader_and_sequence() -> None:
    prefix = unique_id_prefix(bytes([10, 0, 0, 1]), 0x12345, 0xDEADBEEF)
    assert prefix.hex() == "0a0000012345deadbeef"
    assert unique_id(prefix, 1000 << 16 | 7) == "0A0000012345DEADBEEF000003E80007"


def test_unique_id_of_an_ipv6_client_has_56_digits() -> None:
    prefix = unique_id_prefix(bytes(range(16)), 1, -1)
    assert unique_id(prefix, 0) == "000102030405060708090A0B0C0D0E0F" + "0001" + "FFFFFFFF" + "0" * 12


def test_unique_ids_of_more_rows_than_a_counter_holds_carry_into_the_time() -> None:
    prefix = unique_id_prefix(bytes(4), 0, 0)
    start = 5 << 16
    ids = [unique_id(prefix, start + row) for row in (0, 65_535, 65_536)]
    assert [text[-12:] for text in ids] == ["000000050000", "00000005FFFF", "000000060000"]


def test_unique_id_sequence_wraps_at_48_bits() -> None:
    assert unique_id(b"", 2**48 + 3) == "000000000003"


@pytest.mark.parametrize("size", [0, 3, 5, 15, 17])
def test_unique_id_prefix_needs_an_address(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        unique_id_prefix(bytes(size), 1, 1)
