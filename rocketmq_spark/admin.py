"""Questions to a cluster that a person asks: how many messages does a topic hold, and where.

Follows ``MQAdminImpl.java`` (maxOffset, minOffset); every master that the route names is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rocketmq_spark.message import MessageQueue
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.transport.remoting import RemotingTransport


@dataclass(frozen=True, slots=True)
class QueueOffsets:
    """What one queue holds.

    Parameters
    ----------
    queue : MessageQueue
    min_offset : int
        Of the oldest message still there.
    max_offset : int
        Of the next message to come.
    """

    queue: MessageQueue
    min_offset: int
    max_offset: int

    @property
    def messages(self) -> int:
        """How many messages are in the queue now."""
        return self.max_offset - self.min_offset


def queue_offsets(name_servers: Sequence[str], topic: str, *, timeout: float = 3.0) -> list[QueueOffsets]:
    """Ask every broker of a topic for the offsets of its queues.

    A message shows up here a moment after its send was acknowledged: a broker builds its queues in the background.

    Parameters
    ----------
    name_servers : sequence of str
        ``host:port`` each.
    topic : str
    timeout : float, default 3.0
        Seconds, for each question.

    Returns
    -------
    list of QueueOffsets
        By broker name, then queue id; writable queues.

    Raises
    ------
    RemotingException
        A server can't be asked.
    TopicRouteStaleException
        No name server knows the topic.
    """
    transport = RemotingTransport(name_servers)
    try:
        info = publish_info_of(topic, transport.query_route(topic, timeout))
        return [
            QueueOffsets(
                queue,
                # An empty queue of the type BatchCQ answers -1.
                max(0, transport.min_offset(queue, info.addresses[queue.broker_name], timeout)),
                transport.max_offset(queue, info.addresses[queue.broker_name], timeout),
            )
            for queue in info.queues
        ]
    finally:
        transport.close()
