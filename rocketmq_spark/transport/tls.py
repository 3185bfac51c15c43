"""TLS settings and files, and encrypted streams over sockets that never block (docs/internals/access-control.md#tls).

A streaming query can run longer than its certificates are valid. So a new remoting connection reads the configured
files again if one was replaced. Over gRPC, a new channel reads the client's certificate and key, and an open channel
keeps its own.
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

# Encrypted bytes that may wait for a full socket: one piece, and OpenSSL's own answers to the server.
_MOST_UNSENT: Final = 1024 * 1024

# Reads per call of `handshake`. A server may send without end (OpenSSL skips any number of HelloRequests), and the
# event loop must serve other connections and check the deadline.
_MOST_READS: Final = 7

# A read leaves room for a record that earlier reads have begun: more than the longest one (RFC 5246 section 6.2.3).
_RECORD: Final = 20 * 1024

# Takes a connected socket and the dialled host, returns the object to send and receive with.
Secure: TypeAlias = "Callable[[socket.socket, str], TlsStream]"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The certificates of servers and of this client. All files are PEM."""

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
            # Also an SSLError: the file has no certificate.
            raise OptionError(
                f"option tlsCaFile: reading {self.ca_file!r} failed: {exc}. Give a PEM file with the certificates of "
                "the authorities that signed the servers' certificates, at this path on the driver and every executor"
            ) from exc
        # During a renegotiation writes would wait for reads.
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
                reason = f"option {option}: reading {path!r} failed: {exc.strerror or exc}"
                raise OptionError(f"{reason}; the driver and every executor must be able to read this file") from exc
        try:
            context.load_cert_chain(cert_file, key_file, password=_no_password)
        except ssl.SSLError as exc:
            if self.key_file is None:
                text = f"option tlsCertFile: {cert_file!r} does not hold both a certificate and its private key"
                raise OptionError(f"{text} ({exc.reason or exc}): set tlsKeyFile to the key's file") from exc
            misfit = "is not the key of the certificate in" if exc.reason == "KEY_VALUES_MISMATCH" else "does not fit"
            text = f"options tlsCertFile, tlsKeyFile: {key_file!r} {misfit} {cert_file!r} ({exc.reason or exc})"
            raise OptionError(f"{text}; give PEM files with the client's certificate and with its private key") from exc
        except _EncryptedKeyError:
            raise OptionError(
                f"option tlsKeyFile: the key in {key_file!r} is encrypted: remove its password, and make it readable "
                "only for the user of Spark's workers (openssl pkey -in encrypted.key -out plain.key)"
            ) from None

    @property
    def refusals(self) -> frozenset[str]:
        """The alerts about this client's certificate, by OpenSSL's names; `NO_REASON` only if it has one."""
        return REFUSAL_ALERTS if self.cert_file is None else REFUSAL_ALERTS | {NO_REASON}

    def own_certificate(self) -> tuple[bytes | None, bytes | None]:
        """Return this client's private key and certificate (PEM), for gRPC's own TLS."""
        if self.cert_file is None:
            return None, None
        self.context()  # Checks the files
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
        """Return values that change if a file is replaced."""
        stamps = []
        for path in filter(None, (self.ca_file, self.cert_file, self.key_file)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                stamps.append((path, status.st_ino, status.st_mtime_ns, status.st_size))
        return stamps


class _EncryptedKeyError(Exception):
    """The key needs a password."""


def _no_password() -> str:
    # Without this function, OpenSSL would prompt at the terminal.
    raise _EncryptedKeyError


class TlsStream:
    """The encrypted stream over a connected, non-blocking socket, which the caller watches and closes.

    A write encrypts 64 KiB at a time, and only when all bytes encrypted before are sent. So at most 64 KiB count as
    written and are not sent. The lock guards OpenSSL's objects. A read leaves no decrypted bytes in OpenSSL, because a
    selector would not report them. The certificate must name `server_name` if set, else the dialled `host`; ValueError:
    no certificate could have this name.
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
        # True after data was decrypted: the server has accepted this client.
        self._accepted = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_name or host)
        self._unsent = memoryview(b"")
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TlsStream {self._host} {self._ssl.version()}, {len(self._unsent)} bytes unsent>"

    @property
    def unsent(self) -> bool:
        """Whether encrypted bytes wait for the socket."""
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
        """Return how many bytes of `pieces` were encrypted to be sent, perhaps none while older ones are being sent.

        Raises BlockingIOError if no byte moved, another OSError if the connection is broken.
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
                # A failure must not count as a write of nothing, because some bytes may have been sent. The socket
                # repeats its error at the next call.
                with contextlib.suppress(OSError):
                    self._flush()
            if not moved and not taken:
                raise BlockingIOError
            return taken

    def recv_into(self, view: memoryview) -> int:
        """Like `socket.recv_into`, for one read; raises BlockingIOError without a complete record."""
        count = self._sock.recv_into(view[: len(view) - _RECORD])
        if not count:
            return 0
        filled, close_notify = 0, False
        with self._lock:
            self._incoming.write(view[:count])
            try:
                # With a buffer it returns a count, unlike its type stub.
                while decrypted := cast(int, self._ssl.read(len(view) - filled, view[filled:])):
                    filled += decrypted
                    self._accepted = True
                close_notify = True
            except ssl.SSLWantReadError:
                # OpenSSL answers a key update by itself. The next call reports an error of the socket.
                with contextlib.suppress(OSError):
                    self._flush()
                if len(self._unsent) > _MOST_UNSENT:
                    raise ConnectionAbortedError(
                        "the server sends TLS key updates, and does not read the client's answers"
                    ) from None
            except ssl.SSLError as exc:
                # Such as an alert. Bytes decrypted before it are returned: the next read finds the end of the stream.
                if not filled:
                    # With TLS 1.3 a client's handshake ends before the server has checked its certificate.
                    raise (refusal(exc) if exc.reason in self._refusals and not self._accepted else exc) from exc
        if not filled and not close_notify:
            raise BlockingIOError
        return filled

    def read_refusal(self) -> CertificateError | None:
        """Read what a broken connection still holds; return an alert about this client's certificate, else None."""
        try:
            self.recv_into(memoryview(bytearray(2 * _RECORD)))
        except OSError as exc:
            return exc if isinstance(exc, CertificateError) else None
        return None

    def _handshake(self) -> bool:
        reads = 0
        while True:
            done = True
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLError:
                # Send the alert, which tells the server the reason.
                with contextlib.suppress(OSError):
                    self._flush()
                raise
            self._flush()
            # After the last read OpenSSL has processed all bytes: the selector reports only new ones.
            if done or reads == _MOST_READS:
                return done
            try:
                data = self._sock.recv(_RECORD)
            except (BlockingIOError, InterruptedError):
                return False
            if not data:
                raise ConnectionResetError("end of stream")
            self._incoming.write(data)
            reads += 1

    def _flush(self) -> bool:
        """Send encrypted bytes; return whether the socket took any."""
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
    """Yield the bytes in pieces of 64 KiB: few records, and bounded copies."""
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
