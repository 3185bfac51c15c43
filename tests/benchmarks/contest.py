"""Contestants do the same work in turn on the same servers; the result is the ratio of their speeds.

Each run is a new process, so that no contestant inherits warm caches or garbage. The order of the contestants is
reversed in every other round. A figure is the median of its rounds' ratios, with the lowest and the highest: other load
on the machine slows all contestants of a round and hardly changes the ratio.

Servers are new, warm and idle before each run, because a broker indexes stored messages for seconds afterwards. Stored
messages are deleted within a second: a broker stores faster here than a disk can write, and the disk would slow the
next contestant.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.metrics import WriteSummary

# Properties of a broker that deletes all files except the current ones.
FORGETFUL: Mapping[str, object] = {
    "fileReservedTime": 0,
    "deleteWhen": ";".join(f"{hour:02}" for hour in range(24)),
    "cleanResourceInterval": 500,
    "deleteFileBatchMax": 1000,
    "deleteCommitLogFilesInterval": 1,
    "deleteConsumeQueueFilesInterval": 1,
}

# An idle broker takes less of a processor than this.
_AT_REST = 0.2
_RESTS_WITHIN = 60.0


ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("figures.json")
# The figures that README.md shows, and how it names them.
HEADLINES: Mapping[str, str] = {
    "send_arrow, 100-byte bodies, against Java's send(Collection)": "`Producer.send_arrow` to Java `send(Collection)`",
    "read, local[2], against the official pull consumer": "`spark.read` in `local[2]` to Java's best pull consumer",
    "over gRPC, against rocketmq-python-client's best": "`Producer.send_arrow` over gRPC to the official Python client",
}


class Figure(NamedTuple):
    """A measured figure: the ratios of its rounds, and the ratio `wanted` (None: the figure has no aim)."""

    name: str
    ratios: Sequence[float]
    wanted: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def median(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def reached(self) -> bool:
        """Whether the median reaches the aim."""
        if self.wanted is None:
            return True
        return self.median <= self.wanted if self.at_most else self.median >= self.wanted

    def __str__(self) -> str:
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        bound = "" if self.wanted is None else f"at {'most' if self.at_most else 'least'} {self.wanted:g}"
        return f"{self.name:<64} {self.median:7.2f}  {spread:>17}  {bound:<14} {self.note}"


def save(part: str, found: Sequence[Figure]) -> None:
    """Write the figures of a part to `FIGURES`, replacing older ones of that part."""
    figures = [{**one._asdict(), "ratios": [round(ratio, 3) for ratio in one.ratios]} for one in found]
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    # Figures of another machine cannot be compared with these.
    parts = kept["parts"] if kept.get("machine") == machine() else {}
    FIGURES.write_text(
        json.dumps({"machine": machine(), "parts": {**parts, part: figures}}, indent=1) + "\n", encoding="utf-8"
    )


def table() -> str:
    """Return the Markdown table of the figures that `save` wrote."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = ["| figure | median | rounds | aim |", "|---|---|---|---|"]
    for one in (Figure(**figure) for figures in kept["parts"].values() for figure in figures):
        aim = "" if one.wanted is None else f"at {'most' if one.at_most else 'least'} {one.wanted:g}"
        note = f" ({one.note})" if one.note else ""
        lines.append(
            f"| {one.name}{note} | {one.median:.2f} | {min(one.ratios):.2f} to {max(one.ratios):.2f} | {aim} |"
        )
    return "\n".join([*lines, "", f"Measured on {kept['machine']}."])


def headlines() -> str:
    """Return the figures of `HEADLINES` as a Markdown table."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    figures = {one["name"]: Figure(**one) for part in kept["parts"].values() for one in part}
    lines = [f"| {text} | {figures[name].median:.2f} |" for name, text in HEADLINES.items()]
    return "\n".join(["| ratio of | median |", "|---|---|", *lines])


def machine() -> str:
    """Return the operating system, number of processors and Python version."""
    # The release without its build: an update of the kernel does not make another machine.
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return f"{system}, {os.cpu_count()} processors, Python {platform.python_version()}"


def show(figures: Callable[..., Iterator[Figure]], arguments: Sequence[str], *defaults: float) -> None:
    """Measure and print figures. The `defaults` replace missing `arguments`, which get their types."""
    given = [type(default)(text) for default, text in zip(defaults, arguments, strict=False)]
    print(machine())
    for figure in figures(*given, *defaults[len(given) :]):
        print(figure)


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [one / other for one, other in zip(mine, others, strict=True)]


def rows_of(summary: WriteSummary) -> int:
    """Return the number of stored rows of all brokers."""
    return sum(broker["rows"] for broker in summary.to_dict().values())


def best_of(*taken: Sequence[float]) -> list[float]:
    """Return the best of each round."""
    return [max(round_) for round_ in zip(*taken, strict=True)]


def in_turns(contestants: Sequence[str], rounds: int, measure: Callable[[str], float]) -> Mapping[str, Sequence[float]]:
    """Run each contestant once a round, and return their results by name."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in reversed(contestants) if number % 2 else contestants:
            taken[name].append(measure(name))
        line = "  ".join(f"{name} {figures[-1]:,.0f}" for name, figures in taken.items())
        print(f"  round {number + 1}: {line}", flush=True)
    for name, figures in taken.items():
        print(f"  {name:24} {statistics.median(figures):>12,.0f} (median of {rounds})", flush=True)
    return taken


def running(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a module of this folder with arguments."""
    command = [sys.executable, "-m", module, "--run", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)


def apart(module: str, *arguments: object, within: float) -> Any:
    """Run a module of this folder with arguments, and return the JSON of its last line."""
    with running(module, *arguments) as process:
        try:
            said, _ = process.communicate(timeout=within)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise SystemExit(f"{module} {' '.join(map(str, arguments))} has failed")
    return json.loads(said.splitlines()[-1])


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of its ended children, seconds."""
    return sum(psutil.Process(pid).cpu_times()[:4])


def await_rest(cluster: LocalCluster) -> None:
    """Wait until the brokers are idle; exit if one stays busy."""
    deadline = time.monotonic() + _RESTS_WITHIN
    while True:
        before = [cpu_seconds(broker.pid) for broker in cluster.brokers]
        time.sleep(1.0)
        load = max(cpu_seconds(broker.pid) - was for broker, was in zip(cluster.brokers, before, strict=True))
        if load < _AT_REST:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"a broker without load takes {load:.2f} of a processor: it would disturb the measurement")
