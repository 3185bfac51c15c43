"""A producer in a namespace, over sockets: brokers see the names of the namespace, callers their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import LocalTransactionState
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_broker import FakeBroker
from tests.support.processes import wait_for

Make = Callable[..., Producer]


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster(["a"], topics={"space%T": 1, "other%T": 1, "TRACES": 1}) as cluster:
        yield cluster


@pytest.fixture
def peer(fake: FakeCluster) -> FakeBroker:
    return fake.brokers["a"]


@pytest.fixture
def make(make_producer: Make, fake: FakeCluster) -> Make:
    def started(group: str = "pg", **properties: Any) -> Producer:
        given = {"transport": None, "name_server": fake.name_server, "namespace": "space", **properties}
        producer = make_producer(group, **given)
        producer.start()
        return producer

    return started


def fields_of(peer: FakeBroker, *codes: RequestCode) -> list[dict[str, str]]:
    return [dict(request.ext_fields) for request in peer.requests if request.code in codes]


def test_sends_are_in_the_namespace_and_results_are_not(make: Make, peer: FakeBroker) -> None:
    producer = make()
    queue = MessageQueue("T", "a", 0)
    message = Message.of("T", b"x")
    results = [producer.send(message), producer.send(message, queue), producer.send_batch([message, message])]
    assert [result.message_queue for result in results] == [queue] * 3
    assert producer.send_async(message).result().message_queue == queue
    assert producer.fetch_publish_message_queues("T") == [queue]
    assert producer.max_offset(queue) == 5
    assert producer.view_message(results[0].offset_msg_id.replace(results[0].offset_msg_id[:24], at(peer))).topic == "T"
    sent = fields_of(peer, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    assert {(fields["a"], fields["b"], fields["c"]) for fields in sent} == {("space%pg", "space%T", "TBW102")}
    assert all("INSTANCE_ID\x01space\x02" in fields["i"] for fields in sent)
    assert set(peer.storage.store.queues) == {MessageQueue("space%T", "a", 0)}


def at(peer: FakeBroker) -> str:
    """Return the part of an offset message id that is the peer's address."""
    host, _, port = peer.address.rpartition(":")
    return "".join(f"{int(number):02X}" for number in host.split(".")) + f"{int(port):08X}00000000"


def test_length_of_topic_and_group_is_limited_with_the_namespace(
    make: Make, fake: FakeCluster, peer: FakeBroker
) -> None:
    producer = make()
    with pytest.raises(MQClientException, match=r"topic 'space%t{122}' has 128 characters, at most 127 are allowed"):
        producer.send(Message.of("t" * 122, b"x"))
    with pytest.raises(MQClientException, match="has 128 characters"):
        producer.create_topic("TBW102", "t" * 122, 1)
    with pytest.raises(MQClientException, match=r"producer group 'space%g{115}' has 121 characters"):
        make("g" * 115)
    assert [*peer.requests, *fake.name_servers[0].requests] == []


def test_traces_are_stored_outside_the_namespace(make: Make, peer: FakeBroker) -> None:
    producer = make(enable_trace=True, trace_topic="TRACES")
    producer.send(Message.of("T", b"x", keys="k"))
    producer.shutdown()
    assert set(peer.storage.store.queues) == {MessageQueue("space%T", "a", 0), MessageQueue("TRACES", "a", 0)}
    [trace] = peer.storage.store.queues[MessageQueue("TRACES", "a", 0)]
    assert trace.body.decode().split("\x01")[3:5] == ["pg", "T"]
    assert "INSTANCE_ID" not in trace.properties
    groups = {fields["a"].partition("-")[0] for fields in fields_of(peer, RequestCode.SEND_MESSAGE_V2)}
    assert groups == {"space%pg", "_INNER_TRACE_PRODUCER"}


def test_transactions_are_checked_and_ended_in_the_namespace(make: Make, peer: FakeBroker) -> None:
    seen: list[tuple[str, str | None]] = []

    class Listener:
        def execute_local_transaction(self, message: Message, _arg: object) -> LocalTransactionState:
            seen.append((message.topic, message.properties.get("PGROUP")))
            # The broker can check it from the producer's first heart-beat on.
            wait_for(lambda: peer.check_transaction(0) is not None)
            return LocalTransactionState.COMMIT_MESSAGE

        def check_local_transaction(self, message: MessageExt) -> LocalTransactionState:
            seen.append((message.topic, message.properties.get("PGROUP")))
            return LocalTransactionState.COMMIT_MESSAGE

    producer = make(transaction_listener=Listener())
    assert producer.send_in_transaction(Message.of("T", b"x")).ended
    wait_for(lambda: len(seen) == 2)
    producer.shutdown()
    assert seen == [("T", "pg")] * 2
    ends = fields_of(peer, RequestCode.END_TRANSACTION)
    assert [(fields["topic"], fields["producerGroup"]) for fields in ends] == [("space%T", "space%pg")] * len(ends)
    assert {fields["fromTransactionCheck"] for fields in ends} == {"true", "false"}


def test_producers_of_one_instance_name_can_have_different_namespaces(make: Make, peer: FakeBroker) -> None:
    for namespace in ("space", "other"):
        result = make(instance_name="shared", namespace=namespace).send(Message.of("T", b"x"))
        assert result.message_queue == MessageQueue("T", "a", 0)
    assert set(peer.storage.store.queues) == {MessageQueue("space%T", "a", 0), MessageQueue("other%T", "a", 0)}
    beats = [json.loads(bytes(request.body)) for request in peer.requests if request.code == RequestCode.HEART_BEAT]
    assert {data["groupName"] for beat in beats for data in beat["producerDataSet"]} <= {"space%pg", "other%pg"}
