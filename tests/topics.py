"""Topics of a type, made before anybody names them to a proxy."""

from __future__ import annotations

import time

from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.errors import TopicRouteStaleException
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.peer import PATIENCE
from tests.sharing import SharedCluster


def create_topic(
    cluster: LocalCluster | SharedCluster, topic: str, message_type: str, queues: int = 2, *, inner: bool = False
) -> str:
    """Create a topic on all brokers of a cluster, and return its name once the name server knows it of each.

    A proxy creates no topic, and remembers for a while that it has not found one. To an `inner` one, a batch can be
    stored as one unit.
    """
    attributes = f"+message.type={message_type}" + (",+queue.type=BatchCQ" if inner else "")
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, queues, 6, PATIENCE, attributes=attributes)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if len(transport.query_route(topic, PATIENCE).broker_datas) == len(cluster.brokers):
                    return topic
            except TopicRouteStaleException:
                pass  # The name server learns of it in a moment.
            assert time.monotonic() < deadline
            time.sleep(0.1)
