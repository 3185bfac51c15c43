"""The cost of checking a history: seconds and memory for ten million operations.

Run: python -m tests.benchmarks.bench_history [operations] [rows of a batch ...]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from tests.support.history import History, Outcome
from tests.support.history_rules import check

QUEUES, WRITES, KEYS = 64, 20, 10_000


def generated(operations: int, batch_rows: int) -> History:
    """Return a history without a fault, in which a tenth of the batches is stored twice."""
    rng = np.random.default_rng(1)
    # A row is offered, put into a batch, counted, and read 1.1 times; a batch has 1.1 attempts, and as many ends.
    batches = int(operations / (4.1 * batch_rows + 2.2))
    size = batches * batch_rows
    rows = rng.permutation(size * 3)[:size]
    batch = np.repeat(np.arange(batches), batch_rows)
    write, queue = np.arange(batches) % WRITES, rng.integers(QUEUES, size=batches)
    again = rng.random(batches) < 0.1
    first, second = np.arange(batches), batches + np.flatnonzero(again)
    history = History()
    # All rows of a key are in one queue.
    history.offer(
        np.repeat(write, batch_rows), rows, np.repeat(queue + QUEUES * (first % (KEYS // QUEUES)), batch_rows)
    )
    history.batch(batch, rows)
    history.send(first, first, queue, first * 0.001, first * 0.001 + 3)
    history.send(second, np.flatnonzero(again), queue[again], second * 0.001 + 10, second * 0.001 + 13)
    history.end(first, np.where(again, Outcome.MAYBE_STORED, Outcome.ACKNOWLEDGED), first * 0.001 + 0.01)
    history.end(second, Outcome.ACKNOWLEDGED, second * 0.001 + 10.01)
    history.count(np.repeat(write, batch_rows), rows)
    history.finish(np.arange(WRITES), True, np.bincount(np.repeat(write, batch_rows), minlength=WRITES), 0, 0)
    stored = np.concatenate([rows, rows[again[batch]]])
    queues = np.concatenate([queue[batch], queue[batch[again[batch]]]])
    order = np.argsort(queues, kind="stable")
    starts = np.searchsorted(queues[order], np.arange(QUEUES))
    offsets = np.arange(len(stored)) - starts[queues[order]]
    history.read(0, queues[order], offsets, stored[order], stored[order])
    history.expect(0, np.arange(QUEUES), 0, np.bincount(queues, minlength=QUEUES))
    return history


def main(operations: int, sizes: list[int]) -> None:
    """Print one line for each size of batches."""
    for size in sizes:
        history = generated(operations, size)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        violations = check(history)
        seconds = time.perf_counter() - started
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{len(history):,} operations, batches of {size}: {seconds:.1f} s, {most / 1024:,.0f} MiB at most, "
            f"{before / 1024:,.0f} MiB before the check"
        )
        assert not violations, violations


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10_000_000, [int(size) for size in sys.argv[2:]] or [100, 1])
