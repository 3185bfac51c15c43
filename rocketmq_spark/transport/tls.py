"""TLS over a socket that never blocks.

Rule 1: a server's certificate must be signed by a trusted authority and name the host of the address that was dialled,
        or the name that was given for all servers; Java's client checks neither.
Rule 2: bytes are encrypted in helpings of 64 KiB, the next one when the socket has taken the last: no more than that
        can have been "written" and be here still.
Rule 3: what OpenSSL holds is not safe for two threads: one lock per stream.
Rule 4: reading leaves nothing decrypted behind, for no selector would tell of it.
Rule 5: an error of the handshake says what to do about it.
Rule 6: files that were replaced count for the next connection: certificates are renewed more often than long streams
        end.

A server listens for TLS and for plain connections on one port (spec/remoting.md section 2.4).
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, cast

from rocketmq_spark.errors import OptionError
from rocketmq_spark.message import Buffer

# (connected socket, host that was dialled) -> what to send and receive by
Secure: TypeAlias = "Callable[[socket.socket, str], TlsStream]"

_HELPING: Final = 64 * 1024

# How OpenSSL, and that of 3.2 and newer, says that the first bytes were none of its own.
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})

_TOO_OLD: Final = frozenset({"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"})

# What may wait for a socket that takes nothing, bytes: a helping, and OpenSSL's own answers to what the server sends.
_MOST_UNSENT: Final = 1024 * 1024

# Reads of one turn of a handshake: who sends without end (OpenSSL passes over any number of HelloRequests) must not
# keep the loop from all others, and from the deadline.
_READS: Final = 8

# More than the longest record (RFC 5246 section 6.2.3): of one that has begun to arrive, so much may be here already.
_RECORD: Final = 20 * 1024

# X509_V_ERR_* of OpenSSL's x509_vfy.h: not yet valid, expired; another host's name, another host's address.
OUT_OF_DATE: Final = frozenset({9, 10})
_OTHER_HOST: Final = frozenset({62, 64})


# What a server says of the client's certificate (RFC 8446 section 6.2), as OpenSSL names it; the second alert is what
# TLS 1.2 has for a missing one.
OURS_REFUSED: Final = frozenset(
    {
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV1_ALERT_ACCESS_DENIED",
    }
)


# What Netty says, with the OpenSSL that RocketMQ brings, of a certificate that it finds no authority for.
_NO_REASON: Final = "TLSV1_ALERT_INTERNAL_ERROR"


class HandshakeError(ConnectionError):
    """The TLS handshake failed."""


class CertificateError(HandshakeError):
    """A certificate was refused: the server's, or ours."""


class DisagreementError(HandshakeError):
    """One side speaks TLS, and the other does not."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How servers are to prove who they are, and how this client does.

    Parameters
    ----------
    ca_file : str, optional
        PEM file with the certificates of the authorities to trust. Default: those of the system.
    server_name : str, optional
        What every server's certificate must name. Default: the host that was dialled.
    cert_file : str, optional
        PEM file with this client's certificate, and those between it and an authority. Default: it has none.
    key_file : str, optional
        PEM file with its private key, not encrypted. Default: it is in `cert_file`.
    insecure_skip_verify : bool, default False
        Take every certificate.
    """

    ca_file: str | None = None
    server_name: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False

    def context(self) -> ssl.SSLContext:
        """Return the context of all connections, of TLS 1.2 or newer.

        Raises
        ------
        OptionError
            A file can't be read, or does not hold what it should.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as exc:
            # An SSLError too: a file without a single certificate.
            raise OptionError(
                f"option tlsCaFile: reading {self.ca_file!r}: {exc}; give a PEM file with the certificates of the "
                "authorities that signed the servers' certificates, at the same path on the driver and every executor"
            ) from exc
        # A renegotiation would have writes wait for reads.
        context.options |= ssl.OP_NO_RENEGOTIATION
        # Python's own default, unless the system's OpenSSL was told otherwise.
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
        """Which alerts are about this client's certificate, by OpenSSL's names."""
        return OURS_REFUSED if self.cert_file is None else OURS_REFUSED | {_NO_REASON}

    def own_certificate(self) -> tuple[bytes | None, bytes | None]:
        """Return this client's private key and its certificate (PEM), for who has a TLS of its own.

        Raises
        ------
        OptionError
            See `context`, which checks them.
        """
        if self.cert_file is None:
            return None, None
        self.context()
        return Path(self.key_file or self.cert_file).read_bytes(), Path(self.cert_file).read_bytes()

    def secure(self) -> Secure:
        """Return what encrypts the connections of one transport.

        Raises
        ------
        OptionError
            See `context`.
        """
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
    """A password is asked for, which nobody has."""


def _no_password() -> str:
    # Else OpenSSL would ask for one at the terminal.
    raise _EncryptedKeyError


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class TlsStream:
    """The bytes of one connected socket, encrypted; `sendmsg` and `recv_into` as a socket has them.

    Parameters
    ----------
    sock : socket
        Connected, non-blocking. It stays the caller's, to watch and to close.
    context : SSLContext
    host : str
        Name or address that was dialled.
    server_name : str, optional
        What the certificate must be for, if not for the host.
    refusals : frozenset of str, default OURS_REFUSED
        See `TlsSettings.refusals`.

    Raises
    ------
    ValueError
        That is no name that a certificate could have.
    """

    __slots__ = (
        "_heard",
        "_host",
        "_incoming",
        "_lock",
        "_outgoing",
        "_refusals",
        "_server_name",
        "_sock",
        "_ssl",
        "_unsent",
    )

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        host: str,
        server_name: str | None = None,
        refusals: frozenset[str] = OURS_REFUSED,
    ) -> None:
        self._sock = sock
        self._host = host
        self._server_name = server_name
        self._refusals = refusals
        # Something was decrypted: the server has let this client in.
        self._heard = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name or host)
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TlsStream {self._host} {self._ssl.version()}, {len(self._unsent)} bytes unsent>"

    @property
    def unsent(self) -> bool:
        """Encrypted bytes wait until the socket takes them."""
        return len(self._unsent) > 0

    def handshake(self) -> bool:
        """Go on with the handshake; True when it is done, False when the socket must get readable (or writable) first.

        Raises
        ------
        HandshakeError
            It can't succeed any more.
        """
        try:
            with self._lock:
                return self._handshake()
        except ssl.SSLCertVerificationError as exc:
            raise CertificateError(f"{exc.verify_message.rstrip('.')}: {self._advice(exc.verify_code)}") from exc
        except OSError as exc:
            raise _handshake_error(exc, self._refusals) from exc

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """Encrypt and send; return how many bytes of `pieces` were taken, perhaps none while older ones move.

        Raises
        ------
        BlockingIOError
            Not a byte moved.
        OSError
            The connection is broken.
        """
        with self._lock:
            moved, taken = self._flush(), 0
            for helping in _helpings(pieces):
                if self._unsent:
                    break
                view = memoryview(helping)
                while view:
                    view = view[self._ssl.write(view) :]
                taken += len(helping)
                # What is taken may be on its way: a failure here must not pass for a write of nothing. The socket tells
                # it again, next time.
                with contextlib.suppress(OSError):
                    self._flush()
            if not moved and not taken:
                raise BlockingIOError
            return taken

    def recv_into(self, view: memoryview) -> int:
        """Receive and decrypt all that one read brings; 0 at the end of the stream.

        Raises
        ------
        BlockingIOError
            Nothing, or no whole record, is there yet.
        OSError
            The connection is broken.
        """
        count = self._sock.recv_into(view[: len(view) - _RECORD])
        if not count:
            return 0
        filled, goodbye = 0, False
        with self._lock:
            self._incoming.write(view[:count])
            try:
                # Into a buffer it returns a count, whatever its stub says.
                while decrypted := cast(int, self._ssl.read(len(view) - filled, view[filled:])):
                    filled += decrypted
                    self._heard = True
                goodbye = True
            except ssl.SSLWantReadError:
                # OpenSSL answers a key update by itself. What is wrong with the socket, the next call will say.
                with contextlib.suppress(OSError):
                    self._flush()
                if len(self._unsent) > _MOST_UNSENT:
                    raise ConnectionAbortedError("the server has us answer (key updates) and reads nothing") from None
            except ssl.SSLError as exc:
                # An alert, say. The answers before it count; the end of the socket's stream follows it.
                if not filled:
                    # With TLS 1.3 a client is done before the server has seen its certificate.
                    raise (refusal(exc) if exc.reason in self._refusals and not self._heard else exc) from exc
        if not filled and not goodbye:
            raise BlockingIOError
        return filled

    def last_words(self) -> CertificateError | None:
        """Return why the server ended a connection that can't be written to any more, if it has said so."""
        try:
            self.recv_into(memoryview(bytearray(2 * _RECORD)))
        except CertificateError as exc:
            return exc
        except OSError:
            pass
        return None

    def _handshake(self) -> bool:
        for reads_left in reversed(range(_READS)):
            done = False
            try:
                self._ssl.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                # The alert tells the server why.
                with contextlib.suppress(OSError):
                    self._flush()
                raise
            self._flush()
            if done:
                return True
            if not reads_left:
                # What is read must be looked at: the socket tells of nothing but more.
                break
            try:
                data = self._sock.recv(_RECORD)
            except (BlockingIOError, InterruptedError):
                return False
            if not data:
                raise ConnectionResetError("end of stream")
            self._incoming.write(data)
        return False

    def _flush(self) -> bool:
        """Hand over what is encrypted; True if the socket took any of it."""
        if self._outgoing.pending:
            fresh = self._outgoing.read()
            self._unsent = memoryview(b"".join((self._unsent, fresh)) if self._unsent else fresh)
        moved = False
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                break
            self._unsent = self._unsent[sent:]
            moved = True
        return moved

    def _advice(self, verify_code: int) -> str:
        if verify_code in _OTHER_HOST and self._server_name is not None:
            return (
                f"the server's certificate must name {self._server_name} (subjectAltName), which is the option "
                f"tlsServerName; the server was dialled by {self._host}"
            )
        if verify_code in _OTHER_HOST:
            return (
                f"the server's certificate must name {self._host} (subjectAltName), by which the server was dialled; "
                "a broker is dialled by its brokerIP1; or set tlsServerName to the one name that all certificates have"
            )
        if verify_code in OUT_OF_DATE:
            return "the server needs a new certificate, or a clock is wrong"
        return (
            "the server's certificate is not trusted; set tlsCaFile to the certificate of the authority that signed it"
        )


def _handshake_error(error: OSError, refusals: frozenset[str]) -> HandshakeError:
    hint = "does it speak TLS? Else set useTls=false"
    if isinstance(error, ssl.SSLError):
        if error.reason in refusals:
            return refusal(error)
        if error.reason in _TOO_OLD:
            return DisagreementError(
                f"the server's TLS is older than 1.2 ({error.reason}), which is the oldest allowed: update the server"
            )
        if error.reason in _NO_TLS:
            return DisagreementError(
                f"what the server sent is not TLS ({error.reason}): set useTls=false, or correct the port"
            )
        return HandshakeError(f"the TLS handshake failed ({error.reason or error}); {hint}")
    if isinstance(error, ConnectionError):
        return HandshakeError(f"the server hung up during the TLS handshake ({error}); {hint}")
    return HandshakeError(f"the TLS handshake failed ({error}); {hint}")


def refusal(error: ssl.SSLError) -> CertificateError:
    """Return the error that one of `TlsSettings.refusals` stands for."""
    return CertificateError(
        f"the server refuses this client's certificate, or demands one ({error.reason}): set tlsCertFile and "
        "tlsKeyFile to a certificate that is signed by an authority that the server trusts, and has not expired, and "
        "to its key"
    )


def _helpings(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Join small pieces and cut long ones: few records, and bounded copies."""
    parts: list[memoryview] = []
    room = _HELPING
    for piece in pieces:
        view = memoryview(piece)
        while view:
            parts.append(view[:room])
            view = view[room:]
            room -= len(parts[-1])
            if not room:
                yield b"".join(parts)
                parts, room = [], _HELPING
    if parts:
        yield b"".join(parts)
