"""The effect of each failure on waiting requests and on the connection."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerUnavailableException,
    RemotingCommandException,
    RemotingConnectException,
    RemotingException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTooMuchRequestException,
    TooLongFrameException,
)
from rocketmq_spark.model.message import SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.frames import encode_command
from tests.support.peer import Peer, Session, address_of, full_listener, refused_address, stored_fields
from tests.support.processes import PATIENCE, wait_for
from tests.support.scripted import ManualClock

RequestTo = Callable[..., SendRequest]

# Timeout of requests that must time out, seconds. Other requests use PATIENCE.
SOON = 0.2


def kinds(outcomes: Any) -> list[type | SendStatus]:
    return [outcome.status or type(outcome.error) for outcome in outcomes]


def test_refused_connection_fails_at_once_and_nothing_was_sent(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    address = refused_address()
    transport.send(request_to(address), PATIENCE, outcomes)
    [outcome] = outcomes.wait(1)
    assert isinstance(outcome.error, RemotingConnectException)
    assert outcome.error.maybe_stored is False
    assert outcome.latency_ms == 0.0
    assert f"SEND_MESSAGE_V2 to {address}: can't connect" in str(outcome.error)
    assert isinstance(outcome.error.__cause__, ConnectionRefusedError)


def test_the_next_request_dials_again(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    transport.send(request_to(refused_address()), PATIENCE, outcomes)
    outcomes.wait(1)
    with Peer(Session.serve) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(2)
    assert kinds(outcomes) == [RemotingConnectException, SendStatus.SEND_OK]


def test_error_of_a_refused_connection_does_not_mention_time(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any
) -> None:
    address = refused_address()
    make_transport().send(request_to(address), PATIENCE, outcomes)
    assert f"can't connect ({address}: [Errno 111] Connection refused)" in str(outcomes.wait(1)[0].error)


def test_all_requests_to_a_silent_address_fail_together(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any
) -> None:
    transport = make_transport(connect_timeout=SOON)
    with full_listener() as listener:
        address = address_of(listener)
        for _ in range(3):
            transport.send(request_to(address), PATIENCE, outcomes)
        outcomes.wait(3)
    assert kinds(outcomes) == [RemotingConnectException] * 3
    assert "can't connect within 0.2 s" in str(outcomes[0].error)
    assert "(3 requests were pending)" in str(outcomes[0].error)
    assert outcomes[0].error is not outcomes[1].error


def test_blocking_call_waits_for_a_connection_at_most_its_timeout(transport: RemotingTransport) -> None:
    with full_listener() as listener:
        address = address_of(listener)
        with pytest.raises(RemotingConnectException, match=r"not connected within 0\.2 s; it was not sent"):
            transport.client.invoke(address, RequestCode.HEART_BEAT, {}, b"", SOON)


@pytest.mark.parametrize("address", ["broker-without-port", "127.0.0.1:99999", "..:9876", "host\0name:9876"])
def test_invalid_address_is_a_connect_error(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, address: str
) -> None:
    transport.send(request_to(address), PATIENCE, outcomes)
    assert kinds(outcomes.wait(1)) == [RemotingConnectException]


def test_a_name_is_resolved_and_all_its_addresses_are_tried(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.serve) as peer:
        transport.send(request_to(f"localhost:{peer.port}"), PATIENCE, outcomes)
        assert kinds(outcomes.wait(1)) == [SendStatus.SEND_OK]


def test_ipv6_addresses_work(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    try:
        peer = Peer(Session.serve, host="::1")
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert kinds(outcomes.wait(1)) == [SendStatus.SEND_OK]


@pytest.mark.parametrize("how", ["close", "reset"])
def test_lost_connection_fails_all_its_requests_at_once(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, how: str
) -> None:
    def hang_up(session: Session) -> None:
        requests = [session.read() for _ in range(4)]
        session.answer_send(requests[2])
        if how == "reset":
            # Only after the answer has been read, because the reset would discard it.
            outcomes.wait(1)
            session.reset()

    with Peer(hang_up) as peer:
        for _ in range(4):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(4)
    assert kinds(outcomes) == [SendStatus.SEND_OK] + [RemotingSendRequestException] * 3
    error = outcomes[1].error
    assert error.maybe_stored is True
    assert peer.address in str(error)
    assert "and so may 2 others" in str(error)
    assert isinstance(error.__cause__, ConnectionError)


def test_connection_closed_by_the_server_while_idle_is_opened_again(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    def once(session: Session) -> None:
        session.answer_send(session.read())

    with Peer(once) as peer:
        for count in range(1, 4):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
            outcomes.wait(count)
            # Wait until the client has seen the hang-up: an earlier request would be lost with the connection.
            wait_for(lambda: peer.address not in repr(transport))
    assert kinds(outcomes) == [SendStatus.SEND_OK] * 3
    assert len(peer.sessions) >= 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\x08\0\0\0\x04{]}{",
        b"\0\0\0\x04\x05\0\0\0",
    ],
)
def test_bytes_that_are_not_the_protocol_close_the_connection(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, garbage: bytes
) -> None:
    def gibberish(session: Session) -> None:
        first, _ = session.read(), session.read()
        session.sock.sendall(session.encoded(first, ext_fields={"msgId": "", "queueId": "0", "queueOffset": "0"}))
        session.sock.sendall(garbage)
        session.wait_for_hangup()

    with Peer(gibberish, Session.serve) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(2)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(3)
    # As the first word of a frame, text is a length above the limit.
    too_long = garbage.startswith(b"HTTP")
    broken = TooLongFrameException if too_long else RemotingCommandException
    assert kinds(outcomes) == [SendStatus.SEND_OK, broken, SendStatus.SEND_OK]
    assert isinstance(outcomes[1].error.__cause__, RemotingCommandException)
    assert outcomes[1].error.maybe_stored is True


def test_acknowledgement_without_its_fields_is_an_error(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    def terse(session: Session) -> None:
        session.answer(session.read())

    with Peer(terse) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
    assert kinds(outcomes) == [RemotingCommandException]
    assert "msgId" in str(outcomes[0].error)


def test_silent_connection_is_closed_with_all_its_requests(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.wait_for_hangup, Session.serve) as peer:
        transport.send(request_to(peer.address, b"impatient"), SOON, outcomes)
        transport.send(request_to(peer.address, b"patient"), 4 * SOON, outcomes)
        # A request with a short timeout, such as a heart-beat, ends alone.
        outcomes.wait(1)
        transport.send(request_to(peer.address, b"behind"), 4 * SOON, outcomes)
        outcomes.wait(3)
        assert len(peer.sessions) == 1
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(4)
        assert len(peer.sessions) == 2
    timeout, broken = RemotingTimeoutException, RemotingSendRequestException
    assert kinds(outcomes) == [timeout, timeout, broken, SendStatus.SEND_OK]
    assert "the server sent nothing for 0.8 s" in str(outcomes[2].error)
    assert outcomes[0].latency_ms >= 200.0


def test_unanswered_blocking_call_times_out_and_leaves_no_request(
    transport: RemotingTransport,
) -> None:
    over = threading.Event()

    def evasive(session: Session) -> None:
        session.read()
        # Traffic on the connection, so that it stays open.
        while not over.wait(SOON / 4):
            session.sock.sendall(encode_command(RemotingCommand(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, 0, flag=2)))

    with Peer(evasive) as peer:
        with pytest.raises(RemotingTimeoutException, match=r"no answer within 0\.2 s"):
            transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", SOON)
        assert f"<Connection {peer.address} OPEN, 0 in flight, 0 unsent>" in repr(transport)
        over.set()


@pytest.mark.parametrize("how", ["close", "reset"])
def test_blocking_call_on_a_broken_connection_is_a_send_request_error(transport: RemotingTransport, how: str) -> None:
    def break_off(session: Session) -> None:
        session.read_bytes(10)
        if how == "reset":
            session.reset()

    with Peer(break_off) as peer:
        with pytest.raises(RemotingSendRequestException, match=r"may have been executed"):
            transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", PATIENCE)
        wait_for(lambda: peer.address not in repr(transport))


def test_request_expires_at_its_timeout_on_the_given_clock(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any
) -> None:
    # Java's scan comes round once a second and gives each entry a second more; this loop sleeps until the deadline.
    clock = ManualClock(100.0)
    transport = make_transport(clock=clock)
    written = threading.Event()

    def second_only(session: Session) -> None:
        session.read()
        written.set()
        session.answer(session.read())
        session.answer(session.read())
        session.wait_for_hangup()

    with Peer(second_only) as peer:
        transport.send(request_to(peer.address), 3.0, outcomes)
        assert written.wait(PATIENCE)
        clock.advance(2.999)
        transport.heart_beat(peer.address, "client", [], PATIENCE)
        assert outcomes == []
        clock.advance(0.001)
        transport.heart_beat(peer.address, "client", [], PATIENCE)
        [outcome] = outcomes.wait(1)
    assert isinstance(outcome.error, RemotingTimeoutException)
    assert outcome.latency_ms == pytest.approx(3000.0)


def test_a_timeout_keeps_a_connection_on_which_other_answers_arrive(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    late, impatient, others = threading.Event(), collected(), collected()

    def slow(session: Session) -> None:
        first, second = session.read(), session.read()
        session.answer_send(second)
        late.wait(PATIENCE)
        session.answer_send(first)
        session.serve()

    with Peer(slow) as peer:
        transport.send(request_to(peer.address), SOON, impatient)
        transport.send(request_to(peer.address), PATIENCE, others)
        others.wait(1)
        impatient.wait(1)
        late.set()
        transport.send(request_to(peer.address), PATIENCE, others)
        others.wait(2)
        assert len(peer.sessions) == 1
    assert kinds(impatient) == [RemotingTimeoutException]
    assert kinds(others) == [SendStatus.SEND_OK, SendStatus.SEND_OK]


def test_incomplete_frame_closes_the_connection_although_bytes_arrive(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo, outcomes: Any
) -> None:
    clock = ManualClock(100.0)
    transport = make_transport(clock=clock)

    def damaged(session: Session) -> None:
        first, _ = session.read(), session.read()
        # The damaged length of the second answer makes the client take all later answers for its parts.
        whole = session.encoded(first, ext_fields=stored_fields(first, 0))
        session.sock.sendall(whole + bytes([0, 0x80, 0, 100]))
        for _ in range(2):
            session.read()
            session.sock.sendall(bytes(100))
        session.wait_for_hangup()

    def arrivals() -> int:
        return sum(connection._arrivals for connection in transport.client.loop.by_address.values())

    with Peer(damaged, Session.serve) as peer:
        transport.send(request_to(peer.address), 3.0, outcomes)
        for seconds, ended in ((0.0, 1), (4.0, 2), (30.0, 4)):
            clock.advance(seconds)
            before = arrivals()

            def more_arrived(before: int = before) -> bool:
                return arrivals() > before

            transport.send(request_to(peer.address), 3.0, outcomes)
            outcomes.wait(ended)
            # Bytes after the clock's advance would come too late: the connection would count as silent.
            if ended < 4:
                wait_for(more_arrived)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(5)
        assert len(peer.sessions) == 2
    timeout, broken, stored = RemotingTimeoutException, RemotingSendRequestException, SendStatus.SEND_OK
    assert kinds(outcomes) == [stored, timeout, timeout, broken, stored]
    assert "the server has not completed a frame for 34 s" in str(outcomes[3].error)


def test_socket_that_accepts_no_bytes_fails_its_requests(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    over, started, queued = threading.Event(), collected(), collected()

    def deaf(_session: Session) -> None:
        over.wait(PATIENCE)

    with Peer(deaf) as peer:
        transport.send(request_to(peer.address, bytes(16_000_000)), SOON, started)
        transport.send(request_to(peer.address), PATIENCE, queued)
        started.wait(1)
        queued.wait(1)
        over.set()
    assert kinds(started) == [RemotingSendRequestException]
    assert "the server accepted no byte for" in str(started[0].error)
    assert started[0].latency_ms == 0.0
    assert kinds(queued) == [RemotingConnectException]
    assert "this request was not sent" in str(queued[0].error)
    assert queued[0].error.maybe_stored is False


def test_blocking_call_behind_a_stuck_request_reports_it_was_not_sent(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    over = threading.Event()

    def deaf(_session: Session) -> None:
        over.wait(PATIENCE)

    with Peer(deaf) as peer:
        transport.send(request_to(peer.address, bytes(16_000_000)), PATIENCE, outcomes)
        with pytest.raises(RemotingTooMuchRequestException, match="it was not sent"):
            transport.client.invoke(peer.address, RequestCode.HEART_BEAT, {}, b"", SOON)
        over.set()
        outcomes.wait(1)


def test_a_connection_that_is_being_written_does_not_starve_another(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    over, stuck, served = threading.Event(), collected(), collected()

    def deaf(session: Session) -> None:
        over.wait(PATIENCE)
        session.serve()

    with Peer(deaf) as slow, Peer(Session.serve) as quick:
        for _ in range(3):
            transport.send(request_to(slow.address, bytes(12_000_000)), PATIENCE, stuck)
        for count in range(1, 51):
            transport.send(request_to(quick.address), PATIENCE, served)
            served.wait(count)
        assert kinds(served) == [SendStatus.SEND_OK] * 50
        assert len(stuck) == 0
        over.set()
        assert kinds(stuck.wait(3)) == [SendStatus.SEND_OK] * 3


def test_request_is_resent_over_a_new_connection_after_go_away(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    served: list[RemotingCommand] = []
    sent_away, stays = collected(), collected()

    def leaving(session: Session) -> None:
        first, second = session.read(), session.read()
        session.answer(first, 1500, remark="please go away")
        sent_away.wait(1)
        # Earlier requests still get their answers over the old connection.
        session.answer_send(second)
        session.wait_for_hangup()

    def new(session: Session) -> None:
        served.append(session.read())
        session.answer_send(served[0], offset=3)
        session.wait_for_hangup()

    with Peer(leaving, new) as peer:
        transport.send(request_to(peer.address, b"again"), PATIENCE, sent_away)
        transport.send(request_to(peer.address, b"once"), PATIENCE, stays)
        assert kinds(sent_away.wait(1)) == [SendStatus.SEND_OK]
        assert kinds(stays.wait(1)) == [SendStatus.SEND_OK]
    assert sent_away[0].queue_offset == 3
    assert [bytes(command.body) for command in served] == [b"again"]


def test_second_go_away_is_the_final_answer(transport: RemotingTransport, request_to: RequestTo, outcomes: Any) -> None:
    # Java makes a RemotingSendRequestException of it, after which the rows may be stored. Here they certainly are not:
    # both servers have said so, and the answer's own error keeps that.
    def leaving(session: Session) -> None:
        session.answer(session.read(), 1500, remark="please go away")
        session.wait_for_hangup()

    with Peer(leaving) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        assert len(peer.sessions) == 2
    assert kinds(outcomes) == [BrokerUnavailableException]
    assert outcomes[0].error.response_code == 1500
    assert (outcomes[0].error.retriable, outcomes[0].error.maybe_stored) == (True, False)


def test_every_send_has_exactly_one_outcome_with_any_server_behaviour(
    transport: RemotingTransport, request_to: RequestTo, collected: Any
) -> None:
    dice = random.Random(3)

    def moody(session: Session) -> None:
        for _ in range(dice.randrange(1, 30)):
            request = session.read()
            if dice.random() < 0.8:
                session.answer_send(request)
        if dice.random() < 0.3:
            session.sock.sendall(dice.randbytes(20))
        elif dice.random() < 0.5:
            session.reset()

    bodies = (b"small", bytes(300_000))
    with Peer(moody) as peer:
        collectors = [[collected() for _ in range(150)] for _ in range(3)]

        def work(mine: list[Any]) -> None:
            for number, collector in enumerate(mine):
                transport.send(request_to(peer.address, bodies[number % 2]), SOON, collector)
                if number % 7 == 0:
                    collector.wait(1)

        threads = [threading.Thread(target=work, args=(mine,)) for mine in collectors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        for mine in collectors:
            for collector in mine:
                collector.wait(1)
        transport.close()
    assert {len(collector) for mine in collectors for collector in mine} == {1}
    assert {bool(one[0].status) for mine in collectors for one in mine} == {True, False}


def test_request_that_is_slowly_written_ends_within_a_limit(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    over = threading.Event()

    def slow_reader(session: Session) -> None:
        while not over.is_set() and session.sock.recv(1000):
            over.wait(0.01)

    with Peer(slow_reader) as peer:
        transport.send(request_to(peer.address, bytes(16_000_000)), PATIENCE, outcomes, within=3 * SOON)
        outcomes.wait(1)
        over.set()
    assert isinstance(outcomes[0].error, RemotingException)
    assert outcomes[0].error.retriable
