"""What a server that hung up without a word wants, TLS, none of it, or a certificate; and what it shows of itself.

Rule 1: the answer is an experiment: a fresh connection of each kind. Only a server that talks on the one and not on the
        other is told; one that goes down, or a balancer before one that is down, talks on neither.
Rule 2: a few bytes are sent, none of which a server takes for more than a greeting; whose certificate it is does not
        matter for that.
Rule 3: it blocks, for a second at each connection at most: for a failure's path, and nothing else.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final

from rocketmq_spark.errors import RemotingCertificateException, RemotingConnectException
from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.tls import TlsSettings, refusal
from rocketmq_spark.wire.command import RemotingCommand, encode_head

_TIMEOUT: Final = 1.0
_H2: Final = "h2"
_TLS: Final = "it demands TLS: set useTls=true"
_PLAIN: Final = "it speaks no TLS: set useTls=false"

# A request of a kind that no server has: it is answered, whoever asks.
REMOTING_HELLO: Final = bytes(encode_head(RemotingCommand(code=0, opaque=0), 0))
# What an HTTP/2 client begins with, and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def disagreement(address: str, hello: bytes, *, over_tls: bool) -> str | None:
    """Return what is to be changed for a server that hangs up, None if TLS is not what ends the connection.

    Parameters
    ----------
    address : str
        ``host:port``.
    hello : bytes
        What it answers, if it is spoken to plainly.
    over_tls : bool
        How it was spoken to when it hung up.
    """
    host, port = parse_address(address)
    plain, tls = bool(answer(host, port, hello, _TIMEOUT)), tls_protocol(host, port, _TIMEOUT) is not None
    if plain is tls or plain is not over_tls:
        return None
    return _PLAIN if plain else _TLS


def refusal_of_ours(address: str, settings: TlsSettings) -> str | None:
    """Return what a gRPC server says against this client's certificate, or for want of one; None if it says nothing.

    Java's servers, and balancers, say it with an alert; those made with gRPC's own C++ code hang up.

    Parameters
    ----------
    address : str
    settings : TlsSettings
        With the certificate, if there is one.
    """
    host, port = parse_address(address)
    context = settings.context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([_H2])
    try:
        with (
            socket.create_connection((host, port), _TIMEOUT) as sock,
            context.wrap_socket(sock, server_hostname=host) as secure,
        ):
            # With TLS 1.3 a client is done before the server has judged. Writing could fail before the word is read.
            secure.recv(64)
    except ssl.SSLError as exc:
        return str(refusal(exc)) if exc.reason in settings.refusals else None
    except OSError:
        pass
    return None


def shown_certificate(endpoint: str, settings: TlsSettings) -> tuple[bytes, str | None]:
    """Return the certificate that a server shows (PEM), to be trusted as it is, and a name that it is for.

    gRPC checks every certificate: who wants none checked trusts the one that is shown first.

    Raises
    ------
    RemotingConnectException
        It can't be had; it may be later.
    RemotingCertificateException
        It has expired, which gRPC would not pass over.
    """
    host, port = parse_address(endpoint)
    try:
        with (
            socket.create_connection((host, port), _TIMEOUT) as sock,
            settings.context().wrap_socket(sock, server_hostname=host) as secure,
        ):
            shown = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
        # Python takes only those apart that it has verified: this one, by itself.
        judge = settings.context()
        judge.verify_mode = ssl.CERT_REQUIRED
        judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        judge.load_verify_locations(cadata=shown)
        with (
            socket.create_connection((host, port), _TIMEOUT) as sock,
            judge.wrap_socket(sock, server_hostname=host) as secure,
        ):
            return shown.encode(), _name_in(secure.getpeercert() or {})
    except ssl.SSLCertVerificationError as exc:
        raise RemotingCertificateException(
            f"{endpoint}: {exc.verify_message}: over gRPC tlsInsecureSkipVerify takes every certificate but this one"
        ) from exc
    except OSError as exc:
        raise RemotingConnectException(f"looking at the certificate of {endpoint}: {exc}") from exc


def _name_in(certificate: Mapping[str, Any]) -> str | None:
    alternatives = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    commons = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    names = [*alternatives, *commons]
    return names[0].replace("*", "any") if names else None


def answer(host: str, port: int, hello: bytes, timeout: float) -> bytes:
    """Return the first bytes that come back, "" if none do."""
    try:
        with socket.create_connection((host, port), timeout) as sock:
            sock.sendall(hello)
            return sock.recv(64)
    except OSError:
        return b""


def tls_protocol(host: str, port: int, timeout: float) -> str | None:
    """Return what a TLS server chose to speak, "" if it did not choose, None without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([_H2])
    try:
        with (
            socket.create_connection((host, port), timeout) as sock,
            context.wrap_socket(sock, server_hostname=host) as secure,
        ):
            return secure.selected_alpn_protocol() or ""
    except ssl.SSLError as exc:
        # Only who speaks TLS refuses in it.
        return "" if "ALERT" in (exc.reason or "") else None
    except OSError:
        return None
