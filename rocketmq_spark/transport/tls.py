"""TLS over sockets that never block: settings and files, and the encrypted stream.

A server's certificate must be signed by a trusted authority, and must name the dialled host or `tlsServerName`. Java's
client checks neither. A replaced file counts for the next connection: streams outlive certificates.
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
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.tls import NO_REASON, REFUSAL_ALERTS, CertificateError, advice, handshake_error, refusal

_PIECE: Final = 64 * 1024

# Bytes that may wait for a full socket: one piece, and OpenSSL's own answers to the server.
_MOST_UNSENT: Final = 1024 * 1024

# Reads per turn of a handshake: a server that sends without end (OpenSSL skips any number of HelloRequests) must not
# keep the loop from other connections and from the deadline.
_READS: Final = 8

# More than the longest record (RFC 5246 section 6.2.3): of one that has begun to arrive, so much may be here already.
_RECORD: Final = 20 * 1024

# (connected socket, host that was dialled) -> what to send and receive by
Secure: TypeAlias = "Callable[[socket.socket, str], TlsStream]"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How servers and this client prove their identity. All files are PEM."""

    ca_file: str | None = None  # The certificates of the authorities to trust. None: those of the system.
    server_name: str | None = None  # What every server's certificate must name. None: the host that was dialled.
    cert_file: str | None = None  # This client's certificate chain.
    key_file: str | None = None  # Its private key, not encrypted. None: it is in `cert_file`.
    insecure_skip_verify: bool = False  # Accept every certificate.

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
                open(path, "rb").close()
            except OSError as exc:
                raise OptionError(
                    f"option {option}: reading {path!r}: {exc.strerror or exc}; the file must be at that path, for "
                    "this process to read, on the driver and on every executor"
                ) from exc
        try:
            context.load_cert_chain(cert_file, key_file, password=_no_password)
        except ssl.SSLError as exc:
            if self.key_file is None:
                raise OptionError(
                    f"option tlsCertFile: {cert_file!r} does not hold both a certificate and its private key "
                    f"({exc.reason or exc}): give the key's file as tlsKeyFile"
                ) from exc
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

    def _stamps(self) -> list[tuple[str, int, int, int]]:
        """Return what changes if a file is replaced."""
        stamps = []
        for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamps.append((path, status.st_ino, status.st_mtime_ns, status.st_size))
        return stamps


class _EncryptedKeyError(Exception):
    """The key needs a password."""


def _no_password() -> str:
    # Otherwise OpenSSL would prompt at the terminal.
    raise _EncryptedKeyError


class TlsStream:
    """The bytes of one connected socket, encrypted; `sendmsg` and `recv_into` as a socket has them.

    Bytes are encrypted in pieces of 64 KiB, the next one when the socket has accepted the last: no more than that can
    be "written" and not sent. The lock guards OpenSSL's objects. Reading leaves nothing decrypted behind, because a
    selector would not report it.

    `sock` is connected and non-blocking; the caller watches and closes it. `server_name` is what the certificate must
    name instead of the dialled `host`; ValueError: no certificate could have this name.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        host: str,
        server_name: str | None = None,
        refusals: frozenset[str] = REFUSAL_ALERTS,
    ) -> None:
        self._sock = sock
        self._host = host
        self._server_name = server_name
        self._refusals = refusals
        # True once data was decrypted: the server has accepted this client.
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
        """Continue the handshake; True when it is done, False while it waits for the socket. Raises HandshakeError."""
        try:
            with self._lock:
                return self._handshake()
        except ssl.SSLCertVerificationError as exc:
            raise CertificateError(
                f"{exc.verify_message.rstrip('.')}: {advice(exc.verify_code, self._host, self._server_name)}"
            ) from exc
        except OSError as exc:
            raise handshake_error(exc, self._refusals) from exc

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """Encrypt and send; return how many bytes of `pieces` were taken, perhaps none while older ones move.

        Raises BlockingIOError if not a byte moved, another OSError if the connection is broken.
        """
        with self._lock:
            moved, taken = self._flush(), 0
            for joined in _joined(pieces):
                if self._unsent:
                    break
                view = memoryview(joined)
                while view:
                    view = view[self._ssl.write(view) :]
                taken += len(joined)
                # These bytes may have been sent, so a failure must not count as a write of nothing. The socket repeats
                # its error at the next call.
                with contextlib.suppress(OSError):
                    self._flush()
            if not moved and not taken:
                raise BlockingIOError
            return taken

    def recv_into(self, view: memoryview) -> int:
        """Receive and decrypt all that one read brings; 0 at the end of the stream.

        Raises BlockingIOError if nothing, or no whole record, is there yet; another OSError if the connection is
        broken.
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
        """Return the alert with which the server ended the connection, if it is about this client's certificate."""
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
            # Without a read left: OpenSSL must see what was read, because the socket reports only more.
            if done or not reads_left:
                return done
            try:
                data = self._sock.recv(_RECORD)
            except (BlockingIOError, InterruptedError):
                return False
            if not data:
                raise ConnectionResetError("end of stream")
            self._incoming.write(data)
        return False

    def _flush(self) -> bool:
        """Send what is encrypted; True if the socket took any of it."""
        if self._outgoing.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
        moved = False
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                break
            self._unsent = self._unsent[sent:]
            moved = True
        return moved


def _joined(pieces: Sequence[Buffer]) -> Iterator[bytes]:
    """Join small pieces and cut long ones: few records, and bounded copies."""
    parts: list[memoryview] = []
    room = _PIECE
    for piece in pieces:
        view = memoryview(piece)
        while view:
            parts.append(view[:room])
            view = view[room:]
            room -= len(parts[-1])
            if not room:
                yield b"".join(parts)
                parts, room = [], _PIECE
    if parts:
        yield b"".join(parts)
