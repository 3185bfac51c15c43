"""`Admin`: topics, routes, offsets, brokers and newest messages of a cluster, and new topics.

It sends requests to name servers and brokers over remoting, and writes to no topic. If a server does not answer, the
table names it and shows the other answers.
"""

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.answers import BrokerInfo, PeekedMessage, QueueOffsets, Table, TopicInfo
from rocketmq_spark.admin.queues import queue_offsets

__all__ = ["Admin", "BrokerInfo", "PeekedMessage", "QueueOffsets", "Table", "TopicInfo", "queue_offsets"]
