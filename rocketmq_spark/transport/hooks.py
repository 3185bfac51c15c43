"""What every request gets on its way out.

Rule 1: the order is that of RocketMQ's RPC hooks: namespaceV2 first, the signature last, for it covers what the others
        have added (spec/producer.md section 10.9).
Rule 2: requests to name servers are signed only with `sign_name_server_requests`. A signature is valid for other
        requests with the same fields, and a false name server would collect it. (Java signs them, too.)
Rule 3: the ext fields that are given are left as they are, so that a resend begins with the caller's.
Rule 4: answers of ours to a server's requests pass no hook; the Java client does not sign them either.

Follows ``NamespaceRpcHook.java`` and ``AclClientRPCHook.java``.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.credentials import Credentials, CredentialsProvider, gives_another, tell_refused
from rocketmq_spark.message import Buffer
from rocketmq_spark.wire.acl import signed
from rocketmq_spark.wire.codes import NAME_SERVER_REQUESTS


class RequestHooks:
    """What is done to the ext fields of every request of a transport.

    Parameters
    ----------
    namespace_v2 : str, default ""
        Empty for none.
    credentials : CredentialsProvider, optional
        Asked at each request that is signed. Default: requests are not signed.
    sign_name_server_requests : bool, default False
    """

    def __init__(
        self,
        namespace_v2: str = "",
        credentials: CredentialsProvider | None = None,
        *,
        sign_name_server_requests: bool = False,
    ) -> None:
        self._namespace = {"nsd": "true", "ns": namespace_v2} if namespace_v2 else {}
        self._credentials = credentials
        self._unsigned = frozenset() if sign_name_server_requests else NAME_SERVER_REQUESTS

    def apply(
        self, code: int, ext_fields: Mapping[str, str], body: tuple[Buffer, ...]
    ) -> tuple[Mapping[str, str], Credentials | None]:
        """Return what goes out for a caller's ext fields, and who has signed it."""
        if self._namespace:
            ext_fields = {**ext_fields, **self._namespace}
        if self._credentials is None or code in self._unsigned:
            return ext_fields, None
        credentials = self._credentials.credentials()
        return signed(ext_fields, body, credentials), credentials

    def leaves_unsigned(self, code: int) -> bool:
        """Return whether a request of this code is sent without the signature that the credentials could make."""
        return self._credentials is not None and code in self._unsigned

    def refused(self, credentials: Credentials) -> None:
        """Tell whoever gave these that a server does not take them."""
        tell_refused(self._credentials, credentials)

    def gives_another(self, refused: Credentials) -> bool:
        """Return whether others than those that a server refused would sign now; see `credentials.gives_another`."""
        return gives_another(self._credentials, refused)
