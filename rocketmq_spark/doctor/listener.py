"""Who listens at an address where no RocketMQ server has answered: told by what it says to a TLS, HTTP or gRPC client.

Rule 1: a few bytes are sent, none of which a RocketMQ server takes for a request.
Rule 2: each try has a connection of its own, and its share of the time.
"""

from __future__ import annotations

import enum
import socket
from typing import Final

from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.disagreement import HTTP2_HELLO, answer, tls_protocol

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
    share = timeout / _TRIES
    try:
        host, port = parse_address(address)
        socket.create_connection((host, port), share).close()
    except (socket.gaierror, ValueError):
        # No host's name may be like that: "a..b", or longer than the names' codec takes (UnicodeError).
        return Listener.UNKNOWN_HOST
    except ConnectionRefusedError:
        return Listener.NOBODY
    except OSError:
        return Listener.SILENT
    said = answer(host, port, HTTP2_HELLO, share) or b""
    if said[_TYPE_AT : _TYPE_AT + 1] == bytes([_SETTINGS]):
        return Listener.GRPC
    if said.startswith(b"HTTP/") or (answer(host, port, _HTTP_HELLO, share) or b"").startswith(b"HTTP/"):
        return Listener.HTTP
    protocol = tls_protocol(host, port, share)
    if protocol is None:
        return Listener.OTHER
    return Listener.GRPC if protocol == "h2" else Listener.TLS
