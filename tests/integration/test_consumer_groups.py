"""The effect of commitOffsets on groups of a real broker: a new group, and the group of an application."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark import read_arrow
from rocketmq_spark.errors import RouteNotFoundException
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.source import SourceOptions
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.source.stream_offsets import StreamOffsets
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.committed import APPLICATION, check_committed_offsets
from tests.support.processes import wait_for
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

POP_MESSAGE = 200050
RESET_OFFSET = 222  # INVOKE_BROKER_TO_RESET_OFFSET, of mqadmin resetOffsetByTime


@pytest.fixture
def application(cluster: SharedCluster) -> Iterator[RemotingTransport]:
    with RemotingTransport([cluster.name_server]) as transport:
        yield transport


def subscribe(application: RemotingTransport, address: str, group: str, topic: str) -> None:
    """Send the heart-beat of Java's push consumer."""
    subscription = {"topic": topic, "subString": "*", "subVersion": int(time.time() * 1000), "expressionType": "TAG"}
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [subscription],
    }
    beat = {"clientID": APPLICATION, "producerDataSet": [], "consumerDataSet": [consumer]}
    assert application.client.invoke(address, RequestCode.HEART_BEAT, {}, json.dumps(beat).encode(), 5.0).code == 0


def pull(application: RemotingTransport, address: str, group: str, topic: str) -> int:
    """Pull like the push consumer, without a subscription in the request; return the response code."""
    fields = {"consumerGroup": group, "topic": topic, "queueId": "0", "queueOffset": "0", "maxMsgNums": "32"}
    fields |= {"sysFlag": "0", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0"}
    return application.client.invoke(address, RequestCode.PULL_MESSAGE, fields, b"", 5.0).code


def offset_of(application: RemotingTransport, address: str, group: str, topic: str) -> int | None:
    fields = {"consumerGroup": group, "topic": topic, "queueId": "0", "setZeroIfNotFound": "false"}
    answer = application.client.invoke(address, RequestCode.QUERY_CONSUMER_OFFSET, fields, b"", 5.0)
    return int(answer.ext_fields["offset"]) if answer.code == ResponseCode.SUCCESS else None


def source_of(name_server: str, group: str, topic: str) -> StreamOffsets:
    options = SourceOptions.of(
        name_server=(name_server,), subscribe=(topic,), consumer_group=group, commit_offsets=True
    )
    return StreamOffsets(options, RemotingTransport([name_server]), time.monotonic, "10.0.0.2@spark#17")


def test_group_with_a_running_application_is_not_changed(
    cluster: SharedCluster,
    application: RemotingTransport,
    make_topic: Callable[..., str],
    topic: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_topic("NORMAL", queues=1)
    broker, group = cluster.brokers[0], f"group-{topic}"
    subscribe(application, broker.address, group, topic)
    # The answer to a pull of a group without subscription.
    assert pull(application, broker.address, f"{group}-other", topic) in (
        ResponseCode.SUBSCRIPTION_NOT_EXIST,
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    )
    for asked_for, committed in ((group, None), (f"{group}-of-its-own", 3)):
        source = source_of(cluster.name_server, asked_for, topic)
        for offset in (2, 3):
            source.commit({MessageQueue(topic, broker.name, 0): offset})
        assert offset_of(application, broker.address, asked_for, topic) == committed
        members = application.consumers(asked_for, broker.address, 5.0)
        assert list(members) == [APPLICATION if committed is None else "10.0.0.2@spark#17"]
        source.close()
    assert pull(application, broker.address, group, topic) == ResponseCode.PULL_NOT_FOUND
    [warning] = caplog.messages
    assert f"consumerGroup={group} is also used by {APPLICATION} at {broker.address}" in warning


def test_proxy_as_name_server_forwards_committed_offsets(
    cluster: SharedCluster,
    application: RemotingTransport,
    make_topic: Callable[..., str],
    topic: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_topic("NORMAL", queues=1)
    broker, group = cluster.brokers[0], f"group-{topic}"
    # Register the group at the broker, because a proxy forwards heart-beats only within a minute.
    application.register_consumer("10.0.0.3@spark#17", group, broker.address, 5.0)
    source = source_of(cluster.proxy.address, group, topic)
    source.commit({MessageQueue(topic, broker.name, 0): 3})
    source.close()
    assert caplog.messages == []
    assert offset_of(application, broker.address, group, topic) == 3


@pytest.mark.parametrize(
    ("option", "start", "first"),
    [
        ("startingOffsets", "earliest", 0),
        ("startingOffsets", "committed", 3),
        ("startingOffsets", '{"TOPIC": {"broker-0": {"0": 1}, "broker-1": {"0": 0}}}', 1),
        ("startingTimestamp", "1000000000000", 0),
    ],
)
@pytest.mark.parametrize("fail_on_data_loss", [True, False])
def test_read_begins_at_its_offset_after_mqadmin_has_reset_the_groups(
    cluster: SharedCluster,
    application: RemotingTransport,
    make_topic: Callable[..., str],
    topic: str,
    option: str,
    start: str,
    first: int,
    fail_on_data_loss: bool,
) -> None:
    make_topic("NORMAL", queues=1)
    broker, group = cluster.brokers[0], f"group-{topic}"
    with Producer("pg", name_server=cluster.name_server) as producer:
        for _ in range(4):
            producer.send(Message(topic, b"x"), queue=MessageQueue(topic, broker.name, 0))
    read_topic(cluster.name_server, topic, 4)
    application.register_consumer(APPLICATION, group, broker.address, 5.0)
    fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true", "queueId": "0", "offset": "3"}
    assert application.client.invoke(broker.address, RESET_OFFSET, fields, b"", 5.0).code == ResponseCode.SUCCESS
    options: dict[str, Any] = {option: start.replace("TOPIC", topic), "failOnDataLoss": fail_on_data_loss}
    rows = read_arrow(topic, nameServer=cluster.name_server, consumerGroup=group, **options).read_all()
    assert rows["queueOffset"].to_pylist() == [*range(first, 4)]


def test_committed_0_differs_from_a_group_without_offsets(
    cluster: SharedCluster, make_topic: Callable[..., str], topic: str
) -> None:
    make_topic("NORMAL", queues=3)
    broker = cluster.brokers[0]
    check_committed_offsets([cluster.name_server, cluster.proxy.address], broker.name, broker.address, topic)


@pytest.mark.long
def test_messages_that_pop_consumers_did_not_acknowledge_are_in_a_retry_topic(
    cluster: SharedCluster, application: RemotingTransport, make_topic: Callable[..., str], topic: str
) -> None:
    make_topic("NORMAL", queues=1)
    broker, group = cluster.brokers[0], f"pop-{topic[-8:]}"  # The name of the retry topic contains both
    with Producer("pg", name_server=cluster.name_server) as producer:
        for number in range(4):
            producer.send(Message(topic, b"%d" % number), queue=MessageQueue(topic, broker.name, 0))
    read_topic(cluster.name_server, topic, 4)
    application.register_consumer(APPLICATION, group, broker.address, 5.0)
    fields = {"consumerGroup": group, "topic": topic, "queueId": "0", "maxMsgNums": "3", "invisibleTime": "5000"}
    fields |= {"pollTime": "0", "bornTime": str(int(time.time() * 1000)), "initMode": "1", "expType": "TAG"}
    answer = application.client.invoke(broker.address, POP_MESSAGE, fields | {"exp": "*", "order": "false"}, b"", 5.0)
    assert answer.code == ResponseCode.SUCCESS
    read = {"nameServer": cluster.name_server, "consumerGroup": group, "startingOffsets": "committed"}

    def bodies(topics: str) -> list[bytes]:
        try:
            return sorted(read_arrow(topics, columns=["body"], **read).read_all()["body"].to_pylist())
        except RouteNotFoundException:
            return []

    assert bodies(topic) == [b"3"]
    wait_for(lambda: len(bodies(f"%RETRY%{group}_{topic}")) == 3)
    assert bodies(f"{topic},%RETRY%{group}_{topic}") == [b"0", b"1", b"2", b"3"]
