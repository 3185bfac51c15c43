"""Fake brokers in a process of their own, which acknowledge every send and store nothing.

Run: python -m tests.benchmarks.acknowledging --run BROKERS QUEUES TOPICS [MESSAGES]. It prints the name server's
address as JSON, and runs until it is killed. QUEUES are those of a topic on each broker. Each queue has MESSAGES
messages to read.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_broker import SENDS, FakeBroker
from rocketmq_spark.testing.fake_replies import Channel, response_to
from rocketmq_spark.testing.fake_sockets import Server
from tests.benchmarks.contest import running

TOPIC = "bench"
# The length of the offset ids of a real broker.
_ID = "7F00000100002A9F0000000000000000"


def topic_names(topics: int) -> list[str]:
    """Return the names of the topics."""
    return [TOPIC, *(f"{TOPIC}-{number}" for number in range(1, topics))]


def ids_of(body: memoryview) -> str:
    """Return as many offset ids as a batch has messages; each begins with its length."""
    at = count = 0
    while at < len(body):
        at += int.from_bytes(body[at : at + 4], "big")
        count += 1
    return ",".join([_ID] * count)


class Acknowledging:
    """A broker that executes all requests but sends."""

    def __init__(self, broker: FakeBroker) -> None:
        self.disconnected = broker.disconnected
        self._execute = broker.receive

    def receive(self, command: RemotingCommand, channel: Channel) -> None:
        """Take a request."""
        if command.code in SENDS:
            fields = {"msgId": ids_of(memoryview(command.body)), "queueId": "0", "queueOffset": "0"}
            channel.send(response_to(command, ext_fields=fields))
        else:
            self._execute(command, channel)


class AcknowledgingCluster(FakeCluster):
    """A cluster of such brokers."""

    def _serve(self, address: str, server: Server) -> None:
        super()._serve(address, Acknowledging(server) if isinstance(server, FakeBroker) else server)


@contextlib.contextmanager
def brokers(count: int, queues: int, topics: int = 1, messages: int = 0) -> Iterator[str]:
    """Run the process, and return the address of its name server."""
    with running("tests.benchmarks.acknowledging", count, queues, topics, messages) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def main(count: int, queues: int, topics: int, messages: int) -> None:
    names = topic_names(topics)
    with AcknowledgingCluster(count, topics=dict.fromkeys(names, queues)) as cluster:
        for name, broker in cluster.brokers.items():
            for queue in (MessageQueue(topic, name, number) for topic in names for number in range(queues)):
                broker.storage.store.put(queue, [Message(queue.topic, b"x" * 100)] * messages, time.time())
        print(json.dumps(cluster.name_server), flush=True)
        signal.pause()


if __name__ == "__main__":
    main(*map(int, sys.argv[2:]))
