"""What to change where two sides do not come to speak TLS, in the words that the errors of both protocols have."""

from __future__ import annotations

from typing import Final

NOT_TRUSTED: Final = (
    "the server's certificate is not trusted; set tlsCaFile to the certificate of the authority that signed it"
)
OUT_OF_DATE: Final = "the server needs a new certificate, or a clock is wrong"
MUST_NAME: Final = "the server's certificate must name"
OURS_REFUSED: Final = "the server refuses this client's certificate, or demands one"
TOO_OLD: Final = "the server's TLS is older than 1.2, which is the oldest allowed: update the server"
DEMANDS_TLS: Final = "it demands TLS: set useTls=true"
# A man in the middle who answers in plain text must not make the user switch TLS off.
INTERCEPTED: Final = "if it should speak TLS, somebody may be intercepting the connection"
SPEAKS_NO_TLS: Final = f"it speaks no TLS: set useTls=false if it is meant to have none; {INTERCEPTED}"
LEAVE_TLS_OUT: Final = f"leave TLS out (useTls, --tls), or switch it on there; {INTERCEPTED}"


def other_name(host: str, server_name: str | None) -> str:
    """Return what is to be done about a certificate for another name than `host`, or `server_name` if that is set."""
    if server_name is not None:
        return (
            f"{MUST_NAME} {server_name} (subjectAltName), which is the option tlsServerName; the server was dialled by "
            f"{host}"
        )
    return (
        f"{MUST_NAME} {host} (subjectAltName), by which the server was dialled; or set tlsServerName to the one name "
        "that all certificates have"
    )
