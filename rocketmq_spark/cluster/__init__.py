"""A RocketMQ cluster on this machine for tests and first tries. Importing this downloads, starts and writes nothing."""

from rocketmq_spark.cluster.jars import Progress
from rocketmq_spark.cluster.local import LocalCluster
from rocketmq_spark.cluster.process import State
from rocketmq_spark.cluster.servers import Broker, NameServer, Proxy

__all__ = ["Broker", "LocalCluster", "NameServer", "Progress", "Proxy", "State"]
