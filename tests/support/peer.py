"""A TCP server that answers what a correct server never does; `FakeCluster` plays the others.

`Peer` runs one function per accepted connection, in a new thread. The function reads and answers by a `Session`::

    def answer_backwards(session):
        first, second = session.read(), session.read()
        session.answer(second)
        session.answer(first)

    with Peer(answer_backwards) as peer:
        transport.send(request_to(peer.address), ...)

The n-th connection runs the n-th function; later connections run the last.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping

from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand
from rocketmq_spark.transport.tls_probe import REMOTING_HELLO
from tests.support.frames import SerializeType, encode_command
from tests.support.processes import PATIENCE

# In a ClientHello (RFC 7301 section 3.1): the remoting protocol's own has no such offer.
_OFFERS_H2 = b"\x00\x03\x02h2"
# A client sends at once. If no byte arrives in this time (seconds), the connection's function starts.
_FIRST_BYTES_WITHIN = 0.1
_KEPT: list[socket.socket] = []


def address_of(sock: socket.socket) -> str:
    """``127.0.0.1:port`` of a bound socket."""
    return f"127.0.0.1:{sock.getsockname()[1]}"


def refused_address() -> str:
    """Return an address that refuses connections until a test starts a server there.

    A bound socket keeps the port, so no other test gets it. With SO_REUSEADDR a server can still listen at it.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    _KEPT.append(sock)
    return address_of(sock)


class Session:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameBuffer()

    def read(self) -> RemotingCommand:
        """Return the client's next command; EOFError when it hangs up."""
        while (command := self.frames.take()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.frames.feed(data)
        return command

    def read_bytes(self, count: int) -> None:
        """Receive and drop `count` bytes."""
        while count:
            count -= len(self.sock.recv(min(count, 1 << 16)))

    def encoded(
        self,
        request: RemotingCommand,
        code: int = 0,
        ext_fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        remark: str = "",
        serialize_type: SerializeType = SerializeType.JSON,
        version: int = 513,
    ) -> bytes:
        """Return the frame that answers a request."""
        answer = RemotingCommand(code, request.opaque, ext_fields or {}, body, 1, remark, "JAVA", version)
        return encode_command(answer, serialize_type)

    def answer(self, request: RemotingCommand, *args: object, **kwargs: object) -> None:
        """Answer a request; arguments as for `encoded`."""
        self.sock.sendall(self.encoded(request, *args, **kwargs))  # type: ignore[arg-type]

    def answer_send(self, request: RemotingCommand, code: int = 0, offset: int = 0) -> None:
        """Acknowledge a send."""
        self.answer(request, code, stored_fields(request, offset))

    def serve(self) -> None:
        """Acknowledge every send until the client hangs up."""
        while True:
            self.answer_send(self.read())

    def wait_for_hangup(self) -> None:
        """Return when the client has closed the connection."""
        while self.sock.recv(1 << 16):
            pass

    def reset(self) -> None:
        """Close with a RST instead of a FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def stored_fields(request: RemotingCommand, offset: int) -> dict[str, str]:
    """The ext fields of an acknowledgement."""
    return {"msgId": f"{offset:032X}", "queueId": request.ext_fields.get("e", "0"), "queueOffset": str(offset)}


class Peer:
    """A listening socket and the functions that its connections play."""

    def __init__(
        self,
        *scripts: Callable[[Session], object],
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        answers_greetings: bool = False,
    ) -> None:
        self.scripts = scripts
        self.tls = tls
        self.answers_greetings = answers_greetings
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family)
        self.port = self.listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.sessions: list[Session] = []
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def __enter__(self) -> Peer:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        # Closing the listener would not wake accept(); a connection does.
        with contextlib.suppress(OSError), socket.create_connection(self.listener.getsockname()[:2], PATIENCE):
            pass
        for session in self.sessions:
            with contextlib.suppress(OSError):
                session.sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(PATIENCE)
        self.listener.close()
        if self.failures:
            raise self.failures[0]

    def _spawn(self, target: Callable[..., object], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            if self._stopped:
                sock.close()
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self.answers_greetings and self._is_greeting(sock):
                sock.close()
                continue
            session = Session(sock)
            script = self.scripts[min(len(self.sessions), len(self.scripts) - 1)]
            self.sessions.append(session)
            self._spawn(self._play, script, session)

    def _is_greeting(self, sock: socket.socket) -> bool:
        """Return whether a connection only probes this server for TLS; no function runs for it."""
        sock.settimeout(_FIRST_BYTES_WITHIN)
        try:
            first = sock.recv(2048, socket.MSG_PEEK)
        except OSError:
            first = b""
        sock.settimeout(None)
        return first == REMOTING_HELLO or (self.tls is None and _OFFERS_H2 in first)

    def _play(self, script: Callable[[Session], object], session: Session) -> None:
        try:
            with session.sock:
                if self.tls is not None:
                    session.sock = self.tls.wrap_socket(session.sock, server_side=True)
                with session.sock:
                    script(session)
        except (EOFError, OSError):
            pass  # the client hung up, as it may
        except BaseException as exc:
            self.failures.append(exc)


@contextlib.contextmanager
def full_listener() -> Iterator[socket.socket]:
    """A listening socket whose queue is full: it leaves further connects without an answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            if not select.select([], [sock], [], 0.3)[1]:
                break
        yield listener
