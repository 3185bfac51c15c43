"""Where reads of a group begin, in queues with and without an offset that the group has committed."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.offsets import COMMITTED, OffsetSpec
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.source.plan import plan_read
from rocketmq_spark.transport.remoting.transport import RemotingTransport

APPLICATION = "10.0.0.1@1234#567890123"


def begun_at_committed(name_server: str, group: str, topic: str, broker: str, fallback: str) -> dict[int, int]:
    """Return the offset at which a batch begins in each queue of a broker."""
    options = SourceOptions.of(
        name_server=(name_server,),
        subscribe=(topic,),
        consumer_group=group,
        starting_offsets=OffsetSpec(COMMITTED),
        starting_offsets_fallback=fallback,
    )
    ranges = plan_read(options).ranges
    return {part.queue.queue_id: part.start for part in ranges if part.queue.broker_name == broker}


def check_committed_offsets(name_servers: list[str], broker: str, address: str, topic: str) -> None:
    """Check reads of two queues with messages, in one of which the group has committed 0, and of an empty one."""
    group = f"group-{topic}"
    with Producer("pg", name_server=name_servers[0]) as producer:
        for queue_id in (0, 0, 0, 1, 1):
            producer.send(Message(topic, b"x"), queue=MessageQueue(topic, broker, queue_id))
    with RemotingTransport([name_servers[0]]) as application:
        application.register_consumer(APPLICATION, group, address, 5.0)
        application.update_consumer_offset(MessageQueue(topic, broker, 0), group, 0, address, 5.0)
        for name_server in name_servers:
            missing = rf"consumerGroup={group} has no committed offset of queue {topic}/{broker}/1 \(.*: 1 of [36]\)"
            with pytest.raises(OptionError, match=missing):
                begun_at_committed(name_server, group, topic, broker, "error")
            assert begun_at_committed(name_server, group, topic, broker, "earliest") == {0: 0, 1: 0, 2: 0}
            assert begun_at_committed(name_server, group, topic, broker, "latest") == {0: 0, 1: 2, 2: 0}
        application.update_consumer_offset(MessageQueue(topic, broker, 0), group, 2, address, 5.0)
        application.update_consumer_offset(MessageQueue(topic, broker, 1), group, 2, address, 5.0)
        for name_server in name_servers:
            assert begun_at_committed(name_server, group, topic, broker, "error") == {0: 2, 1: 2, 2: 0}
