"""Templates, ports and properties of a local cluster."""

from __future__ import annotations

import json
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.cluster.config import (
    broker_overrides,
    checked_port,
    is_free,
    pick_broker_ports,
    pick_port,
    properties_of,
    properties_text,
    proxy_overrides,
    render,
    require_free,
)
from rocketmq_spark.errors import ClusterError


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def drawn(*numbers: int) -> Callable[[int, int], int]:
    """Draw the numbers given, one after the other."""
    rest = iter(numbers)
    return lambda start, stop: next(rest)


def a_free_port(*, below: int = 0) -> int:
    return pick_port((), below=below)


def test_broker_template_has_all_settings_of_a_broker() -> None:
    text = render("broker.conf", name="broker-7", name_server="127.0.0.1:9876", port=10911, ha_port=10912)
    properties = properties_of(text)
    assert "$" not in text
    assert properties["brokerName"] == "broker-7"
    assert properties["namesrvAddr"] == "127.0.0.1:9876"
    assert (properties["listenPort"], properties["haListenPort"]) == ("10911", "10912")
    assert (properties["brokerIP1"], properties["bindAddress"]) == ("127.0.0.1", "127.0.0.1")
    assert properties["autoCreateTopicEnable"] == "true"
    # The port for slaves is open to all; the broker sends nothing and closes connections.
    assert (properties["haTransferBatchSize"], properties["haHousekeepingInterval"]) == ("0", "-1")


def test_templates_of_replicas_add_to_those_of_brokers_and_name_servers() -> None:
    replica = properties_of(render("replica.conf", controllers="127.0.0.1:1;127.0.0.1:2"))
    assert replica["controllerAddr"] == "127.0.0.1:1;127.0.0.1:2"
    assert (replica["enableControllerMode"], replica["allAckInSyncStateSet"]) == ("true", "true")
    # Slaves get messages.
    assert int(replica["haTransferBatchSize"]) > 0
    controller = properties_of(render("controller.conf", peers="n0-127.0.0.1:1", number=0))
    assert (controller["controllerDLegerPeers"], controller["controllerDLegerSelfId"]) == ("n0-127.0.0.1:1", "n0")
    assert controller.keys().isdisjoint(properties_of(render("namesrv.conf", port=1)))


def test_name_server_template_names_its_port_and_this_machine_only() -> None:
    properties = properties_of(render("namesrv.conf", port=9876))
    assert (properties["listenPort"], properties["bindAddress"]) == ("9876", "127.0.0.1")


def test_proxy_template_is_json_with_numbers_for_ports() -> None:
    proxy = json.loads(render("proxy.json", name_server="127.0.0.1:9876", grpc_port=8081, remoting_port=8080))
    assert proxy["namesrvAddr"] == "127.0.0.1:9876"
    assert (proxy["grpcServerPort"], proxy["remotingListenPort"]) == (8081, 8080)
    cluster = properties_of(render("broker.conf", name="b", name_server="n", port=1, ha_port=2))["brokerClusterName"]
    assert proxy["rocketMQClusterName"] == cluster


@pytest.mark.parametrize(
    ("name", "values"), [("logback.xml", {}), ("ivysettings.xml", {}), ("ivy.xml", {"release": "5"})]
)
def test_xml_templates_are_well_formed(name: str, values: dict[str, str]) -> None:
    assert ET.fromstring(render(name, **values)).tag


def test_server_logs_stay_in_the_folder_the_server_runs_in() -> None:
    files = [file.text or "" for file in ET.fromstring(render("logback.xml")).iter("file")]
    assert files
    assert all("/" not in file and "$" not in file for file in files)


def test_ivy_settings_contain_no_host() -> None:
    assert "://" not in render("ivysettings.xml")


def test_missing_value_is_not_rendered_as_a_dollar_sign() -> None:
    with pytest.raises(KeyError):
        render("namesrv.conf")


def loaded_by_java(text: str) -> dict[str, str]:
    """Read properties as java.util.Properties.load does: Latin-1, escapes, the first unescaped '=' separates."""
    properties = {}
    for line in text.encode("latin-1").decode("latin-1").splitlines():
        key, value = re.fullmatch(r"((?:[^=\\]|\\.)*)=(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        properties[_unescaped(key)] = _unescaped(value)
    return properties


def _unescaped(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1].startswith("u"):
            return chr(int(match[1][1:], 16))
        return {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1])

    plain = re.sub(r"\\(u[0-9a-f]{4}|.)", one, text, flags=re.DOTALL)
    return plain.encode("utf-16-be", "surrogatepass").decode("utf-16-be", "surrogatepass")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(TEXT.filter(bool), TEXT, max_size=5))
def test_properties_reach_java_as_they_were_given(properties: dict[str, str]) -> None:
    assert loaded_by_java(properties_text(properties)) == properties


def test_one_mapping_applies_to_all_brokers_with_java_booleans() -> None:
    overrides = broker_overrides({"slaveReadEnable": True, "maxMessageSize": 1024}, 2)
    assert overrides == [{"slaveReadEnable": "true", "maxMessageSize": "1024"}] * 2


def test_each_broker_can_have_its_own_mapping() -> None:
    assert broker_overrides([{"a": 1}, {}], 2) == [{"a": "1"}, {}]
    assert broker_overrides(None, 2) == [{}, {}]


def test_wrong_number_of_mappings_is_refused() -> None:
    with pytest.raises(ClusterError, match="3 mappings for 2 brokers"):
        broker_overrides([{}, {}, {}], 2)


def test_property_that_the_cluster_sets_itself_is_refused() -> None:
    with pytest.raises(ClusterError, match="may not set storePathRootDir: use directory="):
        broker_overrides({"storePathRootDir": "/tmp"}, 1)
    for refuse in (lambda given: broker_overrides(given, 1), proxy_overrides):
        with pytest.raises(ClusterError, match="may not set authenticationEnabled: use auth="):
            refuse({"authenticationEnabled": True})


def test_a_proxy_takes_properties_as_json_has_them() -> None:
    given = {"grpcClientIdleTimeMills": 2000, "enableGrpcEpoll": True, "proxyName": "p"}
    assert proxy_overrides(given) == given
    with pytest.raises(ClusterError, match="proxy: the property proxyName must be a JSON value, not a bytes"):
        proxy_overrides({"proxyName": b"p"})


@pytest.mark.parametrize(("given", "overrides"), [(True, {}), ({}, {}), (False, None)])
def test_any_mapping_enables_the_proxy_even_an_empty_one(
    given: bool | dict[str, object], overrides: dict[str, object] | None
) -> None:
    assert proxy_overrides(given) == overrides


def test_property_of_a_proxy_that_the_cluster_sets_itself_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"proxy may not set grpcServerPort: .*LocalCluster\.endpoints"):
        proxy_overrides({"grpcServerPort": 8081})


def test_port_someone_listens_on_is_not_free(taken: int) -> None:
    assert not is_free(taken)


def test_port_someone_listens_on_at_every_address_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        assert not is_free(listener.getsockname()[1])


def test_taken_port_is_skipped(taken: int) -> None:
    free = a_free_port()
    assert pick_port((), draw=drawn(taken, free)) == free


def test_port_of_another_server_of_the_cluster_is_passed_over() -> None:
    free = a_free_port(below=2)
    other = pick_port({free, free - 1, free - 2}, below=2)
    assert pick_port({free - 2}, below=2, draw=drawn(free, other)) == other


def test_picked_ports_are_outside_the_ephemeral_range() -> None:
    assert all(20_000 <= pick_port(()) < 30_000 for _ in range(20))


def test_no_free_port_is_an_error(taken: int) -> None:
    with pytest.raises(ClusterError, match="no free port"):
        pick_port((), draw=drawn(*[taken] * 200))


def test_three_ports_of_a_broker_are_free_and_different() -> None:
    listen, ha = pick_broker_ports((), {})
    all_three = (listen, listen - 2, ha)
    assert len(set(all_three)) == 3
    assert all(is_free(port) for port in all_three)


def test_named_ports_are_kept() -> None:
    listen, ha = a_free_port(below=2), a_free_port()
    assert pick_broker_ports((), {"listenPort": str(listen), "haListenPort": str(ha)}) == (listen, ha)


def test_taken_vip_port_of_a_configured_port_is_reported(taken: int) -> None:
    with pytest.raises(
        ClusterError, match=rf"listenPort={taken + 2} \(the broker's VIP port .*port {taken} of 127\.0\.0\.1"
    ):
        pick_broker_ports((), {"listenPort": str(taken + 2)})


def test_taken_configured_port_is_reported(taken: int) -> None:
    with pytest.raises(ClusterError, match=rf"port={taken}: port {taken} of 127\.0\.0\.1 is in use"):
        require_free(taken, f"port={taken}")


@pytest.mark.parametrize("value", ["0", "80", "65536", "http", "-1", "9876.0", ""])
def test_invalid_port_is_rejected(value: str) -> None:
    with pytest.raises(ClusterError, match="allowed are 1024 to 65535"):
        checked_port(value, "listenPort")
