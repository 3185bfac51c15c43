"""What servers say of themselves: the JSON of GET_BROKER_CLUSTER_INFO and GET_BROKER_RUNTIME_INFO, a broker's settings.

Rule 1: nothing is interpreted here but the form; which facts a release tells is up to who asks for one.

Follows ``ClusterInfo.java``, ``KVTable.java`` and ``MixAll.string2Properties``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.errors import RemotingCommandException
from rocketmq_spark.route_data import BrokerData
from rocketmq_spark.wire.route import decode_broker_data, loads_lenient


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The brokers that a name server knows (``ClusterInfo.java``).

    Parameters
    ----------
    brokers : tuple of BrokerData
        By name.
    clusters : mapping of str to tuple of str
        The names of each cluster's brokers, sorted.
    """

    brokers: tuple[BrokerData, ...]
    clusters: Mapping[str, tuple[str, ...]]


def decode_cluster_info(body: bytes) -> ClusterInfo:
    """Decode the body of a GET_BROKER_CLUSTER_INFO answer.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    doing = "reading the brokers of a cluster"
    told = loads_lenient(body)
    table, clusters = _object(told, "brokerAddrTable", doing), _object(told, "clusterAddrTable", doing)
    brokers = [decode_broker_data(item) for item in table.values() if isinstance(item, dict)]
    if len(brokers) < len(table) or not all(isinstance(names, list) for names in clusters.values()):
        raise RemotingCommandException(
            f"{doing}: brokerAddrTable needs objects, clusterAddrTable lists: {reprlib.repr(told)}"
        )
    return ClusterInfo(
        tuple(sorted(brokers, key=lambda broker: broker.broker_name)),
        {name: tuple(sorted(map(str, names))) for name, names in sorted(clusters.items())},
    )


def decode_runtime_info(body: bytes) -> Mapping[str, str]:
    """Decode the body of a GET_BROKER_RUNTIME_INFO answer: figures by name, all of them texts.

    Raises
    ------
    RemotingCommandException
        Not JSON, or not of this form.
    """
    table = _object(loads_lenient(body), "table", "reading a broker's figures")
    return {name: str(value) for name, value in table.items()}


def decode_properties(body: bytes) -> Mapping[str, str]:
    """Decode the lines ``name=value`` of a GET_BROKER_CONFIG answer."""
    pairs = (line.partition("=") for line in bytes(body).decode(errors="replace").splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _object(told: Any, name: str, doing: str) -> dict[str, Any]:
    value = told.get(name) if isinstance(told, dict) else None
    if not isinstance(value, dict):
        raise RemotingCommandException(f"{doing}: {reprlib.repr(told)} has no object {name}")
    return value
