"""Answers of name servers and brokers about themselves."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.model.route import BrokerData
from rocketmq_spark.protocol.remoting.responses import (
    ClusterInfo,
    decode_all_topic_attributes,
    decode_cluster_info,
    decode_in_sync_replicas,
    decode_properties,
    decode_runtime_info,
)

# The JSON of fastjson: broker ids are keys without quotes.
CLUSTER = (
    b'{"brokerAddrTable":{"b":{"brokerAddrs":{0:"10.0.0.2:10911",1:"10.0.0.3:10911"},"brokerName":"b","cluster":"c"},'
    b'"a":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"a","cluster":"c","enableActingMaster":false}},'
    b'"clusterAddrTable":{"c":["b","a"]}}'
)


def test_a_cluster_is_its_brokers_and_their_names_sorted() -> None:
    brokers = (
        BrokerData("a", {0: "10.0.0.1:10911"}, "c"),
        BrokerData("b", {0: "10.0.0.2:10911", 1: "10.0.0.3:10911"}, "c"),
    )
    assert decode_cluster_info(CLUSTER) == ClusterInfo(brokers, {"c": ("a", "b")})


def test_cluster_info_without_brokers_is_accepted() -> None:
    assert decode_cluster_info(b'{"brokerAddrTable":{},"clusterAddrTable":{}}') == ClusterInfo((), {})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"brokerAddrTable":[],"clusterAddrTable":{}}',
        b'{"brokerAddrTable":{"a":1},"clusterAddrTable":{}}',
        b'{"brokerAddrTable":{},"clusterAddrTable":{"c":1}}',
        b'{"brokerAddrTable":{"a":{"brokerAddrs":{"x":"1"},"brokerName":"a"}},"clusterAddrTable":{}}',
    ],
)
def test_malformed_cluster_info_is_rejected(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="reading"):
        decode_cluster_info(body)


def test_figures_are_texts_by_name() -> None:
    assert decode_runtime_info(b'{"table":{"brokerVersionDesc":"V5_5_0","n":1}}') == {
        "brokerVersionDesc": "V5_5_0",
        "n": "1",
    }
    with pytest.raises(RemotingCommandException, match="a broker's figures"):
        decode_runtime_info(b'{"table":[]}')


def test_settings_are_split_at_the_first_equals_sign() -> None:
    assert decode_properties(b"brokerPermission=6\nfilter = a=b\nno setting\n") == {
        "brokerPermission": "6",
        "filter": "a=b",
    }


def test_types_of_topics_on_old_brokers_are_unknown() -> None:
    body = b'{"topicConfigTable":{"new":{"attributes":{"message.type":"FIFO"}},"old":{"perm":6}}}'
    assert decode_all_topic_attributes(body) == {"new": {"message.type": "FIFO"}, "old": None}


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"topicConfigTable":{"a":null}}', b'{"topicConfigTable":{"a":{"attributes":1}}}']
)
def test_malformed_topic_attributes_are_rejected(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="reading a"):
        decode_all_topic_attributes(body)


def test_replicas_in_sync_are_those_of_the_broker() -> None:
    body = b"""{"replicasInfoTable":{"b":{"inSyncReplicas":[
        {"brokerName":"b","brokerId":1,"brokerAddress":"h:1"},{"brokerName":"b","brokerId":2,"brokerAddress":"h:2"}],
        "notInSyncReplicas":[{"brokerName":"b","brokerId":3,"brokerAddress":"h:3"}]}}}"""
    assert decode_in_sync_replicas(body, "b") == {"h:1", "h:2"}
    assert decode_in_sync_replicas(body, "other") == frozenset()


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"replicasInfoTable":{"b":1}}', b'{"replicasInfoTable":{"b":{"inSyncReplicas":[1]}}}'],
)
def test_malformed_replicas_are_rejected(body: bytes) -> None:
    with pytest.raises(RemotingCommandException, match="reading the replicas of a broker"):
        decode_in_sync_replicas(body, "b")
