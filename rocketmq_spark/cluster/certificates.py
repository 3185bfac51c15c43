"""Certificates and private files of one cluster.

The authority's own key is in no file, so nobody can make another server of the cluster from its folder. Keys are
unencrypted PKCS#8, the only form that RocketMQ's servers read (``TlsHelper.java``). A certificate is for clients and
servers, because RocketMQ's servers are clients of each other.
"""

from __future__ import annotations

import os
import stat
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.errors import ClusterError


class Certificate(NamedTuple):
    """The PEM files of a certificate, its chain included, and of its key."""

    cert_file: Path
    key_file: Path


class Authority:
    """A certificate authority that writes into an existing folder; its own certificate is `ca_file`.

    Raises a ClusterError if the package trustme is not installed.
    """

    def __init__(self, folder: Path, name: str = "a local cluster of rocketmq-spark") -> None:
        self._folder = folder
        require_trustme()
        import trustme

        self._ca = trustme.CA(organization_unit_name=name)
        self.ca_file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def __repr__(self) -> str:
        return f"<Authority {self.ca_file}>"

    def issue(
        self, name: str, *identities: str, not_before: datetime | None = None, not_after: datetime | None = None
    ) -> Certificate:
        """Write a certificate for host names and addresses, and its key: ``name.pem`` and ``name.key``.

        It is valid between two UTC times, by default always.
        """
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            load_pem_private_key,
        )

        issued = self._ca.issue_cert(*identities, not_before=not_before, not_after=not_after)
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        made.cert_file.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key = load_pem_private_key(issued.private_key_pem.bytes(), None)
        write_private(made.key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made


def require_trustme() -> None:
    """Raise a ClusterError that names the pip command if trustme is missing."""
    try:
        import trustme  # noqa: F401
    except ImportError as exc:
        raise ClusterError(
            f"a cluster with TLS makes its certificates with the Python package trustme, which can't be used here"
            f" ({exc}): pip install 'rocketmq-spark[cluster]'"
        ) from exc


def write_private(file: Path, content: bytes) -> None:
    """Replace a file by one that only its owner may read."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


def read_private(file: Path) -> bytes:
    """Return the content of a regular file that only its owner may read and write: this user, or root.

    Raises a ClusterError otherwise, and an OSError if the file can't be read, or is a symbolic link.
    """
    # Without O_NONBLOCK a FIFO would block. The checks are made on the open file, which nobody can exchange.
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ClusterError(f"reading {file}: it is no regular file; remove it")
        _require_owner(file, status, os.geteuid())
        if status.st_mode & 0o077:
            raise ClusterError(
                f"reading {file}: other users may read or write it (mode {stat.S_IMODE(status.st_mode):o}), so its"
                " content is no secret; remove it, and a new one is made"
            )
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def require_own_folder(folder: Path, *, user: int | None = None) -> None:
    """Raise a ClusterError if another user could have put keys or users into a cluster's folder.

    Only `user` (by default the effective user) may write to the folder and the folders in it, and everything in it
    belongs to `user` or to root.
    """
    user = os.geteuid() if user is None else user
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            status = os.fstat(opened)
            _require_owner(folder, status, user)
            if status.st_mode & 0o022:
                raise ClusterError(
                    f"other users may write to {folder} (mode {stat.S_IMODE(status.st_mode):o}), and could replace the"
                    f" cluster's keys and users: run chmod go-w {folder}, or set directory= to another folder"
                )
            with os.scandir(opened) as entries:
                for entry in entries:
                    inner = entry.stat(follow_symlinks=False)
                    _require_owner(folder / entry.name, inner, user)
                    # Other users reach the entries only if they may enter the folder.
                    if stat.S_ISDIR(inner.st_mode) and inner.st_mode & 0o022 and status.st_mode & 0o011:
                        raise ClusterError(
                            f"other users may write to {folder / entry.name} (mode {stat.S_IMODE(inner.st_mode):o}) and"
                            " could have put keys or users there: set directory= to another folder, or check what is in"
                            f" it and run chmod -R go-w {folder / entry.name}"
                        )
        finally:
            os.close(opened)
    except OSError as exc:
        raise ClusterError(f"checking who may write to {folder}: {exc}; set directory= to another folder") from exc


def _require_owner(path: Path, status: os.stat_result, user: int) -> None:
    if status.st_uid not in (user, 0):
        raise ClusterError(
            f"{path} belongs to user id {status.st_uid}, not to user id {user} of this process: its content can't be"
            " trusted. Remove it, or set directory= to another folder"
        )
