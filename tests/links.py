"""A small TCP proxy: a link that can be slow, and that may change what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

# Small buffers: what a slow link holds is on its way, not hidden in the proxy.
_BUFFER = 64 * 1024
_CHUNK = 16 * 1024


class TcpProxy:
    """Forwards every connection to `target`.

    Parameters
    ----------
    target : str
        ``host:port``.
    bytes_per_second : float or None, default None
        Speed from client to server, over all connections together.
    rewrite : callable, default none
        Applied to each piece that the server sends; it must keep the length.
    """

    def __init__(
        self,
        target: str,
        *,
        bytes_per_second: float | None = None,
        rewrite: Callable[[bytes], bytes] = bytes,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._rate = bytes_per_second
        self._rewrite = rewrite
        self._free_at = 0.0
        self._turn = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.forwarded = 0
        self.accepted = 0
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

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                server = socket.create_connection(self._target, timeout=5)
                self._sockets.append(server)
                server.settimeout(None)
                self.accepted += 1
                self._start(self._pump, client, server, self._slow)
                self._start(self._pump, server, client, self._rewrite)

    def _slow(self, data: bytes) -> bytes:
        self.forwarded += len(data)
        if self._rate:
            with self._turn:
                self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._rate
                wait = self._free_at - time.monotonic()
            time.sleep(max(0.0, wait))
        return data

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, passing: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                sink.sendall(passing(data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def slow_cluster(name_server: str, brokers: list[str], bytes_per_second: float) -> Iterator[str]:
    """Put a slow link before every broker, and yield the address of a name server whose routes lead over the links."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(TcpProxy(broker, bytes_per_second=bytes_per_second)) for broker in brokers]
        addresses = {broker.encode(): link.address.encode() for broker, link in zip(brokers, links, strict=True)}
        assert all(len(old) == len(new) for old, new in addresses.items()), "ports of another length"

        def rewrite(data: bytes) -> bytes:
            for old, new in addresses.items():
                data = data.replace(old, new)
            return data

        yield stack.enter_context(TcpProxy(name_server, rewrite=rewrite)).address
