"""The cost of metrics: in the task per request and per report, on the driver per task.

Run: python tests/benchmarks/bench_merge.py [tasks] [brokers]
"""

from __future__ import annotations

import pickle
import random
import statistics
import sys
import time
import tracemalloc
from typing import NamedTuple

from rocketmq_spark.metrics import PartitionReport, Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.spark.report import CommitMessage, Metrics, ReportAccumulatorParam


def record(partition_id: int, brokers: int, requests: int, seconds: float) -> tuple[Recorder, float]:
    """Return a recorder that saw `requests` requests to every broker, and the time that one call took, seconds."""
    rng = random.Random(partition_id)
    names = [f"broker-{number:02d}" for number in range(brokers)]
    calls = [
        (name, 1000, 1_000_000, rng.lognormvariate(1.5, 0.6), MessageQueue("orders", name, request % 4), request * 1000,
         partition_id % 60 + request * seconds / requests)
        for request in range(requests) for name in names
    ]  # fmt: skip
    recorder = Recorder("123e4567-e89b-12d3-a456-426614174000", -1, partition_id, epoch_offset=1_700_000_000)
    started = time.perf_counter()
    for call in calls:
        recorder.record_success(*call)
    return recorder, (time.perf_counter() - started) / len(calls)


class Merged(NamedTuple):
    """What recording and merging took: seconds, and bytes. `memory` is what the driver keeps in the end."""

    calls: list[float]
    snapshots: list[float]
    updates: list[bytes]
    messages: list[int]
    merges: list[float]
    memory: int


def merged(tasks: int, brokers: int, requests: int, seconds: float) -> Merged:
    """Record the requests of some tasks, and merge their reports."""
    param = ReportAccumulatorParam()
    updates, calls, snapshots, messages = [], [], [], []
    for partition_id in range(tasks):
        recorder, per_call = record(partition_id, brokers, requests, seconds)
        started = time.perf_counter()
        report: PartitionReport = recorder.snapshot()
        snapshots.append(time.perf_counter() - started)
        calls.append(per_call)
        updates.append(pickle.dumps([report]))
        if partition_id % 100 == 0:
            messages.append(len(pickle.dumps(CommitMessage.of(report, histograms=True))))
    summary, merges = Metrics(), []
    for update in updates:
        started = time.perf_counter()
        param.addInPlace(summary, pickle.loads(update))
        merges.append(time.perf_counter() - started)
    assert (summary.reports, summary.dropped_reports) == (tasks, 0)
    # Once more, because tracing would slow the merges above.
    tracemalloc.start()
    summary = Metrics()
    for update in updates:
        param.addInPlace(summary, pickle.loads(update))
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Merged(calls, snapshots, updates, messages, sorted(merges), memory)


def run(tasks: int, brokers: int, requests: int, seconds: float) -> None:
    """Print one line for tasks of one size."""
    found = merged(tasks, brokers, requests, seconds)
    print(
        f"{tasks} tasks x {brokers} brokers x {requests} requests over {seconds:g} s: "
        f"record {statistics.median(found.calls) * 1e6:.2f} us a call, "
        f"snapshot {statistics.median(found.snapshots) * 1e3:.2f} ms, "
        f"update {statistics.mean(map(len, found.updates)):.0f} bytes, "
        f"commit message {max(found.messages)} bytes, "
        f"unpickle and merge mean {statistics.mean(found.merges) * 1e3:.3f} ms, "
        f"p50 {found.merges[tasks // 2] * 1e3:.3f} ms, p99 {found.merges[tasks * 99 // 100] * 1e3:.3f} ms, "
        f"all {sum(found.merges):.2f} s, {found.memory / 1e6:.1f} MB in the end"
    )


if __name__ == "__main__":
    tasks, brokers = (int(argument) for argument in (*sys.argv[1:], "2000", "20")[:2])
    run(tasks, brokers, 2, 1)
    run(tasks, brokers, 20, 2)
    run(tasks // 10, brokers, 200, 20)
