"""Connects a socket to ``host:port`` without blocking, with TLS if configured.

The addresses of the host are tried in the resolver's order, until one works. Each gets an equal share of the time left,
for the connect and the TLS handshake together. A separate thread looks up a name, because the system's resolver blocks.
`Dial` never closes a socket. It puts those of failed attempts into `abandoned`, and the caller closes them once its
selector no longer watches them.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from rocketmq_spark.model.route import parse_address
from rocketmq_spark.transport.runtime import PROCESS, Runtime
from rocketmq_spark.transport.tls import Secure, TlsStream

Candidate: TypeAlias = "tuple[socket.AddressFamily, Any]"

# Bytes that the kernel buffers unsent. A send's timeout counts from its last byte written. With Linux's 4 MiB a request
# on a slow link could time out before it leaves the host. Half a MiB is 0.4 s at 10 Mbit/s, and several milliseconds of
# work for a broker at full speed.
_MOST_NOT_SENT: Final = 512 * 1024
_NOTSENT_LOWAT: Final[int | None] = getattr(
    socket, "TCP_NOTSENT_LOWAT", {"linux": 25, "darwin": 0x201}.get(sys.platform)
)

# With this option, `close` discards unsent bytes and resets the connection.
_NO_LINGER: Final = struct.pack("ii", 1, 0)

# Lookups at once in one process; without an answer the thread of a lookup outlives the connect's timeout.
_MOST_LOOK_UPS: Final = 64
_LOOK_UP: Final = "rocketmq-spark-lookup-"

# Addresses in an error; a name may have thousands.
_MOST_SHOWN: Final = 8

_IN_PROGRESS: Final = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EALREADY})


def resolve(host: str, port: int, flags: int = 0) -> list[Candidate]:
    """Return the addresses of a host from the system's resolver; blocks unless `flags` is AI_NUMERICHOST."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((family, sockaddr) for family, _, _, _, sockaddr in entries))


def discard(sock: socket.socket | None) -> None:
    """Let the system send nothing more of what it has accepted: otherwise it tries for minutes after a close."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


class Dial:
    """One attempt to connect to a server, until `deadline`. A thread calls `look_up`, which may block, then `wake`."""

    def __init__(
        self,
        address: str,
        deadline: float,
        wake: Callable[[], None],
        look_up: Callable[[str, int], list[Candidate]] = resolve,
        *,
        secure: Secure | None = None,
        runtime: Runtime = PROCESS,
    ) -> None:
        self.address = address
        self.deadline = deadline
        self.sock: socket.socket | None = None
        self.connected = False
        self.failed = False
        # The numeric address that was tried last.
        self.tried = ""
        self.failures: list[tuple[str, Exception]] = []
        self.abandoned: list[socket.socket] = []
        self._wake = wake
        self._look_up = look_up
        self._secure = secure
        self._runtime = runtime
        self._secured: TlsStream | None = None
        self._candidates: deque[Candidate] | None = None
        self._looked_up: list[Candidate] | Exception | None = None
        self._attempt_deadline = math.inf

    @property
    def stream(self) -> socket.socket | TlsStream | None:
        """The object to send and receive with when connected."""
        return self._secured or self.sock

    @property
    def wants_write(self) -> bool:
        """Whether to watch for writability: during the TCP connect, or for bytes of the handshake."""
        return self._secured is None or self._secured.unsent

    @property
    def wants_read(self) -> bool:
        """Whether to watch for readability: during a handshake."""
        return self._secured is not None

    @property
    def due(self) -> float:
        """The time at which :meth:`step` must be called at the latest."""
        return min(self.deadline, self._attempt_deadline)

    @property
    def reasons(self) -> str:
        """The addresses and their failures, for an error."""
        shown = [f"{tried}: {reason}" for tried, reason in self.failures[:_MOST_SHOWN]]
        more = len(self.failures) - len(shown)
        return "; ".join([*shown, f"and {more} more addresses"] if more else shown)

    def begin(self, now: float) -> None:
        """Resolve the host and start with its first address."""
        try:
            host, port = parse_address(self.address)
        except ValueError as exc:
            self._fail(exc)
            return
        try:
            self._candidates = deque(resolve(host, port, socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            if sum(thread.name.startswith(_LOOK_UP) for thread in threading.enumerate()) >= _MOST_LOOK_UPS:
                text = f"not resolved, because {_MOST_LOOK_UPS} names are being looked up already"
                self._fail(OSError(f"{text}; check that the DNS server answers"))
                return
            name = f"{_LOOK_UP}{host}"
            try:
                threading.Thread(target=self._resolve, args=(host, port), name=name, daemon=True).start()
            except RuntimeError:
                # The process ends, or may have no more threads.
                self._resolve(host, port)
        else:
            self.step(now)

    def _resolve(self, host: str, port: int) -> None:
        try:
            self._looked_up = self._look_up(host, port)
        except (OSError, ValueError) as exc:
            self._looked_up = exc
        self._wake()

    def step(self, now: float) -> None:
        """Use the lookup's result, abandon an address that timed out, and try the next one."""
        if self.connected or self.failed:
            return
        if self._candidates is None:
            if self._looked_up is None and now >= self.deadline:
                self._looked_up = TimeoutError(
                    "the host name was not resolved in time; check that the DNS server answers"
                )
            if isinstance(self._looked_up, Exception):
                self._fail(self._looked_up)
            if not isinstance(self._looked_up, list):
                return
            self._candidates = deque(self._looked_up)
        if self.sock is not None and now >= self._attempt_deadline:
            timeout = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            if self._secured is not None:
                timeout = TimeoutError(
                    "connected, but the TLS handshake did not end in time; does the server speak TLS?"
                )
            self._attempt_failed(timeout)
        while self.sock is None and not self.failed:
            self._try_next(now)

    def on_ready(self, now: float) -> None:
        """Handle the end of the connect, or continue the handshake; after a failure try the next address."""
        sock = self.sock
        if sock is None or self.connected:
            return
        try:
            if self._secured is None:
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                # A connect to a free local port may by chance meet itself (simultaneous open).
                if not error and sock.getsockname() == sock.getpeername():
                    error = errno.ECONNREFUSED
                if error:
                    raise OSError(error, os.strerror(error))
                if self._secure is not None:
                    self._secured = self._secure(sock, parse_address(self.address)[0])
            self.connected = self._secured is None or self._secured.handshake()
        except (OSError, ValueError) as exc:
            self._attempt_failed(exc)
            self.step(now)

    def _try_next(self, now: float) -> None:
        assert self._candidates is not None
        left = len(self._candidates)
        if not left or now >= self.deadline:
            self.failed = True
            return
        family, sockaddr = self._candidates.popleft()
        host = f"[{sockaddr[0]}]" if family == socket.AF_INET6 else sockaddr[0]
        self.tried = f"{host}:{sockaddr[1]}"
        self._attempt_deadline = now + (self.deadline - now) / left
        try:
            self.sock = self._runtime.socket(family)
            self.sock.setblocking(False)
            # Small requests must not wait for the acknowledgement of earlier ones. The kernel chooses buffer sizes:
            # fixed SO_SNDBUFs of 128 KiB to 4 MiB had no measurable effect on loopback. A fixed size would also limit
            # autotuning, which a long fat link needs, to net.core.wmem_max (208 KiB by default).
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _NOTSENT_LOWAT is not None:
                # The connection also works on a kernel or sandbox without this option.
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _MOST_NOT_SENT)
            error = self.sock.connect_ex(sockaddr)
        except OSError as exc:
            self._attempt_failed(exc)
            return
        if error not in _IN_PROGRESS:
            self._attempt_failed(OSError(error, os.strerror(error)))

    def _attempt_failed(self, error: Exception) -> None:
        self.failures.append((self.tried, error))
        if self.sock is not None:
            self.abandoned.append(self.sock)
            self.sock = None
        self._secured = None
        self._attempt_deadline = math.inf

    def _fail(self, error: Exception) -> None:
        self.failures.append((self.address, error))
        self.failed = True
