"""A RocketMQ cluster on this machine: the real servers as JVM processes, for tests and first tries.

Everything started is stopped: at the end of the context, on an error, on Ctrl-C, at the interpreter's exit, and (by the
watchdog) when this process is killed. A forked child stops nothing. A temporary store is thrown away, so its brokers
are killed; a named one is flushed first. Secrets and keys are removed with the cluster, but stay in a named folder.
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

from rocketmq_spark.cluster.config import broker_overrides, checked_port, is_list_of, proxy_overrides
from rocketmq_spark.cluster.jars import Progress, no_progress, server_jars
from rocketmq_spark.cluster.probe import Probe, create_user
from rocketmq_spark.cluster.process import State, Watchdog, find_java
from rocketmq_spark.cluster.security import Security, Tls, check_security, client_options
from rocketmq_spark.cluster.servers import Broker, NameServer, Proxy, Server, Site
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.model.credentials import Credentials

logger = logging.getLogger("rocketmq_spark.cluster")

# Free disk needed per broker. A broker dies when its disk is full, because it writes to mapped files.
_STORE_BYTES: Final = 512 * 1024 * 1024


class LocalCluster:
    """A name server, brokers and, if `proxy` is set, a proxy, as processes of this machine.

    Name server and brokers listen at 127.0.0.1. RocketMQ 5.5.0 has no setting for the address of a proxy's two ports
    and of a broker's port for slaves: these are open on every address of this machine. The port for slaves gives out
    no message. A proxy serves every client that can reach it, unless `auth` is set; :meth:`start` logs a warning.

    The RocketMQ 5.5.0 server is fetched on first use (106 MB) and kept; Java 17 or newer is needed.
    A broker takes 300 to 700 MB of memory, the name server 100 MB, the proxy 400 MB.

    Parameters
    ----------
    brokers : int, default 1
        Masters, named ``broker-0``, ``broker-1``, ...
    proxy : bool or mapping, default False
        Start a proxy for gRPC, too. A mapping has properties of ``ProxyConfig``; they win over conf/proxy.json.
    directory : path, optional
        Where configuration, logs and stores are kept, and stay. Default: a temporary folder, removed by :meth:`stop`;
        after an error its logs are left.
    broker_properties : mapping or sequence of mappings, optional
        Properties of ``BrokerConfig``, ``MessageStoreConfig`` or ``NettyServerConfig``, for all brokers or one mapping
        for each; they win over conf/broker.conf. ``listenPort`` and ``haListenPort`` name ports.
    jvm_options : sequence of str, default none
        Added to the command line of every server, after the built-in ones: ``-Xmx1g``. Not those of TLS (``-Dtls.``).
    start_timeout : float, default 90.0
        Seconds until all servers must serve; also for :meth:`Broker.restart`.
    port : int, optional
        The name server's port. Default: a free one.
    auth : bool, default False
        Brokers and proxy accept only users with an access key, and only what these may do: the administrator ``admin``
        with a random secret key (:attr:`options` name its file), and those that :meth:`create_user` adds.
    tls : bool or "mutual", default False
        Name server, brokers and proxy take encrypted connections (TLS 1.2 or newer) and no others. Their certificate is
        for 127.0.0.1, ::1 and localhost, of an authority made for this cluster. With ``"mutual"`` they also demand a
        certificate of their clients. At its gRPC port a proxy of RocketMQ 5.5.0 can't; :attr:`endpoints` is then its
        other port, which can, and speaks gRPC too. Needs ``pip install 'rocketmq-spark[cluster]'``.
    progress : callable, optional
        Called with the current step of :meth:`start` and the fraction of it that is done, 0.0 to 1.0.

    Examples
    --------
    >>> with LocalCluster(brokers=2) as cluster:  # doctest: +SKIP
    ...     df.write.format("rocketmq").option("nameServer", cluster.name_server).option("topic", "orders").save()

    Raises
    ------
    ClusterError
        A parameter is not allowed; later, from :meth:`start`: no Java, no network for the first fetch, too little
        disk, a port taken, a server that died (with its last messages and the path of its log).
    """

    def __init__(
        self,
        brokers: int = 1,
        proxy: bool | Mapping[str, object] = False,
        *,
        directory: str | os.PathLike[str] | None = None,
        broker_properties: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
        jvm_options: Sequence[str] = (),
        start_timeout: float = 90.0,
        port: int | None = None,
        auth: bool = False,
        tls: Tls = False,
        progress: Progress | None = None,
    ) -> None:
        self._overrides = broker_overrides(broker_properties, brokers)
        self._proxy_overrides = proxy_overrides(proxy)
        if not is_list_of(str, jvm_options):
            raise ClusterError("jvm_options takes a list with a text for each option, as in ['-Xmx1g', '-Xss1m']")
        self._jvm_options = tuple(jvm_options)
        check_security(auth, tls, self._overrides, self._proxy_overrides or {}, self._jvm_options)
        self._auth = auth
        self._tls: Tls = tls
        self._wanted_directory = Path(directory).absolute() if directory is not None else None
        if not isinstance(start_timeout, int | float) or isinstance(start_timeout, bool) or not start_timeout > 0:
            raise ClusterError(f"start_timeout={start_timeout!r}: allowed are seconds above 0")
        self._start_timeout = start_timeout
        self._port = None if port is None else checked_port(port, "port")
        self._tell: Progress = progress or no_progress
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._site: Site | None = None
        self._name_server: NameServer | None = None
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
        """``127.0.0.1:port``: the option ``nameServer``."""
        return self._require_running().name_server

    @property
    def brokers(self) -> tuple[Broker, ...]:
        """The brokers, in the order of their names' numbers."""
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
            raise ClusterError("the cluster has no proxy: LocalCluster(proxy=True)")
        return self._proxy.endpoints

    @property
    def options(self) -> dict[str, str]:
        """The options of a DataFrame's read or write; the secret key is named by its file (``secretKey=file:...``)."""
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
        """The administrator, who may do anything; None without `auth`."""
        return self._require_running().security.admin

    @property
    def directory(self) -> Path:
        """Where configuration, logs and stores are."""
        return self._require_running().directory

    @property
    def is_temporary(self) -> bool:
        """True if :meth:`stop` removes the directory."""
        return self._wanted_directory is None

    @property
    def servers(self) -> tuple[Server, ...]:
        """Name server, brokers, proxy, in the order in which they were started."""
        all_servers = (self._name_server, *self._brokers, self._proxy)
        return tuple(server for server in all_servers if server is not None)

    def start(self) -> None:
        """Start the servers and return when each broker has stored a message; on any error nothing is left running.

        Raises a ClusterError, see the class.
        """
        with self._lock:
            if self._site is not None:
                raise ClusterError("the cluster runs already")
            java = find_java()
            jars = server_jars(lambda: java, self._tell)
            self._pid = os.getpid()
            atexit.register(self.stop)
            try:
                self._start_all(self._new_site(java, jars))
            except BaseException as exc:
                self._stop(keep_logs=isinstance(exc, Exception))  # a Ctrl-C leaves nothing to explain
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
        """Create a user on all brokers, who may use only the topics and groups that are named here.

        `name` and `secret_key` are the options ``accessKey`` and ``secretKey``: the secret itself, not a reference to
        it. `publish` are topics to send to, `subscribe` topics to read, and `groups` consumer groups to read as; the
        source's default is ``spark-rocketmq-source``. ``orders-*`` stands for all whose name begins with ``orders-``,
        ``*`` for all.

        Raises a ClusterError if the cluster has no `auth` or isn't running, an argument is not allowed, or the user
        exists; and the error of a broker that refuses for another reason, or does not answer.
        """
        if not self._auth:
            raise ClusterError("the cluster knows no users: LocalCluster(auth=True)")
        probe = self._require_running().probe
        addresses = [broker.address for broker in self._brokers]
        create_user(probe, addresses, name, secret_key, publish=publish, subscribe=subscribe, groups=groups)

    def check(self) -> None:
        """Raise a ClusterError with the reason if a server died that was not stopped or killed."""
        for server in self.servers:
            if server.state is State.DIED:
                raise ClusterError(server.why())

    def stop(self) -> None:
        """Stop all servers and remove the temporary folder, if the cluster is running."""
        with self._lock:
            if os.getpid() != self._pid:
                return
            died = [server for server in self.servers if server.state is State.DIED]
            for server in died:
                logger.warning("%s", server.why())
            self._stop(keep_logs=bool(died))

    def detach(self) -> None:
        """Leave the servers running after this process; this object forgets them."""
        with self._lock:
            site = self._require_running()
            for server in self.servers:
                server.release()
            site.watchdog.release()
            self._forget()

    def _new_site(self, java: Path, jars: Sequence[Path]) -> Site:
        directory = self._wanted_directory
        try:
            if directory is None:
                directory = Path(tempfile.mkdtemp(prefix="rocketmq-spark-"))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(directory).free
        except OSError as exc:
            raise ClusterError(f"making the cluster's folder: {exc}; set directory= to a writable one") from exc
        self._site = Site(
            java=java,
            jars=jars,
            directory=directory,
            watchdog=Watchdog(directory if self.is_temporary else None),
            probe=Probe(),
            jvm_options=self._jvm_options,
            start_timeout=self._start_timeout,
        )
        needed = _STORE_BYTES * len(self._overrides)
        if free < needed:
            raise ClusterError(
                f"the stores of {len(self._overrides)} brokers need {needed >> 20} MB in {directory}, {free >> 20} MB"
                " are free; free some, or set directory= to a folder on another disk"
            )
        security = Security.made(directory, auth=self._auth, tls=self._tls)
        self._site.security = security
        self._site.probe = Probe(credentials=security.admin, tls=security.client_tls)
        return self._site

    def _start_all(self, site: Site) -> None:
        deadline = time.monotonic() + self._start_timeout
        self._tell("starting the name server", 0.0)
        self._name_server = NameServer(site, self._port)
        self._name_server.start()
        # A broker that finds no name server when it starts tries again only after 10 seconds.
        self._name_server.await_ready(deadline)
        self._brokers = tuple(Broker(site, f"broker-{index}", own) for index, own in enumerate(self._overrides))
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
                "the proxy's ports %d and %d are open on every address of this machine, because RocketMQ has no setting"
                " for it; a client that can reach them %s",
                *self._proxy.ports,
                "needs a key that the cluster knows"
                if self._auth
                else "can write and read without a key: set auth=True (--auth), or close the ports by a firewall",
            )
        self._tell("the cluster is ready", 1.0)

    def _stop(self, *, keep_logs: bool) -> None:
        site = self._site
        if site is not None:
            if not self.is_temporary:
                for broker in self._brokers:
                    broker.terminate()
                for broker in self._brokers:
                    broker.wait_stopped()
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
        self._site = self._name_server = self._proxy = None
        self._brokers = ()

    def _require_running(self) -> Site:
        if self._site is None or self._name_server is None:
            raise ClusterError("the cluster isn't running: call start()")
        return self._site
