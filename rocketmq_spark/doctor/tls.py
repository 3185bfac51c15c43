"""What to do where the handshake with a server fails."""

from __future__ import annotations

from typing import Final

from rocketmq_spark.doctor.check import FAILED, Check
from rocketmq_spark.errors import RemotingTlsException
from rocketmq_spark.wire.tls_words import (
    DEMANDS_TLS,
    LEAVE_TLS_OUT,
    MUST_NAME,
    NOT_TRUSTED,
    OURS_REFUSED,
    OUT_OF_DATE,
    SPEAKS_NO_TLS,
    TOO_OLD,
)

# By the words of the error, looked up by "contains".
_MENDS: Final = (
    (OURS_REFUSED, "give a certificate (tlsCertFile, --tls-cert-file) and its key (tlsKeyFile, --tls-key-file)"),
    (MUST_NAME, "give the name that the certificate has (tlsServerName, --tls-server-name), or dial that name"),
    (OUT_OF_DATE, "give the server a new certificate, or set the clocks"),
    (NOT_TRUSTED, "give the authority's file (tlsCaFile, --tls-ca-file)"),
    (TOO_OLD, "have the server speak TLS 1.2 or newer"),
    (DEMANDS_TLS, "switch TLS on (useTls=true, --tls)"),
    (SPEAKS_NO_TLS, LEAVE_TLS_OUT),
)
_OTHERWISE: Final = "look at the server's certificate, and at the options of TLS"


def handshake_failed(name: str, exc: RemotingTlsException) -> Check:
    """Return the finding, and what is to be done about it with the options of the command line."""
    said = str(exc)
    mend = next((mend for words, mend in _MENDS if words in said), _OTHERWISE)
    # The handshake's own words: whose request it was, or that no other server gave a route, does not matter here.
    return Check(name, FAILED, str(exc.__cause__ or exc), mend)
