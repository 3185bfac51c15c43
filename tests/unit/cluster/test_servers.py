"""A proxy that exits because no broker has registered yet is restarted for a limited time."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rocketmq_spark.cluster.probe import Probe
from rocketmq_spark.cluster.process import Watchdog
from rocketmq_spark.cluster.servers import NameServer, Proxy, Site
from rocketmq_spark.errors import ClusterError
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing.fake_name_server import encode_route
from tests.support.frames import encode_command
from tests.support.peer import Peer, Session
from tests.support.processes import PATIENCE
from tests.support.scripted import route

MakeProxy = Callable[..., Proxy]

# Each start appends a line. The first processes exit like a proxy that finds no broker.
DIES = """echo start >> starts
[ $(wc -l < starts) -le {deaths} ] && echo 'java.lang.RuntimeException: create system broadcast topic' && exit 1
exec {serve}
"""
# The two ports of a running proxy. It answers every remoting request with a file of its folder.
SERVES = """
import json, socket
ports = json.load(open("proxy.json"))
grpc = socket.create_server(("127.0.0.1", ports["grpcServerPort"]))
remoting = socket.create_server(("127.0.0.1", ports["remotingListenPort"]))
answer = open("answer", "rb").read()
while True:
    asking = remoting.accept()[0]
    asking.recv(65536)
    asking.sendall(answer)
"""


class Brokers:
    """Return the brokers of a name server: none in the first queries."""

    def __init__(self, none_until: float) -> None:
        self.none_until = none_until
        self.asked = 0

    def serve(self, session: Session) -> None:
        request = session.read()
        assert request.code == RequestCode.GET_BROKER_CLUSTER_INFO
        self.asked += 1
        broker = {"brokerName": "broker-0", "brokerAddrs": {"0": "127.0.0.1:1"}}
        known = {"broker-0": broker} if self.asked > self.none_until else {}
        session.answer(request, body=json.dumps({"brokerAddrTable": known, "clusterAddrTable": {}}).encode())


@pytest.fixture
def make_proxy(tmp_path: Path, make_java: Callable[[Path, str], Path]) -> Iterator[MakeProxy]:
    """Return a function that makes a proxy whose first processes exit, and a scripted name server."""
    watchdog, proxies = Watchdog(), list[Proxy]()

    def make(name_server: str, deaths: int) -> Proxy:
        serve = f"{shlex.quote(sys.executable)} -I -c {shlex.quote(SERVES)}"
        java = make_java(tmp_path / "bin", DIES.format(deaths=deaths, serve=serve))
        site = Site(java, (), tmp_path, watchdog, Probe(), (), PATIENCE)
        site.name_servers.append(cast("NameServer", SimpleNamespace(address=name_server, is_alive=True)))
        proxy = Proxy(site, {})
        proxy.folder.mkdir()
        answer = RemotingCommand(0, 0, {}, encode_route(route({"broker-0": 1})), 1, "", "JAVA", 513)
        (proxy.folder / "answer").write_bytes(encode_command(answer))
        proxies.append(proxy)
        return proxy

    yield make
    for proxy in proxies:
        proxy.kill()
    watchdog.release()


def starts_of(proxy: Proxy) -> int:
    return len((proxy.folder / "starts").read_text().splitlines())


@pytest.mark.parametrize("keep_ports", [False, True], ids=["first", "again"])
def test_proxy_that_dies_before_broker_registration_is_restarted(make_proxy: MakeProxy, keep_ports: bool) -> None:
    # No broker during its start, one broker after its exit.
    with Peer(Brokers(none_until=1).serve) as name_server:
        proxy = make_proxy(name_server.address, deaths=1)
        ports = proxy.ports
        proxy.start()
        proxy.await_ready(time.monotonic() + PATIENCE, keep_ports=keep_ports)
        assert proxy.is_alive
        assert (starts_of(proxy), proxy.ports) == (2, ports)


@pytest.mark.parametrize(("none_until", "starts"), [(math.inf, 1), (0, 4)], ids=["no broker", "it always dies"])
def test_proxy_that_keeps_dying_is_given_up_with_the_reason(
    make_proxy: MakeProxy, none_until: float, starts: int
) -> None:
    with Peer(Brokers(none_until).serve) as name_server:
        proxy = make_proxy(name_server.address, deaths=9)
        proxy.start()
        with pytest.raises(ClusterError, match=r"proxy ended with exit code 1; .*create system broadcast topic"):
            proxy.await_ready(time.monotonic() + PATIENCE)
        assert starts_of(proxy) == starts
