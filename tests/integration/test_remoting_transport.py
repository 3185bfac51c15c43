"""The remoting transport against a real name server and brokers."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import pytest

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.headers import PullMessageRequestHeader
from rocketmq_spark.protocol.remoting.records import encode_batch, unique_id, unique_id_prefix
from rocketmq_spark.transport.remoting.requests import Request
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.contract import Outcomes
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration


@pytest.fixture
def transport(cluster: SharedCluster) -> Iterator[RemotingTransport]:
    with RemotingTransport([cluster.name_server]) as transport:
        yield transport


@pytest.fixture
def topic(cluster: SharedCluster, transport: RemotingTransport) -> str:
    name = f"transport_{uuid.uuid4().hex}"
    for broker in cluster.brokers:
        transport.create_topic(broker.address, name, 2, 6, PATIENCE)
    return name


def routed_queues(transport: RemotingTransport, topic: str) -> list[tuple[MessageQueue, str]]:
    route = transport.query_route(topic, PATIENCE)
    masters = {broker.broker_name: broker.master for broker in route.broker_datas}
    return [
        (MessageQueue(topic, data.broker_name, queue_id), masters[data.broker_name] or "")
        for data in route.queue_datas
        for queue_id in range(data.write_queue_nums)
    ]


def request(queue: MessageQueue, address: str, batch: EncodedBatch) -> SendRequest:
    return SendRequest(batch, queue, address, "transport-test", "TBW102", 4, 1_700_000_000_000)


def batch_of(topic: str, *bodies: bytes) -> EncodedBatch:
    prefix = unique_id_prefix(b"\x7f\0\0\1", os.getpid(), 1)
    messages = [
        Message(topic, body, properties={"UNIQ_KEY": unique_id(prefix, number)}) for number, body in enumerate(bodies)
    ]
    body = encode_batch(messages)
    half = len(body) // 2
    return EncodedBatch(topic, (memoryview(body)[:half], memoryview(body)[half:]), len(bodies), len(body))


def test_every_batch_sent_to_every_queue_is_stored_once(
    cluster: SharedCluster, transport: RemotingTransport, topic: str
) -> None:
    outcomes, expected = Outcomes(), []
    queues = routed_queues(transport, topic)
    assert len(queues) == 2 * len(cluster.brokers)
    for round_number in range(5):
        for queue, address in queues:
            bodies = [f"{queue}-{round_number}-{number}".encode() for number in range(50)]
            expected += bodies
            transport.send(request(queue, address, batch_of(topic, *bodies)), PATIENCE, outcomes)
    outcomes.wait(5 * len(queues))
    assert {outcome.status for outcome in outcomes} == {SendStatus.SEND_OK}
    assert sorted(outcome.queue_offset for outcome in outcomes) == sorted([0, 50, 100, 150, 200] * len(queues))
    assert all(outcome.latency_ms > 0 for outcome in outcomes)
    assert all(outcome.offset_msg_id.count(",") == 49 for outcome in outcomes)
    # Read the topic first, because the broker's offsets lag behind its acknowledgements.
    stored = read_topic(cluster.name_server, topic, len(expected))
    assert sorted(message.body for message in stored) == sorted(expected)
    for queue, address in queues:
        assert transport.max_offset(queue, address, PATIENCE) == 250
        assert transport.min_offset(queue, address, PATIENCE) == 0


def test_eight_batches_of_1_mib_in_flight_are_stored(transport: RemotingTransport, topic: str) -> None:
    outcomes = Outcomes()
    [(queue, address), *_] = routed_queues(transport, topic)
    batch = batch_of(topic, *(os.urandom(1000) for _ in range(1000)))
    for _ in range(8):
        transport.send(request(queue, address, batch), PATIENCE, outcomes)
    outcomes.wait(8)
    assert {outcome.status for outcome in outcomes} == {SendStatus.SEND_OK}
    assert sorted(outcome.queue_offset for outcome in outcomes) == list(range(0, 8000, 1000))


def test_a_single_message_comes_back_as_it_was_sent(
    cluster: SharedCluster, transport: RemotingTransport, topic: str
) -> None:
    outcomes = Outcomes()
    [(queue, address), *_] = routed_queues(transport, topic)
    single = EncodedBatch(
        topic, (b"Gr", "üße".encode()), 1, 7, batch=False, properties="TAGS\x01a\x02KEYS\x01k1\x02", flag=7
    )
    transport.send(request(queue, address, single), PATIENCE, outcomes)
    [outcome] = outcomes.wait(1)
    assert (outcome.queue, outcome.status, outcome.region_id) == (queue, SendStatus.SEND_OK, "DefaultRegion")
    assert outcome.transaction_id != ""
    [stored] = read_topic(cluster.name_server, topic, 1)
    assert (stored.body, stored.flag, stored.born_timestamp) == ("Grüße".encode(), 7, 1_700_000_000_000)
    assert (stored.properties["TAGS"], stored.properties["KEYS"]) == ("a", "k1")


def test_broker_rejections_are_errors_with_advice(transport: RemotingTransport, topic: str) -> None:
    outcomes = Outcomes()
    [(queue, address), *_] = routed_queues(transport, topic)
    beyond = MessageQueue(topic, queue.broker_name, 99)
    transport.send(request(beyond, address, batch_of(topic, b"x")), PATIENCE, outcomes)
    outcomes.wait(1)
    empty = EncodedBatch(topic, (), 1, 0, batch=False)
    transport.send(request(queue, address, empty), PATIENCE, outcomes)
    outcomes.wait(2)
    assert isinstance(outcomes[0].error, TopicRouteStaleException)
    assert isinstance(outcomes[1].error, MQBrokerException)
    assert [outcome.error.response_code for outcome in outcomes] == [29, 1]
    assert f"sending 1 rows to {beyond}: {address} answered 29 INVALID_PARAMETER" in str(outcomes[0].error)


def test_an_unknown_topic_has_no_route(transport: RemotingTransport) -> None:
    with pytest.raises(TopicRouteStaleException) as raised:
        transport.query_route(f"none_{uuid.uuid4().hex}", PATIENCE)
    assert raised.value.response_code == ResponseCode.TOPIC_NOT_EXIST


def test_unreachable_name_server_is_skipped(cluster: SharedCluster, topic: str) -> None:
    with RemotingTransport([refused_address(), cluster.name_server, refused_address()]) as transport:
        for _ in range(3):
            assert len(transport.query_route(topic, PATIENCE).queue_datas) == len(cluster.brokers)


def test_unreachable_broker_is_a_connect_error(transport: RemotingTransport, topic: str) -> None:
    outcomes = Outcomes()
    transport.send(
        request(MessageQueue(topic, "gone", 0), refused_address(), batch_of(topic, b"x")), PATIENCE, outcomes
    )
    [outcome] = outcomes.wait(1)
    assert isinstance(outcome.error, RemotingConnectException)
    assert outcome.error.maybe_stored is False


def test_heartbeat_and_unregister_do_not_raise(cluster: SharedCluster, transport: RemotingTransport) -> None:
    address = cluster.brokers[0].address
    client_id = f"127.0.0.1@{uuid.uuid4().hex}"
    transport.heart_beat(address, client_id, ["pg-one", "pg-two"], PATIENCE)
    transport.unregister_client(address, client_id, "pg-one", PATIENCE)
    transport.unregister_client(address, client_id, "pg-two", PATIENCE)


def test_a_oneway_send_is_stored(cluster: SharedCluster, transport: RemotingTransport, topic: str) -> None:
    [(queue, address), *_] = routed_queues(transport, topic)
    for number in range(20):
        transport.send_oneway(request(queue, address, batch_of(topic, b"%d-a" % number, b"%d-b" % number)), PATIENCE)
    stored = read_topic(cluster.name_server, topic, 40)
    assert sorted(message.body for message in stored) == sorted(
        b"%d-%b" % (number, letter) for number in range(20) for letter in (b"a", b"b")
    )


def test_time_offsets_and_viewed_messages_match_stored_messages(
    cluster: SharedCluster, transport: RemotingTransport, topic: str
) -> None:
    [(queue, address), (other, other_address), *_] = routed_queues(transport, topic)
    assert transport.earliest_msg_store_time(queue, address, PATIENCE) == -1
    assert transport.search_offset(queue, 0, address, PATIENCE) == 0
    outcomes = Outcomes()
    for number in range(3):
        transport.send(request(queue, address, batch_of(topic, b"%d-a" % number, b"%d-b" % number)), PATIENCE, outcomes)
        outcomes.wait(number + 1)
        # Each message gets another store timestamp.
        time.sleep(0.005)
    stored = read_topic(cluster.name_server, topic, 6)
    assert [message.queue_offset for message in stored] == list(range(6))
    ids = ",".join(outcome.offset_msg_id for outcome in outcomes).split(",")
    assert [message.offset_msg_id for message in stored] == ids
    for message, message_id in zip(stored, ids, strict=True):
        _, physical_offset = decode_message_id(message_id)
        assert transport.view_message(address, physical_offset, PATIENCE) == message
    assert transport.earliest_msg_store_time(queue, address, PATIENCE) == stored[0].store_timestamp
    times = [message.store_timestamp for message in stored]
    for wanted in (0, *times, times[-1] + 1):
        first = sum(stored_at < wanted for stored_at in times)
        assert transport.search_offset(queue, wanted, address, PATIENCE) == first
    assert transport.search_offset(other, times[0], other_address, PATIENCE) == 0


def test_viewing_a_missing_message_is_a_permanent_error(transport: RemotingTransport, topic: str) -> None:
    outcomes = Outcomes()
    [(queue, address), *_] = routed_queues(transport, topic)
    transport.send(request(queue, address, batch_of(topic, b"x")), PATIENCE, outcomes)
    _, physical_offset = decode_message_id(outcomes.wait(1)[0].offset_msg_id)
    for wrong in (physical_offset + 4, 10**15, -1):
        with pytest.raises(MQClientException, match="has no message that begins there") as raised:
            transport.view_message(address, wrong, PATIENCE)
        assert raised.value.retriable is False


def test_topic_can_have_more_read_queues_than_write_queues(
    cluster: SharedCluster, transport: RemotingTransport
) -> None:
    name = f"transport_{uuid.uuid4().hex}"
    transport.create_topic(cluster.brokers[0].address, name, 2, 6, PATIENCE, read_queue_nums=5)
    [data] = transport.query_route(name, PATIENCE).queue_datas
    assert (data.write_queue_nums, data.read_queue_nums, data.perm) == (2, 5, 6)


def test_a_pull_that_the_broker_holds_back_delays_no_other_answer(transport: RemotingTransport, topic: str) -> None:
    held, outcomes = Outcomes(), Outcomes()
    [(queue, address), *_] = routed_queues(transport, topic)
    pull = PullMessageRequestHeader(
        consumer_group="transport-test",
        topic=topic,
        queue_id=queue.queue_id,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=4 | 2,
        suspend_timeout_millis=15_000,
        broker_name=queue.broker_name,
    )
    transport.client.start(address, Request(RequestCode.PULL_MESSAGE, pull.to_ext_fields(), (), PATIENCE, held))
    assert transport.max_offset(queue, address, PATIENCE) == 0
    assert held == []
    transport.send(request(queue, address, batch_of(topic, b"awaited")), PATIENCE, outcomes)
    assert outcomes.wait(1)[0].status is SendStatus.SEND_OK
    assert held.wait(1)[0].command.code == ResponseCode.SUCCESS


def test_a_proxy_serves_as_name_server_and_broker(cluster: SharedCluster) -> None:
    address, topic, outcomes = cluster.proxy.address, f"proxied_{uuid.uuid4().hex}", Outcomes()
    with RemotingTransport([address]) as transport:
        # A proxy creates no topics, neither on request nor automatically.
        transport.create_topic(cluster.brokers[0].address, topic, 2, 6, PATIENCE)
        queues = routed_queues(transport, topic)
        assert {found for _, found in queues} == {address}
        for queue, found in queues:
            transport.send(request(queue, found, batch_of(topic, b"one", b"two")), PATIENCE, outcomes)
        outcomes.wait(len(queues))
        assert {outcome.status for outcome in outcomes} == {SendStatus.SEND_OK}
        stored = read_topic(cluster.name_server, topic, 4)
        assert sorted(message.body for message in stored) == [b"one", b"one", b"two", b"two"]
        assert [transport.max_offset(queue, found, PATIENCE) for queue, found in queues] == [2, 2]
        transport.heart_beat(address, "127.0.0.1@transport-test", ["pg"], PATIENCE)
        with pytest.raises(MQBrokerException, match="3 REQUEST_CODE_NOT_SUPPORTED"):
            transport.create_topic(address, topic, 2, 6, PATIENCE)
