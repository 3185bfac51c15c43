"""The public producer against real brokers: every kind of send, and the admin calls."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import rocketmq_spark
from rocketmq_spark import aio
from rocketmq_spark.errors import InvalidRowError, MQBrokerException, MQClientException, OptionError, SchemaError
from rocketmq_spark.model.message import Message, MessageQueue, SendStatus
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.routing.selectors import SelectMessageQueueByHash
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE, wait_for
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def producer(cluster: SharedCluster) -> Iterator[Producer]:
    with Producer(f"pg-{uuid.uuid4().hex[:8]}", name_server=cluster.name_server) as started:
        yield started


@pytest.fixture
def new_topic(producer: Producer, topic: str) -> str:
    """A topic of two queues on each broker."""
    producer.create_topic("TBW102", topic, 2)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if len(producer.fetch_publish_message_queues(topic)) == 4:
                return topic
        except MQBrokerException:
            pass  # The name server learns of it in a moment.
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_message_of_every_send_method_is_stored(producer: Producer, cluster: SharedCluster, new_topic: str) -> None:
    topic = new_topic
    results = [
        producer.send(Message.of(topic, b"sync", tags="t", keys=["a", "b"], properties={"own": "1"})),
        producer.send_async(Message.of(topic, b"async")).result(PATIENCE),
        producer.send(Message.of(topic, b"queue"), MessageQueue(topic, "broker-1", 1)),
        producer.send(Message.of(topic, b"hash"), selector=SelectMessageQueueByHash(), arg="order-17"),
        producer.send(Message.of(topic, b"long" * 5000)),
    ]
    batch = producer.send_batch([Message.of(topic, b"batch-%d" % number) for number in range(3)])
    producer.send_oneway(Message.of(topic, b"oneway"))
    stored = {message.properties["UNIQ_KEY"]: message for message in read_topic(cluster.name_server, topic, 9)}
    assert len(stored) == 9
    for result in results:
        assert result.status is SendStatus.SEND_OK
        message = stored[result.msg_id]
        assert result.offset_msg_id == message.offset_msg_id
        assert (result.message_queue.queue_id, result.queue_offset) == (message.queue_id, message.queue_offset)
    assert results[2].message_queue == MessageQueue(topic, "broker-1", 1)
    first = stored[results[0].msg_id]
    assert (first.body, first.tags, first.keys, first.user_properties) == (b"sync", "t", "a b", {"own": "1"})
    assert [stored[member].body for member in batch.msg_id.split(",")] == [b"batch-0", b"batch-1", b"batch-2"]
    assert len(batch.offset_msg_id.split(",")) == 3
    assert len(stored[results[4].msg_id].body) < 20_000


@pytest.mark.parametrize("over_grpc", [False, True], ids=["remoting", "grpc"])
def test_messages_of_coroutines_are_stored_at_the_places_of_their_results(
    cluster: SharedCluster, new_topic: str, over_grpc: bool
) -> None:
    servers: dict[str, Any] = {"endpoints": cluster.endpoints} if over_grpc else {"name_server": cluster.name_server}

    async def main() -> list[SendResult]:
        async with aio.Producer(f"aio-{uuid.uuid4().hex[:8]}", send_msg_timeout=60_000, **servers) as producer:
            first = await producer.send(Message.of(new_topic, b"0", tags="t", keys=["a"], properties={"own": "1"}))
            others = await asyncio.gather(*[producer.send(Message.of(new_topic, b"%d" % n)) for n in range(1, 500)])
            batch = await producer.send_batch([Message.of(new_topic, b"batch")] * 2)
            summary = await producer.send_arrow(pa.table({"body": [b"arrow"] * 3}), new_topic)
        assert len(batch.msg_id.split(",")) == 2
        assert sum(broker["rows"] for broker in summary.to_dict().values()) == 3
        return [first, *others]

    results = asyncio.run(main())
    stored = {message.properties["UNIQ_KEY"]: message for message in read_topic(cluster.name_server, new_topic, 505)}
    for number, result in enumerate(results):
        message = stored[result.msg_id]
        assert message.body == b"%d" % number
        assert result.status is SendStatus.SEND_OK
        if not over_grpc:
            place = result.message_queue.queue_id, result.queue_offset, result.offset_msg_id
            assert place == (message.queue_id, message.queue_offset, message.offset_msg_id)


def test_an_administrator_learns_offsets_and_sees_messages(producer: Producer, new_topic: str) -> None:
    queue = MessageQueue(new_topic, "broker-0", 1)
    assert (producer.min_offset(queue), producer.max_offset(queue)) == (0, 0)
    assert producer.earliest_msg_store_time(queue) == -1
    before = int(time.time() * 1000)
    first = producer.send(Message.of(new_topic, b"first"), queue)
    time.sleep(0.05)
    between = int(time.time() * 1000)
    second = producer.send(Message.of(new_topic, b"second"), queue)
    wait_for(lambda: producer.max_offset(queue) >= 2)
    assert [producer.search_offset(queue, time_ms) for time_ms in (0, between)] == [0, second.queue_offset]
    assert before <= producer.earliest_msg_store_time(queue) <= between
    message = producer.view_message(first.offset_msg_id)
    assert (message.topic, message.body, message.unique_id) == (new_topic, b"first", first.msg_id)
    long = producer.send(Message.of(new_topic, b"long" * 5000), queue)
    assert producer.view_message(long.offset_msg_id, new_topic).body == b"long" * 5000
    with pytest.raises(MQClientException, match="not-an-id"):
        producer.view_message("not-an-id")


def test_topics_are_created_on_every_broker_and_system_topics_rejected(producer: Producer, new_topic: str) -> None:
    queues = producer.fetch_publish_message_queues(new_topic)
    assert queues == [MessageQueue(new_topic, f"broker-{broker}", number) for broker in (0, 1) for number in (0, 1)]
    for name in ("TBW102", "SCHEDULE_TOPIC_XXXX", "no spaces"):
        with pytest.raises(MQClientException):
            producer.create_topic("TBW102", name, 2)
    with pytest.raises(MQBrokerException, match="No topic route info") as caught:
        producer.fetch_publish_message_queues(f"{new_topic}-not")
    assert caught.value.response_code == 17


def test_a_delayed_message_comes_later(producer: Producer, cluster: SharedCluster, new_topic: str) -> None:
    sent = time.time()
    producer.send(Message.of(new_topic, b"level", delay_time_level=1))
    producer.send(Message.of(new_topic, b"timer", delay_ms=1200))
    stored = read_topic(cluster.name_server, new_topic, 2)
    assert sorted(message.body for message in stored) == [b"level", b"timer"]
    assert all(message.store_timestamp / 1000 >= sent + 0.9 for message in stored)


def test_an_arrow_table_arrives_with_every_row_and_its_summary(
    producer: Producer, cluster: SharedCluster, new_topic: str
) -> None:
    rows = 5000
    table = pa.table(
        {
            "body": [f"row {number}" for number in range(rows)],
            "keys": [f"k{number}" for number in range(rows)],
            "flag": pa.array(range(rows), pa.int32()),
        }
    )
    summary = producer.send_arrow(table, new_topic, batchBytes="32k")
    assert sum(facts["rows"] for facts in summary.to_dict().values()) == rows
    stored = read_topic(cluster.name_server, new_topic, rows)
    assert {message.keys: (message.body.decode(), message.flag) for message in stored} == {
        f"k{number}": (f"row {number}", number) for number in range(rows)
    }
    producer.send_arrow(iter(table.slice(0, 10).to_batches()), new_topic)
    producer.send_arrow(table.to_batches()[0].slice(0, 5), new_topic)
    assert len(read_topic(cluster.name_server, new_topic, rows + 15)) == rows + 15


def test_a_table_that_is_wrong_is_refused_as_a_dataframe_is(producer: Producer, new_topic: str) -> None:
    with pytest.raises(SchemaError, match="body"):
        producer.send_arrow(pa.table({"payload": ["x"]}), new_topic)
    with pytest.raises(InvalidRowError, match="row 1"):
        producer.send_arrow(pa.table({"body": ["x", ""]}), new_topic)
    with pytest.raises(OptionError, match="sendMsgTimeout belong to the producer"):
        producer.send_arrow(pa.table({"body": ["x"]}), new_topic, sendMsgTimeout="1")
    with pytest.raises(OptionError, match="did you mean batchBytes"):
        producer.send_arrow(pa.table({"body": ["x"]}), new_topic, batchByte="64k")


def test_the_package_exports_the_producer_and_its_values(cluster: SharedCluster, topic: str) -> None:
    with rocketmq_spark.Producer(f"pg-{topic}"[:100], name_server=cluster.name_server) as producer:
        result = producer.send(rocketmq_spark.Message.of(topic, b"x"))
    assert result.status is rocketmq_spark.SendStatus.SEND_OK


def test_no_subscription_matches_a_tag_that_begins_or_ends_with_a_blank(
    producer: Producer, cluster: SharedCluster, new_topic: str
) -> None:
    tags = ["a", "a ", " a", "a\t", "\na", "a b"]
    producer.send_batch([Message.of(new_topic, tag.encode(), tags=tag) for tag in tags])
    assert len(read_topic(cluster.name_server, new_topic, len(tags))) == len(tags)

    def found(expression: str) -> list[bytes]:
        read = rocketmq_spark.read_arrow(
            new_topic, nameServer=cluster.name_server, subExpression=expression, columns=["body"]
        )
        return sorted(read.read_all().column("body").to_pylist())

    # The broker trims the tags of a subscription, so a write refuses the others.
    assert {tag: found(tag) for tag in tags} == {tag: [tag.strip().encode()] for tag in tags}
    with pytest.raises(InvalidRowError, match="tags begins or ends with a blank"):
        producer.send_arrow(pa.table({"body": tags, "tags": tags}), new_topic)


def test_a_broker_delivers_a_delay_beyond_its_longest_number_at_once(
    producer: Producer, cluster: SharedCluster, new_topic: str
) -> None:
    # For this reason a write and `Message.of` reject such a delay.
    producer.send(Message(new_topic, b"overflow", properties={"TIMER_DELAY_MS": str(2**63 - 1)}))
    assert [message.body for message in read_topic(cluster.name_server, new_topic, 1)] == [b"overflow"]
    with pytest.raises(MQBrokerException, match="timer message illegal"):
        producer.send(Message.of(new_topic, b"late", delay_ms=2**62))
    with pytest.raises(InvalidRowError, match="delayMs is out of range"):
        producer.send_arrow(pa.table({"body": ["x"], "delayMs": [2**63 - 1]}), new_topic)
