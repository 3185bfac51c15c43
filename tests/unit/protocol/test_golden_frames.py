from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.model.message import Message
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand, decode_command
from rocketmq_spark.protocol.remoting.headers import (
    GetRouteInfoRequestHeader,
    PullMessageRequestHeader,
    SendMessageRequestHeaderV2,
    UnregisterClientRequestHeader,
    heart_beat_body,
)
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_records, encode_batch, encode_properties
from rocketmq_spark.protocol.remoting.responses import (
    PullMessageResponseHeader,
    SendMessageResponseHeader,
    decode_topic_route,
    read_long,
)
from tests.support.frames import SerializeType, encode_command, encode_head
from tests.vectors import load

FRAMES = {frame["name"]: frame for frame in load("remoting_frames.json")["frames"]}
REQUESTS = [frame["request"] for frame in FRAMES.values() if "request" in frame]
RESPONSES = [frame["response"] for frame in FRAMES.values()]
JAVA_COMMANDS = load("java_codecs.json")["commands"]

UNIQ_KEY = "0A0000010001000000010000000A000"
G5_MESSAGES = [
    Message("spec_rm_t1", b"m0", 7, {"KEYS": "k0", "UNIQ_KEY": UNIQ_KEY + "2"}),
    Message("spec_rm_t1", b"m1", 0, {"UNIQ_KEY": UNIQ_KEY + "3"}),
]


def command_of(meaning: dict[str, Any]) -> RemotingCommand:
    return RemotingCommand(
        code=meaning["code"],
        opaque=meaning["opaque"],
        ext_fields=meaning["ext_fields"],
        body=bytes.fromhex(meaning["body_hex"]),
        flag=meaning["flag"],
        remark=meaning["remark"],
        language=meaning["language"],
        version=meaning["version"],
    )


def response(name: str) -> RemotingCommand:
    return decode_command(memoryview(bytes.fromhex(FRAMES[name]["response"]["hex"]))[4:])


def single_send() -> RemotingCommand:
    properties = encode_properties({"KEYS": "k1", "UNIQ_KEY": UNIQ_KEY + "1", "WAIT": "true"}).decode()
    header = SendMessageRequestHeaderV2(
        producer_group="spec_pg",
        topic="spec_rm_t1",
        queue_id=0,
        born_timestamp=1_700_000_000_000,
        properties=properties,
        broker_name="broker-a",
    )
    return RemotingCommand(RequestCode.SEND_MESSAGE_V2, 3, header.to_ext_fields(), b"hello")


def batch_send() -> RemotingCommand:
    header = SendMessageRequestHeaderV2(
        producer_group="spec_pg",
        topic="spec_rm_t1",
        queue_id=0,
        born_timestamp=1_700_000_000_000,
        batch=True,
        broker_name="broker-a",
    )
    return RemotingCommand(RequestCode.SEND_BATCH_MESSAGE, 5, header.to_ext_fields(), encode_batch(G5_MESSAGES))


def pull() -> RemotingCommand:
    header = PullMessageRequestHeader(
        consumer_group="spec_cg", topic="spec_rm_t1", queue_id=0, queue_offset=16, max_msg_nums=2, broker_name=None
    )
    return RemotingCommand(RequestCode.PULL_MESSAGE, 6, header.to_ext_fields())


def route() -> RemotingCommand:
    return RemotingCommand(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, 1, GetRouteInfoRequestHeader(topic="spec_rm_t1").to_ext_fields()
    )


def unregister() -> RemotingCommand:
    header = UnregisterClientRequestHeader(client_id="10.0.0.1@spec", producer_group="spec_pg")
    return RemotingCommand(RequestCode.UNREGISTER_CLIENT, 7, header.to_ext_fields())


OUR_REQUESTS = {
    "G1": route(),
    "G2": RemotingCommand(RequestCode.HEART_BEAT, 2, {}, heart_beat_body("10.0.0.1@spec", ["spec_pg"])),
    "G3": single_send(),
    "G5": batch_send(),
    "G6": pull(),
    "G7": unregister(),
}


@pytest.mark.parametrize("name", OUR_REQUESTS)
def test_requests_of_our_headers_are_the_golden_bytes(name: str) -> None:
    assert encode_command(OUR_REQUESTS[name]).hex() == FRAMES[name]["request"]["hex"]


def test_binary_request_is_the_golden_bytes() -> None:
    request = single_send()
    binary = RemotingCommand(request.code, 4, request.ext_fields, request.body)
    assert encode_command(binary, SerializeType.ROCKETMQ).hex() == FRAMES["G4"]["request"]["hex"]


@pytest.mark.parametrize("vector", REQUESTS, ids=lambda vector: str(vector["meaning"]["opaque"]))
def test_requests_encode_from_their_meaning(vector: dict[str, Any]) -> None:
    serialize_type = SerializeType[vector["meaning"]["serialize_type"]]
    assert encode_command(command_of(vector["meaning"]), serialize_type).hex() == vector["hex"]


@pytest.mark.parametrize("vector", [*REQUESTS, *RESPONSES, *JAVA_COMMANDS], ids=lambda vector: vector["hex"][:40])
def test_frames_decode_to_their_meaning(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["hex"])
    assert decode_command(memoryview(frame)[4:]) == command_of(vector["meaning"])


def test_binary_header_equals_that_of_java() -> None:
    (vector,) = (vector for vector in JAVA_COMMANDS if vector["meaning"]["serialize_type"] == "ROCKETMQ")
    assert encode_command(command_of(vector["meaning"]), SerializeType.ROCKETMQ).hex() == vector["hex"]


def test_separately_encoded_head_and_body_equal_the_frame() -> None:
    command = batch_send()
    assert encode_head(command, len(command.body)) + bytes(command.body) == encode_command(command)


def test_route_response() -> None:
    assert decode_topic_route(bytes(response("G1").body)) == TopicRouteData(
        queue_datas=(QueueData("broker-a", 4, 4, 6),),
        broker_datas=(BrokerData("broker-a", {0: "127.0.0.1:10911"}, "DefaultCluster"),),
    )


def test_single_send_response() -> None:
    assert SendMessageResponseHeader.from_ext_fields(response("G3").ext_fields) == SendMessageResponseHeader(
        msg_id="7F00000100002A9F00000002B943DDBE",
        queue_id=0,
        queue_offset=14,
        transaction_id=UNIQ_KEY + "1",
    )


def test_batch_send_response_has_an_id_per_item_and_no_transaction_id() -> None:
    assert SendMessageResponseHeader.from_ext_fields(response("G5").ext_fields) == SendMessageResponseHeader(
        msg_id="7F00000100002A9F00000002B943DF86,7F00000100002A9F00000002B943E01F",
        queue_id=0,
        queue_offset=16,
    )


def test_pull_response() -> None:
    answer = response("G6")
    assert answer.remark == "FOUND"
    assert PullMessageResponseHeader.from_ext_fields(answer.ext_fields) == PullMessageResponseHeader(
        next_begin_offset=18, min_offset=0, max_offset=18
    )


def test_pulled_records_are_the_batch_that_was_sent() -> None:
    records = decode_records(response("G6").body)
    assert [Message(r.topic, r.body, r.flag, r.properties) for r in records] == G5_MESSAGES
    assert [(r.queue_id, r.queue_offset, r.sys_flag, r.born_timestamp, r.body_crc) for r in records] == [
        (0, 16, 0, 1_700_000_000_000, 928_200_633),
        (0, 17, 0, 1_700_000_000_000, 1_079_248_687),
    ]
    # The ids equal those in the answer to the send.
    assert [r.offset_msg_id for r in records] == response("G5").ext_fields["msgId"].split(",")
    assert [(r.born_host, r.store_host) for r in records] == [("127.0.0.1:46066", "127.0.0.1:10911")] * 2


def test_batch_body_of_the_request_decodes_to_its_messages() -> None:
    assert decode_batch(batch_send().body, "spec_rm_t1") == G5_MESSAGES


def test_binary_response() -> None:
    assert read_long(response("binary-response").ext_fields, "offset") == 3
