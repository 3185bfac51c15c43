"""A RocketMQ cluster on this machine for tests and first tries: :class:`LocalCluster`.

Rule 1: the servers are the real ones, as JVM processes; nothing is imitated.
Rule 2: nothing is downloaded, started or written by importing this.
"""

from rocketmq_spark.cluster.jars import Progress
from rocketmq_spark.cluster.local import LocalCluster
from rocketmq_spark.cluster.process import State
from rocketmq_spark.cluster.servers import Broker, NameServer, Proxy

__all__ = ["Broker", "LocalCluster", "NameServer", "Progress", "Proxy", "State"]
