"""Run all benchmarks, print one table, and write the figures of the documentation's table.

Run: make bench, or python -m tests.benchmarks [part ...] for some of `PARTS`. Their figures replace older ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

from tests.benchmarks import (
    bench_aio,
    bench_effectively_once,
    bench_encode,
    bench_exactly_once,
    bench_first,
    bench_grpc,
    bench_latency,
    bench_omb,
    bench_pacing,
    bench_read,
    bench_remoting,
    bench_scale,
    bench_small,
    bench_spark,
)
from tests.benchmarks.contest import Figure, machine, save

ROUNDS = 5

PARTS: Mapping[str, Callable[[], Iterator[Figure]]] = {
    "encode": bench_encode.figures,
    "remoting": lambda: bench_remoting.figures(ROUNDS, 4.0),
    "aio": lambda: bench_aio.figures(ROUNDS, 4.0),
    "pacing": lambda: bench_pacing.figures(ROUNDS, 4.0),
    "spark": lambda: bench_spark.figures(ROUNDS, 4),
    "read": lambda: bench_read.figures(ROUNDS),
    "small": lambda: bench_small.figures(ROUNDS),
    "grpc": lambda: bench_grpc.figures(ROUNDS, 4.0),
    "scale": lambda: bench_scale.figures(ROUNDS, 4.0),
    "first": lambda: bench_first.figures(ROUNDS),
    "latency": lambda: bench_latency.figures(ROUNDS),
    "omb": lambda: bench_omb.figures(2, 3.0),
    "exactly_once": lambda: bench_exactly_once.figures(ROUNDS),
    "effectively_once": lambda: bench_effectively_once.figures(ROUNDS),
}


def main(wanted: list[str]) -> None:
    unknown = set(wanted) - PARTS.keys()
    if unknown:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    print(machine(), flush=True)
    found: list[Figure] = []
    for name in wanted or PARTS:
        print(f"{name}:", flush=True)
        figures = list(PARTS[name]())
        save(name, figures)
        found += figures
    print()
    for figure in found:
        print(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
