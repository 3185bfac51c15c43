"""Data far beyond the bounds of real servers is rejected, with short errors and without using memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.protocol.grpc.codes import call_error, proxy_error
from rocketmq_spark.protocol.remoting.codes import broker_error
from rocketmq_spark.protocol.remoting.command import RemotingCommand, decode_command
from rocketmq_spark.protocol.remoting.records import decode_batch
from rocketmq_spark.protocol.remoting.responses import (
    decode_all_topic_attributes,
    decode_cluster_info,
    decode_topic_list,
    decode_topic_route,
    loads_lenient,
    read_long,
)
from rocketmq_spark.protocol.remoting.unwrap import Unreadable, messages_of
from tests.support.frames import SerializeType, encode_command
from tests.support.strategies import HALF, encode_stored_record

# No error, log line or repr is longer than this.
SHORT = 6_000
ITEM = struct.pack(">iiiiih", 22, 0, 0, 0, 0, 0)


def header(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data


def route(brokers: int = 1, addresses: int = 1, queues: int = 4, name: str = "broker") -> bytes:
    addrs = {str(number): f"10.0.0.1:{number + 1}" for number in range(addresses)}
    names = [f"{name}-{number}" for number in range(brokers)]
    queue = {"readQueueNums": queues, "writeQueueNums": 1, "perm": 6}
    return json.dumps(
        {
            "brokerDatas": [{"brokerAddrs": addrs, "brokerName": one, "cluster": "c"} for one in names],
            "queueDatas": [{"brokerName": one, **queue} for one in names],
        }
    ).encode()


@pytest.mark.parametrize("serialize_type", SerializeType)
def test_ext_fields_up_to_10_000_are_accepted(serialize_type: SerializeType) -> None:
    fields = {f"name {number}": "text" for number in range(10_000)}
    command = RemotingCommand(0, 1, fields)
    assert decode_command(encode_command(command, serialize_type)[4:]) == command
    many = fields | {f"more {number}": "text" for number in range(5_000)}
    with pytest.raises(RemotingCommandException, match="10000 ext fields"):
        decode_command(encode_command(RemotingCommand(0, 1, many), serialize_type)[4:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" + "[]," * 500_000 + "[]]", "500002 objects and lists, 500000 are allowed"),
        ("[" + "{1:2}," * 500_000 + "{}]", "500002 objects and lists, 500000 are allowed"),
        ("9" * 41, "a number of 41 digits, 40 are allowed"),
        ("9" * 1_000_000, "a number of 1000000 digits, 40 are allowed"),
        ("[" * 100_000 + "]" * 100_000, "recursion"),
        ('"' + "x" * 1_000_000 + '"}', "Extra data"),
    ],
)
def test_json_with_too_many_objects_is_rejected_with_a_short_error(text: str, reason: str) -> None:
    with pytest.raises(RemotingCommandException, match=reason) as body:
        loads_lenient(text.encode())
    with pytest.raises(RemotingCommandException, match=reason) as head:
        decode_command(header(text))
    for refused in (body.value, head.value):
        assert len(str(refused)) < SHORT
        chain: BaseException | None = refused
        while chain is not None:
            # Errors of json hold the whole text as `doc`.
            assert sum(len(text) for text in vars(chain).values() if isinstance(text, str)) < SHORT
            assert len(repr(chain.args)) < SHORT
            chain = chain.__cause__ or chain.__context__


@pytest.mark.parametrize("depth", range(900, 1000, 7))
@pytest.mark.parametrize("read", [decode_topic_route, decode_cluster_info, decode_all_topic_attributes])
def test_json_nested_close_to_the_recursion_limit_is_rejected(read: Callable[[bytes], object], depth: int) -> None:
    with pytest.raises(RemotingCommandException):
        read(b"[" * depth + b"]" * depth)


def test_the_largest_route_is_read() -> None:
    found = decode_topic_route(route(brokers=10_000, queues=10))
    assert len(found.broker_datas) == 10_000
    assert len(decode_topic_route(route(addresses=100)).broker_datas[0].broker_addrs) == 100


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (route(brokers=10_001), "length of queueDatas is 10001, at most 10000"),
        (route(addresses=101), "number of addresses of a broker is 101, at most 100"),
        (route(queues=100_001), "number of queues is 100001, at most 100000"),
        (route(queues=2**31), "number of queues is 2147483648, at most 100000"),
        (route(name="b" * 512), "length of 'brokerName' is 514, at most 512 characters"),
        (route().replace(b"10.0.0.1", b"h" * 60_000), "length of '0' is 60002, at most 512 characters"),
        (route().replace(b'"c"', b'"%s"' % (b"c" * 1000)), "length of 'cluster' is 1000, at most 512 characters"),
        (route().replace(b'"0"', b'"%s"' % (b"9" * 60_000)), "a number is needed"),
    ],
)
def test_route_with_too_many_entries_is_rejected_with_a_short_error(body: bytes, reason: str) -> None:
    with pytest.raises(RemotingCommandException, match=reason) as refused:
        decode_topic_route(body)
    assert len(str(refused.value)) < SHORT


def test_list_of_200_000_topics_is_read_and_a_longer_one_is_refused() -> None:
    def listing(count: int) -> bytes:
        return json.dumps({"topicList": [f"t{number}" for number in range(count)], "brokerAddr": None}).encode()

    assert len(decode_topic_list(listing(200_000))) == 200_000
    for body in (listing(200_010), b'{"topicList":[' + b'"",' * 5_000_000 + b'""]}'):
        with pytest.raises(RemotingCommandException, match="reading the list of topics: more than 200000 names"):
            decode_topic_list(body)


def test_texts_from_servers_are_cut_in_errors() -> None:
    said = "start of it " + "x" * 1_000_000
    errors = [
        broker_error(1, said, "a:1", "sending"),
        proxy_error(50_001, said, "a:1", "sending"),
        call_error("INTERNAL", said, "a:1", "sending"),
    ]
    for error in errors:
        assert "start of it xxx" in str(error)
        assert len(str(error)) + len(repr(error.args)) < 3 * SHORT
    names = {f"{number}{said}": "" for number in range(3)}
    assert len(repr(RemotingCommand(1, 1, names, remark=said))) < 2 * SHORT
    with pytest.raises(RemotingCommandException, match="'offset' is missing") as missing:
        read_long(names, "offset")
    with pytest.raises(RemotingCommandException, match="has no topicList") as topics:
        decode_topic_list(json.dumps({said: said}).encode())
    with pytest.raises(RemotingCommandException, match="is a list") as field:
        decode_command(header(json.dumps({"code": 0, "opaque": 1, "extFields": {said: []}})))
    assert max(len(str(one.value)) for one in (missing, topics, field)) < SHORT


def test_cause_at_the_end_of_a_long_remark_is_recognised() -> None:
    remark = "x" * 100_000 + "] sending message is forbidden"
    assert type(broker_error(16, remark, "a:1", "sending")) is not type(broker_error(16, "x", "a:1", "sending"))


def test_a_batch_of_more_than_65_535_messages_is_refused() -> None:
    with pytest.raises(RemotingCommandException, match="more than 65535 messages"):
        decode_batch(ITEM * 65_536)


def test_inner_batch_outside_the_requested_offsets_is_not_unpacked() -> None:
    # Decoding the body would fail, because it is not a batch.
    broken = encode_stored_record(replace(HALF, sys_flag=0xC0, queue_offset=100))
    queue = MessageQueue("orders", "a", 0)
    assert list(messages_of(broken, queue, 0, 100)) == []
    assert list(messages_of(broken, queue, 100 + 65_535, 10**9)) == []
    (unpacked,) = messages_of(broken, queue, 99, 101)
    assert isinstance(unpacked, Unreadable)
