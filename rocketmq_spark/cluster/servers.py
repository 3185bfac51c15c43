"""The servers of a local cluster: what each is told, and when it is ready.

Rule 1: a broker is ready when it has stored a message and the name server sends producers to it.
Rule 2: a proxy needs a registered broker when it starts, or it dies; it is started again while it may still succeed.

Follows spec/remoting.md sections 2.5, 3.3 and 15.2, ``BrokerStartup.java``, ``ProxyStartup.java``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Final

from rocketmq_spark.cluster.certificates import write_private
from rocketmq_spark.cluster.config import (
    BrokerPorts,
    pick_broker_ports,
    pick_port,
    properties_of,
    properties_text,
    render,
    require_free,
)
from rocketmq_spark.cluster.server import Server, Site
from rocketmq_spark.errors import ClusterError, MQBrokerException
from rocketmq_spark.names import AUTO_CREATE_TOPIC
from rocketmq_spark.wire.codes import ResponseCode

# No collector that treats a 4 MiB request as an exception (G1 does, at this heap size); no -Xms that a user's smaller
# -Xmx would contradict. A broker takes about 250 MB besides its heap: threads, metaspace, network buffers.
_BROKER_MEMORY: Final = ("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseParallelGC")
_PROXY_MEMORY: Final = ("-Xms32m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC")
# It does little: compiling less is a second sooner there.
_NAMESRV_MEMORY: Final = ("-Xms16m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

# Beyond these a broker deletes files (85 %) and refuses sends (90 %), and larger values are cut to them. Not a number
# is neither larger nor smaller: no cut, and no disk is ever beyond it (CleanCommitLogService in DefaultMessageStore).
_NO_DISK_LIMITS: Final = (
    "-Drocketmq.broker.diskSpaceWarningLevelRatio=NaN",
    "-Drocketmq.broker.diskSpaceCleanForciblyRatio=NaN",
)


class NameServer(Server):
    """The name server; `port` is the user's choice, or None."""

    def __init__(self, site: Site, port: int | None) -> None:
        super().__init__(site, "namesrv")
        self._named = port
        if port is not None:
            require_free(port, f"port={port}")
        self._port = 0
        self._choose_ports()

    @property
    def address(self) -> str:
        """``host:port``: the option ``nameServer``."""
        return f"127.0.0.1:{self._port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The one port it listens on."""
        return (self._port,)

    def _choose_ports(self) -> bool:
        self._port = self._named or pick_port(self._site.ports)
        self._site.ports.add(self._port)
        self._site.name_server = self.address
        return self._named is None

    def _configure(self) -> list[str]:
        config = self.folder / "namesrv.conf"
        config.write_text(render("namesrv.conf", port=self._port), encoding="utf-8")
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        return self._site.command(self.folder, _NAMESRV_MEMORY, main, ["-c", str(config)])

    def _ask(self) -> None:
        self._site.probe.registered_brokers(self.address)


class Broker(Server):
    """One broker; `overrides` are the user's properties for it."""

    def __init__(self, site: Site, name: str, overrides: Mapping[str, str]) -> None:
        super().__init__(site, name)
        self._overrides = dict(overrides)
        self._ports = BrokerPorts(0, 0)
        self._choose_ports()

    @property
    def address(self) -> str:
        """``host:port`` of its remoting protocol."""
        return f"127.0.0.1:{self._ports.listen}"

    @property
    def ports(self) -> tuple[int, ...]:
        """``listenPort``, the VIP port two below, ``haListenPort``."""
        return (self._ports.listen, self._ports.vip, self._ports.ha)

    @property
    def properties(self) -> dict[str, str]:
        """What its configuration file says, but of access control: ours, and the user's on top."""
        text = render(
            "broker.conf",
            name=self.name,
            name_server=self._site.name_server,
            port=self._ports.listen,
            ha_port=self._ports.ha,
        )
        return {**properties_of(text), **self._overrides}

    def _choose_ports(self) -> bool:
        self._ports = pick_broker_ports(self._site.ports, self._overrides)
        self._site.ports.update(self.ports)
        return "listenPort" not in self._overrides or "haListenPort" not in self._overrides

    def _configure(self) -> list[str]:
        config = self.folder / "broker.conf"
        properties = {**self.properties, **self._site.security.broker_properties}
        write_private(config, properties_text(properties).encode("latin-1"))
        main = "org.apache.rocketmq.broker.BrokerStartup"
        return self._site.command(self.folder, [*_BROKER_MEMORY, *_NO_DISK_LIMITS], main, ["-c", str(config)])

    def _ask(self) -> None:
        probe, name_server = self._site.probe, self._site.name_server
        known = probe.registered_brokers(name_server).get(self.name)
        if known != self.address:
            self._have_it_register()
            raise ClusterError(f"the name server has {known or 'no address'} for {self.name}, not {self.address}")
        if self.properties.get("autoCreateTopicEnable") != "false":
            # The first send to a new topic takes its queues from this route (spec/remoting.md 3.3).
            queues = probe.route(name_server, AUTO_CREATE_TOPIC).queue_datas
            if self.name not in {queue.broker_name for queue in queues}:
                raise ClusterError(f"the route of {AUTO_CREATE_TOPIC} lacks {self.name}")
        try:
            # The topic that every broker has in its own name: no topic of the user's gets a row it did not send.
            probe.send(self.address, self.name, self.name, b"is it ready?")
        except MQBrokerException as exc:
            # A broker made read-only is as ready as it will ever be.
            if exc.response_code != ResponseCode.NO_PERMISSION or self._is_writable:
                raise

    @property
    def _is_writable(self) -> bool:
        return self.properties.get("brokerPermission") in (None, "2", "6")

    def _have_it_register(self) -> None:
        # A broker registers when it starts and every 30 s. The first time comes to nothing if it starts within the
        # fraction of a second in which its client has yet to find the name server (availableNamesrvAddrMap in
        # NettyRemotingClient); the next comes 10 s later. To be told its permission makes it register at once.
        permission = {"brokerPermission": self.properties.get("brokerPermission", "6")}
        try:
            self._site.probe.configure(self.address, permission)
        except MQBrokerException as exc:
            if exc.response_code != ResponseCode.NO_PERMISSION:
                raise


class Proxy(Server):
    """The proxy: gRPC at :attr:`endpoints`, remoting at :attr:`address`; `overrides` are the user's properties."""

    def __init__(self, site: Site, overrides: Mapping[str, object]) -> None:
        super().__init__(site, "proxy")
        self._overrides = dict(overrides)
        self._grpc_port = self._remoting_port = 0
        self._choose_ports()

    @property
    def endpoints(self) -> str:
        """``host:port`` of gRPC: the option ``endpoints``."""
        # The gRPC port can't demand a certificate (ProxyAndTlsProtocolNegotiator); the other one passes gRPC on to it.
        return self.address if self._site.security.mutual else f"127.0.0.1:{self._grpc_port}"

    @property
    def address(self) -> str:
        """``host:port`` of its remoting protocol."""
        return f"127.0.0.1:{self._remoting_port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The gRPC port and the remoting port."""
        return (self._grpc_port, self._remoting_port)

    @property
    def properties(self) -> dict[str, object]:
        """What its configuration file says, but of access control: ours, and the user's on top."""
        text = render(
            "proxy.json",
            name_server=self._site.name_server,
            grpc_port=self._grpc_port,
            remoting_port=self._remoting_port,
        )
        return {**json.loads(text), **self._overrides}

    def _choose_ports(self) -> bool:
        self._grpc_port = pick_port(self._site.ports)
        self._remoting_port = pick_port(self._site.ports | {self._grpc_port})
        self._site.ports.update(self.ports)
        return True

    def _configure(self) -> list[str]:
        config = self.folder / "proxy.json"
        properties = {**self.properties, **self._site.security.proxy_properties}
        write_private(config, json.dumps(properties, indent=2).encode())
        main = "org.apache.rocketmq.proxy.ProxyStartup"
        return self._site.command(self.folder, _PROXY_MEMORY, main, ["-pc", str(config)])

    def _may_try_again(self, keep_ports: bool) -> bool:
        # It also dies at once if no broker was registered when it started; by now one is, or waiting has failed.
        return super()._may_try_again(keep_ports) or bool(self._site.probe.registered_brokers(self._site.name_server))

    def _ask(self) -> None:
        brokers = self._site.probe.registered_brokers(self._site.name_server)
        for name in list(brokers)[:1]:
            self._site.probe.route(self.address, name)
        try:
            socket.create_connection(("127.0.0.1", self._grpc_port), 2.0).close()
        except OSError as exc:
            raise ClusterError(f"connecting to the proxy's gRPC port {self._grpc_port}: {exc}") from exc
