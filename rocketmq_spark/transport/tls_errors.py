"""Why two sides do not come to speak TLS, and what to do about it.

Rule 1: an error of the handshake says what to do about it.
Rule 2: an alert that is about our certificate is told from all others: another attempt would not change it.
"""

from __future__ import annotations

import ssl
from typing import Final

from rocketmq_spark.wire import tls_words

# How OpenSSL, and that of 3.2 and newer, says that the first bytes were none of its own.
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})

_TOO_OLD: Final = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})

# X509_V_ERR_* of OpenSSL's x509_vfy.h: not yet valid, expired; another host's name, another host's address.
OUT_OF_DATE: Final = frozenset({9, 10})
_OTHER_HOST: Final = frozenset({62, 64})

# What a server says of the client's certificate (RFC 8446 section 6.2), as OpenSSL names it; the second alert is what
# TLS 1.2 has for a missing one.
OURS_REFUSED: Final = frozenset(
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

# What Netty says, with the OpenSSL that RocketMQ brings, of a certificate that it finds no authority for.
NO_REASON: Final = "TLSV1_ALERT_INTERNAL_ERROR"


class HandshakeError(ConnectionError):
    """The TLS handshake failed."""


class CertificateError(HandshakeError):
    """A certificate was refused: the server's, or ours."""


class DisagreementError(HandshakeError):
    """One side speaks TLS, and the other does not."""


def handshake_error(error: OSError, refusals: frozenset[str]) -> HandshakeError:
    """Return the error of a handshake that can't succeed, and what to do about it.

    Parameters
    ----------
    error : OSError
    refusals : frozenset of str
        See `TlsSettings.refusals`.
    """
    hint = f"does it speak TLS? Else set useTls=false; {tls_words.INTERCEPTED}"
    if isinstance(error, ssl.SSLError):
        if error.reason in refusals:
            return refusal(error)
        if error.reason in _TOO_OLD:
            return DisagreementError(f"{tls_words.TOO_OLD} ({error.reason})")
        if error.reason in _NO_TLS:
            # One bit that changed on its way would do, too: whoever has the address finds out.
            return HandshakeError(
                f"what the server sent is not TLS ({error.reason}): correct the port, or set useTls=false if it is"
                f" meant to have none; {tls_words.INTERCEPTED}"
            )
        return HandshakeError(f"the TLS handshake failed ({error.reason or error}); {hint}")
    if isinstance(error, ConnectionError):
        return HandshakeError(f"the server hung up during the TLS handshake ({error}); {hint}")
    return HandshakeError(f"the TLS handshake failed ({error}); {hint}")


def refusal(error: ssl.SSLError) -> CertificateError:
    """Return the error that one of `TlsSettings.refusals` stands for."""
    return CertificateError(
        f"{tls_words.OURS_REFUSED} ({error.reason}): set tlsCertFile and "
        "tlsKeyFile to a certificate that is signed by an authority that the server trusts, and has not expired, and "
        "to its key"
    )


def advice(verify_code: int, host: str, server_name: str | None) -> str:
    """Return what is to be done about a certificate that OpenSSL does not take, by its code."""
    if verify_code in _OTHER_HOST:
        remedy = tls_words.other_name(host, server_name)
        return remedy if server_name is not None else f"{remedy}; a broker is dialled by its brokerIP1"
    return tls_words.OUT_OF_DATE if verify_code in OUT_OF_DATE else tls_words.NOT_TRUSTED
