"""Messages per second of the producer for asyncio, one future per message of 100 bytes, to a real broker.

Run: make bench PART=aio (python -m tests.benchmarks.bench_aio [rounds] [seconds a run])

A coroutine sends 1,000 messages and awaits each of their futures, again and again. So do 16 coroutines with 64 messages
each, as the handlers of a web server. ``aiokafka`` publishes 142,000 messages a second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator

from rocketmq_spark import LocalCluster, Message, Producer, aio
from tests.benchmarks.bench_remoting import QUEUES, TOPIC, WARM_UP
from tests.benchmarks.contest import FORGETFUL, Figure, apart, await_rest, in_turns, show

# Coroutines, messages of each, and whether messages have a tag and a key.
KINDS = {
    "one coroutine of 1,000 messages": (1, 1000, 0),
    "one coroutine of 1,000 messages with tag and key": (1, 1000, 1),
    "16 coroutines of 64 messages": (16, 64, 0),
}
BODY = b"x" * 100


async def send(name_server: str, coroutines: int, messages: int, tagged: int, seconds: float) -> float:
    """Return the messages per second."""
    tags, keys = ("new", "order-1") if tagged else (None, None)

    async def sender(until: float) -> int:
        sent = 0
        while time.perf_counter() < until:
            futures = [producer.send(Message.of(TOPIC, BODY, tags=tags, keys=keys)) for _ in range(messages)]
            for future in futures:
                await future
            sent += messages
        return sent

    async with aio.Producer("bench-aio", name_server=name_server) as producer:
        await sender(time.perf_counter() + WARM_UP)
        began = time.perf_counter()
        sent = await asyncio.gather(*[sender(began + seconds) for _ in range(coroutines)])
        return sum(sent) / (time.perf_counter() - began)


def figures(rounds: int, seconds: float) -> Iterator[Figure]:
    """Measure both kinds of callers."""
    with LocalCluster(brokers=1, broker_properties=FORGETFUL) as cluster:
        with Producer("bench-admin", name_server=cluster.name_server) as admin:
            admin.create_topic("TBW102", TOPIC, QUEUES)

        def measure(kind: str) -> float:
            await_rest(cluster)
            arguments = "send", cluster.name_server, *KINDS[kind], seconds
            return float(apart("tests.benchmarks.bench_aio", *arguments, within=seconds + 60)) / 1000

        print("  1,000 messages a second:")
        taken = in_turns(list(KINDS), rounds, measure)
    for kind, rates in taken.items():
        yield Figure(f"1,000 messages a second with asyncio, {kind}", rates)


def main(arguments: list[str]) -> None:
    if arguments[:2] == ["--run", "send"]:
        name_server, coroutines, messages, tagged, seconds = arguments[2:]
        sending = send(name_server, int(coroutines), int(messages), int(tagged), float(seconds))
        print(json.dumps(asyncio.run(sending)))
    else:
        show(figures, arguments, 5, 4.0)


if __name__ == "__main__":
    main(sys.argv[1:])
