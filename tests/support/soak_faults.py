"""The faults of the soak, one after the other, in an order of the seed.

A fault hits one thing: a broker's process, name servers with their controllers, links, or a process of a writer.
The next fault waits until all servers are in sync again, and rows flow. So no fault may lose a row.

No master runs on after another one was elected: it would acknowledge rows that are lost (docs/faults.md#lost-messages).
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.cluster.servers import NameServer
from tests.support.cluster import start_all
from tests.support.drivers import send
from tests.support.links import TcpProxy
from tests.support.processes import wait_for
from tests.support.soak_flow import ANY, Flow, Pair
from tests.support.soak_writers import Writer

# The longest pause of a slave, and the longest time without a connection, seconds.
_LONGEST: Final = 12.0
# The longest pause of a master that is not replaced, seconds. Its last heartbeat may be a second old by then.
_LONGEST_OF_MASTER: Final = 1.5


@dataclass(frozen=True)
class Struck:
    """A fault that was injected; `flowed` is how long after it the last part had rows again, `last` which one."""

    at: float
    kind: str
    target: str
    flowed: float
    last: str


class Faults:
    """Strikes a cluster, its links and its writers.

    Parameters
    ----------
    links : mapping
        The links of clients to each broker's name, and under the name ``name servers`` those to all name servers.
    tend : callable
        Called while a fault is waited for: restarts writers.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        links: dict[str, list[TcpProxy]],
        writers: Sequence[Writer],
        flow: Flow,
        seed: int,
        tend: Callable[[], object],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._links = links
        self._writers = writers
        self._flow = flow
        self._tend = tend
        self._rng = random.Random(seed)
        self._names = sorted({broker.broker_name for broker in cluster.brokers})
        # The servers that each fault hits are drawn, so 2 to 3 of 15 faults replace a master by an election.
        self._kinds: dict[str, Callable[[], str]] = {
            "master killed": lambda: self._kill_broker(self._master()),
            "slave killed": lambda: self._kill_broker(self._slave()),
            "master paused": lambda: self._pause_broker(self._master(), self._rng.uniform(0.5, _LONGEST_OF_MASTER)),
            "slave paused": lambda: self._pause_broker(self._slave(), self._seconds()),
            # Before or after the controllers have replaced it.
            "master frozen, then killed": lambda: self._pause_broker(self._master(), self._seconds(), Broker.kill),
            "master stopped in order": self._stop_master,
            "name server with controller killed": lambda: self._kill_name_servers(1),
            "all name servers restarted": lambda: self._kill_name_servers(len(self._name_servers)),
            "connections to a broker cut": lambda: self._cut(hold=False),
            "broker cut off from writers": lambda: self._cut(hold=True),
            "connections to name servers cut": self._cut_name_servers,
            "Python workers killed": self._kill_workers,
            "driver killed": lambda: self._kill_driver("driver"),
            "driver's program killed": lambda: self._kill_driver("program"),
            "driver's JVM killed": lambda: self._kill_driver("JVM"),
        }
        self._deck: list[str] = []

    def strike(self) -> Struck:
        """Inject the next fault, and wait until everything works again."""
        if not self._deck:
            # Each kind once, before one of them comes again.
            self._deck = self._rng.sample(list(self._kinds), len(self._kinds))
        kind = self._deck.pop()
        first = [writer.written + 1 for writer in self._writers]
        at = time.time()
        target = self._kinds[kind]()
        start_all(self._cluster.servers, self._tend)
        self._await(lambda: not self._awaited(), lambda: f"no rows of {self._awaited()} since {kind} {target}")
        for writer, batch in zip(self._writers, first, strict=True):
            writer.risk(batch)
        resumed = self._flow.resumed
        last = max(resumed, key=lambda pair: resumed[pair], default=("", ""))
        self.counts[kind] += 1
        return Struck(at, kind, target, resumed.get(last, 0.0), " at ".join(last))

    def _awaited(self) -> list[Pair]:
        """Return where no rows flow yet, without the topics of writers that are done."""
        over = {writer.topic for writer in self._writers if writer.is_done}
        return [pair for pair in self._flow.waiting if pair[0] not in over]

    def _await(self, condition: Callable[[], bool], why: Callable[[], str]) -> None:
        wait_for(condition, why=why, meanwhile=self._tend)

    def _mark(self, *brokers: str) -> None:
        """Measure how long all topics have no new rows on the brokers, or on all."""
        self._flow.mark([writer.topic for writer in self._writers], brokers or self._names)

    def _seconds(self) -> float:
        """Return a length of a fault: shorter and longer than the time after which a master is replaced."""
        return self._rng.choice([self._rng.uniform(0.5, 3.0), self._rng.uniform(4.0, _LONGEST)])

    def _master(self) -> Broker:
        return self._cluster.master(self._rng.choice(self._names))

    def _slave(self) -> Broker:
        return self._slave_of(self._master())

    def _slave_of(self, master: Broker) -> Broker:
        replicas = [one for one in self._cluster.brokers if one.broker_name == master.broker_name]
        return next(one for one in replicas if one is not master)

    def _kill_broker(self, broker: Broker) -> str:
        seconds = self._rng.choice([0.0, self._seconds()])
        target = f"{broker.name} (pid {broker.pid}), down for {seconds:.1f} s"
        broker.kill()
        self._mark(broker.broker_name)
        time.sleep(seconds)
        return target

    def _pause_broker(self, broker: Broker, seconds: float, end: Callable[[Broker], None] = Broker.resume) -> str:
        target = f"{broker.name} (pid {broker.pid}) for {seconds:.1f} s"
        broker.pause()
        self._mark(broker.broker_name)
        time.sleep(seconds)
        end(broker)
        return target

    def _stop_master(self) -> str:
        broker = self._master()
        target = f"{broker.name} (pid {broker.pid})"
        broker.terminate()
        self._mark(broker.broker_name)
        broker.await_stopped()
        return target

    @property
    def _name_servers(self) -> list[NameServer]:
        return [server for server in self._cluster.servers if isinstance(server, NameServer)]

    def _kill_name_servers(self, number: int) -> str:
        seconds = self._rng.choice([0.0, self._seconds()])
        servers = self._rng.sample(self._name_servers, number)
        for server in servers:
            server.kill()
        self._mark()
        time.sleep(seconds)
        return f"{', '.join(sorted(server.name for server in servers))}, down for {seconds:.1f} s"

    def _cut(self, *, hold: bool) -> str:
        name = self._rng.choice(self._names)
        seconds = self._seconds() if hold else 0.0
        for link in self._links[name]:
            link.is_cut = hold
            link.cut()
        self._mark(name)
        time.sleep(seconds)
        for link in self._links[name]:
            link.is_cut = False
        return f"{name}, for {seconds:.1f} s" if hold else name

    def _cut_name_servers(self) -> str:
        for link in self._links["name servers"]:
            link.cut()
        self._mark()
        return "all"

    def _kill_workers(self) -> str:
        writer = self._rng.choice([one for one in self._writers if one.form != "producer"])
        killed = [worker.pid for worker in writer.driver.workers() if send(worker, signal.SIGKILL)]
        self._flow.mark([writer.topic], [ANY])
        return f"{writer.name}, {len(killed)} processes"

    def _kill_driver(self, what: str) -> str:
        writer = self._rng.choice([one for one in self._writers if not one.spared])
        driver, ready, at = writer.driver, writer.folder / "ready", time.monotonic()
        ready.unlink(missing_ok=True)
        if what == "driver":
            driver.kill()
        elif what == "program":
            # Its JVM runs on beside the next driver for a moment.
            driver.kill_program()
        else:
            driver.kill_jvm()
        self._await(lambda: writer.driver is not driver or writer.is_done, lambda: f"{writer.name} does not end")
        # Rows of the killed driver may still come. Those of the next one count.
        self._await(lambda: ready.exists() or writer.is_done, lambda: f"{writer.name} does not start")
        self._flow.mark([writer.topic], [ANY], at)
        return writer.name
