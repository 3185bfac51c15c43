"""Servers that send damaged bytes over real connections: each request ends once, and the next one succeeds."""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from rocketmq_spark.errors import (
    RemotingCommandException,
    RemotingConnectException,
    RocketMQError,
    TooLongFrameException,
)
from rocketmq_spark.model.message import SendRequest, SendStatus
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.testing.fake_proxy_messages import status
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings, TlsStream
from tests.support.contract import Outcomes, single
from tests.support.frames import SerializeType, encode_command
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy
from tests.support.strategies import HALF, damaged, encode_stored_record
from tests.support.transports import Grpc

RequestTo = Callable[..., SendRequest]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No log record reports an internal error."""
    with caplog.at_level(logging.WARNING, "rocketmq_spark.transport"):
        yield
    assert [record.getMessage() for record in caplog.records] == []


def answers(opaque: int) -> list[bytes]:
    """Return frames that a correct server may send to a client that waits for `opaque`."""
    fields = {"msgId": "7F00000100002A9F000000018A98AEF8", "queueId": "0", "queueOffset": "42"}
    commands = [
        RemotingCommand(0, opaque, fields, flag=1),
        RemotingCommand(2, opaque, remark="[REJECTREQUEST]system busy", flag=1),
        RemotingCommand(1500, opaque, remark="go away", flag=1),
        RemotingCommand(0, opaque + 1, fields, b"of another request", flag=1),
        RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, opaque, fields),
    ]
    return [encode_command(command, kind) for command in commands for kind in SerializeType]


@pytest.mark.usefixtures("quiet")
def test_damaged_frames_on_600_connections_end_each_request_once(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo
) -> None:
    numbers = itertools.count()

    def damage(session: Session) -> None:
        request = session.read()
        for data in damaged(answers(request.opaque), 4, next(numbers)):
            session.sock.sendall(data)

    with Peer(damage) as peer, Peer(Session.serve) as honest:
        transport = make_transport()
        outcomes = Outcomes()
        transport.send(request_to(honest.address), PATIENCE, outcomes)
        before = len(os.listdir("/dev/fd"))
        for turn in range(1, 601):
            transport.send(request_to(peer.address), PATIENCE, outcomes)
            outcomes.wait(turn + 1)
        # Over the original connection, and by the same thread.
        transport.send(request_to(honest.address), PATIENCE, outcomes)
        assert outcomes.wait(602)[-1].status is SendStatus.SEND_OK
        assert len(honest.sessions) == 1
        assert len({thread.ident for thread in outcomes.threads}) == 1
        # The sockets of the peer close a moment later.
        assert len(os.listdir("/dev/fd")) - before < 50
    assert len(outcomes) == 602
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert all(isinstance(error, RocketMQError) for error in failed)
    assert 100 < len(failed) < 600


@pytest.mark.parametrize("length", [2**31 - 1, 16_777_213, 0xFFFFFFFF])
def test_a_frame_of_2_gib_is_refused_as_soon_as_it_is_announced(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, length: int
) -> None:
    def announce(session: Session) -> None:
        session.read()
        session.sock.sendall(length.to_bytes(4, "big"))
        session.wait_for_hangup()

    with Peer(announce) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        [outcome] = outcomes.wait(1)
    assert type(outcome.error) is (RemotingCommandException if length > 2**31 - 1 else TooLongFrameException)
    assert "allowed are 4 to 16777212" in str(outcome.error)
    assert outcome.error.maybe_stored is True


@pytest.mark.parametrize("code", [ResponseCode.SUCCESS, ResponseCode.GO_AWAY])
def test_answer_to_a_request_before_it_was_sent_acknowledges_nothing(
    transport: RemotingTransport, request_to: RequestTo, collected: Any, code: int
) -> None:
    first, second, queued = collected(), collected(), threading.Event()

    def early(session: Session) -> None:
        # The rest of the first request fills the socket, so that no byte of the second one can follow.
        session.read_bytes(100)
        queued.wait(PATIENCE)
        begun = RemotingCommand(RequestCode.SEND_MESSAGE_V2, opaque=1)
        session.answer_send(begun, code)
        session.wait_for_hangup()

    with Peer(early) as peer:
        transport.send(request_to(peer.address, bytes(14_000_000)), PATIENCE, first)
        transport.send(request_to(peer.address), PATIENCE, second)
        queued.set()
        [broken], [unsent] = first.wait(1), second.wait(1)
        assert len(peer.sessions) == 1
    assert type(broken.error) is RemotingCommandException
    assert "opaque 1 is of a request that was not sent whole" in str(broken.error)
    assert broken.error.maybe_stored is True
    assert type(unsent.error) is RemotingConnectException
    assert unsent.error.maybe_stored is False


def test_flood_of_server_requests_fills_no_memory(
    make_transport: Callable[..., RemotingTransport], request_to: RequestTo
) -> None:
    asking = encode_command(RemotingCommand(RequestCode.GET_CONSUMER_RUNNING_INFO, 7), SerializeType.ROCKETMQ)
    done = threading.Event()

    def flood(session: Session) -> None:
        request = session.read()
        for _ in range(30):
            session.sock.sendall(asking * 1000)
        session.answer_send(request)
        done.wait(PATIENCE)

    with Peer(flood) as peer:
        transport = make_transport()
        outcomes = Outcomes()
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        # A slow client may have closed the connection by now, because the peer reads nothing.
        assert all(int(unsent) <= 1000 for unsent in re.findall(r"([0-9]+) unsent", repr(transport)))
        done.set()


def test_unreadable_checks_are_logged_once_until_a_readable_one_arrives(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[TransactionCheck] = []
    transport.on_check_transaction = taken.append
    fields = {"tranStateTableOffset": "1", "commitLogOffset": "2"}

    def check(body: bytes) -> bytes:
        return encode_command(RemotingCommand(RequestCode.CHECK_TRANSACTION_STATE, 1, fields, body, FLAG_ONEWAY))

    good = check(encode_stored_record(HALF))

    def ask(session: Session) -> None:
        request = session.read()
        session.sock.sendall(check(b"bad") * 50 + good + check(b"bad") * 50)
        session.answer_send(request)
        session.wait_for_hangup()

    with Peer(ask) as peer, caplog.at_level(logging.WARNING, "rocketmq_spark.transport"):
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        transport.close()
    assert len(taken) == 1
    assert (
        len([record for record in caplog.records if "handling a transaction check failed" in record.getMessage()]) == 2
    )


def test_connections_beyond_2000_are_rejected(request_to: RequestTo, outcomes: Any) -> None:
    # No connection is opened before the first poll.
    with RemotingTransport([], polled=True) as transport:
        for port in range(1, 2001):
            transport.send(request_to(f"127.0.0.1:{port}"), PATIENCE, Outcomes())
        transport.send(request_to("127.0.0.1:3000"), PATIENCE, outcomes)
        transport.poll(0.0)
        [outcome] = outcomes.wait(1)
    assert type(outcome.error) is RemotingConnectException
    assert "2000 connections are open already" in str(outcome.error)


class Endless:
    """A socket on which a server sends handshake messages without end, as OpenSSL allows."""

    def __init__(self) -> None:
        self.reads = 0

    def recv(self, _: int) -> bytes:
        self.reads += 1
        return b"\x16\x03\x03\x40\x00" + bytes(0x4000)

    def send(self, data: bytes) -> int:
        return len(data)


def test_endless_handshake_does_not_block_other_connections() -> None:
    sock = Endless()
    stream = TlsStream(sock, TlsSettings().context(), "127.0.0.1")  # type: ignore[arg-type]
    assert stream.handshake() is False
    assert sock.reads < 100


class Raw(bytes):
    """Bytes instead of a message."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        return bytes(self)


@pytest.fixture
def seam() -> Iterator[Grpc]:
    with running_proxy({"orders": "MIXED"}) as proxy, GrpcTransport([proxy.address], client_id="test") as transport:
        yield Grpc(transport, proxy, None)


@pytest.mark.usefixtures("quiet")
def test_every_send_has_one_outcome_with_any_proxy_reply(seam: Grpc) -> None:
    entry = service.SendResultEntry(status=status(), message_id="M1", transaction_id="T1", offset=4)
    good = service.SendMessageResponse(status=status(), entries=[entry]).SerializeToString()
    replies, answer = damaged([good], 300, 7), seam.proxy.handlers["SendMessage"]
    seam.proxy.handlers["SendMessage"] = lambda *_: next(replies)
    outcomes = seam.send(*(single("orders", b"one") for _ in range(300)))
    assert len(outcomes) == 300
    failed = [outcome.error for outcome in outcomes if outcome.status is None]
    assert all(isinstance(error, RocketMQError) for error in failed)
    assert 0 < len(failed) < 300
    seam.proxy.handlers["SendMessage"] = answer
    [outcome] = seam.send(single("orders", b"two"))
    assert outcome.status is SendStatus.SEND_OK


def too_long(_: bytes, context: Any) -> bytes:
    return bytes(17 * 1024 * 1024)


def bomb(_: bytes, context: Any) -> bytes:
    context.set_compression(grpc.Compression.Gzip)
    return bytes(17 * 1024 * 1024)


def much_metadata(_: bytes, context: Any) -> bytes:
    context.set_trailing_metadata([(f"name-{number}", "text" * 250) for number in range(100)])
    return b""


@pytest.mark.parametrize("reply", [too_long, bomb, much_metadata])
def test_oversized_reply_is_rejected_and_its_rows_may_be_stored(seam: Grpc, reply: Callable[..., bytes]) -> None:
    seam.proxy.handlers["SendMessage"] = reply
    [outcome] = seam.send(single("orders", b"one"))
    assert type(outcome.error) is RemotingCommandException
    assert outcome.error.maybe_stored
    assert not outcome.error.split


def test_stream_continues_after_damaged_commands(seam: Grpc) -> None:
    last = threading.Event()
    seam.transport.on_check_transaction = lambda check: last.set() if check.transaction_id == "the last" else None
    [half] = seam.send(single("orders", b"half", TRAN_MSG="true", PGROUP="pg"))
    wait_for(lambda: bool(seam.proxy.client_settings))
    command = service.RecoverOrphanedTransactionCommand(message=seam.proxy.transactions[half.transaction_id].message)
    good = service.TelemetryCommand(recover_orphaned_transaction_command=command).SerializeToString()
    for data in damaged([good], 200, 8):
        seam.proxy.command(Raw(data))  # type: ignore[arg-type]
    command.transaction_id = "the last"
    seam.proxy.command(service.TelemetryCommand(recover_orphaned_transaction_command=command))
    assert last.wait(PATIENCE)
