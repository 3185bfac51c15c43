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

import socket
import ssl
import time
from typing import Final

from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.wire.command import RemotingCommand, encode_head

_TIMEOUT: Final = 0.5
_HOLDS: Final = 10.0
_TLS: Final = "it demands TLS: set useTls=true"
_PLAIN: Final = "it speaks no TLS: set useTls=false"
H2: Final = "h2"

# A request of a kind that no server has: it is answered, whoever asks.
REMOTING_HELLO: Final = bytes(encode_head(RemotingCommand(code=0, opaque=0), 0))
# What an HTTP/2 client begins with, and an empty SETTINGS frame (RFC 9113, sections 3.4 and 6.5).
HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# By address and how it was spoken to: when it was tried, and what was found.
_found: dict[tuple[str, bool], tuple[float, str | None]] = {}


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
    at, found = _found.get((address, over_tls), (0.0, None))
    if not at or time.monotonic() > at + _HOLDS:
        found = _tried(address, hello, over_tls=over_tls)
        _found[address, over_tls] = (time.monotonic(), found)
    return found


def _tried(address: str, hello: bytes, *, over_tls: bool) -> str | None:
    host, port = parse_address(address)
    if over_tls:
        talks_plainly = bool(answer(host, port, hello, _TIMEOUT))
        return _PLAIN if talks_plainly and tls_protocol(host, port, _TIMEOUT) is None else None
    # Before and after: what was down and is up again talks both ways by then.
    for _ in range(2):
        if not _hangs_up(host, port, hello) or tls_protocol(host, port, _TIMEOUT) is None:
            return None
    return _TLS


def _hangs_up(host: str, port: int, hello: bytes) -> bool:
    """Return whether the server ends a connection without a word; not if it is silent, or not there."""
    try:
        with socket.create_connection((host, port), _TIMEOUT) as sock:
            try:
                sock.sendall(hello)
                return not sock.recv(64)
            except ConnectionError:
                return True
    except OSError:
        return False


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
    context.set_alpn_protocols([H2])
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
