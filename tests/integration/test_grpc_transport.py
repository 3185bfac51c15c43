"""The gRPC transport against a real proxy.

Each test creates its topic before the first request names it: a proxy remembers for a while which topics are unknown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rocketmq_spark.errors import (
    MessageRefusedException,
    MQBrokerException,
    RemotingCertificateException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import EncodedBatch, Encoding, MessageQueue, SendStatus
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.grpc.messages import route_request
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.cluster import SharedCluster
from tests.support.contract import Outcomes, batch, next_id, single
from tests.support.links import TcpProxy
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic
from tests.support.transactions import request, send, stored
from tests.support.transports import Authority

pytestmark = pytest.mark.integration

MakeTopic = Callable[..., str]

MIB = 1024 * 1024


@pytest.fixture
def transport(cluster: SharedCluster) -> Iterator[GrpcTransport]:
    with GrpcTransport([cluster.endpoints], client_id="10.0.0.1@grpc-test") as transport:
        yield transport


def message(topic: str, body: bytes, **system: Any) -> pb.Message:
    """Return a message that no code of the package has checked."""
    built = pb.Message(topic=pb.Resource(name=topic), body=body)
    properties = system.pop("user_properties", {})
    built.user_properties.update(properties)
    born = system.pop("born", None)
    built.system_properties.CopyFrom(pb.SystemProperties(**{"message_id": next_id(), **system}))
    if born is not None:
        built.system_properties.born_timestamp.FromMilliseconds(born)
    return built


def ready(topic: str, *messages: pb.Message) -> EncodedBatch:
    """Return a batch of messages that is sent without further encoding."""
    body = service.SendMessageRequest(messages=messages).SerializeToString()
    now = int(time.time() * 1000)
    return EncodedBatch(topic, (body,), len(messages), len(body), encoding=Encoding.GRPC, born_timestamp=now)


def test_batch_is_stored_as_sent(cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic) -> None:
    topic, before = make_topic("NORMAL"), int(time.time() * 1000)
    bodies = [b"row %d" % number for number in range(500)]
    [outcome] = send(transport, batch(topic, *bodies))
    assert (outcome.status, outcome.queue_offset) == (SendStatus.SEND_OK, 0)
    found = stored(cluster.name_server, topic, 500)
    assert sorted(found) == sorted(bodies)
    assert len({one.unique_id for one in found.values()}) == 500
    # The messages of a batch are consecutive in one queue.
    assert sorted(one.queue_offset for one in found.values()) == list(range(500))
    assert all(before <= one.born_timestamp <= one.store_timestamp for one in found.values())


def test_single_message_is_stored_with_all_its_properties(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic
) -> None:
    topic = make_topic("NORMAL")
    encoded = single(topic, "Grüße".encode(), TAGS="tag", KEYS="k1 k2", mine="Straße", INSTANCE_ID="i")
    [outcome] = send(transport, encoded)
    assert outcome.queue == MessageQueue(topic, transport.endpoints[0], -1)
    [found] = stored(cluster.name_server, topic, 1).values()
    assert (found.body.decode(), found.tags, found.keys) == ("Grüße", "tag", "k1 k2")
    assert found.properties["mine"] == "Straße"
    assert found.unique_id is not None
    assert found.unique_id in encoded.properties
    # The proxy sets the group to the topic, because the protocol has no producer group.
    assert found.properties["PGROUP"] == topic


def test_sends_need_neither_telemetry_stream_nor_heartbeats(transport: GrpcTransport, make_topic: MakeTopic) -> None:
    topics = {kind: make_topic(kind, f"{kind}-{next_id()}") for kind in ("NORMAL", "FIFO", "DELAY", "TRANSACTION")}
    outcomes = send(
        transport,
        batch(topics["NORMAL"], b"one", b"two"),
        single(topics["FIFO"], b"three", __SHARDINGKEY="g"),
        single(topics["DELAY"], b"four", TIMER_DELAY_MS="1000"),
        single(topics["TRANSACTION"], b"five", TRAN_MSG="true"),
    )
    assert [(outcome.status, outcome.error) for outcome in outcomes] == [(SendStatus.SEND_OK, None)] * 4
    for kind, topic in topics.items():
        assert transport.query_route(topic, PATIENCE).message_types == {kind}


REFUSALS: dict[str, tuple[int, Callable[[str], list[pb.Message]]]] = {
    "an empty body": (41302, lambda topic: [message(topic, b"")]),
    "a reserved property": (40007, lambda topic: [message(topic, b"x", user_properties={"KEYS": "k"})]),
    "a tab in a value": (40007, lambda topic: [message(topic, b"x", user_properties={"a": "b\tc"})]),
    "too many properties": (
        43101,
        lambda topic: [message(topic, b"x", user_properties={f"p{number}": "v" for number in range(129)})],
    ),
    "properties too large": (43101, lambda topic: [message(topic, b"x", user_properties={"p": "v" * 16_384})]),
    "a blank tag": (40004, lambda topic: [message(topic, b"x", tag=" ")]),
    "a tag with a bar": (40004, lambda topic: [message(topic, b"x", tag="a|b")]),
    "a blank key": (40005, lambda topic: [message(topic, b"x", keys=[" "])]),
    "an empty id": (40009, lambda topic: [message(topic, b"x", message_id="")]),
    "a group of 64 bytes": (40006, lambda topic: [message(topic, b"x", message_group="g" * 64)]),
    "another type": (40014, lambda topic: [message(topic, b"x", message_group="g")]),
    "two topics": (40016, lambda topic: [message(topic, b"x"), message("TBW102", b"y")]),
    "an illegal topic": (40002, lambda topic: [message("TBW102", b"x")]),
    "nothing": (40016, lambda topic: []),
    "one bad message of many": (41302, lambda topic: [message(topic, b"x"), message(topic, b""), message(topic, b"y")]),
}
# What is wrong with one message of perhaps many: a batch is halved to find it.
OF_A_MESSAGE = {40004, 40005, 40006, 40007, 40009, 41302, 43101}


@pytest.mark.parametrize("what", REFUSALS)
def test_proxy_rejection_is_reported_with_its_code_and_nothing_is_stored(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic, what: str
) -> None:
    topic = make_topic("NORMAL")
    code, messages = REFUSALS[what]
    [outcome] = send(transport, ready(topic, *messages(topic)))
    assert isinstance(outcome.error, MQBrokerException)
    assert outcome.error.response_code == code
    assert outcome.error.retriable is False
    assert outcome.error.split is (code in OF_A_MESSAGE)
    assert read_topic(cluster.name_server, topic) == []


def test_malformed_request_is_a_grpc_status_error(transport: GrpcTransport, make_topic: MakeTopic) -> None:
    topic = make_topic("NORMAL")
    encoded = EncodedBatch(topic, (b"\xff\xff",), 1, 2, encoding=Encoding.GRPC, born_timestamp=int(time.time() * 1000))
    [outcome] = send(transport, encoded)
    assert isinstance(outcome.error, RocketMQError)
    assert "gRPC UNKNOWN" in str(outcome.error)


def test_unknown_topic_is_a_stale_route_error(transport: GrpcTransport) -> None:
    topic = f"unknown-{next_id()}"
    [outcome] = send(transport, batch(topic, b"x"))
    assert type(outcome.error) is TopicRouteStaleException
    with pytest.raises(TopicRouteStaleException, match="40402"):
        transport.query_route(topic, PATIENCE)


def test_batch_with_delayed_or_half_messages_is_rejected(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic
) -> None:
    delay, transaction = make_topic("DELAY"), make_topic("TRANSACTION", f"transaction-{next_id()}")
    delayed = [message(delay, b"x") for _ in range(2)]
    for one in delayed:
        one.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 60_000)
    halves = [message(transaction, b"x", message_type=pb.TRANSACTION) for _ in range(2)]
    outcomes = send(transport, ready(delay, *delayed), ready(transaction, *halves))
    assert [type(outcome.error) for outcome in outcomes] == [MessageRefusedException] * 2
    assert ["batching" in str(outcomes[0].error), "illegal" in str(outcomes[1].error)] == [True, True]


def test_body_of_4_mib_is_accepted_and_one_byte_more_is_rejected(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic
) -> None:
    topic = make_topic("NORMAL")
    largest, larger = send(transport, single(topic, b"x" * (4 * MIB)), single(topic, b"x" * (4 * MIB + 1)))
    assert largest.status is SendStatus.SEND_OK
    assert isinstance(larger.error, MQBrokerException)
    assert (larger.error.response_code, larger.error.split) == (41301, True)
    [found] = stored(cluster.name_server, topic, 1).values()
    assert len(found.body) == 4 * MIB


def test_total_body_size_of_batch_is_limited(transport: GrpcTransport, make_topic: MakeTopic) -> None:
    topic = make_topic("NORMAL")
    under, over = send(
        transport,
        batch(topic, *[b"x" * (2 * MIB - 1024)] * 2),
        batch(topic, *[b"x" * (2 * MIB)] * 2),
    )
    assert under.status is SendStatus.SEND_OK
    assert type(over.error) is MessageRefusedException
    assert "message body size exceeded" in str(over.error).lower()


def test_messages_of_a_group_stay_in_order_in_one_queue(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic
) -> None:
    topic = make_topic("FIFO", queues=4)
    groups = [f"group-{number}" for number in range(100)]
    for turn in range(3):
        outcomes = Outcomes()
        for group in groups:
            encoded = single(topic, f"{group}:{turn}".encode(), __SHARDINGKEY=group)
            transport.send(request(transport.endpoints[0], encoded), PATIENCE, outcomes)
        assert {outcome.status for outcome in outcomes.wait(len(groups))} == {SendStatus.SEND_OK}
    queues: dict[str, set[tuple[str, int]]] = defaultdict(set)
    orders: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for found in stored(cluster.name_server, topic, 300).values():
        group, _, number = found.body.decode().partition(":")
        assert found.sharding_key == group
        queues[group].add((found.store_host, found.queue_id))
        orders[group].append((found.queue_offset, int(number)))
    assert {len(places) for places in queues.values()} == {1}
    assert len(set.union(*queues.values())) > 1
    assert all([turn for _, turn in sorted(order)] == [0, 1, 2] for order in orders.values())


def test_delayed_message_arrives_when_due_and_has_a_recall_handle(
    cluster: SharedCluster, transport: GrpcTransport, make_topic: MakeTopic
) -> None:
    topic = make_topic("DELAY")
    due = int(time.time() * 1000) + 2000
    absolute, relative, past, far = send(
        transport,
        single(topic, b"absolute", TIMER_DELIVER_MS=str(due)),
        single(topic, b"relative", TIMER_DELAY_SEC="1"),
        single(topic, b"past", TIMER_DELIVER_MS="1000"),
        single(topic, b"far", TIMER_DELIVER_MS=str(due + 48 * 3_600_000)),
    )
    assert [one.status for one in (absolute, relative, past)] == [SendStatus.SEND_OK] * 3
    assert [bool(one.recall_handle) for one in (absolute, relative)] == [True, True]
    assert isinstance(far.error, MQBrokerException)
    assert far.error.response_code == 40012
    found = stored(cluster.name_server, topic, 3)
    assert sorted(found) == [b"absolute", b"past", b"relative"]
    assert found[b"absolute"].store_timestamp >= due - 1000


def call(endpoint: str, method: str, body: bytes) -> bytes:
    """Make a call without the transport."""
    with grpc.insecure_channel(f"ipv4:{endpoint}") as channel:
        unary = channel.unary_unary(f"/apache.rocketmq.v2.MessagingService/{method}")
        reply: bytes = unary(body, timeout=PATIENCE, metadata=(("x-mq-client-id", "test"),))
        return reply


def test_proxy_does_not_implement_offsets_and_pulls(cluster: SharedCluster) -> None:
    for method in ("PullMessage", "QueryOffset", "GetOffset", "UpdateOffset"):
        with pytest.raises(grpc.RpcError) as raised:
            call(cluster.endpoints, method, b"")
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_route_uses_configured_port_instead_of_proxy_port(cluster: SharedCluster, make_topic: MakeTopic) -> None:
    topic, port = make_topic("NORMAL"), int(cluster.endpoints.rpartition(":")[2])
    with TcpProxy(cluster.endpoints) as front, GrpcTransport([front.address], client_id="test") as transport:
        asked = route_request(topic, "", front.address).SerializeToString()
        queues = service.QueryRouteResponse.FromString(call(front.address, "QueryRoute", asked)).message_queues
        addresses = {address.port for queue in queues for address in queue.broker.endpoints.addresses}
        assert addresses == {port}
        route = transport.query_route(topic, PATIENCE)
        assert {broker.master for broker in route.broker_datas} == {front.address}
        [outcome] = send(transport, batch(topic, b"through the front"))
        assert outcome.status is SendStatus.SEND_OK


def test_rows_pass_tls_gateway_with_tls_server_name(
    cluster: SharedCluster, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic, authority = make_topic("NORMAL"), Authority(tmp_path)
    context = authority.context("gateway", "DNS:rocketmq.example")
    context.set_alpn_protocols(["h2"])
    trusting = TlsSettings(str(authority.ca_file), "rocketmq.example")
    with TcpProxy(cluster.endpoints, tls=context) as front:
        with GrpcTransport([front.address], client_id="test", tls=trusting) as transport:
            assert transport.query_route(topic, PATIENCE).message_types == {"NORMAL"}
            [outcome] = send(transport, batch(topic, *[b"x" * 1000] * 1000))
            assert outcome.status is SendStatus.SEND_OK
        nameless = TlsSettings(str(authority.ca_file))
        with (
            GrpcTransport([front.address], client_id="test", tls=nameless) as transport,
            pytest.raises(RemotingCertificateException, match="tlsServerName"),
        ):
            transport.query_route(topic, PATIENCE)
    assert len(read_topic(cluster.name_server, topic, 1000)) == 1000
