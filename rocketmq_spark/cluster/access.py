"""Access control of one cluster: who it knows when it starts, and how it gets to know more.

Rule 1: an administrator is made with the cluster, and its secret key is drawn for it: no default password anywhere.
Rule 2: servers sign what they ask of each other as the administrator (``innerClientAuthenticationCredentials``).
Rule 3: a proxy keeps no users of its own, it asks the brokers for them.
Rule 4: who is not the administrator may do what it was given, and nothing else.
Rule 5: all brokers know a user, or none does, but for one that goes away in between, which is said. With the user go
        its rights.
Rule 6: brokers take any name and any secret. What they or our own options would read otherwise than it was meant is
        refused here.

Follows spec/remoting.md section 15, ``AuthConfig.java``, ``AuthenticationMetadataManagerImpl.java``, ``Resource.java``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster.certificates import read_private, write_private
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.credentials import Credentials
from rocketmq_spark.errors import ClusterError, RocketMQError
from rocketmq_spark.names import is_legal
from rocketmq_spark.option_values import ENV, FILE, is_padded, is_printable, is_reference
from rocketmq_spark.wire.codes import RequestCode

ADMINISTRATOR: Final = "admin"

# It stands unescaped in a header of gRPC, which "/", "," and blanks divide, and in "User:name".
_NAME: Final = r"[A-Za-z0-9._-]+"

_AUTH: Final = "org.apache.rocketmq.auth"
_OF_PROXY: Final = "org.apache.rocketmq.proxy.auth"


def administrator(secret_file: Path) -> Credentials:
    """Return the administrator of a cluster, whose secret key is in a file; made if there is none.

    A folder that outlives its cluster keeps the brokers' users, and so the file beside them.

    Raises
    ------
    ClusterError
        The file can't be read or written, or another user may have written it.
    """
    try:
        if not os.path.lexists(secret_file):
            write_private(secret_file, secrets.token_urlsafe(32).encode())
        return Credentials(ADMINISTRATOR, read_private(secret_file).decode("ascii").strip())
    except (OSError, UnicodeError) as exc:
        # The text of a UnicodeError would show bytes of the secret.
        cause = exc.strerror if isinstance(exc, OSError) else type(exc).__name__
        raise ClusterError(f"reading the administrator's secret key in {secret_file}: {cause}") from exc


def broker_properties(admin: Credentials) -> dict[str, str]:
    """Return the properties of a broker that knows the administrator and nobody else."""
    user = {"username": admin.access_key, "password": admin.secret_key}
    return {
        **_properties(admin),
        "initAuthenticationUser": json.dumps(user),
        "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
        "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    }


def proxy_properties(admin: Credentials) -> dict[str, object]:
    """Return the properties of a proxy that lets in whom the brokers know."""
    return {
        **_properties(admin),
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "authenticationMetadataProvider": f"{_OF_PROXY}.ProxyAuthenticationMetadataProvider",
        "authorizationMetadataProvider": f"{_OF_PROXY}.ProxyAuthorizationMetadataProvider",
        # Else it asks the brokers for their users without credentials of its own.
        "enableAclRpcHookForClusterMode": True,
    }


def create_user(
    probe: Probe,
    brokers: Iterable[str],
    name: str,
    secret_key: str,
    *,
    publish: Sequence[str],
    subscribe: Sequence[str],
    groups: Sequence[str],
) -> None:
    """Have all brokers know a user, or none of those that answer; see `LocalCluster.create_user`."""
    check_user(name, secret_key, publish=publish, subscribe=subscribe, groups=groups)
    addresses, doing = tuple(brokers), f"creating the user {name}"
    for address in addresses:
        # Who is unknown is no error: an empty answer.
        if probe.ask(address, RequestCode.AUTH_GET_USER, {"username": name}, doing).body:
            raise ClusterError(
                f"{doing}: the broker at {address} knows that user already, and keeps its secret key and rights (so "
                "does a folder that was named by directory=, for the next cluster in it): use what it was created "
                "with, or take another name"
            )
    try:
        for code, fields, body in user_requests(name, secret_key, publish, subscribe, groups):
            for address in addresses:
                probe.ask(address, code, fields, doing, body)
    except RocketMQError as exc:
        # Known to some, or without rights, the user could not be made again.
        kept = []
        for address in addresses:
            try:
                probe.ask(address, RequestCode.AUTH_DELETE_USER, {"username": name}, f"taking back the user {name}")
            except RocketMQError:
                kept.append(address)
        if not kept:
            raise
        raise ClusterError(
            f"{exc}; and it could not be taken back from {', '.join(kept)}, which may know the user now: take another "
            "name, or start the cluster anew"
        ) from exc


def check_user(
    name: str, secret_key: str, *, publish: Sequence[str], subscribe: Sequence[str], groups: Sequence[str]
) -> None:
    """Refuse a user that could not do what it is meant to; no secret key is shown.

    Raises
    ------
    ClusterError
    """
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise ClusterError(f"creating the user {name!r}: allowed in a name are letters, digits, '.', '_' and '-'")
    doing = f"creating the user {name}"
    if not isinstance(secret_key, str) or not is_printable(secret_key) or is_padded(secret_key):
        raise ClusterError(
            f"{doing}: secret_key must be a text that is not blank, without control characters and blanks around it"
        )
    if is_reference(secret_key):
        raise ClusterError(
            f"{doing}: secret_key begins with {ENV} or {FILE}, which the option secretKey takes for the place of a "
            "secret; give the secret itself"
        )
    for parameter, names in (("publish", publish), ("subscribe", subscribe), ("groups", groups)):
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise ClusterError(
                f"{doing}: {parameter}={names!r} is no list of names; give one, as in ['orders', 'new-*']"
            )
        for resource in names:
            if not isinstance(resource, str) or not _is_resource(resource):
                raise ClusterError(
                    f"{doing}: {parameter} names {resource!r}; allowed are names (letters, digits, '%', '|', '_' and "
                    "'-'), the beginning of names with a '*' after it, and '*' alone for all"
                )


def user_requests(
    name: str, secret_key: str, publish: Iterable[str], subscribe: Iterable[str], groups: Iterable[str]
) -> Iterator[tuple[RequestCode, dict[str, str], bytes]]:
    """Yield what makes a broker know a user: code, ext fields and body of each request.

    Parameters
    ----------
    name, secret_key : str
    publish, subscribe, groups : iterable of str
        Topics, topics and consumer groups; a ``*`` at the end of a name stands for all that begin so.
    """
    user = {"username": name, "password": secret_key, "userType": "Normal"}
    yield RequestCode.AUTH_CREATE_USER, {"username": name}, json.dumps(user).encode()
    # Without "Get" a reader could not ask for the offsets that it is to begin with.
    rights = (("Topic", publish, ["Pub"]), ("Topic", subscribe, ["Sub", "Get"]), ("Group", groups, ["Sub"]))
    entries = [
        {"resource": f"{kind}:{resource}", "actions": actions, "decision": "Allow"}
        for kind, resources, actions in rights
        for resource in resources
    ]
    if entries:
        subject = f"User:{name}"
        acl = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
        yield RequestCode.AUTH_CREATE_ACL, {"subject": subject}, json.dumps(acl).encode()


def _is_resource(name: str) -> bool:
    # A broker looks at no other '*' than the last character's, and then for the first: "*-x" is nobody's name, and
    # "a*b*" is whatever begins with "a" (Resource.of).
    return name == "*" or is_legal(name.removesuffix("*"))


def _properties(admin: Credentials) -> dict[str, str]:
    inner = {"accessKey": admin.access_key, "secretKey": admin.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "innerClientAuthenticationCredentials": json.dumps(inner),
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    }
