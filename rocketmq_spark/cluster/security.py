"""What the servers of a cluster demand of who connects, and what it takes to satisfy them.

Rule 1: what it demands, all its servers demand, of each other too; the name server alone knows no users.
Rule 2: what it sets by itself, its user does not: that is refused before anything starts, not silently overruled.
Rule 3: secrets are in files for their owner only, and show nowhere else: no repr, no log, no command line.

Follows spec/remoting.md sections 2.4 and 15, ``TlsSystemConfig.java``, ``TlsHelper.java``.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from rocketmq_spark.cluster import access
from rocketmq_spark.cluster.certificates import (
    Authority,
    Certificate,
    require_own_folder,
    require_trustme,
    write_private,
)
from rocketmq_spark.cluster.config import properties_text
from rocketmq_spark.credentials import Credentials
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.option_table import SINK_OPTIONS
from rocketmq_spark.transport.tls import TlsSettings

Tls: TypeAlias = "bool | Literal['mutual']"

SERVER_NAMES: Final = ("127.0.0.1", "::1", "localhost")
"""What the servers' certificate is for."""

_SECRET: Final = "admin.secret"
_TLS_FOLDER: Final = "tls"
_PROXYS_TLS: Final = ("tlsTestModeEnable", "tlsCertPath", "tlsKeyPath")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a cluster with TLS.

    Parameters
    ----------
    ca_file : Path
        The certificate of the cluster's authority.
    server : Certificate
        That all servers show, to clients and to each other.
    client : Certificate or None
        For clients, where the servers demand one.
    properties : Path
        What the JVMs are told (``tls.config.file``).
    """

    ca_file: Path
    server: Certificate
    client: Certificate | None
    properties: Path


@dataclass(frozen=True, slots=True)
class Security:
    """What one cluster demands; by default nothing.

    Parameters
    ----------
    admin : Credentials or None
        The administrator, where users must sign.
    secret_file : Path or None
        Where the administrator's secret key is.
    tls : TlsFiles or None
        Where connections must be encrypted.
    """

    admin: Credentials | None = None
    secret_file: Path | None = None
    tls: TlsFiles | None = field(default=None, repr=False)

    @classmethod
    def made(cls, directory: Path, *, auth: bool, tls: Tls) -> Security:
        """Make administrator and certificates in a cluster's folder.

        Raises
        ------
        ClusterError
            The folder can't be written, other users may write to it, or the package trustme is missing.
        """
        if auth or tls:
            require_own_folder(directory)
        secret_file = directory / _SECRET if auth else None
        admin = access.administrator(secret_file) if secret_file is not None else None
        return cls(admin, secret_file, _tls_files(directory / _TLS_FOLDER, mutual=tls == "mutual") if tls else None)

    @property
    def options(self) -> dict[str, str]:
        """The options of a DataFrame's read or write that satisfy the servers; none holds a secret itself."""
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
        """Whether clients must show a certificate."""
        return self.tls is not None and self.tls.client is not None

    @property
    def jvm_options(self) -> tuple[str, ...]:
        """What every server is told on its command line."""
        if self.tls is None:
            return ()
        # Some clients within a proxy would connect without TLS, whatever the servers demand.
        return ("-Dtls.server.mode=enforcing", "-Dtls.enable=true", f"-Dtls.config.file={self.tls.properties}")

    @property
    def broker_properties(self) -> dict[str, str]:
        """What every broker is told in its configuration."""
        return access.broker_properties(self.admin) if self.admin is not None else {}

    @property
    def proxy_properties(self) -> dict[str, object]:
        """What the proxy is told in its configuration."""
        properties = access.proxy_properties(self.admin) if self.admin is not None else {}
        if self.tls is not None:
            files = {"tlsCertPath": str(self.tls.server.cert_file), "tlsKeyPath": str(self.tls.server.key_file)}
            properties |= {"tlsTestModeEnable": False, **files}
        return properties

    def context(self) -> ssl.SSLContext | None:
        """Return how the cluster itself connects to its servers: it trusts its own authority and no other."""
        if self.tls is None:
            return None
        cert_file, key_file = map(str, self.tls.server)
        return TlsSettings(str(self.tls.ca_file), cert_file=cert_file, key_file=key_file).context()

    def hidden(self, text: str) -> str:
        """Return a text without the secret key."""
        return text.replace(self.admin.secret_key, "***") if self.admin is not None else text

    def remove_files(self) -> None:
        """Remove all that could let somebody in."""
        if self.secret_file is not None:
            self.secret_file.unlink(missing_ok=True)
        for certificate in (self.tls.server, self.tls.client) if self.tls is not None else ():
            if certificate is not None:
                certificate.key_file.unlink(missing_ok=True)


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a DataFrame as `Producer` and `Admin` take them: ``use_tls=True`` for ``useTls=true``.

    Raises
    ------
    ClusterError
        One of them is of another release, which has left a cluster running.
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
    """Refuse what contradicts `auth` and `tls`, and TLS that nothing can make certificates for.

    Raises
    ------
    ClusterError
    """
    if not isinstance(auth, bool):
        # Not shown: it may be a secret that was thought to belong here.
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
        nobody = Credentials("", "")
        for properties in broker_properties:
            _refuse(properties, access.broker_properties(nobody), "broker_properties", "auth")
        _refuse(proxy_properties, access.proxy_properties(nobody), "proxy", "auth")


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
    """Write what the JVMs are told: whom they show to be, and whom they trust."""
    ca, cert, key = str(files.ca_file), str(files.server.cert_file), str(files.server.key_file)
    properties = {
        # In which each server makes a certificate of its own and trusts any.
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
