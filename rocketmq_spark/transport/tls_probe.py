"""Finds out whether a server speaks TLS after a connection failed, and what kind of server listens at an address.

Without this, a wrong `useTls` would look like a broken server and be retried (docs/internals/access-control.md#tls). It
is reported only if the server answers the other kind of connection, plain or TLS, and not the configured kind. For a
load balancer whose server is down, nothing is reported. These probes send only a greeting and do not verify
certificates. They take up to some seconds, so they run only after failures, and results are kept for ten seconds.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import socket
import ssl
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final, ParamSpec, TypeVar

from rocketmq_spark.model.route import parse_address
from rocketmq_spark.protocol.remoting.command import RemotingCommand, encode_head
from rocketmq_spark.protocol.tls import DEMANDS_TLS, SPEAKS_NO_TLS, CertificateError, DisagreementError, HandshakeError
from rocketmq_spark.transport.tls import TlsStream

_TIMEOUT: Final = 0.5
_KEPT: Final = 10.0
H2: Final = "h2"

# Every remoting server answers a request with an unknown code.
REMOTING_HELLO: Final = bytes(encode_head(RemotingCommand(code=0, opaque=0), 0))
# The HTTP/2 preface and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

P = ParamSpec("P")
T = TypeVar("T")


def remembered(find: Callable[P, T]) -> Callable[P, T]:
    """Make a function return its last result for the same arguments, if it is not older than ten seconds."""
    results: dict[Hashable, tuple[float, T]] = {}

    @functools.wraps(find)
    def cached(*args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, *kwargs.items())
        if key not in results or time.monotonic() > results[key][0] + _KEPT:
            result = find(*args, **kwargs)
            results[key] = (time.monotonic(), result)
        return results[key][1]

    return cached


@remembered
def disagreement(address: str, hello: bytes, *, over_tls: bool) -> str | None:
    """Return what to change if a server hung up, None if TLS is not the cause; `hello` is a plain greeting."""
    host, port = parse_address(address)
    if over_tls:
        plain = bool(answer(host, port, hello, _TIMEOUT))
        return SPEAKS_NO_TLS if plain and tls_protocol(host, port, _TIMEOUT) is None else None
    # Twice: a server that has restarted answers the second time.
    for _ in range(2):
        if answer(host, port, hello, _TIMEOUT) != b"" or tls_protocol(host, port, _TIMEOUT) is None:
            return None
    return DEMANDS_TLS


def explained(
    address: str, stream: socket.socket | TlsStream | None, reason: str, cause: BaseException | None
) -> tuple[str, BaseException | None]:
    """Add a wrong `useTls` or a rejected certificate to the reason why a remoting connection without answers ended."""
    if isinstance(stream, TlsStream):
        refusal = stream.read_refusal() if isinstance(cause, OSError) else None
        return (reason, cause) if refusal is None else (f"{reason}: {refusal}", refusal)
    hung_up = isinstance(cause, ConnectionError) and not isinstance(cause, CertificateError | DisagreementError)
    shaking = isinstance(cause, HandshakeError)
    # Without a stream the connect failed.
    if not hung_up or not (shaking or stream is not None):
        return reason, cause
    remedy = disagreement(address, REMOTING_HELLO, over_tls=shaking)
    return (reason, cause) if remedy is None else (f"{reason}: {remedy}", DisagreementError(remedy))


def answer(host: str, port: int, hello: bytes, timeout: float) -> bytes | None:
    """Return the answer's first bytes, b"" if the server closes the connection, None if it is silent or unreachable."""
    try:
        with socket.create_connection((host, port), timeout) as sock:
            try:
                sock.sendall(hello)
                return sock.recv(64)
            except ConnectionError:
                return b""
    except OSError:
        return None


@contextlib.contextmanager
def secured(
    host: str, port: int, context: ssl.SSLContext, timeout: float, server_name: str | None = None
) -> Iterator[ssl.SSLSocket]:
    """Connect and do the handshake; raises OSError."""
    with (
        socket.create_connection((host, port), timeout) as sock,
        context.wrap_socket(sock, server_hostname=server_name or host) as secure,
    ):
        yield secure


def tls_protocol(host: str, port: int, timeout: float) -> str | None:
    """Return the protocol that a TLS server chose (ALPN), "" if none, None if it does not speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([H2])
    # As for real connections; results for older versions depend on the OpenSSL release.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        with secured(host, port, context, timeout) as secure:
            return secure.selected_alpn_protocol() or ""
    except ssl.SSLError as exc:
        # Only a server that speaks TLS sends an alert.
        return "" if "ALERT" in (exc.reason or "") else None
    except OSError:
        return None


_HTTP_HELLO: Final = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Listener(enum.Enum):
    """What listens at an address, in words that complete "at this address ..."."""

    UNKNOWN_HOST = "the host's name is unknown here"
    NOBODY = "no server listens"
    SILENT = "no answer: the host is down, or a firewall drops the packets"
    GRPC = "a gRPC server listens, as on a proxy's port 8081"
    HTTP = "an HTTP server listens"
    TLS = "a server listens that accepts only TLS"
    OTHER = "a server listens that does not answer as a RocketMQ server does"


def who_listens(address: str, timeout: float) -> Listener:
    """Return what listens at ``host:port``, within `timeout` seconds."""
    share = timeout / 4
    try:
        host, port = parse_address(address)
        socket.create_connection((host, port), share).close()
    except (socket.gaierror, ValueError):
        # A UnicodeError is a ValueError: "a..b", or a name that is too long.
        return Listener.UNKNOWN_HOST
    except ConnectionRefusedError:
        return Listener.NOBODY
    except OSError:
        return Listener.SILENT
    reply = answer(host, port, HTTP2_HELLO, share) or b""
    # The fourth byte of an HTTP/2 frame is its type, and 4 is SETTINGS.
    if reply[3:4] == b"\x04":
        return Listener.GRPC
    if reply.startswith(b"HTTP/") or (answer(host, port, _HTTP_HELLO, share) or b"").startswith(b"HTTP/"):
        return Listener.HTTP
    protocol = tls_protocol(host, port, share)
    if protocol is None:
        return Listener.OTHER
    return Listener.GRPC if protocol == H2 else Listener.TLS
