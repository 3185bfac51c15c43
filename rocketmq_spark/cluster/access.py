"""Access control of one cluster: who it knows when it starts, and how it gets to know more.

Rule 1: an administrator is made with the cluster, and its secret key is drawn for it: no default password anywhere.
Rule 2: servers sign what they ask of each other as the administrator (``innerClientAuthenticationCredentials``).
Rule 3: a proxy keeps no users of its own, it asks the brokers for them.
Rule 4: who is not the administrator may do what it was given, and nothing else.

Follows spec/remoting.md section 15, ``AuthConfig.java``, ``AuthenticationMetadataManagerImpl.java``, ``Resource.java``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rocketmq_spark.cluster.certificates import write_private
from rocketmq_spark.credentials import Credentials
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.wire.codes import RequestCode

ADMINISTRATOR: Final = "admin"

_AUTH: Final = "org.apache.rocketmq.auth"
_OF_PROXY: Final = "org.apache.rocketmq.proxy.auth"


def administrator(secret_file: Path) -> Credentials:
    """Return the administrator of a cluster, whose secret key is in a file; made if there is none.

    A folder that outlives its cluster keeps the brokers' users, and so the file beside them.

    Raises
    ------
    ClusterError
        The file can't be read or written.
    """
    try:
        if not secret_file.exists():
            write_private(secret_file, secrets.token_urlsafe(32).encode())
        return Credentials(ADMINISTRATOR, secret_file.read_text(encoding="ascii").strip())
    except (OSError, UnicodeError) as exc:
        raise ClusterError(f"the administrator's secret key in {secret_file}: {type(exc).__name__}") from exc


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


def _properties(admin: Credentials) -> dict[str, str]:
    inner = {"accessKey": admin.access_key, "secretKey": admin.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "innerClientAuthenticationCredentials": json.dumps(inner),
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    }
