"""Looking around in a cluster from Python: topics, routes, offsets, brokers, the newest messages; and making topics.

Rule 1: every question goes over the remoting protocol, to the name servers and brokers themselves.
Rule 2: whoever does not answer is named, and what the others said is shown.
Rule 3: nothing is written to any topic.

The same from the shell is in `commands`.
"""

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.offsets import queue_offsets
from rocketmq_spark.admin.rows import BrokerInfo, PeekedMessage, QueueOffsets, TopicInfo
from rocketmq_spark.admin.table import Table

__all__ = ["Admin", "BrokerInfo", "PeekedMessage", "QueueOffsets", "Table", "TopicInfo", "queue_offsets"]
