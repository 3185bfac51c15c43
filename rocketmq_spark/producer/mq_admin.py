"""The requests of ``MQAdmin`` that a producer can make: topics, queues, offsets, single messages.

Follows ``MQAdminImpl.java``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from rocketmq_spark.errors import MQClientException, RocketMQError, RouteNotFoundException
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import MessageExt, decode_message_id
from rocketmq_spark.model.names import DLQ_PREFIX, RETRY_PREFIX, check_topic, is_system_topic
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.model.send_result import RecallMessage, broker_name_of
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.attempt import broker_address
from rocketmq_spark.producer.service import ProducerService
from rocketmq_spark.protocol.compression import COMPRESSED_FLAG, decompress
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.route_cache import publish_info_of

_READ_WRITE = 6


class MQAdmin(ABC):
    """Requests that a running producer can make.

    Every method raises ``MQClientException`` if the producer does not run, ``RouteNotFoundException`` for an unknown
    topic, ``RemotingException`` if the server cannot be reached, and ``MQBrokerException`` if it rejects the request.
    Over gRPC, all but `recall_message` raise ``MQClientException``.
    """

    producer_group: str
    _options: ProducerOptions

    @abstractmethod
    def _running_service(self) -> ProducerService:
        """Return the running producer, or raise."""

    def create_topic(self, key: str, new_topic: str, queue_num: int, *, perm: int = _READ_WRITE) -> None:
        """Create or change a topic on every broker that has the topic `key`.

        Parameters
        ----------
        key : str
            An existing topic. ``TBW102`` is on every broker with ``autoCreateTopicEnable``.
        queue_num : int
            Read queues, and write queues, on each broker.
        perm : int, default 6
            4 to read, 2 to write.

        Raises
        ------
        MQClientException
            The name is not allowed, or some brokers failed: the text names each.
        """
        instance = self._running()
        check_topic(self._options.connection.wire_name(new_topic))
        if is_system_topic(new_topic):
            raise MQClientException(f"creating topic {new_topic}: it is one of the server's own")
        route = instance.transport.query_route(key, self._api_timeout)
        masters = masters_of(route.broker_datas)
        errors = {}
        for name, address in sorted(masters.items()):
            try:
                instance.transport.create_topic(address, new_topic, queue_num, perm, self._api_timeout)
            except RocketMQError as exc:
                errors[name] = exc
        if errors or not masters:
            reasons = "; ".join(f"{name}: {exc}" for name, exc in errors.items()) or f"no broker has topic {key}"
            error = MQClientException(f"creating topic {new_topic} with {queue_num} queues: {reasons}")
            raise error from next(iter(errors.values()), None)

    def fetch_publish_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the writable queues of a topic, from a name server.

        Raises
        ------
        MQBrokerException
            Code 17: no name server knows the topic, even if the first message would create it.
        """
        route = self._running().transport.query_route(topic, self._api_timeout)
        return list(publish_info_of(topic, route).queues)

    def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's next message; 0 for a queue that the broker does not have."""
        return self._running().transport.max_offset(queue, self._address(queue), self._api_timeout)

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the queue's oldest message; 0 for a queue that the broker does not have."""
        return self._running().transport.min_offset(queue, self._address(queue), self._api_timeout)

    def search_offset(self, queue: MessageQueue, timestamp: int) -> int:
        """Return the offset of the first message stored at `timestamp` (epoch milliseconds) or later."""
        return self._running().transport.search_offset(queue, timestamp, self._address(queue), self._api_timeout)

    def earliest_msg_store_time(self, queue: MessageQueue) -> int:
        """Return when the queue's oldest message was stored, epoch milliseconds; -1 if the queue is empty."""
        return self._running().transport.earliest_msg_store_time(queue, self._address(queue), self._api_timeout)

    def view_message(self, offset_msg_id: str, topic: str = "") -> MessageExt:
        """Return a stored message, decompressed.

        Parameters
        ----------
        offset_msg_id : str
            The broker's id (``SendResult.offset_msg_id``).
        topic : str, default ""
            Required by brokers with access control.

        Raises
        ------
        MQClientException
            The id is malformed, or no message is there.
        CompressionError
            The body cannot be decompressed.
        """
        transport = self._running().transport
        address, offset = decode_message_id(offset_msg_id)
        message = transport.view_message(address, offset, self._api_timeout, topic=topic)
        body = decompress(message.body, message.sys_flag)
        return replace(message, body=body, sys_flag=message.sys_flag & ~COMPRESSED_FLAG)

    def recall_message(self, topic: str, recall_handle: str) -> str:
        """Take a delayed message back before it is delivered, and return its id. Works over gRPC, too.

        Parameters
        ----------
        recall_handle : str
            ``SendResult.recall_handle`` of a message with a delivery time. Messages with a delay level have none.

        Raises
        ------
        MQClientException
            The handle is malformed, the topic is a retry or dead-letter topic, or the broker is unknown.
        MQBrokerException, RemotingException
            The server rejected it (brokers need ``recallMessageEnable=true``), or did not answer.
        """
        service = self._running_service()
        routes, timeout = service.instance.routes, self._options.send_msg_timeout / 1000
        check_topic(self._options.connection.wire_name(topic))
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            raise MQClientException(
                f"recalling a message of topic {topic}: a retry or dead-letter topic holds no such one"
            )
        broker_name = broker_name_of(recall_handle)
        if self._options.over_grpc:
            info = routes.find(topic, timeout)
            if not info.addresses:
                raise RouteNotFoundException(f"recalling a message of topic {topic}: no proxy is known")
            # Any proxy finds the broker.
            address = next(iter(info.addresses.values()))
        else:
            address = broker_address(routes, MessageQueue(topic, broker_name, 0))
        request = RecallMessage(topic, recall_handle, service.producer_group, broker_name)
        return service.instance.transport.recall_message(address, request, timeout)

    def _running(self) -> ClientInstance:
        service = self._running_service()
        if self._options.over_grpc:
            raise MQClientException(
                f"producer {self.producer_group} works over gRPC, which has no questions about queues, offsets and "
                "stored messages, and creates no topics: ask a producer with transport=remoting (name_server)"
            )
        return service.instance

    @property
    def _api_timeout(self) -> float:
        return self._options.connection.mq_client_api_timeout / 1000

    def _address(self, queue: MessageQueue) -> str:
        return broker_address(self._running().routes, queue)
