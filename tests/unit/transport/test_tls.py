"""TLS: trusted certificates, errors of failed handshakes, and unchanged bytes."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import (
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTlsException,
)
from rocketmq_spark.model.message import SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.transport.remoting.requests import Request
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings, TlsStream
from tests.support.peer import Peer, Session, full_listener
from tests.support.processes import PATIENCE
from tests.support.transports import Authority

RequestTo = Callable[..., SendRequest]
MakeTransport = Callable[..., RemotingTransport]

SOON = 0.3
HELPING = 64 * 1024


@pytest.fixture(scope="module")
def server(authority: Authority) -> ssl.SSLContext:
    """A server for 127.0.0.1 and localhost."""
    return authority.context("server", "IP:127.0.0.1,DNS:localhost")


@pytest.fixture
def trusting(authority: Authority, make_transport: MakeTransport) -> RemotingTransport:
    """A transport that trusts the authority."""
    return make_transport(tls=TlsSettings(str(authority.ca_file)))


def refusal(transport: RemotingTransport, request: SendRequest, outcomes: Any) -> RemotingException:
    transport.send(request, PATIENCE, outcomes)
    [outcome] = outcomes.wait(1)
    assert isinstance(outcome.error, RemotingException)
    return outcome.error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_whose_certificate_names_the_host_is_trusted(
    trusting: RemotingTransport, server: ssl.SSLContext, request_to: RequestTo, outcomes: Any, host: str
) -> None:
    with Peer(Session.serve, tls=server) as peer:
        trusting.send(request_to(f"{host}:{peer.port}"), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_large_bodies_are_transferred_completely(
    trusting: RemotingTransport, server: ssl.SSLContext, outcomes: Any
) -> None:
    def echo(session: Session) -> None:
        while True:
            request = session.read()
            session.answer(request, body=bytes(request.body))

    body = bytes(range(256)) * 8192 + b"end"
    pieces = (body[:1], body[1:70_000], memoryview(body)[70_000:])
    with Peer(echo, tls=server) as peer:
        for _ in range(6):
            trusting.client.start(peer.address, Request(9999, {}, pieces, PATIENCE, outcomes))
        assert all(answer.command.body == body for answer in outcomes.wait(6))


def test_many_threads_share_one_encrypted_connection(trusting: RemotingTransport, server: ssl.SSLContext) -> None:
    def echo(session: Session) -> None:
        while True:
            request = session.read()
            session.answer(request, body=bytes(request.body))

    wrong: list[bytes] = []

    def ask(number: int) -> None:
        for turn in range(30):
            body = f"{number}-{turn}-".encode() * 700
            if trusting.client.invoke(peer.address, 9999, {}, body, PATIENCE).body != body:
                wrong.append(body)

    with Peer(echo, tls=server) as peer:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert wrong == []
        assert len(peer.sessions) == 1


def test_server_of_an_unknown_authority_is_rejected_permanently(
    make_transport: MakeTransport, server: ssl.SSLContext, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.serve, tls=server) as peer:
        error = refusal(make_transport(tls=TlsSettings()), request_to(peer.address), outcomes)
    assert type(error) is RemotingCertificateException
    assert (error.retriable, error.maybe_stored) == (False, False)
    assert "is not trusted; set tlsCaFile" in str(error)
    assert isinstance(error.__cause__, ConnectionError)


def test_certificate_for_another_host_is_rejected_naming_the_host(
    trusting: RemotingTransport, authority: Authority, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.serve, tls=authority.context("elsewhere", "DNS:elsewhere.example")) as peer:
        error = refusal(trusting, request_to(peer.address), outcomes)
        other = refusal(trusting, request_to(f"localhost:{peer.port}"), type(outcomes)())
    assert type(error) is type(other) is RemotingCertificateException
    assert "must name 127.0.0.1 (subjectAltName)" in str(error)
    assert "must name localhost (subjectAltName)" in str(other)


def test_tls_server_name_replaces_the_host_name(
    authority: Authority, make_transport: MakeTransport, request_to: RequestTo, outcomes: Any
) -> None:
    tls = TlsSettings(str(authority.ca_file), server_name="inside.example")
    with Peer(Session.serve, tls=authority.context("inside", "DNS:inside.example")) as peer:
        make_transport(tls=tls).send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_certificate_with_host_but_without_tls_server_name_is_rejected(
    authority: Authority, server: ssl.SSLContext, make_transport: MakeTransport, request_to: RequestTo, outcomes: Any
) -> None:
    tls = TlsSettings(str(authority.ca_file), server_name="inside.example")
    with Peer(Session.serve, tls=server) as peer:
        error = refusal(make_transport(tls=tls), request_to(peer.address), outcomes)
    assert type(error) is RemotingCertificateException
    assert "must name inside.example (subjectAltName), which is the option tlsServerName" in str(error)
    assert "dialled by 127.0.0.1" in str(error)


def test_route_of_an_untrusted_name_server_is_rejected_permanently(
    make_transport: MakeTransport, server: ssl.SSLContext
) -> None:
    with Peer(Session.serve, tls=server) as peer:
        transport = make_transport(peer.address, tls=TlsSettings())
        with pytest.raises(RemotingCertificateException, match="tlsCaFile"):
            transport.query_route("orders", PATIENCE)


def test_plain_server_that_closes_the_connection_is_recognised(
    trusting: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(lambda session: session.read_bytes(1)) as peer:
        error = refusal(trusting, request_to(peer.address), outcomes)
    assert type(error) is RemotingConnectException
    assert "does the server speak TLS? If it is meant to have none, set useTls=false" in str(error)
    assert "an attacker may be intercepting the connection" in str(error)


def answer_plainly(session: Session) -> None:
    session.sock.recv(65536)
    session.sock.sendall(b"\0\0\0\x10 this is no TLS record")
    session.wait_for_hangup()


def test_plain_server_that_answers_without_tls_is_recognised(
    trusting: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(answer_plainly, answers_greetings=True) as peer:
        error = refusal(trusting, request_to(peer.address), outcomes)
    assert type(error) is RemotingTlsException
    assert "what the server sent is not TLS" in str(error)
    assert "set useTls=false" in str(error)
    assert "an attacker may be intercepting the connection" in str(error)


def test_damaged_handshake_is_a_retriable_error(
    trusting: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(answer_plainly, lambda _: None, answers_greetings=True) as peer:
        error = refusal(trusting, request_to(peer.address), outcomes)
    assert type(error) is RemotingConnectException
    assert error.retriable


def test_handshake_without_an_answer_ends_at_the_connect_timeout(
    authority: Authority, make_transport: MakeTransport, request_to: RequestTo, outcomes: Any
) -> None:
    transport = make_transport(connect_timeout=SOON, tls=TlsSettings(str(authority.ca_file)))
    with Peer(Session.wait_for_hangup) as peer:
        error = refusal(transport, request_to(peer.address), outcomes)
    assert type(error) is RemotingConnectException
    assert "the TLS handshake did not end in time; does the server speak TLS?" in str(error)


def test_connect_timeout_error_does_not_mention_tls(
    authority: Authority, make_transport: MakeTransport, request_to: RequestTo, outcomes: Any
) -> None:
    transport = make_transport(connect_timeout=SOON, tls=TlsSettings(str(authority.ca_file)))
    with full_listener() as listener:
        error = refusal(transport, request_to(f"127.0.0.1:{listener.getsockname()[1]}"), outcomes)
    assert "timed out" in str(error)
    assert "handshake" not in str(error)


def test_server_that_requires_tls_is_recognised(
    make_transport: MakeTransport, server: ssl.SSLContext, request_to: RequestTo, outcomes: Any
) -> None:
    with Peer(Session.serve, tls=server) as peer:
        error = refusal(make_transport(), request_to(peer.address), outcomes)
    assert type(error) is RemotingTlsException
    assert "it demands TLS: set useTls=true" in str(error)
    assert "nothing was executed" in str(error)


def test_lost_connection_after_an_answer_does_not_mention_tls(
    transport: RemotingTransport, request_to: RequestTo, outcomes: Any
) -> None:
    def once(session: Session) -> None:
        session.answer_send(session.read())
        session.read()

    with Peer(once) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert "TLS" not in str(outcomes.wait(2)[1].error)


def test_server_that_stops_reading_fails_its_requests(
    trusting: RemotingTransport, server: ssl.SSLContext, request_to: RequestTo, outcomes: Any
) -> None:
    over = threading.Event()
    with Peer(lambda _: over.wait(PATIENCE), tls=server) as peer:
        # More than the kernel's buffers hold: the first requests are written, one in part, and the rest waits.
        for _ in range(3):
            trusting.send(request_to(peer.address, bytes(8 << 20)), SOON, outcomes)
        outcomes.wait(3)
        over.set()
    assert {type(outcome.error) for outcome in outcomes} <= {
        RemotingSendRequestException,
        RemotingTimeoutException,
        RemotingConnectException,
    }
    assert any("the server accepted no byte for" in str(outcome.error) for outcome in outcomes)


def test_tls_close_by_the_server_fails_pending_requests(
    trusting: RemotingTransport, server: ssl.SSLContext, request_to: RequestTo, outcomes: Any
) -> None:
    def goodbye(session: Session) -> None:
        session.answer_send(session.read())
        session.read()
        assert isinstance(session.sock, ssl.SSLSocket)
        session.sock.unwrap()

    with Peer(goodbye, tls=server) as peer:
        trusting.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(1)
        trusting.send(request_to(peer.address), PATIENCE, outcomes)
        outcomes.wait(2)
    assert outcomes[0].status is SendStatus.SEND_OK
    assert "the server closed the connection" in str(outcomes[1].error)


def test_lone_oneway_request_is_flushed(trusting: RemotingTransport, server: ssl.SSLContext, outcomes: Any) -> None:
    body = bytes(4 << 20)
    with Peer(lambda session: outcomes(session.read()), tls=server) as peer:
        trusting.client.invoke_oneway(peer.address, RequestCode.SEND_MESSAGE_V2, {}, body, PATIENCE)
        [request] = outcomes.wait(1)
    assert len(request.body) == len(body)


def test_by_default_the_systems_authorities_are_trusted_and_hosts_checked() -> None:
    context = TlsSettings().context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname is True
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_file_without_authorities_is_an_error_that_names_option_and_file(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(OptionError, match=rf"tlsCaFile.*{file}.*PEM"):
        RemotingTransport(["127.0.0.1:9876"], tls=TlsSettings(str(file)))


class Wire:
    """A socket to a TLS server. The test sets the number of bytes that it accepts and returns at once."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.takes = self.gives = 1 << 30
        self.taken = 0
        self.breaks = False

    def send(self, data: memoryview) -> int:
        count = min(self.takes, len(data))
        if not count:
            raise ConnectionResetError if self.breaks else BlockingIOError
        self.takes -= count
        self.taken += count
        return self.incoming.write(data[:count])

    def recv(self, most: int) -> bytes:
        data = self.outgoing.read(min(most, self.gives))
        if not data:
            raise BlockingIOError
        return data

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def heard(self) -> bytes:
        """Return what the server can decrypt now."""
        data = bytearray()
        try:
            while piece := self.server.read(1 << 20):
                data += piece
        except ssl.SSLWantReadError:
            pass
        return bytes(data)


@pytest.fixture(scope="module")
def connect(authority: Authority, server: ssl.SSLContext) -> Callable[[], tuple[TlsStream, Wire]]:
    context = TlsSettings(str(authority.ca_file)).context()

    def shake_hands() -> tuple[TlsStream, Wire]:
        wire = Wire(server)
        stream = TlsStream(wire, context, "localhost")  # type: ignore[arg-type]
        done = False
        while not done:
            done = stream.handshake()
            try:
                wire.server.do_handshake()
            except ssl.SSLWantReadError:
                continue
        return stream, wire

    return shake_hands


pieces = st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 200_000).map(bytes)), max_size=5)


@settings(max_examples=30)
@given(pieces, st.lists(st.integers(0, 100_000), min_size=1, max_size=8).filter(any))
def test_server_receives_the_same_bytes_with_any_partial_writes(
    connect: Callable[[], tuple[TlsStream, Wire]], all_pieces: list[bytes], helpings: list[int]
) -> None:
    stream, wire = connect()
    rest, heard, turn = memoryview(b"".join(all_pieces)), b"", 0
    expected = bytes(rest)
    while rest or stream.unsent:
        wire.takes = helpings[turn % len(helpings)]
        turn += 1
        with contextlib.suppress(BlockingIOError):
            rest = rest[stream.sendmsg([rest[:7], rest[7:]]) :]
        heard += wire.heard()
    assert heard == expected


def test_bytes_accepted_beyond_the_socket_are_limited(
    connect: Callable[[], tuple[TlsStream, Wire]],
) -> None:
    stream, wire = connect()
    body = bytes(1 << 20)
    for takes in (0, 1, 5_000, 300_000):
        before, wire.takes = wire.taken, takes
        try:
            taken = stream.sendmsg([body])
        except BlockingIOError:
            taken = 0
        assert taken <= wire.taken - before + HELPING
    assert stream.unsent


def test_full_socket_blocks_until_pending_bytes_are_sent(connect: Callable[[], tuple[TlsStream, Wire]]) -> None:
    stream, wire = connect()
    wire.takes = 10
    assert stream.sendmsg([b"hello"]) == 5
    with pytest.raises(BlockingIOError):
        stream.sendmsg([b"more"])
    wire.takes = 10
    assert stream.sendmsg([b"more"]) == 0
    wire.takes = 1000
    assert stream.sendmsg([]) == 0
    assert not stream.unsent
    assert wire.heard() == b"hello"


def test_answers_before_a_damaged_record_still_count(connect: Callable[[], tuple[TlsStream, Wire]]) -> None:
    stream, wire = connect()
    scratch = memoryview(bytearray(1 << 16))
    wire.server.write(b"the answer")
    wire.outgoing.write(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert bytes(scratch[: stream.recv_into(scratch)]) == b"the answer"
    wire.outgoing.write(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError):
        stream.recv_into(scratch)


@pytest.mark.parametrize("takes", [0, 1, 100_000])
def test_bytes_written_before_a_socket_error_are_still_reported(
    connect: Callable[[], tuple[TlsStream, Wire]], takes: int
) -> None:
    stream, wire = connect()
    wire.takes, wire.breaks = takes, True
    assert stream.sendmsg([bytes(1 << 20)]) >= takes
    with pytest.raises(ConnectionResetError):
        stream.sendmsg([b"more"])


@settings(max_examples=30)
@given(pieces, st.integers(1, 300_000))
def test_all_received_bytes_are_decrypted(
    connect: Callable[[], tuple[TlsStream, Wire]], all_pieces: list[bytes], gives: int
) -> None:
    stream, wire = connect()
    for piece in all_pieces:
        wire.server.write(piece)
    wire.gives = max(gives, 100)
    scratch, received = memoryview(bytearray(1 << 16)), b""
    while wire.outgoing.pending:
        try:
            count = stream.recv_into(scratch)
        except BlockingIOError:
            continue
        assert 0 < count < len(scratch)
        received += scratch[:count]
    assert received == b"".join(all_pieces)
