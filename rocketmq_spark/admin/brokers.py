"""What brokers say of themselves: GET_BROKER_RUNTIME_INFO, and of their settings the permission.

Rule 1: a figure that a release does not tell, or that is none, is None; nothing is guessed.

Follows ``AdminBrokerProcessor.prepareRuntimeInfo``; what is made of the figures, ``ClusterListSubCommand.java``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Final, NamedTuple

from rocketmq_spark.admin.asking import ask_all
from rocketmq_spark.admin.rows import BrokerInfo
from rocketmq_spark.admin.table import Table
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.route_data import BrokerData, permission_text
from rocketmq_spark.transport.remoting import RemotingTransport

NO_BROKERS: Final = (
    "the name servers know no broker: start one with namesrvAddr set to their addresses, or look why those there do "
    "not register; one that has just started takes a moment"
)
_RUNTIME: Final = re.compile(r"\b(\d{1,9}) days?, (\d{1,9}) hours?, (\d{1,9}) minutes?, (\d{1,9}) seconds?")
_SECONDS: Final = (86_400, 3_600, 60, 1)


class Told(NamedTuple):
    """What a broker says of itself.

    Parameters
    ----------
    runtime : mapping of str to str
        Figures by name.
    now : float
        When they came, epoch seconds by our clock.
    perm : int or None
        The permission of its settings; None where the user may not see them.
    """

    runtime: Mapping[str, str]
    now: float
    perm: int | None


def brokers_of(transport: RemotingTransport, timeout: float) -> Table[BrokerInfo]:
    """Return all brokers that the name servers know, by cluster, name and id."""
    brokers = sorted(transport.cluster_info(timeout).brokers, key=lambda one: (one.cluster, one.broker_name))
    rows, missing = [], [] if brokers else [NO_BROKERS]
    for broker, number, told in ask_brokers(transport, brokers, timeout):
        if isinstance(told, RocketMQError):
            missing.append(f"{broker.broker_name} ({broker.broker_addrs[number]}): {told}")
        else:
            rows.append(_broker_info(broker, number, told))
    return Table(BrokerInfo, rows, missing=missing)


def ask_brokers(
    transport: RemotingTransport, brokers: Iterable[BrokerData], timeout: float
) -> Iterator[tuple[BrokerData, int, Told | RocketMQError]]:
    """Ask brokers, and the slaves of each, for their figures; yield each with its id, in this order."""
    every = [(broker, number) for broker in brokers for number in sorted(broker.broker_addrs)]
    addresses = [broker.broker_addrs[number] for broker, number in every]
    answers = ask_all(addresses, lambda address: _told(transport, address, timeout))
    for (broker, number), address in zip(every, addresses, strict=True):
        yield broker, number, answers[address]


def _broker_info(broker: BrokerData, number: int, told: Told) -> BrokerInfo:
    runtime = told.runtime
    booted = _booted(runtime)
    return BrokerInfo(
        broker.broker_name,
        number,
        broker.cluster,
        broker.broker_addrs[number],
        version_of(runtime),
        None if told.perm is None else permission_text(told.perm),
        disk_used_percent(runtime),
        _today(runtime, "msgPutTotal"),
        _today(runtime, "msgGetTotal"),
        booted,
    )


def version_of(runtime: Mapping[str, str]) -> str | None:
    """Return a broker's release: ``V5_5_0`` is ``5.5.0``."""
    told = runtime.get("brokerVersionDesc", "")
    return told.removeprefix("V").replace("_", ".") or None


def disk_used_percent(runtime: Mapping[str, str]) -> float | None:
    """Return how full the disk with the commit log is; of several, the fullest."""
    ratios = [number for name in runtime if name.startswith("commitLogDiskRatio") if (number := _float(runtime, name))]
    return round(max(ratios) * 100, 1) if ratios else None


def clock_of(runtime: Mapping[str, str]) -> float | None:
    """Return a broker's own time, epoch seconds: when it started, and for how long it has run, cut to whole seconds."""
    booted, found = _booted(runtime), _RUNTIME.search(runtime.get("runtime", ""))
    if booted is None or found is None:
        return None
    return booted.timestamp() + sum(int(count) * unit for count, unit in zip(found.groups(), _SECONDS, strict=True))


def _told(transport: RemotingTransport, address: str, timeout: float) -> Told:
    runtime = transport.runtime_info(address, timeout)
    now = time.time()
    try:
        perm = _integer(transport.broker_config(address, timeout), "brokerPermission")
    except RocketMQError:
        # Access control hides settings from users that may see figures.
        perm = None
    return Told(runtime, now, perm)


def _booted(runtime: Mapping[str, str]) -> datetime | None:
    milliseconds = _integer(runtime, "bootTimestamp")
    try:
        return None if milliseconds is None else datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
    except (ValueError, OverflowError, OSError):
        # A year that no calendar has.
        return None


def _today(runtime: Mapping[str, str], name: str) -> int | None:
    now, morning = _integer(runtime, f"{name}TodayNow"), _integer(runtime, f"{name}TodayMorning")
    return None if now is None or morning is None else now - morning


def _integer(runtime: Mapping[str, str], name: str) -> int | None:
    text = runtime.get(name, "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _float(runtime: Mapping[str, str], name: str) -> float | None:
    text = runtime[name]
    return float(text) if re.fullmatch(r"[0-9]{1,19}(\.[0-9]{1,30})?", text) else None
