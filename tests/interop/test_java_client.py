"""Messages of our producer read by a Java consumer, and messages of a Java producer read by us, on a real broker."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.arrow.batcher import RemotingBatcher
from rocketmq_spark.arrow.encoders import UniqueIds
from rocketmq_spark.arrow.hashes import RowIds
from rocketmq_spark.model.hashes import queue_index, row_hash, string_hash
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.names import wrap
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.encode import MessageEncoder
from rocketmq_spark.protocol.compression import CompressionType, compress, decompress
from rocketmq_spark.protocol.remoting.records import encode_properties
from rocketmq_spark.protocol.unique_id import UniqueIdGenerator
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.encoding import batch_options
from tests.support.java import Java, line_of
from tests.support.processes import PATIENCE
from tests.support.reading import read_topic

pytestmark = pytest.mark.integration

IDS = UniqueIdGenerator(bytes([127, 0, 0, 1]))
LARGE = b" ".join(random.Random(5).choices([b"queue", b"topic", b"broker", b"a message of many words"], k=60_000))


def make_topic(cluster: SharedCluster, topic: str) -> tuple[MessageQueue, ...]:
    """Create a topic of two queues per broker, and return its queues in the order of Java's queue selection."""
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 2, 6, PATIENCE)
        return publish_info_of(topic, transport.query_route(topic, PATIENCE)).queues


def send(cluster: SharedCluster, *batches: EncodedBatch) -> list[SendOutcome]:
    """Send each batch to the first queue of its topic."""
    found = []
    with RemotingTransport([cluster.name_server]) as transport:
        for batch in batches:
            info = publish_info_of(batch.topic, transport.query_route(batch.topic, PATIENCE))
            queue = info.queues[0]
            now = int(time.time() * 1000)
            request = SendRequest(batch, queue, info.addresses[queue.broker_name], "interop", "TBW102", 4, now)
            answer: Future[SendOutcome] = Future()
            transport.send(request, PATIENCE, answer.set_result)
            found.append(answer.result(PATIENCE))
    assert {SendStatus.SEND_OK} == {outcome.status for outcome in found}
    return found


def single(message: Message, kind: CompressionType | None = None) -> EncodedBatch:
    body = compress(message.body, kind) if kind else message.body
    return EncodedBatch(
        message.topic,
        (body,),
        1,
        len(body),
        batch=False,
        properties=encode_properties(message.properties).decode(),
        flag=message.flag,
        sys_flag=kind.sys_flag if kind else 0,
    )


def test_java_consumer_decompresses_our_bodies(java: Java, cluster: SharedCluster, topic: str) -> None:
    make_topic(cluster, topic)
    sent = [
        (Message.of(topic, body, tags=kind.name, properties={"size": str(len(body))}), kind)
        for kind in CompressionType
        for body in (LARGE[:4096], LARGE[: 64 * 1024 + 1], LARGE)
    ]
    send(cluster, *(single(message, kind) for message, kind in sent))
    found = java.read_topic(cluster.name_server, topic, len(sent))
    assert [message.body for message, _ in sent] == [one["body"] for one in found]
    assert [kind.name for _, kind in sent] == [one["properties"]["TAGS"] for one in found]


def test_a_java_consumer_reads_our_batch_and_filters_by_its_tags(
    java: Java, cluster: SharedCluster, topic: str
) -> None:
    make_topic(cluster, topic)
    members = [
        Message.of(
            topic, b"%d" % number, tags="even" if number % 2 == 0 else "odd", keys=["k", str(number)], flag=-number
        )
        for number in range(100)
    ]
    batch = MessageEncoder(ProducerOptions(), IDS.next_id).encode_batch(members)
    [outcome] = send(cluster, batch.encoded)
    found = java.read_topic(cluster.name_server, topic, 50, tags="odd")
    odd = members[1::2]
    assert [member.body for member in odd] == [one["body"] for one in found]
    assert [member.flag for member in odd] == [one["flag"] for one in found]
    assert [member.keys for member in odd] == [one["properties"]["KEYS"] for one in found]
    assert batch.msg_id.split(",")[1::2] == [one["msgId"] for one in found]
    assert [outcome.queue_offset + number for number in range(1, 100, 2)] == [one["queueOffset"] for one in found]


def test_java_consumer_in_a_namespace_reads_our_message(java: Java, cluster: SharedCluster, topic: str) -> None:
    wrapped = wrap("MQ_INST_1_interop", topic)
    make_topic(cluster, wrapped)
    send(cluster, single(Message.of(wrapped, b"body", properties={"INSTANCE": "1"})))
    [found] = java.read_topic(cluster.name_server, topic, 1, namespace="MQ_INST_1_interop")
    assert (topic, b"body") == (found["topic"], found["body"])


def test_results_and_queues_of_a_java_producer_match_this_client(
    java: Java, cluster: SharedCluster, topic: str
) -> None:
    queues = make_topic(cluster, topic)
    keys = ["", "polygenelubricants", "order-17", "\U0001f600", "h\u00e9", "negative-hash"]
    requests = [
        {"messages": [line_of(topic, key.encode() or b"empty", {"__SHARDINGKEY": key} if key else {})], "hashKey": key}
        for key in keys
    ]
    results = java.send(cluster.name_server, requests)
    assert {"SEND_OK"} == {result["status"] for result in results}
    chosen = [queues[queue_index(string_hash(key), len(queues))] for key in keys]
    assert chosen == [MessageQueue(one["topic"], one["brokerName"], one["queueId"]) for one in results]
    stored = {message.properties["UNIQ_KEY"]: message for message in read_topic(cluster.name_server, topic, len(keys))}
    assert {one["msgId"] for one in results} == set(stored)
    for key, result in zip(keys, results, strict=True):
        message = stored[result["msgId"]]
        assert (key.encode() or b"empty") == message.body
        assert result["offsetMsgId"] == message.offset_msg_id
        assert result["queueOffset"] == message.queue_offset


def test_bodies_compressed_by_a_java_producer_are_decompressed(java: Java, cluster: SharedCluster, topic: str) -> None:
    make_topic(cluster, topic)
    sent = [(kind, body) for kind in CompressionType for body in (LARGE, b"x" * 4096)]
    requests = [
        {"messages": [line_of(topic, body, {"TAGS": kind.name})], "compressType": kind.name} for kind, body in sent
    ]
    java.send(cluster.name_server, requests)
    stored = read_topic(cluster.name_server, topic, len(sent))
    for message in stored:
        assert CompressionType.of_sys_flag(message.sys_flag) is CompressionType.parse(message.properties["TAGS"])
    unpacked = [(message.properties["TAGS"], decompress(message.body, message.sys_flag)) for message in stored]
    assert sorted((kind.name, body) for kind, body in sent) == sorted(unpacked)


def encoded_rows(topic: str, bodies: list[bytes], **settings: Any) -> list[EncodedBatch]:
    """Encode bodies like the sink, with an id for each row."""
    batcher = RemotingBatcher(
        batch_options(topic=topic, **settings),
        partition_id=0,
        queues_of=lambda _: (),
        unique_ids=UniqueIds(ip=bytes([127, 0, 0, 1]), pid=1, wall_clock=time.time, rng=random.Random()),
        row_ids=RowIds("a-write", -1, 0),
    )
    rows = pa.RecordBatch.from_pydict({"body": bodies, "keys": [f"k{place}" for place in range(len(bodies))]})
    return [batch for batch, _ in (*batcher.add(rows, 0.0), *batcher.flush())]


@pytest.mark.parametrize("kind", CompressionType)
def test_java_decompresses_long_rows_of_a_batch_and_reads_their_ids(
    java: Java, cluster: SharedCluster, topic: str, kind: CompressionType
) -> None:
    make_topic(cluster, topic)
    bodies = [LARGE, b"short", b"y" * 4096, b"z" * 4095, LARGE[:100_000]]
    send(cluster, *encoded_rows(topic, bodies, compress_type=kind))
    found = {one["properties"]["KEYS"]: one for one in java.read_topic(cluster.name_server, topic, len(bodies))}
    assert [found[f"k{place}"]["body"] for place in range(len(bodies))] == bodies
    for place, body in enumerate(bodies):
        properties = found[f"k{place}"]["properties"]
        assert properties["SPARK_ROW_ID"] == f"a-write/-1/0/{place}/{row_hash(topic, body, properties)}"


def test_java_consumer_reads_the_items_of_an_inner_batch(java: Java, cluster: SharedCluster, topic: str) -> None:
    with RemotingTransport([cluster.name_server]) as transport:
        for broker in cluster.brokers:
            transport.create_topic(broker.address, topic, 2, 6, PATIENCE, attributes="+queue.type=BatchCQ")
    bodies = [f"body-{place}".encode() for place in range(50)]
    send(cluster, *encoded_rows(topic, bodies, inner_batches=True))
    [record] = read_topic(cluster.name_server, topic, 1, key=lambda message: message.properties["UNIQ_KEY"])
    assert record.properties["INNER_NUM"] == "50"
    found = java.read_topic(cluster.name_server, topic, len(bodies))
    assert [one["body"] for one in found] == bodies
    assert [one["queueOffset"] for one in found] == list(range(50))
