"""Channels to proxies: what is dialled, with which settings, and whom to trust.

Rule 1: one channel per endpoint, opened by the first call to it; calls share it, and it connects anew by itself.
Rule 2: grpc is imported by what opens a channel. Whoever only imports this module can fork afterwards.
Rule 3: channels belong to the process that opened them. Closing an inherited one, even collecting it as garbage, can
        hang: whoever owns these must keep them referenced in a child, and close nothing (spec/grpc.md section 2.4).

Follows spec/grpc.md sections 2.1 to 2.4.
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from rocketmq_spark.errors import (
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingTlsException,
    RocketMQError,
)
from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.disagreement import HTTP2_HELLO, Remembered, disagreement
from rocketmq_spark.transport.grpc_tls import refusal_of_ours, shown_certificate
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.framing import MAX_FRAME

if TYPE_CHECKING:
    import grpc

_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # A reply takes no more memory than a broker's frame. gRPC's default of 4 MiB is too small for a half message that
    # comes back with its properties.
    ("grpc.max_receive_message_length", MAX_FRAME),
    # No reply is expanded: before 1.84 gRPC expands 900 KiB to 900 MiB, and looks at the limit after that. The first
    # option offers servers no compression (bit 0: identity) and refuses a reply that names one. With the second a
    # message that is compressed nevertheless is not expanded. Proxies of RocketMQ compress no replies.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # What goes out is ours to check: a body's limit is the server's.
    ("grpc.max_send_message_length", -1),
    # Retries are ours.
    ("grpc.enable_retries", 0),
    # Two transports of one process would share a connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # RocketMQ's proxies are meant, not those of a company's way to the web: they know no gRPC.
    ("grpc.enable_http_proxy", 0),
    # A proxy hangs up on pings that come more often than every 5 minutes.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # The default's ceiling is 2 minutes. Between two connects every call fails at once, and is sent again later, after
    # a wait of up to retryBackoffMaxMs: a proxy that is back is to be found before the next one ends.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name the time for one connect: 20 s by default, in which a dead host would not be tried again.
    ("grpc.min_reconnect_backoff_ms", 3_000),
)


def target_of(endpoint: str) -> str:
    """Return gRPC's name of a ``host:port``, by what its host is: ``ipv4:``, ``ipv6:`` or ``dns:``.

    Raises
    ------
    ValueError
        It is not ``host:port``.
    """
    host, port = parse_address(endpoint)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"dns:{host}:{port}"
    return f"ipv4:{host}:{port}" if version == 4 else f"ipv6:[{host}]:{port}"


def root_certificates(tls: TlsSettings) -> bytes | None:
    """Return the certificates of the authorities to trust (PEM): the file's, or the system's as Python knows them.

    None: this system has none where Python looks, and gRPC's own list holds.

    Raises
    ------
    OptionError
        The file can't be read, or holds no certificate.
    """
    tls.context()
    if tls.ca_file is not None:
        return Path(tls.ca_file).read_bytes()
    places = ssl.get_default_verify_paths()
    if places.cafile is not None:
        return Path(places.cafile).read_bytes()
    # OpenSSL finds an authority in the folder by the hash of its name, and a number from 0.
    files = sorted(Path(places.capath).glob("*.[0-9]")) if places.capath is not None else []
    return b"\n".join(file.read_bytes() for file in files) or None


class Channels:
    """The channels of one process, by endpoint; safe for many threads.

    Parameters
    ----------
    tls : TlsSettings or None
        Encrypts every connection; None: none is encrypted.
    roots : bytes or None
        See `root_certificates`.
    """

    def __init__(self, tls: TlsSettings | None, roots: bytes | None) -> None:
        self._tls = tls
        self._roots = roots
        self._lock = threading.Lock()
        self._open: dict[str, grpc.Channel] = {}
        # Without verification, by endpoint: the certificate that was shown first is the only one trusted.
        self._shown: dict[str, bytes] = {}
        self._closed = False
        self._explained: Remembered[tuple[type[RemotingTlsException], str] | None] = Remembered()

    def __repr__(self) -> str:
        return f"<Channels {'closed' if self._closed else sorted(self._open)}>"

    @property
    def server_name(self) -> str | None:
        """What certificates must name instead of the host that is dialled, None for that host."""
        return None if self._tls is None else self._tls.server_name

    def channel(self, endpoint: str) -> grpc.Channel:
        """Return the channel to ``host:port``, opening it if there is none.

        Raises
        ------
        RocketMQError
            Closed.
        RemotingConnectException
            A file of ours can't be used just now, or the server's certificate can't be had.
        ValueError
            It is not ``host:port``.
        """
        found = self._open.get(endpoint)
        if found is not None:
            return found
        # Before the lock: it may ask the server.
        security = self._security(endpoint)
        with self._lock:
            if self._closed:
                raise RocketMQError("this transport is closed: make a new one")
            if endpoint not in self._open:
                self._open[endpoint] = _opened(endpoint, security)
            return self._open[endpoint]

    def close(self) -> None:
        """Close every channel; calls under way are cancelled. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._open = self._open, {}
        for channel in channels.values():
            channel.close()

    def explained(self, endpoint: str) -> tuple[type[RemotingTlsException], str] | None:
        """Return what to change for a proxy that hung up on a connect, None if it may be down; blocks for seconds.

        What was found, or not found, holds for a while, however many calls fail meanwhile.

        Raises
        ------
        OptionError
            A file of ours can't be used just now.
        """
        return self._explained.get(endpoint, lambda: self._looked_into(endpoint))

    def _looked_into(self, endpoint: str) -> tuple[type[RemotingTlsException], str] | None:
        refusal = None if self._tls is None else refusal_of_ours(endpoint, self._tls, self._shown.get(endpoint))
        if refusal is not None:
            return RemotingCertificateException, refusal
        remedy = disagreement(endpoint, HTTP2_HELLO, over_tls=self._tls is not None)
        return None if remedy is None else (RemotingTlsException, remedy)

    def _security(self, endpoint: str) -> _Security | None:
        if self._tls is None:
            return None
        try:
            roots, server_name = self._roots, self._tls.server_name
            if self._tls.insecure_skip_verify:
                roots, server_name = shown_certificate(endpoint, self._tls)
                self._shown[endpoint] = roots
            return _Security(roots, *self._tls.own_certificate(), server_name)
        except (OptionError, OSError) as exc:
            # It is being replaced, perhaps: it was good when this transport was made.
            raise RemotingConnectException(f"connecting to {endpoint}: {exc}") from exc


class _Security(NamedTuple):
    """How one channel is encrypted: PEM, and what the server's certificate must name if not its host."""

    roots: bytes | None
    private_key: bytes | None
    certificate_chain: bytes | None
    server_name: str | None

    def __repr__(self) -> str:
        return f"<_Security {'with' if self.private_key else 'without'} a client certificate>"


def _opened(endpoint: str, security: _Security | None) -> grpc.Channel:
    import grpc

    target = target_of(endpoint)
    if security is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    options: tuple[tuple[str, int | str], ...] = _OPTIONS
    if security.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", security.server_name))
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*security[:3]), options=options)
