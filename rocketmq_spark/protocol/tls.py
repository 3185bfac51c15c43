"""Errors of the TLS handshakes that this package makes itself, and advice that errors of gRPC have, too.

See docs/internals/access-control.md#tls.
"""

from __future__ import annotations

import ssl
from typing import Final

NOT_TRUSTED: Final = (
    "the server's certificate is not trusted; set tlsCaFile to the certificate of the authority that signed it"
)
OUT_OF_DATE: Final = "the server needs a new certificate, or a clock is wrong"
MUST_NAME: Final = "the server's certificate must name"
OURS_REFUSED: Final = "the server refuses this client's certificate, or demands one"
TOO_OLD: Final = "the server's TLS is older than 1.2, which is the oldest allowed: update the server"
DEMANDS_TLS: Final = "it demands TLS: set useTls=true"
# An attacker could answer in plain text, so the text must not simply advise to switch TLS off.
INTERCEPTED: Final = "if it should speak TLS, an attacker may be intercepting the connection"
SPEAKS_NO_TLS: Final = f"it speaks no TLS: set useTls=false if it is meant to have none; {INTERCEPTED}"
LEAVE_TLS_OUT: Final = f"connect without TLS (useTls, --tls), or switch TLS on at the server; {INTERCEPTED}"

# OpenSSL's reasons, before and since 3.2, if the first bytes received are not TLS.
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
_TOO_OLD: Final = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})

# X509_V_ERR_* of OpenSSL's x509_vfy.h: not yet valid, expired; another host's name, another host's address.
OUT_OF_DATE_CODES: Final = frozenset({9, 10})
_OTHER_HOST: Final = frozenset({62, 64})

# Alerts about the client's certificate (RFC 8446 section 6.2); TLS 1.2 sends the second one for a missing certificate.
REFUSAL_ALERTS: Final = frozenset(
    {
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_ACCESS_DENIED",
    }
)

# Netty sends this, with the OpenSSL that RocketMQ ships, for a certificate of an unknown authority.
NO_REASON: Final = "TLSV1_ALERT_INTERNAL_ERROR"


class HandshakeError(ConnectionError):
    """The TLS handshake failed."""


class CertificateError(HandshakeError):
    """The client rejected the server's certificate, or the server rejects or lacks the client's."""


class DisagreementError(HandshakeError):
    """Only one side speaks TLS, or the TLS of one side is too old."""


def handshake_error(error: OSError, refusals: frozenset[str]) -> HandshakeError:
    """Return the error of a failed handshake, with a remedy; `refusals` as of `TlsSettings`."""
    hint = f"does the server speak TLS? If it is meant to have none, set useTls=false; {INTERCEPTED}"
    if isinstance(error, ssl.SSLError):
        if error.reason in refusals:
            return refusal(error)
        if error.reason in _TOO_OLD:
            return DisagreementError(f"{TOO_OLD} ({error.reason})")
        if error.reason in _NO_TLS:
            # This error is retriable, because a single changed bit causes it, too.
            return HandshakeError(
                f"what the server sent is not TLS ({error.reason}): correct the port, or set useTls=false if"
                f" the server is meant to have none; {INTERCEPTED}"
            )
        return HandshakeError(f"the TLS handshake failed ({error.reason or error}); {hint}")
    event = "server hung up during the TLS handshake" if isinstance(error, ConnectionError) else "TLS handshake failed"
    return HandshakeError(f"the {event} ({error}); {hint}")


def refusal(error: ssl.SSLError) -> CertificateError:
    """Return the error of an alert about this client's certificate."""
    return CertificateError(
        f"{OURS_REFUSED} ({error.reason}): set tlsCertFile and "
        "tlsKeyFile to a certificate that is signed by an authority that the server trusts, and has not expired, and "
        "to its key"
    )


def advice(verify_code: int, host: str, server_name: str | None) -> str:
    """Return what to do about a certificate that OpenSSL rejected with this code."""
    if verify_code in _OTHER_HOST:
        remedy = other_name(host, server_name)
        return remedy if server_name is not None else f"{remedy}; a broker is dialled by its brokerIP1"
    return OUT_OF_DATE if verify_code in OUT_OF_DATE_CODES else NOT_TRUSTED


def other_name(host: str, server_name: str | None) -> str:
    """Return what to do about a certificate that names neither `host` nor, if set, `server_name`."""
    named = f"{MUST_NAME} {host if server_name is None else server_name} (subjectAltName)"
    if server_name is not None:
        return f"{named}, which is the option tlsServerName; the server was dialled by {host}"
    return f"{named}, by which the server was dialled; or set tlsServerName to the one name that all certificates have"
