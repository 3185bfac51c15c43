"""How a namespace becomes part of the names of topics and groups, and leaves them again.

    wrap("A", "T") = "A%T"        wrap("A", "%RETRY%G") = "%RETRY%A%G"        unwrap("%DLQ%A%G", "A") = "%DLQ%G"

Rule 1: wrapping twice is wrapping once, and the broker's own names are never wrapped.
Rule 2: no namespace, an empty and a blank one are the same: nothing is wrapped (spec/producer.md 16.5).
Rule 3: a namespace holds no ``%``: the name behind it could not be told apart from it any more.

Follows ``NamespaceUtil.java`` and ``NameServerAddressUtils.java`` (spec/producer.md section 3.6).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from rocketmq_spark.errors import MQClientException
from rocketmq_spark.names import DLQ_PREFIX, RETRY_PREFIX, is_blank, is_system_group, is_system_topic

_SEPARATOR: Final = "%"
_INSTANCE_ADDRESS: Final = re.compile(r"(?:\w+://)?(MQ_INST_\w+_\w+)\..*", re.ASCII)


def wrap(namespace: str | None, resource: str) -> str:
    """Return the name that brokers know a topic or group of `namespace` under.

    Raises
    ------
    MQClientException
        Code -1: the namespace holds ``%``.
    """
    if is_none(namespace) or not resource or is_system_topic(resource) or is_system_group(resource):
        return resource
    check_namespace(namespace)
    prefix, bare = _split(resource)
    own = f"{namespace}{_SEPARATOR}"
    return resource if bare.startswith(own) else prefix + own + bare


def unwrap(resource: str, namespace: str | None) -> str:
    """Return the name that `wrap` was given; a name of another namespace, or of none, as it is.

    Raises
    ------
    MQClientException
        Code -1: the namespace holds ``%``.
    """
    if is_none(namespace):
        return resource
    check_namespace(namespace)
    prefix, bare = _split(resource)
    return prefix + bare.removeprefix(f"{namespace}{_SEPARATOR}")


def bare_name(resource: str, namespace: str | None) -> str | None:
    """Return the name that `wrap` was given; None for a name of another namespace, or of none.

    Raises
    ------
    MQClientException
        Code -1: the namespace holds ``%``.
    """
    name = unwrap(resource, namespace)
    # A name of another namespace, or of none, is not changed by taking this one's off.
    own = is_none(namespace) or (name != resource and wrap(namespace, name) == resource)
    return name if own else None


def namespace_of(name_server_address: str) -> str | None:
    """Return the namespace that an address of the form ``[scheme://]MQ_INST_<w>_<w>.<rest>`` stands for, else None."""
    found = _INSTANCE_ADDRESS.fullmatch(name_server_address)
    return found[1] if found else None


def effective_namespace(namespace: str | None, name_server: Sequence[str]) -> str | None:
    """Return the namespace of a client, None for none (``ClientConfig.getNamespace``).

    Parameters
    ----------
    namespace : str or None
        The option, which wins over the address.
    name_server : sequence of str
        Addresses without a scheme. Only the first one counts, as in Java. Empty over gRPC.
    """
    return namespace or (namespace_of(name_server[0]) if name_server else None)


def is_none(namespace: str | None) -> bool:
    """Return whether `namespace` stands for none."""
    return namespace is None or is_blank(namespace)


def check_namespace(namespace: str | None) -> None:
    """Refuse a namespace that names could not be unwrapped from.

    Raises
    ------
    MQClientException
        Code -1: it holds ``%``.
    """
    if namespace is not None and _SEPARATOR in namespace:
        raise MQClientException(f"namespace {namespace!r} holds '%', which ends a namespace: name one without it")


def _split(resource: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if resource.startswith(prefix):
            return prefix, resource.removeprefix(prefix)
    return "", resource
