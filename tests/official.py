"""RocketMQ's own clients, as readers of what we send: Java's for brokers, Java's and Python's for proxies.

Each is a process of its own. A consumer of the Python client leaves threads that never end, and importing it writes log
files into the home folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.message_const import RESERVED_PROPERTIES, SHARDING_KEY, TRANSACTION_ID
from tests.java import Java, Line, un64
from tests.sharing import SharedCluster

CLIENTS = ("java", "java over gRPC", "python over gRPC")

_WITHIN = 60.0

# Clients for proxies show these among the user's.
_NOT_THE_USERS = {*RESERVED_PROPERTIES, SHARDING_KEY, TRANSACTION_ID}

_PYTHON_READER = """
import base64, json, os, sys, threading, time, traceback
from rocketmq import ClientConfiguration, Credentials, FilterExpression, SimpleConsumer
endpoints, group, count, within, *topics = sys.argv[1:]
consumer = SimpleConsumer(
    ClientConfiguration(endpoints, Credentials()), group, {topic: FilterExpression() for topic in topics}, 5
)
consumer.startup()
found, missing = {}, threading.Semaphore(0)
def read():
    # What a call that failed has missed comes again after so many seconds, and so does what is acknowledged too late.
    for message in consumer.receive(32, 15) or ():
        line = {
            "topic": message.topic, "body": base64.b64encode(message.body).decode(), "tag": message.tag,
            "keys": sorted(message.keys), "group": message.message_group, "properties": message.properties,
            "msgId": message.message_id, "bornTimestamp": message.born_timestamp,
        }
        if found.setdefault(message.message_id, line) is line:
            missing.release()
        consumer.ack(message)
def read_on():
    while True:
        try:
            read()
        except Exception:
            traceback.print_exc()
            time.sleep(0.1)
# A call waits for one topic at one broker, and brings 32 messages at most.
for _ in range(8 * len(topics)):
    threading.Thread(target=read_on, daemon=True).start()
deadline = time.monotonic() + float(within)
for _ in range(int(count)):
    missing.acquire(timeout=max(0, deadline - time.monotonic()))
print(json.dumps(list(found.values())), flush=True)
os._exit(0)
"""


class Seen(NamedTuple):
    """What the user gave a message, as every client sees it."""

    topic: str
    body: bytes
    keys: tuple[str, ...] = ()
    tag: str | None = None
    group: str | None = None
    properties: tuple[tuple[str, str], ...] = ()


class Read(NamedTuple):
    """A message that a client has read; `born` is in epoch milliseconds."""

    seen: Seen
    id: str
    born: int


# (which client, where, topics, how many messages to wait for)
ReadWith = Callable[[str, LocalCluster | SharedCluster, Sequence[str], int], list[Read]]


def with_java(java: Java, name_server: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with the client for brokers."""
    return [_read(_as_over_grpc(line)) for line in java.read_topics(name_server, topics, count, within=_WITHIN)]


def with_java_over_grpc(java_over_grpc: Java, endpoints: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with Java's client for proxies."""
    lines = java_over_grpc.read_over_grpc(endpoints, topics, count, group=_new_group(), within=_WITHIN)
    return [_read(line) for line in lines]


def with_python_over_grpc(home: Path, endpoints: str, topics: Sequence[str], count: int) -> list[Read]:
    """Read with Python's client for proxies; `home` is where it may write."""
    command = [sys.executable, "-c", _PYTHON_READER, endpoints, _new_group(), str(count), str(_WITHIN), *topics]
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * _WITHIN, check=False)
    assert done.returncode == 0, done.stderr
    found = [_read({**line, "body": un64(line["body"])}) for line in json.loads(done.stdout)]
    assert len(found) >= count, f"{len(found)} of {count} within {_WITHIN:.0f} s: {done.stderr}"
    return found


def _new_group() -> str:
    return f"group-{uuid.uuid4().hex}"


def _as_over_grpc(line: Line) -> Line:
    properties = line["properties"]
    fields = {"keys": properties.get("KEYS", "").split(), "tag": properties.get("TAGS")}
    return {**line, **fields, "group": properties.get(SHARDING_KEY)}


def _read(line: Line) -> Read:
    own = {name: value for name, value in line["properties"].items() if name not in _NOT_THE_USERS}
    keys, properties = tuple(sorted(line["keys"])), tuple(sorted(own.items()))
    seen = Seen(line["topic"], line["body"], keys, line["tag"], line["group"], properties)
    return Read(seen, line["msgId"], line["bornTimestamp"])
