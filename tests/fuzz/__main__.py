"""Compares all decoders on many random answers. Run: make fuzz ANSWERS=1000000 (python -m tests.fuzz ANSWERS [FIRST])

The number of an answer is the seed that draws it. On a difference, the error names it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from rocketmq_spark.arrow.kernel import compiled
from tests.fuzz.compare import run

_CHUNK = 10_000


def main(answers: int, first: int = 0) -> None:
    """Compare on all processors, and print how many answers each decoder has read."""
    starts = range(first, first + answers, _CHUNK)
    outcomes: Counter[str] = Counter()
    print(f"kernel: {inspect.getfile(compiled().messages)}", flush=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for done, part in enumerate(pool.map(run, starts, [min(_CHUNK, first + answers - at) for at in starts]), 1):
            outcomes += part
            print(f"{min(done * _CHUNK, answers):,} answers: {dict(outcomes)}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
