"""A topic's route: its brokers and their queues (docs/internals/remoting.md#routes, docs/internals/grpc.md#routes)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from rocketmq_spark.display.tables import html_table
from rocketmq_spark.model.names import java_order

MASTER_ID: Final = 0

# Queues of one topic: 20 MB of objects, enough for more than 1,000 brokers with 64 queues each.
MAX_QUEUES: Final = 100_000
# The largest clusters have some hundred brokers, each with a few slaves.
MAX_BROKERS: Final = 10_000
MAX_ADDRESSES: Final = 100

PERM_WRITE: Final = 2
PERM_READ: Final = 4


@dataclass(frozen=True, slots=True)
class BrokerData:
    """The addresses of one broker, by broker id; id 0 is the master (``BrokerData.java``)."""

    broker_name: str
    broker_addrs: Mapping[int, str]
    cluster: str = ""
    slave_may_act: bool = False  # Name servers may list a slave with the master's id (``enableActingMaster``)

    @property
    def master(self) -> str | None:
        """``host:port`` of the master, None without one."""
        return self.broker_addrs.get(MASTER_ID)


@dataclass(frozen=True, slots=True)
class QueueData:
    """The number of a topic's queues on one broker, and their permission (``QueueData.java``)."""

    broker_name: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_sys_flag: int = 0

    @property
    def writable(self) -> bool:
        """True if producers may send to the queues."""
        return bool(self.perm & PERM_WRITE)

    @property
    def readable(self) -> bool:
        """True if consumers may pull from the queues."""
        return bool(self.perm & PERM_READ)

    @property
    def open_queues(self) -> int:
        """Number of queues, from 0 on, that readers may read."""
        return self.read_queue_nums if self.readable else 0

    @property
    def queue_nums(self) -> int:
        """Number of queues, readable or not: a closed queue keeps its messages."""
        return max(self.read_queue_nums, self.write_queue_nums)


@dataclass(frozen=True, slots=True)
class BrokerRoute:
    """A broker's addresses and queues in a route."""

    SPARE: ClassVar[tuple[str, ...]] = ("cluster", "permission")

    broker_name: str
    cluster: str
    addresses: Mapping[int, str]  # ``host:port`` by broker id; 0 is the master, which may be missing
    read_queues: int
    write_queues: int
    permission: str  # ``rw``, ``r``, ``w`` or ``-``


@dataclass(frozen=True, slots=True)
class TopicRouteData:
    """The brokers and queues of one topic, both sorted by broker name, so that equal routes compare equal."""

    queue_datas: tuple[QueueData, ...]
    broker_datas: tuple[BrokerData, ...]
    order_topic_conf: str | None = None  # An empty text makes a static topic an ordinary one (5.5.0)
    static_topic: bool = False  # Queue ids are logical
    message_types: frozenset[str] = frozenset()  # Accepted by the topic, such as ``FIFO``; empty from a name server

    def only(self, broker_names: Collection[str]) -> TopicRouteData:
        """Return the route with only these brokers."""
        queues = tuple(data for data in self.queue_datas if data.broker_name in broker_names)
        brokers = tuple(broker for broker in self.broker_datas if broker.broker_name in broker_names)
        return replace(self, queue_datas=queues, broker_datas=brokers)

    def joined(self, other: TopicRouteData) -> TopicRouteData:
        """Return the route with the brokers, addresses and queues that only the other one has."""
        queues = {data.broker_name: data for data in other.queue_datas}
        for data in self.queue_datas:
            known = queues.get(data.broker_name, data)
            queues[data.broker_name] = replace(
                data,
                read_queue_nums=max(data.read_queue_nums, known.read_queue_nums),
                write_queue_nums=max(data.write_queue_nums, known.write_queue_nums),
            )
        brokers = {broker.broker_name: broker for broker in other.broker_datas}
        for broker in self.broker_datas:
            same = brokers.get(broker.broker_name, broker)
            brokers[broker.broker_name] = replace(broker, broker_addrs={**same.broker_addrs, **broker.broker_addrs})
        return replace(
            self,
            queue_datas=tuple(queues[name] for name in sorted(queues, key=java_order)),
            broker_datas=tuple(brokers[name] for name in sorted(brokers, key=java_order)),
        )

    def by_broker(self) -> tuple[BrokerRoute, ...]:
        """Return the parts of the brokers, by name; a broker may have only addresses or only queues."""
        brokers = {broker.broker_name: broker for broker in self.broker_datas}
        queues = {data.broker_name: data for data in self.queue_datas}
        routes = []
        for name in sorted(brokers.keys() | queues.keys()):
            broker, data = brokers.get(name, BrokerData(name, {})), queues.get(name, QueueData(name, 0, 0, 0))
            numbers = data.read_queue_nums, data.write_queue_nums, permission_text(data.perm)
            routes.append(BrokerRoute(name, broker.cluster, dict(sorted(broker.broker_addrs.items())), *numbers))
        return tuple(routes)

    def _repr_html_(self) -> str:
        headings = ("broker", "cluster", "addresses", "read queues", "write queues", "permission")
        rows = []
        for broker in self.by_broker():
            addresses = ", ".join(f"{number}={address}" for number, address in broker.addresses.items())
            queues = str(broker.read_queues), str(broker.write_queues)
            rows.append((broker.broker_name, broker.cluster, addresses, *queues, broker.permission))
        notes = [f"messages: {', '.join(sorted(self.message_types))}"] if self.message_types else []
        return html_table(headings, rows, notes=notes, empty="No broker has the topic.")


def in_order(broker_ids: Iterable[int]) -> list[int]:
    """Return a broker's ids: the master's, those of slaves, last -1, which a DLedger broker has before an election."""
    return sorted(broker_ids, key=lambda broker_id: (broker_id < MASTER_ID, broker_id))


def masters_of(brokers: Iterable[BrokerData]) -> dict[str, str]:
    """Return the addresses of the existing masters, by broker name."""
    return {broker.broker_name: broker.master for broker in brokers if broker.master}


def permission_text(perm: int) -> str:
    """Return ``rw``, ``r``, ``w`` or ``-`` for the bits of a permission (``PermName.java``)."""
    return f"{'r' if perm & PERM_READ else ''}{'w' if perm & PERM_WRITE else ''}" or "-"


def parse_address(address: str) -> tuple[str, int]:
    """Return the host, without the brackets of IPv6, and the port of ``host:port``; ValueError if one is missing."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not an address; give host:port, as in 127.0.0.1:9876 or [::1]:9876")
    return host, int(port)


def broker_vip_channel(address: str) -> str:
    """Return a broker's second address: the port two below (docs/internals/producer.md#vip-port).

    An invalid address is returned unchanged, because the error of the connect names it.
    """
    try:
        _, port = parse_address(address)
    except ValueError:
        return address
    return f"{address.rpartition(':')[0]}:{port - 2}"
