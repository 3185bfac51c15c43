"""The load that many writing processes put on name servers; `python -m tests.simulation.route_polls` plots it.

Each process has its own client instance, as each Python worker of Spark has. Client instances, their route caches and
their `NameServers` are the real ones. Each one's jobs run when they are due, in virtual time, and a request takes none.
All name servers stop and start again, and know no broker then. Brokers register with them within 30 s.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from rocketmq_spark.errors import RemotingConnectException, TopicRouteStaleException
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.headers import GetRouteInfoRequestHeader
from rocketmq_spark.protocol.remoting.responses import ClusterInfo
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.remoting.client import RequestClient
from rocketmq_spark.transport.remoting.name_servers import NameServers
from tests.simulation.plots import plotted

IMAGE: Final = Path(__file__).parents[2] / "docs" / "images" / "route-polls.svg"
SERVERS: Final = ("10.1.0.1:9876", "10.1.0.2:9876", "10.1.0.3:9876")

# A broker registers after this time with a name server that has started, at most, seconds.
_REGISTERS_WITHIN: Final = 30.0
_BROKERS_OF_TOPIC: Final = 8


@dataclass(frozen=True)
class Size:
    """How many there are of each. Processes start within `start` seconds; times are seconds."""

    processes: int = 10_000
    topics: int = 10_000
    brokers: int = 1_000
    topics_of_process: int = 10
    start: float = 10.0
    stopped_at: float = 120.0
    started_again_at: float = 180.0
    end: float = 300.0


@dataclass
class Servers:
    """Name servers, which count requests and new connections by second."""

    size: Size
    rng: random.Random
    now: float = 0.0
    requests: Counter[int] = field(default_factory=Counter)
    connects: Counter[int] = field(default_factory=Counter)
    registered_at: list[float] = field(init=False)
    routes: dict[str, TopicRouteData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        again = self.size.started_again_at
        self.registered_at = [again + self.rng.uniform(0.0, _REGISTERS_WITHIN) for _ in range(self.size.brokers)]

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now

    @property
    def run(self) -> int:
        """0 before the stop, 2 after it, 1 while no server runs."""
        return (self.now >= self.size.stopped_at) + (self.now >= self.size.started_again_at)

    def route(self, topic: str) -> TopicRouteData:
        """Return the queues at brokers that have registered; raise as a name server answers if there are none."""
        if self.run == 0 or self.now > self.size.started_again_at + _REGISTERS_WITHIN:
            if topic not in self.routes:
                self.routes[topic] = self._route(self._brokers(topic))
            return self.routes[topic]
        brokers = [broker for broker in self._brokers(topic) if self.registered_at[broker] <= self.now]
        if not brokers:
            raise TopicRouteStaleException(topic, ResponseCode.TOPIC_NOT_EXIST, "no route", "a name server")
        return self._route(brokers)

    def _brokers(self, topic: str) -> list[int]:
        first = int(topic) * _BROKERS_OF_TOPIC
        return [(first + number) % self.size.brokers for number in range(_BROKERS_OF_TOPIC)]

    def _route(self, brokers: Collection[int]) -> TopicRouteData:
        names = {f"b{broker}": f"10.2.{broker // 250}.{broker % 250}:10911" for broker in brokers}
        queues = tuple(QueueData(name, 1, 1, 6) for name in names)
        return TopicRouteData(queues, tuple(BrokerData(name, {0: address}) for name, address in names.items()))


class Client:
    """The connections of one process to the name servers."""

    def __init__(self, servers: Servers) -> None:
        self.clock = servers.clock
        self._servers = servers
        # In which run of the servers each address was connected.
        self._connected: dict[str, int] = {}

    def ask_body(self, address: str, request: Any, timeout: float, doing: str, decode: Callable[[bytes], Any]) -> Any:
        """Answer a request, over a new connection if there is none."""
        servers, second = self._servers, int(self._servers.now)
        if self._connected.get(address) != servers.run:
            servers.connects[second] += 1
            if servers.run == 1:
                raise RemotingConnectException(f"{doing}: {address}: connection refused")
            self._connected[address] = servers.run
        servers.requests[second] += 1
        if not isinstance(request, GetRouteInfoRequestHeader):
            return ClusterInfo((), {})
        if request.topic == "TBW102":
            raise TopicRouteStaleException("TBW102", ResponseCode.TOPIC_NOT_EXIST, "no route", address)
        return servers.route(request.topic)


class RoutesOnly:
    """A transport without brokers: heartbeats are not counted."""

    closed = False

    def __init__(self, name_servers: NameServers) -> None:
        self.query_route = name_servers.query_route

    def heart_beat(self, *_: Any) -> None:
        """Accept a heartbeat."""


def simulate(size: Size) -> Servers:
    """Run the simulation, and return the servers with their counts."""
    rng = random.Random(1)
    servers = Servers(size, rng)
    options = ConnectionOptions(name_server=SERVERS)
    due = [(rng.uniform(0.0, size.start), number) for number in range(size.processes)]
    heapq.heapify(due)
    instances: dict[int, ClientInstance] = {}
    while (next_due := heapq.heappop(due))[0] < size.end:
        servers.now, number = next_due
        if number not in instances:
            name_servers = NameServers(cast("RequestClient", Client(servers)), SERVERS, rng)
            transport = cast("Transport", RoutesOnly(name_servers))
            name = f"10.3.{number // 250}.{number % 250}@{rng.randrange(1 << 16)}#0"
            instances[number] = ClientInstance(name, transport, options, clock=servers.clock)
            instances[number].register("g")
            for topic in rng.sample(range(size.topics), size.topics_of_process):
                instances[number].routes.look_up(str(topic), 3.0)
        heapq.heappush(due, (max(instances[number].run_due(servers.now), servers.now + 0.001), number))
    return servers


def draw(servers: Servers, path: Path) -> None:
    """Plot requests and new connections by second."""
    size = servers.size
    seconds = range(int(size.end))
    with plotted(path, (8, 3.2)) as axes:
        axes.plot(seconds, [servers.requests[second] for second in seconds], label="route requests")
        axes.plot(seconds, [servers.connects[second] for second in seconds], label="connection attempts")
        axes.axvspan(size.stopped_at, size.started_again_at, alpha=0.15, color="gray", label="no name server runs")
        axes.set(xlabel="seconds", ylabel="per second, at all name servers")
        axes.legend()


def main() -> None:
    """Run the simulation, print the highest counts of each phase, and plot all."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.route_polls", description=main.__doc__)
    parser.add_argument("--plot", type=Path, default=IMAGE, help="the file of the plot (default: %(default)s)")
    arguments = parser.parse_args()
    # Each process warns that its name servers have stopped.
    logging.getLogger("rocketmq_spark").setLevel(logging.ERROR)
    size = Size()
    servers = simulate(size)
    phases = {
        "start": (0, size.start),
        "running": (size.start, size.stopped_at),
        "no name server": (size.stopped_at, size.started_again_at),
        "started again": (size.started_again_at, size.end),
    }
    print("| phase | requests/s, mean | most | connection attempts/s, mean | most |")
    print("|---|---|---|---|---|")
    for name, (begin, end) in phases.items():
        cells = []
        for counts in (servers.requests, servers.connects):
            values = [counts[second] for second in range(int(begin), int(end))]
            cells += [f"{sum(values) / len(values):,.0f}", f"{max(values):,}"]
        print(f"| {name} | {' | '.join(cells)} |")
    draw(servers, arguments.plot)


if __name__ == "__main__":
    main()
