"""What the seam's methods put on the wire, and what they make of the answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerUnavailableException,
    MQBrokerException,
    MQClientException,
    NoBrokersException,
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingTimeoutException,
    RouteNotFoundException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.routing.route_cache import RouteCache
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.remoting.requests import Request
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support import fakes
from tests.support.peer import Peer, Session, address_of, full_listener, refused_address
from tests.support.processes import PATIENCE
from tests.support.scripted import route
from tests.support.strategies import encode_stored_record
from tests.support.transports import Authority

MakeTransport = Callable[..., RemotingTransport]
ROUTE = route({"broker-a": 4})


class Fixed(random.Random):
    """Starts with the first name server."""

    def randrange(self, *_: Any, **__: Any) -> int:
        return 0


def send(transport: RemotingTransport, request: SendRequest, outcomes: Any) -> SendOutcome:
    transport.send(request, PATIENCE, outcomes)
    outcome: SendOutcome = outcomes.wait(1)[0]
    return outcome


def test_single_message_is_sent_as_send_message_v2(
    transport: RemotingTransport, request_to: Any, outcomes: Any
) -> None:
    with fakes.broker() as peer:
        request = request_to(peer.address, (b"he", b"", b"llo"), properties="KEYS\x01k\x02", flag=7, sys_flag=1)
        send(transport, request, outcomes)
        [command] = peer.requests
    assert command.code == RequestCode.SEND_MESSAGE_V2
    assert bytes(command.body) == b"hello"
    assert (command.language, command.version) == ("PYTHON", 493)
    assert command.ext_fields == {
        "a": "pg",
        "b": "orders",
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "1",
        "g": "1700000000000",
        "h": "7",
        "i": "KEYS\x01k\x02",
        "j": "0",
        "k": "false",
        "m": "false",
        "n": "broker-a",
    }


def test_reconsume_times_use_fields_j_and_l_and_unit_mode_field_k(
    transport: RemotingTransport, request_to: Any, outcomes: Any
) -> None:
    with fakes.broker() as peer:
        queue = MessageQueue("%RETRY%cg", "broker-a", 0)
        changes = {"reconsume_times": 3, "max_reconsume_times": 16, "unit_mode": True}
        send(transport, request_to(peer.address, queue=queue, **changes), outcomes)
        [command] = peer.requests
    assert [command.ext_fields[name] for name in "bjkl"] == ["%RETRY%cg", "3", "true", "16"]


def test_a_reply_goes_as_send_reply_message_v2(transport: RemotingTransport, request_to: Any, outcomes: Any) -> None:
    codes: list[int] = []

    def note(session: Session) -> None:
        for _ in range(2):
            request = session.read()
            codes.append(request.code)
            session.answer_send(request)

    with Peer(note) as peer:
        for count in (1, 2):
            transport.send(request_to(peer.address, reply=count == 1), PATIENCE, outcomes)
            outcomes.wait(count)
    assert codes == [RequestCode.SEND_REPLY_MESSAGE_V2, RequestCode.SEND_MESSAGE_V2]


def test_batch_is_sent_as_send_batch_message_with_m_true(
    transport: RemotingTransport, batch_to: Any, outcomes: Any
) -> None:
    with fakes.broker() as peer:
        outcome = send(transport, batch_to(peer.address, b"one", b"two", properties="WAIT\x01false\x02"), outcomes)
        [command] = peer.requests
        kept = peer.storage.store.queues[MessageQueue("orders", "broker-a", 0)]
    assert command.code == RequestCode.SEND_BATCH_MESSAGE
    assert (command.ext_fields["m"], command.ext_fields["i"]) == ("true", "WAIT\x01false\x02")
    assert [message.body for message in kept] == [b"one", b"two"]
    assert outcome.status is SendStatus.SEND_OK


def test_outcome_has_all_fields_of_the_acknowledgement(
    transport: RemotingTransport, request_to: Any, outcomes: Any
) -> None:
    fields = {
        "msgId": "7F00",
        "queueId": "3",
        "queueOffset": "41",
        "transactionId": "T1",
        "MSG_REGION": "eu",
        "TRACE_ON": "false",
        "batchUniqId": "B1",
        "recallHandle": "djEg",
    }

    def other_queue(session: Session) -> None:
        session.answer(session.read(), 10, fields)

    with Peer(other_queue) as peer:
        outcome = send(transport, request_to(peer.address, queue=MessageQueue("orders", "broker-a", -1)), outcomes)
    assert outcome == SendOutcome(
        queue=MessageQueue("orders", "broker-a", 3),
        status=SendStatus.FLUSH_DISK_TIMEOUT,
        error=None,
        latency_ms=outcome.latency_ms,
        queue_offset=41,
        offset_msg_id="7F00",
        transaction_id="T1",
        region_id="eu",
        trace_on=False,
        batch_uniq_id="B1",
        recall_handle="djEg",
    )
    assert outcome.latency_ms > 0


def test_missing_fields_of_an_acknowledgement_have_defaults(
    transport: RemotingTransport, request_to: Any, outcomes: Any
) -> None:
    def terse(session: Session) -> None:
        session.answer(session.read(), 0, {"msgId": "7F00", "queueId": "0", "queueOffset": "0", "MSG_REGION": ""})

    with Peer(terse) as peer:
        outcome = send(transport, request_to(peer.address), outcomes)
    assert (outcome.region_id, outcome.trace_on) == ("DefaultRegion", True)
    assert (outcome.transaction_id, outcome.batch_uniq_id, outcome.recall_handle) == ("", "", "")


def test_rejection_names_rows_queue_broker_code_and_remark(
    transport: RemotingTransport, batch_to: Any, outcomes: Any
) -> None:
    with fakes.broker() as peer:
        peer.play(Reply.code(2, "[OVERLOAD]system busy"))
        outcome = send(transport, batch_to(peer.address, b"one", b"two"), outcomes)
        expected = f"sending 2 rows to orders/broker-a/0: {peer.address} answered 2 SYSTEM_BUSY: [OVERLOAD]system busy"
    assert isinstance(outcome.error, BrokerBusyException)
    assert str(outcome.error).startswith(expected)


def test_heart_beat_unregister_offsets_and_topics(transport: RemotingTransport) -> None:
    queue = MessageQueue("orders", "broker-a", 2)
    with fakes.broker() as peer:
        transport.heart_beat(peer.address, "10.0.0.1@spec", ["pg"], PATIENCE)
        transport.unregister_client(peer.address, "10.0.0.1@spec", "pg", PATIENCE)
        assert transport.max_offset(queue, peer.address, PATIENCE) == 0
        assert transport.min_offset(queue, peer.address, PATIENCE) == 0
        transport.create_topic(peer.address, "orders", 8, 6, PATIENCE)
        transport.search_offset(queue, 1_700_000_000_000, peer.address, PATIENCE)
        transport.earliest_msg_store_time(queue, peer.address, PATIENCE)
        transport.create_topic(
            *(peer.address, "orders", 8, 4, PATIENCE),
            read_queue_nums=16,
            topic_sys_flag=1,
            order=True,
            attributes="+message.type=FIFO",
        )
        sent = [(command.code, command.ext_fields) for command in peer.requests]
        beat = bytes(peer.requests[0].body)
    created = {
        "topic": "orders",
        "defaultTopic": "TBW102",
        "readQueueNums": "8",
        "writeQueueNums": "8",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    changed = {
        "readQueueNums": "16",
        "perm": "4",
        "topicSysFlag": "1",
        "order": "true",
        "attributes": "+message.type=FIFO",
    }
    assert beat == b'{"clientID":"10.0.0.1@spec","producerDataSet":[{"groupName":"pg"}],"consumerDataSet":[]}'
    assert sent == [
        (34, {}),
        (35, {"clientID": "10.0.0.1@spec", "producerGroup": "pg"}),
        (30, {"topic": "orders", "queueId": "2", "bname": "broker-a"}),
        (31, {"topic": "orders", "queueId": "2", "bname": "broker-a"}),
        (17, created),
        (
            29,
            {
                "topic": "orders",
                "queueId": "2",
                "timestamp": "1700000000000",
                "boundaryType": "lower",
                "bname": "broker-a",
            },
        ),
        (32, {"topic": "orders", "queueId": "2", "bname": "broker-a"}),
        (17, created | changed),
    ]


@pytest.mark.parametrize("code", [0, 1])
def test_viewing_a_missing_message_is_an_error_naming_the_offset(transport: RemotingTransport, code: int) -> None:
    # From the middle of a record a broker answers with its bytes, or with whatever went wrong there.
    def garbage(session: Session) -> None:
        session.answer(session.read(), code, body=b"\0\0\0\x05x", remark="java.lang.IllegalArgumentException")
        session.wait_for_hangup()

    with Peer(garbage) as peer, pytest.raises(MQClientException) as raised:
        transport.view_message(peer.address, 219, PATIENCE)
    text = f"viewing the message at commit-log offset 219: {peer.address} has no message that begins there"
    assert str(raised.value).startswith(text)
    assert raised.value.retriable is False


def test_view_of_another_message_is_rejected(transport: RemotingTransport, request_to: Any, outcomes: Any) -> None:
    with fakes.broker() as peer:
        send(transport, request_to(peer.address), outcomes)
        message = peer.storage.store.view(0)
        assert message is not None

    def another(session: Session) -> None:
        session.answer(session.read(), body=encode_stored_record(message))

    with Peer(another) as other, pytest.raises(MQClientException, match="no message that begins there"):
        transport.view_message(other.address, 219, PATIENCE)


def test_topic_config_has_the_attributes_reported_by_the_broker(transport: RemotingTransport) -> None:
    asked: list[RemotingCommand] = []

    def serve(session: Session) -> None:
        asked.append(session.read())
        session.answer(asked[0], body=b'{"attributes":{"queue.type":"BatchCQ"},"order":false,"perm":6}')

    with Peer(serve) as peer:
        assert transport.topic_config(peer.address, "orders", PATIENCE).holds_batches
    assert (asked[0].code, asked[0].ext_fields) == (351, {"topic": "orders"})


def test_blocking_call_raises_the_error_of_the_answer(transport: RemotingTransport) -> None:
    def refuse(session: Session) -> None:
        session.answer(session.read(), 16, remark="not yours")

    with Peer(refuse) as peer, pytest.raises(MQBrokerException, match="16 NO_PERMISSION: not yours") as raised:
        transport.create_topic(peer.address, "orders", 8, 6, PATIENCE)
    assert raised.value.broker_addr == peer.address


def test_route_comes_from_the_first_name_server_that_answers(make_transport: MakeTransport) -> None:
    dead = refused_address()
    with fakes.name_server({"orders": ROUTE}) as good, fakes.name_server({"orders": ROUTE}) as spare:
        transport = make_transport(dead, good.address, spare.address, random=Fixed())
        for _ in range(3):
            assert transport.query_route("orders", PATIENCE) == ROUTE
        assert (len(good.requests), len(spare.requests)) == (3, 0)


def test_silent_name_server_leaves_time_for_the_next(make_transport: MakeTransport) -> None:
    with full_listener() as silent, fakes.name_server({"orders": ROUTE}) as good:
        transport = make_transport(address_of(silent), good.address, random=Fixed())
        assert transport.query_route("orders", 1.0) == ROUTE


def test_name_servers_that_all_fail_are_all_named_with_their_reasons(make_transport: MakeTransport) -> None:
    dead = refused_address()
    with Peer(Session.wait_for_hangup) as mute:
        transport = make_transport(mute.address, dead, random=Fixed())
        with pytest.raises(RemotingConnectException) as raised:
            transport.query_route("orders", 3.0)
    text = str(raised.value)
    assert "no name server gave the route of topic orders: " in text, "it was not the time that was over"
    assert "check that nameServer has the addresses of name servers" in text
    assert f"{mute.address}: GET_ROUTEINFO_BY_TOPIC to {mute.address}: no answer within" in text
    assert f"{dead}: GET_ROUTEINFO_BY_TOPIC to {dead}: can't connect" in text
    assert isinstance(raised.value.__cause__, RemotingConnectException)


def test_no_name_server_is_queried_without_time(make_transport: MakeTransport) -> None:
    with fakes.name_server({"orders": ROUTE}) as good:
        with pytest.raises(RemotingTimeoutException, match="not asked, no time was left"):
            make_transport(good.address).query_route("orders", 0.0)
        assert len(good.requests) == 0


def test_name_server_that_knows_the_topic_is_preferred(make_transport: MakeTransport) -> None:
    # One that has just been restarted knows nothing until brokers have registered again.
    with fakes.name_server() as empty, fakes.name_server({"orders": ROUTE}) as other:
        transport = make_transport(empty.address, other.address, random=Fixed())
        for _ in range(3):
            assert transport.query_route("orders", PATIENCE) == ROUTE
        assert (len(empty.requests), len(other.requests)) == (1, 3)


def test_unknown_topic_is_looked_up_at_all_name_servers_and_they_are_named(make_transport: MakeTransport) -> None:
    dead = refused_address()
    with fakes.name_server({"others": ROUTE}) as one, fakes.name_server({"others": ROUTE}) as other:
        transport = make_transport(dead, one.address, other.address, random=Fixed())
        for asked in (1, 2):
            with pytest.raises(TopicRouteStaleException) as raised:
                transport.query_route("orders", PATIENCE)
            for peer in (one, other):
                routes = [request for request in peer.requests if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC]
                assert len(routes) == asked
        text = f"looking up the route of topic orders: {one.address}, {other.address} answered 17 TOPIC_NOT_EXIST: "
    reason = "No topic route info in name server for the topic: orders; without an answer: "
    assert str(raised.value).startswith(f"{text}{reason}{dead}: ")
    assert raised.value.remark.startswith(f"{one.address}, {other.address}: {reason}")
    assert raised.value.response_code == 17


@pytest.mark.parametrize("turned", [False, True])
def test_lookup_is_retriable_if_one_name_server_failed_transiently(
    make_transport: MakeTransport, authority: Authority, turned: bool
) -> None:
    down = refused_address()
    with Peer(Session.serve, tls=authority.context("elsewhere", "DNS:elsewhere.example")) as misnamed:
        addresses = (down, misnamed.address) if turned else (misnamed.address, down)
        transport = make_transport(*addresses, random=Fixed(), tls=TlsSettings(str(authority.ca_file)))
        with pytest.raises(RemotingConnectException) as raised:
            transport.query_route("orders", PATIENCE)
    assert raised.value.retriable
    assert not isinstance(raised.value, RemotingCertificateException)


def test_missing_brokers_are_reported_instead_of_a_missing_topic(make_transport: MakeTransport) -> None:
    with fakes.name_server() as one, fakes.name_server() as other:
        transport = make_transport(one.address, other.address, random=Fixed())
        with pytest.raises(NoBrokersException) as raised:
            transport.query_route("orders", PATIENCE)
        text = f"looking up the route of topic orders: {one.address}, {other.address} answers, and knows no broker"
        assert str(raised.value).startswith(text)
        assert f"namesrvAddr={one.address};{other.address}" in str(raised.value)
        assert raised.value.retriable, "one may register any moment"
        with pytest.raises(RouteNotFoundException, match="knows no broker: start one with namesrvAddr"):
            RouteCache(transport.query_route, create_topic_key="TBW102", default_topic_queue_nums=4).look_up(
                "orders", 1.0
            )


def test_unknown_topic_does_not_make_a_silent_name_server_preferred(
    make_transport: MakeTransport,
) -> None:
    with full_listener() as silent, fakes.name_server({"orders": ROUTE}) as good:
        transport = make_transport(address_of(silent), good.address, random=Fixed())
        with pytest.raises(TopicRouteStaleException):
            transport.query_route("unheard-of", 1.0)
        assert transport.query_route("orders", 0.3) == ROUTE


def not_ready(session: Session) -> None:
    while True:
        session.answer(session.read(), 1, remark="name server not ready")


def test_name_server_that_is_not_ready_is_skipped(make_transport: MakeTransport) -> None:
    with Peer(not_ready) as starting, fakes.name_server({"orders": ROUTE}) as good:
        transport = make_transport(starting.address, good.address, random=Fixed())
        assert transport.query_route("orders", PATIENCE) == ROUTE
        # The starting name server may know what the other one does not.
        with pytest.raises(BrokerUnavailableException, match=r"name server not ready.*No topic route info"):
            transport.query_route("unheard-of", PATIENCE)


def test_rejection_by_a_name_server_is_raised_without_asking_others(make_transport: MakeTransport) -> None:
    def refuse(session: Session) -> None:
        session.answer(session.read(), 16, remark="not yours")

    with Peer(refuse) as strict, fakes.name_server({"orders": ROUTE}) as other:
        transport = make_transport(strict.address, other.address, random=Fixed())
        with pytest.raises(MQBrokerException, match="16 NO_PERMISSION: not yours"):
            transport.query_route("orders", PATIENCE)
        assert len(other.requests) == 0


def test_name_server_with_a_malformed_route_is_skipped(make_transport: MakeTransport) -> None:
    def nonsense(session: Session) -> None:
        session.answer(session.read(), body=b"<html>")

    with Peer(nonsense) as odd, fakes.name_server({"orders": ROUTE}) as good:
        transport = make_transport(odd.address, good.address, random=Fixed())
        assert transport.query_route("orders", PATIENCE) == ROUTE
        assert transport.query_route("orders", PATIENCE) == ROUTE
        assert len(odd.sessions) == 1


def test_no_name_server_at_all_is_javas_error_10004(transport: RemotingTransport) -> None:
    with pytest.raises(MQClientException, match="no name server is set") as raised:
        transport.query_route("orders", PATIENCE)
    assert raised.value.response_code == 10004


def test_a_name_server_that_is_no_address_is_an_option_error() -> None:
    with pytest.raises(OptionError, match="nameServer: 'somewhere' is not an address"):
        RemotingTransport(["127.0.0.1:9876", "somewhere"])


def test_workers_start_with_different_name_servers(make_transport: MakeTransport) -> None:
    with fakes.name_server({"orders": ROUTE}) as one, fakes.name_server({"orders": ROUTE}) as other:
        for seed in range(20):
            make_transport(one.address, other.address, random=random.Random(seed)).query_route("orders", PATIENCE)
        asked = len(one.requests), len(other.requests)
    assert sum(asked) == 20
    assert min(asked) > 0


def test_frame_above_16_mib_is_rejected_before_sending(
    transport: RemotingTransport, request_to: Any, outcomes: Any
) -> None:
    with fakes.broker() as peer:
        with pytest.raises(MQClientException, match="send smaller or fewer messages at once"):
            transport.send(request_to(peer.address, bytes(16_777_216)), PATIENCE, outcomes)
        assert send(transport, request_to(peer.address), outcomes).status is SendStatus.SEND_OK
    assert len(outcomes) == 1


def test_client_returns_answers_with_any_code(transport: RemotingTransport, outcomes: Any) -> None:
    def answer(session: Session) -> None:
        for code in (3, 22):
            session.answer(session.read(), code, remark="so be it")

    with Peer(answer) as peer:
        command = transport.client.invoke(peer.address, 9999, {"x": "y"}, b"", PATIENCE)
        transport.client.start(peer.address, Request(RequestCode.QUERY_CONSUMER_OFFSET, {}, (), PATIENCE, outcomes))
        [later] = outcomes.wait(1)
    assert (command.code, command.remark) == (3, "so be it")
    assert isinstance(later.command, RemotingCommand)
    assert (later.command.code, later.error) == (22, None)
