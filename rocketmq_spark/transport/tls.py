"""TLS settings: the authorities to trust, this client's certificate, and their files.

A server's certificate must be signed by a trusted authority, and must name the dialled host or `tlsServerName`. Java's
client checks neither. A replaced file counts for the next connection: streams outlive certificates.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rocketmq_spark.errors import OptionError
from rocketmq_spark.protocol.tls import NO_REASON, REFUSAL_ALERTS
from rocketmq_spark.transport.tls_stream import TlsStream

# (connected socket, host that was dialled) -> what to send and receive by
Secure: TypeAlias = Callable[[socket.socket, str], TlsStream]


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How servers and this client prove their identity.

    Parameters
    ----------
    ca_file : str, optional
        PEM file with the certificates of the authorities to trust. Default: those of the system.
    server_name : str, optional
        What every server's certificate must name. Default: the host that was dialled.
    cert_file : str, optional
        PEM file with this client's certificate chain. Default: it has none.
    key_file : str, optional
        PEM file with its private key, not encrypted. Default: it is in `cert_file`.
    insecure_skip_verify : bool, default False
        Accept every certificate.
    """

    ca_file: str | None = None
    server_name: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False

    def context(self) -> ssl.SSLContext:
        """Return the context of all connections, for TLS 1.2 or newer; raises OptionError for an unusable file."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as exc:
            # An SSLError too: a file without a single certificate.
            raise OptionError(
                f"option tlsCaFile: reading {self.ca_file!r}: {exc}; give a PEM file with the certificates of the "
                "authorities that signed the servers' certificates, at the same path on the driver and every executor"
            ) from exc
        # In a renegotiation writes would wait for reads.
        context.options |= ssl.OP_NO_RENEGOTIATION
        # Python's own default, unless the system's OpenSSL is configured otherwise.
        context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)
        if self.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file is not None:
            self._load_own(context, self.cert_file, self.key_file or self.cert_file)
        return context

    def _load_own(self, context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
        for option, path in (("tlsCertFile", cert_file), ("tlsKeyFile", key_file)):
            try:
                with open(path, "rb"):
                    pass
            except OSError as exc:
                raise OptionError(
                    f"option {option}: reading {path!r}: {exc.strerror or exc}; the file must be at that path, for "
                    "this process to read, on the driver and on every executor"
                ) from exc
        try:
            context.load_cert_chain(cert_file, key_file, password=_no_password)
        except ssl.SSLError as exc:
            what = "is not the key of the certificate in" if exc.reason == "KEY_VALUES_MISMATCH" else "does not fit"
            if self.key_file is None:
                raise OptionError(
                    f"option tlsCertFile: {cert_file!r} does not hold both a certificate and its private key "
                    f"({exc.reason or exc}): give the key's file as tlsKeyFile"
                ) from exc
            raise OptionError(
                f"options tlsCertFile, tlsKeyFile: {key_file!r} {what} {cert_file!r} ({exc.reason or exc}); give PEM "
                "files with the client's certificate and with its private key"
            ) from exc
        except _EncryptedKeyError:
            raise OptionError(
                f"option tlsKeyFile: the key in {key_file!r} is encrypted: give it without a password, readable only "
                "for the user that Spark's workers run as (openssl pkey -in encrypted.key -out plain.key)"
            ) from None

    @property
    def refusals(self) -> frozenset[str]:
        """The alerts about this client's certificate, by OpenSSL's names."""
        return REFUSAL_ALERTS if self.cert_file is None else REFUSAL_ALERTS | {NO_REASON}

    def own_certificate(self) -> tuple[bytes | None, bytes | None]:
        """Return this client's private key and certificate (PEM), for gRPC's own TLS."""
        if self.cert_file is None:
            return None, None
        self.context()
        return Path(self.key_file or self.cert_file).read_bytes(), Path(self.cert_file).read_bytes()

    def secure(self) -> Secure:
        """Return the function that encrypts the connections of one transport; see `context` for errors."""
        context, seen = self.context(), self._stamps()

        def encrypt(sock: socket.socket, host: str) -> TlsStream:
            nonlocal context, seen
            now = self._stamps()
            if now != seen:
                context, seen = self.context(), now
            return TlsStream(sock, context, host, self.server_name, self.refusals)

        return encrypt

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


class _EncryptedKeyError(Exception):
    """The key needs a password."""


def _no_password() -> str:
    # Otherwise OpenSSL would prompt at the terminal.
    raise _EncryptedKeyError


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
