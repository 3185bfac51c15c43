"""What the servers of a cluster write and run, and when they are ready, by the answers of a probe of the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster.config import properties_of
from rocketmq_spark.cluster.process import Watchdog
from rocketmq_spark.cluster.servers import Broker, NameServer, Proxy, Server, Site
from rocketmq_spark.errors import ClusterError, MQBrokerException
from rocketmq_spark.model.route import BrokerData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from tests.support.scripted import route


class Answers:
    """A probe that returns what the test sets, and records the messages and settings that it would send."""

    def __init__(self) -> None:
        self.registered: list[BrokerData] = []
        self.template: dict[str, int] = {}
        self.replicas_in_sync: set[str] = set()
        self.refusal: MQBrokerException | None = None
        self.sent: list[str] = []
        self.configured: list[tuple[str, Any]] = []

    def brokers(self, address: str) -> list[BrokerData]:
        return self.registered

    def route(self, address: str, topic: str) -> TopicRouteData:
        return route(self.template)

    def in_sync(self, controllers: Iterable[str], name: str) -> set[str]:
        return self.replicas_in_sync

    def send(self, address: str, *_: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(address)

    def configure(self, address: str, properties: Any) -> None:
        self.configured.append((address, properties))


@pytest.fixture
def probe() -> Answers:
    return Answers()


@pytest.fixture
def make_site(tmp_path: Path, probe: Answers) -> Iterator[Callable[..., Site]]:
    """Return a function that makes the site of a cluster with one name server."""
    watchdog = Watchdog()

    def make(*jvm_options: str, controller: bool = False) -> Site:
        java: Any = Path("/no/such/java")
        site = Site(java, (), tmp_path, watchdog, probe, jvm_options, 1.0, controller=controller)  # type: ignore[arg-type]
        NameServer(site, None)
        return site

    yield make
    watchdog.release()


def unready(server: Server) -> str:
    with pytest.raises(ClusterError) as raised:
        server._require_ready()
    return str(raised.value)


def registers(probe: Answers, broker: Broker, broker_id: int = 0, address: str = "") -> None:
    probe.registered = [BrokerData(broker.broker_name, {broker_id: address or broker.address})]


def test_broker_is_ready_when_it_is_registered_routes_new_topics_and_stores_a_message(
    make_site: Callable[..., Site], probe: Answers
) -> None:
    broker = Broker(make_site(), "broker-0", {})
    assert "the name server has no address for broker-0" in unready(broker)
    registers(probe, broker, address="127.0.0.1:1")
    assert f"has 127.0.0.1:1 for broker-0, expected is {broker.address}" in unready(broker)
    # Each time it is made to register at once.
    assert probe.configured == [(broker.address, {"brokerPermission": "6"})] * 2
    registers(probe, broker, broker_id=2)
    assert unready(broker) == "broker-0 has no master yet"
    registers(probe, broker)
    assert "the route of topic TBW102 does not include broker-0 yet" in unready(broker)
    probe.template = {"broker-0": 8}
    broker._require_ready()
    assert probe.sent == [broker.address]


def test_broker_that_creates_no_topics_needs_no_route_of_the_template(
    make_site: Callable[..., Site], probe: Answers
) -> None:
    broker = Broker(make_site(), "broker-0", {"autoCreateTopicEnable": "false"})
    registers(probe, broker)
    broker._require_ready()
    assert probe.sent == [broker.address]


@pytest.mark.parametrize(
    ("permission", "code", "is_ready"),
    [
        ("4", ResponseCode.NO_PERMISSION, True),
        ("4", ResponseCode.SYSTEM_ERROR, False),
        ("6", ResponseCode.NO_PERMISSION, False),
    ],
)
def test_only_a_read_only_broker_may_reject_the_message(
    permission: str, code: int, is_ready: bool, make_site: Callable[..., Site], probe: Answers
) -> None:
    broker = Broker(make_site(), "broker-0", {"brokerPermission": permission, "autoCreateTopicEnable": "false"})
    registers(probe, broker)
    probe.refusal = MQBrokerException("refused", int(code), "", broker.address)
    if is_ready:
        broker._require_ready()
    else:
        with pytest.raises(MQBrokerException, match="refused"):
            broker._require_ready()


def test_replica_is_ready_when_it_has_all_messages_of_its_master(
    make_site: Callable[..., Site], probe: Answers
) -> None:
    site = make_site(controller=True)
    replica = Broker(site, "broker-0", {}, replica=1)
    probe.registered = [BrokerData("broker-0", {0: "127.0.0.1:1", 2: replica.address})]
    assert unready(replica) == "broker-0-replica-1 does not have all messages of broker-0 yet"
    probe.replicas_in_sync = {replica.address}
    replica._require_ready()
    # Only a master stores messages.
    assert probe.sent == []


def test_controller_gives_a_broker_its_id(make_site: Callable[..., Site]) -> None:
    site = make_site(controller=True)
    (name_server,) = site.name_servers
    properties = Broker(site, "broker-0", {}).properties
    assert "brokerId" not in properties
    assert properties["controllerAddr"] == name_server.controller
    assert f"n0-{name_server.controller}" in name_server._configuration()
    assert Broker(make_site(), "broker-0", {}).properties["brokerId"] == "0"


def test_the_users_properties_take_precedence(make_site: Callable[..., Site]) -> None:
    site = make_site()
    broker = Broker(site, "broker-0", {"maxMessageSize": "1"})
    written = properties_of(broker._configuration())
    assert (written["maxMessageSize"], written["namesrvAddr"]) == ("1", site.name_server)
    proxy = json.loads(Proxy(site, {"enableACL": True, "grpcServerPort": 1})._configuration())
    assert (proxy["enableACL"], proxy["grpcServerPort"]) == (True, 1)


def test_the_users_jvm_options_come_last_and_replace_the_collector(make_site: Callable[..., Site]) -> None:
    for own, collectors in (("-Xmx1g", ["-XX:+UseParallelGC"]), ("-XX:+UseZGC", ["-XX:+UseZGC"])):
        line = Broker(make_site(own), "broker-0", {})._command_line()
        main = line.index("org.apache.rocketmq.broker.BrokerStartup")
        assert line[main - 1] == own
        assert [option for option in line if option.endswith("GC")] == collectors
        assert Path(line[-1]).name == "broker.conf"


def test_name_server_that_runs_is_asked(make_site: Callable[..., Site]) -> None:
    site = make_site()
    second = NameServer(site, None, 1)
    assert site.name_server == f"{site.name_servers[0].address};{second.address}"
    # None of them runs.
    assert site.name_server_to_ask == site.name_servers[0].address
    assert second.name == "namesrv-1"


def test_files_of_a_stopped_server_go_except_for_its_logs(make_site: Callable[..., Site]) -> None:
    broker = Broker(make_site(), "broker-0", {})
    (broker.folder / "store").mkdir(parents=True)
    for name in ("store/secret", "broker.conf", "console.log", "hs_err.log.1"):
        (broker.folder / name).touch()
    broker.remove_all_but_logs()
    assert {entry.name for entry in broker.folder.iterdir()} == {"console.log", "hs_err.log.1"}
