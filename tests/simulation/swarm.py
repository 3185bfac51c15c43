"""Run many schedules on all cores: ``python -m tests.simulation --seeds 10000``, or one: ``--seed 4711``.

Prints schedules per second and the faults by kind. After a failure it prints the seed, the smallest schedule that still
fails, and a trace. A seed gives the same run every time.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from tests.simulation.effectively_once import EffectivelyOncePlan, EffectivelyOnceRun, run_effectively_once
from tests.simulation.model import ModelPlan, run_model
from tests.simulation.reads import ReadPlan, ReadRun, run_read
from tests.simulation.schedule import Plan, Run, run
from tests.simulation.transactions import TransactionPlan, TransactionRun, run_transactions
from tests.simulation.two_phase import TwoPhasePlan, TwoPhaseRun, run_two_phase

# Schedules that one task of the pool runs.
_CHUNK = 25
# The most lines of a trace that are printed.
_LINES = 120


AnyPlan: TypeAlias = "Plan | ReadPlan | TransactionPlan | TwoPhasePlan | EffectivelyOncePlan | ModelPlan"
AnyRun: TypeAlias = "Run | ReadRun | TransactionRun | TwoPhaseRun | EffectivelyOnceRun"

KINDS: dict[str, tuple[type[AnyPlan], ...]] = {
    "mixed": (Plan, Plan, ReadPlan, TransactionPlan, TwoPhasePlan, Plan, ReadPlan, EffectivelyOncePlan),
    "effectively-once": (EffectivelyOncePlan,),
    "model": (ModelPlan,),
}


def plan_of(seed: int, kind: str = "mixed") -> AnyPlan:
    """Draw a plan of a kind; "mixed" are writes with any delivery, reads and transactions."""
    classes = KINDS[kind]
    return classes[seed % len(classes)].of_seed(seed)


def run_plan(plan: AnyPlan) -> AnyRun:
    """Run a schedule of any kind."""
    if isinstance(plan, ReadPlan):
        return run_read(plan)
    if isinstance(plan, TwoPhasePlan):
        return run_two_phase(plan)
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


class Chunk(NamedTuple):
    """The result of several schedules: their number, the faults by kind, the seeds that failed and what failed."""

    schedules: int
    faults: Counter[str]
    problems: dict[int, list[str]]


def run_chunk(seeds: Sequence[int], kind: str = "mixed") -> Chunk:
    """Run the schedules of some seeds."""
    faults: Counter[str] = Counter()
    problems: dict[int, list[str]] = {}
    for seed in seeds:
        done = run_plan(plan_of(seed, kind))
        faults += done.faults
        if done.problems:
            problems[seed] = done.problems
    return Chunk(len(seeds), faults, problems)


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
    chunks = [
        range(start, min(start + _CHUNK, first + options.seeds))
        for start in range(first, first + options.seeds, _CHUNK)
    ]
    began = time.monotonic()
    faults: Counter[str] = Counter()
    problems: dict[int, list[str]] = {}
    schedules = 0
    with multiprocessing.get_context("spawn").Pool(options.processes, be_quiet) as pool:
        for chunk in pool.imap_unordered(partial(run_chunk, kind=options.kind), chunks):
            schedules += chunk.schedules
            faults += chunk.faults
            problems |= chunk.problems
            if problems and options.until_failure:
                break
    seconds = time.monotonic() - began
    print(f"{schedules} schedules from seed {first}, {schedules / seconds:.0f} a second")
    for kind, count in sorted(faults.items()):
        print(f"  {count:8} {kind}")
    for seed in sorted(problems)[:3]:
        show_failure(seed, options.kind)
    if problems:
        print(f"\n{len(problems)} schedules failed: {', '.join(map(str, sorted(problems)[:20]))}")
    return 1 if problems else 0
