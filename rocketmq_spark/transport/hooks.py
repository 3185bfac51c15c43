"""What every request gets on its way out.

Rule 1: the order is that of RocketMQ's RPC hooks: namespaceV2 first, the signature last, for it covers what the others
        have added (spec/producer.md section 10.9).
Rule 2: a hook returns new ext fields and leaves the ones it was given, so that a resend begins with the caller's.
Rule 3: answers of ours to a server's requests pass no hook; the Java client does not sign them either.

Follows ``NamespaceRpcHook.java`` and ``AclClientRPCHook.java``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from rocketmq_spark.credentials import CredentialsProvider
from rocketmq_spark.message import Buffer
from rocketmq_spark.wire.acl import signed

RequestHook: TypeAlias = Callable[[Mapping[str, str], tuple[Buffer, ...]], Mapping[str, str]]


def request_hooks(namespace_v2: str, credentials: CredentialsProvider | None) -> tuple[RequestHook, ...]:
    """Return what is to be done to the ext fields of every request, given its body, in this order.

    Parameters
    ----------
    namespace_v2 : str
        Empty for none.
    credentials : CredentialsProvider or None
        Asked at each request. None: requests are not signed.
    """
    hooks: list[RequestHook] = []
    if namespace_v2:
        hooks.append(lambda ext_fields, _: {**ext_fields, "nsd": "true", "ns": namespace_v2})
    if credentials is not None:
        hooks.append(lambda ext_fields, body: signed(ext_fields, body, credentials.credentials()))
    return tuple(hooks)
