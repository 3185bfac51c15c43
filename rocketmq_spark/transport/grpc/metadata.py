"""The metadata of every call to a proxy: client id, namespace and signature.

A proxy keys settings and registrations by the client id, so a random end makes it unique. Date-time (UTC) and signature
are renewed at most once a second. HTTP/2 allows printable ASCII values only. No repr and no error shows a secret.
"""

from __future__ import annotations

import hmac
import itertools
import random as random_module
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from rocketmq_spark.errors import CredentialsError, OptionError
from rocketmq_spark.model.credentials import Credentials, CredentialsProvider, tell_refused

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Fresh(NamedTuple):
    """The id of a new request, its metadata, and the credentials that signed it."""

    request_id: str
    metadata: Metadata
    signed_by: Credentials | None

    def __repr__(self) -> str:
        # The metadata holds the security token, and a signature.
        return f"<Fresh {self.request_id}>"


class MetadataSource:
    """Makes the metadata of one client's calls; safe for many threads.

    Proxies list clients with `client_id`, to which a random end is added, and `version`. `wall_clock` returns epoch
    seconds. OptionError: namespace, access key or token have characters that no header can hold.
    """

    def __init__(
        self,
        client_id: str,
        version: str,
        credentials: CredentialsProvider | None = None,
        namespace: str = "",
        *,
        random: random_module.Random | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._end = f"{(random or random_module.SystemRandom()).getrandbits(64):016x}"
        self.client_id = f"{client_id.encode('unicode_escape').decode()}@{self._end}"
        self._numbers = itertools.count(1)
        self._credentials = credentials
        self._wall_clock = wall_clock
        self._static = (
            ("x-mq-client-id", self.client_id),
            # A proxy ends the stream of a client whose language it does not know.
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", version),
            ("x-mq-namespace", _printable("namespace", namespace)),
        )
        if isinstance(credentials, Credentials):
            _signature(credentials, "")
        # Replaced as a whole: two threads at the turn of a second may both make it, and either will do.
        self._of_second = _Signed()

    def __repr__(self) -> str:
        return f"<MetadataSource {self.client_id} {'signs' if self._credentials else 'does not sign'}>"

    def fresh(self) -> Fresh:
        """Return the metadata of a new request."""
        second = int(self._wall_clock())
        made = self._of_second
        if made.second != second:
            made = self._of_second = self._made_for(second)
        request_id = f"{self._end}-{next(self._numbers)}"
        return Fresh(request_id, (*made.metadata, ("x-mq-request-id", request_id)), made.signed_by)

    def refused(self, signed_by: Credentials | None) -> None:
        """Report rejected credentials to the provider; the next call asks it again."""
        tell_refused(self._credentials, signed_by)
        self._of_second = _Signed()

    def _made_for(self, second: int) -> _Signed:
        date_time = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        signed_by = None if self._credentials is None else self._credentials.credentials()
        try:
            signature = () if signed_by is None else _signature(signed_by, date_time)
        except OptionError as exc:
            # Fixed credentials were checked at the start.
            raise CredentialsError(str(exc)) from None
        return _Signed(second, (*self._static, ("x-mq-date-time", date_time), *signature), signed_by)


class _Signed(NamedTuple):
    """The metadata of all requests of one second; -1 before the first."""

    second: int = -1
    metadata: Metadata = ()
    signed_by: Credentials | None = None

    def __repr__(self) -> str:
        return f"<_Signed second={self.second}>"


def _signature(credentials: Credentials, date_time: str) -> Metadata:
    _printable("accessKey", credentials.access_key)
    signature = ("authorization", authorization(credentials, date_time))
    token = ("x-mq-session-token", _printable("securityToken", credentials.security_token))
    return (token, signature) if credentials.security_token else (signature,)


def authorization(credentials: Credentials, date_time: str) -> str:
    """Return the header that signs a date-time, which is all that is signed."""
    # Text that is not Unicode passes: an error would hold it.
    key = credentials.secret_key.encode("utf-8", "surrogatepass")
    signature = hmac.new(key, date_time.encode("ascii"), "sha1").hexdigest().upper()
    return f"MQv2-HMAC-SHA1 Credential={credentials.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"


def _printable(option: str, value: str) -> str:
    """Return a value that a header can hold; the error does not show it, because it may be a secret."""
    if not (value.isascii() and value.isprintable()):
        raise OptionError(f"option {option}: over gRPC only printable ASCII characters are allowed, it has others")
    return value
