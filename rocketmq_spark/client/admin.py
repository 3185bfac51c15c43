"""The questions that a Java producer answers as an ``MQAdmin``: topics, queues, offsets, single messages.

Follows ``MQAdminImpl.java`` (spec/producer.md section 1, spec/remoting.md sections 13, 14).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from rocketmq_spark.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.errors import MQClientException, RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.message_ext import MessageExt, decode_message_id
from rocketmq_spark.names import is_system_topic
from rocketmq_spark.namespace import unwrap, wrap
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.kernel import broker_address
from rocketmq_spark.producer.route_cache import publish_info_of
from rocketmq_spark.producer.validators import check_topic
from rocketmq_spark.route_data import masters_of

_READ_WRITE = 6


class MQAdmin(ABC):
    """What a running client can be asked; topics and queues are given and returned without the namespace.

    Every method raises ``MQClientException`` outside of the running state, and over gRPC, where there is nobody to ask;
    ``RouteNotFoundException`` for a topic that no name server knows, a ``RemotingException`` where a server can't be
    asked, ``MQBrokerException`` where one refuses.
    """

    @abstractmethod
    def _running(self) -> ClientInstance:
        """Return the client instance, or refuse."""

    @property
    @abstractmethod
    def _namespace(self) -> str:
        """The namespace, empty for none."""

    @property
    @abstractmethod
    def _api_timeout(self) -> float:
        """Seconds for one question."""

    def create_topic(
        self,
        key: str,
        new_topic: str,
        queue_num: int,
        *,
        perm: int = _READ_WRITE,
    ) -> None:
        """Create or change a topic on every broker that has the topic `key`.

        Parameters
        ----------
        key : str
            An existing topic, whose brokers get the new one; ``TBW102`` is on every broker that creates topics itself.
        new_topic : str
        queue_num : int
            Read and write queues on each broker.
        perm : int, default 6
            4 to read, 2 to write.

        Raises
        ------
        MQClientException
            A name that is not allowed; or some brokers failed: the text names each.
        """
        instance = self._running()
        topic = wrap(self._namespace, new_topic)
        check_topic(topic)
        if is_system_topic(new_topic):
            raise MQClientException(f"creating topic {new_topic}: it is one of the server's own")
        route = instance.transport.query_route(wrap(self._namespace, key), self._api_timeout)
        masters = masters_of(route.broker_datas)
        failed = {}
        for name, address in sorted(masters.items()):
            try:
                instance.transport.create_topic(address, topic, queue_num, perm, self._api_timeout)
            except RocketMQError as exc:
                failed[name] = exc
        if failed or not masters:
            reasons = "; ".join(f"{name}: {exc}" for name, exc in failed.items()) or f"no broker has topic {key}"
            error = MQClientException(f"creating topic {new_topic} with {queue_num} queues: {reasons}")
            raise error from next(iter(failed.values()), None)

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that messages of a topic may go to, asking a name server.

        Raises
        ------
        MQBrokerException
            Code 17: no name server knows the topic; one that the first message would create counts as unknown.
        """
        wrapped = wrap(self._namespace, topic)
        route = self._running().transport.query_route(wrapped, self._api_timeout)
        return [replace(queue, topic=topic) for queue in publish_info_of(wrapped, route).queues]

    def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the queue's next message will get; 0 for a queue that no broker has."""
        wrapped, address = self._located(queue)
        return self._running().transport.max_offset(wrapped, address, self._api_timeout)

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message still in the queue; 0 for a queue that no broker has."""
        wrapped, address = self._located(queue)
        return self._running().transport.min_offset(wrapped, address, self._api_timeout)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the offset of the first message stored at `timestamp` (epoch milliseconds) or later."""
        wrapped, address = self._located(queue)
        return self._running().transport.search_offset(wrapped, timestamp, address, self._api_timeout)

    def earliest_msg_store_time(self, queue: MessageQueue) -> int:
        """Return when the queue's oldest message was stored, epoch milliseconds; -1 if it has none."""
        wrapped, address = self._located(queue)
        return self._running().transport.earliest_msg_store_time(wrapped, address, self._api_timeout)

    def view_message(self, offset_msg_id: str, topic: str = "") -> MessageExt:
        """Return a stored message by the broker's id (``SendResult.offset_msg_id``), its body as its sender had it.

        Parameters
        ----------
        offset_msg_id : str
        topic : str, default ""
            A broker with access control wants to know it.

        Raises
        ------
        MQClientException
            It is not such an id, or no message is there.
        CompressionError
            The body is not what its flags say.
        """
        transport = self._running().transport
        address, offset = decode_message_id(offset_msg_id)
        found = transport.view_message(address, offset, self._api_timeout, topic=wrap(self._namespace, topic))
        return replace(
            found,
            topic=unwrap(found.topic, self._namespace),
            body=decompress(found.body, found.sys_flag),
            sys_flag=found.sys_flag & ~COMPRESSED_FLAG,
        )

    def _located(self, queue: MessageQueue) -> tuple[MessageQueue, str]:
        wrapped = replace(queue, topic=wrap(self._namespace, queue.topic))
        return wrapped, broker_address(self._running().routes, wrapped)
