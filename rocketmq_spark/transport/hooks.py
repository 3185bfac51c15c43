"""What every request gets on its way out.

Rule 1: the order is that of RocketMQ's RPC hooks: namespaceV2 first, the signature last, for it covers what the others
        have added (spec/producer.md section 10.9).
Rule 2: the ext fields that are given are left as they are, so that a resend begins with the caller's.
Rule 3: answers of ours to a server's requests pass no hook; the Java client does not sign them either.

Follows ``NamespaceRpcHook.java`` and ``AclClientRPCHook.java``.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.credentials import Credentials, CredentialsProvider, gives_another, tell_refused
from rocketmq_spark.message import Buffer
from rocketmq_spark.wire.acl import signed


class RequestHooks:
    """What is done to the ext fields of every request of a transport.

    Parameters
    ----------
    namespace_v2 : str, default ""
        Empty for none.
    credentials : CredentialsProvider, optional
        Asked at each request. Default: requests are not signed.
    """

    def __init__(self, namespace_v2: str = "", credentials: CredentialsProvider | None = None) -> None:
        self._namespace = {"nsd": "true", "ns": namespace_v2} if namespace_v2 else {}
        self._credentials = credentials

    def apply(
        self, ext_fields: Mapping[str, str], body: tuple[Buffer, ...]
    ) -> tuple[Mapping[str, str], Credentials | None]:
        """Return what goes out for a caller's ext fields, and who has signed it."""
        if self._namespace:
            ext_fields = {**ext_fields, **self._namespace}
        if self._credentials is None:
            return ext_fields, None
        credentials = self._credentials.credentials()
        return signed(ext_fields, body, credentials), credentials

    def refused(self, credentials: Credentials) -> None:
        """Tell whoever gave these that a server does not take them."""
        tell_refused(self._credentials, credentials)

    def gives_another(self, refused: Credentials) -> bool:
        """Return whether others than those that a server refused would sign now; see `credentials.gives_another`."""
        return gives_another(self._credentials, refused)
