"""100,000 damaged inputs for all decoders of server data: each returns a value or raises a RocketMQError, without
leaks."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rocketmq_spark.deliveries.base import Write
from rocketmq_spark.deliveries.exactly_once.halves import HalfCollector, Halves
from rocketmq_spark.deliveries.log.records import (
    Decision,
    DoneRecord,
    HomeRecord,
    InvalidRecordError,
    UnreadableRecordError,
    encode,
    parse,
)
from rocketmq_spark.errors import RemotingCommandException, RocketMQError
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import decode_message_id, encode_message_id, format_host, pack_host
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.compression import CompressionType, compress, decompress
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.messages import route_of, transaction_check
from rocketmq_spark.protocol.remoting import responses
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand, decode_command
from rocketmq_spark.protocol.remoting.records import decode_batch, decode_properties, decode_records, encode_batch
from rocketmq_spark.protocol.remoting.responses import decode_topic_route, read_long, transaction_check_of
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.testing.fake_proxy_messages import status
from rocketmq_spark.transport.grpc.client import GrpcAnswer, parsed
from rocketmq_spark.transport.grpc.transport import _outcome_of as proxy_outcome_of
from rocketmq_spark.transport.remoting.requests import Answer, outcome_of
from tests.support.frames import SerializeType, encode_command
from tests.support.proxies import route_reply
from tests.support.strategies import HALF, damaged, encode_route, encode_stored_record
from tests.vectors import load

QUEUE = MessageQueue("orders", "broker-a", 0)
FIELDS = {
    "msgId": "7F00000100002A9F000000018A98AEF8",
    "queueId": "3",
    "queueOffset": "42",
    "offset": "42",
    "timestamp": "1700000000000",
    "transactionId": "U1",
    "tranStateTableOffset": "5",
    "commitLogOffset": "36804876",
    "nextBeginOffset": "7",
    "minOffset": "0",
    "maxOffset": "9",
    "suggestWhichBrokerId": "0",
    "MSG_REGION": "DefaultRegion",
    "TRACE_ON": "true",
}
HEADERS = [header for header in vars(responses).values() if hasattr(header, "from_ext_fields")]
LONGS = ("offset", "timestamp", "tranStateTableOffset", "commitLogOffset")

ITEMS = [Message("orders", b"body " * 9, 7, {"KEYS": "k1 k2", "TAGS": "a"}), Message("orders", b"", -1, {})]
BATCH = encode_batch(ITEMS)
TEXT = b"the same words again and again " * 40
STORED = replace(HALF, body=BATCH, properties={**HALF.properties, "INNER_NUM": "2"}, sys_flag=0xC0)
RECORDS = [
    encode_stored_record(STORED),
    encode_stored_record(
        replace(STORED, topic="%RETRY%" * 20, sys_flag=0x30, born_host="[::1]:1", store_host="[::2]:2")
    ),
    *(
        encode_stored_record(replace(STORED, body=compress(TEXT, kind), sys_flag=kind.sys_flag))
        for kind in CompressionType
    ),
]
ROUTE = TopicRouteData(
    (QueueData("broker-a", 4, 4, 6), QueueData("broker-b", 8, 8, 6)),
    (BrokerData("broker-a", {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}), BrokerData("broker-b", {0: "[::1]:10911"})),
)
ROUTES = [
    encode_route(ROUTE),
    encode_route(ROUTE, standard=False),
    encode_route(replace(ROUTE, order_topic_conf="broker-a:4;broker-b:4")),
]
FRAMES = [bytes.fromhex(one[side]["hex"]) for one in load("remoting_frames.json")["frames"]
          for side in ("request", "response") if side in one]  # fmt: skip
FRAMES += [encode_command(decode_command(frame[4:]), SerializeType.ROCKETMQ) for frame in FRAMES]
FRAMES += [encode_command(RemotingCommand(0, 7, FIELDS, b"body", 1, "remark"), kind) for kind in SerializeType]

SENDING = SendRequest(EncodedBatch("orders", (BATCH,), 2, len(BATCH), True), QUEUE, "proxy:8081", "pg", "TBW102", 4, 0)
RESULT = service.SendResultEntry(status=status(), message_id="M1", transaction_id="T1", offset=4, recall_handle="h")
HALF_MESSAGE = pb.Message(
    topic=pb.Resource(name="orders"),
    user_properties={"a": "b"},
    system_properties=pb.SystemProperties(message_id="M1", keys=["k"], queue_offset=4, delivery_attempt=1),
    body=b"half",
)
HALF_MESSAGE.system_properties.born_timestamp.FromMilliseconds(1_700_000_000_000)
HALF_MESSAGE.system_properties.delivery_timestamp.FromMilliseconds(1_700_000_000_000)
CHECK = service.RecoverOrphanedTransactionCommand(message=HALF_MESSAGE, transaction_id="T1")


_COLLECTOR = HalfCollector()
for _offset in range(20):
    _acknowledged = SendOutcome(
        QUEUE, SendStatus.SEND_OK, None, 1.0, _offset, encode_message_id("10.0.0.1:10911", _offset)
    )
    _COLLECTOR.append(QUEUE, 1_700_000_000_000, _acknowledged)
HALVES = _COLLECTOR.halves()
_WRITE = Write("7", "query")
LOG = (
    Decision(
        write=_WRITE,
        round=1,
        group="job#7#1#run",
        rows=20,
        timeout_ms=60_000,
        manifests=(3,),
        digest="0f" * 32,
        start_offsets={QUEUE: 5},
        youngest=HALVES.youngest,
    ),
    DoneRecord(write=_WRITE, since=4),
    HomeRecord(write=_WRITE, home=MessageQueue("decisions", "broker-a", 0), is_claim=True),
)


def read_frames(data: bytes) -> object:
    buffer = FrameBuffer()
    buffer.feed(data)
    return [texts_of(command) for command in iter(buffer.take, None)]


def read_header(data: bytes) -> object:
    # The lengths are correct, so that all of the damage reaches the header.
    kind = SerializeType.ROCKETMQ if data[:1] < b" " else SerializeType.JSON
    return texts_of(decode_command((kind << 24 | len(data)).to_bytes(4, "big") + data))


def read_fields(data: bytes) -> object:
    name, _, text = data.decode("utf-8", "replace").partition("\0")
    fields = {**FIELDS, name: text}
    outcome = outcome_of(QUEUE, 2, "broker:1", Answer(RemotingCommand(0, 1, fields, flag=1), None, 0.0))
    assert (outcome.status is None) is (outcome.error is not None)
    longs = [read_long(fields, name) for name in LONGS]
    return outcome, longs, [header.from_ext_fields(fields) for header in HEADERS]


def read_route(data: bytes) -> object:
    info = publish_info_of("orders", decode_topic_route(data))
    "".join((*info.addresses, *info.addresses.values(), *info.broker_names)).encode()
    return info


def read_records(data: bytes) -> object:
    return [
        (
            record,
            record.offset_msg_id,
            refusing(decompress)(record.body, record.sys_flag),
            refusing(decode_batch)(record.body, record.topic),
        )
        for record in decode_records(data)
    ]


def read_check(data: bytes) -> object:
    return transaction_check_of("broker:1", RemotingCommand(39, 1, FIELDS, data)).unique_id


def read_log_record(data: bytes) -> object:
    try:
        return parse(data, "job", "decisions", 1_000)
    except (InvalidRecordError, UnreadableRecordError) as exc:
        # A log ignores the first, and reports the second (test_decision_log).
        raise RemotingCommandException(str(exc)) from exc


def read_manifest(data: bytes) -> object:
    try:
        return Halves.from_manifests([data], (QUEUE,), len(HALVES), HALVES.youngest).codes
    except ValueError as exc:
        raise RemotingCommandException(str(exc)) from exc


def read_compressed(data: bytes) -> object:
    return decompress(data[1:], int.from_bytes(data[:1], "big") << 8 & 0x700 | 1)


def read_proxy(data: bytes) -> object:
    outcome = proxy_outcome_of(SENDING, GrpcAnswer(data, None, 1.0, "sending"))
    assert (outcome.status is None) is (outcome.error is not None)
    route = route_of(parsed(data, service.QueryRouteResponse, "proxy:8081", "asking"), ["proxy:8081"])
    return outcome, route


def read_proxy_check(data: bytes) -> object:
    try:
        command = service.RecoverOrphanedTransactionCommand.FromString(data)
    except Exception as exc:
        # Any error of protobuf: the reader of the stream catches it (test_grpc_telemetry).
        raise RemotingCommandException(str(exc)) from exc
    return transaction_check(command, "proxy:8081", "pg")


def texts_of(command: RemotingCommand) -> RemotingCommand:
    """Return `command` after checking that its texts can be logged and sent."""
    "".join((command.remark, command.language, *command.ext_fields, *command.ext_fields.values())).encode()
    return command


def refusing(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read`, with its error in the place of the value."""

    def read_or_refuse(*args: Any) -> Any:
        try:
            return read(*args)
        except RocketMQError as exc:
            return exc

    return read_or_refuse


@dataclass(frozen=True)
class Reader:
    """A decoder of server data, with valid examples of its input."""

    read: Callable[[bytes], object]
    seeds: list[bytes]
    count: int


READERS = {
    "frames": Reader(read_frames, [*FRAMES, b"".join(FRAMES[:3])], 16_500),
    "headers": Reader(read_header, [frame[8 : 8 + int.from_bytes(frame[5:8], "big")] for frame in FRAMES], 16_500),
    "fields": Reader(read_fields, [f"{name}\0{text}".encode() for name, text in FIELDS.items()], 8_000),
    "routes": Reader(read_route, ROUTES, 16_000),
    "properties": Reader(decode_properties, [record[-60:] for record in RECORDS], 5_000),
    "records": Reader(read_records, RECORDS, 12_000),
    "batches": Reader(decode_batch, [BATCH], 5_000),
    "checks": Reader(read_check, RECORDS[:1], 3_000),
    "compressed": Reader(
        read_compressed, [bytes([kind.value >> 8]) + compress(TEXT, kind) for kind in CompressionType], 4_000
    ),
    "records of the decision log": Reader(
        read_log_record, [encode(record, "job", "decisions") for record in LOG], 3_000
    ),
    "manifests": Reader(read_manifest, HALVES.to_manifests(), 4_000),
    "message ids": Reader(lambda data: decode_message_id(data.decode("latin-1")), [FIELDS["msgId"].encode()], 2_000),
    "a proxy's replies": Reader(
        read_proxy,
        [
            service.SendMessageResponse(status=status(20_000, "ok"), entries=[RESULT]).SerializeToString(),
            service.SendMessageResponse(status=status(30_000), entries=[RESULT] * 2).SerializeToString(),
            route_reply(pb.NORMAL, 99).SerializeToString(),
        ],
        3_000,
    ),
    "a proxy's checks": Reader(read_proxy_check, [CHECK.SerializeToString()], 2_000),
}


def test_inputs_of_all_readers_are_100_000() -> None:
    assert sum(reader.count for reader in READERS.values()) == 100_000


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_gives_a_value_or_rocketmq_error_and_leaks_no_memory(name: str) -> None:
    reader = READERS[name]
    half = reader.count // 2
    refused = read_all(reader, half, 1)
    # Some damaged inputs still decode.
    assert 0.03 * half < refused < 0.99 * half or name == "properties"
    # Threads of other tests may keep something meanwhile. What a reader keeps, it keeps each time.
    assert any(kept_by(reader, half, seed) < half / 20 for seed in (2, 3, 4))


@pytest.mark.parametrize("name", READERS)
def test_lengths_announced_by_damaged_input_are_not_allocated(name: str) -> None:
    read_all(READERS[name], 20, 5)
    assert any(peak_of(READERS[name], 150, 6) < 4 << 20 for _ in range(3))


def kept_by(reader: Reader, count: int, seed: int) -> int:
    """Read `count` damaged inputs; return how many more objects there are then."""
    forget()
    before = sys.getallocatedblocks()
    read_all(reader, count, seed)
    forget()
    return sys.getallocatedblocks() - before


def peak_of(reader: Reader, count: int, seed: int) -> int:
    """Read `count` damaged inputs; return how many bytes were allocated at most."""
    tracemalloc.start()
    try:
        read_all(reader, count, seed)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read_all(reader: Reader, count: int, seed: int) -> int:
    """Read `count` damaged inputs; return how many were refused."""
    refused = 0
    for data in damaged(reader.seeds, count, seed):
        try:
            found = repr(reader.read(data))
        except RocketMQError as exc:
            refused += 1
            found = str(exc)
        # The error will be logged, and pickled from a task to the driver.
        found.encode()
    return refused


def forget() -> None:
    """Clear the caches that may keep a little."""
    format_host.cache_clear()
    pack_host.cache_clear()
    gc.collect()
