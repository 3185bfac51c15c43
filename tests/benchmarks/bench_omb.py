"""Workloads of the OpenMessaging benchmark: latencies at fixed rates, and the highest rate that a producer sustains.

Run: make bench PART=omb (python -m tests.benchmarks.bench_omb [rounds] [seconds a run] [name server] [endpoints])

Each workload has a topic with 16 queues, a producer, and a consumer in another process. The drivers run in turn.
A driver sends a message when it is due, whether or not others are acknowledged (an open loop). All latencies begin when
a message is due, so a stall counts for each message that it delays. Bodies hold this time. The clock of all processes
is the machine's monotonic clock. The consumer is Java's push consumer for all drivers.

A rate is sustained if at least 95 % of it is acknowledged, and received, within the time of the run, and no send fails.
A run ends early after an error, or when the driver is one second behind. rocketmq-python-client needs a proxy.
So `aio.Producer` also runs over the proxy.

Results go to ``build/omb``: a file for each rate and driver, with the fields of OpenMessaging's results. Runs that were
not sustained have none. Given a name server, the servers are not started here. Without endpoints, the drivers for a
proxy are then left out.

The latency of a streaming query is measured as in ``RTMKafkaKafkaBenchmark`` of Apache Spark, with 1,000 records a
second. It is the time from each record in one topic until the broker stored it in another topic.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rocketmq_spark import Admin, LocalCluster
from tests.benchmarks.bench_latency import SOURCE, TARGET
from tests.benchmarks.bench_spark import Session
from tests.benchmarks.contest import (
    FORGETFUL,
    ROOT,
    Figure,
    Program,
    await_rest,
    by_name,
    rounds_of,
    running,
    show,
)
from tests.benchmarks.java_client import JavaClient
from tests.benchmarks.omb_results import LADDER, SECOND, Run, highest, next_rate, percentile

QUEUES = 16
# Bytes of a body.
WORKLOADS = {"1-topic-16-partitions-1kb": 1024, "1-topic-16-partitions-100b": 100}
JAVA = {"java": "single", "java-autobatch": "auto"}
OVER_GRPC = ("aio-grpc", "python-client")
DRIVERS = ("producer", "aio", *JAVA, *OVER_GRPC)
RESULTS = ROOT / "build" / "omb"
# Drivers are compared at this rate.
COMMON = 2_000
# Seconds at the start of a run, which do not count.
_WARM_UP = 1
# Queues of the topics of the streaming query, its kinds, and how often the seconds of a run they take.
STREAM_QUEUES = 4
QUERIES = ("rows", "dropDuplicates")
STREAM_TIMES = 15
STREAM_WARM_UP = 5.0
# Processes get a command before the first message is due.
_AHEAD = SECOND // 20


Best = Callable[[Iterable[float]], float]


class Servers(NamedTuple):
    """Addresses, and the cluster if it was started here."""

    name_server: str
    endpoints: str
    cluster: LocalCluster | None = None


class Bench:
    """A workload and its consumer, which runs meanwhile. Files go to `folder`."""

    def __init__(self, workload: str, servers: Servers, java: JavaClient, folder: Path) -> None:
        self._workload, self._servers, self._java, self._folder = workload, servers, java, folder
        self._size = WORKLOADS[workload]
        self._topic = f"omb-{self._size}"
        with Admin(servers.name_server) as admin:
            brokers = len({one.broker_name for one in admin.brokers()})
            admin.create_topic(self._topic, max(1, QUEUES // brokers), update=True)
        self._consumer = Program(java.command("Arrivals", servers.name_server, self._topic))

    def _driver(self, name: str) -> Program:
        address = self._servers.endpoints if name in OVER_GRPC else self._servers.name_server
        if name in JAVA:
            return Program(self._java.command("OpenLoop", address, self._topic, self._size, JAVA[name]))
        module = [sys.executable, "-m", "tests.benchmarks.omb_sender"]
        return Program([*module, name, address, self._topic, str(self._size)])

    def _run(self, driver: Program, name: str, rate: int, seconds: int) -> tuple[Run, bool]:
        """Return a run, and whether all its sends have ended."""
        if self._servers.cluster is not None:
            await_rest(self._servers.cluster)
        began, count = time.monotonic_ns() + _AHEAD, (_WARM_UP + seconds) * rate
        self._consumer.ask("from", began)
        sends, arrivals = self._folder / "sends", self._folder / "arrivals"
        said = driver.ask(began, rate, count, sends)
        if said["error"]:
            print(f"  {name} at {rate:,}: {said['errors']} errors, the first: {said['error'][:200]}", flush=True)
        sent, acknowledged = np.fromfile(sends, np.int64).reshape(2, -1)
        self._consumer.ask("take", int(np.count_nonzero(acknowledged)), arrivals)
        received = np.fromfile(arrivals, np.int64).reshape(-1, 2)
        run = Run(rate, began, _WARM_UP * SECOND, seconds, sent, acknowledged, received, said["errors"])
        if run.sustained() and (run.lost() or run.repeated()):
            print(f"  {name} at {rate:,}: {run.lost()} lost, {run.repeated()} repeated", flush=True)
        return run, not said["pending"]

    def sweep(self, name: str, seconds: int) -> dict[str, float]:
        """Return the highest rate that a driver sustains, and p99 at the common rate, ms.

        `next_rate` says which rates it gets. A rate of the ladder that fails is tried twice.
        """
        sustained: dict[int, bool] = {}
        found = {}
        with contextlib.ExitStack() as stack:
            driver = stack.enter_context(self._driver(name))
            self._run(driver, name, COMMON, seconds)
            while (rate := next_rate(sustained)) is not None:
                for _ in range(2 if rate in LADDER else 1):
                    run, ended = self._run(driver, name, rate, seconds)
                    if not ended:
                        # The process is still busy with these messages.
                        stack.close()
                        driver = stack.enter_context(self._driver(name))
                        self._run(driver, name, LADDER[0], 1)
                    sustained[rate] = run.sustained()
                    if sustained[rate]:
                        break
                self._report(name, run)
                if rate == COMMON and sustained[rate]:
                    found["publish p99"] = percentile(run.publish(), 99) / 1e6
                    found["end-to-end p99"] = percentile(run.end_to_end(), 99) / 1e6
        return {"sustained": float(highest(sustained)), **found}

    def _report(self, driver: str, run: Run) -> None:
        kept = run.sustained()
        print(f"  {self._workload:27}{line(driver, run, kept=kept)}", flush=True)
        if kept:
            name = f"{self._workload}-{run.rate}"
            result = run.result(name, driver, self._size, QUEUES)
            (RESULTS / f"{name}-{driver}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def __enter__(self) -> Bench:
        self._consumer.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.__exit__()


def line(driver: str, run: Run, *, kept: bool) -> str:
    """Return a row of the table: rate, then p50, p99, p99.9 and maximum, ms, to the acknowledgement and to the end."""
    if not kept:
        return f"{driver:15} {run.rate:>9,}  not sustained"
    cells = [
        f"{percentile(latencies, percent) / 1e6:9.2f}"
        for latencies in (run.publish(), run.end_to_end())
        for percent in (50, 99, 99.9, 100)
    ]
    return f"{driver:15} {run.rate:>9,}  {''.join(cells)}"


@contextlib.contextmanager
def servers_at(name_server: str, endpoints: str) -> Iterator[Servers]:
    """Yield the given servers, or those of a cluster that runs here meanwhile."""
    if name_server:
        yield Servers(name_server, endpoints)
        return
    with LocalCluster(proxy=True, broker_properties=FORGETFUL) as cluster:
        assert cluster.endpoints is not None
        yield Servers(cluster.name_server, cluster.endpoints, cluster)


def sweeps(
    rounds: int, seconds: float, name_server: str, endpoints: str
) -> list[dict[str, dict[str, dict[str, float]]]]:
    """Return what `Bench.sweep` found, of each round by workload and driver."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, servers_at(name_server, endpoints) as servers:
        java = JavaClient(Path(folder))

        def measure(workload: str) -> dict[str, dict[str, float]]:
            drivers = [name for name in DRIVERS if servers.endpoints or name not in OVER_GRPC]
            with Bench(workload, servers, java, Path(folder)) as bench:
                return {name: bench.sweep(name, max(1, round(seconds))) for name in drivers}

        return rounds_of(list(WORKLOADS), rounds, measure, warm_up=False, repeats=0)


def compared(workload: str, taken: list[dict[str, dict[str, float]]]) -> Iterator[Figure]:
    """Return the figures of a workload; `taken` has what `Bench.sweep` found, of each round by driver."""
    size = "1 KiB" if WORKLOADS[workload] == 1024 else f"{WORKLOADS[workload]} bytes"

    def against(name: str, what: str, driver: str, others: Sequence[str], best: Best) -> Iterator[Figure]:
        # A driver may not sustain any rate, or not the common one.
        rounds_ = [one for one in taken if all(one.get(each, {}).get(what) for each in (driver, *others))]
        if rounds_:
            found = [one[driver][what] / best(one[other][what] for other in others) for one in rounds_]
            yield Figure(f"OpenMessaging, {size}: {name}", found)

    p99s = [(f"{kind} p99 at {COMMON:,}/s", f"{kind} p99", min) for kind in ("publish", "end-to-end")]
    whats: list[tuple[str, str, Best]] = [("highest sustained rate", "sustained", max), *p99s]
    # Both of the first pair send each message alone.
    pairs = ("producer", "Producer against Java's", ("java",)), ("aio", "aio.Producer against Java's best", tuple(JAVA))
    for driver, name, others in pairs:
        for text, what, best in whats:
            yield from against(f"{text}, {name}", what, driver, others, best)
    over_grpc = "highest sustained rate over gRPC, aio.Producer against rocketmq-python-client"
    yield from against(over_grpc, "sustained", "aio-grpc", ("python-client",), max)


def stream_figures(rounds: int, seconds: float, name_server: str) -> Iterator[Figure]:
    """Measure a streaming query that copies a topic, with and without ``dropDuplicates``, for `seconds` each."""
    with contextlib.ExitStack() as stack:
        if not name_server:
            name_server = stack.enter_context(LocalCluster()).name_server
        with Admin(name_server) as admin:
            for topic in (SOURCE, TARGET):
                admin.create_topic(topic, STREAM_QUEUES, update=True)
        session = stack.enter_context(Session("spark_latency.py", name_server, SOURCE, TARGET))

        def measure(query: str, seconds: float = seconds) -> dict[str, float]:
            with running("tests.benchmarks.bench_latency", name_server) as sender:
                try:
                    return session.ask("rocketmq", seconds, query)
                finally:
                    sender.terminate()

        for query in QUERIES:
            measure(query, STREAM_WARM_UP)
        said = rounds_of(QUERIES, rounds, measure, warm_up=False, repeats=0)
    taken = by_name(
        [{f"{query}, {what}": one[query][what] for query in QUERIES for what in one[query]} for one in said]
    )
    for name, latencies in taken.items():
        yield Figure(f"ms from topic to topic, 1,000 records/s: {name}", latencies)


def figures(rounds: int, seconds: float, name_server: str = "", endpoints: str = "") -> Iterator[Figure]:
    """Measure everything here."""
    print(f"  {'':27}{'':15} {'':>9}  ms to the acknowledgement, and to the consumer, from when a message is due")
    columns = "".join(f"{name:>9}" for name in ("p50", "p99", "p99.9", "max"))
    print(f"  {'workload':27}{'driver':15} {'rate':>9}  {columns * 2}")
    taken = sweeps(rounds, seconds, name_server, endpoints)
    for workload in WORKLOADS:
        summaries = [one[workload] for one in taken]
        by_name([{f"{workload} {driver}": found["sustained"] for driver, found in one.items()} for one in summaries])
        yield from compared(workload, summaries)
    yield from stream_figures(rounds, STREAM_TIMES * seconds, name_server)


if __name__ == "__main__":
    show(figures, sys.argv[1:], 2, 3.0, "", "")
