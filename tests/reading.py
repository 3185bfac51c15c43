"""Reads a topic back over the wire, plainly: what the tests count by."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.codes import RequestCode, ResponseCode
from rocketmq_spark.wire.headers import PullMessageRequestHeader, PullMessageResponseHeader
from rocketmq_spark.wire.records import StoredMessage, decode_records


def read_topic(name_server: str, topic: str, expected: int = 0, *, within: float = 20.0) -> list[StoredMessage]:
    """Return every message of a topic, once at least `expected` of them are visible or `within` seconds are over."""
    transport = RemotingTransport([name_server])
    try:
        info = publish_info_of(topic, transport.query_route(topic, 5.0))
        deadline = time.monotonic() + within
        while True:
            ends = {queue: transport.max_offset(queue, info.addresses[queue.broker_name], 5.0) for queue in info.queues}
            if sum(ends.values()) >= expected or time.monotonic() > deadline:
                break
            time.sleep(0.1)

        def read(queue: MessageQueue) -> list[StoredMessage]:
            return _read_queue(transport, info.addresses[queue.broker_name], queue, ends[queue])

        with ThreadPoolExecutor(8) as pool:
            return [message for messages in pool.map(read, info.queues) for message in messages]
    finally:
        transport.close()


def _read_queue(transport: RemotingTransport, address: str, queue: MessageQueue, end: int) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    offset = 0
    while offset < end:
        header = PullMessageRequestHeader(
            consumer_group="test-reader",
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=32,
            broker_name=queue.broker_name,
        )
        answer = transport.invoke(address, RequestCode.PULL_MESSAGE, header.to_ext_fields(), b"", 10.0)
        assert answer.code == ResponseCode.SUCCESS, f"{queue} at {offset} of {end}: {answer.code} {answer.remark}"
        messages += decode_records(answer.body)
        offset = PullMessageResponseHeader.from_ext_fields(answer.ext_fields).next_begin_offset
    return messages
