"""Write and read Apache RocketMQ from Apache Spark, in Python, without losing a row.

Importing this package opens no socket and starts no thread. Names that need pyspark are imported at first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rocketmq_spark._version import __version__ as __version__
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
    cause,
    escape_record,
)
from rocketmq_spark.model.credentials import Credentials, CredentialsProvider

if TYPE_CHECKING:
    from rocketmq_spark import aio
    from rocketmq_spark.admin import Admin
    from rocketmq_spark.cli import demo
    from rocketmq_spark.cli.transactions import finish_transactions
    from rocketmq_spark.cluster import LocalCluster
    from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
    from rocketmq_spark.model.message_ext import MessageExt
    from rocketmq_spark.model.send_result import LocalTransactionState, SendResult, TransactionSendResult
    from rocketmq_spark.producer.producer import Producer
    from rocketmq_spark.producer.transaction import TransactionListener
    from rocketmq_spark.routing.selectors import (
        SelectMessageQueueByHash,
        SelectMessageQueueByMachineRoom,
        SelectMessageQueueByRandom,
    )
    from rocketmq_spark.source.read_arrow import read_arrow
    from rocketmq_spark.spark.datasource import RocketMQDataSource
    from rocketmq_spark.spark.dedupe import dedupe
    from rocketmq_spark.spark.lag import ProgressListener, lag
    from rocketmq_spark.spark.live import live
    from rocketmq_spark.spark.register import register, unregister
    from rocketmq_spark.spark.report import Metrics
    from rocketmq_spark.spark.write_function import foreach_batch, write

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
    "ProgressListener",
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
    "aio",
    "cause",
    "dedupe",
    "demo",
    "finish_transactions",
    "foreach_batch",
    "lag",
    "live",
    "read_arrow",
    "register",
    "unregister",
    "write",
]

# Public names by module. Each is imported at its first use, because it needs pyspark or time.
_LAZY = {
    "admin": ("Admin",),
    "aio": ("aio",),
    "cli.demo": ("demo",),
    "cli.transactions": ("finish_transactions",),
    "cluster": ("LocalCluster",),
    "model.message": ("Message", "MessageQueue", "SendStatus"),
    "model.message_ext": ("MessageExt",),
    "model.send_result": ("LocalTransactionState", "SendResult", "TransactionSendResult"),
    "producer.producer": ("Producer",),
    "producer.transaction": ("TransactionListener",),
    "routing.selectors": ("SelectMessageQueueByHash", "SelectMessageQueueByMachineRoom", "SelectMessageQueueByRandom"),
    "source.read_arrow": ("read_arrow",),
    "spark.datasource": ("RocketMQDataSource",),
    "spark.dedupe": ("dedupe",),
    "spark.lag": ("ProgressListener", "lag"),
    "spark.live": ("live",),
    "spark.register": ("register", "unregister"),
    "spark.report": ("Metrics",),
    "spark.write_function": ("foreach_batch", "write"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _LAZY.items() for name in names}

# Python does not apply a parent logger's filter to its children's records, so each logger gets the filter.
for _part in ("arrow", "cluster", "source", "metrics", "producer", "record", "spark", "transport"):
    logging.getLogger(f"rocketmq_spark.{_part}").addFilter(escape_record)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as exc:
        if exc.name != "pyspark.sql.datasource":
            raise
        raise ImportError(
            f"rocketmq_spark.{name} needs PySpark 4.0 or newer, because older releases have no Python data sources. On "
            "PySpark 3.5 use rocketmq_spark.write(df), foreach_batch() and read_arrow()"
        ) from exc
    # `aio` and `demo` are the modules themselves.
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
