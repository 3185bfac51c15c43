"""Test doubles: a cluster in this process, and a transport that answers requests from a list of replies."""

from rocketmq_spark.testing.fake_cluster import FakeCluster
from rocketmq_spark.testing.fake_storage import BrokerSettings, ProxySettings, TopicSettings
from rocketmq_spark.testing.scripted import ScriptedTransport
from rocketmq_spark.testing.scripted_broker import Reply

__all__ = ["BrokerSettings", "FakeCluster", "ProxySettings", "Reply", "ScriptedTransport", "TopicSettings"]
