"""Client certificates, connections without verification, and sides that do not agree on TLS."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from rocketmq_spark.errors import (
    OptionError,
    RemotingCertificateException,
    RemotingException,
    RemotingTlsException,
)
from rocketmq_spark.model.message import SendRequest, SendStatus
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.transport.tls_probe import REMOTING_HELLO, disagreement
from tests.support.peer import Peer, Session, refused_address
from tests.support.processes import PATIENCE
from tests.support.transports import Authority

RequestTo = Callable[..., SendRequest]
MakeTransport = Callable[..., RemotingTransport]
Say = Callable[[TlsSettings | None, str], RemotingException]

BOTH_VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
LARGE = bytes(1 << 20)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that is not trusted."""
    return Authority(tmp_path_factory.mktemp("other"), "another authority")


@pytest.fixture(scope="module")
def identity(authority: Authority) -> tuple[Path, Path]:
    return authority.server("client", "DNS:spark-client")


@pytest.fixture
def demanding(authority: Authority) -> ssl.SSLContext:
    """A server that demands a certificate of the authority."""
    context = authority.context("server", "IP:127.0.0.1")
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture
def say(make_transport: MakeTransport, request_to: RequestTo, outcomes: Any) -> Say:
    """Send one message of 1 MiB, and return what its error is."""

    def send(settings: TlsSettings | None, address: str) -> RemotingException:
        make_transport(tls=settings).send(request_to(address, LARGE), PATIENCE, outcomes)
        error = outcomes.wait(1)[0].error
        assert isinstance(error, RemotingException)
        assert (error.retriable, error.maybe_stored) == (False, False)
        return error

    return send


@pytest.mark.parametrize("version", BOTH_VERSIONS, ids=lambda version: version.name)
def test_client_with_a_certificate_is_accepted(
    make_transport: MakeTransport,
    authority: Authority,
    identity: tuple[Path, Path],
    demanding: ssl.SSLContext,
    version: ssl.TLSVersion,
    request_to: RequestTo,
    outcomes: Any,
) -> None:
    demanding.minimum_version = demanding.maximum_version = version
    certificate, key = map(str, identity)
    transport = make_transport(tls=TlsSettings(str(authority.ca_file), cert_file=certificate, key_file=key))
    with Peer(Session.serve, tls=demanding) as peer:
        transport.send(request_to(peer.address, LARGE), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_alert_after_the_handshake_is_not_a_certificate_error(
    authority: Authority, identity: tuple[Path, Path]
) -> None:
    certificate, key = map(str, identity)
    settings = TlsSettings(str(authority.ca_file), cert_file=certificate, key_file=key)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = authority.context("server", "IP:127.0.0.1").wrap_bio(incoming, outgoing, server_side=True)
        stream = settings.secure()(ours, "127.0.0.1")
        view = memoryview(bytearray(1 << 20))
        shaken = 0
        while shaken < 2:
            shaken = 0
            for shake in (stream.handshake, server.do_handshake):
                with contextlib.suppress(ssl.SSLWantReadError):
                    shaken += shake() is not False
            with contextlib.suppress(BlockingIOError):
                incoming.write(theirs.recv(1 << 16, socket.MSG_DONTWAIT))
            theirs.sendall(outgoing.read())
        server.write(b"an answer")
        theirs.sendall(outgoing.read())
        assert stream.recv_into(view) == len(b"an answer")
        # An invalid record: each side answers the other's alert with an error.
        incoming.write(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ssl.SSLError):
            server.read(1)
        theirs.sendall(outgoing.read())
        with pytest.raises(ssl.SSLError) as raised:
            stream.recv_into(view)
    assert "ALERT" in (raised.value.reason or "")
    assert not isinstance(raised.value, ConnectionError)


def test_certificate_and_key_can_be_in_one_file(
    make_transport: MakeTransport,
    authority: Authority,
    identity: tuple[Path, Path],
    demanding: ssl.SSLContext,
    tmp_path: Path,
    request_to: RequestTo,
    outcomes: Any,
) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(b"".join(path.read_bytes() for path in identity))
    transport = make_transport(tls=TlsSettings(str(authority.ca_file), cert_file=str(both)))
    with Peer(Session.serve, tls=demanding) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


@pytest.mark.parametrize("version", BOTH_VERSIONS, ids=lambda version: version.name)
@pytest.mark.parametrize("stranger", [False, True], ids=["none", "of another authority"])
def test_client_without_a_valid_certificate_is_rejected_at_once(
    say: Say,
    authority: Authority,
    other: Authority,
    demanding: ssl.SSLContext,
    version: ssl.TLSVersion,
    stranger: bool,
) -> None:
    demanding.minimum_version = demanding.maximum_version = version
    settings = TlsSettings(str(authority.ca_file))
    if stranger:
        certificate, key = other.server("client", "DNS:spark-client")
        settings = TlsSettings(str(authority.ca_file), cert_file=str(certificate), key_file=str(key))
    with Peer(Session.serve, tls=demanding) as peer:
        error = say(settings, peer.address)
        assert len(peer.sessions) == 1
    assert type(error) is RemotingCertificateException
    assert "the server refuses this client's certificate, or demands one" in str(error)
    assert "set tlsCertFile and tlsKeyFile" in str(error)


def test_replaced_certificate_is_used_for_the_next_connection(
    make_transport: MakeTransport,
    authority: Authority,
    other: Authority,
    identity: tuple[Path, Path],
    demanding: ssl.SSLContext,
    tmp_path: Path,
    request_to: RequestTo,
    outcomes: Any,
) -> None:
    files = [tmp_path / "client.pem", tmp_path / "client.key"]
    settings = TlsSettings(str(authority.ca_file), cert_file=str(files[0]), key_file=str(files[1]))
    for old, file in zip(other.server("client", "DNS:spark-client"), files, strict=True):
        shutil.copy(old, file)
    transport = make_transport(tls=settings)
    for new, file in zip(identity, files, strict=True):
        shutil.copy(new, f"{file}.new")
        os.replace(f"{file}.new", file)
    with Peer(Session.serve, tls=demanding) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_a_file_that_is_no_certificate_or_no_key_is_an_error_of_its_option(
    authority: Authority, identity: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = map(str, identity)
    foreign = str(authority.server("someone", "DNS:someone")[1])
    empty, missing, encrypted = (str(tmp_path / name) for name in ("empty.pem", "missing.pem", "encrypted.key"))
    Path(empty).touch()
    secret = load_pem_private_key(Path(key).read_bytes(), None)
    Path(encrypted).write_bytes(
        secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush-hush"))
    )
    for cert_file, key_file, text in (
        (missing, key, f"option tlsCertFile: reading '{missing}' failed: No such file or directory"),
        (certificate, missing, f"option tlsKeyFile: reading '{missing}' failed: No such file or directory"),
        (empty, key, f"'{key}' does not fit '{empty}'"),
        (certificate, empty, f"'{empty}' does not fit '{certificate}'"),
        (certificate, None, f"'{certificate}' does not hold both a certificate and its private key"),
        (certificate, foreign, f"'{foreign}' is not the key of the certificate in '{certificate}'"),
        (certificate, encrypted, f"option tlsKeyFile: the key in '{encrypted}' is encrypted: remove its password"),
    ):
        with pytest.raises(OptionError) as raised:
            TlsSettings(str(authority.ca_file), cert_file=cert_file, key_file=key_file).context()
        assert text in str(raised.value)


def test_insecure_skip_verify_accepts_any_certificate(
    make_transport: MakeTransport, other: Authority, request_to: RequestTo, outcomes: Any
) -> None:
    transport = make_transport(tls=TlsSettings(insecure_skip_verify=True))
    with Peer(Session.serve, tls=other.context("server", "DNS:elsewhere.example")) as peer:
        transport.send(request_to(peer.address), PATIENCE, outcomes)
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_nothing_older_than_tls_1_2_is_spoken(say: Say, authority: Authority) -> None:
    with Peer(Session.serve, tls=authority.outdated("server", "IP:127.0.0.1")) as peer:
        error = say(TlsSettings(str(authority.ca_file)), peer.address)
    assert type(error) is RemotingTlsException
    assert "the server's TLS is older than 1.2" in str(error)


def test_server_without_tls_is_recognised(say: Say, authority: Authority) -> None:
    def plainly(session: Session) -> None:
        # As a server does with tls.server.mode=disabled: it hangs up on a TLS record, and answers a request.
        if session.sock.recv(1, socket.MSG_PEEK) != b"\x16":
            session.answer(session.read(), 3)

    with Peer(plainly, answers_greetings=True) as peer:
        error = say(TlsSettings(str(authority.ca_file)), peer.address)
    assert type(error) is RemotingTlsException
    assert "it speaks no TLS: set useTls=false" in str(error)
    assert "an attacker may be intercepting the connection" in str(error)


@pytest.mark.parametrize("over_tls", [False, True])
def test_tls_mode_mismatch_is_reported_only_if_just_one_mode_works(authority: Authority, over_tls: bool) -> None:
    context = authority.context("server", "IP:127.0.0.1")

    def both(session: Session) -> None:
        if session.sock.recv(1, socket.MSG_PEEK) == b"\x16":
            with context.wrap_socket(session.sock, server_side=True):
                pass
        else:
            session.answer(session.read(), 3)

    assert disagreement(refused_address(), REMOTING_HELLO, over_tls=over_tls) is None
    for script in (both, lambda session: session.sock.recv(1)):
        with Peer(script, answers_greetings=True) as peer:
            assert disagreement(peer.address, REMOTING_HELLO, over_tls=over_tls) is None
