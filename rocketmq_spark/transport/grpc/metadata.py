"""Makes the metadata (headers) of every call to a proxy: client id, request id, namespace, date, and maybe a signature.

With credentials, only the date is signed. All calls within one second share a signature.
docs/internals/grpc.md#metadata lists the keys. No repr and no error made here shows a secret.
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


class Signed(NamedTuple):
    """The metadata of a request, and the credentials that signed it."""

    request_id: str = ""
    metadata: Metadata = ()
    signed_by: Credentials | None = None

    def __repr__(self) -> str:
        # The metadata holds the security token, and a signature.
        return f"<Signed {self.request_id}>"


class MetadataSource:
    """Makes the metadata of one client's calls; safe for many threads. `wall_clock` returns epoch seconds.

    OptionError: namespace, access key or token have characters that a header cannot hold.
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
            # A proxy ends the stream of a client in an unknown language.
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "v2"),
            ("x-mq-client-version", version),
            ("x-mq-namespace", _printable("namespace", namespace)),
        )
        if isinstance(credentials, Credentials):
            _signature(credentials, "")
        # A second, and the metadata of its requests except their ids. Two threads may replace it at the same time.
        self._of_second = (-1, Signed())

    def __repr__(self) -> str:
        return f"<MetadataSource {self.client_id} {'signs' if self._credentials else 'does not sign'}>"

    def fresh(self) -> Signed:
        """Return the metadata of a new request."""
        now = int(self._wall_clock())
        second, signed = self._of_second
        if second != now:
            signed = self._signed_at(now)
            self._of_second = (now, signed)
        request_id = f"{self._end}-{next(self._numbers)}"
        return Signed(request_id, (*signed.metadata, ("x-mq-request-id", request_id)), signed.signed_by)

    def refused(self, signed_by: Credentials | None) -> None:
        """Report rejected credentials to the provider; the next request asks it again."""
        tell_refused(self._credentials, signed_by)
        self._of_second = (-1, Signed())

    def _signed_at(self, second: int) -> Signed:
        date_time = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        signed_by = None if self._credentials is None else self._credentials.credentials()
        try:
            signature = () if signed_by is None else _signature(signed_by, date_time)
        except OptionError as exc:
            # Fixed credentials were checked at the start.
            raise CredentialsError(str(exc)) from None
        return Signed("", (*self._static, ("x-mq-date-time", date_time), *signature), signed_by)


def _signature(credentials: Credentials, date_time: str) -> Metadata:
    _printable("accessKey", credentials.access_key)
    signature = ("authorization", authorization(credentials, date_time))
    token = ("x-mq-session-token", _printable("securityToken", credentials.security_token))
    return (token, signature) if credentials.security_token else (signature,)


def authorization(credentials: Credentials, date_time: str) -> str:
    """Return the header that signs a date-time; nothing else of a request is signed."""
    # Invalid Unicode is accepted, because an error would contain the text.
    key = credentials.secret_key.encode("utf-8", "surrogatepass")
    signature = hmac.new(key, date_time.encode("ascii"), "sha1").hexdigest().upper()
    return f"MQv2-HMAC-SHA1 Credential={credentials.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}"


def _printable(option: str, value: str) -> str:
    """Return a value that a header can hold; the error does not show it, because it may be a secret."""
    if not (value.isascii() and value.isprintable()):
        raise OptionError(f"option {option}: gRPC cannot send its characters; use printable ASCII only")
    return value
