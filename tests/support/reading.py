"""Reads a topic with single pulls: the reference that tests count by."""

from __future__ import annotations

import functools
import struct
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rocketmq_spark import Admin
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.protocol.compression import MAX_DECOMPRESSED
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.headers import PullMessageRequestHeader
from rocketmq_spark.protocol.remoting.records import decode_records, encode_batch, encode_single
from rocketmq_spark.protocol.remoting.responses import PullMessageResponseHeader
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.contract import Outcomes
from tests.support.processes import PATIENCE, wait_for
from tests.support.writes import messages_in


def read_topic(
    name_server: str,
    topic: str,
    expected: int = 0,
    *,
    key: Callable[[MessageExt], Hashable] = id,
    within: float = 20.0,
    **settings: Any,
) -> list[MessageExt]:
    """Return every message of a topic, once `expected` different ones are visible or `within` seconds are over.

    A broker builds its queues in the background, so acknowledged messages become visible a little later. Messages with
    equal `key` count once. `settings` are keyword arguments of the transport.
    """
    transport = RemotingTransport([name_server], **settings)
    try:
        info = publish_info_of(topic, transport.query_route(topic, 5.0))
        found: dict[MessageQueue, list[MessageExt]] = {queue: [] for queue in info.queues}
        deadline = time.monotonic() + within

        def read_on(queue: MessageQueue) -> None:
            address = info.addresses[queue.broker_name]
            end = transport.max_offset(queue, address, 5.0)
            found[queue] += read_queue(transport, address, queue, len(found[queue]), end)

        with ThreadPoolExecutor(8) as pool:
            while True:
                list(pool.map(read_on, info.queues))
                messages = [message for queue in info.queues for message in found[queue]]
                if len(set(map(key, messages))) >= expected or time.monotonic() > deadline:
                    return messages
                time.sleep(0.1)
    finally:
        transport.close()


def read_queue(
    transport: RemotingTransport, address: str, queue: MessageQueue, offset: int, end: int
) -> Iterator[MessageExt]:
    """Yield the messages of a queue from one offset up to another, or up to the first that cannot be pulled yet."""
    while offset < end:
        header = PullMessageRequestHeader(
            consumer_group="test-reader",
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=2000,
            broker_name=queue.broker_name,
        )
        answer = transport.client.invoke(address, RequestCode.PULL_MESSAGE, header.to_ext_fields(), b"", 10.0)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            # The maximum offset of a compaction topic counts messages that are not in its compaction log yet.
            return
        assert answer.code == ResponseCode.SUCCESS, f"{queue} at {offset} of {end}: {answer.code} {answer.remark}"
        yield from decode_records(answer.body)
        offset = PullMessageResponseHeader.from_ext_fields(answer.ext_fields).next_begin_offset


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
    """Create a topic with one queue, and store each of `UNREADABLE` between two readable messages.

    With `inner`, the topic is for inner batches, and also gets an unreadable one. Returns body and sysFlag of each
    offset.
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
    """Store bodies with their sysFlags in a queue of the first broker, in order."""
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
