"""Write and read Apache RocketMQ from Apache Spark, in Python, without losing a row.

Importing this package opens and starts nothing; what is heavy is imported when it is first used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rocketmq_spark.credentials import Credentials, CredentialsProvider
from rocketmq_spark.errors import (
    ClusterError,
    CredentialsError,
    DeliveryError,
    InvalidRowError,
    MetricsUnavailableError,
    MQBrokerException,
    MQClientException,
    OptionError,
    RemotingException,
    RocketMQError,
    SchemaError,
)
from rocketmq_spark.text import escape_record

if TYPE_CHECKING:
    from rocketmq_spark.admin import Admin
    from rocketmq_spark.client.producer import Producer
    from rocketmq_spark.client.transaction import TransactionListener
    from rocketmq_spark.cluster import LocalCluster
    from rocketmq_spark.message import Message, MessageQueue, SendStatus
    from rocketmq_spark.message_ext import MessageExt
    from rocketmq_spark.producer.queue_selectors import (
        SelectMessageQueueByHash,
        SelectMessageQueueByMachineRoom,
        SelectMessageQueueByRandom,
    )
    from rocketmq_spark.send_result import LocalTransactionState, SendResult, TransactionSendResult
    from rocketmq_spark.spark.datasource import RocketMQDataSource
    from rocketmq_spark.spark.dedupe import dedupe
    from rocketmq_spark.spark.live import live
    from rocketmq_spark.spark.register import register, unregister
    from rocketmq_spark.spark.report import Metrics

__version__ = "0.1.0"

__all__ = [
    "Admin",
    "ClusterError",
    "Credentials",
    "CredentialsError",
    "CredentialsProvider",
    "DeliveryError",
    "InvalidRowError",
    "LocalCluster",
    "LocalTransactionState",
    "MQBrokerException",
    "MQClientException",
    "Message",
    "MessageExt",
    "MessageQueue",
    "Metrics",
    "MetricsUnavailableError",
    "OptionError",
    "Producer",
    "RemotingException",
    "RocketMQDataSource",
    "RocketMQError",
    "SchemaError",
    "SelectMessageQueueByHash",
    "SelectMessageQueueByMachineRoom",
    "SelectMessageQueueByRandom",
    "SendResult",
    "SendStatus",
    "TransactionListener",
    "TransactionSendResult",
    "dedupe",
    "live",
    "register",
    "unregister",
]

# Public names whose modules import pyspark or start nothing but cost time to import.
_LAZY = {
    "Admin": "rocketmq_spark.admin",
    "LocalTransactionState": "rocketmq_spark.send_result",
    "Message": "rocketmq_spark.message",
    "MessageExt": "rocketmq_spark.message_ext",
    "MessageQueue": "rocketmq_spark.message",
    "Producer": "rocketmq_spark.client.producer",
    "SelectMessageQueueByHash": "rocketmq_spark.producer.queue_selectors",
    "SelectMessageQueueByMachineRoom": "rocketmq_spark.producer.queue_selectors",
    "SelectMessageQueueByRandom": "rocketmq_spark.producer.queue_selectors",
    "SendResult": "rocketmq_spark.send_result",
    "SendStatus": "rocketmq_spark.message",
    "TransactionListener": "rocketmq_spark.client.transaction",
    "TransactionSendResult": "rocketmq_spark.send_result",
    "LocalCluster": "rocketmq_spark.cluster",
    "Metrics": "rocketmq_spark.spark.report",
    "RocketMQDataSource": "rocketmq_spark.spark.datasource",
    "dedupe": "rocketmq_spark.spark.dedupe",
    "live": "rocketmq_spark.spark.live",
    "register": "rocketmq_spark.spark.register",
    "unregister": "rocketmq_spark.spark.register",
}

# A filter of a parent is not asked about the records of its children, so each logger has it.
for _part in ("cluster", "consumer", "metrics", "producer", "spark", "transport"):
    logging.getLogger(f"rocketmq_spark.{_part}").addFilter(escape_record)


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
