"""Test doubles: a RocketMQ cluster inside the test's process, and the replies that its servers give."""

from rocketmq_spark.testing.fake_cluster import FakeCluster
from rocketmq_spark.testing.fake_replies import Reply
from rocketmq_spark.testing.fake_storage import BrokerSettings, ProxySettings, TopicSettings

__all__ = ["BrokerSettings", "FakeCluster", "ProxySettings", "Reply", "TopicSettings"]
