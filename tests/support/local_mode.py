"""A proxy in local mode: one process that is a broker and its proxy. `LocalCluster` has only proxies of their own."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.cluster.config import pick_port, render
from tests.support.cluster import SharedCluster, SharedServer, started
from tests.support.processes import PATIENCE


class LocalModeProxy(Broker):
    """The process of a broker and its proxy."""

    _MAIN = "proxy.ProxyStartup"
    _CONFIG = ("-bc", "broker.conf")

    @property
    def endpoints(self) -> str:
        """``host:port`` of gRPC."""
        return f"127.0.0.1:{self._grpc_port}"

    def start(self) -> None:
        """Write both configurations and start the JVM, always with the same port of gRPC."""
        if not hasattr(self, "_grpc_port"):
            self._grpc_port = pick_port(self._site.ports)
            self._site.ports.add(self._grpc_port)
        remoting_port = pick_port(self._site.ports)
        ports = {"grpc_port": self._grpc_port, "remoting_port": remoting_port}
        properties = json.loads(render("proxy.json", name_server=self._site.name_server, **ports))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "proxy.json").write_text(json.dumps({**properties, "proxyMode": "LOCAL"}))
        super().start()

    def _command_line(self) -> list[str]:
        return [*super()._command_line(), "-pc", str(self.folder / "proxy.json"), "-pm", "local"]


@contextlib.contextmanager
def local_mode(broker_properties: Mapping[str, str]) -> Iterator[tuple[LocalCluster, LocalModeProxy]]:
    """Run a name server, which the cluster has, and a broker with its proxy in one process."""
    # The broker of this cluster only provides the name server.
    with started(LocalCluster(start_timeout=PATIENCE)) as cluster:
        cluster.brokers[0].stop()
        assert cluster._site is not None
        both = LocalModeProxy(cluster._site, "broker-local", broker_properties)
        try:
            both.restart()
            yield cluster, both
        finally:
            both.kill()
            shutil.rmtree(both.folder, ignore_errors=True)


@contextlib.contextmanager
def local_mode_proxy(broker_properties: Mapping[str, str]) -> Iterator[SharedCluster]:
    """Run the servers of `local_mode`, for tests that do not stop them."""
    with local_mode(broker_properties) as (cluster, both):
        server = SharedServer(both.name, both.address, str(both.log))
        yield SharedCluster(cluster.name_server, (server,), server, both.endpoints, cluster.options)
