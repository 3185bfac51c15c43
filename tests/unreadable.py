"""Messages that brokers store and no client can read."""

from __future__ import annotations

import functools
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocketmq_spark import Admin
from rocketmq_spark.compression import MAX_DECOMPRESSED
from rocketmq_spark.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.transport.base import SendRequest
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.records import encode_batch, encode_single
from tests.contract import Outcomes
from tests.sharing import SharedCluster
from tests.waiting import PATIENCE, wait_for
from tests.writes import messages_in


@functools.cache
def bomb() -> bytes:
    """Return a body of 65 KiB that expands to one byte more than a reader allows."""
    stream = zlib.compressobj()
    pieces = [stream.compress(bytes(MAX_DECOMPRESSED // 64)) for _ in range(64)]
    return b"".join([*pieces, stream.compress(b"x"), stream.flush()])


# Body and sysFlag of each: not ZLIB, a compression type that does not exist, a bomb.
UNREADABLE: Sequence[tuple[Callable[[], bytes], int]] = (
    (lambda: b"fifteen bytes..", 0x301),
    (lambda: b"type seven", 0x701),
    (bomb, 0x301),
)
# An inner batch that is cut off: only topics for inner batches take it.
INNER = (lambda: encode_batch([Message("", b"cut off")])[:-1], 0xC0)


def fill(cluster: SharedCluster, topic: str, *, inner: bool = False) -> list[tuple[bytes, int]]:
    """Make a topic, and store each of `UNREADABLE` between two readable messages in one of its queues.

    Parameters
    ----------
    cluster : SharedCluster
    topic : str
    inner : bool, default False
        The topic is for inner batches, and one of these is unreadable, too.

    Returns
    -------
    list of (bytes, int)
        Body and sysFlag at each offset.
    """
    broker = cluster.brokers[0]
    with Admin(cluster.name_server) as admin:
        admin.create_topic(topic, 1, inner=inner)
    bodies: list[tuple[bytes, int]] = []
    for make_body, sys_flag in (*UNREADABLE, INNER) if inner else UNREADABLE:
        bodies += [(b"readable %d" % len(bodies), 0), (make_body(), sys_flag)]
    bodies.append((b"readable %d" % len(bodies), 0))
    send(cluster, MessageQueue(topic, broker.name, 0), bodies)
    return bodies


def send(cluster: SharedCluster, queue: MessageQueue, bodies: Sequence[tuple[bytes, int]]) -> None:
    """Store bodies with their sysFlags in a queue of the first broker, one after the other."""
    messages = [(Message(queue.topic, body, 0, {"TAGS": "a"}), sys_flag) for body, sys_flag in bodies]
    _send(cluster, queue, [replace(encode_single(message), sys_flag=sys_flag) for message, sys_flag in messages])


def send_items(cluster: SharedCluster, queue: MessageQueue, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Store bodies with their property strings, of any bytes, as one batch."""
    body = b"".join(
        struct.pack(">5i", 22 + len(body) + len(text), 0, 0, 0, len(body)) + body + struct.pack(">h", len(text)) + text
        for body, text in items
    )
    _send(cluster, queue, [EncodedBatch(queue.topic, (body,), len(items), len(body))])


def _send(cluster: SharedCluster, queue: MessageQueue, batches: Sequence[EncodedBatch]) -> None:
    before = messages_in(cluster.name_server, queue.topic)
    with RemotingTransport([cluster.name_server]) as transport:
        for encoded in batches:
            outcomes = Outcomes()
            address = cluster.brokers[0].address
            request = SendRequest(encoded, queue, address, "pg", "TBW102", 4, int(time.time() * 1000))
            transport.send(request, PATIENCE, outcomes)
            (outcome,) = outcomes.wait(1)
            assert outcome.error is None, outcome.error
    wait_for(lambda: messages_in(cluster.name_server, queue.topic) == before + sum(one.rows for one in batches))
