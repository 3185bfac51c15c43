"""Write with all deliveries for hours while something fails each minute; fail if a row is wrong or memory grows.

Run: make soak (python tests/tools/soak.py [--minutes 30] [--seed N] [--rows-per-second 200] [--fault-every 60])

Two brokers with two replicas each, and three name servers with controllers, run as processes of this machine. Four
programs write numbered rows at a fixed rate: Spark with each of the three deliveries, and a producer without Spark. The
seed says which deliveries have a streaming query, and which have repeated batch writes. It also says what fails when
(tests/support/soak_faults.py). Connections of the programs lead over links, which faults cut.

Every 20 seconds each program records memory, threads and file descriptors: of itself, and with Spark of the JVM and of
the Python workers. Of the JVM it records resident memory, and the heap after a collection; of the workers their number
and the largest figures. flatness.py decides whether a figure has grown, in a run of at least 10 minutes. No fault
kills the producer, and the program of one delivery, so their figures are those of one process.

At the end RocketMQ's consumer reads every row back (tests/support/auditor.py). No row may be missing or different. No
row of a once-delivery may be repeated. With atLeastOnce, rows may be repeated that were written during a fault, or
in a request that was sent again. The exit status is 0 without any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.process import Watchdog
from tests.support.auditor import Found, run_audits
from tests.support.cluster import FAST_FAILOVER, create_topic
from tests.support.java import Java
from tests.support.links import TcpProxy, linked_servers
from tests.support.processes import PATIENCE, wait_for
from tests.support.soak_faults import Faults
from tests.support.soak_flow import Flow
from tests.support.soak_writers import HEAP_MB, PERIOD, Writer, new_writers
from tests.tools.flatness import Line, Sample, judge

SAMPLED_EVERY = 20.0
QUEUES = 4
# A JVM had 420 MB besides its heap after 9 minutes, and grew by 2 MB a minute.
JVM_CEILING = HEAP_MB * 1.048576 + 600
# Shorter runs end before the caches of Spark's processes are full.
JUDGED_FROM = 10.0
FEWEST_SAMPLES = 15
# By how much the figures of programs that are killed at other times than before may differ.
RESTARTED = 0.25
# These errors mean that a write has found a loss or a change which no fault here causes.
NEVER = "InputChangedError|DataLossError"


class Every(threading.Thread):
    """Calls `do` periodically until the end of the block; stops at an exception, and keeps it."""

    def __init__(self, seconds: float, do: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._seconds = seconds
        self._do = do
        self._stopped = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._do()
            except Exception as exc:
                self.failure = exc
                return

    def __enter__(self) -> Every:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


class Soak:
    """One run: the servers, the writers, and what was found."""

    def __init__(self, minutes: float, rate: int, seed: int, fault_every: float, folder: Path | None) -> None:
        # A whole number of batches.
        self.seconds = int(minutes * 60) // PERIOD * PERIOD
        self.rate = rate
        self.seed = seed
        self.fault_every = fault_every
        self.folder = folder
        # Between these times, epoch seconds, all writers have rows to write.
        self.began = self.ended = 0.0
        self.findings: list[str] = []
        self.own: list[Sample] = []
        self.writers: list[Writer] = []
        self._rng = random.Random(f"soak {seed}")

    def run(self) -> int:
        """Run the soak, print its result, and return the exit status."""
        print(f"seed {self.seed}, {self.seconds} s, {self.rate} rows a second for each of 4 writers", flush=True)
        with contextlib.ExitStack() as stack:
            folder = self.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(explained(self))
            cluster = stack.enter_context(new_cluster(folder / "cluster"))
            brokers = [broker.address for broker in cluster.brokers]
            name_servers, links = stack.enter_context(linked_servers(cluster.name_server.split(";"), brokers))
            by_name: dict[str, list[TcpProxy]] = {"name servers": list(name_servers)}
            for broker, link in zip(cluster.brokers, links, strict=True):
                by_name.setdefault(broker.broker_name, []).append(link)
            self._start_writers(cluster, ";".join(link.address for link in name_servers), folder, stack)
            sampling = stack.enter_context(Every(SAMPLED_EVERY, lambda: self._sample([*name_servers, *links])))
            noting = stack.enter_context(Every(1.0, self._note))
            with Flow(cluster.name_server.split(";"), [writer.topic for writer in self.writers]) as flow:
                faults = Faults(cluster, by_name, self.writers, flow, self.seed, self._tend)
                self._await_rows(flow)
                self._strike(faults)
                self._finish()
            self.findings += [repr(every.failure) for every in (sampling, noting) if every.failure is not None]
            for writer in self.writers:
                writer.close()
            print("comparing the topics with the rows", flush=True)
            audits = [writer.audit() for writer in self.writers]
            found = run_audits(Java(folder, folder / "classes"), cluster.name_server, audits)
            self.report(found, faults.counts)
        print("\n".join(["", *self.findings]) if self.findings else "\nno row is wrong, nothing has grown")
        return 1 if self.findings else 0

    def _start_writers(
        self, cluster: LocalCluster, name_server: str, folder: Path, stack: contextlib.ExitStack
    ) -> None:
        watchdog = Watchdog()
        stack.callback(watchdog.release)
        forms = [self._rng.choice(["stream", "stream", "batch"]) for _ in range(3)]
        self.writers = new_writers(name_server, folder, self.seconds, self.rate, forms, watchdog)
        spared = self._rng.choice(self.writers[:3])
        for writer in self.writers:
            writer.spared = writer is spared or writer.form == "producer"
            create_topic(cluster, writer.topic, "NORMAL", QUEUES)
            stack.callback(writer.close)
            writer.start()
        names = (f"{writer.name}{' (never killed)' if writer.spared else ''}" for writer in self.writers)
        print(f"writers: {', '.join(names)}; Ctrl-C ends it", flush=True)

    def _tend(self) -> None:
        for writer in self.writers:
            writer.tend()

    def _note(self) -> None:
        for writer in self.writers:
            writer.note()

    def _sample(self, links: Sequence[TcpProxy]) -> None:
        # A program that starts has fewer connections.
        if not all(writer.is_settled for writer in self.writers):
            return
        process = psutil.Process()
        figures = {
            "soak MB": process.memory_info().rss / 1e6,
            "soak descriptors": process.num_fds(),
            "open connections": sum(link.connections for link in links),
        }
        self.own.append(Sample(time.time(), figures))

    def _strike(self, faults: Faults) -> None:
        """Inject a fault again and again until a writer with Spark is done."""
        self.began, due = time.time(), time.monotonic() + min(self.fault_every / 2, 15.0)
        print("rows flow; time, fault, target, and how long until rows flowed again:", flush=True)
        while True:
            while time.monotonic() < due:
                self._tend()
                time.sleep(0.2)
            if any(writer.is_done for writer in self.writers if writer.form != "producer"):
                self.ended = time.time()
                return
            due = time.monotonic() + self.fault_every
            struck = faults.strike()
            since = int(struck.at - self.began)
            flowed = f"{struck.flowed:.1f} s ({struck.last})" if struck.last else "its writer was done"
            print(f"  {since // 60:3}:{since % 60:02} {struck.kind:34} {struck.target}: {flowed}", flush=True)

    def _await_rows(self, flow: Flow) -> None:
        """Let the writers begin when all are ready, and wait until all have stored rows."""
        wait_for(
            lambda: all((writer.folder / "ready").exists() for writer in self.writers),
            why=lambda: "a writer is not ready",
            meanwhile=self._tend,
        )
        # The first micro-batch takes long. Other writers would be done early.
        streams = [writer for writer in self.writers if writer.form == "stream"]
        for some in (streams, [writer for writer in self.writers if writer not in streams]):
            for writer in some:
                (writer.folder / "go").touch()
            wait_for(partial(_have_rows, flow, some), why=lambda: "a writer stores no rows", meanwhile=self._tend)

    def _finish(self) -> None:
        """Wait until all writers have written their rows."""
        before, deadline = list[int](), 0.0
        while not all(writer.is_done for writer in self.writers):
            now = [writer.written for writer in self.writers]
            if now != before:
                before, deadline = now, time.monotonic() + PATIENCE
            assert time.monotonic() < deadline, f"no more rows are written within {PATIENCE:g} s"
            self._tend()
            time.sleep(0.2)

    def report(self, found: Sequence[Found], counts: Counter[str]) -> None:
        """Print the figures, the faults and the rows, and add what is wrong to the findings."""
        self._report_memory()
        print(f"\n{counts.total()} faults: {', '.join(f'{kind} {times}' for kind, times in sorted(counts.items()))}")
        if not counts.total():
            self.findings.append("no fault was injected")
        print(f"\n{'':28} {'rows in':>10} {'compared':>10} {'stored':>10} {'missing':>8} {'repeated':>9} {'starts':>7}")
        for writer, one in zip(self.writers, found, strict=True):
            missing = one.counts.get("missing", 0)
            print(
                f"{writer.name:28} {writer.rows:>10,} {one.rows:>10,} {one.messages:>10,} {missing:>8,} "
                f"{one.repeats:>9,} {len(writer.drivers):>7}"
            )
            if one.rows != writer.rows:
                self.findings.append(f"{writer.name}: the auditor compared {one.rows:,} of {writer.rows:,} rows")
            self.findings += [f"{writer.name}: {line}" for line in one.lines()]
            self.findings += [f"{writer.name}: {line[:300]}" for line in writer.printed(NEVER)]
        self._report_errors()

    def _report_errors(self) -> None:
        """Print which writes have failed, and were repeated; a fault may cause that."""
        for writer in self.writers:
            failed = writer.printed("^failed: ")
            if failed:
                print(f"\n{writer.name}: {len(failed)} writes failed and were repeated, such as:")
                print("\n".join(f"  {line[:200]}" for line in failed[:3]))

    def _counted(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        return [sample for sample in samples if self.began <= sample.at <= self.ended]

    def _judge(self, name: str, samples: Sequence[Sample], slack: float) -> list[Line]:
        """Return the verdicts on the samples between the beginning and the end; few samples are always fine."""
        counted = self._counted(samples)
        lines = judge(counted, {"JVM MB": JVM_CEILING}, slack)
        few = len(counted) < FEWEST_SAMPLES
        return [line._replace(name=f"{name}{line.name}", fine=line.fine or few) for line in lines]

    def _report_memory(self) -> None:
        """Print how the figures have changed, and find those that have grown."""
        judged = self.seconds >= JUDGED_FROM * 60
        lines = self._judge("", self.own, RESTARTED)
        for writer in self.writers:
            lines += self._judge(f"{writer.name} ", writer.samples(), 0.0 if writer.spared else RESTARTED)
        print_table(lines, judged=judged)
        if judged:
            self.findings += [
                f"{line.name} has grown from {line.first:.1f} to {line.last:.1f}" for line in lines if not line.fine
            ]
            # Programs that were killed may have few.
            self.findings += [
                f"{writer.name} has only {count} samples of its memory"
                for writer in self.writers
                if writer.spared and (count := len(self._counted(writer.samples()))) < FEWEST_SAMPLES
            ]
        else:
            print(f"growth is judged in runs of at least {JUDGED_FROM:g} minutes")


def _have_rows(flow: Flow, writers: Sequence[Writer]) -> bool:
    return all(flow.count(writer.topic) for writer in writers)


def new_cluster(folder: Path) -> LocalCluster:
    """Return the servers of a soak."""
    return LocalCluster(
        brokers=2,
        directory=folder,
        controller=True,
        replicas=2,
        name_servers=3,
        broker_properties=FAST_FAILOVER,
        start_timeout=PATIENCE,
    )


def print_table(lines: Sequence[Line], *, judged: bool) -> None:
    """Print each figure after the warm-up, at the end and at its highest, and its growth per hour."""
    print(f"\n{'':48} {'first quarter':>13} {'last quarter':>13} {'highest':>10} {'per hour':>10}")
    for name, first, last, highest, per_hour, fine in lines:
        verdict = ("fine" if fine else "GROWS") if judged else ""
        print(f"{name:48} {first:>13.1f} {last:>13.1f} {highest:>10.1f} {per_hour:>+10.1f}  {verdict}")


@contextlib.contextmanager
def explained(soak: Soak) -> Iterator[None]:
    """Print what the writers have printed last, if the run fails."""
    try:
        yield
    except AssertionError:
        for writer in soak.writers:
            if writer.drivers:
                print(f"\n{writer.name}:\n{writer.driver.tail()}", file=sys.stderr)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description="Write with all deliveries while servers, links and processes fail.")
    parser.add_argument("--minutes", type=float, default=30.0, help="at least 2; default 30")
    parser.add_argument("--rows-per-second", type=int, default=200, help="of each of 4 writers; default 200")
    parser.add_argument("--fault-every", type=float, default=60.0, help="seconds; default 60")
    parser.add_argument("--seed", type=int, help="repeats the faults of a run")
    parser.add_argument("--folder", type=Path, help="a new folder that keeps stores, logs and outputs")
    given = parser.parse_args()
    if given.minutes < 2 or given.rows_per_second < 10 or given.rows_per_second % 2 or given.fault_every <= 0:
        parser.error("at least 2 minutes, an even number of 10 rows or more per second, and faults after above 0 s")
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    soak = Soak(given.minutes, given.rows_per_second, seed, given.fault_every, given.folder)
    try:
        return soak.run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
