"""The servers of a local cluster: their configuration, start, and readiness.

A server keeps its ports and its folder when it restarts. If another program has one of its ports at the first start,
the server gets new ports. At a restart, or if the user set that port, the start fails instead. The servers take their
configuration files as in ``BrokerStartup.java`` and ``ProxyStartup.java``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from rocketmq_spark.cluster import config
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import PORT_TAKEN, ServerProcess, Watchdog
from rocketmq_spark.cluster.security import Security, write_private
from rocketmq_spark.errors import ClusterError, MQBrokerException, RocketMQError
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.route import MASTER_ID
from rocketmq_spark.protocol.remoting.codes import ResponseCode

_PORT_TRIES: Final = 4
_POLL: Final = 0.1

_COMMON_JVM_OPTIONS: Final = (
    *("-Xss512k", "-XX:+ExitOnOutOfMemoryError", "-XX:+PerfDisableSharedMem", "-XX:ErrorFile=hs_err.log"),
    "-XX:-CreateCoredumpOnCrash",
    "-Djava.net.preferIPv4Stack=true",
    # Otherwise each server makes a certificate: a third of a broker's boot. With `tls`, a later option overrides it.
    "-Dtls.server.mode=disabled",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)

# A JVM rejects two collectors, so one in `jvm_options` replaces the server's.
_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC")


@dataclass
class Site:
    """The paths, processes, ports and security that the servers of one cluster share."""

    java: Path
    jars: Sequence[Path]
    directory: Path
    watchdog: Watchdog
    probe: Probe
    jvm_options: Sequence[str]
    start_timeout: float
    # The name servers, by their order. With `controller` each has a controller, which replaces masters that are gone.
    name_servers: list[NameServer] = field(default_factory=list)
    controller: bool = False
    ports: set[int] = field(default_factory=set)
    security: Security = field(default_factory=Security)

    @property
    def name_server(self) -> str:
        """The addresses of all name servers, as in the option ``nameServer``."""
        return ";".join(server.address for server in self.name_servers)

    @property
    def name_server_to_ask(self) -> str:
        """The address of a name server that runs, else of the first one."""
        running = (server for server in self.name_servers if server.is_alive)
        return next(running, self.name_servers[0]).address


class Server(ServerProcess, ABC):
    """One server of a local cluster. Its folder contains its configuration, logs and store."""

    _MAIN: ClassVar[str]
    _JVM_OPTIONS: ClassVar[Sequence[str]]
    _CONFIG: ClassVar[tuple[str, str]]  # The option for the configuration file, and the name of that file

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(name, (), site.directory / name, {}, site.watchdog, lambda text: site.security.hidden(text))
        self._site = site
        self._port = 0  # Of its remoting protocol
        self.ports: tuple[int, ...] = ()  # All ports that it listens on

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state.value} {self.address} pid={self.pid}>"

    @property
    def address(self) -> str:
        """``host:port`` of its remoting protocol."""
        return f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        """End it in order (SIGTERM) and wait for its end; a broker unregisters and flushes first, 13 to 18 s."""
        self.terminate()
        self.await_stopped()

    def restart(self) -> None:
        """Restart it with the same ports and store, and wait until it is ready; it is stopped first if it runs.

        Raises a ClusterError if it dies, or isn't ready within the cluster's `start_timeout`.
        """
        if self.is_alive:
            self.stop()
        self.start()
        self.await_ready(time.monotonic() + self._site.start_timeout, keep_ports=True)

    def start(self) -> None:
        """Write its configuration and start its JVM; returns at once."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        (self.folder / "logback.xml").write_text(config.render("logback.xml"), encoding="utf-8")
        self._env = {
            **{name: value for name, value in os.environ.items() if name not in ("NAMESRV_ADDR", "RMQ_PROXY_HOME")},
            "CLASSPATH": os.pathsep.join(map(str, self._site.jars)),
            "ROCKETMQ_HOME": str(self.folder),
        }
        write_private(self.folder / self._CONFIG[1], self._configuration().encode("latin-1"))
        self._command = self._command_line()
        super().start()

    def _command_line(self) -> list[str]:
        """Return the command line of the JVM; the user's options come last and take precedence."""
        site, own = self._site, self._JVM_OPTIONS
        if any(_COLLECTOR.fullmatch(option) for option in site.jvm_options):
            own = [option for option in own if not _COLLECTOR.fullmatch(option)]
        paths = [
            f"-Duser.home={self.folder}",
            f"-Djava.io.tmpdir={self.folder / 'tmp'}",
            f"-Drmq.logback.configurationFile={self.folder / 'logback.xml'}",
        ]
        options = [*own, *_COMMON_JVM_OPTIONS, *paths, *site.security.jvm_options, *site.jvm_options]
        option, file = self._CONFIG
        return [str(site.java), *options, f"org.apache.rocketmq.{self._MAIN}", option, str(self.folder / file)]

    def await_ready(self, deadline: float, *, keep_ports: bool = False) -> None:
        """Wait until it is ready, or raise a ClusterError with the reason; `deadline` is monotonic seconds."""
        for tries_left in reversed(range(_PORT_TRIES)):
            error = self._poll_until(deadline)
            if error is None:
                return
            if self.is_alive:
                raise ClusterError(
                    f"{self.name} isn't ready after {self._site.start_timeout:g} s: {error}; its log is {self.log};"
                    " a slow machine may need a larger start_timeout of LocalCluster"
                )
            if not tries_left or not self._prepare_retry(keep_ports):
                raise ClusterError(f"starting the cluster: {self.why()}") from error
            self.start()

    def remove_all_but_logs(self) -> None:
        """Remove the store, the configuration and the users, which need space or contain secrets."""
        for entry in self.folder.iterdir() if self.folder.exists() else ():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif ".log" not in entry.name:
                entry.unlink(missing_ok=True)

    @abstractmethod
    def _configuration(self) -> str:
        """Return the content of its configuration file, which is written in Latin-1."""

    @abstractmethod
    def _require_ready(self) -> None:
        """Raise a RocketMQError unless it is ready."""

    @abstractmethod
    def _choose_ports(self) -> bool:
        """Choose free ports that the user did not set, and return True if any was chosen."""

    def _set_ports(self, *ports: int) -> None:
        self.ports = ports
        self._site.ports.update(ports)

    def _prepare_retry(self, keep_ports: bool) -> bool:
        """Return whether another start may succeed; if a port was taken, choose other ports for it."""
        taken = any(re.search(PORT_TAKEN, line) for line in self.relevant_lines(most=20))
        return taken and not keep_ports and self._choose_ports()

    def _poll_until(self, deadline: float) -> RocketMQError | None:
        while True:
            try:
                self._require_ready()
                return None
            except RocketMQError as exc:
                if not self.is_alive or time.monotonic() >= deadline:
                    return exc
            time.sleep(_POLL)


class NameServer(Server):
    """A name server, the `number`-th one from 0; `port` is the user's setting."""

    _MAIN = "namesrv.NamesrvStartup"
    # Less compilation saves a second at its start.
    _JVM_OPTIONS = ("-Xms16m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    _CONFIG = ("-c", "namesrv.conf")

    def __init__(self, site: Site, port: int | None, number: int = 0) -> None:
        super().__init__(site, f"namesrv-{number}" if number else "namesrv")
        self._number = number
        self._user_port = port
        site.name_servers.append(self)
        if port is not None:
            config.require_free(port, f"port={port}")
        self._choose_ports()

    def _choose_ports(self) -> bool:
        self._port = self._user_port or config.pick_port(self._site.ports)
        self._set_ports(self._port)  # So that the controller gets another one
        if self._site.controller:
            self._controller_port = config.pick_port(self._site.ports)
            self._set_ports(self._port, self._controller_port)
        return self._user_port is None

    @property
    def controller(self) -> str:
        """``host:port`` of its controller."""
        return f"127.0.0.1:{self._controller_port}"

    def _configuration(self) -> str:
        text = config.render("namesrv.conf", port=self._port)
        if not self._site.controller:
            return text
        peers = ";".join(f"n{number}-{server.controller}" for number, server in enumerate(self._site.name_servers))
        return text + config.render("controller.conf", peers=peers, number=self._number)

    def _require_ready(self) -> None:
        self._site.probe.brokers(self.address)


class Broker(Server):
    """One broker, or with a controller the `replica`-th process of one, from 0; `overrides` are the user's properties.

    :attr:`broker_name` is RocketMQ's name, which all replicas of a broker share.
    """

    _MAIN = "broker.BrokerStartup"
    # No collector that treats a 4 MiB request as an exception (G1 does, at this heap size); no -Xms that a user's
    # smaller -Xmx would contradict. A broker takes about 250 MB besides its heap: threads, metaspace, network buffers.
    _JVM_OPTIONS = (
        *("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseParallelGC"),
        # A broker deletes files above a disk usage of 85 %, and rejects sends above 90 %. It reduces larger ratios to
        # these, but not NaN, which no usage exceeds (CleanCommitLogService in DefaultMessageStore).
        "-Drocketmq.broker.diskSpaceWarningLevelRatio=NaN",
        "-Drocketmq.broker.diskSpaceCleanForciblyRatio=NaN",
    )
    _CONFIG = ("-c", "broker.conf")

    def __init__(self, site: Site, name: str, overrides: Mapping[str, str], replica: int = 0) -> None:
        super().__init__(site, f"{name}-replica-{replica}" if replica else name)
        self.broker_name = name
        self._overrides = dict(overrides)
        self._choose_ports()

    @property
    def properties(self) -> dict[str, str]:
        """Its configuration without access control; the user's properties take precedence."""
        name, servers = self.broker_name, self._site.name_server
        text = config.render("broker.conf", name=name, name_server=servers, port=self._port, ha_port=self._ha_port)
        own = config.properties_of(text)
        if self._site.controller:
            controllers = ";".join(server.controller for server in self._site.name_servers)
            own |= config.properties_of(config.render("replica.conf", controllers=controllers))
            # A controller gives each process its id.
            del own["brokerId"]
        return {**own, **self._overrides}

    def _choose_ports(self) -> bool:
        self._port, self._ha_port = config.pick_broker_ports(self._site.ports, self._overrides)
        self._set_ports(self._port, self._port - 2, self._ha_port)  # The second one is the VIP port
        return "listenPort" not in self._overrides or "haListenPort" not in self._overrides

    def _configuration(self) -> str:
        return config.properties_text({**self.properties, **self._site.security.broker_properties})

    def _require_ready(self) -> None:
        probe, name_server, name = self._site.probe, self._site.name_server_to_ask, self.broker_name
        found = next((broker for broker in probe.brokers(name_server) if broker.broker_name == name), None)
        known = {} if found is None else found.broker_addrs
        if self.address not in known.values():
            self._have_it_register()
            addresses = ", ".join(known.values()) or "no address"
            raise ClusterError(f"the name server has {addresses} for {name}, expected is {self.address}")
        if MASTER_ID not in known:
            raise ClusterError(f"{name} has no master yet")
        if self._site.controller:
            controllers = (server.controller for server in self._site.name_servers if server.is_alive)
            if self.address not in probe.in_sync(controllers, name):
                raise ClusterError(f"{self.name} does not have all messages of {name} yet")
        if known[MASTER_ID] != self.address:
            return
        if self.properties.get("autoCreateTopicEnable") != "false":
            # The first send to a new topic uses the queues of this route.
            queues = probe.route(name_server, AUTO_CREATE_TOPIC).queue_datas
            if name not in {queue.broker_name for queue in queues}:
                raise ClusterError(f"the route of topic {AUTO_CREATE_TOPIC} does not include {name} yet")
        try:
            # Every broker has a topic named after itself, so this message is in no topic of the user.
            probe.send(self.address, name, name, b"is it ready?")
        except MQBrokerException as exc:
            # A read-only broker is ready, too.
            writable = self.properties.get("brokerPermission") in (None, "2", "6")
            if writable or exc.response_code != ResponseCode.NO_PERMISSION:
                raise

    def _have_it_register(self) -> None:
        # A broker registers at its start and every 30 s. The first registration is lost if its client has not connected
        # to the name server yet (availableNamesrvAddrMap in NettyRemotingClient), and the next one follows after 10 s.
        # A change of its permission makes it register at once.
        permission = {"brokerPermission": self.properties.get("brokerPermission", "6")}
        try:
            self._site.probe.configure(self.address, permission)
        except MQBrokerException as exc:
            if exc.response_code != ResponseCode.NO_PERMISSION:
                raise


class Proxy(Server):
    """The proxy: gRPC at :attr:`endpoints`, remoting at :attr:`address`; `overrides` are the user's properties."""

    _MAIN = "proxy.ProxyStartup"
    _JVM_OPTIONS = ("-Xms32m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC")
    _CONFIG = ("-pc", "proxy.json")

    def __init__(self, site: Site, overrides: Mapping[str, object]) -> None:
        super().__init__(site, "proxy")
        self._overrides = dict(overrides)
        self._choose_ports()

    @property
    def endpoints(self) -> str:
        """``host:port`` of gRPC: the option ``endpoints``."""
        # The gRPC port can't require a client certificate (ProxyAndTlsProtocolNegotiator), see `LocalCluster`.
        tls = self._site.security.tls
        return f"127.0.0.1:{self._grpc_port}" if tls is None or tls.client is None else self.address

    @property
    def properties(self) -> dict[str, object]:
        """Its configuration without access control; the user's properties take precedence."""
        ports = {"grpc_port": self._grpc_port, "remoting_port": self._port}
        own = json.loads(config.render("proxy.json", name_server=self._site.name_server, **ports))
        return {**own, **self._overrides}

    def _choose_ports(self) -> bool:
        self._grpc_port = config.pick_port(self._site.ports)
        self._port = config.pick_port(self._site.ports | {self._grpc_port})
        self._set_ports(self._grpc_port, self._port)
        return True

    def _configuration(self) -> str:
        return json.dumps({**self.properties, **self._site.security.proxy_properties}, indent=2)

    def _prepare_retry(self, keep_ports: bool) -> bool:
        # A proxy also dies at once if no broker is registered when it starts.
        return super()._prepare_retry(keep_ports) or bool(self._site.probe.brokers(self._site.name_server_to_ask))

    def _require_ready(self) -> None:
        for broker in self._site.probe.brokers(self._site.name_server_to_ask)[:1]:
            self._site.probe.route(self.address, broker.broker_name)  # The topic that each broker has
        with config.os_errors(f"connecting to the proxy's gRPC port {self._grpc_port}", "see the proxy's log"):
            socket.create_connection(("127.0.0.1", self._grpc_port), 2.0).close()
