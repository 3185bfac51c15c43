"""Fixtures of several folders of unit tests: a fake cluster, requests, and a list of outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.model.message import Buffer, EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.records import encode_batch
from rocketmq_spark.testing import BrokerSettings, FakeCluster
from tests.support.contract import Outcomes
from tests.support.peer import refused_address

FIGURES = {
    "brokerVersionDesc": "V5_5_0",
    "commitLogDiskRatio": "0.31",
    "commitLogDiskRatio_/store": "0.42",
    "msgPutTotalTodayNow": "120",
    "msgPutTotalTodayMorning": "20",
    "msgGetTotalTodayNow": "7",
    "msgGetTotalTodayMorning": "7",
    "bootTimestamp": "1700000000000",
    "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
}


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    """A cluster whose name server knows two brokers: `a` answers, `gone` does not.

    Topic `orders`: two queues on `a`, which hold three messages; topic `half`: one queue there, one on `gone`.
    """
    with FakeCluster(["a"], settings=lambda: BrokerSettings(auto_create_topic=False)) as cluster:
        server, broker = cluster.name_servers[0], cluster.brokers["a"]
        cluster.create_topic("orders", 2, attributes={"message.type": "FIFO", "queue.type": "BatchCQ"})
        cluster.create_topic("half", 1)
        alive = BrokerData("a", {0: broker.address}, "DefaultCluster")
        gone = BrokerData("gone", {0: refused_address()}, "DefaultCluster")
        server.routes["half"] = TopicRouteData((QueueData("a", 1, 1, 6), QueueData("gone", 1, 1, 4)), (alive, gone))
        broker.figures.update(FIGURES)
        for queue_id, bodies in enumerate(([b"one", b"three \xff"], ["zwei ü".encode()])):
            messages = [
                Message.of("orders", body, tags=f"t{queue_id}", keys="k", properties={"colour": "red"})
                for body in bodies
            ]
            broker.storage.store.put(MessageQueue("orders", "a", queue_id), messages, 1_700_000_000.5)
        yield cluster


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture
def request_to() -> Callable[..., SendRequest]:
    def make(address: str, body: Buffer | tuple[Buffer, ...] = b"hello", **changes: Any) -> SendRequest:
        pieces = body if isinstance(body, tuple) else (body,)
        queue = changes.pop("queue", MessageQueue("orders", "broker-a", 0))
        batch = EncodedBatch(
            topic=queue.topic,
            body=pieces,
            rows=changes.pop("rows", 1),
            nbytes=sum(map(len, pieces)),
            batch=changes.pop("batch", False),
            properties=changes.pop("properties", ""),
            flag=changes.pop("flag", 0),
            sys_flag=changes.pop("sys_flag", 0),
        )
        return SendRequest(batch, queue, address, "pg", "TBW102", 4, 1_700_000_000_000, **changes)

    return make


@pytest.fixture
def batch_to(request_to: Callable[..., SendRequest]) -> Callable[..., SendRequest]:
    def make(address: str, *bodies: bytes, **changes: Any) -> SendRequest:
        body = encode_batch([Message("orders", item) for item in bodies])
        return request_to(address, body, rows=len(bodies), batch=True, **changes)

    return make
