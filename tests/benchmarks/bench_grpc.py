"""Rows per second through a real proxy: ours, the official Python client, and a replay of ready-made requests.

Run: make bench (python -m tests.benchmarks.bench_grpc [rounds] [seconds a run])

All send 100-byte bodies with a tag and a key to one topic of one proxy. The replay sends requests that `GrpcBatcher`
encoded beforehand, over one channel, with the same number in flight. It shows the limit of wire, proxy and broker.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.contest import FORGETFUL, Figure, apart, await_rest, best_of, in_turns, ratios, rows_of, show

TOPIC = "bench-grpc"
BODY = b"x" * 100
ROWS = 10_000
# Rows and number of the requests in flight, as in a write over gRPC.
BATCH_ROWS = 1_000
WINDOW = 3
METHOD = "/apache.rocketmq.v2.MessagingService/SendMessage"


def record_batches(until: float) -> Iterator[Any]:
    import pyarrow as pa

    batch = pa.record_batch(
        {
            "body": pa.array([BODY] * ROWS),
            "tags": pa.array(["tag"] * ROWS),
            "keys": pa.array([f"key-{row:06}" for row in range(ROWS)]),
        }
    )
    while time.perf_counter() < until:
        yield batch


def ours(endpoints: str, seconds: float) -> float:
    """`Producer.send_arrow` over gRPC; returns rows per second."""
    from rocketmq_spark import Producer

    with Producer("bench-ours", endpoints=endpoints) as producer:
        producer.send_arrow(record_batches(time.perf_counter() + 0.5), topic=TOPIC)
        began = time.perf_counter()
        summary = producer.send_arrow(record_batches(began + seconds), topic=TOPIC)
        took = time.perf_counter() - began
    return rows_of(summary) / took


def replay(endpoints: str, seconds: float) -> float:
    """Send ready-made requests over a bare channel; return rows per second."""
    import grpc

    requests = encoded_requests()
    metadata = (("x-mq-client-id", f"replay@{os.getpid()}"), ("x-mq-language", "PYTHON"), ("x-mq-protocol", "v2"))
    room = threading.Semaphore(WINDOW)
    failed: list[str] = []

    def done(call: Any) -> None:
        if call.exception() is not None:
            failed.append(str(call.exception()))
        elif b"\x08\xa0\x9c\x01" not in call.result()[:8]:  # status.code 20000
            failed.append(repr(call.result()[:200]))
        room.release()

    with grpc.insecure_channel(f"ipv4:{endpoints}") as channel:
        send = channel.unary_unary(METHOD)
        rows, number, warm = 0, 0, time.perf_counter() + 0.5
        began, until = warm, warm + seconds
        while (now := time.perf_counter()) < until:
            if now < warm:
                rows, began = 0, now
            request, count = requests[number % len(requests)]
            number += 1
            room.acquire()
            send.future(request, timeout=10, metadata=metadata).add_done_callback(done)
            rows += count
        for _ in range(WINDOW):
            room.acquire()
        took = time.perf_counter() - began
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
    return rows / took


def encoded_requests() -> list[tuple[bytes, int]]:
    """Return requests as a write makes them, and how many rows each has."""
    import random

    from rocketmq_spark.arrow.batcher import GrpcBatcher
    from rocketmq_spark.arrow.encoders import MessageIds
    from rocketmq_spark.options.parsing import parse_sink_options

    options = parse_sink_options({"endpoints": "127.0.0.1:1", "topic": TOPIC}, {})
    batcher = GrpcBatcher(
        options,
        max_rows=BATCH_ROWS,
        partition_id=0,
        queues_of=lambda _topic: (),
        unique_ids=MessageIds(pid=1, wall_clock=time.time, rng=random.Random(1)),
        born_host="127.0.0.1",
        epoch_offset=time.time(),
    )
    batches = (next(record_batches(float("inf"))) for _ in range(20))
    return [(b"".join(one.body), one.rows) for batch in batches for one, _ in batcher.add(batch, 0.0)]


def official_sync(endpoints: str, seconds: float) -> float:
    """The official client's `send`, one message after the other."""

    def run(producer: Any, message: Callable[[int], Any], until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            producer.send(message(count))
            count += 1
        return count

    return official(endpoints, seconds, run)


def official_async(endpoints: str, seconds: float) -> float:
    """The official client's `send_async`, with 64 in flight."""

    def run(producer: Any, message: Callable[[int], Any], until: float) -> int:
        count, room = 0, threading.Semaphore(64)

        def done(future: Any) -> None:
            room.release()
            future.result()

        while time.perf_counter() < until:
            room.acquire()
            producer.send_async(message(count)).add_done_callback(done)
            count += 1
        for _ in range(64):
            room.acquire()
        return count

    return official(endpoints, seconds, run)


def official(endpoints: str, seconds: float, run: Callable[[Any, Callable[[int], Any], float], int]) -> float:
    from rocketmq import ClientConfiguration, Credentials, Message, Producer

    def message(number: int) -> Any:
        built = Message()
        built.topic, built.body, built.tag, built.keys = TOPIC, BODY, "tag", f"key-{number:06}"
        return built

    producer = Producer(ClientConfiguration(endpoints, Credentials()), (TOPIC,))
    producer.startup()
    try:
        run(producer, message, time.perf_counter() + 0.5)
        began = time.perf_counter()
        count = run(producer, message, began + seconds)
        return count / (time.perf_counter() - began)
    finally:
        producer.shutdown()


CONTESTANTS: dict[str, Callable[[str, float], float]] = {
    "ours": ours,
    "replay": replay,
    "official sync": official_sync,
    "official async": official_async,
}


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure everything here."""
    from rocketmq_spark import LocalCluster, Producer

    with LocalCluster(proxy=True, broker_properties=FORGETFUL) as cluster:
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            admin.create_topic("TBW102", TOPIC, 8)

        def measure(name: str, seconds: float = seconds) -> float:
            await_rest(cluster)
            return float(apart("tests.benchmarks.bench_grpc", name, cluster.endpoints, seconds, within=seconds + 120))

        # The JVMs compile what all of them use: figures go on rising for half a minute.
        for name in CONTESTANTS:
            measure(name, 12.0)
        taken = in_turns(list(CONTESTANTS), rounds, measure)
    best = best_of(taken["official sync"], taken["official async"])
    yield Figure("over gRPC, against rocketmq-python-client's best", ratios(taken["ours"], best), 100)
    yield Figure("over gRPC, against a replay of the same bytes", ratios(taken["ours"], taken["replay"]), 0.8)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _, _, contestant, address, length = sys.argv
        print(json.dumps(CONTESTANTS[contestant](address, float(length))), flush=True)
        os._exit(0)  # the official client leaves threads that never end
    show(figures, sys.argv[1:], 5, 4.0)
