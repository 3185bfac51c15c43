"""Eight tasks that write to a broker that rejects requests after 20 ms in its queue, against one with a limit of 1 s.

Run: make bench PART=pacing (python -m tests.benchmarks.bench_pacing [rounds] [seconds a run])

The tasks are processes, as in Spark. Each sends 100-byte bodies with `Producer.send_arrow` for the same time. At the
end the broker's queues must hold every row that a task reports as stored.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from rocketmq_spark import LocalCluster, Producer
from rocketmq_spark.admin import queue_offsets
from rocketmq_spark.cluster.probe import Probe
from tests.benchmarks.bench_remoting import QUEUES, TOPIC, record_batches
from tests.benchmarks.contest import Figure, await_rest, in_turns, ratios, rows_of, running, show

TASKS = 8
# Until all tasks have started Python, seconds.
STARTS_WITHIN = 15.0
WAIT_MS = {"refusing": 20, "patient": 1000}


def send(name_server: str, begin: float, seconds: float) -> int:
    """Send for `seconds` seconds from `begin` (epoch seconds) on; return the number of stored rows."""
    with Producer("bench-pacing", name_server=name_server) as producer:
        producer.send_arrow(record_batches(100, time.perf_counter() + 0.2), topic=TOPIC)
        time.sleep(max(0.0, begin - time.time()))
        until = time.perf_counter() + seconds
        summary = producer.send_arrow(record_batches(100, until), topic=TOPIC)
    return rows_of(summary)


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure everything here."""
    with LocalCluster() as cluster:
        address = cluster.brokers[0].address
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            admin.create_topic("TBW102", TOPIC, QUEUES)

        def stored() -> int:
            return sum(offsets.messages for offsets in queue_offsets([cluster.name_server], TOPIC))

        def measure(name: str) -> float:
            await_rest(cluster)
            before = stored()
            Probe(timeout=5.0).configure(address, {"waitTimeMillsInSendQueue": WAIT_MS[name]})
            begin = time.time() + STARTS_WITHIN
            arguments = ("tests.benchmarks.bench_pacing", cluster.name_server, begin, seconds)
            tasks = [running(*arguments) for _ in range(TASKS)]
            said = [json.loads(task.communicate(timeout=seconds + 120)[0].splitlines()[-1]) for task in tasks]
            if any(task.returncode for task in tasks):
                raise SystemExit("a task has failed")
            rows, took = sum(rows for rows, _ in said), max(ended for _, ended in said) - begin
            await_rest(cluster)
            if stored() - before < rows:
                raise SystemExit(f"{rows:,} rows were acknowledged, {stored() - before:,} are there")
            return float(rows / took)

        taken = in_turns(list(WAIT_MS), rounds, measure)
    name = f"{TASKS} tasks, broker that refuses what waits 20 ms, against left alone"
    yield Figure(name, ratios(taken["refusing"], taken["patient"]), 0.7)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--run"]:
        _, name_server, begin, seconds = arguments
        rows = send(name_server, float(begin), float(seconds))
        print(json.dumps([rows, time.time()]))
        return
    show(figures, arguments, 5, 4.0)


if __name__ == "__main__":
    main(sys.argv[1:])
