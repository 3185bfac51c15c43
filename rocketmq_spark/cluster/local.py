"""`LocalCluster` runs the real RocketMQ servers as JVM processes of this machine, for tests and first tries.

They stop at the end of the ``with`` block, after a failed start and at the interpreter's exit, but not after
`LocalCluster.detach`. If this process is killed, a watchdog kills them. A forked child does not stop them. A temporary
folder is removed, except for its logs after an error. A folder set by `directory` stays, and only its brokers flush
their messages before they stop.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rocketmq_spark.cluster.config import (
    broker_overrides,
    checked_count,
    checked_port,
    is_list_of,
    os_errors,
    proxy_overrides,
)
from rocketmq_spark.cluster.jars import Progress, no_progress, server_jars
from rocketmq_spark.cluster.probe import Probe, create_user
from rocketmq_spark.cluster.process import State, Watchdog, find_java
from rocketmq_spark.cluster.security import Security, Tls, check_security, client_options
from rocketmq_spark.cluster.servers import Broker, NameServer, Proxy, Server, Site
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.credentials import Credentials

logger = logging.getLogger("rocketmq_spark.cluster")

# Disk space per broker. A broker whose disk is full dies, because it writes to mapped files.
_STORE_BYTES: Final = 512 * 1024 * 1024


class LocalCluster:
    """A name server, brokers and, if `proxy` is set, a proxy, as processes of this machine.

    The RocketMQ 5.5.0 server is fetched on first use (106 MB) and kept. It needs Java 17 or newer. A broker takes 300
    to 700 MB of memory, the name server 100 MB, the proxy 400 MB.

    Name server and brokers listen at 127.0.0.1. RocketMQ 5.5.0 has no setting for the address of a proxy's two ports
    and of a broker's port for slaves, so these are open on every address of this machine. The port for slaves serves no
    messages. Without `auth` a proxy serves every client that reaches it, and :meth:`start` logs a warning.

    * `brokers`: number of masters, named ``broker-0``, ``broker-1``, ...
    * `proxy`: True starts a proxy for gRPC. A mapping of ``ProxyConfig`` properties overrides conf/proxy.json.
    * `directory`: where configuration, logs and stores are kept. Default: a temporary folder, which :meth:`stop`
      removes. After an error its logs stay.
    * `broker_properties`: properties of ``BrokerConfig``, ``MessageStoreConfig`` or ``NettyServerConfig``, which
      override conf/broker.conf: one mapping for all brokers, or a list with one each. ``listenPort`` and
      ``haListenPort`` set ports.
    * `jvm_options`: added to the end of every server's command line, such as ``-Xmx1g``. ``-Dtls.`` is not allowed.
    * `start_timeout`: seconds until all servers must be ready, also in :meth:`Broker.restart`. A server that ends
      before it is ready is an error at once.
    * `port`: the name server's port. Default: a free one.
    * `auth`: brokers and proxy require an access key. The administrator ``admin`` has a random secret key, whose file
      is in :attr:`options`. :meth:`create_user` adds users with fewer rights.
    * `tls`: all servers accept only encrypted connections (TLS 1.2 or newer), with a certificate for 127.0.0.1, ::1 and
      localhost of an authority made for this cluster. ``"mutual"`` also requires a client certificate. The gRPC port of
      a 5.5.0 proxy can't require one, so :attr:`endpoints` is then its remoting port, which also accepts gRPC. Needs
      ``pip install 'rocketmq-spark[cluster]'``.
    * `name_servers`: number of name servers.
    * `controller`: each name server has a controller, which makes a replica the master when the master is gone. A
      broker acknowledges a message when all its replicas that are in sync have it.
    * `replicas`: processes of each broker, with `controller`. :meth:`master` returns the master. The
      ports of controllers and for slaves are open on every address of this machine, and whoever reaches the latter can
      read all messages.
    * `progress`: called with the current step of :meth:`start` and the completed fraction, 0.0 to 1.0.

    The constructor raises a ClusterError for a parameter that is not allowed. :meth:`start` raises one without Java,
    network for the first fetch or disk space, for a used port, and for a server that died (with its last messages and
    its log's path).

    >>> with LocalCluster(brokers=2) as cluster:  # doctest: +SKIP
    ...     df.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", "orders").save()
    """

    def __init__(
        self,
        brokers: int = 1,
        proxy: bool | Mapping[str, object] = False,
        *,
        directory: str | os.PathLike[str] | None = None,
        broker_properties: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        jvm_options: Sequence[str] = (),
        start_timeout: float = 300.0,
        port: int | None = None,
        auth: bool = False,
        tls: Tls = False,
        progress: Progress | None = None,
        name_servers: int = 1,
        controller: bool = False,
        replicas: int = 1,
    ) -> None:
        self._name_server_count = checked_count(name_servers, "name_servers")
        self._replicas = checked_count(replicas, "replicas")
        if (replicas > 1) != controller or (controller and auth):
            raise ClusterError(
                f"controller={controller} with replicas={replicas} and auth={auth}: give replicas=2 or more together "
                "with controller=True, and no auth"
            )
        self._controller = controller
        self._overrides = broker_overrides(broker_properties, brokers)
        self._proxy_overrides = proxy_overrides(proxy)
        if not is_list_of(str, jvm_options):
            raise ClusterError("jvm_options must be a list of strings, as in ['-Xmx1g', '-Xss1m']")
        self._jvm_options = tuple(jvm_options)
        check_security(auth, tls, self._overrides, self._proxy_overrides or {}, self._jvm_options)
        self._auth = auth
        self._tls: Tls = tls
        self._wanted_directory = Path(directory).absolute() if directory is not None else None
        if not isinstance(start_timeout, int | float) or isinstance(start_timeout, bool) or not start_timeout > 0:
            raise ClusterError(f"start_timeout={start_timeout!r} is not allowed: allowed are seconds above 0")
        self._start_timeout = start_timeout
        self._port = None if port is None else checked_port(port, "port")
        self._tell: Progress = progress or no_progress
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._site: Site | None = None
        self._brokers: tuple[Broker, ...] = ()
        self._proxy: Proxy | None = None

    def __repr__(self) -> str:
        if self._site is None:
            with_proxy = self._proxy_overrides is not None
            return f"<LocalCluster not running, brokers={len(self._overrides)} proxy={with_proxy}>"
        servers = ", ".join(f"{server.name} {server.state.value} {server.address}" for server in self.servers)
        return f"<LocalCluster {servers}>"

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def name_server(self) -> str:
        """``127.0.0.1:port``, several separated by semicolons: the option ``nameServer``."""
        return self._require_running().name_server

    def master(self, broker_name: str = "broker-0") -> Broker:
        """Return the present master of a broker; raise a ClusterError without a master."""
        site = self._require_running()
        address = site.probe.registered_brokers(site.name_server_to_ask).get(broker_name)
        found = next((broker for broker in self._brokers if broker.address == address), None)
        if found is None:
            raise ClusterError(f"{broker_name} has no master now: start its processes, or wait for an election")
        return found

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """The processes of all brokers, ordered by the broker's number, then by the replica's."""
        self._require_running()
        return self._brokers

    @property
    def proxy(self) -> Proxy | None:
        """The proxy, or None."""
        return self._proxy

    @property
    def endpoints(self) -> str:
        """``127.0.0.1:port`` of the proxy's gRPC: the option ``endpoints``."""
        self._require_running()
        if self._proxy is None:
            raise ClusterError("the cluster has no proxy: create it with LocalCluster(proxy=True)")
        return self._proxy.endpoints

    @property
    def options(self) -> dict[str, str]:
        """The options of a DataFrame's read or write; the secret key is a reference to its file (``file:...``)."""
        return {"nameServer": self.name_server, **self._require_running().security.options}

    @property
    def grpc_options(self) -> dict[str, str]:
        """The options of a write through the proxy."""
        return {"endpoints": self.endpoints, **self._require_running().security.options}

    @property
    def client_options(self) -> dict[str, Any]:
        """The options of a `Producer` and an `Admin`: ``Producer("shop", **cluster.client_options)``."""
        return client_options(self.options)

    @property
    def admin(self) -> Credentials | None:
        """The administrator, a user with all rights; None without `auth`."""
        return self._require_running().security.admin

    @property
    def directory(self) -> Path:
        """The folder of configuration, logs and stores."""
        return self._require_running().directory

    @property
    def is_temporary(self) -> bool:
        """True if :meth:`stop` removes the directory."""
        return self._wanted_directory is None

    @property
    def servers(self) -> tuple[Server, ...]:
        """Name servers, brokers and proxy, in start order."""
        name_servers = () if self._site is None else self._site.name_servers
        return (*name_servers, *self._brokers, *([] if self._proxy is None else [self._proxy]))

    def start(self) -> None:
        """Start the servers and wait until they are ready. After an error nothing is left running."""
        with self._lock:
            if self._site is not None:
                raise ClusterError("the cluster is already running: call stop() first")
            java = find_java()
            jars = server_jars(lambda: java, self._tell)
            self._pid = os.getpid()
            atexit.register(self.stop)
            try:
                self._start_all(self._new_site(java, jars))
            except BaseException as exc:
                self._stop(keep_logs=isinstance(exc, Exception))  # After a Ctrl-C logs are not needed
                raise

    def create_user(
        self,
        name: str,
        secret_key: str,
        *,
        publish: Sequence[str] = (),
        subscribe: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> None:
        """Create a user on all brokers with rights for the given topics and groups only.

        `name` and `secret_key` are the options ``accessKey`` and ``secretKey``; the key is the secret itself, not a
        reference. `publish` has topics to write, `subscribe` topics to read, and `groups` consumer groups to read as
        (the default of a read is ``spark-rocketmq-source``). ``orders-*`` means all names with the prefix ``orders-``,
        ``*`` all names.

        Raises a ClusterError if the cluster has no `auth` or isn't running, an argument is not allowed, or the user
        exists. Raises the error of a broker that fails otherwise.
        """
        if not self._auth:
            raise ClusterError("the cluster has no users: create it with LocalCluster(auth=True)")
        probe = self._require_running().probe
        addresses = [broker.address for broker in self._brokers]
        create_user(probe, addresses, name, secret_key, publish=publish, subscribe=subscribe, groups=groups)

    def check(self) -> None:
        """Raise a ClusterError with the reason if a server died without `stop` or `kill`."""
        for server in self.servers:
            if server.state is State.DIED:
                raise ClusterError(server.why())

    def stop(self) -> None:
        """Stop all servers and remove the temporary folder, if the cluster is running."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            died = [server.why() for server in self.servers if server.state is State.DIED]
            for reason in died:
                logger.warning("%s", reason)
            self._stop(keep_logs=bool(died))

    def detach(self) -> None:
        """Leave the servers running after this process; this object no longer controls them."""
        with self._lock:
            site = self._require_running()
            for server in self.servers:
                server.detach()
            site.watchdog.release()
            self._forget()

    def _new_site(self, java: Path, jars: Sequence[Path]) -> Site:
        with os_errors("creating the cluster's folder", "set directory= to a writable folder"):
            directory = self._wanted_directory or Path(tempfile.mkdtemp(prefix="rocketmq-spark-"))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(directory).free
        self._site = Site(  # If a later step fails, `_stop` removes its folder
            java=java,
            jars=jars,
            directory=directory,
            watchdog=Watchdog(directory if self.is_temporary else None),
            probe=Probe(),
            jvm_options=self._jvm_options,
            start_timeout=self._start_timeout,
            controller=self._controller,
        )
        processes = self._replicas * len(self._overrides)
        needed = _STORE_BYTES * processes
        if free < needed:
            raise ClusterError(
                f"{processes} brokers need {needed >> 20} MB of disk space, {directory} has {free >> 20} MB "
                "free. Free some, or set directory= to a folder on another disk"
            )
        security = Security.made(directory, auth=self._auth, tls=self._tls)
        self._site.security = security
        self._site.probe = Probe(credentials=security.admin, tls=security.client_tls)
        return self._site

    def _start_all(self, site: Site) -> None:
        deadline = time.monotonic() + self._start_timeout
        self._tell("starting the name server", 0.0)
        for number in range(self._name_server_count):
            NameServer(site, None if number else self._port, number)  # It adds itself to `site.name_servers`
        for name_server in site.name_servers:
            name_server.start()
        # A broker that finds no name server at its start retries only after 10 seconds.
        for name_server in site.name_servers:
            name_server.await_ready(deadline)
        self._brokers = tuple(
            Broker(site, f"broker-{index}", overrides, replica)
            for index, overrides in enumerate(self._overrides)
            for replica in range(self._replicas)
        )
        for broker in self._brokers:
            broker.start()
        steps = len(self._brokers) + (self._proxy_overrides is not None) + 1
        for done, broker in enumerate(self._brokers, start=1):
            self._tell(f"starting {broker.name}", done / steps)
            broker.await_ready(deadline)
        if self._proxy_overrides is not None:
            self._tell("starting the proxy", (steps - 1) / steps)
            self._proxy = Proxy(site, self._proxy_overrides)
            self._proxy.start()
            self._proxy.await_ready(deadline)
            logger.warning(
                "the proxy's ports %d and %d are open on every address of this machine, because RocketMQ can't bind"
                " them to one; a client that reaches them %s",
                *self._proxy.ports,
                "needs a key of the cluster"
                if self._auth
                else "can write and read without a key: set auth=True (--auth), or close the ports with a firewall",
            )
        self._tell("the cluster is ready", 1.0)

    def _stop(self, *, keep_logs: bool) -> None:
        site = self._site
        if site is not None:
            if not self.is_temporary:
                for broker in self._brokers:
                    broker.terminate()
                for broker in self._brokers:
                    broker.await_stopped()
            for server in reversed(self.servers):
                server.kill()
            site.watchdog.release()
            if self.is_temporary and keep_logs and any(server.state is not State.NEW for server in self.servers):
                for server in self.servers:
                    server.remove_all_but_logs()
                site.security.remove_files()
            elif self.is_temporary:
                shutil.rmtree(site.directory, ignore_errors=True)
        self._forget()

    def _forget(self) -> None:
        atexit.unregister(self.stop)
        self._site = self._proxy = None
        self._brokers = ()

    def _require_running(self) -> Site:
        if self._site is None or not self._site.name_servers:
            raise ClusterError("the cluster isn't running: call start()")
        return self._site
