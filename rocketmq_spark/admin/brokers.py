"""Queries name servers and brokers for `Admin.brokers` and `Admin.topics`, and builds their tables.

A broker's status comes from the request that ``mqadmin clusterList`` sends (``ClusterListSubCommand``,
docs/internals/remoting.md#broker-administration). Its permission comes from a second request, for its settings.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Final, NamedTuple

from rocketmq_spark.admin.answers import BrokerInfo, TopicInfo
from rocketmq_spark.display.row_table import Table
from rocketmq_spark.errors import RocketMQError, TopicRouteStaleException
from rocketmq_spark.model.names import is_internal_topic
from rocketmq_spark.model.route import BrokerData, TopicRouteData, masters_of, permission_text
from rocketmq_spark.protocol.remoting.responses import TopicConfig, integer_of
from rocketmq_spark.routing.topic_configs import version_of
from rocketmq_spark.transport.parallel import query_all
from rocketmq_spark.transport.remoting.transport import RemotingTransport

NO_BROKERS: Final = (
    "the name servers know no broker: start one with namesrvAddr set to their addresses, or check the logs of running "
    "brokers. A new broker takes a moment to register"
)
_RUNTIME: Final = re.compile(r"\b(\d{1,9}) days?, (\d{1,9}) hours?, (\d{1,9}) minutes?, (\d{1,9}) seconds?")
_RATIO: Final = re.compile(r"[0-9]{1,19}(\.[0-9]{1,30})?")
_SECONDS: Final = (86_400, 3_600, 60, 1)


class BrokerStatus(NamedTuple):
    """The status that a broker reports."""

    runtime: Mapping[str, str]
    now: float  # The local time of the answer in epoch seconds
    settings: Mapping[str, str] | None  # None if the user may not see them; they may include secrets

    @property
    def perm(self) -> int | None:
        """The broker's permission, None if it is unknown."""
        return None if self.settings is None else integer_of(self.settings, "brokerPermission")


def brokers_of(transport: RemotingTransport, timeout: float) -> Table[BrokerInfo]:
    """Return all brokers that the name servers know, by cluster, name and id."""
    brokers = sorted(transport.cluster_info(timeout).brokers, key=lambda broker: (broker.cluster, broker.broker_name))
    rows, missing = [], [] if brokers else [NO_BROKERS]
    for broker, number, status in query_brokers(transport, brokers, timeout):
        address = broker.broker_addrs[number]
        if isinstance(status, RocketMQError):
            missing.append(f"{broker.broker_name} ({address}): {status}")
            continue
        runtime = status.runtime
        rows.append(
            BrokerInfo(
                broker.broker_name,
                number,
                broker.cluster,
                address,
                version_of(runtime),
                None if status.perm is None else permission_text(status.perm),
                disk_used_percent(runtime),
                _today(runtime, "msgPutTotal"),
                _today(runtime, "msgGetTotal"),
                _booted(runtime),
            )
        )
    return Table(BrokerInfo, rows, missing=missing)


def query_brokers(
    transport: RemotingTransport, brokers: Iterable[BrokerData], timeout: float
) -> Iterator[tuple[BrokerData, int, BrokerStatus | RocketMQError]]:
    """Query the status of brokers and their slaves; yield each broker, id and answer in this order."""
    every = [(broker, number) for broker in brokers for number in sorted(broker.broker_addrs)]
    addresses = [broker.broker_addrs[number] for broker, number in every]
    answers = query_all(addresses, lambda address: _query_broker(transport, address, timeout))
    for (broker, number), address in zip(every, addresses, strict=True):
        yield broker, number, answers[address]


def disk_used_percent(runtime: Mapping[str, str]) -> float | None:
    """Return the used percentage of the commit log's disk, of several the fullest."""
    texts = (text for name, text in runtime.items() if name.startswith("commitLogDiskRatio"))
    ratios = [float(text) for text in texts if _RATIO.fullmatch(text)]
    return round(max(ratios) * 100, 1) if any(ratios) else None


def clock_of(runtime: Mapping[str, str]) -> float | None:
    """Return a broker's own time in epoch seconds: its start plus its running time in whole seconds."""
    booted, running = _booted(runtime), _RUNTIME.search(runtime.get("runtime", ""))
    if booted is None or running is None:
        return None
    return booted.timestamp() + sum(int(count) * unit for count, unit in zip(running.groups(), _SECONDS, strict=True))


def _query_broker(transport: RemotingTransport, address: str, timeout: float) -> BrokerStatus:
    runtime = transport.runtime_info(address, timeout)
    now = time.time()
    settings: Mapping[str, str] | None = None
    # With access control a user may see the status but not the settings.
    with contextlib.suppress(RocketMQError):
        settings = transport.broker_config(address, timeout)
    return BrokerStatus(runtime, now, settings)


def _booted(runtime: Mapping[str, str]) -> datetime | None:
    milliseconds = integer_of(runtime, "bootTimestamp")
    try:
        return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        # The year is out of range.
        return None


def _today(runtime: Mapping[str, str], name: str) -> int | None:
    now, morning = integer_of(runtime, f"{name}TodayNow"), integer_of(runtime, f"{name}TodayMorning")
    return None if now is None or morning is None else now - morning


# By topic; None for a broker without topic attributes (4.x).
_Attributes = Mapping[str, Mapping[str, str] | None]


def topics_of(transport: RemotingTransport, timeout: float, *, everything: bool) -> Table[TopicInfo]:
    """Return the topics of the transport's namespace, sorted by name; with `everything` also RocketMQ's own."""
    names = transport.topics(timeout)
    info = transport.cluster_info(timeout)
    # Servers create topics named after themselves, but not in a namespace.
    own: set[str] = set()
    if not transport.namespace.name:
        brokers = (broker.broker_name for broker in info.brokers)
        replies = (f"{cluster}_REPLY_TOPIC" for cluster in info.clusters)
        own = {"DefaultHeartBeatSyncerTopic", *brokers, *info.clusters, *replies}
    shown = sorted(name for name in names if everything or not (name in own or is_internal_topic(name)))
    routes = query_all(shown, lambda topic: transport.query_route(topic, timeout))
    masters = masters_of(info.brokers)
    answers = query_all(masters, lambda broker: transport.all_topic_attributes(masters[broker], timeout))
    known = [answer for answer in answers.values() if not isinstance(answer, RocketMQError)]
    errors = ((broker, answer) for broker, answer in answers.items() if isinstance(answer, RocketMQError))
    missing = [f"the types of topics on {broker}: {why}" for broker, why in errors]
    missing += [] if info.brokers else [NO_BROKERS]
    rows = []
    unknown: dict[tuple[type, object], list[tuple[str, RocketMQError]]] = {}
    for topic, route in routes.items():
        if isinstance(route, TopicRouteData):
            rows.append(_topic_info(topic, route, known))
        elif not isinstance(route, TopicRouteStaleException):
            # Each text contains its topic's name, so errors are grouped by class and response code.
            kind = type(route), getattr(route, "response_code", None)
            unknown.setdefault(kind, []).append((topic, route))
    for (first, why), *others in unknown.values():
        name = f"{len(others) + 1:,} topics, including {first}" if others else f"topic {first}"
        missing.append(f"{name}: {why}")
    return Table(TopicInfo, sorted(rows, key=lambda row: row.topic), missing=missing)


def _topic_info(topic: str, route: TopicRouteData, known: Iterable[_Attributes]) -> TopicInfo:
    attributes = (of_broker.get(topic) for of_broker in known)
    configs = [TopicConfig.of_attributes(config) for config in attributes if config is not None]
    return TopicInfo(
        topic,
        "/".join(sorted({config.message_type for config in configs})) or None,
        "/".join(sorted({config.queue_type for config in configs})) or None,
        tuple(data.broker_name for data in route.queue_datas),
        sum(data.queue_nums for data in route.queue_datas),
        "/".join(sorted({permission_text(data.perm) for data in route.queue_datas})) or "-",
    )
