"""The servers of a local cluster: their configuration, and when they are ready.

A server keeps its ports and its folder over stop and restart. Ports that we chose are chosen again if another program
takes one before the JVM does; ports that the user chose are not.
Follows ``BrokerStartup.java`` and ``ProxyStartup.java``.
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

from rocketmq_spark.cluster.config import (
    pick_broker_ports,
    pick_port,
    properties_of,
    properties_text,
    render,
    require_free,
)
from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import PORT_TAKEN, ServerProcess, Watchdog
from rocketmq_spark.cluster.security import Security, write_private
from rocketmq_spark.errors import ClusterError, MQBrokerException, RocketMQError
from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.protocol.remoting.codes import ResponseCode

_PORT_TRIES: Final = 4
_POLL: Final = 0.1

_EVERY_JVM: Final = (
    *("-Xss512k", "-XX:+ExitOnOutOfMemoryError", "-XX:+PerfDisableSharedMem", "-XX:ErrorFile=hs_err.log"),
    "-XX:-CreateCoredumpOnCrash",
    "-Djava.net.preferIPv4Stack=true",
    # Making a certificate at each start takes a third of a broker's boot.
    "-Dtls.server.mode=disabled",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
)

_COLLECTOR: Final = re.compile(r"-XX:\+Use\w+GC")


@dataclass
class Site:
    """What the servers of one cluster share."""

    java: Path
    jars: Sequence[Path]
    directory: Path
    watchdog: Watchdog
    probe: Probe
    jvm_options: Sequence[str]
    start_timeout: float
    name_server: str = ""
    ports: set[int] = field(default_factory=set)
    security: Security = field(default_factory=Security)


class Server(ServerProcess, ABC):
    """One server of a local cluster. Its folder holds its configuration, logs and store."""

    _MAIN: ClassVar[str]
    _MEMORY: ClassVar[Sequence[str]]
    _CONFIG: ClassVar[tuple[str, str]]  # the option that names the configuration, and its file

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(name, (), site.directory / name, {}, site.watchdog, lambda text: site.security.hidden(text))
        self._site = site
        self._port = 0  # of its remoting protocol
        self.ports: tuple[int, ...] = ()  # all that it listens on

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.state.value} {self.address} pid={self.pid}>"

    @property
    def address(self) -> str:
        """``host:port`` of its remoting protocol."""
        return f"127.0.0.1:{self._port}"

    def stop(self) -> None:
        """End it in order (SIGTERM) and wait until it is gone; a broker unregisters and flushes first, 13 to 18 s."""
        self.terminate()
        self.wait_stopped()

    def restart(self) -> None:
        """Start it again, same ports, same store, stopping it first if it is alive; returns when it is ready.

        Raises a ClusterError if it died, or isn't ready within the cluster's `start_timeout`.
        """
        if self.is_alive:
            self.stop()
        self.start()
        self.await_ready(time.monotonic() + self._site.start_timeout, keep_ports=True)

    def start(self) -> None:
        """Write its configuration and start its JVM; returns at once."""
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        (self.folder / "logback.xml").write_text(render("logback.xml"), encoding="utf-8")
        self._env = {
            name: value for name, value in os.environ.items() if name not in ("NAMESRV_ADDR", "RMQ_PROXY_HOME")
        }
        self._env["CLASSPATH"] = os.pathsep.join(map(str, self._site.jars))
        self._env["ROCKETMQ_HOME"] = str(self.folder)
        write_private(self.folder / self._CONFIG[1], self._configuration().encode("latin-1"))
        self._command = self._command_line()
        super().start()

    def _command_line(self) -> list[str]:
        """Return the command line of the JVM; the user's options come last, so they win."""
        site, memory = self._site, self._MEMORY
        if any(_COLLECTOR.fullmatch(option) for option in site.jvm_options):
            memory = [option for option in memory if not _COLLECTOR.fullmatch(option)]
        own = [
            f"-Duser.home={self.folder}",
            f"-Djava.io.tmpdir={self.folder / 'tmp'}",
            f"-Drmq.logback.configurationFile={self.folder / 'logback.xml'}",
        ]
        options = [*memory, *_EVERY_JVM, *own, *site.security.jvm_options, *site.jvm_options]
        option, config = self._CONFIG
        return [str(site.java), *options, f"org.apache.rocketmq.{self._MAIN}", option, str(self.folder / config)]

    def await_ready(self, deadline: float, *, keep_ports: bool = False) -> None:
        """Wait until it serves; `deadline` is monotonic seconds. A ClusterError says why it does not."""
        for tries_left in reversed(range(_PORT_TRIES)):
            last = self._poll_until(deadline)
            if last is None:
                return
            if self.is_alive:
                raise ClusterError(
                    f"{self.name} isn't ready after {self._site.start_timeout:g} s: {last}; its log is {self.log};"
                    " a slow machine may need a larger start_timeout"
                )
            if not tries_left or not self._may_try_again(keep_ports):
                raise ClusterError(f"starting the cluster: {self.why()}") from last
            self.start()

    def remove_all_but_logs(self) -> None:
        """Remove the store, the configuration and the users: they take room, or contain secrets."""
        for entry in self.folder.iterdir() if self.folder.exists() else ():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif ".log" not in entry.name:
                entry.unlink(missing_ok=True)

    @abstractmethod
    def _configuration(self) -> str:
        """Return the content of its configuration file, in Latin-1."""

    @abstractmethod
    def _ask(self) -> None:
        """Raise a RocketMQError unless it is ready."""

    @abstractmethod
    def _choose_ports(self) -> bool:
        """Choose free ports where the user named none, and return whether any was chosen."""

    def _set_ports(self, *ports: int) -> None:
        self.ports = ports
        self._site.ports.update(ports)

    def _may_try_again(self, keep_ports: bool) -> bool:
        taken = any(re.search(PORT_TAKEN, line) for line in self.telling_lines(most=20))
        return taken and not keep_ports and self._choose_ports()

    def _poll_until(self, deadline: float) -> RocketMQError | None:
        while True:
            try:
                self._ask()
                return None
            except RocketMQError as exc:
                if not self.is_alive or time.monotonic() >= deadline:
                    return exc
            time.sleep(_POLL)


class NameServer(Server):
    """The name server; `port` is the user's choice, or None."""

    _MAIN = "namesrv.NamesrvStartup"
    # Compiling less saves a second at its start.
    _MEMORY = ("-Xms16m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
    _CONFIG = ("-c", "namesrv.conf")

    def __init__(self, site: Site, port: int | None) -> None:
        super().__init__(site, "namesrv")
        self._named = port
        if port is not None:
            require_free(port, f"port={port}")
        self._choose_ports()

    def _choose_ports(self) -> bool:
        self._port = self._named or pick_port(self._site.ports)
        self._set_ports(self._port)
        self._site.name_server = self.address
        return self._named is None

    def _configuration(self) -> str:
        return render("namesrv.conf", port=self._port)

    def _ask(self) -> None:
        self._site.probe.registered_brokers(self.address)


class Broker(Server):
    """One broker; `overrides` are the user's properties for it."""

    _MAIN = "broker.BrokerStartup"
    # No collector that treats a 4 MiB request as an exception (G1 does, at this heap size); no -Xms that a user's
    # smaller -Xmx would contradict. A broker takes about 250 MB besides its heap: threads, metaspace, network buffers.
    # Above the two ratios a broker deletes files (85 %) and refuses sends (90 %), and it reduces larger values to them.
    # NaN is not reduced, and no disk usage exceeds it (CleanCommitLogService in DefaultMessageStore).
    _MEMORY = (
        *("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseParallelGC"),
        "-Drocketmq.broker.diskSpaceWarningLevelRatio=NaN",
        "-Drocketmq.broker.diskSpaceCleanForciblyRatio=NaN",
    )
    _CONFIG = ("-c", "broker.conf")

    def __init__(self, site: Site, name: str, overrides: Mapping[str, str]) -> None:
        super().__init__(site, name)
        self._overrides = dict(overrides)
        self._choose_ports()

    @property
    def properties(self) -> dict[str, str]:
        """Its configuration without access control; the user's properties override ours."""
        text = render(
            "broker.conf", name=self.name, name_server=self._site.name_server, port=self._port, ha_port=self._ha_port
        )
        return {**properties_of(text), **self._overrides}

    def _choose_ports(self) -> bool:
        ports = pick_broker_ports(self._site.ports, self._overrides)
        self._port, self._ha_port = ports.listen, ports.ha
        self._set_ports(ports.listen, ports.vip, ports.ha)
        return "listenPort" not in self._overrides or "haListenPort" not in self._overrides

    def _configuration(self) -> str:
        return properties_text({**self.properties, **self._site.security.broker_properties})

    def _ask(self) -> None:
        probe, name_server = self._site.probe, self._site.name_server
        known = probe.registered_brokers(name_server).get(self.name)
        if known != self.address:
            self._have_it_register()
            raise ClusterError(f"the name server has {known or 'no address'} for {self.name}, not {self.address}")
        if self.properties.get("autoCreateTopicEnable") != "false":
            # The first send to a new topic takes its queues from this route.
            queues = probe.route(name_server, AUTO_CREATE_TOPIC).queue_datas
            if self.name not in {queue.broker_name for queue in queues}:
                raise ClusterError(f"the route of {AUTO_CREATE_TOPIC} lacks {self.name}")
        try:
            # Every broker has a topic of its own name, so no topic of the user gets this message.
            probe.send(self.address, self.name, self.name, b"is it ready?")
        except MQBrokerException as exc:
            # A broker made read-only is as ready as it will ever be.
            writable = self.properties.get("brokerPermission") in (None, "2", "6")
            if writable or exc.response_code != ResponseCode.NO_PERMISSION:
                raise

    def _have_it_register(self) -> None:
        # A broker registers when it starts and every 30 s. The first registration is lost if its client has not found
        # the name server yet (availableNamesrvAddrMap in NettyRemotingClient), and the next comes 10 s later. A change
        # of its permission makes it register at once.
        permission = {"brokerPermission": self.properties.get("brokerPermission", "6")}
        try:
            self._site.probe.configure(self.address, permission)
        except MQBrokerException as exc:
            if exc.response_code != ResponseCode.NO_PERMISSION:
                raise


class Proxy(Server):
    """The proxy: gRPC at :attr:`endpoints`, remoting at :attr:`address`; `overrides` are the user's properties."""

    _MAIN = "proxy.ProxyStartup"
    _MEMORY = ("-Xms32m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC")
    _CONFIG = ("-pc", "proxy.json")

    def __init__(self, site: Site, overrides: Mapping[str, object]) -> None:
        super().__init__(site, "proxy")
        self._overrides = dict(overrides)
        self._choose_ports()

    @property
    def endpoints(self) -> str:
        """``host:port`` of gRPC: the option ``endpoints``."""
        # The gRPC port can't demand a certificate (ProxyAndTlsProtocolNegotiator); the other one passes gRPC on to it.
        return self.address if self._site.security.mutual else f"127.0.0.1:{self._grpc_port}"

    @property
    def properties(self) -> dict[str, object]:
        """Its configuration without access control; the user's properties override ours."""
        ports = {"grpc_port": self._grpc_port, "remoting_port": self._port}
        return {**json.loads(render("proxy.json", name_server=self._site.name_server, **ports)), **self._overrides}

    def _choose_ports(self) -> bool:
        self._grpc_port = pick_port(self._site.ports)
        self._port = pick_port(self._site.ports | {self._grpc_port})
        self._set_ports(self._grpc_port, self._port)
        return True

    def _configuration(self) -> str:
        return json.dumps({**self.properties, **self._site.security.proxy_properties}, indent=2)

    def _may_try_again(self, keep_ports: bool) -> bool:
        # It also dies at once if no broker was registered when it started.
        return super()._may_try_again(keep_ports) or bool(self._site.probe.registered_brokers(self._site.name_server))

    def _ask(self) -> None:
        brokers = self._site.probe.registered_brokers(self._site.name_server)
        for name in list(brokers)[:1]:
            self._site.probe.route(self.address, name)
        try:
            socket.create_connection(("127.0.0.1", self._grpc_port), 2.0).close()
        except OSError as exc:
            raise ClusterError(f"connecting to the proxy's gRPC port {self._grpc_port}: {exc}") from exc
