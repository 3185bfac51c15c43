"""Opens one gRPC channel per client and endpoint, with TLS if configured (docs/internals/grpc.md#channels).

`Channels.explained` finds out whether TLS is the cause if a proxy cut a connect, because gRPC does not say. Spark forks
its Python workers, and gRPC supports a fork only before its first use. So grpc is imported when the first channel
opens.
"""

from __future__ import annotations

import ipaddress
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rocketmq_spark import errors
from rocketmq_spark.model.route import parse_address
from rocketmq_spark.protocol.remoting.command import MAX_FRAME
from rocketmq_spark.protocol.tls import OUT_OF_DATE, OUT_OF_DATE_CODES, refusal
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.transport.tls_probe import H2, HTTP2_HELLO, disagreement, remembered, secured

if TYPE_CHECKING:
    import grpc

# What to change if a proxy closed a connection: the error's class, and a text.
_Remedy: TypeAlias = tuple[type[errors.RemotingTlsException], str]

_TIMEOUT: Final = 1.0


def certificate_refusal(address: str, settings: TlsSettings, trusted: str | None) -> str | None:
    """Return why the server rejects this client's certificate, or its absence; None if it accepts the client.

    Verifies the server first, because another one may answer now; with `insecure_skip_verify` by its PEM in `trusted`.
    """
    if settings.insecure_skip_verify and trusted is None:
        return None
    host, port = parse_address(address)
    context = settings.context() if trusted is None else _trusting(trusted, settings)
    context.set_alpn_protocols([H2])
    try:
        with secured(host, port, context, _TIMEOUT, settings.server_name) as secure:
            # With TLS 1.3 the handshake ends before the server has checked the certificate. A read receives its alert;
            # a write could fail earlier. Servers that use gRPC's C++ code close the connection without an alert.
            secure.recv(64)
    except OSError as exc:
        if isinstance(exc, ssl.SSLError) and exc.reason in settings.refusals:
            return str(refusal(exc))
    return None


def shown_certificate(endpoint: str, settings: TlsSettings) -> tuple[str, str | None]:
    """Return the certificate that a server shows (PEM), and a name in it (docs/internals/grpc.md#tls).

    RemotingCertificateException: it is out of date, which gRPC rejects. RemotingConnectException: it shows none now.
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
            text = f"{exc.verify_message}, which gRPC rejects even with tlsInsecureSkipVerify=true: {OUT_OF_DATE}"
            raise errors.RemotingCertificateException(f"{endpoint}: {text}") from exc
        # Also if another server behind a balancer shows another certificate.
        raise errors.RemotingConnectException(
            f"reading the certificate of {endpoint} failed: {exc}; check that a proxy's gRPC port listens there "
            "(endpoints)"
        ) from exc


def _trusting(shown: str, settings: TlsSettings) -> ssl.SSLContext:
    """Return a context that accepts only this certificate (PEM), for any host name."""
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


# The reason of each option: docs/internals/grpc.md#channels.
_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.max_receive_message_length", MAX_FRAME),
    # The first option offers servers no compression (bit 0: identity) and rejects a reply that names one. With the
    # second, a message that is compressed nevertheless is not expanded. RocketMQ's proxies do not compress replies.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A proxy closes connections with pings more often than every 5 minutes.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # The channel must have reconnected when a failed call's retry has waited retryBackoffMaxMs.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, the timeout of one connect. By default a dead host would not be retried for 20 s.
    ("grpc.min_reconnect_backoff_ms", 3_000),
)


def target_of(endpoint: str) -> str:
    """Return gRPC's target for a ``host:port``: ``ipv4:``, ``ipv6:`` or ``dns:``; ValueError for another text."""
    host, port = parse_address(endpoint)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return f"dns:{host}:{port}"
    return f"ipv4:{host}:{port}" if version == 4 else f"ipv6:[{host}]:{port}"


def root_certificates(tls: TlsSettings) -> bytes | None:
    """Return the trusted authorities (PEM), from `ca_file` or the system; None if Python finds none there."""
    tls.context()
    if tls.ca_file is not None:
        return Path(tls.ca_file).read_bytes()
    places = ssl.get_default_verify_paths()
    if places.cafile is not None:
        return Path(places.cafile).read_bytes()
    # OpenSSL names the files of authorities by a hash and a number from 0.
    files = sorted(Path(places.capath).glob("*.[0-9]")) if places.capath is not None else []
    return b"\n".join(file.read_bytes() for file in files) or None


class Channels:
    """The channels of one process, by endpoint; safe for many threads. `roots` are the `root_certificates` of `tls`."""

    def __init__(self, tls: TlsSettings | None, roots: bytes | None) -> None:
        self._tls = tls
        self._roots = roots
        self.server_name = None if tls is None else tls.server_name
        self._lock = threading.Lock()
        self._open: dict[str, grpc.Channel] = {}
        # Without verification, by endpoint: the certificate that was shown first, the only one trusted.
        self._shown: dict[str, str] = {}
        self._closed = False
        # Cached, because many calls may fail at the same time.
        self.explained = remembered(self._explained)

    def __repr__(self) -> str:
        return f"<Channels {'closed' if self._closed else sorted(self._open)}>"

    def channel(self, endpoint: str) -> grpc.Channel:
        """Return the channel to ``host:port``; RemotingConnectException without a usable TLS file or certificate."""
        channel = self._open.get(endpoint)
        if channel is not None:
            return channel
        import grpc

        target, options = target_of(endpoint), _OPTIONS
        if self._tls is not None:
            # Before the lock, because this may send requests to the server.
            credentials, server_name = self._credentials(endpoint, self._tls)
            if server_name is not None:
                options = (*options, ("grpc.ssl_target_name_override", server_name))
        with self._lock:
            if self._closed:
                raise errors.RocketMQError("this transport is closed: make a new one")
            if endpoint not in self._open:
                if self._tls is None:
                    self._open[endpoint] = grpc.insecure_channel(target, options)
                else:
                    self._open[endpoint] = grpc.secure_channel(target, credentials, options)
            return self._open[endpoint]

    def close(self) -> None:
        """Close every channel and cancel its calls. Idempotent."""
        with self._lock:
            self._closed = True
            channels, self._open = self._open, {}
        for channel in channels.values():
            channel.close()

    def _explained(self, endpoint: str) -> _Remedy | None:
        """Return what to change if a proxy ended a connect, None if it may be down. This may take seconds."""
        refusal = None if self._tls is None else certificate_refusal(endpoint, self._tls, self._shown.get(endpoint))
        if refusal is not None:
            return errors.RemotingCertificateException, refusal
        remedy = disagreement(endpoint, HTTP2_HELLO, over_tls=self._tls is not None)
        return None if remedy is None else (errors.RemotingTlsException, remedy)

    def _credentials(self, endpoint: str, tls: TlsSettings) -> tuple[grpc.ChannelCredentials, str | None]:
        """Return a channel's credentials, and the name that the server's certificate must have, None for the host's."""
        import grpc

        try:
            roots, server_name = self._roots, tls.server_name
            if tls.insecure_skip_verify:
                shown, server_name = shown_certificate(endpoint, tls)
                self._shown[endpoint] = shown
                roots = shown.encode()
            return grpc.ssl_channel_credentials(roots, *tls.own_certificate()), server_name
        except (errors.OptionError, OSError) as exc:
            # The file was valid when this transport was created; it may be in the middle of a replacement.
            raise errors.RemotingConnectException(f"connecting to {endpoint}: {exc}") from exc
