"""The sockets of fake name servers and brokers: a client's connection in an event loop, encrypted or not."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand, encode_head
from rocketmq_spark.testing.fake_replies import Channel


class Server(Protocol):
    """A name server or broker, as its connections see it."""

    def receive(self, command: RemotingCommand, channel: Channel) -> None:
        """Take a request."""

    def disconnected(self, channel: Channel) -> None:
        """Note that a connection has ended."""


class LoopTimers:
    """The timers of an event loop, for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function in the loop's thread, after a time."""
        # RuntimeError: the cluster was stopped, so nothing happens later.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)


class Connection(asyncio.Protocol):
    """A client's connection: bytes to requests, and answers to bytes."""

    def __init__(
        self,
        server: Server,
        connections: set[Connection],
        tls: ssl.SSLContext | None,
        is_open: Callable[[], bool],
    ) -> None:
        self._server = server
        self._connections = connections
        self._is_open = is_open
        self._stream = None if tls is None else TlsStream(tls)
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, unless the server was killed while it accepted the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        if not self._is_open():
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Hand over every whole request; hang up on bytes that are none, as a server does."""
        assert self._transport is not None
        try:
            if self._stream is not None:
                data = self._stream.decrypt(data, self._transport.write)
            self._frames.feed(data)
            while (command := self._frames.take()) is not None:
                self._server.receive(command, self)
        except (RemotingCommandException, ssl.SSLError):
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """Tell the server."""
        self._connections.discard(self)
        self._server.disconnected(self)

    def send(self, command: RemotingCommand) -> None:
        """Write a frame, from any thread."""
        frame = encode_head(command, len(command.body)) + bytes(command.body)
        if threading.get_ident() == self._thread:
            self._write(frame)
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._write, frame)

    def close(self) -> None:
        """Break the connection, from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.abort)

    def abort(self) -> None:
        """Break the connection, in the loop's thread."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame if self._stream is None else self._stream.encrypt(frame))


class TlsStream:
    """The server's side of TLS. Unlike asyncio's own, it sends the alert after a failed handshake, as servers do."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._received, self._unsent, server_side=True)

    def decrypt(self, data: bytes, write: Callable[[bytes], object]) -> bytes:
        """Return the plain bytes, after writing what TLS itself has to say. SSLError: the connection must end."""
        self._received.write(data)
        plain = b""
        try:
            while part := self._object.read(1 << 16):
                plain += part
        except ssl.SSLWantReadError:
            pass
        finally:
            write(self._unsent.read())
        return plain

    def encrypt(self, data: bytes) -> bytes:
        """Return the encrypted bytes."""
        self._object.write(data)
        return self._unsent.read()
