"""Sends over gRPC one by one, and what is stored of them."""

from __future__ import annotations

import time

from rocketmq_spark.message import EncodedBatch, MessageQueue, SendOutcome, SendRequest
from rocketmq_spark.message_ext import MessageExt
from rocketmq_spark.transport.grpc import GrpcTransport
from tests.outcomes import Outcomes
from tests.reading import read_topic
from tests.waiting import PATIENCE


def request(endpoint: str, encoded: EncodedBatch) -> SendRequest:
    queue = MessageQueue(encoded.topic, endpoint, 0)
    return SendRequest(encoded, queue, endpoint, "pg", "TBW102", 4, int(time.time() * 1000))


def send(transport: GrpcTransport, *encoded: EncodedBatch) -> list[SendOutcome]:
    """Send, each when the one before it is answered; return the outcomes."""
    outcomes = Outcomes()
    for number, one in enumerate(encoded, 1):
        transport.send(request(transport.endpoints[0], one), PATIENCE, outcomes)
        outcomes.wait(number)
    return outcomes


def stored(name_server: str, topic: str, count: int) -> dict[bytes, MessageExt]:
    found = read_topic(name_server, topic, count)
    assert len(found) == count
    return {message.body: message for message in found}
