"""A cluster that was never started, or could not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import ClusterError


def test_cluster_needs_a_broker() -> None:
    with pytest.raises(ClusterError, match="brokers=0"):
        LocalCluster(0)


def test_wrong_parameters_are_refused_before_anything_starts() -> None:
    with pytest.raises(ClusterError, match="port=80 is no port"):
        LocalCluster(port=80)
    with pytest.raises(ClusterError, match="2 mappings for 1 brokers"):
        LocalCluster(broker_properties=[{}, {}])
    with pytest.raises(ClusterError, match="proxy may not set proxyMode"):
        LocalCluster(proxy={"proxyMode": "LOCAL"})


def test_cluster_that_does_not_run_says_so() -> None:
    cluster = LocalCluster(2, proxy=True)
    assert repr(cluster) == "<LocalCluster not running, brokers=2 proxy=True>"
    assert cluster.servers == ()
    for attribute in ("name_server", "brokers", "endpoints", "directory"):
        with pytest.raises(ClusterError, match="the cluster isn't running: call start"):
            getattr(cluster, attribute)
    cluster.check()
    cluster.stop()


def test_properties_of_the_proxy_may_be_secrets_and_are_not_shown() -> None:
    cluster = LocalCluster(proxy={"innerClientAuthenticationCredentials": "hush"})
    assert repr(cluster) == "<LocalCluster not running, brokers=1 proxy=True>"


def test_without_java_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    cluster = LocalCluster(directory=tmp_path / "cluster")
    with pytest.raises(ClusterError, match="needs Java and found none"):
        cluster.start()
    assert not (tmp_path / "cluster").exists()
    assert cluster.servers == ()
