"""Messages of the public producer, decoded by RocketMQ's own Java classes."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.routing.selectors import SelectMessageQueueByHash
from tests.interop.test_java_client import make_topic
from tests.support.cluster import SharedCluster
from tests.support.java import Java, line_of
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

LARGE = b" ".join(random.Random(5).choices([b"queue", b"topic", b"broker", b"a message of many words"], k=20_000))


@pytest.fixture
def producer(cluster: SharedCluster) -> Iterator[Producer]:
    with Producer(f"pg-{uuid.uuid4().hex[:8]}", name_server=cluster.name_server) as started:
        yield started


def test_a_java_consumer_reads_every_kind_of_message(java: Java, cluster: SharedCluster, topic: str) -> None:
    for kind in ("ZLIB", "LZ4", "ZSTD"):
        group = f"pg-{uuid.uuid4().hex[:8]}"
        with Producer(group, name_server=cluster.name_server, compress_type=kind) as producer:
            producer.send(Message.of(topic, LARGE, tags=kind))
    with Producer(f"pg-{uuid.uuid4().hex[:8]}", name_server=cluster.name_server) as producer:
        producer.send(
            Message.of(
                topic, b"plain", tags="plain", keys="k", flag=-7, properties={"gr\u00fc\u00df": "dich \U0001f600"}
            )
        )
        batch = producer.send_batch([Message.of(topic, b"member-%d" % number, tags="batch") for number in range(3)])
        sent_at = time.time() * 1000
        producer.send(Message.of(topic, b"later", tags="delayed", delay_time_level=1))
    found = java.read_topic(cluster.name_server, topic, 8)
    by_tag: dict[str, list[dict[str, object]]] = {}
    for line in found:
        by_tag.setdefault(line["properties"]["TAGS"], []).append(line)
    assert [by_tag[kind][0]["body"] for kind in ("ZLIB", "LZ4", "ZSTD")] == [LARGE] * 3
    [plain] = by_tag["plain"]
    assert (plain["body"], plain["flag"]) == (b"plain", -7)
    properties = plain["properties"]
    assert isinstance(properties, dict)
    assert (properties["gr\u00fc\u00df"], properties["KEYS"]) == ("dich \U0001f600", "k")
    assert sorted(str(line["msgId"]) for line in by_tag["batch"]) == sorted(batch.msg_id.split(","))
    [later] = by_tag["delayed"]
    assert float(str(later["storeTimestamp"])) >= sent_at + 900


def test_the_same_key_meets_the_same_queue_from_java(
    java: Java, cluster: SharedCluster, producer: Producer, topic: str
) -> None:
    make_topic(cluster, topic)
    keys = ["", "order-17", "\U0001f600", "h\u00e9", "polygenelubricants"]
    select = SelectMessageQueueByHash()
    ours = [producer.send(Message.of(topic, b"x"), selector=select, arg=key).message_queue for key in keys]
    theirs = java.send(cluster.name_server, [{"messages": [line_of(topic, b"x")], "hashKey": key} for key in keys])
    assert [(one.broker_name, one.queue_id) for one in ours] == [(one["brokerName"], one["queueId"]) for one in theirs]


def test_javas_decoder_reads_our_trace_records(java: Java, cluster: SharedCluster, topic: str) -> None:
    # A trace topic for this test only, because other tests write to the brokers' default one.
    trace_topic = f"trace-{uuid.uuid4().hex[:8]}"
    group = f"pg-{uuid.uuid4().hex[:8]}"
    with Producer(group, name_server=cluster.name_server, enable_trace=True, trace_topic=trace_topic) as producer:
        result = producer.send(Message.of(topic, b"hello", tags="t", keys="k1 k2"))
    [message] = read_topic(cluster.name_server, trace_topic, 1)
    assert message.keys == f"{result.msg_id} k1 k2"
    [record] = java.run("Traces", [{"text": message.body.decode()}])
    assert record["traceType"] == "Pub"
    assert (record["groupName"], record["topic"], record["tags"], record["keys"]) == (group, topic, "t", "k1 k2")
    assert (record["msgId"], record["offsetMsgId"]) == (result.msg_id, result.offset_msg_id)
    assert (record["msgType"], record["bodyLength"], record["success"]) == ("Normal_Msg", 5, True)
    assert record["regionId"] == result.region_id


def test_javas_decoder_reads_the_trace_of_a_table(java: Java, cluster: SharedCluster, topic: str) -> None:
    trace_topic = f"trace-{uuid.uuid4().hex[:8]}"
    tracing: dict[str, Any] = {"enable_trace": True, "trace_topic": trace_topic}
    with Producer(f"pg-{uuid.uuid4().hex[:8]}", name_server=cluster.name_server, **tracing) as producer:
        table = pa.table({"body": ["one", "two"], "keys": ["k1", "k2"], "tags": ["a", None]})
        producer.send_arrow(table, topic)
    stored = {message.unique_id: message for message in read_topic(cluster.name_server, topic, 2)}
    [message] = read_topic(cluster.name_server, trace_topic, 1)
    records = java.run("Traces", [{"text": message.body.decode()}])
    assert {record["msgId"]: (record["offsetMsgId"], record["keys"]) for record in records} == {
        unique_id: (one.offset_msg_id, one.keys) for unique_id, one in stored.items()
    }
    assert {(record["traceType"], record["topic"], record["success"]) for record in records} == {("Pub", topic, True)}
