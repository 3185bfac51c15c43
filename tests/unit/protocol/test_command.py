from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import MQClientException, RemotingCommandException
from rocketmq_spark.protocol.remoting.command import RemotingCommand, decode_command
from tests.support.frames import SerializeType, encode_command, encode_head
from tests.support.strategies import commands, int32s

HEADER_TYPES = st.sampled_from(SerializeType)


def json_frame(header: str | bytes, body: bytes = b"") -> memoryview:
    data = header if isinstance(header, bytes) else header.encode()
    return memoryview(struct.pack(">I", len(data)) + data + body)


def binary_frame(header: bytes, body: bytes = b"") -> memoryview:
    return memoryview(struct.pack(">I", 1 << 24 | len(header)) + header + body)


@given(commands(), HEADER_TYPES)
def test_header_round_trips_in_both_types(command: RemotingCommand, serialize_type: SerializeType) -> None:
    frame = encode_command(command, serialize_type)
    assert struct.unpack_from(">i", frame) == (len(frame) - 4,)
    assert decode_command(memoryview(frame)[4:]) == command


@given(commands(codes=int32s))
def test_json_header_carries_codes_that_a_binary_one_can_not(command: RemotingCommand) -> None:
    assert decode_command(memoryview(encode_command(command))[4:]) == command


@given(commands())
def test_json_header_is_standard_json_without_spaces(command: RemotingCommand) -> None:
    head = encode_head(command, 0)
    header = json.loads(head[8:])
    assert list(header)[:5] == ["code", "language", "version", "opaque", "flag"]
    assert header.get("extFields", {}) == command.ext_fields
    assert ("remark" in header) == bool(command.remark)


@pytest.mark.parametrize(
    ("flag", "is_response", "is_oneway"), [(0, False, False), (1, True, False), (2, False, True), (3, True, True)]
)
def test_flag_bits(flag: int, is_response: bool, is_oneway: bool) -> None:
    command = RemotingCommand(0, 0, flag=flag)
    assert (command.is_response, command.is_oneway) == (is_response, is_oneway)


def test_repr_shows_names_and_sizes_but_no_values() -> None:
    command = RemotingCommand(310, 7, {"Signature": "c2lnbmF0dXJl", "AccessKey": "alice"}, b"secret body")
    assert repr(command) == (
        "<RemotingCommand request code=310 opaque=7 remark='' ext_fields=['AccessKey', 'Signature'] body=11 bytes>"
    )


def test_body_is_a_slice_of_the_frame() -> None:
    frame = memoryview(encode_command(RemotingCommand(0, 1, body=b"x" * 100)))
    body = decode_command(frame[4:]).body
    assert isinstance(body, memoryview)
    assert body.obj is frame.obj


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_answer_with_six_megabytes_of_message_ids(serialize_type: SerializeType) -> None:
    ids = ",".join(f"{number:032X}" for number in range(180_000))
    command = RemotingCommand(0, 1, {"msgId": ids, "queueId": "0"}, flag=1)
    assert decode_command(memoryview(encode_command(command, serialize_type))[4:]) == command


def test_ext_fields_that_are_not_text_are_converted_like_java() -> None:
    frame = json_frame('{"code":0,"opaque":1,"extFields":{"a":5,"b":true,"c":false,"d":1.5,"e":null,"f":"x"}}')
    assert decode_command(frame).ext_fields == {"a": "5", "b": "true", "c": "false", "d": "1.5", "f": "x"}


def test_optional_fields_can_be_missing_and_unknown_ones_are_ignored() -> None:
    frame = json_frame('{"code":17,"opaque":-1,"remark":null,"extFields":null,"serializeTypeCurrentRPC":"JSON","x":[]}')
    assert decode_command(frame) == RemotingCommand(17, -1, {}, language="OTHER", version=0)


def test_escapes_of_whole_characters_are_read() -> None:
    frame = json_frame(r'{"code":0,"opaque":1,"remark":"\ud83d\ude00 \u00e9 \u0001"}')
    assert decode_command(frame).remark == "\U0001f600 \u00e9 \x01"


def test_unknown_language_is_kept_in_json_and_other_in_binary() -> None:
    assert decode_command(json_frame('{"code":0,"opaque":1,"language":"FOO"}')).language == "FOO"
    header = struct.pack(">hbhiiii", 0, 99, 0, 1, 1, 0, 0)
    assert decode_command(binary_frame(header)).language == "OTHER"
    foreign = RemotingCommand(0, 1, language="FOO")
    assert decode_command(memoryview(encode_command(foreign, SerializeType.ROCKETMQ))[4:]).language == "OTHER"


def test_binary_header_drops_empty_names_and_values() -> None:
    entries = b"".join(
        struct.pack(">h", len(key)) + key + struct.pack(">i", len(value)) + value
        for key, value in [(b"a", b""), (b"", b"x"), (b"k", b"v")]
    )
    header = struct.pack(">hbhiii", 0, 0, 513, 1, 1, 0) + struct.pack(">i", len(entries)) + entries
    assert decode_command(binary_frame(header)).ext_fields == {"k": "v"}


def test_binary_header_omits_empty_values() -> None:
    ours = encode_command(RemotingCommand(0, 1, {"a": "", "k": "v"}), SerializeType.ROCKETMQ)
    assert ours == encode_command(RemotingCommand(0, 1, {"k": "v"}), SerializeType.ROCKETMQ)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ('{"code":0,"opaque":1', "JSON"),
        (b'{"code":0,"opaque":1,"remark":"\xff"}', "JSON"),
        ('{"code":0,"opaque":' + "1" * 5000 + "}", "opaque|JSON"),
        ("[]", "list"),
        ("null", "NoneType"),
        ('{"opaque":1}', "'code' is missing"),
        ('{"code":0}', "'opaque' is missing"),
        ('{"code":null,"opaque":1}', "'code' is missing"),
        ('{"code":"0","opaque":1}', "'code' must be"),
        ('{"code":true,"opaque":1}', "'code' must be"),
        ('{"code":0.0,"opaque":1}', "'code' must be"),
        ('{"code":0,"opaque":[1]}', "'opaque' must be"),
        ('{"code":0,"opaque":2147483648}', "'opaque' must be"),
        ('{"code":0,"opaque":-2147483649}', "'opaque' must be"),
        ('{"code":0,"opaque":1,"flag":"1"}', "'flag' must be"),
        ('{"code":0,"opaque":1,"version":{}}', "'version' must be"),
        ('{"code":0,"opaque":1,"remark":5}', "'remark'"),
        ('{"code":0,"opaque":1,"language":0}', "'language'"),
        ('{"code":0,"opaque":1,"extFields":["a"]}', "'extFields' is a list"),
        ('{"code":0,"opaque":1,"extFields":"a"}', "'extFields' is a str"),
        ('{"code":0,"opaque":1,"extFields":{"a":["b"]}}', "ext field 'a' is a list"),
        ('{"code":0,"opaque":1,"extFields":{"a":{}}}', "ext field 'a' is a dict"),
        (r'{"code":0,"opaque":1,"remark":"\ud800"}', "surrogates"),
        (r'{"code":0,"opaque":1,"extFields":{"\udfffa":"b"}}', "surrogates"),
        ('{"code":0,"opaque":1,"extFields":' + "[" * 200_000, "JSON"),
        ('{"code":0,"opaque":1,"extFields":' + '{"a":' * 200_000, "JSON"),
    ],
    ids=range(28),
)
def test_ill_formed_json_header_is_refused(header: str | bytes, names: str) -> None:
    with pytest.raises(RemotingCommandException, match=names):
        decode_command(json_frame(header))


@pytest.mark.parametrize("frame", [b"", b"\0", b"\0\0\0", b"\0\0\0\1", b"\0\0\0\3{}", b"\0\xff\xff\xff{}", b"\1\0\0\1"])
def test_header_longer_than_the_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="header"):
        decode_command(memoryview(frame))


@pytest.mark.parametrize("serialize_type", [2, 3, 127, 128, 255])
def test_unknown_serialize_type_is_refused(serialize_type: int) -> None:
    with pytest.raises(RemotingCommandException, match=f"serialize type {serialize_type}"):
        decode_command(memoryview(bytes([serialize_type, 0, 0, 2]) + b"{}"))


@pytest.mark.parametrize("size", range(21 + 2 + 12))
def test_truncated_binary_header_is_refused(size: int) -> None:
    # 21 fixed bytes, a remark of 2, one entry of 2 + 2 + 4 + 4.
    command = RemotingCommand(0, 1, {"ab": "cdef"}, remark="xy")
    header = encode_head(command, 0, SerializeType.ROCKETMQ)[8:]
    assert len(header) == 21 + 2 + 12
    with pytest.raises(RemotingCommandException, match="binary header"):
        decode_command(binary_frame(header[:size]))


@pytest.mark.parametrize(
    ("tail", "names"),
    [
        (struct.pack(">i", -1), "remark claims -1"),
        (struct.pack(">i", 2**31 - 1), "remark claims 2147483647"),
        (struct.pack(">i", 2) + b"\xff\xff" + struct.pack(">i", 0), "remark is not UTF-8"),
        (struct.pack(">ii", 0, -5), "extFields claims -5"),
        (struct.pack(">ii", 0, 7), "extFields claims 7"),
        (struct.pack(">iihi", 0, 6, -1, 0), "ext field name claims -1"),
        (struct.pack(">iihi", 0, 6, 9, 0), "ext field name claims 9"),
        (struct.pack(">iih", 0, 3, 1) + b"a", "length of ext field 'a'"),
        (struct.pack(">iih", 0, 7, 1) + b"a" + struct.pack(">i", -2), "ext field 'a' claims -2"),
        (struct.pack(">iih", 0, 8, 1) + b"a" + struct.pack(">i", 2) + b"v", "ext field 'a' claims 2"),
        (struct.pack(">iih", 0, 8, 1) + b"a" + struct.pack(">i", 1) + b"\xff", "ext field 'a' is not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ill_formed_binary_header_is_refused(tail: bytes, names: str) -> None:
    with pytest.raises(RemotingCommandException, match=names):
        decode_command(binary_frame(struct.pack(">hbhii", 0, 0, 513, 1, 1) + tail))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_command_or_refused(frame: bytes) -> None:
    try:
        command = decode_command(memoryview(frame))
    except RemotingCommandException:
        return
    assert command.body == frame[len(frame) - len(command.body) :]


@given(commands(), HEADER_TYPES, st.data())
def test_damaged_header_is_a_command_or_refused(
    command: RemotingCommand, serialize_type: SerializeType, data: st.DataObject
) -> None:
    frame = bytearray(encode_command(command, serialize_type)[4:])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        damaged = decode_command(bytes(frame))
    except RemotingCommandException:
        return
    assert bytes(frame).endswith(bytes(damaged.body))


@pytest.mark.parametrize("value", ["\ud800", "v" * 2**24], ids=["surrogate", "header"])
def test_command_that_does_not_fit_a_header_is_a_permanent_error(value: str) -> None:
    with pytest.raises(MQClientException, match="encoding") as caught:
        encode_head(RemotingCommand(0, 1, {"k": value}), 0)
    assert not caught.value.retriable


@pytest.mark.parametrize("body_length", [-1, 2**31 - 4, 2**31, 2**40])
def test_body_that_does_not_fit_a_frame_is_refused(body_length: int) -> None:
    with pytest.raises(MQClientException, match=f"body of {body_length}"):
        encode_head(RemotingCommand(0, 1), body_length)
