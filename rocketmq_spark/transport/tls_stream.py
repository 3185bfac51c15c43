"""TLS over a socket that never blocks.

Bytes are encrypted in pieces of 64 KiB, the next one when the socket has accepted the last: no more than that can be
"written" and not sent. One lock per stream guards OpenSSL's objects. Reading leaves nothing decrypted behind, because a
selector would not report it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Final, cast

from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.tls import REFUSAL_ALERTS, CertificateError, advice, handshake_error, refusal

_HELPING: Final = 64 * 1024

# Bytes that may wait for a full socket: one piece, and OpenSSL's own answers to the server.
_MOST_UNSENT: Final = 1024 * 1024

# Reads per turn of a handshake: a server that sends without end (OpenSSL skips any number of HelloRequests) must not
# keep the loop from other connections and from the deadline.
_READS: Final = 8

# More than the longest record (RFC 5246 section 6.2.3): of one that has begun to arrive, so much may be here already.
_RECORD: Final = 20 * 1024


class TlsStream:
    """The bytes of one connected socket, encrypted; `sendmsg` and `recv_into` as a socket has them.

    Parameters
    ----------
    sock : socket
        Connected, non-blocking. The caller watches and closes it.
    host : str
        Name or address that was dialled.
    server_name : str, optional
        What the certificate must name instead of the host.
    refusals : frozenset of str, default REFUSAL_ALERTS
        See `TlsSettings.refusals`.

    Raises
    ------
    ValueError
        No certificate could have this name.
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
