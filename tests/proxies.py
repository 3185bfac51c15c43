"""Proxies of gRPC as the producer core sees them: one queue each, of which no answer tells the id."""

from __future__ import annotations

import math
from dataclasses import replace

from rocketmq_spark.message import SendOutcome, SendRequest
from rocketmq_spark.route_data import MASTER_ID, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.transport.base import OnOutcome
from rocketmq_spark.transport.scripted import ScriptedTransport

ENDPOINTS = ("p:8081", "q:8081")


def proxy_route(*message_types: str, endpoints: tuple[str, ...] = ENDPOINTS) -> TopicRouteData:
    """Return the route of a topic that accepts messages of these types."""
    return TopicRouteData(
        tuple(QueueData(endpoint, 1, 1, 6) for endpoint in endpoints),
        tuple(BrokerData(endpoint, {MASTER_ID: endpoint}) for endpoint in endpoints),
        message_types=frozenset(message_types),
    )


class ScriptedProxies(ScriptedTransport):
    """A scripted transport whose answers tell neither queue nor offset."""

    def send(self, request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        def told(outcome: SendOutcome) -> None:
            on_outcome(replace(outcome, queue=replace(outcome.queue, queue_id=-1), queue_offset=-1, offset_msg_id=""))

        super().send(request, timeout, told, within=within)
