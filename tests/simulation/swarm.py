"""Run many schedules on all cores: ``python -m tests.simulation --seeds 10000``, or one: ``--seed 4711``.

Prints schedules per second and the faults by kind. After a failure it prints the seed, the smallest schedule that still
fails, and a trace. A seed gives the same run every time. ``--figures FILE`` keeps the figures of finished ranges of
seeds. So the figures of several runs add up, and no seed runs twice.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from tests.simulation.effectively_once import EffectivelyOncePlan, EffectivelyOnceRun, run_effectively_once
from tests.simulation.exactly_once import ExactlyOncePlan, ExactlyOnceRun, run_exactly_once
from tests.simulation.model import ModelPlan, run_model
from tests.simulation.reads import ReadPlan, ReadRun, run_read
from tests.simulation.schedule import Plan, Run, run
from tests.simulation.stream_model import StreamPlan, StreamRun, run_stream
from tests.simulation.transactions import TransactionPlan, TransactionRun, run_transactions
from tests.simulation.two_phase import TwoPhasePlan, TwoPhaseRun, run_two_phase

# Schedules that one task of the pool runs.
_CHUNK = 25
# The most lines of a trace that are printed.
_LINES = 120


AnyPlan: TypeAlias = (
    "Plan | ReadPlan | TransactionPlan | TwoPhasePlan | EffectivelyOncePlan | ModelPlan | ExactlyOncePlan | StreamPlan"
)
AnyRun: TypeAlias = "Run | ReadRun | TransactionRun | TwoPhaseRun | EffectivelyOnceRun | ExactlyOnceRun | StreamRun"

KINDS: dict[str, tuple[type[AnyPlan], ...]] = {
    "mixed": (Plan, Plan, ReadPlan, TransactionPlan, TwoPhasePlan, Plan, ReadPlan, EffectivelyOncePlan),
    "effectively-once": (EffectivelyOncePlan,),
    "model": (ModelPlan,),
    "exactly-once": (ExactlyOncePlan,),
    "stream": (StreamPlan,),
}


def plan_of(seed: int, kind: str = "mixed") -> AnyPlan:
    """Draw a plan of a kind; "mixed" are writes with any delivery, reads and transactions."""
    classes = KINDS[kind]
    return classes[seed % len(classes)].of_seed(seed)


def run_plan(plan: AnyPlan) -> AnyRun:
    """Run a schedule of any kind."""
    if isinstance(plan, ReadPlan):
        return run_read(plan)
    if isinstance(plan, StreamPlan):
        return run_stream(plan)
    if isinstance(plan, TwoPhasePlan):
        return run_two_phase(plan)
    if isinstance(plan, ExactlyOncePlan):
        return run_exactly_once(plan)
    if isinstance(plan, ModelPlan):
        return run_model(plan)
    if isinstance(plan, EffectivelyOncePlan):
        return run_effectively_once(plan)
    return run_transactions(plan) if isinstance(plan, TransactionPlan) else run(plan)


def be_quiet() -> None:
    """Print no log messages of the package. Handlers still get them: the checks of reads count reports of data loss."""
    package = logging.getLogger("rocketmq_spark")
    package.addHandler(logging.NullHandler())
    package.propagate = False


@dataclass
class Chunk:
    """The result of several schedules."""

    schedules: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    # By kind of fault: the schedules that had it, and those of them whose user gave up after an error.
    with_fault: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    # The seeds that failed, and what failed.
    problems: dict[int, list[str]] = field(default_factory=dict)
    # Of the processor.
    seconds: float = 0.0

    def add(self, other: Chunk) -> None:
        """Add the result of other schedules."""
        self.schedules += other.schedules
        self.faults += other.faults
        self.with_fault += other.with_fault
        self.stopped += other.stopped
        self.problems |= other.problems
        self.seconds += other.seconds

    @classmethod
    def of_json(cls, line: dict[str, Any]) -> Chunk:
        """Return the chunk of a line of a file of figures."""
        counts = {name: Counter(line[name]) for name in ("faults", "with_fault", "stopped")}
        problems = {int(seed): texts for seed, texts in line["problems"].items()}
        return cls(line["schedules"], problems=problems, seconds=line["seconds"], **counts)


def run_chunk(seeds: Sequence[int], kind: str = "mixed") -> Chunk:
    """Run the schedules of some seeds."""
    chunk, began = Chunk(len(seeds)), time.process_time()
    for seed in seeds:
        done = run_plan(plan_of(seed, kind))
        kinds = [fault for fault, count in done.faults.items() if count]
        chunk.faults += done.faults
        chunk.with_fault.update(kinds)
        if _is_stopped(done):
            chunk.stopped.update(kinds)
        if done.problems:
            chunk.problems[seed] = done.problems
    chunk.seconds = time.process_time() - began
    return chunk


def _is_stopped(done: AnyRun) -> bool:
    """Return whether an error has ended a write or a driver."""
    if isinstance(done, StreamRun):
        return any(driver.error is not None for driver in done.history.drivers)
    return isinstance(done, EffectivelyOnceRun | ExactlyOnceRun) and bool(done.history.stopped)


def _run_range(seeds: range, kind: str) -> tuple[range, Chunk]:
    return seeds, run_chunk(seeds, kind)


def keep_figures(path: Path, kind: str, first: int, chunk: Chunk) -> None:
    """Add the figures of a range of seeds to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "first": first, "chunk": vars(chunk)}) + "\n")


def kept_figures(path: Path | None, kind: str) -> tuple[Chunk, set[int]]:
    """Return the sum of the figures of a kind in a file, and the seeds that they have."""
    total, seeds = Chunk(), set[int]()
    if path is not None and path.exists():
        for line in map(json.loads, path.read_text("utf-8").splitlines()):
            if line["kind"] == kind:
                total.add(Chunk.of_json(line["chunk"]))
                seeds.update(range(line["first"], line["first"] + line["chunk"]["schedules"]))
    return total, seeds


def smaller(plan: AnyPlan) -> Iterator[AnyPlan]:
    """Yield plans with less in them: a fault less, or a smaller number."""
    for fault in plan.faults:
        yield replace(plan, faults=tuple(kind for kind in plan.faults if kind != fault))
    if isinstance(plan, Plan):
        # Reads and transactions need all their options.
        for name in sorted(plan.options.keys() - {"ordered"}):
            yield replace(plan, options={key: value for key, value in plan.options.items() if key != name})
    least: dict[str, Any] = {
        "brokers": 1,
        "slaves": 0,
        "name_servers": 1,
        "queues": 1,
        "tasks": 1,
        "partitions": 1,
        "rows": 1,
        "batch_rows": 1,
        "rows_at_once": 1,
        "equal": 1,
        "topics": 1,
    }
    for name, value in least.items():
        present = getattr(plan, name, value)
        if present > value:
            yield replace(plan, **{name: value})
            yield replace(plan, **{name: (present + value) // 2})


def minimised(
    plan: AnyPlan, fails: Callable[[AnyPlan], object] = lambda plan: run_plan(plan).problems, most_runs: int = 400
) -> AnyPlan:
    """Return the smallest plan found that still fails."""
    runs = 0
    while True:
        for candidate in smaller(plan):
            runs += 1
            if runs > most_runs:
                return plan
            if candidate != plan and fails(candidate):
                plan = candidate
                break
        else:
            return plan


def trace_of(done: AnyRun) -> list[str]:
    """Return what happened, line by line."""
    lines = [(at, f"fault: {text}") for at, text in done.world.trace]
    return [f"{at:9.4f} s  {text}" for at, text in sorted(lines + (_sends(done) if isinstance(done, Run) else []))]


def _sends(done: Run) -> list[tuple[float, str]]:
    lines: list[tuple[float, str]] = []
    for number, attempt in enumerate(done.worker.transport.attempts):
        what = f"attempt {number}: {attempt.batch.rows} rows to {attempt.queue}"
        lines.append((attempt.started, f"{what} begins"))
        if attempt.outcome is not None:
            error = attempt.outcome.error
            ending = attempt.outcome.status.name if attempt.outcome.status else f"{type(error).__name__}: {error}"
            lines.append((attempt.ended, f"{what} ends: {ending[:160]}"))
    for result in done.results:
        ending = "every row acknowledged" if result.error is None else f"{type(result.error).__name__}: {result.error}"
        lines.append((result.ended, f"task {result.number} ends: {ending[:400]}"))
    return lines


def show_failure(seed: int, kind: str) -> None:
    """Print a failed schedule, as small as possible."""
    plan = minimised(plan_of(seed, kind))
    done = run_plan(plan)
    print(f"\nseed {seed} fails: replay it with python -m tests.simulation --kind {kind} --seed {seed}")
    print("the smallest schedule that fails:")
    for item in fields(plan):
        print(f"  {item.name} = {getattr(plan, item.name)!r}")
    lines = trace_of(done)
    left_out = len(lines) - _LINES
    if left_out > 0:
        print(f"  ... {left_out} earlier lines")
    print("\n".join(lines[-_LINES:]))
    for problem in done.problems:
        print(f"PROBLEM: {problem}")


def main(arguments: Sequence[str]) -> int:
    """Run schedules; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=None, help="first seed (default: a new one)")
    parser.add_argument("--seed", type=int, default=None, help="run this seed only, and print its trace")
    parser.add_argument("--kind", choices=KINDS, default="mixed", help="kind of schedules (default: mixed)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--figures", type=Path, help="file that keeps the figures of finished ranges of seeds")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    options = parser.parse_args(arguments)
    be_quiet()
    if options.seed is not None:
        done = run_plan(plan_of(options.seed, options.kind))
        print("\n".join(trace_of(done)))
        for problem in done.problems:
            print(f"PROBLEM: {problem}")
        return 1 if done.problems else 0
    first = int(time.time()) * 1_000_000 if options.first is None else options.first
    total, present = kept_figures(options.figures, options.kind)
    chunks = [
        range(start, min(start + _CHUNK, first + options.seeds))
        for start in range(first, first + options.seeds, _CHUNK)
        if start not in present
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes, be_quiet) as pool:
        for seeds, chunk in pool.imap_unordered(partial(_run_range, kind=options.kind), chunks):
            total.add(chunk)
            if options.figures is not None:
                keep_figures(options.figures, options.kind, seeds.start, chunk)
            if total.problems and options.until_failure:
                break
    show_figures(options.kind, total)
    for seed in sorted(total.problems)[:3]:
        show_failure(seed, options.kind)
    if total.problems:
        print(f"\n{len(total.problems)} schedules failed: {', '.join(map(str, sorted(total.problems)[:20]))}")
    return 1 if total.problems else 0


def show_figures(kind: str, total: Chunk) -> None:
    """Print how many schedules ran, and the figures by kind of fault."""
    speed = total.schedules / max(total.seconds, 1e-9)
    print(
        f"{total.schedules} schedules of kind {kind}, {speed:.0f} a second of a processor, {len(total.problems)} failed"
    )
    print(f"  {'faults':>9} {'schedules':>9} {'stopped':>8}  kind (stopped: the user gave up after an error)")
    for fault, count in sorted(total.faults.items()):
        print(f"  {count:9} {total.with_fault[fault]:9} {total.stopped[fault]:8}  {fault}")
