"""Channels to proxies: their targets, settings and encryption.

There is one channel per endpoint, opened by the first call to it; it reconnects by itself. grpc is imported when the
first channel opens, so that a process that only imported this module can still fork. Channels belong to the process
that opened them: closing an inherited one, even by garbage collection, can hang.
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rocketmq_spark.errors import (
    OptionError,
    RemotingCertificateException,
    RemotingConnectException,
    RemotingTlsException,
    RocketMQError,
)
from rocketmq_spark.model.route import parse_address
from rocketmq_spark.protocol.remoting.command import MAX_FRAME
from rocketmq_spark.protocol.tls import OUT_OF_DATE, OUT_OF_DATE_CODES, refusal
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.transport.tls_probe import H2, HTTP2_HELLO, disagreement, remembered, secured

if TYPE_CHECKING:
    import grpc

# What to change for a proxy that hung up: the error's class, and a text.
_Remedy: TypeAlias = tuple[type[RemotingTlsException], str]

_TIMEOUT: Final = 1.0


def refusal_of_ours(address: str, settings: TlsSettings, trusted: str | None) -> str | None:
    """Return the server's objection to this client's certificate, or to its absence; None if there is none.

    The server is verified before this client shows its certificate, because another server may answer now. With
    `insecure_skip_verify` that needs `trusted`, the certificate (PEM) that the server showed first.
    """
    if settings.insecure_skip_verify and trusted is None:
        return None
    host, port = parse_address(address)
    context = settings.context() if trusted is None else _trusting(trusted, settings)
    context.set_alpn_protocols([H2])
    try:
        with secured(host, port, context, _TIMEOUT, settings.server_name) as secure:
            # With TLS 1.3 the handshake ends before the server has checked the certificate. Reading brings its alert;
            # a write could fail before. Servers made with gRPC's C++ code send none and hang up.
            secure.recv(64)
    except ssl.SSLError as exc:
        return str(refusal(exc)) if exc.reason in settings.refusals else None
    except OSError:
        pass
    return None


def shown_certificate(endpoint: str, settings: TlsSettings) -> tuple[str, str | None]:
    """Return the certificate that a server shows (PEM), and a name in it.

    gRPC verifies every certificate, so `tlsInsecureSkipVerify` means to trust the one that is shown first. gRPC also
    rejects one that is out of date, which is a RemotingCertificateException here. RemotingConnectException: the server
    showed none; it may later.
    """
    host, port = parse_address(endpoint)
    try:
        with secured(host, port, settings.context(), _TIMEOUT) as secure:
            shown = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
        # Python parses only verified certificates, so this one is verified by itself.
        with secured(host, port, _trusting(shown, settings), _TIMEOUT) as secure:
            return shown, _name_in(secure.getpeercert() or {})
    except OSError as exc:
        if isinstance(exc, ssl.SSLCertVerificationError) and exc.verify_code in OUT_OF_DATE_CODES:
            raise RemotingCertificateException(
                f"{endpoint}: {exc.verify_message}: over gRPC tlsInsecureSkipVerify takes every certificate but such a "
                f"one; {OUT_OF_DATE}"
            ) from exc
        # Another server behind a balancer shows another certificate, too.
        raise RemotingConnectException(f"looking at the certificate of {endpoint}: {exc}") from exc


def _trusting(shown: str, settings: TlsSettings) -> ssl.SSLContext:
    """Return a context that accepts one certificate (PEM) only, whatever it names."""
    context = settings.context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=shown)
    return context


def _name_in(certificate: Mapping[str, Any]) -> str | None:
    alternatives = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    commons = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    names = [*alternatives, *commons]
    return names[0].replace("*", "any") if names else None


_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    # A reply takes no more memory than a broker's frame. gRPC's default of 4 MiB is too small for a half message that
    # comes back with its properties.
    ("grpc.max_receive_message_length", MAX_FRAME),
    # No reply is expanded: before 1.84 gRPC expands 900 KiB to 900 MiB, and looks at the limit after that. The first
    # option offers servers no compression (bit 0: identity) and refuses a reply that names one. With the second a
    # message that is compressed nevertheless is not expanded. Proxies of RocketMQ compress no replies.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    # The server limits the size of a request.
    ("grpc.max_send_message_length", -1),
    # The producer retries.
    ("grpc.enable_retries", 0),
    # Two transports of one process would share a connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # A company's HTTP proxy does not forward gRPC.
    ("grpc.enable_http_proxy", 0),
    # A proxy closes connections with pings more often than every 5 minutes.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # The default's maximum is 2 minutes. Between two connects every call fails at once, and its retry waits up to
    # retryBackoffMaxMs: the channel must have reconnected by then.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name the time for one connect: 20 s by default, in which a dead host would not be tried again.
    ("grpc.min_reconnect_backoff_ms", 3_000),
)


def target_of(endpoint: str) -> str:
    """Return gRPC's target for a ``host:port``: ``ipv4:``, ``ipv6:`` or ``dns:``; ValueError if it is none."""
    host, port = parse_address(endpoint)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"dns:{host}:{port}"
    return f"ipv4:{host}:{port}" if version == 4 else f"ipv6:[{host}]:{port}"


def root_certificates(tls: TlsSettings) -> bytes | None:
    """Return the certificates of the authorities to trust (PEM): the file's, or the system's as Python knows them.

    None: Python finds none on this system, and gRPC uses its own list.
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

    Without `tls` none is encrypted; `roots` are its `root_certificates`.
    """

    def __init__(self, tls: TlsSettings | None, roots: bytes | None) -> None:
        self._tls = tls
        self._roots = roots
        # What certificates must name instead of the host that is dialled, None for that host.
        self.server_name = None if tls is None else tls.server_name
        self._lock = threading.Lock()
        self._open: dict[str, grpc.Channel] = {}
        # Without verification, by endpoint: the certificate that was shown first is the only one trusted.
        self._shown: dict[str, str] = {}
        self._closed = False
        # Remembered for a while, however many calls fail meanwhile.
        self.explained = remembered(self._explained)

    def __repr__(self) -> str:
        return f"<Channels {'closed' if self._closed else sorted(self._open)}>"

    def channel(self, endpoint: str) -> grpc.Channel:
        """Return the channel to ``host:port``, opening it if there is none.

        Raises RemotingConnectException if a TLS file is unusable at the moment, or the server shows no certificate.
        """
        found = self._open.get(endpoint)
        if found is not None:
            return found
        import grpc

        target, options = target_of(endpoint), _OPTIONS
        if self._tls is not None:
            # Before the lock: it may ask the server.
            credentials, server_name = self._credentials(endpoint, self._tls)
            if server_name is not None:
                options = (*options, ("grpc.ssl_target_name_override", server_name))
        with self._lock:
            if self._closed:
                raise RocketMQError("this transport is closed: make a new one")
            if endpoint not in self._open:
                self._open[endpoint] = (
                    grpc.insecure_channel(target, options)
                    if self._tls is None
                    else grpc.secure_channel(target, credentials, options)
                )
            return self._open[endpoint]

    def close(self) -> None:
        """Close every channel; calls under way are cancelled. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._open = self._open, {}
        for channel in channels.values():
            channel.close()

    def _explained(self, endpoint: str) -> _Remedy | None:
        """Return what to change for a proxy that hung up during a connect, None if it may be down; may take seconds."""
        refusal = None if self._tls is None else refusal_of_ours(endpoint, self._tls, self._shown.get(endpoint))
        if refusal is not None:
            return RemotingCertificateException, refusal
        remedy = disagreement(endpoint, HTTP2_HELLO, over_tls=self._tls is not None)
        return None if remedy is None else (RemotingTlsException, remedy)

    def _credentials(self, endpoint: str, tls: TlsSettings) -> tuple[grpc.ChannelCredentials, str | None]:
        """Return how to encrypt a channel, and what the server's certificate must name if not its host."""
        import grpc

        try:
            roots, server_name = self._roots, tls.server_name
            if tls.insecure_skip_verify:
                shown, server_name = shown_certificate(endpoint, tls)
                self._shown[endpoint] = shown
                roots = shown.encode()
            return grpc.ssl_channel_credentials(roots, *tls.own_certificate()), server_name
        except (OptionError, OSError) as exc:
            # Perhaps the file is being replaced: it was valid when this transport was made.
            raise RemotingConnectException(f"connecting to {endpoint}: {exc}") from exc
