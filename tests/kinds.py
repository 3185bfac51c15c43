"""A message of every kind, sent by the official producer, and what it knows of them: what every reader must see."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.compression import CompressionType
from tests.java import Java, Line, line_of, un64
from tests.sharing import SharedCluster
from tests.topics import create_topic

# A Java producer compresses what is longer than 4 KiB.
LONG_BODY = b" ".join(random.Random(5).choices([b"queue", b"topic", b"broker", b"a message of many words"], k=500))

# Stored twice: first in a topic of the broker's own, which is the one that a producer is told of.
_STORED_AGAIN = ("delayed", "timer", "transaction")


class Topics(NamedTuple):
    """Topics that take, together, every kind."""

    normal: str
    fifo: str
    long: str
    inner: str


def create_topics(cluster: LocalCluster | SharedCluster, name: str) -> Topics:
    """Create topics on all brokers whose names begin with `name`, a text of at most 100 characters."""
    return Topics(
        create_topic(cluster, f"{name}-normal", "NORMAL"),
        create_topic(cluster, f"{name}-fifo", "FIFO"),
        create_topic(cluster, f"{name}-long".ljust(120, "x"), "NORMAL"),
        create_topic(cluster, f"{name}-inner", "NORMAL", inner=True),
    )


def send_every_kind(java: Java, name_server: str, topics: Topics) -> dict[str, list[Line]]:
    """Send, and return the messages of each kind as far as their producer knows them.

    Each has ``topic``, ``body`` (bytes, not compressed), ``properties`` (those that were given), ``flag``, ``msgId``,
    ``brokerName``, ``queueId``, and, if it is stored in its own topic at once, ``queueOffset`` and ``offsetMsgId``.
    Delayed ones show up a second or two later.
    """
    requests = dict(_requests(topics))
    results = java.send(name_server, requests.values())
    assert {"SEND_OK"} == {result["status"] for result in results}
    return {
        kind: list(_sent(kind, request["messages"], result))
        for (kind, request), result in zip(requests.items(), results, strict=True)
    }


def _requests(topics: Topics) -> Iterator[tuple[str, Line]]:
    def one(body: bytes, properties: dict[str, str] | None = None, flag: int = 0, topic: str = topics.normal) -> Line:
        return line_of(topic, body, properties, flag)

    yield "plain", {"messages": [one(b"plain")]}
    yield "keys and tags", {"messages": [one(b"keys and tags", {"KEYS": "k1 k2", "TAGS": "a-tag"})]}
    own = {"number": "1", "gr\u00fc\u00df": "dich \U0001f600", "empty line": "a\nb"}
    yield "properties", {"messages": [one(b"properties", own)]}
    yield "flag", {"messages": [one(b"flag", flag=-7)]}
    yield "one byte", {"messages": [one(b"\0")]}
    for codec in CompressionType:
        yield codec.name, {"messages": [one(LONG_BODY, {"TAGS": codec.name})], "compressType": codec.name}
    members = [(f"member {place}".encode(), {"KEYS": f"k{place}", "TAGS": f"t{place}"}, place) for place in range(3)]
    yield "batch", {"messages": [one(*member) for member in members], "batch": True}
    yield "delayed", {"messages": [one(b"delayed", {"DELAY": "1"})]}
    yield "timer", {"messages": [{**one(b"timer"), "deliverInMs": 1500}]}
    yield "transaction", {"messages": [one(b"transaction", {"KEYS": "order-1"})], "transaction": "COMMIT_MESSAGE"}
    for name, topic in (("ordered", topics.normal), ("fifo", topics.fifo)):
        yield name, {"messages": [one(name.encode(), {"__SHARDINGKEY": "h\u00e9"}, topic=topic)], "hashKey": "h\u00e9"}
    yield "long topic", {"messages": [one(b"long topic", topic=topics.long)]}
    yield "inner batch", {"messages": [one(*member, topic=topics.inner) for member in members], "batch": True}


def _sent(kind: str, messages: list[Line], result: Line) -> Iterator[Line]:
    at_once = kind not in _STORED_AGAIN
    offset_ids = (result["offsetMsgId"] or "").split(",")
    for place, (message, unique_id) in enumerate(zip(messages, result["uniqKeys"], strict=True)):
        line = {name: message[name] for name in ("topic", "properties", "flag")}
        line |= {name: result[name] for name in ("brokerName", "queueId")}
        line |= {"body": un64(message["body"]), "msgId": unique_id}
        if at_once:
            # All of what is stored as one unit is at one place of the log.
            offset_id = offset_ids[min(place, len(offset_ids) - 1)]
            line |= {"queueOffset": result["queueOffset"] + place, "offsetMsgId": offset_id}
        yield line
