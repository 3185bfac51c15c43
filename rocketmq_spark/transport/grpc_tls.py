"""What gRPC's own TLS does not tell, or does not do: found out with Python's, on connections beside it.

Rule 1: for a failure's path, and for trying things; it blocks, for a second at each connection at most.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

from rocketmq_spark.errors import RemotingCertificateException, RemotingConnectException
from rocketmq_spark.transport.dial import parse_address
from rocketmq_spark.transport.disagreement import H2, secured
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.transport.tls_errors import OUT_OF_DATE, refusal
from rocketmq_spark.wire import tls_words

_TIMEOUT: Final = 1.0


def refusal_of_ours(address: str, settings: TlsSettings, trusted: bytes | None = None) -> str | None:
    """Return what a server says against this client's certificate, or for want of one; None if it says nothing.

    Java's servers, and balancers, say it with an alert; those made with gRPC's own C++ code hang up. The server is
    verified before this client shows its certificate: whoever hung up may be another server now.

    Parameters
    ----------
    address : str
    settings : TlsSettings
        With the certificate, if there is one.
    trusted : bytes, optional
        With `insecure_skip_verify`: the certificate (PEM) that this server showed first. Default: no server is asked.

    Raises
    ------
    OptionError
        See `TlsSettings.context`.
    """
    if settings.insecure_skip_verify and trusted is None:
        return None
    host, port = parse_address(address)
    context = settings.context() if trusted is None else _trusting(trusted.decode(), settings)
    context.set_alpn_protocols([H2])
    try:
        with secured(host, port, context, _TIMEOUT, settings.server_name) as secure:
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
    OptionError
        See `TlsSettings.context`.
    RemotingConnectException
        It can't be had; it may be later.
    RemotingCertificateException
        It is out of date, which gRPC would not pass over.
    """
    host, port = parse_address(endpoint)
    try:
        with secured(host, port, settings.context(), _TIMEOUT) as secure:
            shown = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
        # Python takes only those apart that it has verified: this one, by itself.
        with secured(host, port, _trusting(shown, settings), _TIMEOUT) as secure:
            return shown.encode(), _name_in(secure.getpeercert() or {})
    except OSError as exc:
        if isinstance(exc, ssl.SSLCertVerificationError) and exc.verify_code in OUT_OF_DATE:
            raise RemotingCertificateException(
                f"{endpoint}: {exc.verify_message}: over gRPC tlsInsecureSkipVerify takes every certificate but such a "
                f"one; {tls_words.OUT_OF_DATE}"
            ) from exc
        # Another server behind a balancer shows another certificate, too.
        raise RemotingConnectException(f"looking at the certificate of {endpoint}: {exc}") from exc


def _trusting(shown: str, settings: TlsSettings) -> ssl.SSLContext:
    """Return a context that takes one certificate (PEM) only, whatever it names."""
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
