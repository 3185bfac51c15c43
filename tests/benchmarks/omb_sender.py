"""The drivers of `bench_omb` in Python: send messages when they are due, whether or not others are acknowledged.

Run: python -m tests.benchmarks.omb_sender DRIVER ADDRESS TOPIC BYTES, then lines "BEGAN RATE COUNT FILE". Each answer
is a line of JSON. FILE gets the times of the sends, and then those of the acknowledgements. ``java/OpenLoop.java`` does
the same.

A body begins with the time at which its message is due. A run ends early after the first error, or when the sender is
one second behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.benchmarks.omb_results import SECOND, due_at, due_by

# The sender sleeps at least so long, because waking up for each message would take a processor.
_TICK = 250_000
_BEHIND = 1
_PATIENCE = 15.0


class Log:
    """The times of a run's messages, and its errors."""

    def __init__(self, began: int, rate: int, count: int) -> None:
        self.began, self.rate, self.count = began, rate, count
        self.sent, self.acknowledged = [0] * count, [0] * count
        self.errors: list[str] = []
        # Callbacks of several threads append to it, which is atomic.
        self.done: list[int] = []

    def end(self, number: int, future: Any) -> None:
        """Take the outcome of a send."""
        now = time.monotonic_ns()
        if future.cancelled() or future.exception() is not None:
            self.errors.append("cancelled" if future.cancelled() else repr(future.exception()))
        else:
            self.acknowledged[number] = now
        self.done.append(number)

    def save(self, file: str, number: int) -> dict[str, Any]:
        """Write the times of the first `number` messages, and return the answer."""
        with open(file, "wb") as out:
            array("q", self.sent[:number]).tofile(out)
            array("q", self.acknowledged[:number]).tofile(out)
        error = self.errors[0] if self.errors else ""
        return {"errors": len(self.errors), "error": error, "pending": number - len(self.done)}


def pace(log: Log, send: Callable[[int, int], object]) -> int:
    """Call ``send(first, end)`` when these messages are due, and return how many messages were sent."""
    number = 0
    while number < log.count:
        elapsed = time.monotonic_ns() - log.began
        if elapsed < 0:
            time.sleep(-elapsed / SECOND)
            continue
        due = min(due_by(elapsed, log.rate), log.count)
        if log.errors or due - len(log.done) > _BEHIND * log.rate:
            break
        if due > number:
            send(number, due)
            number = due
        rest = int(due_at(number, log.rate)) + log.began - time.monotonic_ns()
        time.sleep(max(rest, _TICK) / SECOND)
    return number


def burst(log: Log, message: Callable[[bytes], Any], send: Callable[[Any], Any], padding: bytes) -> Callable[..., None]:
    """Return the function that sends messages by number; `send` returns a future."""

    def send_all(first: int, end: int) -> None:
        for number in range(first, end):
            due = log.began + int(due_at(number, log.rate))
            log.sent[number] = time.monotonic_ns()
            try:
                future = send(message(due.to_bytes(8, "big") + padding))
            except Exception as exc:  # A refused send is an outcome, whatever its class.
                log.errors.append(repr(exc))
                log.done.append(number)
            else:
                future.add_done_callback(partial(log.end, number))

    return send_all


def await_outcomes(log: Log, number: int) -> None:
    """Wait until all sends have ended, at most `_PATIENCE`."""
    deadline = time.monotonic() + _PATIENCE
    while len(log.done) < number and time.monotonic() < deadline:
        time.sleep(0.01)


def serve(start: Callable[[Log], Callable[[int, int], object]]) -> None:
    """Execute the lines of stdin; `start` returns how a run sends."""
    for line in sys.stdin:
        began, rate, count, file = line.split()
        log = Log(int(began), int(rate), int(count))
        number = pace(log, start(log))
        await_outcomes(log, number)
        print(json.dumps(log.save(file, number)), flush=True)


def producer(address: str, topic: str, padding: bytes) -> None:
    """`Producer.send_async`."""
    from rocketmq_spark import Message, Producer

    with Producer("omb-producer", name_server=address) as sender:
        serve(lambda log: burst(log, partial(Message.of, topic), sender.send_async, padding))


def asyncio_producer(address: str, topic: str, padding: bytes, *, over_grpc: bool = False) -> None:
    """`aio.Producer.send`; another thread tells the event loop when messages are due, as a network would."""
    from rocketmq_spark import Message, aio

    async def run() -> None:
        where: dict[str, Any] = {"endpoints": address} if over_grpc else {"name_server": address}
        loop = asyncio.get_running_loop()

        def start(log: Log) -> Callable[[int, int], object]:
            # Over gRPC, messages without keys share no request.
            message = partial(Message.of, topic, keys="k" if over_grpc else None)
            return partial(loop.call_soon_threadsafe, burst(log, message, sender.send, padding))

        async with aio.Producer("omb-aio", **where) as sender:
            await asyncio.to_thread(serve, start)

    asyncio.run(run())


def official(address: str, topic: str, padding: bytes) -> None:
    """`send_async` of rocketmq-python-client, through a proxy."""
    from rocketmq import ClientConfiguration, Credentials, Message, Producer

    def message(body: bytes) -> Any:
        built = Message()
        built.topic, built.body = topic, body
        return built

    sender = Producer(ClientConfiguration(address, Credentials()), (topic,))
    sender.startup()
    serve(lambda log: burst(log, message, sender.send_async, padding))


SENDERS: dict[str, Callable[[str, str, bytes], None]] = {
    "producer": producer,
    "aio": asyncio_producer,
    "aio-grpc": partial(asyncio_producer, over_grpc=True),
    "python-client": official,
}

if __name__ == "__main__":
    _, name, where_to, its_topic, size = sys.argv
    SENDERS[name](where_to, its_topic, b"x" * (int(size) - 8))
    sys.stdout.flush()
    if threading.active_count() > 1:
        os._exit(0)  # the official client leaves threads that never end
