"""`Admin`: topics, routes, offsets, brokers and newest messages of a cluster, and new topics.

Requests go to name servers and brokers over remoting, and write to no topic. A server that does not answer is named,
and the other answers are shown. The shell commands are in cli/app.py.
"""

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.answers import BrokerInfo, PeekedMessage, QueueOffsets, Table, TopicInfo
from rocketmq_spark.admin.queues import queue_offsets

__all__ = ["Admin", "BrokerInfo", "PeekedMessage", "QueueOffsets", "Table", "TopicInfo", "queue_offsets"]
