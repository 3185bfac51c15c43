"""The time from a topic to another topic, through Spark's micro-batches, at 1,000 messages per second.

Run: make bench PART=latency (python -m tests.benchmarks.bench_latency [rounds])

A producer in another process sends 10 messages of 100 bytes every 10 ms; each holds the time of its sending. A
streaming query in ``local[2]`` reads them and starts each micro-batch when the last one has ended. It writes them to
another topic, where a message has the time at which the broker stored it. The trigger's own floor is the time until the
tasks of a sink that does nothing have the rows. The figures are of the 15 s after the first 5 s.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

from rocketmq_spark import LocalCluster, Message, Producer
from tests.benchmarks.bench_spark import Session
from tests.benchmarks.contest import Figure, by_name, differences, rounds_of, running, show

SOURCE, TARGET = "bench-source", "bench-target"
QUEUES = 4
PER_TICK = 10
TICK = 0.01
SINKS = ("rocketmq", "arrivals")
# In ms beyond the floor.
AIMS = {"p50": 200, "p99": 400}


def send(name_server: str) -> None:
    """Send until this process is ended, at most five minutes."""
    with Producer("bench-latency", name_server=name_server) as producer:
        due = time.perf_counter()
        end = due + 300
        while due < end:
            now = time.time_ns()
            # No body comes twice.
            producer.send_batch([Message.of(SOURCE, f"{now} {row}".ljust(100).encode()) for row in range(PER_TICK)])
            due += TICK
            time.sleep(max(0.0, due - time.perf_counter()))


def figures(rounds: int) -> Iterator[Figure]:
    """Milliseconds beyond the floor."""
    with LocalCluster() as cluster:
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            for topic in (SOURCE, TARGET):
                admin.create_topic("TBW102", topic, QUEUES)
        with Session("spark_latency.py", cluster.name_server, SOURCE, TARGET) as session:

            def measure(sink: str) -> dict[str, float]:
                with running("tests.benchmarks.bench_latency", cluster.name_server) as sender:
                    try:
                        return session.ask(sink)
                    finally:
                        sender.terminate()

            said = rounds_of(SINKS, rounds, measure)
    taken = by_name([{f"{sink} {what}": of[sink][what] for sink in SINKS for what in AIMS} for of in said])
    for percentile, wanted in AIMS.items():
        floor = taken[f"arrivals {percentile}"]
        beyond = differences(taken[f"rocketmq {percentile}"], floor)
        name = f"ms from topic to topic beyond a sink that does nothing, {percentile}"
        yield Figure(name, beyond, wanted, True, f"{statistics.median(floor):.0f} ms with that sink")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        send(sys.argv[2])
    else:
        show(figures, sys.argv[1:], 5)
