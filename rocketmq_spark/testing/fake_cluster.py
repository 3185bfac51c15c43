"""A RocketMQ cluster in this process, for tests of programs that use RocketMQ: no Java, no files, started in a moment.

`FakeCluster` serves name servers, brokers and a proxy on sockets of 127.0.0.1. They answer as RocketMQ 5.5.0 does, as
far as docs/testing.md says, and play faults on request. One thread serves all sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import MASTER_ID
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand, encode_head
from rocketmq_spark.testing.fake_broker import Channel, FakeBroker
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from rocketmq_spark.testing.fake_requests import HANDLERS
from rocketmq_spark.testing.fake_storage import BrokerSettings, TopicSettings, template_topic

# Seconds to wait for the thread of a cluster, which executes only short calls.
_PATIENCE: Final = 30.0


class Server(Protocol):
    """A name server or broker, as its connections see it."""

    def receive(self, command: RemotingCommand, channel: Channel) -> None:
        """Take a request."""

    def disconnected(self, channel: Channel) -> None:
        """Note that a connection has ended."""


class FakeCluster:
    """Name servers and brokers on sockets of this machine.

    * `brokers`: number of masters, named ``broker-0``, ``broker-1``, ...
    * `slaves`: number of slaves of each master.
    * `name_servers`: number of name servers.
    * `topics`: the number of queues on each master, by topic. Brokers also create topics, as by default in RocketMQ.
    * `settings`: makes the settings of each broker.
    * `tls`: the servers accept only encrypted connections, with this context.

    >>> with FakeCluster(brokers=2, topics={"orders": 4}) as cluster:
    ...     sorted(cluster.brokers)
    ['broker-0', 'broker-1']
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        slaves: int = 0,
        name_servers: int = 1,
        topics: Mapping[str, int] | None = None,
        settings: Callable[[], BrokerSettings] = BrokerSettings,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rocketmq-fake-cluster", daemon=True)
        self._tls = tls
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: dict[str, set[_Connection]] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._counts = brokers, slaves, name_servers
        self._topics = dict(topics or {})
        self._settings = settings
        self.name_servers: tuple[FakeNameServer, ...] = ()
        self.brokers: dict[str, FakeBroker] = {}
        """The masters, by broker name; after `promote`, the new master."""
        self.slaves: dict[str, list[FakeBroker]] = {}

    def __repr__(self) -> str:
        return f"<FakeCluster {self.name_server or 'not started'}, {len(self.brokers)} brokers>"

    def __enter__(self) -> FakeCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def name_server(self) -> str:
        """The option ``nameServer``: the addresses, joined by semicolons."""
        return ";".join(server.address for server in self.name_servers)

    def start(self) -> None:
        """Start all servers."""
        brokers, slaves, name_servers = self._counts
        self._thread.start()
        self.name_servers = tuple(FakeNameServer(self._listen()) for _ in range(name_servers))
        for number in range(brokers):
            name = f"broker-{number}"
            master = self.brokers[name] = self._broker(name, MASTER_ID)
            self.slaves[name] = master.slaves = [self._broker(name, slave + 1) for slave in range(slaves)]
        for topic, queues in self._topics.items():
            self.create_topic(topic, queues)
        self._register()
        for server in self.name_servers:
            self._serve(server.address, server)
        for broker in self._all_brokers():
            self._serve(broker.address, broker)

    def stop(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        for address in list(self._listeners):
            self._close(address)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)
        self._loop.close()

    def create_topic(
        self, topic: str, queues: int = 4, *, perm: int = 6, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic on all masters, or overwrite its settings."""
        for broker in self.brokers.values():
            broker.storage.create_topic(topic, TopicSettings(queues, queues, perm, attributes=dict(attributes or {})))

    def messages(self, topic: str) -> list[MessageExt]:
        """Return the messages that consumers of a topic see, by broker, queue and offset."""
        return [
            message
            for name, broker in sorted(self.brokers.items())
            for queue_id in range(self._queue_nums(broker, topic))
            for message in self._stored(broker, MessageQueue(topic, name, queue_id))
        ]

    def kill(self, name: str, *, lose_unflushed: bool = False) -> None:
        """End a master at once: connections break, requests in its queue are lost, and name servers forget it.

        With `lose_unflushed` the messages since the last flush are lost, too, as after a power failure.
        """
        broker = self.brokers[name]
        broker.stop(lose_unflushed=lose_unflushed)
        self._close(broker.address)
        self._register()

    def restart(self, name: str) -> None:
        """Start a killed master again, at the same address."""
        broker = self.brokers[name]
        broker.start()
        self._serve(broker.address, broker)

    def promote(self, name: str) -> FakeBroker:
        """Make the first slave of a broker its master, and return it; the old master is killed if it runs."""
        old = self.brokers[name]
        if old.running:
            self.kill(name)
        new, *others = self.slaves[name]
        self.slaves[name], self.brokers[name] = others, new
        new.broker_id, new.slaves = MASTER_ID, others
        new.storage.take_over()
        self._register()
        return new

    def stop_name_server(self, number: int) -> None:
        """Stop a name server: its connections break, and connects are refused."""
        server = self.name_servers[number]
        server.running = False
        self._close(server.address)

    def start_name_server(self, number: int) -> None:
        """Start a stopped name server again; brokers register at once."""
        server = self.name_servers[number]
        server.running = True
        self._serve(server.address, server)
        self._register()

    def break_connections(self, address: str) -> None:
        """Close all connections to a server; it accepts new ones."""

        def abort_all() -> None:
            for connection in list(self._connections.get(address, ())):
                connection.abort()

        self._in_loop(abort_all)

    def _broker(self, name: str, broker_id: int) -> FakeBroker:
        broker = FakeBroker(
            name,
            _LoopTimers(self._loop),
            HANDLERS,
            address=self._listen(),
            broker_id=broker_id,
            settings=self._settings(),
        )
        broker.storage.topics = template_topic() if broker.settings.auto_create_topic else {}
        broker.on_change = self._register
        return broker

    def _all_brokers(self) -> Iterable[FakeBroker]:
        return itertools.chain(self.brokers.values(), *self.slaves.values())

    def _register(self) -> None:
        for server in self.name_servers:
            server.register(self._all_brokers())

    @staticmethod
    def _queue_nums(broker: FakeBroker, topic: str) -> int:
        settings = broker.storage.topics.get(topic)
        return 0 if settings is None else settings.queue_nums

    @staticmethod
    def _stored(broker: FakeBroker, queue: MessageQueue) -> list[MessageExt]:
        store = broker.storage.store
        return store.messages(queue, store.expired.get(queue, 0), store.end(queue))

    def _listen(self) -> str:
        """Bind a free port, without accepting connections yet; return its address."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        self._listeners[address] = listener
        return address

    def _serve(self, address: str, server: Server) -> None:
        """Accept connections at an address."""
        host, _, port = address.rpartition(":")
        listener = self._listeners[address]
        if listener.fileno() == -1:
            listener = self._listeners[address] = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
        connections = self._connections.setdefault(address, set())

        async def accept() -> None:
            factory = functools.partial(_Connection, server, connections)
            self._servers[address] = await self._loop.create_server(factory, sock=listener, ssl=self._tls)

        asyncio.run_coroutine_threadsafe(accept(), self._loop).result(_PATIENCE)

    def _close(self, address: str) -> None:
        """Refuse connections at an address, and break those that are open."""

        def close() -> None:
            if address in self._servers:
                self._servers.pop(address).close()
            for connection in list(self._connections.get(address, ())):
                connection.abort()
            self._listeners[address].close()

        self._in_loop(close)

    def _in_loop(self, call: Callable[[], Any]) -> None:
        async def run() -> None:
            call()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(_PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


class _LoopTimers:
    """The timers of an event loop, for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return time.time()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        # RuntimeError: the cluster was stopped, so nothing happens later.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, call)


class _Connection(asyncio.Protocol):
    """A client's connection: bytes to requests, and answers to bytes."""

    def __init__(self, server: Server, connections: set[_Connection]) -> None:
        self._server = server
        self._connections = connections
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def peer(self) -> str:
        """The client's address."""
        assert self._transport is not None
        host, port = self._transport.get_extra_info("peername")[:2]
        return f"{host}:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Hand over every whole request; hang up on bytes that are none, as a server does."""
        try:
            self._frames.feed(data)
            while (command := self._frames.take()) is not None:
                self._server.receive(command, self)
        except RemotingCommandException:
            self.abort()

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
            self._transport.write(frame)
