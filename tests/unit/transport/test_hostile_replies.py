"""A reply of a hostile proxy costs a bounded amount of memory: a real gRPC server, and a client in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.route import MAX_ADDRESSES, MAX_BROKERS, MAX_QUEUES, TopicRouteData
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.codes import Code
from rocketmq_spark.protocol.grpc.messages import route_of
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status
from rocketmq_spark.transport.grpc.client import parsed
from rocketmq_spark.transport.grpc.transport import _ROUTE_PARTS
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy

PROGRAM = Path(__file__).parents[2] / "programs" / "hostile_replies.py"
MIB = 1 << 20
# Receiving 15 MiB costs about 60 MiB in gRPC and Python. The smallest of these replies cost 160 MiB without bounds.
MOST_MIB = 128
# A compressed reply of 0.1 MiB. gRPC 1.76 expanded any reply whole, 1.85 up to 16 MiB.
EXPANDED_MIB = 128


def field(number: int, *contents: bytes) -> bytes:
    """A length-delimited field."""
    content = b"".join(contents)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def head(code: int = Code.OK) -> bytes:
    return field(1, b"\x08", varint(code))


METHODS = {"send": "SendMessage", "route": "QueryRoute", "end": "EndTransaction", "recall": "RecallMessage"}


def have_answered(proxy: FakeProxy, call: str, reply: bytes, compression: grpc.Compression | None = None) -> None:
    """Make a proxy answer a call with these bytes, except for the route."""
    method = METHODS[call]
    honest = proxy.handlers.get(method)

    def answer(request: bytes, context: Any) -> bytes:
        if honest is not None and b"small" in request:
            return honest(request, context)
        if compression is not None:
            context.set_compression(compression)
        return reply

    proxy.handlers[method] = answer


def outcome(proxy: FakeProxy, call: str, during: Callable[[], None] = lambda: None) -> Any:
    """Return the result of a client in another process."""
    arguments = json.dumps({"endpoint": proxy.address, "call": call})
    with subprocess.Popen([sys.executable, str(PROGRAM), arguments], stdout=subprocess.PIPE) as client:
        during()
        printed, _ = client.communicate(timeout=PATIENCE)
    return json.loads(printed)


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy({"orders": "TRANSACTION", "small": "NORMAL"}) as proxy:
        yield proxy


EMPTY = b"\x12\x00"
REPLIES = {
    "empty results": ("send", head() + EMPTY * (2 * MIB)),
    "failed results": ("send", head(Code.MULTIPLE_RESULTS) + field(2, head(40_000)) * (MIB // 2)),
    "empty queues": ("route", head() + EMPTY * (15 * MIB // 2)),
    "addresses of a broker": ("route", head() + field(2, field(4, field(3, EMPTY * (15 * MIB // 2))))),
    "unknown fields": ("recall", head() + b"\x68\x01\x12\x00" * (15 * MIB // 4)),
    "types of a queue": ("route", head() + field(2, b"\x18\x02", field(5, b"\x01" * (15 * MIB)))),
    "statuses": ("end", head() * (15 * MIB // 6)),
}


@pytest.mark.parametrize("name", REPLIES)
def test_reply_of_many_small_parts_is_refused_in_bounded_memory(proxy: FakeProxy, name: str) -> None:
    call, reply = REPLIES[name]
    have_answered(proxy, call, reply)
    found = outcome(proxy, call)
    assert (found["result"] in ("RemotingCommandException", "None"), "parts in" in found["error"]) == (True, True), (
        found
    )
    assert found["grew_mib"] < MOST_MIB, found


def test_command_of_many_small_parts_is_dropped_in_bounded_memory(proxy: FakeProxy) -> None:
    class Raw:
        def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
            return field(5, field(1, field(2) * (15 * MIB // 2)))

    def during() -> None:
        wait_for(lambda: bool(proxy.client_settings and proxy.transactions))
        proxy.command(Raw())  # type: ignore[arg-type]
        proxy.check("half")

    found = outcome(proxy, "check", during)
    assert found["result"] == "True", found
    assert found["grew_mib"] < MOST_MIB, found


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=["gzip", "deflate"])
@pytest.mark.parametrize("call", ["send", "route"])
def test_compressed_reply_is_refused_without_expanding_it(
    proxy: FakeProxy, call: str, compression: grpc.Compression
) -> None:
    have_answered(proxy, call, bytes(EXPANDED_MIB * MIB), compression)
    found = outcome(proxy, call)
    assert found["result"] == "RemotingCommandException", found
    assert "compressed replies are refused" in found["error"]
    assert found["grew_mib"] < EXPANDED_MIB / 4, found


def queue_of(name: str, addresses: int = 1) -> pb.MessageQueue:
    endpoints = pb.Endpoints(addresses=[pb.Address(port=number) for number in range(addresses)])
    broker = pb.Broker(name=name, endpoints=endpoints)
    return pb.MessageQueue(permission=pb.READ_WRITE, broker=broker, accept_message_types=[pb.NORMAL, pb.FIFO])


def read_route(*queues: pb.MessageQueue) -> TopicRouteData:
    reply = service.QueryRouteResponse(status=status(), message_queues=queues)
    return route_of(parsed(reply.SerializeToString(), type(reply), "p:8081", "asking", _ROUTE_PARTS), ["p:8081"])


def test_largest_route_is_read() -> None:
    queues = [queue_of(f"broker-{number % MAX_BROKERS}") for number in range(MAX_QUEUES)]
    assert read_route(*queues).message_types == {"NORMAL", "FIFO"}
    assert read_route(queue_of("broker", MAX_ADDRESSES)).message_types == {"NORMAL", "FIFO"}


@pytest.mark.parametrize(
    ("queues", "what"),
    [
        ([queue_of("broker")] * (MAX_QUEUES + 1), "100001 queues, at most 100000"),
        ([queue_of(f"broker-{number}") for number in range(MAX_BROKERS + 1)], "10001 brokers, at most 10000"),
        ([queue_of("broker", MAX_ADDRESSES + 1)], "101 addresses of a broker, at most 100"),
    ],
    ids=["queues", "brokers", "addresses"],
)
def test_route_beyond_the_limits_is_rejected(queues: list[pb.MessageQueue], what: str) -> None:
    with pytest.raises(RemotingCommandException, match=what):
        read_route(*queues)
