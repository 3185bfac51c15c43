"""Simulated TCP: sockets that never block, a selector, and links that delay, cut and stop the bytes between two ends.

The real connections of the client use the sockets. At the other end are the fake servers. Bytes of one direction stay
in order, as in TCP.
"""

from __future__ import annotations

import errno
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand, encode_head
from tests.simulation.world import World

# Bytes that a socket takes before the peer has received them.
_SEND_BUFFER = 256 * 1024


class Server(Protocol):
    """What listens at an address."""

    def receive(self, command: RemotingCommand, channel: Any) -> None: ...

    def disconnected(self, channel: Any) -> None: ...


@dataclass
class Conditions:
    """How the network treats bytes; the faults of a schedule change it."""

    latency: float = 0.0005
    # The chance that a delivery takes up to `long_delay` instead.
    delayed: float = 0.0
    long_delay: float = 1.0
    # The chance, for each written piece, that the link breaks before, within or after it.
    broken: float = 0.0
    # The chance that a connect is refused or lost.
    refused: float = 0.0
    # The chance that a socket takes only a part of what is written.
    partial: float = 0.1
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """Count a fault."""
        self.counts[kind] = self.counts.get(kind, 0) + 1


class Network:
    """The addresses at which servers listen, and the links to them."""

    def __init__(self, world: World, conditions: Conditions) -> None:
        self.world = world
        self.conditions = conditions
        self.servers: dict[str, Server] = {}
        # Addresses whose bytes wait until `heal`.
        self.partitioned: set[str] = set()
        self.links: list[Link] = []

    def socket(self) -> Socket:
        """Return a new socket."""
        return Socket(self.world, self)

    def socketpair(self) -> tuple[Socket, Socket]:
        """Return two connected sockets; what one sends is at the other at once."""
        first, second = Socket(self.world, None), Socket(self.world, None)
        first.pair = second
        first.state = second.state = "open"
        return first, second

    def listen(self, address: str, server: Server) -> None:
        """Accept connections at an address."""
        self.servers[address] = server

    def close(self, address: str) -> None:
        """Refuse connections at an address, and break the open ones."""
        self.servers.pop(address, None)
        self.break_links(address)

    def break_links(self, address: str) -> None:
        """Break all connections to an address."""
        for link in [link for link in self.links if link.address == address]:
            link.abort()

    def partition(self, address: str) -> None:
        """Hold back all bytes from and to an address."""
        self.partitioned.add(address)

    def heal(self, address: str) -> None:
        """Deliver what was held back."""
        self.partitioned.discard(address)
        for link in self.links:
            if link.address == address:
                link.deliver_held()

    def delay(self) -> float:
        """Draw the time of one delivery."""
        rng, conditions = self.world.rng, self.conditions
        if conditions.delayed and rng.random() < conditions.delayed:
            conditions.count("delivery delayed")
            return rng.random() * conditions.long_delay
        return conditions.latency * (0.5 + rng.random())


class Link:
    """One connection, and the channel of the server at its end."""

    def __init__(self, network: Network, sock: Socket, address: str, server: Server) -> None:
        self.network = network
        self.world = network.world
        self.sock = sock
        self.address = address
        self.server = server
        self.open = True
        self.in_flight = 0
        self._cut = False
        self._frames = FrameBuffer()
        self._arrivals = [0.0, 0.0]
        self._held: list[Callable[[], None]] = []

    @property
    def peer(self) -> str:
        """The client's address."""
        return "10.0.0.1:50000"

    def send(self, command: RemotingCommand) -> None:
        """Send an answer to the client."""
        if self.open:
            data = encode_head(command, len(command.body)) + bytes(command.body)
            self._deliver(1, lambda: self._arrive_at_client(data))

    def close(self) -> None:
        """Break the connection, from the server's side."""
        self.abort()

    def write(self, data: bytes) -> None:
        """Send bytes of the client to the server; the link may break at them."""
        conditions, rng = self.network.conditions, self.world.rng
        if self._cut:
            return
        self.in_flight += len(data)
        if conditions.broken and rng.random() < conditions.broken:
            conditions.count("link broken")
            # Nothing, a part, or everything arrives, and nothing after it; the client learns of it later.
            self._cut = True
            cut = rng.choice((0, rng.randrange(len(data) + 1), len(data)))
            if cut:
                self._deliver(0, lambda: self._arrive_at_server(data[:cut]))
            self._deliver(0, self.abort)
            return
        self._deliver(0, lambda: self._arrive_at_server(data))

    def abort(self) -> None:
        """Break the connection: both ends learn of it."""
        if self.open:
            self.open = False
            self.network.links.remove(self)
            self.server.disconnected(self)
            self.sock.on_end(reset=self.world.rng.random() < 0.5)

    def closed_by_client(self) -> None:
        """The client has closed its end: bytes that are under way still arrive."""
        if self.open:
            self.open = False
            self._deliver(0, lambda: self.server.disconnected(self), even_if_closed=True)
            if self in self.network.links:
                self.network.links.remove(self)

    def deliver_held(self) -> None:
        """Deliver what a partition held back."""
        held, self._held = self._held, []
        for call in held:
            call()

    def _deliver(self, direction: int, call: Callable[[], None], *, even_if_closed: bool = False) -> None:
        arrival = max(self.world.now + self.network.delay(), self._arrivals[direction])
        self._arrivals[direction] = arrival

        def arrive() -> None:
            if self.address in self.network.partitioned:
                self._held.append(arrive)
            elif self.open or even_if_closed or direction == 0:
                call()

        self.world.call_later(arrival - self.world.now, arrive)

    def _arrive_at_server(self, data: bytes) -> None:
        self.in_flight -= len(data)
        self.sock.changed()
        # A server that was replaced or stopped meanwhile does not get the bytes.
        if self.network.servers.get(self.address) is not self.server:
            return
        try:
            self._frames.feed(data)
            while (command := self._frames.take()) is not None:
                self.server.receive(command, self)
        except RemotingCommandException:
            self.abort()

    def _arrive_at_client(self, data: bytes) -> None:
        self.sock.on_bytes(data)


class Socket:
    """A client's socket; `pair` is the other end of a socketpair."""

    def __init__(self, world: World, network: Network | None) -> None:
        self.world = world
        self.network = network
        self.pair: Socket | None = None
        self.state = "new"
        self.selectors: list[Selector] = []
        self._error = 0
        self._link: Link | None = None
        self._received = bytearray()
        self._ended: OSError | None = None
        self._end = False

    @property
    def readable(self) -> bool:
        """Whether a read returns bytes, the end or an error."""
        return bool(self._received) or self._end or self._ended is not None

    @property
    def writable(self) -> bool:
        """Whether the connect has ended, and the buffer has room."""
        if self.state == "connecting":
            return False
        return self._link is None or self._link.in_flight < _SEND_BUFFER

    def setblocking(self, _: bool) -> None:
        """Do nothing: the socket never blocks."""

    def setsockopt(self, *_: object) -> None:
        """Do nothing."""

    def connect_ex(self, sockaddr: tuple[str, int]) -> int:
        """Begin to connect."""
        assert self.network is not None
        network, address = self.network, f"{sockaddr[0]}:{sockaddr[1]}"
        self.state = "connecting"
        conditions = network.conditions
        lost = conditions.refused and self.world.rng.random() < conditions.refused
        if lost:
            conditions.count("connect refused")

        def end() -> None:
            if self.state != "connecting":
                return
            if address in network.partitioned:
                # A SYN is sent again until the partition heals.
                self.world.call_later(0.5, end)
                return
            server = network.servers.get(address)
            self.state = "open"
            if server is None or lost:
                self._error = errno.ECONNREFUSED
            else:
                self._link = Link(network, self, address, server)
                network.links.append(self._link)
            self.changed()

        self.world.call_later(network.delay(), end)
        return errno.EINPROGRESS

    def getsockopt(self, *_: object) -> int:
        """Return the error of the connect."""
        return self._error

    def getsockname(self) -> tuple[str, int]:
        """Return the client's address."""
        return "10.0.0.1", 50_000

    def getpeername(self) -> tuple[str, int]:
        """Return another address."""
        return "10.0.0.2", 10_911

    def sendmsg(self, buffers: Any) -> int:
        """Write what fits into the buffer."""
        self._check()
        assert self._link is not None
        assert self.network is not None
        room = _SEND_BUFFER - self._link.in_flight
        data = b"".join(bytes(piece) for piece in buffers)
        if not data:
            return 0
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "the buffer is full")
        rng, conditions = self.world.rng, self.network.conditions
        if len(data) > 1 and rng.random() < conditions.partial:
            data = data[: rng.randrange(1, len(data))]
        data = data[:room]
        self._link.write(data)
        return len(data)

    def send(self, data: bytes) -> int:
        """Write to the other end of a pair."""
        assert self.pair is not None
        self.pair.on_bytes(data)
        return len(data)

    def recv(self, size: int) -> bytes:
        """Read from the other end of a pair."""
        data = bytes(self._received[:size])
        del self._received[:size]
        if not data:
            raise BlockingIOError(errno.EAGAIN, "nothing to read")
        return data

    def recv_into(self, view: memoryview) -> int:
        """Read into a buffer."""
        count = min(len(view), len(self._received))
        if count:
            view[:count] = self._received[:count]
            del self._received[:count]
            return count
        if self._ended is not None:
            raise self._ended
        if self._end:
            return 0
        raise BlockingIOError(errno.EAGAIN, "nothing to read")

    def close(self) -> None:
        """Close the socket."""
        self.state = "closed"
        if self._link is not None:
            self._link.closed_by_client()

    def on_bytes(self, data: bytes) -> None:
        """Receive bytes."""
        if self.state != "closed":
            self._received += data
            self.changed()

    def on_end(self, *, reset: bool) -> None:
        """Learn that the connection has ended."""
        if reset:
            self._ended = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self._end = True
        self.changed()

    def changed(self) -> None:
        """Wake the selectors that watch this socket."""
        for selector in self.selectors:
            selector.wake()

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._end:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")


class Selector:
    """A ``selectors.BaseSelector`` of simulated sockets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._keys: dict[Socket, selectors.SelectorKey] = {}
        self._waiters: list[Any] = []

    def register(self, sock: Socket, events: int, data: Any = None) -> None:
        """Watch a socket."""
        self._keys[sock] = selectors.SelectorKey(sock, 0, events, data)  # type: ignore[arg-type]
        sock.selectors.append(self)

    def unregister(self, sock: Socket) -> None:
        """Watch a socket no more."""
        del self._keys[sock]
        sock.selectors.remove(self)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a socket is ready; return all ready sockets."""
        ready = self._ready()
        if not ready and (timeout is None or timeout > 0):
            self._world.wait(self._waiters, timeout)
            ready = self._ready()
        return ready

    def wake(self) -> None:
        """Wake the thread that waits."""
        self._world.wake_all(self._waiters)

    def close(self) -> None:
        """Do nothing."""

    def _ready(self) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for sock, key in self._keys.items():
            mask = selectors.EVENT_READ * sock.readable | selectors.EVENT_WRITE * sock.writable
            if mask & key.events:
                ready.append((key, mask & key.events))
        return ready
