"""Whether a server that hung up without a word wants TLS where it got none, or none where it got TLS.

Rule 1: the answer is an experiment: fresh connections of each kind. Only a server that talks on the one kind, and hangs
        up on the other every time, is told; one that goes down, or is slow, or a balancer before one that is down, is
        not.
Rule 2: a few bytes are sent, none of which a server takes for more than a greeting; whose certificate it is does not
        matter for that.
Rule 3: it blocks, for half a second at each connection at most: for a failure's path and nothing else. What was found,
        or not found, holds for a while, however many connections fail meanwhile.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.wire.command import RemotingCommand, encode_head
from rocketmq_spark.wire.tls_words import DEMANDS_TLS, SPEAKS_NO_TLS

_TIMEOUT: Final = 0.5
_HOLDS: Final = 10.0
H2: Final = "h2"

# A request of a kind that no server has: it is answered, whoever asks.
REMOTING_HELLO: Final = bytes(encode_head(RemotingCommand(code=0, opaque=0), 0))
# What an HTTP/2 client begins with, and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

T = TypeVar("T")


class Remembered(Generic[T]):
    """What was found out of servers, and not found, for a while."""

    def __init__(self) -> None:
        # By whatever tells servers apart: when it was looked into, and what was found.
        self._found: dict[Hashable, tuple[float, T]] = {}

    def get(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what was found of `key`, looking into it if nobody has in the last ten seconds."""
        held = self._found.get(key)
        if held is None or time.monotonic() > held[0] + _HOLDS:
            found = find()
            held = self._found[key] = (time.monotonic(), found)
        return held[1]


_remembered: Final[Remembered[str | None]] = Remembered()


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
    return _remembered.get((address, over_tls), lambda: _tried(address, hello, over_tls=over_tls))


def _tried(address: str, hello: bytes, *, over_tls: bool) -> str | None:
    host, port = parse_address(address)
    if over_tls:
        talks_plainly = bool(answer(host, port, hello, _TIMEOUT))
        return SPEAKS_NO_TLS if talks_plainly and tls_protocol(host, port, _TIMEOUT) is None else None
    # Before and after: what was down and is up again talks both ways by then.
    for _ in range(2):
        if answer(host, port, hello, _TIMEOUT) != b"" or tls_protocol(host, port, _TIMEOUT) is None:
            return None
    return DEMANDS_TLS


def answer(host: str, port: int, hello: bytes, timeout: float) -> bytes | None:
    """Return the first bytes that come back, "" if the server hangs up, None if it is silent, or not there."""
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
    """Connect, and shake hands; raises an OSError, which an ``SSLError`` is."""
    with (
        socket.create_connection((host, port), timeout) as sock,
        context.wrap_socket(sock, server_hostname=server_name or host) as secure,
    ):
        yield secure


def unchecked(context: ssl.SSLContext) -> ssl.SSLContext:
    """Have a context take every certificate, and offer HTTP/2; return it."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([H2])
    return context


def tls_protocol(host: str, port: int, timeout: float) -> str | None:
    """Return what a TLS server chose to speak, "" if it did not choose, None without TLS."""
    context = unchecked(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    # As those that count: what comes of older releases differs from one OpenSSL to the next.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        with secured(host, port, context, timeout) as secure:
            return secure.selected_alpn_protocol() or ""
    except ssl.SSLError as exc:
        # Only who speaks TLS refuses in it.
        return "" if "ALERT" in (exc.reason or "") else None
    except OSError:
        return None
