"""The security of a local cluster: its administrator, its certificates, and checks of its folder's permissions.

With access control, brokers and proxy sign their requests to each other as the administrator; the name server verifies
no signatures. Files with secrets are readable only by their owner. The servers' logs are such files. No repr and no
command line has a secret. All servers share one certificate, also as clients of each other. The private key of its
authority is not saved. The saved keys are unencrypted PKCS#8, which RocketMQ can read
(docs/internals/access-control.md#tls).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from rocketmq_spark.cluster.config import os_errors, properties_text, refuse_properties
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.transport.tls import TlsSettings

if TYPE_CHECKING:
    from trustme import LeafCert

Tls: TypeAlias = "bool | Literal['mutual']"

_AUTH: Final = "org.apache.rocketmq.auth"
_OF_PROXY: Final = "org.apache.rocketmq.proxy.auth"

_PROXYS_TLS: Final = ("tlsTestModeEnable", "tlsCertPath", "tlsKeyPath")


class Certificate(NamedTuple):
    """The PEM files of a certificate with its chain, and of its key."""

    cert_file: Path
    key_file: Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a cluster with TLS."""

    ca_file: Path
    server: Certificate  # Of all servers, also as clients of each other
    client: Certificate | None  # For clients, if the servers require one
    properties: Path  # The ``tls.config.file`` of the JVMs


@dataclass(frozen=True, slots=True)
class Security:
    """The security of one cluster: signatures if `admin` is set, encrypted connections if `tls` is set."""

    admin: Credentials | None = None
    secret_file: Path | None = None
    tls: TlsFiles | None = field(default=None, repr=False)

    @classmethod
    def made(cls, directory: Path, *, auth: bool, tls: Tls) -> Security:
        """Return a cluster's security, with files in `directory`; raises a ClusterError as `require_own_folder`."""
        if auth or tls:
            require_own_folder(directory)
        secret_file = directory / "admin.secret" if auth else None
        admin = _administrator(secret_file) if secret_file is not None else None
        return cls(admin, secret_file, _tls_files(directory / "tls", mutual=tls == "mutual") if tls else None)

    @property
    def options(self) -> dict[str, str]:
        """The options of a DataFrame's read or write; the secret key is a reference to its file."""
        options: dict[str, str] = {}
        if self.admin is not None:
            options |= {"accessKey": self.admin.access_key, "secretKey": f"file:{self.secret_file}"}
        if self.tls is not None:
            options |= {"useTls": "true", "tlsCaFile": str(self.tls.ca_file)}
            if self.tls.client is not None:
                options |= zip(("tlsCertFile", "tlsKeyFile"), map(str, self.tls.client), strict=True)
        return options

    @property
    def jvm_options(self) -> tuple[str, ...]:
        """The options of every server's JVM."""
        if self.tls is None:
            return ()
        # Without tls.enable some clients inside a proxy connect without TLS.
        return ("-Dtls.server.mode=enforcing", "-Dtls.enable=true", f"-Dtls.config.file={self.tls.properties}")

    @property
    def broker_properties(self) -> dict[str, str]:
        """The properties of every broker (``AuthConfig``); at first the administrator is its only user."""
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
        """The properties of the proxy, which looks up users at the brokers."""
        properties: dict[str, object] = {}
        if self.admin is not None:
            properties = {
                **_auth_properties(self.admin),
                "authenticationEnabled": True,
                "authorizationEnabled": True,
                "authenticationMetadataProvider": f"{_OF_PROXY}.ProxyAuthenticationMetadataProvider",
                "authorizationMetadataProvider": f"{_OF_PROXY}.ProxyAuthorizationMetadataProvider",
                # Otherwise it requests the brokers' users without credentials.
                "enableAclRpcHookForClusterMode": True,
            }
        if self.tls is not None:
            files = {"tlsCertPath": str(self.tls.server.cert_file), "tlsKeyPath": str(self.tls.server.key_file)}
            properties |= {"tlsTestModeEnable": False, **files}
        return properties

    @property
    def client_tls(self) -> TlsSettings | None:
        """The TLS of requests of this process to the servers; only the cluster's authority is trusted."""
        if self.tls is None:
            return None
        cert_file, key_file = map(str, self.tls.server)
        return TlsSettings(str(self.tls.ca_file), cert_file=cert_file, key_file=key_file)

    def hidden(self, text: str) -> str:
        """Return a text with the secret key replaced by ``***``."""
        return text.replace(self.admin.secret_key, "***") if self.admin is not None else text

    def remove_files(self) -> None:
        """Remove the secret key and the private keys."""
        if self.secret_file is not None:
            self.secret_file.unlink(missing_ok=True)
        for certificate in (self.tls.server, self.tls.client) if self.tls is not None else ():
            if certificate is not None:
                certificate.key_file.unlink(missing_ok=True)


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return a DataFrame's options as `Producer` and `Admin` take them; raises a ClusterError for an unknown one."""
    fields = {spec.name: spec.field for spec in SINK_OPTIONS}
    unknown = ", ".join(name for name in options if name not in fields)
    if unknown:
        raise ClusterError(
            f"the running cluster has the option {unknown}, which this release of rocketmq-spark does not know: stop "
            "the cluster (rocketmq-spark cluster down), or choose another one with -n host:9876"
        )
    return {fields[name]: value == "true" if name == "useTls" else value for name, value in options.items()}


def check_security(
    auth: bool,
    tls: Tls,
    brokers: Sequence[Mapping[str, object]],
    proxy: Mapping[str, object],
    jvm_options: Sequence[str],
) -> None:
    """Raise a ClusterError for TLS without trustme, and for properties that contradict `auth` and `tls`."""
    if not isinstance(auth, bool):
        # The value is not shown, because it may be a secret.
        raise ClusterError(f"auth must be False or True, not a {type(auth).__name__}: use create_user to add keys")
    if not isinstance(tls, bool) and tls != "mutual":
        raise ClusterError(f"tls={tls!r} is not allowed: allowed are False, True and 'mutual'")
    for option in jvm_options:
        if option.startswith("-Dtls."):
            raise ClusterError(
                f"jvm_options may not set {option.partition('=')[0]}: use tls=True, or tls='mutual' to require"
                " client certificates"
            )
    if tls:
        try:
            import trustme  # noqa: F401
        except ImportError as exc:
            raise ClusterError(
                f"importing trustme, which makes the certificates of a cluster with TLS, failed: {exc};"
                " pip install 'rocketmq-spark[cluster]'"
            ) from exc
        refuse_properties(proxy, dict.fromkeys(_PROXYS_TLS, "tls= sets it"), "proxy")
    if auth:
        own = Security(Credentials("", ""))
        for properties in brokers:
            refuse_properties(properties, dict.fromkeys(own.broker_properties, "auth= sets it"), "broker_properties")
        refuse_properties(proxy, dict.fromkeys(own.proxy_properties, "auth= sets it"), "proxy")


def _tls_files(folder: Path, *, mutual: bool) -> TlsFiles:
    import trustme

    authority = trustme.CA(organization_unit_name="a local cluster of rocketmq-spark")
    ca_file = folder / "ca.pem"
    with os_errors(f"writing certificates to {folder}", "set directory= to a writable folder"):
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        authority.cert_pem.write_to_path(ca_file)
        server = write_certificate(authority.issue_cert("127.0.0.1", "::1", "localhost"), folder, "server")
        client = write_certificate(authority.issue_cert("client.localhost"), folder, "client") if mutual else None
        files = TlsFiles(ca_file, server, client, folder / "tls.properties")
        write_tls_properties(files)
    return files


def write_certificate(issued: LeafCert, folder: Path, name: str) -> Certificate:
    """Write a certificate and its key as ``name.pem`` and ``name.key``."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    files = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    files.cert_file.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    write_private(files.key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def write_tls_properties(files: TlsFiles) -> None:
    """Write the TLS properties of the JVMs: their certificate, and the trusted authority."""
    ca, cert, key = str(files.ca_file), str(files.server.cert_file), str(files.server.key_file)
    properties = {
        # In test mode each server makes its own certificate and trusts every certificate.
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


def _administrator(secret_file: Path) -> Credentials:
    """Return the administrator with the secret key in a file, which is created if it is missing."""
    try:
        # A named folder outlives its cluster with the brokers' users, so the file must outlive it, too.
        if not os.path.lexists(secret_file):
            write_private(secret_file, secrets.token_urlsafe(32).encode())
        return Credentials("admin", _read_private(secret_file).decode("ascii").strip())
    except (OSError, UnicodeError) as exc:
        # The text of a UnicodeError would contain bytes of the secret.
        cause = exc.strerror if isinstance(exc, OSError) else type(exc).__name__
        raise ClusterError(
            f"reading the administrator's secret key in {secret_file}: {cause}; set directory= to another folder"
        ) from exc


def write_private(file: Path, content: bytes) -> None:
    """Replace a file with one that only its owner may read."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


def _read_private(file: Path) -> bytes:
    """Return the content of a regular file that belongs to this user or root, and that only its owner may access."""
    # Without O_NONBLOCK a FIFO would block. The open file is checked, because the path could be exchanged meanwhile.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ClusterError(f"reading {file}: it is not a regular file; set directory= to another folder")
        _require_owner(file, status, os.geteuid())
        if status.st_mode & 0o077:
            raise ClusterError(
                f"reading {file}: other users may access it (mode {stat.S_IMODE(status.st_mode):o}), so its content is"
                " not secret; set directory= to another folder, because brokers of this one keep the old key"
            )
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def require_own_folder(folder: Path, *, user: int | None = None) -> None:
    """Raise a ClusterError if another user could have put keys or users into a cluster's folder.

    Only `user` (default: the effective one) may write to it and its subfolders; `user` or root must own its entries.
    """
    user = os.geteuid() if user is None else user
    with os_errors(f"checking the permissions of {folder}", "set directory= to another folder"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            status = os.fstat(opened)
            with os.scandir(opened) as scanned:
                entries = [(folder / entry.name, entry.stat(follow_symlinks=False)) for entry in scanned]
        finally:
            os.close(opened)
    _require_owner(folder, status, user)
    if status.st_mode & 0o022:
        raise ClusterError(
            f"other users may write to {folder} (mode {stat.S_IMODE(status.st_mode):o}), and could replace the"
            f" cluster's keys and users: run chmod go-w {folder}, or set directory= to another folder"
        )
    for path, inner in entries:
        _require_owner(path, inner, user)
        # Other users reach the entries only with the permission to enter the folder.
        if stat.S_ISDIR(inner.st_mode) and inner.st_mode & 0o022 and status.st_mode & 0o011:
            raise ClusterError(
                f"other users may write to {path} (mode {stat.S_IMODE(inner.st_mode):o}) and could have put keys or"
                f" users there: check its content and run chmod -R go-w {path}, or set directory= to another folder"
            )


def _require_owner(path: Path, status: os.stat_result, user: int) -> None:
    if status.st_uid not in (user, 0):
        raise ClusterError(
            f"{path} belongs to user id {status.st_uid}, not to user id {user} of this process, so its content can't be"
            " trusted: remove it, or set directory= to another folder"
        )


def _auth_properties(admin: Credentials) -> dict[str, str]:
    inner = {"accessKey": admin.access_key, "secretKey": admin.secret_key}
    return {
        "authenticationEnabled": "true",
        "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
        "innerClientAuthenticationCredentials": json.dumps(inner),
        "authorizationEnabled": "true",
        "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    }
