"""A cluster that was never started, or could not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import ClusterError


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"brokers": 0}, "brokers=0 is not allowed"),
        ({"brokers": "2"}, "brokers='2' is not allowed: allowed is an integer of at least 1"),
        ({"brokers": True}, "brokers=True is not allowed: allowed is an integer of at least 1"),
        ({"name_servers": 0}, "name_servers=0 is not allowed"),
        ({"replicas": 0}, "replicas=0 is not allowed"),
        ({"replicas": 2}, "give replicas=2 or more together with controller=True"),
        ({"controller": True}, "give replicas=2 or more together with controller=True"),
        ({"controller": True, "replicas": 2, "auth": True}, "and no auth"),
        ({"port": 80}, "port=80 is not a valid port"),
        ({"broker_properties": [{}, {}]}, "2 mappings for 1 brokers"),
        ({"broker_properties": "maxMessageSize=1"}, "broker_properties takes a mapping for all brokers, or a list"),
        ({"broker_properties": ["a=1"]}, "broker_properties takes a mapping for all brokers, or a list"),
        ({"broker_properties": {"authenticationEnabled": True}}, "may not set authenticationEnabled: use auth="),
        ({"proxy": {"proxyMode": "LOCAL"}}, "proxy may not set proxyMode"),
        ({"proxy": "no"}, "proxy takes False, True or a mapping of properties, not a str"),
        ({"proxy": None}, "proxy takes False, True or a mapping of properties, not a NoneType"),
        ({"jvm_options": "-Xmx1g"}, r"jvm_options must be a list of strings, as in \['-Xmx1g', "),
        ({"start_timeout": "90"}, "start_timeout='90' is not allowed: allowed are seconds above 0"),
        ({"start_timeout": 0}, "start_timeout=0 is not allowed: allowed are seconds above 0"),
    ],
)
def test_invalid_parameters_are_rejected_before_anything_starts(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        LocalCluster(**parameters)


def test_stopped_cluster_reports_that_it_is_not_running() -> None:
    cluster = LocalCluster(2, proxy=True)
    assert repr(cluster) == "<LocalCluster not running, brokers=2 proxy=True>"
    assert cluster.servers == ()
    for attribute in ("name_server", "brokers", "endpoints", "directory"):
        with pytest.raises(ClusterError, match="the cluster isn't running: call start"):
            getattr(cluster, attribute)
    cluster.check()
    cluster.stop()


def test_proxy_properties_are_not_shown_in_repr() -> None:
    cluster = LocalCluster(proxy={"innerClientAuthenticationCredentials": "hush"})
    assert repr(cluster) == "<LocalCluster not running, brokers=1 proxy=True>"


def test_start_without_java_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    cluster = LocalCluster(directory=tmp_path / "cluster")
    with pytest.raises(ClusterError, match="needs Java and found none"):
        cluster.start()
    assert not (tmp_path / "cluster").exists()
    assert cluster.servers == ()
