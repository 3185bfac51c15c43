"""Many Spark tasks that write to many brokers, in virtual time; `python -m tests.simulation.scale` makes the figures.

Each task has its own worker process, as in Spark: a Python worker runs one task at a time. So no two running tasks
share a client instance. The sender, its pipeline and windows, the route cache and the queue selector are the real ones.
tests/simulation/direct.py has brokers and links.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from rocketmq_spark.arrow.batch_source import BatchSource
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import EncodedBatch, Ready, SendOutcome
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.in_flight import PendingBatch
from rocketmq_spark.sink.routes import RouteFinder
from rocketmq_spark.sink.sender import BatchSender
from rocketmq_spark.transport.base import Transport
from tests.simulation.direct import TOPIC, DirectTransport, Load, LoadedCluster, OtherProducer, busy_share
from tests.simulation.plots import plotted
from tests.simulation.world import EPOCH, SimulatedRuntime, World

IMAGE: Final = Path(__file__).parents[2] / "docs" / "images" / "scale.svg"

# A broker set has recovered when it stores this part of the rows per second before the pause, for one second.
_RECOVERED: Final = 0.9


@dataclass(frozen=True)
class Phases:
    """Lengths of the parts of a run, seconds: all tasks start, are measured, half of the brokers pause, and resume."""

    start: float = 10.0
    measured: float = 60.0
    paused: float = 3.0
    watched: float = 10.0


@dataclass(frozen=True)
class Result:
    """What one run has measured."""

    tasks: int
    brokers: int
    rows_per_second: float
    # The rows per second, as a part of what the brokers can store, and of what arrives if that is less.
    used: float
    of_possible: float
    # SYSTEM_BUSY among the answers.
    busy: float
    # The rows of the slowest task, as a part of those of the fastest one.
    fairness: float
    # Seconds until the rows per second are back; infinite if they were not.
    recovery: float
    # Seconds within which the other producer's messages were stored, all but one in a hundred.
    other_p99: float
    # Tasks whose write has failed.
    failed: int

    def row(self) -> str:
        """Return the row of a table."""
        cells = (
            f"{self.tasks:,}",
            f"{self.brokers}",
            f"{self.rows_per_second / 1e6:.1f} million",
            f"{self.used:.2f}",
            f"{self.of_possible:.2f}",
            f"{self.busy:.1%}",
            f"{self.fairness:.2f}",
            f"{self.recovery:.0f} s",
            f"{self.other_p99 * 1000:.0f} ms",
            f"{self.failed}",
        )
        return f"| {' | '.join(cells)} |"


HEADER: Final = (
    "| tasks | brokers | rows/s | of capacity | of what is possible | SYSTEM_BUSY | slowest / fastest | recovery "
    "| other producer, p99 | failed tasks |\n|---|---|---|---|---|---|---|---|---|---|"
)


class FullBatches(BatchSource[EncodedBatch]):
    """Gives the full batches that it takes."""

    pending_bytes = 0
    taken_rows = 0

    def add(self, rows: EncodedBatch, now: float) -> Iterator[Ready]:
        yield rows, None

    def reject(self, rejected: Sequence[Ready], now: float) -> Iterator[Ready]:
        raise AssertionError(f"no rule refuses a row, but {rejected} were rejected")

    def new_topics(self) -> list[str]:
        return []

    def expired(self, now: float, known: object) -> Iterator[Ready]:
        return iter(())

    def flush(self) -> Iterator[Ready]:
        return iter(())


class Task:
    """A task in its own worker process. It writes until the world ends."""

    def __init__(self, number: int, cluster: LoadedCluster, options: SinkOptions) -> None:
        world = cluster.world
        self.rows = 0
        self.error: RocketMQError | None = None
        self._load = cluster.load
        self._runtime = runtime = SimulatedRuntime(world, lambda: None, lambda: None)
        self._rng = rng = random.Random(world.rng.random())
        transport = cast("Transport", DirectTransport(cluster, cluster.answers))
        self._instance = ClientInstance(
            f"10.0.0.1@{number}", transport, options.connection, clock=runtime.clock, runtime=runtime
        )
        finder = RouteFinder(options, self._instance, clock=runtime.clock, rng=rng, runtime=runtime)
        recorder = Recorder("w", 0, number, epoch_offset=EPOCH)
        self._sender = BatchSender(finder, recorder, on_stored=self._on_stored)
        self._group = options.producer_group

    def run(self) -> None:
        """Write; Spark starts all tasks within a second."""
        self._runtime.sleep(self._rng.random())
        self._instance.start()
        self._instance.register(self._group)
        try:
            self._sender.write(self._upstream(), FullBatches())
        except RocketMQError as exc:
            self.error = exc

    def _upstream(self) -> Iterator[Any]:
        batch = self._load.batch()
        while True:
            self._runtime.sleep(self._load.rows_per_batch * self._load.seconds_per_row_read)
            yield batch

    def _on_stored(self, pending: PendingBatch, _: SendOutcome) -> None:
        self.rows += round(pending.batch.rows * self._load.rows_per_message)


def simulate(tasks: int, brokers: int, phases: Phases | None = None, load: Load | None = None) -> Result:
    """Run one simulation."""
    phases, load = phases or Phases(), load or Load()
    world = World(1, most_steps=sys.maxsize)
    cluster = LoadedCluster(world, brokers, load)
    options = SinkOptions.of(name_server=("10.1.0.1:9876",), topic=TOPIC)
    size, waiting = load.batch().nbytes, options.max_in_flight_bytes // options.batch_bytes
    options = replace(options, batch_bytes=size, max_in_flight_bytes=waiting * size)
    members = [Task(number, cluster, options) for number in range(tasks)]
    results: list[Result] = []
    other = OtherProducer(cluster)

    def rates(seconds: float) -> list[float]:
        """Return the rows per second of each task, from now on."""
        before = [member.rows for member in members]
        runtime.sleep(seconds)
        return [(member.rows - rows) / seconds for member, rows in zip(members, before, strict=True)]

    runtime = SimulatedRuntime(world, lambda: None, lambda: None)

    def main() -> None:
        for number, member in enumerate(members):
            world.start(member.run, f"task {number}")
        other.start()
        runtime.sleep(phases.start)
        answers = Counter(cluster.answers)
        other.latencies.clear()
        measured = rates(phases.measured)
        busy, total = busy_share(answers, cluster.answers), sum(measured)
        other_p99 = sorted(other.latencies)[len(other.latencies) * 99 // 100]
        cluster.pause(brokers // 2)
        runtime.sleep(phases.paused)
        cluster.resume()
        resumed, recovery = world.now, math.inf
        while phases.paused and world.now < resumed + phases.watched and recovery == math.inf:
            if sum(rates(1.0)) >= _RECOVERED * total:
                recovery = world.now - resumed
        fairness = min(measured) / max(1.0, *measured)
        failed = sum(member.error is not None for member in members)
        capacity = brokers * load.capacity
        possible = min(capacity, tasks / load.seconds_per_row_read)
        results.append(
            Result(
                tasks,
                brokers,
                rows_per_second=total,
                used=total / capacity,
                of_possible=total / possible,
                busy=busy,
                fairness=fairness,
                recovery=recovery,
                other_p99=other_p99,
                failed=failed,
            )
        )

    world.run(world.start(main, "main"))
    world.close()
    return results[0]


def draw(results: Sequence[Result], path: Path) -> None:
    """Plot the results."""
    titles = ("million rows per second", "SYSTEM_BUSY among answers, %", "slowest task against fastest")
    with plotted(path, (11, 3.2), len(titles)) as axes:
        for brokers in sorted({result.brokers for result in results}):
            rows = [result for result in results if result.brokers == brokers]
            tasks = [result.tasks for result in rows]
            series = (
                [result.rows_per_second / 1e6 for result in rows],
                [result.busy * 100 for result in rows],
                [result.fairness for result in rows],
            )
            for axis, values in zip(axes, series, strict=True):
                axis.plot(tasks, values, marker="o", label=f"{brokers} brokers")
        for axis, title in zip(axes, titles, strict=True):
            axis.set(xscale="log", xlabel="tasks", title=title)
            axis.set_ylim(bottom=0)
        axes[0].legend()


def drawn(rng: random.Random) -> tuple[int, int, Load]:
    """Return tasks, brokers and a load that no rule was chosen with."""
    while True:
        tasks, brokers = round(10 ** rng.uniform(1.5, 3.3)), round(10 ** rng.uniform(0.5, 2))
        load = Load(
            send_threads=rng.randint(1, 8),
            rows_per_batch=round(10 ** rng.uniform(3, 4.5)),
            wait_time_in_send_queue=rng.choice((0.1, 0.2, 0.2, 0.5)),
            seconds_per_row_read=10 ** rng.uniform(-6.3, -5.3),
            queues_per_broker=rng.choice((4, 8, 16)),
            latency=10 ** rng.uniform(-4, -2.3),
        )
        # Few tasks do not overload brokers, and a run with more batches takes hours.
        if tasks / load.seconds_per_row_read > brokers * load.capacity < 2_000 * load.rows_per_batch:
            return tasks, brokers, load


def main() -> None:
    """Run all simulations, and print and plot the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale", description=main.__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10, 100, 1000, 2000])
    parser.add_argument("--brokers", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seconds", type=float, default=Phases.measured, help="measured time (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=IMAGE, help="the file of the plot (default: %(default)s)")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="run N other, random loads instead; no plot")
    parser.add_argument("--seed", type=int, default=1, help="of the random loads (default: %(default)s)")
    arguments = parser.parse_args()
    print(HEADER)
    phases, rng = Phases(measured=arguments.seconds), random.Random(arguments.seed)
    for _ in range(arguments.draw):
        tasks, brokers, load = drawn(rng)
        print(simulate(tasks, brokers, phases, load).row(), load, flush=True)
    results = []
    for brokers, tasks in () if arguments.draw else itertools.product(arguments.brokers, arguments.tasks):
        results.append(simulate(tasks, brokers, phases))
        print(results[-1].row(), flush=True)
    if results:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
