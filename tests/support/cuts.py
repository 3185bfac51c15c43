"""A link to a driver that some processes lose, while their connections stay open."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable

import psutil

_CHUNK = 64 * 1024


class DriverLink:
    """Forwards the ports of a driver from another address of this machine, until `cut`.

    Executors get that address as the driver's. After `cut`, nothing is forwarded from or to the given processes, as if
    the network between had failed.
    """

    HOST = "127.0.0.77"
    DRIVER = "127.0.0.1"

    def __init__(self, ports: int) -> None:
        self._listeners = [socket.create_server((self.HOST, 0), backlog=64) for _ in range(ports)]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._cut: set[int] = set()
        # Local ports of clients, for those that connect later, too.
        self._owners: dict[int, int] = {}
        self._sockets: list[socket.socket] = []
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self, pids: Iterable[int]) -> None:
        """Forward nothing more for these processes."""
        self._cut.update(pids)

    def close(self) -> None:
        """Close all connections."""
        for end in (*self._listeners, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self, listener: socket.socket) -> None:
        port = listener.getsockname()[1]
        with contextlib.suppress(OSError):
            while True:
                client, (_, client_port) = listener.accept()
                self._sockets.append(client)
                with contextlib.suppress(OSError):
                    driver = socket.create_connection((self.DRIVER, port))
                    self._sockets.append(driver)
                    for source, sink in ((client, driver), (driver, client)):
                        threading.Thread(target=self._pump, args=(source, sink, client_port), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, client_port: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if self._is_cut(client_port):
                    # The connections stay open, and both sides wait.
                    return
                sink.sendall(data)
            if not self._is_cut(client_port):
                sink.shutdown(socket.SHUT_WR)

    def _is_cut(self, client_port: int) -> bool:
        if not self._cut:
            return False
        if client_port not in self._owners:
            for connection in psutil.net_connections("tcp"):
                if connection.laddr.port == client_port and connection.pid is not None:
                    self._owners[client_port] = connection.pid
        return self._owners.get(client_port) in self._cut
