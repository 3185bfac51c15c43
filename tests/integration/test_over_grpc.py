"""Writes over gRPC on a real proxy: the checks of the driver, and the stored rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RocketMQError,
    RouteNotFoundException,
    SchemaError,
)
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests.support.cluster import SharedCluster
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

MakeTopic = Callable[..., str]
COLUMNS = {"delayMs": LongType()}


@pytest.fixture(scope="module", autouse=True)
def _close_instances(cluster: SharedCluster) -> Iterator[None]:
    yield
    registry.close_all()


def write(cluster: SharedCluster, columns: Mapping[str, list[Any]], **options: str) -> None:
    """Write rows like Spark, with the driver's and the task's part in this process."""
    schema = StructType()
    for name in columns:
        schema.add(name, COLUMNS.get(name, StringType()))
    given = {"endpoints": cluster.endpoints, **options}
    writer = RocketMQDataSource(given).writer(schema, overwrite=False)
    writer.write(iter([pa.RecordBatch.from_pydict(dict(columns))]))


def stored(cluster: SharedCluster, topic: str, rows: int) -> list[MessageExt]:
    return read_topic(cluster.name_server, topic, rows, key=lambda message: message.body)


def test_plain_rows_are_stored_with_tags_keys_and_bare_topic_name(
    cluster: SharedCluster, make_topic: MakeTopic
) -> None:
    topic, numbers = make_topic("NORMAL"), range(3000)
    columns = {
        "body": [f"row {number}" for number in numbers],
        "tags": [f"t{number % 3}" for number in numbers],
        "keys": [f"k{number}" for number in numbers],
    }
    write(cluster, columns, topic=topic, namespace="spaces")
    found = stored(cluster, topic, len(numbers))
    assert sorted((message.body.decode(), message.tags, message.keys) for message in found) == sorted(
        zip(columns["body"], columns["tags"], columns["keys"], strict=True)
    )
    assert len({message.unique_id for message in found}) == len(numbers)


def test_rows_find_their_topics_in_a_column(cluster: SharedCluster, make_topic: MakeTopic, topic: str) -> None:
    names = [make_topic("NORMAL", f"{topic}-{number}") for number in range(2)]
    write(cluster, {"body": ["a", "b", "c"], "topic": [names[0], names[1], names[0]]})
    assert sorted(message.body for message in stored(cluster, names[0], 2)) == [b"a", b"c"]
    assert [message.body for message in stored(cluster, names[1], 1)] == [b"b"]


def test_rows_of_one_key_keep_their_order_in_one_queue_of_a_fifo_topic(
    cluster: SharedCluster, make_topic: MakeTopic
) -> None:
    topic, numbers = make_topic("FIFO"), range(400)
    keys = [f"key-{number % 20}" for number in numbers]
    write(cluster, {"body": list(map(str, numbers)), "shardingKey": keys}, topic=topic, ordered="true")
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for message in stored(cluster, topic, len(numbers)):
        found[keys[int(message.body)]][message.queue_id].append(int(message.body))
    # By broker and queue, because both brokers have the same queue ids, and no key has rows on both.
    assert {key: list(queues.values()) for key, queues in found.items()} == {
        f"key-{key}": [list(range(key, 400, 20))] for key in range(20)
    }


def test_delayed_rows_arrive_when_due(cluster: SharedCluster, make_topic: MakeTopic) -> None:
    topic = make_topic("DELAY")
    write(cluster, {"body": ["late", "later"], "delayMs": [1000, 2000]}, topic=topic)
    assert sorted(message.body for message in stored(cluster, topic, 2)) == [b"late", b"later"]


@pytest.mark.parametrize(
    ("message_type", "columns", "text"),
    [
        ("NORMAL", {"shardingKey": ["k"]}, "column shardingKey makes FIFO messages"),
        ("NORMAL", {"delayMs": [1]}, "column delayMs makes DELAY messages"),
        ("FIFO", {}, "accepts messages of the type FIFO only.*add the column shardingKey"),
    ],
)
def test_columns_that_do_not_fit_the_topic_are_refused_before_any_task(
    cluster: SharedCluster, make_topic: MakeTopic, message_type: str, columns: dict[str, list[Any]], text: str
) -> None:
    with pytest.raises(SchemaError, match=text):
        write(cluster, {"body": ["x"], **columns}, topic=make_topic(message_type))


def test_unknown_topic_times_out_with_advice(cluster: SharedCluster, topic: str) -> None:
    with pytest.raises(RouteNotFoundException, match=rf"the proxy does not know it.*create it first .*-t {topic} "):
        write(cluster, {"body": ["x"]}, topic=topic, sendMsgTimeout="5000", deliveryTimeoutMs="5000")


@pytest.mark.parametrize("with_topic", [True, False])
def test_an_address_that_is_no_proxy_fails_within_seconds(cluster: SharedCluster, with_topic: bool) -> None:
    columns = {"body": ["x"], **({} if with_topic else {"topic": ["t"]})}
    options = {"topic": "t"} if with_topic else {}
    with pytest.raises(RocketMQError, match=f"{cluster.name_server}.*not of name servers or brokers"):
        write(cluster, columns, endpoints=cluster.name_server, sendMsgTimeout="1000", **options)


def test_producer_supports_all_sends_that_a_proxy_supports(cluster: SharedCluster, make_topic: MakeTopic) -> None:
    topic = make_topic("NORMAL")
    with Producer("pg-grpc", endpoints=cluster.endpoints) as producer:
        one = producer.send(Message.of(topic, b"one", tags="t", keys=["a", "b"], properties={"own": "1"}))
        two = producer.send_async(Message.of(topic, b"two")).result(PATIENCE)
        producer.send_batch([Message.of(topic, b"three"), Message.of(topic, b"four")])
        producer.send_arrow(pa.table({"body": ["five", "six"]}), topic)
        with pytest.raises(MQClientException, match="transport=remoting"):
            producer.send_oneway(Message.of(topic, b"never"))
    found = {message.body: message for message in stored(cluster, topic, 6)}
    assert sorted(found) == [b"five", b"four", b"one", b"six", b"three", b"two"]
    assert (found[b"one"].tags, found[b"one"].keys, found[b"one"].properties["own"]) == ("t", "a b", "1")
    assert [found[b"one"].unique_id, found[b"two"].unique_id] == [one.msg_id, two.msg_id]
    assert one.message_queue.queue_id == -1


@pytest.mark.parametrize("protocol", ["remoting", "grpc"])
def test_recall_is_rejected_where_brokers_forbid_it(
    cluster: SharedCluster, make_topic: MakeTopic, protocol: str
) -> None:
    topic, over_grpc = make_topic("DELAY"), protocol == "grpc"
    servers: dict[str, Any] = {"endpoints": cluster.endpoints} if over_grpc else {"name_server": cluster.name_server}
    with Producer(f"pg-recall-{protocol}", **servers) as producer:
        sent = producer.send(Message.of(topic, b"x", delay_ms=60_000))
        with pytest.raises(MQBrokerException, match=f"recalling a message of topic {topic}.*forbidden"):
            producer.recall_message(topic, sent.recall_handle)
