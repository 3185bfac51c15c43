"""Responses are matched with requests: in any order, split anywhere, with either header type and other frames
between."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue, SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.transport.remoting.requests import next_opaque
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.frames import SerializeType, encode_command
from tests.support.peer import Peer, Session, stored_fields
from tests.support.processes import PATIENCE

RequestTo = Callable[..., SendRequest]


def test_answers_can_arrive_in_any_order(transport: RemotingTransport, request_to: RequestTo, collected: Any) -> None:
    def backwards(session: Session) -> None:
        requests = [session.read() for _ in range(20)]
        for request in random.Random(1).sample(requests, len(requests)):
            session.answer_send(request, offset=int(bytes(request.body)))

    with Peer(backwards) as peer:
        collectors = [collected() for _ in range(20)]
        for number, collector in enumerate(collectors):
            transport.send(request_to(peer.address, b"%d" % number), PATIENCE, collector)
        offsets = [collector.wait(1)[0].queue_offset for collector in collectors]
        assert len(peer.sessions) == 1
    assert offsets == list(range(20))


@pytest.mark.parametrize("size", [1, 7])
def test_answer_can_arrive_in_small_pieces(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, size: int
) -> None:
    def drip(session: Session) -> None:
        for _ in range(2):
            request = session.read()
            frame = session.encoded(request, ext_fields=stored_fields(request, 5))
            for at in range(0, len(frame), size):
                session.sock.sendall(frame[at : at + size])

    with Peer(drip) as peer:
        for count in (1, 2):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
            outcomes.wait(count)
    assert [outcome.queue_offset for outcome in outcomes] == [5, 5]


def test_many_answers_can_arrive_in_one_piece(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    def at_once(session: Session) -> None:
        requests = [session.read() for _ in range(50)]
        session.sock.sendall(b"".join(session.encoded(one, ext_fields=stored_fields(one, 1)) for one in requests))

    with Peer(at_once) as peer:
        for _ in range(50):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(50)
    assert [outcome.status for outcome in outcomes] == [SendStatus.SEND_OK] * 50


def test_an_answer_larger_than_the_receive_buffer_arrives_whole(transport: RemotingTransport) -> None:
    body = random.Random(2).randbytes(3_000_000)

    def large(session: Session) -> None:
        session.answer(session.read(), body=body)
        session.wait_for_hangup()

    with Peer(large) as peer:
        answer = transport.client.invoke(peer.address, RequestCode.PULL_MESSAGE, {"topic": "orders"}, b"", PATIENCE)
        assert bytes(answer.body) == body


def test_both_header_types_are_understood_on_one_connection(transport: RemotingTransport) -> None:
    def either(session: Session) -> None:
        for serialize_type in (SerializeType.ROCKETMQ, SerializeType.JSON, SerializeType.ROCKETMQ):
            session.answer(session.read(), ext_fields={"offset": "7"}, serialize_type=serialize_type)

    with Peer(either) as peer:
        answers = [
            transport.client.invoke(peer.address, RequestCode.GET_MAX_OFFSET, {}, b"", PATIENCE) for _ in range(3)
        ]
    assert [answer.ext_fields["offset"] for answer in answers] == ["7", "7", "7"]


def test_unexpected_answer_is_dropped(transport: RemotingTransport) -> None:
    def confused(session: Session) -> None:
        request = session.read()
        session.sock.sendall(encode_command(RemotingCommand(0, request.opaque + 1000, flag=1)))
        session.answer(request)
        session.answer(request)
        session.answer(session.read(), remark="second")

    with Peer(confused) as peer:
        transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
        second = transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
    assert second.remark == "second"


def test_a_request_of_the_broker_is_refused_and_its_oneway_dropped(transport: RemotingTransport) -> None:
    replies: list[RemotingCommand] = []

    def asking(session: Session) -> None:
        request = session.read()
        # The same opaque as our request in flight: each direction has its own numbers.
        for flag in (2, 0):
            pushed = RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, request.opaque, flag=flag)
            session.sock.sendall(encode_command(pushed))
        replies.append(session.read())
        session.answer(request, remark="ours")

    with Peer(asking) as peer:
        answer = transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
    assert answer.remark == "ours"
    assert [(reply.code, reply.flag, reply.opaque) for reply in replies] == [
        (ResponseCode.REQUEST_CODE_NOT_SUPPORTED, 1, answer.opaque)
    ]
    assert replies[0].remark == "request type 307 not supported"


def test_a_oneway_request_returns_when_written(transport: RemotingTransport) -> None:
    received: list[RemotingCommand] = []
    arrived = threading.Event()

    def silent(session: Session) -> None:
        for _ in range(2):
            received.append(session.read())
        arrived.set()
        session.wait_for_hangup()

    with Peer(silent) as peer:
        for body in (b"first", b"second"):
            transport.client.invoke_oneway(peer.address, RequestCode.SEND_MESSAGE_V2, {"b": "orders"}, body, PATIENCE)
        assert arrived.wait(PATIENCE)
        assert "0 in flight" in repr(transport)
    assert [(command.flag, bytes(command.body)) for command in received] == [(2, b"first"), (2, b"second")]


def test_resent_request_has_a_new_opaque(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    opaques: list[int] = []

    def note(session: Session) -> None:
        for _ in range(3):
            request = session.read()
            opaques.append(request.opaque)
            session.answer_send(request)

    with Peer(note) as peer:
        request = request_to(peer.address)
        for count in (1, 2, 3):
            transport.send(request, PATIENCE, outcomes)
            outcomes.wait(count)
    assert len(set(opaques)) == 3


@pytest.mark.parametrize(
    ("last", "in_flight", "expected"),
    [
        (-1, {}, 0),
        (0, {1: "", 2: ""}, 3),
        (2**31 - 1, {}, -(2**31)),
        (2**31 - 2, {2**31 - 1: "", -(2**31): ""}, -(2**31) + 1),
    ],
)
def test_opaques_wrap_as_javas_int_and_leave_out_those_in_flight(
    last: int, in_flight: dict[int, str], expected: int
) -> None:
    assert next_opaque(last, in_flight) == expected


def test_many_threads_share_one_connection(transport: RemotingTransport, request_to: RequestTo, collected: Any) -> None:
    with Peer(Session.serve) as peer:
        collectors = [collected() for _ in range(4)]

        def work(collector: Any) -> None:
            for _ in range(100):
                transport.send(request_to(peer.address), PATIENCE, collector)
                transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)

        threads = [threading.Thread(target=work, args=(collector,)) for collector in collectors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        counts = [len(collector.wait(100)) for collector in collectors]
        assert counts == [100] * 4
        assert all(outcome.error is None for collector in collectors for outcome in collector)
        assert len(peer.sessions) == 1


def test_latency_is_positive_even_if_the_answer_is_very_fast(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    def prompt(session: Session) -> None:
        for _ in range(40):
            session.answer_send(session.read())

    stop = threading.Event()

    def hog() -> None:
        # Holds the interpreter's lock when the sending thread returns from the socket.
        while not stop.is_set():
            sum(range(1000))

    hogs = [threading.Thread(target=hog) for _ in range(2)]
    with Peer(prompt) as peer:
        for thread in hogs:
            thread.start()
        for count in range(1, 41):
            transport.send(request_to(peer.address, b"x" * 100_000), PATIENCE, outcomes)
            if count % 4 == 0:
                outcomes.wait(count)
        stop.set()
        for thread in hogs:
            thread.join()
    assert min(outcome.latency_ms for outcome in outcomes) > 0


@pytest.mark.parametrize(
    ("fields", "body", "call", "doing"),
    [
        ({"offset": '4"'}, b"", "max_offset", "GET_MAX_OFFSET of orders/a/0"),
        ({}, b"", "earliest_msg_store_time", "GET_EARLIEST_MSG_STORETIME of orders/a/0"),
        ({}, b"{", "topic_config", "reading the configuration of topic orders"),
        ({}, b"[]", "query_route", "looking up the route of topic orders"),
    ],
)
def test_unreadable_answer_error_names_request_and_server(
    fields: dict[str, str], body: bytes, call: str, doing: str
) -> None:
    def answer(session: Session) -> None:
        while True:
            session.answer(session.read(), 0, fields, body)

    queue = MessageQueue("orders", "a", 0)
    with Peer(answer) as peer, RemotingTransport([peer.address]) as transport:
        arguments: dict[str, tuple[Any, ...]] = {
            "max_offset": (queue, peer.address, PATIENCE),
            "earliest_msg_store_time": (queue, peer.address, PATIENCE),
            "topic_config": (peer.address, "orders", PATIENCE),
            "query_route": ("orders", PATIENCE),
        }
        with pytest.raises(RemotingCommandException) as raised:
            getattr(transport, call)(*arguments[call])
    assert f"{doing}: {peer.address} sent an answer that cannot be read: " in str(raised.value)
