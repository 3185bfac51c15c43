"""Which topics there are: names and routes by the name servers, types by the brokers.

Rule 1: brokers are asked for the types of all topics at once; one that does not tell leaves them unknown.
Rule 2: a topic without a route was deleted a moment ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from rocketmq_spark.admin.asking import ask_all
from rocketmq_spark.admin.brokers import NO_BROKERS
from rocketmq_spark.admin.rows import TopicInfo
from rocketmq_spark.admin.table import Table
from rocketmq_spark.errors import RocketMQError, TopicRouteStaleException
from rocketmq_spark.names import is_internal_topic
from rocketmq_spark.namespace import bare_name
from rocketmq_spark.route_data import TopicRouteData, masters_of, permission_text
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.cluster_info import ClusterInfo
from rocketmq_spark.wire.topic_config import message_type_of, queue_type_of

_PROXYS_OWN: Final = "DefaultHeartBeatSyncerTopic"
_REPLIES: Final = "_REPLY_TOPIC"

# By topic; None for a broker that is older than attributes.
_Attributes = Mapping[str, Mapping[str, str] | None]


def topics_of(transport: RemotingTransport, namespace: str, timeout: float, *, everything: bool) -> Table[TopicInfo]:
    """Return the topics of a namespace, by name; `everything` has RocketMQ's own among them."""
    names = transport.topics(timeout)
    info = transport.cluster_info(timeout)
    wanted = (wired for wired in names if everything or not _is_own(wired, info))
    shown = {wired: name for wired in wanted if (name := bare_name(wired, namespace)) is not None}
    routes = ask_all(sorted(shown), lambda wired: transport.query_route(wired, timeout))
    masters = masters_of(info.brokers)
    told = ask_all(masters, lambda broker: transport.all_topic_attributes(masters[broker], timeout))
    known = [attributes for attributes in told.values() if not isinstance(attributes, RocketMQError)]
    missing = [f"types of topics, from {broker}: {why}" for broker, why in told.items() if isinstance(why, Exception)]
    missing += [] if info.brokers else [NO_BROKERS]
    rows = []
    unknown: dict[tuple[type, object], list[tuple[str, RocketMQError]]] = {}
    for wired, route in routes.items():
        if isinstance(route, TopicRouteData):
            rows.append(_topic_info(shown[wired], wired, route, known))
        elif not isinstance(route, TopicRouteStaleException):
            # Each text has its topic's name in it: what is alike is their class, and the server's code.
            kind = type(route), getattr(route, "response_code", None)
            unknown.setdefault(kind, []).append((shown[wired], route))
    for (first, why), *others in unknown.values():
        name = f"{len(others) + 1:,} topics, {first} among them" if others else f"topic {first}"
        missing.append(f"{name}: {why}")
    return Table(TopicInfo, sorted(rows, key=lambda row: row.topic), missing=missing)


def _topic_info(name: str, wired: str, route: TopicRouteData, known: Iterable[_Attributes]) -> TopicInfo:
    attributes = [found for of_broker in known if (found := of_broker.get(wired)) is not None]

    return TopicInfo(
        name,
        "/".join(sorted(set(map(message_type_of, attributes)))) or None,
        "/".join(sorted(set(map(queue_type_of, attributes)))) or None,
        tuple(data.broker_name for data in route.queue_datas),
        sum(data.queue_nums for data in route.queue_datas),
        "/".join(sorted({permission_text(data.perm) for data in route.queue_datas})) or "-",
    )


def _is_own(topic: str, info: ClusterInfo) -> bool:
    """Return whether RocketMQ made a topic for itself, or for a consumer group."""
    own = {_PROXYS_OWN, *(broker.broker_name for broker in info.brokers)}
    for cluster in info.clusters:
        own |= {cluster, f"{cluster}{_REPLIES}"}
    return topic in own or is_internal_topic(topic)
