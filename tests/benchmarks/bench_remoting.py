"""Rows per second to a real broker: `Producer.send_arrow`, the Java client, and a replay of ready-made requests.

Run: make bench (python -m tests.benchmarks.bench_remoting [rounds] [seconds a run])

All send to the 8 queues of one topic of one broker. The Java client sends collections of 200, 500 and 2,000 messages
from 1 and from 4 threads, and single messages that it joins by itself (``setAutoBatch``). The two best variants of a
first run take part, and each round counts the better one. The replay sends requests that `RemotingBatcher` encoded
beforehand, over one socket, with the same number in flight.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.contest import FORGETFUL, Figure, apart, await_rest, best_of, in_turns, ratios, rows_of, show
from tests.benchmarks.java_client import JavaClient

TOPIC = "bench"
QUEUES = 8
# Rows of a record batch, as Spark makes them.
ROWS = 10_000
WINDOW = 8
AUTO = -1
THREADS_AND_BATCHES = [(threads, batch) for threads in (1, 4) for batch in (200, 500, 2000, AUTO)]
WARM_UP = 1.0


def record_batches(nbytes: int, until: float, *, delayed: bool = False) -> Iterator[Any]:
    """Yield rows until `until` (perf_counter)."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "body": pa.array([b"x" * nbytes] * ROWS),
        "tags": pa.array(["tag"] * ROWS),
        "keys": pa.array([f"key-{row + 1_000_000}" for row in range(ROWS)]),
    }
    if delayed:
        columns["delayTimeLevel"] = pa.array([18] * ROWS, pa.int32())
    batch = pa.record_batch(columns)
    while time.perf_counter() < until:
        yield batch


def ours(name_server: str, nbytes: int, seconds: float, *, delayed: bool = False) -> float:
    """`Producer.send_arrow`."""
    from rocketmq_spark import Producer

    with Producer("bench-ours", name_server=name_server) as producer:
        producer.send_arrow(record_batches(nbytes, time.perf_counter() + WARM_UP, delayed=delayed), topic=TOPIC)
        began = time.perf_counter()
        summary = producer.send_arrow(record_batches(nbytes, began + seconds, delayed=delayed), topic=TOPIC)
        took = time.perf_counter() - began
    return rows_of(summary) / took


def replay(name_server: str, nbytes: int, seconds: float) -> float:
    """Ready-made requests over a bare socket: written while the window has room, else answers are awaited."""
    frames = encoded_requests(nbytes)
    address = os.environ["BENCH_BROKER"]
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pump(sock, frames, WARM_UP)
        began = time.perf_counter()
        rows = pump(sock, frames, seconds)
        return rows / (time.perf_counter() - began)


def pump(sock: socket.socket, frames: list[tuple[list[memoryview], int]], seconds: float) -> int:
    rows = number = waiting = 0
    pending = b""
    until = time.perf_counter() + seconds
    while (more := time.perf_counter() < until) or waiting:
        while more and waiting < WINDOW:
            pieces, count = frames[number % len(frames)]
            write(sock, pieces)
            number, waiting, rows = number + 1, waiting + 1, rows + count
        pending += sock.recv(1 << 16)
        while len(pending) >= 4 and len(pending) >= 4 + (length := int.from_bytes(pending[:4], "big")):
            if b'"code":0' not in pending[: 4 + length]:
                raise SystemExit(f"a request failed: {pending[: 4 + length]!r}")
            pending, waiting = pending[4 + length :], waiting - 1
    return rows


def write(sock: socket.socket, given: list[memoryview]) -> None:
    pieces = list(given)
    while pieces:
        sent = sock.sendmsg(pieces)
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        if sent:
            pieces[0] = pieces[0][sent:]


def encoded_requests(nbytes: int) -> list[tuple[list[memoryview], int]]:
    """Return requests as a write makes them, in pieces, and how many rows each has."""
    from rocketmq_spark.arrow.batcher import RemotingBatcher
    from rocketmq_spark.arrow.encoders import UniqueIds
    from rocketmq_spark.options.parsing import parse_sink_options
    from rocketmq_spark.protocol.remoting.command import RemotingCommand, encode_head
    from rocketmq_spark.protocol.remoting.headers import SendMessageRequestHeaderV2

    options = parse_sink_options({"nameServer": "127.0.0.1:1", "topic": TOPIC}, {})
    batcher = RemotingBatcher(
        options,
        partition_id=0,
        queues_of=lambda _topic: (),
        unique_ids=UniqueIds(ip=bytes(4), pid=1, wall_clock=time.time, rng=random.Random(1)),
    )
    rows = record_batches(nbytes, float("inf"))
    batches = [one for _ in range(40) for one, _ in batcher.add(next(rows), 0.0)]
    frames = []
    for number, batch in enumerate(batches):
        header = SendMessageRequestHeaderV2(
            producer_group="bench-replay",
            topic=TOPIC,
            queue_id=number % QUEUES,
            born_timestamp=int(time.time() * 1000),
            batch=True,
            broker_name="broker-0",
        ).to_ext_fields()
        body = b"".join(batch.body)
        head = encode_head(RemotingCommand(320, number, header), len(body))
        frames.append(([memoryview(head), memoryview(body)], batch.rows))
    return frames


def java_sends(java: JavaClient, name_server: str, nbytes: int, threads: int, batch: int, seconds: float) -> float:
    """Return the messages per second that the Java client has stored."""
    return float(java.run("BatchSender", name_server, TOPIC, nbytes, threads, batch, int(seconds * 1000)))


def batches(java: JavaClient, nbytes: int, rounds: int, seconds: float) -> Iterator[Figure]:
    """Batches of rows with bodies of that size."""
    from rocketmq_spark import LocalCluster, Producer

    with LocalCluster(broker_properties=FORGETFUL) as cluster:
        os.environ["BENCH_BROKER"] = cluster.brokers[0].address
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            admin.create_topic("TBW102", TOPIC, QUEUES)

        def measure(name: str) -> float:
            await_rest(cluster)
            if name.startswith("java"):
                _, threads, batch = name.split()
                return java_sends(java, cluster.name_server, nbytes, int(threads[1:]), int(batch), seconds)
            return float(
                apart(
                    "tests.benchmarks.bench_remoting", name, cluster.name_server, nbytes, seconds, within=seconds + 60
                )
            )

        # The broker's JVM compiles what all of them use: figures go on rising for half a minute.
        tried = {f"java x{threads} {batch}": 0.0 for threads, batch in THREADS_AND_BATCHES}
        for name in tried:
            tried[name] = measure(name)
            print(f"  {name} {tried[name]:,.0f}", flush=True)
        best = sorted(tried, key=lambda name: tried[name])[-2:]
        taken = in_turns(["ours", "replay", *best], rounds, measure)
    size = "1 KiB" if nbytes == 1024 else f"{nbytes}-byte"
    javas = best_of(*(taken[name] for name in best))
    wanted = 2.0 if nbytes == 100 else 1.5
    yield Figure(f"send_arrow, {size} bodies, against Java's send(Collection)", ratios(taken["ours"], javas), wanted)
    yield Figure(f"send_arrow, {size} bodies, against the wire", ratios(taken["ours"], taken["replay"]), 0.9)


def singles(java: JavaClient, rounds: int, seconds: float) -> Iterator[Figure]:
    """Rows that can't be batched."""
    from rocketmq_spark import LocalCluster, Producer

    with LocalCluster(broker_properties=FORGETFUL) as cluster:
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            admin.create_topic("TBW102", TOPIC, QUEUES)

        def measure(name: str) -> float:
            await_rest(cluster)
            if name == "java":
                return java_sends(java, cluster.name_server, 100, 1, 0, seconds)
            return float(
                apart(
                    "tests.benchmarks.bench_remoting", "delayed", cluster.name_server, 100, seconds, within=seconds + 60
                )
            )

        taken = in_turns(["ours", "java"], rounds, measure)
    yield Figure("rows with a delay, against Java's asynchronous send", ratios(taken["ours"], taken["java"]), 0.7)


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure everything here."""
    with tempfile.TemporaryDirectory() as folder:
        java = JavaClient(Path(folder))
        for nbytes in (100, 1024):
            yield from batches(java, nbytes, rounds, seconds)
        yield from singles(java, rounds, seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _, _, contestant, address, size, length = sys.argv
        if contestant == "delayed":
            print(json.dumps(ours(address, int(size), float(length), delayed=True)))
        else:
            print(json.dumps({"ours": ours, "replay": replay}[contestant](address, int(size), float(length))))
    else:
        show(figures, sys.argv[1:], 5, 4.0)
