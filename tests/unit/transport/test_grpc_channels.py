"""Targets of gRPC channels, the certificates they trust, and the errors of wrong targets."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import (
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RemotingTlsException,
)
from rocketmq_spark.transport.grpc.channels import root_certificates, target_of
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.contract import SOON, Outcomes, single
from tests.support.peer import Peer, Session, refused_address
from tests.support.processes import PATIENCE
from tests.support.proxies import running_proxy, stored
from tests.support.transports import Authority, Grpc


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("10.0.0.1:8081", "ipv4:10.0.0.1:8081"),
        ("[::1]:8081", "ipv6:[::1]:8081"),
        ("proxy.example:8081", "dns:proxy.example:8081"),
        ("localhost:1", "dns:localhost:1"),
    ],
)
def test_grpc_target_depends_on_the_kind_of_host(endpoint: str, target: str) -> None:
    assert target_of(endpoint) == target


@pytest.mark.parametrize("endpoint", ["proxy", "proxy:", ":8081", "proxy:0", "proxy:http", ""])
def test_malformed_endpoint_is_rejected_by_the_constructor(endpoint: str) -> None:
    with pytest.raises(OptionError, match=r"option endpoints: .*host:port"):
        GrpcTransport([endpoint], client_id="test")


def test_an_ipv6_endpoint_is_reached() -> None:
    with contextlib.ExitStack() as stack:
        try:
            proxy = stack.enter_context(running_proxy(address="[::1]:0"))
        except RuntimeError:
            pytest.skip("this machine has no IPv6")
        transport = stack.enter_context(GrpcTransport([proxy.address], client_id="test"))
        assert transport.query_route("orders", PATIENCE).broker_datas[0].master == proxy.address


def test_one_channel_serves_all_calls_to_an_endpoint() -> None:
    peers: set[str] = set()

    def noted(request: Any, context: Any) -> Any:
        peers.add(context.peer())
        return answer(request, context)

    with running_proxy() as proxy, GrpcTransport([proxy.address], client_id="test") as transport:
        answer = proxy.handlers["QueryRoute"]
        proxy.handlers["QueryRoute"] = noted
        for _ in range(5):
            transport.query_route("orders", PATIENCE)
    assert len(peers) == 1


def test_http_proxy_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://{refused_address()}")
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with running_proxy() as proxy, GrpcTransport([proxy.address], client_id="test") as transport:
        assert transport.query_route("orders", PATIENCE).message_types == {"NORMAL"}


def demanding(authority: Authority) -> dict[str, Any]:
    """Return the settings of a proxy that demands certificates of its clients."""
    return {"certificate": authority.server("server", "IP:127.0.0.1"), "client_authority": authority.ca_file}


def failures(endpoint: str, tls: TlsSettings | None = None, timeout: float = PATIENCE) -> Iterator[RemotingException]:
    """Return the errors of a route query, a send and a probe."""
    with running_proxy() as proxy, GrpcTransport([endpoint], client_id="test", tls=tls) as transport:
        seam = Grpc(transport, proxy, tls)
        outcomes = Outcomes()
        queue, address = seam.elsewhere(endpoint)
        transport.send(seam.request(single("orders", b"one"), (queue, address)), timeout, outcomes)
        yield outcomes.wait(1)[0].error
        with pytest.raises(RemotingException) as raised:
            transport.query_route("orders", timeout)
        yield raised.value
        with pytest.raises(RemotingException) as raised:
            transport.probe(queue, address, timeout)
        yield raised.value


def say(endpoint: str, kind: type[RemotingException], *words: str, tls: TlsSettings | None = None) -> None:
    for error in failures(endpoint, tls):
        assert type(error) is kind
        assert error.maybe_stored is False
        assert [word for word in (endpoint, *words) if word not in str(error)] == []


def test_closed_port_error_has_advice() -> None:
    say(refused_address(), RemotingConnectException, "Connection refused", "gRPC ports of proxies")


def test_unknown_host_error_has_advice() -> None:
    say("no-such-host.invalid:8081", RemotingConnectException, "check the host names in endpoints")


def speak_remoting(session: Session) -> None:
    """Close the connection, as a name server does for bytes that are not a frame."""
    session.sock.recv(1 << 16)


def speak_http_1(session: Session) -> None:
    session.sock.recv(1 << 16)
    session.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("script", [speak_remoting, speak_http_1])
def test_error_of_a_port_with_another_protocol_has_advice(script: Callable[[Session], None]) -> None:
    with Peer(script) as peer:
        say(peer.address, RemotingConnectException, "not of name servers or brokers", "useTls")


def test_error_of_tls_to_a_plain_port_has_advice(authority: Authority) -> None:
    with running_proxy() as proxy:
        tls = TlsSettings(str(authority.ca_file))
        say(proxy.address, RemotingTlsException, "it speaks no TLS: set useTls=false", tls=tls)
        say(proxy.address, RemotingTlsException, "an attacker may be intercepting the connection", tls=tls)


def test_error_of_a_port_that_requires_tls_has_advice(authority: Authority) -> None:
    with running_proxy(certificate=authority.server("server", "IP:127.0.0.1")) as proxy:
        say(proxy.address, RemotingTlsException, "it demands TLS: set useTls=true")


def test_error_of_an_unknown_certificate_authority_has_advice(authority: Authority, tmp_path: Path) -> None:
    other = TlsSettings(str(Authority(tmp_path, "another").ca_file))
    with running_proxy(certificate=authority.server("server", "IP:127.0.0.1")) as proxy:
        say(proxy.address, RemotingCertificateException, "is not trusted; set tlsCaFile", tls=other)


def test_error_of_a_certificate_for_another_name_has_advice(authority: Authority) -> None:
    tls = TlsSettings(str(authority.ca_file))
    with running_proxy(certificate=authority.server("elsewhere", "DNS:elsewhere.example")) as proxy:
        must_name = "the server's certificate must name 127.0.0.1 (subjectAltName), by which the server was dialled"
        say(proxy.address, RemotingCertificateException, must_name, "tlsServerName", tls=tls)
        wrong = TlsSettings(str(authority.ca_file), "inside.example")
        say(proxy.address, RemotingCertificateException, "must name inside.example (subjectAltName)", tls=wrong)


def test_error_of_a_proxy_with_tls_1_1_only_names_the_version(authority: Authority) -> None:
    with Peer(Session.serve, tls=authority.outdated("server", "IP:127.0.0.1")) as peer:
        tls = TlsSettings(str(authority.ca_file))
        say(peer.address, RemotingTlsException, "the server's TLS is older than 1.2", tls=tls)


def test_silent_port_times_out_at_the_deadline() -> None:
    with Peer(Session.wait_for_hangup) as peer:
        for error in failures(peer.address, timeout=SOON):
            assert isinstance(error, RemotingTimeoutException)
            assert peer.address in str(error)


def test_tls_server_name_replaces_the_host_name(authority: Authority) -> None:
    tls = TlsSettings(str(authority.ca_file), "elsewhere.example")
    with (
        running_proxy(certificate=authority.server("elsewhere", "DNS:elsewhere.example")) as proxy,
        GrpcTransport([proxy.address], client_id="test", tls=tls) as transport,
    ):
        assert transport.query_route("orders", PATIENCE).message_types == {"NORMAL"}


def test_client_with_a_certificate_is_accepted(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.server("client", "DNS:spark-client")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    with running_proxy(**demanding(authority)) as proxy:
        for files in ((str(certificate), str(key)), (str(both), None)):
            tls = TlsSettings(str(authority.ca_file), None, *files)
            with GrpcTransport([proxy.address], client_id="test", tls=tls) as transport:
                assert transport.query_route("orders", PATIENCE).message_types == {"NORMAL"}


@pytest.mark.parametrize("stranger", [False, True], ids=["none", "of another authority"])
def test_error_of_a_rejected_client_certificate_has_advice(
    authority: Authority, tmp_path: Path, stranger: bool
) -> None:
    certificate_and_key = (
        map(str, Authority(tmp_path, "another").server("client", "DNS:spark-client")) if stranger else ()
    )
    tls = TlsSettings(str(authority.ca_file), None, *certificate_and_key)
    context = authority.context("server", "IP:127.0.0.1")
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(authority.ca_file)
    context.verify_mode = ssl.CERT_REQUIRED
    # Java's servers send an alert. Python gRPC servers only close the connection.
    with Peer(Session.wait_for_hangup, tls=context) as peer:
        say(peer.address, RemotingCertificateException, "set tlsCertFile and tlsKeyFile", tls=tls)
    with running_proxy(**demanding(authority)) as proxy:
        say(proxy.address, RemotingConnectException, "tlsCertFile", tls=tls)


@pytest.mark.parametrize("name", ["DNS:elsewhere.example", "DNS:*.cluster.example", "IP:10.0.0.1"])
def test_insecure_skip_verify_accepts_any_certificate(authority: Authority, name: str) -> None:
    tls = TlsSettings(insecure_skip_verify=True)
    with (
        running_proxy(certificate=authority.server("elsewhere", name)) as proxy,
        GrpcTransport([proxy.address], client_id="test", tls=tls) as transport,
    ):
        assert transport.query_route("orders", PATIENCE).message_types == {"NORMAL"}


def test_proxy_that_starts_later_is_reached_with_insecure_skip_verify(authority: Authority) -> None:
    address = refused_address()
    outcomes = Outcomes()
    with (
        running_proxy() as other,
        GrpcTransport([address], client_id="test", tls=TlsSettings(insecure_skip_verify=True)) as transport,
    ):
        seam = Grpc(transport, other, None)
        queue, at = seam.elsewhere(address)
        transport.send(seam.request(single("orders", b"one"), (queue, at)), PATIENCE, outcomes)
        error = outcomes.wait(1)[0].error
        assert type(error) is RemotingConnectException
        assert error.retriable
        with running_proxy(
            certificate=authority.server("elsewhere", "DNS:elsewhere.example"), address=address
        ) as proxy:
            transport.send(seam.request(single("orders", b"two"), (queue, at)), PATIENCE, outcomes)
            assert outcomes.wait(2)[1].error is None
            assert [message.body for message in stored(proxy)] == [b"two"]


def test_temporarily_invalid_certificate_files_fail_only_the_call(authority: Authority, tmp_path: Path) -> None:
    ca_file, both_file = tmp_path / "ca.pem", tmp_path / "own.pem"
    ca_file.write_bytes(authority.ca_file.read_bytes())
    certificate, key = authority.server("client", "DNS:spark-client")
    both = certificate.read_bytes() + key.read_bytes()
    both_file.write_bytes(both)
    tls = TlsSettings(str(ca_file), cert_file=str(both_file))
    outcomes = Outcomes()
    with (
        running_proxy(**demanding(authority)) as proxy,
        GrpcTransport([proxy.address], client_id="test", tls=tls) as transport,
    ):
        seam = Grpc(transport, proxy, tls)
        for content, turn in ((b"", 1), (both, 2)):
            both_file.write_bytes(content)
            transport.send(seam.request(single("orders", b"one"), seam.elsewhere(proxy.address)), PATIENCE, outcomes)
            outcomes.wait(turn)
        assert isinstance(outcomes[0].error, RemotingConnectException)
        assert outcomes[0].error.retriable
        assert outcomes[1].error is None


def test_a_file_without_a_certificate_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("no certificate")
    for path in (tmp_path / "empty.pem", tmp_path / "missing.pem"):
        with pytest.raises(OptionError, match="tlsCaFile"):
            GrpcTransport(["proxy:8081"], client_id="test", tls=TlsSettings(str(path)))


def test_without_a_file_the_system_s_authorities_are_trusted(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    assert root_certificates(TlsSettings()) == authority.ca_file.read_bytes()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert root_certificates(TlsSettings()) is None
    (tmp_path / "0a1b2c3d.0").write_bytes(authority.ca_file.read_bytes())
    (tmp_path / "ca.pem").write_bytes(b"not found by its hash")
    roots = root_certificates(TlsSettings())
    assert roots == authority.ca_file.read_bytes()
    assert ssl.create_default_context(cadata=roots.decode()).cert_store_stats()["x509_ca"] == 1
