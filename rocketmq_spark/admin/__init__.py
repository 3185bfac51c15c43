"""`Admin` lists topics, routes, offsets, groups, brokers and newest messages of a cluster, and changes topics.

It uses RocketMQ's remoting protocol, as ``mqadmin`` does.
"""

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.answers import (
    BrokerInfo,
    Group,
    GroupMember,
    OffsetReset,
    PeekedMessage,
    QueueLag,
    QueueOffsets,
    TopicInfo,
)
from rocketmq_spark.admin.queues import queue_offsets
from rocketmq_spark.display.row_table import Table

__all__ = [
    "Admin",
    "BrokerInfo",
    "Group",
    "GroupMember",
    "OffsetReset",
    "PeekedMessage",
    "QueueLag",
    "QueueOffsets",
    "Table",
    "TopicInfo",
    "queue_offsets",
]
