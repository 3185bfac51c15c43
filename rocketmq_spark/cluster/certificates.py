"""Certificates of one cluster: an authority that is made when it starts, and vouches for its servers and their clients.

Rule 1: the authority's own key is in no file: what lies in the folder lets nobody make another server of the cluster.
Rule 2: keys are PKCS#8, the one form that RocketMQ's servers read (``TlsHelper.java``), unencrypted and for their owner
        only.
Rule 3: a certificate is for clients and for servers: RocketMQ's servers are clients of each other.
"""

from __future__ import annotations

import os
import stat
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.errors import ClusterError

if TYPE_CHECKING:
    import trustme


class Certificate(NamedTuple):
    """The PEM files of a certificate, its chain included, and of its key."""

    cert_file: Path
    key_file: Path


class Authority:
    """A certificate authority.

    Parameters
    ----------
    folder : Path
        Where certificates and keys are written; it exists.
    name : str, default "a local cluster of rocketmq-spark"
        By which its certificates name it.

    Attributes
    ----------
    ca_file : Path
        Its own certificate: the option ``tlsCaFile``.

    Raises
    ------
    ClusterError
        The package trustme is not installed.
    """

    def __init__(self, folder: Path, name: str = "a local cluster of rocketmq-spark") -> None:
        self._folder = folder
        self._ca = _authority(name)
        self.ca_file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca_file)

    def __repr__(self) -> str:
        return f"<Authority {self.ca_file}>"

    def issue(
        self, name: str, *identities: str, not_before: datetime | None = None, not_after: datetime | None = None
    ) -> Certificate:
        """Return a certificate and its key.

        Parameters
        ----------
        name : str
            Of its files: ``name.pem`` and ``name.key``.
        *identities : str
            Host names and addresses that it is for, at least one.
        not_before, not_after : datetime, optional
            From when and until when it counts, UTC. Default: always.
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
    """Raise a ClusterError that names the command if certificates can't be made here."""
    try:
        import trustme  # noqa: F401
    except ImportError as exc:
        raise ClusterError(
            f"a cluster with TLS makes its certificates with the Python package trustme, which can't be used here"
            f" ({exc}): pip install 'rocketmq-spark[cluster]'"
        ) from exc


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whatever it was before."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


def read_private(file: Path) -> bytes:
    """Return the content of a regular file that only its owner may read and write: this user, or root.

    Raises
    ------
    ClusterError
        It is not a regular file, it belongs to another user, or other users may read or write it.
    OSError
        It can't be read, or it is a symbolic link.
    """
    # Without O_NONBLOCK a FIFO would block; the checks are made on what was opened.
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
    """Raise a ClusterError if another user could have put secrets or brokers' users into a cluster's folder.

    Only `user` may write to the folder and to the folders in it, and all that is in it belongs to `user` or to root.

    Parameters
    ----------
    folder : Path
    user : int, optional
        Default: the effective user of this process.
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


def _authority(name: str) -> trustme.CA:
    require_trustme()
    import trustme

    return trustme.CA(organization_unit_name=name)
