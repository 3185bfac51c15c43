"""Reads a topic back over the wire, plainly: what the tests count by."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.codes import RequestCode, ResponseCode
from rocketmq_spark.wire.headers import PullMessageRequestHeader
from rocketmq_spark.wire.records import decode_records
from rocketmq_spark.wire.response_headers import PullMessageResponseHeader


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

    A broker builds its queues in the background: what it has acknowledged shows up a little later, in the order of its
    storing. Where rows may repeat, `key` tells which are the same. `settings` are the transport's.
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
        answer = transport.invoke(address, RequestCode.PULL_MESSAGE, header.to_ext_fields(), b"", 10.0)
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            # The maximum offset of a compaction topic counts messages that are not in its compaction log yet.
            return
        assert answer.code == ResponseCode.SUCCESS, f"{queue} at {offset} of {end}: {answer.code} {answer.remark}"
        yield from decode_records(answer.body)
        offset = PullMessageResponseHeader.from_ext_fields(answer.ext_fields).next_begin_offset
