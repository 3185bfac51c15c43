"""Names in requests have the namespace; answers and callbacks have the user's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.errors import MQBrokerException, MQClientException
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest
from rocketmq_spark.model.message_ext import PullRequest, PullTarget
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_PREPARED_TYPE, RecallMessage
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.headers import signed
from rocketmq_spark.protocol.remoting.records import decode_properties
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from rocketmq_spark.testing.fake_sends import recall_handle
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import fakes
from tests.support.processes import PATIENCE
from tests.support.scripted import route

Make = Callable[..., RemotingTransport]
QUEUE = MessageQueue("orders", "a", 0)
HANDLE = recall_handle(QUEUE, 0, "U1")
TOPICS = {"ns%orders": 1, "orders": 2, "TBW102": 3, "mine": 4}


def names(*servers: FakeBroker | FakeNameServer) -> list[tuple[int, dict[str, str]]]:
    """Return the code of each request, and its ext fields that are names."""
    fields = ("topic", "defaultTopic", "producerGroup", "consumerGroup", "a", "b", "c")
    return [
        (request.code, {name: request.ext_fields[name] for name in fields if name in request.ext_fields})
        for server in servers
        for request in server.requests
    ]


def test_sends_have_the_namespace_in_topic_and_group(
    make_transport: Make, request_to: Callable[..., SendRequest], batch_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns")
        transport.send(request_to(peer.address, queue=QUEUE), PATIENCE, outcomes)
        transport.send(batch_to(peer.address, b"1", b"2", queue=QUEUE), PATIENCE, outcomes)
        transport.send_oneway(request_to(peer.address, queue=MessageQueue("%RETRY%cg", "a", 0)), PATIENCE)
        assert [outcome.queue for outcome in outcomes.wait(2)] == [QUEUE, QUEUE]
        transport.heart_beat(peer.address, "client", [], PATIENCE)
    sent = {"a": "ns%pg", "b": "ns%orders", "c": "TBW102"}
    assert names(peer)[:3] == [(310, sent), (320, sent), (310, {**sent, "b": "%RETRY%ns%cg"})]


def test_route_requests_have_the_namespace_except_for_templates(make_transport: Make) -> None:
    with fakes.name_server({topic: route({"a": queues}) for topic, queues in TOPICS.items()}) as peer:
        transport = make_transport(peer.address, namespace="ns", create_topic_key="mine")
        queues = [
            transport.query_route(topic, PATIENCE).queue_datas[0].write_queue_nums
            for topic in ("orders", "ns%orders", "TBW102", "mine")
        ]
        assert queues == [1, 1, 3, 4]
        assert transport.name_servers.route_at(peer.address, "orders", PATIENCE).queue_datas[0].write_queue_nums == 1
    assert [fields["topic"] for _, fields in names(peer)] == ["ns%orders", "ns%orders", "TBW102", "mine", "ns%orders"]


def test_topics_and_attributes_are_limited_to_the_namespace(make_transport: Make) -> None:
    with FakeCluster(topics=dict.fromkeys((*TOPICS, "other%orders", "%RETRY%ns%cg", "%RETRY%cg"), 2)) as cluster:
        peer = cluster.brokers["broker-0"]
        cluster.create_topic("ns%orders", attributes={"message.type": "FIFO"})
        cluster.create_topic("orders", attributes={"message.type": "DELAY"})
        transport = make_transport(cluster.name_server, namespace="ns")
        assert transport.topics(PATIENCE) == {"orders", "%RETRY%cg"}
        attributes = {"orders": {"message.type": "FIFO"}, "%RETRY%cg": {}}
        assert transport.all_topic_attributes(peer.address, PATIENCE) == attributes
        assert transport.topic_config(peer.address, "orders", PATIENCE).message_type == "FIFO"
        everything = make_transport(cluster.name_server)
        assert everything.topics(PATIENCE) == set(peer.storage.topics)
        assert everything.all_topic_attributes(peer.address, PATIENCE).keys() == set(peer.storage.topics)


def test_requests_about_queues_and_topics_have_the_namespace(make_transport: Make) -> None:
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(peer.address, namespace="ns")
        peer.storage.store.put(MessageQueue("ns%orders", "a", 0), [Message.of("ns%orders", b"x")] * 3, 1_700_000_000.0)
        assert transport.max_offset(QUEUE, peer.address, PATIENCE) == 3
        transport.min_offset(QUEUE, peer.address, PATIENCE)
        transport.search_offset(QUEUE, 0, peer.address, PATIENCE)
        transport.earliest_msg_store_time(QUEUE, peer.address, PATIENCE)
        transport.probe(QUEUE, peer.address, PATIENCE)
        assert transport.view_message(peer.address, 0, PATIENCE, topic="orders").topic == "orders"
        transport.topic_config(peer.address, "orders", PATIENCE)
        with pytest.raises(MQBrokerException, match="recall failed"):
            transport.recall_message(peer.address, RecallMessage("orders", HANDLE, "pg", "a"), PATIENCE)
        transport.create_topic(peer.address, "bills", 4, 6, PATIENCE)
        assert "ns%bills" in peer.storage.topics
    *others, recalled, created = [fields for _, fields in names(peer)]
    assert others == [{"topic": "ns%orders"}] * 7
    assert recalled == {"topic": "ns%orders", "producerGroup": "ns%pg"}
    assert created == {"topic": "ns%bills", "defaultTopic": "TBW102"}


def test_stored_message_of_another_namespace_keeps_its_topic(make_transport: Make) -> None:
    with fakes.broker("a", TOPICS) as peer:
        peer.storage.store.put(
            MessageQueue("other%orders", "a", 0), [Message.of("other%orders", b"x")], 1_700_000_000.0
        )
        transport = make_transport(namespace="ns")
        assert transport.view_message(peer.address, 0, PATIENCE).topic == "other%orders"


def test_reads_have_the_namespace_in_topic_and_group(make_transport: Make, outcomes: Any) -> None:
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns")
        peer.storage.store.put(MessageQueue("ns%orders", "a", 0), [Message.of("ns%orders", b"x")], 1_700_000_000.0)
        request = PullRequest(PullTarget(QUEUE, "cg", 8, "*", "TAG"), peer.address, 0)
        transport.pull(request, PATIENCE, outcomes)
        assert outcomes.wait(1)[0].max_offset == transport.pull_now(request, PATIENCE).max_offset == 1
        transport.update_consumer_offset(QUEUE, "cg", 1, peer.address, PATIENCE)
        assert names(peer) == [(code, {"topic": "ns%orders", "consumerGroup": "ns%cg"}) for code in (11, 11, 15)]
        transport.register_consumer("me", "cg", peer.address, PATIENCE)
        assert transport.consumers("cg", peer.address, PATIENCE) == ("me",)
        assert transport.consumers("other", peer.address, PATIENCE) == ()
        with pytest.raises(MQBrokerException, match="SQL92"):
            transport.check_filter(peer.address, "orders", "cg", "a > 5", "SQL92", PATIENCE)
        beat, *asked, checked = list(peer.requests)[3:]
        assert [data["groupName"] for data in json.loads(bytes(beat.body))["consumerDataSet"]] == ["ns%cg"]
        assert [request.ext_fields["consumerGroup"] for request in asked] == ["ns%cg", "ns%other"]
        body = json.loads(bytes(checked.body))
        assert (body["clientId"], body["group"], body["subscriptionData"]["topic"]) == ("ns%cg", "ns%cg", "ns%orders")


@pytest.mark.parametrize("group", ["TOOLS_CONSUMER", "CID_RMQ_SYS_x"])
def test_system_groups_are_never_in_a_namespace(make_transport: Make, group: str) -> None:
    with fakes.broker("a", TOPICS) as peer:
        make_transport(namespace="ns").consumers(group, peer.address, PATIENCE)
        assert peer.requests[0].ext_fields["consumerGroup"] == group


def test_producer_groups_are_registered_with_the_namespace(make_transport: Make) -> None:
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns")
        transport.heart_beat(peer.address, "client", ["b", "a"], PATIENCE)
        transport.unregister_client(peer.address, "client", "a", PATIENCE)
        beat, gone = peer.requests
        assert [data["groupName"] for data in json.loads(bytes(beat.body))["producerDataSet"]] == ["ns%a", "ns%b"]
        assert gone.ext_fields["producerGroup"] == "ns%a"


def test_half_messages_checks_and_ends_are_in_the_namespace(
    make_transport: Make, request_to: Callable[..., SendRequest], collected: Any
) -> None:
    outcomes, checks, ends = collected(), collected(), collected()
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns")
        transport.on_check_transaction = checks
        properties = "XPGROUP\x01pg\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01U1\x02"
        half = request_to(peer.address, queue=QUEUE, properties=properties, sys_flag=TRANSACTION_PREPARED_TYPE)
        transport.send(half, PATIENCE, outcomes)
        outcomes.wait(1)
        [sent] = peer.requests
        expected = {"XPGROUP": "pg", "TRAN_MSG": "true", "PGROUP": "ns%pg", "UNIQ_KEY": "U1"}
        assert list(decode_properties(sent.ext_fields["i"].encode()).items()) == list(expected.items())
        transport.heart_beat(peer.address, "client", ["pg"], PATIENCE)
        asked = peer.check_transaction(0)
        assert asked is not None
        assert (asked.message.topic, asked.producer_group) == ("ns%orders", "ns%pg")
        [check] = checks.wait(1)
        assert (check.message.topic, check.producer_group, check.unique_id) == ("orders", "pg", "U1")
        received = {name: text for name, text in check.message.properties.items() if name in expected}
        assert received == {**expected, "PGROUP": "pg"}
        transport.end_transaction_oneway(peer.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE)
        transport.end_transaction(peer.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE, ends)
        assert ends.wait(1) == [None]
        answers = [fields for code, fields in names(peer) if code == RequestCode.END_TRANSACTION]
        assert answers == [{"topic": "ns%orders", "producerGroup": "ns%pg"}] * 2


def test_group_property_of_other_messages_stays_as_it_is(
    make_transport: Make, request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    with fakes.broker("a", TOPICS) as peer:
        make_transport(namespace="ns").send(request_to(peer.address, properties="PGROUP\x01pg\x02"), PATIENCE, outcomes)
        outcomes.wait(1)
        assert decode_properties(peer.requests[0].ext_fields["i"].encode()) == {"PGROUP": "pg"}


def test_signature_covers_the_names_on_the_wire(make_transport: Make) -> None:
    credentials = Credentials("the-user", "hush-hush")
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns", credentials=credentials)
        transport.max_offset(QUEUE, peer.address, PATIENCE)
        fields = dict(peer.requests[0].ext_fields)
    signature = fields.pop("Signature")
    assert fields["topic"] == "ns%orders"
    assert signed(fields, (), credentials)["Signature"] == signature


def test_prefixed_names_and_request_objects_are_unchanged(
    make_transport: Make, request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    with fakes.broker("a", TOPICS) as peer:
        transport = make_transport(namespace="ns")
        request = replace(request_to(peer.address, queue=MessageQueue("ns%orders", "a", 0)), producer_group="ns%pg")
        transport.send(request, PATIENCE, outcomes)
        assert outcomes.wait(1)[0].queue == request.queue
        plain = make_transport(namespace=" ")
        plain.send(request_to(peer.address, queue=QUEUE), PATIENCE, outcomes)
        outcomes.wait(2)
    found = [(fields["a"], fields["b"]) for _, fields in names(peer)]
    assert found == [("ns%pg", "ns%orders"), ("pg", "orders")]


def test_a_namespace_that_no_name_can_have_is_refused(make_transport: Make) -> None:
    with pytest.raises(MQClientException, match="namespace 'a%b' contains '%'"):
        make_transport(namespace="a%b")
