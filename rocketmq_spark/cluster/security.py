"""The security of a local cluster: its administrator, its users, and its TLS.

The administrator's secret key is drawn at random with the cluster, and servers sign their requests to each other as the
administrator. The name server alone knows no users. Secrets are in files for their owner only, and in no repr, log or
command line. Follows ``AuthConfig.java``, ``AuthenticationMetadataManagerImpl.java``, ``Resource.java``,
``TlsSystemConfig.java`` and ``TlsHelper.java``.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from rocketmq_spark.cluster.certificates import (
    Authority,
    Certificate,
    read_private,
    require_own_folder,
    require_trustme,
    write_private,
)
from rocketmq_spark.cluster.config import properties_text
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.errors import ClusterError, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.names import is_legal
from rocketmq_spark.options.kinds import ENV, FILE, is_padded, is_printable, is_reference
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.transport.tls import TlsSettings

Tls: TypeAlias = "bool | Literal['mutual']"

SERVER_NAMES: Final = ("127.0.0.1", "::1", "localhost")
"""The names that the servers' certificate is for."""

ADMINISTRATOR: Final = "admin"

# A user's name appears unescaped in a header of gRPC, which "/", "," and blanks divide, and in "User:name".
_NAME: Final = r"[A-Za-z0-9._-]+"

_AUTH: Final = "org.apache.rocketmq.auth"
_OF_PROXY: Final = "org.apache.rocketmq.proxy.auth"

_SECRET: Final = "admin.secret"
_TLS_FOLDER: Final = "tls"
_PROXYS_TLS: Final = ("tlsTestModeEnable", "tlsCertPath", "tlsKeyPath")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a cluster with TLS.

    All servers show `server`, also to each other. Clients need `client` if the servers demand a certificate.
    `properties` is the ``tls.config.file`` of the JVMs.
    """

    ca_file: Path
    server: Certificate
    client: Certificate | None
    properties: Path


@dataclass(frozen=True, slots=True)
class Security:
    """The demands of one cluster: signatures if `admin` is set, encrypted connections if `tls` is set."""

    admin: Credentials | None = None
    secret_file: Path | None = None
    tls: TlsFiles | None = field(default=None, repr=False)

    @classmethod
    def made(cls, directory: Path, *, auth: bool, tls: Tls) -> Security:
        """Return the security of a cluster, and write its keys and certificates into the cluster's folder.

        Raises a ClusterError if the folder can't be written, other users may write to it, or trustme is missing.
        """
        if auth or tls:
            require_own_folder(directory)
        secret_file = directory / _SECRET if auth else None
        admin = administrator(secret_file) if secret_file is not None else None
        return cls(admin, secret_file, _tls_files(directory / _TLS_FOLDER, mutual=tls == "mutual") if tls else None)

    @property
    def options(self) -> dict[str, str]:
        """The options of a DataFrame's read or write; the secret key is named by its file."""
        options: dict[str, str] = {}
        if self.admin is not None:
            options |= {"accessKey": self.admin.access_key, "secretKey": f"file:{self.secret_file}"}
        if self.tls is not None:
            options |= {"useTls": "true", "tlsCaFile": str(self.tls.ca_file)}
            if self.tls.client is not None:
                cert_file, key_file = self.tls.client
                options |= {"tlsCertFile": str(cert_file), "tlsKeyFile": str(key_file)}
        return options

    @property
    def mutual(self) -> bool:
        """True if clients must show a certificate."""
        return self.tls is not None and self.tls.client is not None

    @property
    def jvm_options(self) -> tuple[str, ...]:
        """The options of every server's JVM."""
        if self.tls is None:
            return ()
        # Without tls.enable some clients within a proxy connect without TLS.
        return ("-Dtls.server.mode=enforcing", "-Dtls.enable=true", f"-Dtls.config.file={self.tls.properties}")

    @property
    def broker_properties(self) -> dict[str, str]:
        """The properties of every broker; it knows only the administrator at first."""
        if self.admin is None:
            return {}
        user = {"username": self.admin.access_key, "password": self.admin.secret_key}
        return {
            **_auth_properties(self.admin),
            "initAuthenticationUser": json.dumps(user),
            "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
            "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
        }

    @property
    def proxy_properties(self) -> dict[str, object]:
        """The properties of the proxy, which has no users of its own but asks the brokers."""
        properties: dict[str, object] = {}
        if self.admin is not None:
            properties = {
                **_auth_properties(self.admin),
                "authenticationEnabled": True,
                "authorizationEnabled": True,
                "authenticationMetadataProvider": f"{_OF_PROXY}.ProxyAuthenticationMetadataProvider",
                "authorizationMetadataProvider": f"{_OF_PROXY}.ProxyAuthorizationMetadataProvider",
                # Otherwise it asks the brokers for their users without credentials.
                "enableAclRpcHookForClusterMode": True,
            }
        if self.tls is not None:
            files = {"tlsCertPath": str(self.tls.server.cert_file), "tlsKeyPath": str(self.tls.server.key_file)}
            properties |= {"tlsTestModeEnable": False, **files}
        return properties

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context of our requests to the servers, which trusts only the cluster's authority."""
        if self.tls is None:
            return None
        cert_file, key_file = map(str, self.tls.server)
        return TlsSettings(str(self.tls.ca_file), cert_file=cert_file, key_file=key_file).context()

    def hidden(self, text: str) -> str:
        """Return a text without the secret key."""
        return text.replace(self.admin.secret_key, "***") if self.admin is not None else text

    def remove_files(self) -> None:
        """Remove the secret key and the private keys."""
        if self.secret_file is not None:
            self.secret_file.unlink(missing_ok=True)
        for certificate in (self.tls.server, self.tls.client) if self.tls is not None else ():
            if certificate is not None:
                certificate.key_file.unlink(missing_ok=True)


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a DataFrame as `Producer` and `Admin` take them: ``use_tls=True`` for ``useTls=true``.

    Raises a ClusterError for an option of another release, which has left a cluster running.
    """
    fields = {spec.name: spec.field for spec in SINK_OPTIONS}
    unknown = ", ".join(name for name in options if name not in fields)
    if unknown:
        raise ClusterError(
            f"the cluster that was left running takes the option {unknown}, which this release does not know: stop it "
            "(rocketmq-spark cluster down), or name another cluster with -n host:9876"
        )
    return {fields[name]: value == "true" if name == "useTls" else value for name, value in options.items()}


def check_security(
    auth: bool,
    tls: Tls,
    *,
    broker_properties: Sequence[Mapping[str, object]],
    proxy_properties: Mapping[str, object],
    jvm_options: Sequence[str],
) -> None:
    """Raise a ClusterError for properties that contradict `auth` and `tls`, and for TLS without trustme."""
    if not isinstance(auth, bool):
        # The value is not shown, because it may be a secret.
        raise ClusterError(
            f"auth takes False or True, not a {type(auth).__name__}: keys are made, and users by create_user"
        )
    if not isinstance(tls, bool) and tls != "mutual":
        raise ClusterError(f"tls={tls!r}: allowed are False, True and 'mutual'")
    for option in jvm_options:
        if option.startswith("-Dtls."):
            raise ClusterError(
                f"jvm_options may not set {option.partition('=')[0]}: give tls=True, or tls='mutual' to have the"
                " servers demand a certificate of their clients"
            )
    if tls:
        require_trustme()
        _refuse(proxy_properties, _PROXYS_TLS, "proxy", "tls")
    if auth:
        own = Security(Credentials("", ""))
        for properties in broker_properties:
            _refuse(properties, own.broker_properties, "broker_properties", "auth")
        _refuse(proxy_properties, own.proxy_properties, "proxy", "auth")


def _refuse(given: Mapping[str, object], own: Mapping[str, object] | Sequence[str], where: str, parameter: str) -> None:
    for name in given:
        if name in own:
            raise ClusterError(f"{where} may not set {name} beside {parameter}=, which sets it: leave one of them out")


def _tls_files(folder: Path, *, mutual: bool) -> TlsFiles:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        authority = Authority(folder)
        server = authority.issue("server", *SERVER_NAMES)
        client = authority.issue("client", "client.localhost") if mutual else None
        files = TlsFiles(authority.ca_file, server, client, folder / "tls.properties")
        write_tls_properties(files)
    except OSError as exc:
        raise ClusterError(
            f"making certificates in {folder}: {exc}; set directory= to one that can be written"
        ) from exc
    return files


def write_tls_properties(files: TlsFiles) -> None:
    """Write the TLS properties of the JVMs: their certificate, and the authority that they trust."""
    ca, cert, key = str(files.ca_file), str(files.server.cert_file), str(files.server.key_file)
    properties = {
        # In the test mode each server makes its own certificate and trusts any.
        "tls.test.mode.enable": "false",
        "tls.server.certPath": cert,
        "tls.server.keyPath": key,
        "tls.client.certPath": cert,
        "tls.client.keyPath": key,
        "tls.client.trustCertPath": ca,
        "tls.client.authServer": "true",
    }
    if files.client is not None:
        properties |= {
            "tls.server.need.client.auth": "require",
            "tls.server.authClient": "true",
            "tls.server.trustCertPath": ca,
        }
    write_private(files.properties, properties_text(properties).encode("latin-1"))


def administrator(secret_file: Path) -> Credentials:
    """Return the administrator of a cluster, whose secret key is in a file; the file is created if it is missing.

    A folder that outlives its cluster keeps the brokers' users, and so the file beside them. Raises a ClusterError if
    the file can't be read or written, or another user may have written it.
    """
    try:
        if not os.path.lexists(secret_file):
            write_private(secret_file, secrets.token_urlsafe(32).encode())
        return Credentials(ADMINISTRATOR, read_private(secret_file).decode("ascii").strip())
    except (OSError, UnicodeError) as exc:
        # The text of a UnicodeError would show bytes of the secret.
        cause = exc.strerror if isinstance(exc, OSError) else type(exc).__name__
        raise ClusterError(f"reading the administrator's secret key in {secret_file}: {cause}") from exc


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
    """Create a user on all brokers, or on none of those that answer; see `LocalCluster.create_user`."""
    check_user(name, secret_key, publish=publish, subscribe=subscribe, groups=groups)
    addresses, doing = tuple(brokers), f"creating the user {name}"
    for address in addresses:
        # The answer about an unknown user is empty.
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
        # A user that some brokers know, or without rights, could not be created again.
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
    """Raise a ClusterError for a user that brokers would accept, but that could not connect or do what is meant."""
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
    """Yield the code, ext fields and body of each request that creates a user on a broker.

    A ``*`` at the end of a topic or group stands for all names that begin so.
    """
    user = {"username": name, "password": secret_key, "userType": "Normal"}
    yield RequestCode.AUTH_CREATE_USER, {"username": name}, json.dumps(user).encode()
    # A reader needs "Get" to ask for the offsets of a topic.
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
    # A broker understands only a '*' at the end, and cuts the name at the first one: "*-x" matches nothing, and "a*b*"
    # matches all that begins with "a" (Resource.of).
    return name == "*" or is_legal(name.removesuffix("*"))


def _auth_properties(admin: Credentials) -> dict[str, str]:
    inner = {"accessKey": admin.access_key, "secretKey": admin.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "innerClientAuthenticationCredentials": json.dumps(inner),
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    }
