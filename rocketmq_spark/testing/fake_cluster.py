"""A RocketMQ cluster in this process, for tests of programs that use RocketMQ: no Java, no files, started in a moment.

`FakeCluster` serves name servers and brokers on sockets of 127.0.0.1, and a proxy if requested. They answer as RocketMQ
5.5.0 does, as far as docs/testing.md says, and play faults on request. One thread serves all sockets but the proxy's,
which has threads of gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import MASTER_ID
from rocketmq_spark.testing.fake_broker import FakeBroker
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from rocketmq_spark.testing.fake_requests import HANDLERS
from rocketmq_spark.testing.fake_sockets import Connection, LoopTimers, Server
from rocketmq_spark.testing.fake_storage import BrokerSettings, ProxySettings, TopicSettings, template_topic

if TYPE_CHECKING:
    from rocketmq_spark.testing.fake_proxy import FakeProxy

# Seconds to wait for the thread of a cluster, which executes only short calls.
_PATIENCE: Final = 30.0


class FakeCluster:
    """Name servers and brokers on sockets of this machine.

    * `brokers`: number of masters, named ``broker-0``, ``broker-1``, ...; or their names.
    * `slaves`: number of slaves of each master.
    * `name_servers`: number of name servers.
    * `topics`: the number of queues on each master, by topic. By default sends create topics, too, as in RocketMQ.
    * `settings`: makes the settings of each broker.
    * `tls`: name servers and brokers accept only encrypted connections, with this context.
    * `proxy`: True or settings for a proxy, at `endpoints`. Only a cluster with a proxy imports grpc and protobuf.

    >>> with FakeCluster(brokers=2, topics={"orders": 4}) as cluster:
    ...     sorted(cluster.brokers)
    ['broker-0', 'broker-1']
    """

    def __init__(
        self,
        brokers: int | Sequence[str] = 1,
        *,
        slaves: int = 0,
        name_servers: int = 1,
        topics: Mapping[str, int] | None = None,
        settings: Callable[[], BrokerSettings] = BrokerSettings,
        tls: ssl.SSLContext | None = None,
        proxy: bool | ProxySettings = False,
    ) -> None:
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="rocketmq-fake-cluster", daemon=True)
        self._tls = tls
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: dict[str, set[Connection]] = {}
        self._listeners: dict[str, socket.socket] = {}
        self._names = [f"broker-{number}" for number in range(brokers)] if isinstance(brokers, int) else brokers
        self._counts = slaves, name_servers
        self._topics = dict(topics or {})
        self._settings = settings
        self.name_servers: tuple[FakeNameServer, ...] = ()
        self.brokers: dict[str, FakeBroker] = {}
        """The masters, by broker name; after `promote`, the new master."""
        self.slaves: dict[str, list[FakeBroker]] = {}
        self.proxy: FakeProxy | None = None
        if proxy:
            from rocketmq_spark.testing.fake_proxy import FakeProxy

            self.proxy = FakeProxy(self, proxy if isinstance(proxy, ProxySettings) else ProxySettings())

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

    @property
    def endpoints(self) -> str:
        """The option ``endpoints``: the address of the proxy."""
        if self.proxy is None:
            raise ClusterError("the cluster has no proxy: create it with FakeCluster(proxy=True)")
        return self.proxy.address

    def start(self) -> None:
        """Start all servers."""
        slaves, name_servers = self._counts
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        timers = LoopTimers(self._loop)
        self.name_servers = tuple(FakeNameServer(self._bind(), timers) for _ in range(name_servers))
        for name in self._names:
            master = self.brokers[name] = self._broker(name, MASTER_ID)
            self.slaves[name] = master.slaves = [self._broker(name, slave + 1) for slave in range(slaves)]
        for topic, queues in self._topics.items():
            self.create_topic(topic, queues)
        self._register()
        for server in self.name_servers:
            self._serve(server.address, server)
        for broker in self._all_brokers():
            self._serve(broker.address, broker)
        if self.proxy is not None:
            try:
                self.proxy.start()
            except RuntimeError:
                self.stop()
                raise

    def stop(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        if self.proxy is not None:
            self.proxy.stop()
        for address, listener in self._listeners.items():
            self._close(address)
            listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE)

    def create_topic(
        self, topic: str, queues: int = 4, *, perm: int = 6, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic on all masters, or overwrite its settings."""
        for broker in self.brokers.values():
            with broker.lock:
                settings = TopicSettings(queues, queues, perm, attributes=dict(attributes or {}))
                broker.storage.create_topic(topic, settings)

    def messages(self, topic: str) -> list[MessageExt]:
        """Return the messages that consumers of a topic see, by broker, queue and offset."""
        messages = []
        for name, broker in sorted(self.brokers.items()):
            store, settings = broker.storage.store, broker.storage.topics.get(topic)
            for queue_id in range(settings.queue_nums if settings else 0):
                queue = MessageQueue(topic, name, queue_id)
                messages += store.messages(queue, store.expired.get(queue, 0), store.end(queue))
        return messages

    def kill(self, name: str, *, lose_unflushed: bool = False) -> None:
        """End a master at once: connections break, requests in its queue are lost, and name servers forget it.

        With `lose_unflushed` the messages since the last flush are lost, too, as after a power failure.
        """
        broker = self.brokers[name]
        broker.stop(lose_unflushed=lose_unflushed)
        self._close(broker.address)
        self._bind(broker.address)
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
        new.promote(others)
        self._register()
        return new

    def stop_name_server(self, number: int) -> None:
        """Stop a name server: its connections break, and connects are refused."""
        server = self.name_servers[number]
        server.running = False
        self._close(server.address)
        self._bind(server.address)

    def start_name_server(self, number: int) -> None:
        """Start a stopped name server again; brokers register at once."""
        server = self.name_servers[number]
        server.running = True
        self._serve(server.address, server)
        self._register()

    def connections(self, address: str) -> int:
        """Return the number of open connections to a server."""
        return len(self._connections.get(address, ()))

    def break_connections(self, address: str) -> None:
        """Close all connections to a server; it accepts new ones."""

        def abort_all() -> None:
            for connection in list(self._connections.get(address, ())):
                connection.abort()

        self._in_loop(abort_all)
        if self.proxy is not None:
            self.proxy.disconnect(address)

    def _broker(self, name: str, broker_id: int) -> FakeBroker:
        timers, address, settings = LoopTimers(self._loop), self._bind(), self._settings()
        broker = FakeBroker(name, timers, HANDLERS, address=address, broker_id=broker_id, settings=settings)
        broker.storage.topics = template_topic() if broker.settings.auto_create_topic else {}
        broker.on_change = self._register
        return broker

    def _all_brokers(self) -> Iterable[FakeBroker]:
        return itertools.chain(self.brokers.values(), *self.slaves.values())

    def _register(self) -> None:
        for server in self.name_servers:
            server.register(self._all_brokers())

    def _bind(self, address: str = "127.0.0.1:0") -> str:
        """Reserve a port, which refuses connections until `_serve`; return its address."""
        host, _, port = address.rpartition(":")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        address = f"{host}:{listener.getsockname()[1]}"
        self._listeners[address] = listener
        return address

    def _serve(self, address: str, server: Server) -> None:
        listener = self._listeners[address]
        connections = self._connections.setdefault(address, set())

        def connected() -> Connection:
            return Connection(server, connections, self._tls, lambda: address in self._servers)

        async def accept() -> None:
            self._servers[address] = await self._loop.create_server(connected, sock=listener)

        asyncio.run_coroutine_threadsafe(accept(), self._loop).result(_PATIENCE)

    def _close(self, address: str) -> None:
        """Refuse connections at an address, and break the open ones."""

        def close() -> None:
            if address in self._servers:
                self._servers.pop(address).close()

        self._in_loop(close)
        self.break_connections(address)

    def _in_loop(self, call: Callable[[], Any]) -> None:
        async def run() -> None:
            call()

        if threading.current_thread() is self._thread:
            call()
        else:
            asyncio.run_coroutine_threadsafe(run(), self._loop).result(_PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Connections that are being accepted.
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()
