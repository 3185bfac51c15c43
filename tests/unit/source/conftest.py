"""Scripted clusters for readers, with a manual clock."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.route import BrokerData, TopicRouteData
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.protocol.remoting.records import encode_record
from rocketmq_spark.source.offset_resolver import OffsetResolver
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.stream_offsets import StreamOffsets
from rocketmq_spark.source.topic_queues import TopicQueues
from tests.support.scripted import ManualClock, ScriptedTransport, route

A0, A1, B0, B1 = QUEUES = [MessageQueue("orders", broker, number) for broker in "ab" for number in (0, 1)]


def stored(
    offset: int, body: bytes = b"x", sys_flag: int = 0, time: int = 1, queue: MessageQueue = A0, **properties: str
) -> bytes:
    """Return the record of a message as brokers store it."""
    message = MessageExt(
        topic=queue.topic,
        body=body,
        flag=0,
        properties=properties,
        queue_id=queue.queue_id,
        queue_offset=offset,
        physical_offset=offset * 100,
        sys_flag=sys_flag,
        born_timestamp=1,
        born_host="127.0.0.1:1",
        store_timestamp=time,
        store_host="127.0.0.1:2",
        reconsume_times=0,
        prepared_transaction_offset=0,
        body_crc=zlib.crc32(body) & 0x7FFFFFFF,
    )
    return encode_record(message)


class Reader:
    """A reader's pieces on one scripted cluster: topic `orders`, two queues of broker `a` and two of `b`."""

    def __init__(self, *, threaded: bool = False, **options: Any) -> None:
        self.clock = ManualClock(1_000.0)
        self.options = SourceOptions.of(**{"name_server": ("n:9876",), "subscribe": ("orders",), **options})
        self.transport = ScriptedTransport({"orders": route({"a": 2, "b": 2})}, clock=self.clock, threaded=threaded)
        self.queues = TopicQueues(self.options, self.transport, self.clock)
        self.slept: list[float] = []
        self.while_asleep: Callable[[], object] = lambda: None
        self.requests = QueueRequests(self.queues, self.clock, self.sleep)
        self.resolver = OffsetResolver(self.requests)
        self.cluster = StreamOffsets(self.options, self.transport, self.clock, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.while_asleep()
        self.clock.advance(seconds)

    def fill(self, counts: Mapping[MessageQueue, int]) -> None:
        for queue, count in counts.items():
            self.transport.keep(queue, [Message(queue.topic, b"%d" % number) for number in range(count)])

    def at(self, times: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        return self.resolver.at(times, self.resolver.latest(times))

    def addresses(self, broker: str, addresses: Mapping[int, str], topic: str = "orders") -> None:
        """Put these addresses of a broker into the route."""
        old = self.transport.routes[topic]
        others = [data for data in old.broker_datas if data.broker_name != broker]
        brokers = [*others, BrokerData(broker, dict(addresses))] if addresses else others
        self.transport.routes[topic] = TopicRouteData(old.queue_datas, tuple(brokers))

    def asked(self, call: str) -> list[tuple[Any, ...]]:
        return [request[1:] for request in self.transport.calls if request[0] == call]


Make = Callable[..., Reader]


@pytest.fixture
def make_reader() -> Iterator[Make]:
    readers: list[Reader] = []

    def make(**options: Any) -> Reader:
        readers.append(Reader(**options))
        return readers[-1]

    yield make
    for one in readers:
        one.transport.close()
