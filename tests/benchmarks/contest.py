"""Contestants do the same work in turn on the same servers; the result is the ratio of their speeds.

Each run is a new process, so that no contestant inherits warm caches or garbage. The order of the contestants is
reversed in every other round. A figure is the median of its rounds' ratios, with the lowest and the highest.

The first round warms up servers, JVMs and workers, and does not count. A round begins when the machine is quiet. If
other programs, or other virtual machines of its host, took part of the processors meanwhile, it is discarded and
repeated.

Servers are new, warm and idle before each run, because a broker indexes stored messages for seconds afterwards. Stored
messages are deleted within a second: a broker stores faster here than a disk can write, and the disk would slow the
next contestant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
# The part of all processors that other programs may take before and during a round.
_QUIET = 0.1
_QUIET_WITHIN = 60.0
# How often a round is repeated. The last one counts.
_REPEATS = 2
# A figure is unsettled if its rounds differ by more than this part of the median.
_SPREAD = 0.3


_T = TypeVar("_T")
_Self = TypeVar("_Self", bound="Program")

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("figures.json")
# The figures that README.md shows, and how it names them.
HEADLINES: Mapping[str, str] = {
    "send_arrow, 100-byte bodies, against Java's send(Collection)": "`Producer.send_arrow` to Java `send(Collection)`",
    "read, local[2], against the official pull consumer, default broker": (
        "`spark.read` in `local[2]` to Java's best pull consumer, broker with default settings"
    ),
    "read, local[2], against Spark's Kafka source, 1,024 messages per pull": (
        "`spark.read` in `local[2]` to Spark's Kafka source, broker with 1,024 messages per pull"
    ),
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
    def settled(self) -> bool:
        """Whether the rounds differ by at most 30 % of the median."""
        return max(self.ratios) - min(self.ratios) <= _SPREAD * abs(self.median)

    @property
    def aim(self) -> str:
        """The aim as a text; empty without one."""
        return "" if self.wanted is None else f"at {'most' if self.at_most else 'least'} {self.wanted:g}"

    def __str__(self) -> str:
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f}"
        return f"{self.name:<64} {self.median:7.2f}  {spread:>17}  {self.aim:<14} {self.note}"


@dataclasses.dataclass
class Rounds:
    """What the rounds of this process measured, by contestant, and how many of them were discarded."""

    discarded: int = 0
    taken: dict[str, list[float]] = dataclasses.field(default_factory=dict)


ROUNDS = Rounds()


def save(part: str, found: Sequence[Figure]) -> None:
    """Write the figures and rounds of a part to `FIGURES`, replacing older ones of that part."""
    figures = [{**one._asdict(), "ratios": [round(ratio, 3) for ratio in one.ratios]} for one in found]
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    # Figures of another machine cannot be compared with these.
    if kept.get("machine") != machine():
        kept = {"machine": machine(), "parts": {}, "rounds": {}}
    kept["parts"][part] = figures
    taken = {name: [float(f"{value:.4g}") for value in values] for name, values in ROUNDS.taken.items()}
    kept["rounds"][part] = {"discarded": ROUNDS.discarded, **taken}
    ROUNDS.discarded, ROUNDS.taken = 0, {}
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def table() -> str:
    """Return the Markdown table of the figures that `save` wrote."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = ["| figure | median | rounds | aim |", "|---|---|---|---|"]
    for one in (Figure(**figure) for figures in kept["parts"].values() for figure in figures):
        note = f" ({one.note})" if one.note else ""
        spread = f"{min(one.ratios):.2f} to {max(one.ratios):.2f}" + ("" if one.settled else ", unsettled")
        lines.append(f"| {one.name}{note} | {one.median:.2f} | {spread} | {one.aim} |")
    discarded = {part: rounds["discarded"] for part, rounds in kept["rounds"].items() if rounds["discarded"]}
    were = ", ".join(f"{part} {number}" for part, number in discarded.items())
    return "\n".join([*lines, "", f"Measured on {kept['machine']}.", f"Discarded rounds: {were or 'none'}."])


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


def show(figures: Callable[..., Iterator[Figure]], arguments: Sequence[str], *defaults: float | str) -> None:
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


def differences(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the difference of each round."""
    return [one - other for one, other in zip(mine, others, strict=True)]


def best_of(*taken: Sequence[float]) -> list[float]:
    """Return the best of each round."""
    return [max(round_) for round_ in zip(*taken, strict=True)]


def in_turns(contestants: Sequence[str], rounds: int, measure: Callable[[str], float]) -> Mapping[str, Sequence[float]]:
    """Run each contestant once a round, after a round to warm up, and return their results by name."""
    return by_name(rounds_of(contestants, rounds, measure))


def by_name(results: Sequence[Mapping[str, float]]) -> Mapping[str, Sequence[float]]:
    """Return the results of all rounds by name, and record them for `save`."""
    taken = {name: [of_round[name] for of_round in results] for name in results[0]}
    for name, figures in taken.items():
        each = "  ".join(f"{figure:,.5g}" for figure in figures)
        print(f"  {name:40} {statistics.median(figures):>12,.5g} of {each}", flush=True)
    ROUNDS.taken.update(taken)
    return taken


def rounds_of(
    contestants: Sequence[str],
    rounds: int,
    measure: Callable[[str], _T],
    *,
    warm_up: bool = True,
    repeats: int = _REPEATS,
) -> list[dict[str, _T]]:
    """Run each contestant once a round on a quiet machine, and return the results of each round by name.

    A round before them warms up. A disturbed round is repeated, at most `repeats` times.
    """

    def run(number: int) -> dict[str, _T]:
        taken = {name: measure(name) for name in (reversed(contestants) if number % 2 else contestants)}
        return {name: taken[name] for name in contestants}

    if warm_up:
        run(0)
    results = []
    for number in range(1, rounds + 1):
        for left in reversed(range(repeats + 1)):
            _await_quiet()
            others = _Others()
            result = run(number)
            share = others.share()
            print(f"  round {number}: others took {share:.0%} of the processors", flush=True)
            if share <= _QUIET or not left:
                results.append(result)
                break
            ROUNDS.discarded += 1
    return results


class _Others:
    """The processor time of programs outside this process and its children, and of other virtual machines."""

    def __init__(self) -> None:
        self._began, self._stolen, self._before = time.monotonic(), _stolen(), _seconds_of_others()

    def share(self) -> float:
        """Return the part of all processors that they took since the start."""
        took = time.monotonic() - self._began
        seconds = _stolen() - self._stolen
        for pid, spent in _seconds_of_others().items():
            seconds += max(0.0, spent - self._before.get(pid, 0.0))
        return seconds / took / (os.cpu_count() or 1)


def _stolen() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def _seconds_of_others() -> dict[int, float]:
    """Return the processor seconds of other processes, by process id.

    Not counted are this process, its children, and processes without a parent, which may be children of children.
    """
    ours = psutil.Process()
    own = {ours.pid, *(child.pid for child in ours.children(recursive=True))}
    seconds = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in own and process.ppid() != 1:
                seconds[process.pid] = sum(process.cpu_times()[:2])
    return seconds


def _await_quiet() -> None:
    """Wait until others are quiet for a second, at most a minute."""
    deadline = time.monotonic() + _QUIET_WITHIN
    while time.monotonic() < deadline:
        others = _Others()
        time.sleep(1.0)
        if others.share() <= _QUIET:
            return


class Program:
    """A program that answers each line with a line of JSON."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        )

    def ask(self, *words: object) -> dict[str, Any]:
        """Give the program a line, and return what it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"a program has ended with {self._process.wait()}")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


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


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time of a process and of its ended children, seconds; exit if the process has ended."""
    if pid is None:
        raise SystemExit("a server has ended")
    return float(sum(psutil.Process(pid).cpu_times()[:4]))


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
