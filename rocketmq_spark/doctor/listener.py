"""Who listens at an address where no RocketMQ server has answered: told by what it says to a TLS, HTTP or gRPC client.

Rule 1: a few bytes are sent, none of which a RocketMQ server takes for a request.
Rule 2: each try has a connection of its own, and its share of the time.
"""

from __future__ import annotations

import enum
import socket
import ssl
from typing import Final

from rocketmq_spark.transport.dial import parse_address

# What an HTTP/2 client begins with, and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS: Final = 4
_TYPE_AT: Final = 3
_HTTP_HELLO: Final = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_TRIES: Final = 4


class Listener(enum.Enum):
    """Who listens, in words that complete "at this address ..."."""

    UNKNOWN_HOST = "the host's name is unknown here"
    NOBODY = "nobody listens"
    SILENT = "nobody answers: the host is down, or a firewall drops what is sent there"
    GRPC = "a gRPC server listens, as on a proxy's port 8081"
    HTTP = "an HTTP server listens"
    TLS = "a server listens that wants TLS"
    OTHER = "something listens that does not answer as a RocketMQ server does"


def who_listens(address: str, timeout: float) -> Listener:
    """Return who listens at ``host:port``, within `timeout` seconds."""
    host, port = parse_address(address)
    share = timeout / _TRIES
    try:
        socket.create_connection((host, port), share).close()
    except socket.gaierror:
        return Listener.UNKNOWN_HOST
    except ConnectionRefusedError:
        return Listener.NOBODY
    except OSError:
        return Listener.SILENT
    said = _answer(host, port, _HTTP2_HELLO, share)
    if said[_TYPE_AT : _TYPE_AT + 1] == bytes([_SETTINGS]):
        return Listener.GRPC
    if said.startswith(b"HTTP/") or _answer(host, port, _HTTP_HELLO, share).startswith(b"HTTP/"):
        return Listener.HTTP
    protocol = _tls_protocol(host, port, share)
    if protocol is None:
        return Listener.OTHER
    return Listener.GRPC if protocol == "h2" else Listener.TLS


def _answer(host: str, port: int, hello: bytes, timeout: float) -> bytes:
    try:
        with socket.create_connection((host, port), timeout) as sock:
            sock.sendall(hello)
            return sock.recv(64)
    except OSError:
        return b""


def _tls_protocol(host: str, port: int, timeout: float) -> str | None:
    """Return what a TLS server chose to speak, "" if it did not choose, None without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Whose certificate it is does not matter: nothing is said to it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout) as sock,
            context.wrap_socket(sock, server_hostname=host) as secure,
        ):
            return secure.selected_alpn_protocol() or ""
    except OSError:
        return None
