"""Delayed messages taken back before they are delivered.

Follows ``DefaultMQProducerImpl.recallMessage`` of 5.x, and spec/grpc.md section 5.6.
"""

from __future__ import annotations

from rocketmq_spark.errors import MQClientException, RouteNotFoundException
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import DLQ_PREFIX, RETRY_PREFIX
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.producer.kernel import broker_address
from rocketmq_spark.producer.validators import check_topic
from rocketmq_spark.recall import RecallMessage, broker_name_of


def recall_message(
    instance: ClientInstance, topic: str, recall_handle: str, producer_group: str, timeout: float, *, over_grpc: bool
) -> str:
    """Take a delayed message back, and return its id; `topic` as servers know it, `timeout` in seconds.

    Raises
    ------
    MQClientException
        No handle, a topic that nothing can be recalled from, or a broker that nobody knows.
    MQBrokerException, RemotingException
        The server refused, or did not answer.
    """
    check_topic(topic)
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        raise MQClientException(f"recalling a message of topic {topic}: a retry or dead-letter topic holds no such one")
    request = RecallMessage(topic, recall_handle, producer_group, broker_name_of(recall_handle))
    if over_grpc:
        info = instance.routes.find(topic, timeout)
        if not info.addresses:
            raise RouteNotFoundException(f"recalling a message of topic {topic}: no proxy is known")
        # Any of them finds the broker.
        address = next(iter(info.addresses.values()))
    else:
        address = broker_address(instance.routes, MessageQueue(topic, request.broker_name, 0))
    return instance.transport.recall_message(address, request, timeout)
