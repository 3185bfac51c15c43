"""What readers ask of a cluster on the driver and ship to their tasks, without a session."""

from __future__ import annotations

from pyspark.sql.types import StructType

from rocketmq_spark.message import Message, MessageQueue
from rocketmq_spark.reader_options import ReaderOptions
from rocketmq_spark.route_data import BrokerData, QueueData, TopicRouteData
from rocketmq_spark.spark.reader import RangesPartition, batch_reader
from tests.peer import BrokerPeer

SCHEMA = StructType().add("body", "binary")


def test_a_task_is_told_of_the_brokers_that_it_reads_from_and_of_no_other() -> None:
    with BrokerPeer({}) as peer:
        brokers = [BrokerData(name, {0: peer.address}) for name in "abc"]
        peer.routes["t"] = TopicRouteData(tuple(QueueData(name, 1, 1, 6) for name in "abc"), tuple(brokers))
        for name in "ab":
            queue = MessageQueue("t", name, 0)
            peer.store.put(queue, [Message.of("t", b"x")], 0.0)
        options = ReaderOptions(name_server=(peer.address,), subscribe=("t",), min_partitions=1)
        tasks = batch_reader(options, SCHEMA, None).partitions()
    found = {}
    for task in tasks:
        assert isinstance(task, RangesPartition)
        [one] = task.ranges
        found[one.queue.broker_name] = [broker.broker_name for broker in task.routes["t"].broker_datas]
        assert [data.broker_name for data in task.routes["t"].queue_datas] == found[one.queue.broker_name]
    assert found == {"a": ["a"], "b": ["b"]}
