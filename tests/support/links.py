"""A TCP proxy for tests: a link that can delay, change and cut the bytes that pass through it.

A `Passing` gets each received piece, and yields the pieces to forward. It may wait between them. If it raises an
OSError, the proxy closes the connection at that point.
"""

from __future__ import annotations

import contextlib
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

# Small buffers, so that a slow link holds back the sender instead of filling the proxy.
_BUFFER = 64 * 1024
_CHUNK = 16 * 1024

Passing: TypeAlias = "Callable[[bytes], Iterable[bytes]]"


def unchanged(data: bytes) -> Iterator[bytes]:
    yield data


class TcpProxy:
    """Forwards every connection to `target`.

    `bytes_per_second` limits all connections together, from client to server. `to_server` and `to_client` get the
    pieces of all connections. With `tls` the proxy speaks TLS to clients, and plain TCP to the target.
    """

    def __init__(
        self,
        target: str,
        *,
        bytes_per_second: float | None = None,
        to_server: Passing = unchanged,
        to_client: Passing = unchanged,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._rate = bytes_per_second
        self._to_server = to_server
        self._to_client = to_client
        self._tls = tls
        self._free_at = 0.0
        self._turn = threading.Lock()
        self._starting = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.forwarded = 0
        self.accepted = 0
        # While it is set, new connections are closed at once.
        self.is_cut = False
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> TcpProxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        # Shut down first: closing alone would leave a thread waiting in accept or recv.
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._sockets):
            end.close()

    @property
    def is_idle(self) -> bool:
        """Whether every connection that was accepted has been hung up."""
        return not any(thread.is_alive() for thread in self._threads[1:])

    @property
    def connections(self) -> int:
        """The number of connections that are open."""
        return len(self._sockets) // 2

    def cut(self) -> None:
        """Close all connections."""
        for end in tuple(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        with self._starting:
            self._threads[1:] = [one for one in self._threads[1:] if one.is_alive()]
            self._threads.append(thread)
            thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                if self.is_cut:
                    client.close()
                else:
                    self._start(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        if self._tls:
            client = self._tls.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        self._sockets.append(client)
        try:
            if isinstance(client, ssl.SSLSocket):
                client.do_handshake()
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            # The target refuses connections, or the client does not trust the certificate.
            self._close(client)
            return
        self._sockets.append(server)
        server.settimeout(None)
        back = self._start(self._pump, server, client, self._to_client)
        self._pump(client, server, self._slow)
        back.join()
        self._close(client, server)

    def _close(self, *ends: socket.socket) -> None:
        for end in ends:
            end.close()
            with contextlib.suppress(ValueError):
                self._sockets.remove(end)

    def _slow(self, data: bytes) -> Iterable[bytes]:
        self.forwarded += len(data)
        if self._rate:
            with self._turn:
                self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._rate
                wait = self._free_at - time.monotonic()
            time.sleep(max(0.0, wait))
        return self._to_server(data)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, passing: Passing) -> None:
        # ValueError: TLS has been ended by the other direction.
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(_CHUNK):
                for piece in passing(data):
                    sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_cluster(name_server: str, brokers: list[str], bytes_per_second: float) -> Iterator[str]:
    """Put a slow link before every broker, and yield the address of a name server whose routes lead over the links."""
    with linked_cluster(name_server, brokers, bytes_per_second=bytes_per_second) as (address, _):
        yield address


@contextlib.contextmanager
def linked_cluster(
    name_server: str, brokers: Sequence[str], **settings: Any
) -> Iterator[tuple[str, tuple[TcpProxy, ...]]]:
    """Put a link before every broker; yield the address of a name server whose routes lead over them, and the links.

    `settings` are those of each `TcpProxy`.
    """
    with linked_servers([name_server], brokers, **settings) as (name_servers, links):
        yield name_servers[0].address, links


@contextlib.contextmanager
def linked_servers(
    name_servers: Sequence[str], brokers: Sequence[str], **settings: Any
) -> Iterator[tuple[tuple[TcpProxy, ...], tuple[TcpProxy, ...]]]:
    """Put a link before every name server and broker; the routes of the name servers' links lead over the others.

    `settings` are those of the links of brokers.
    """
    with contextlib.ExitStack() as stack:
        links = tuple(stack.enter_context(TcpProxy(broker, **settings)) for broker in brokers)
        addresses = {broker.encode(): link.address.encode() for broker, link in zip(brokers, links, strict=True)}
        assert all(len(old) == len(new) for old, new in addresses.items()), "ports of another length"

        def rewrite(data: bytes) -> Iterator[bytes]:
            for old, new in addresses.items():
                data = data.replace(old, new)
            yield data

        yield tuple(stack.enter_context(TcpProxy(server, to_client=rewrite)) for server in name_servers), links


class StaleRoutes:
    """A link to a name server that repeats its old routes while it is `frozen`."""

    def __init__(self) -> None:
        self.frozen = False
        # Topics by the number of their request, and the last routes before the freeze.
        self._topics: dict[bytes, bytes] = {}
        self._routes: dict[bytes, bytes] = {}

    def to_server(self, data: bytes) -> Iterator[bytes]:
        if topic := re.search(rb'"topic":"([^"]+)"', data):
            self._topics[_opaque_of(data)] = topic[1]
        yield data

    def to_client(self, data: bytes) -> Iterator[bytes]:
        # A small answer comes as a whole: the length, the length of the header, the header and the body.
        _, word = struct.unpack_from(">iI", data)
        head, body = data[8 : 8 + (word & 0xFFFFFF)], data[8 + (word & 0xFFFFFF) :]
        topic = self._topics.get(_opaque_of(head))
        if topic is not None and b"brokerDatas" in body:
            body = self._routes.setdefault(topic, body) if self.frozen else body
            self._routes[topic] = body
        yield struct.pack(">iI", 4 + len(head) + len(body), word) + head + body


def _opaque_of(data: bytes) -> bytes:
    found = re.search(rb'"opaque":(\d+)', data)
    assert found is not None, data
    return found[1]


class Fault:
    """Applies `act` to a stream of bytes at random positions; see the functions below.

    `act` gets a piece and a position in it, and yields the pieces to forward. Faults are `every` bytes apart on
    average. `times` is the number of faults so far.
    """

    def __init__(self, act: Callable[[bytes, int], Iterator[bytes]], every: int, seed: int = 1) -> None:
        self._act = act
        self._every = every
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._next = self._gap()
        self.times = 0

    def __call__(self, data: bytes) -> Iterator[bytes]:
        with self._lock:
            at, self._next = self._next, self._next - len(data)
            due = self._next < 0
            if due:
                self._next = self._gap()
                self.times += 1
        return self._act(data, at) if due else unchanged(data)

    def _gap(self) -> int:
        return self._random.randrange(1, 2 * self._every)


def cut(data: bytes, at: int) -> Iterator[bytes]:
    """Close the connection within a piece."""
    yield data[:at]
    raise ConnectionAbortedError


def freeze(seconds: float) -> Callable[[bytes, int], Iterator[bytes]]:
    """Return an act that forwards the first part of a piece, waits, and forwards the rest."""

    def act(data: bytes, at: int) -> Iterator[bytes]:
        yield data[:at]
        time.sleep(seconds)
        yield data[at:]

    return act


def flip(data: bytes, at: int) -> Iterator[bytes]:
    """Change one bit."""
    yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def delayed(seconds: float) -> Passing:
    """Return a `Passing` that delays every piece."""

    def passing(data: bytes) -> Iterator[bytes]:
        time.sleep(seconds)
        yield data

    return passing
