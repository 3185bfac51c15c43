"""A name server and two brokers in one process, with real sockets: `a` answers, `gone` does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.model.route import BrokerData, QueueData, TopicRouteData
from tests.support.peer import BrokerPeer, refused_address

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
def server() -> Iterator[BrokerPeer]:
    """Topic `orders`: two queues on `a`, which hold three messages; topic `half`: one queue there, one on `gone`."""
    with BrokerPeer() as peer:
        alive = BrokerData("a", {0: peer.address}, "c")
        gone = BrokerData("gone", {0: refused_address()}, "c")
        peer.routes["orders"] = TopicRouteData((QueueData("a", 2, 2, 6),), (alive,))
        peer.routes["half"] = TopicRouteData((QueueData("a", 1, 1, 6), QueueData("gone", 1, 1, 4)), (alive, gone))
        peer.attributes["orders"] = {"message.type": "FIFO", "queue.type": "BatchCQ"}
        peer.figures.update(FIGURES)
        peer.settings["brokerPermission"] = "6"
        for queue_id, bodies in enumerate(([b"one", b"three \xff"], ["zwei ü".encode()])):
            messages = [
                Message.of("orders", body, tags=f"t{queue_id}", keys="k", properties={"colour": "red"})
                for body in bodies
            ]
            peer.store.put(MessageQueue("orders", "a", queue_id), messages, 1_700_000_000.5)
        yield peer
