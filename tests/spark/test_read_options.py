"""The effect of each option of `spark.read` on real topics, and the errors for invalid values."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructType

import rocketmq_spark
from rocketmq_spark.admin import Admin
from rocketmq_spark.errors import ReadError
from rocketmq_spark.model.message import Message
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.spark.report import Metrics
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support import fakes
from tests.support.cluster import SharedCluster, create_topic, mqadmin
from tests.support.processes import wait_for
from tests.support.writes import make_topic, messages_in

pytestmark = [pytest.mark.spark, pytest.mark.integration]

Save = Callable[..., None]
Load = Callable[..., DataFrame]
# Broker, queue and offset.
Place = tuple[str, int, int]

PER_QUEUE = 10


def fill(cluster: SharedCluster, topic: str, queues: int = 2, rows: int = PER_QUEUE) -> None:
    """Send `rows` messages to each queue. A body names broker, queue and offset of its message."""
    # A long timeout, because a message that is resent after a timeout may be stored twice.
    with Producer("read-options", name_server=cluster.name_server, send_msg_timeout=60_000) as producer:
        places = [(broker.name, queue) for broker in cluster.brokers for queue in range(queues)]
        columns = {
            "body": [f"{broker} {queue} {offset}" for broker, queue in places for offset in range(rows)],
            "brokerName": [broker for broker, _ in places for _ in range(rows)],
            "queueId": pa.array([queue for _, queue in places for _ in range(rows)], pa.int32()),
        }
        producer.send_arrow(pa.RecordBatch.from_pydict(columns), topic, queueSelector="column")
    wait_for(lambda: messages_in(cluster.name_server, topic) == len(places) * rows)


@pytest.fixture(scope="module")
def filled(cluster: SharedCluster) -> str:
    """A topic with two queues on each of two brokers, and ten messages in each queue."""
    name = create_topic(cluster, "read-options", "NORMAL")
    fill(cluster, name)
    return name


@pytest.fixture
def brokers(cluster: SharedCluster) -> tuple[str, str]:
    first, second = (broker.name for broker in cluster.brokers)
    return first, second


def places(frame: DataFrame) -> Counter[Place]:
    """Return broker, queue and offset of each message, after comparing them with its body."""
    rows = frame.select("body", "brokerName", "queueId", "queueOffset").collect()
    for row in rows:
        assert bytes(row.body).decode() == f"{row.brokerName} {row.queueId} {row.queueOffset}"
    return Counter((row.brokerName, row.queueId, row.queueOffset) for row in rows)


def spans(of_queues: dict[tuple[str, int], range]) -> Counter[Place]:
    return Counter((*queue, offset) for queue, offsets in of_queues.items() for offset in offsets)


def whole(brokers: tuple[str, str], queues: int = 2, rows: int = PER_QUEUE) -> Counter[Place]:
    return spans({(broker, queue): range(rows) for broker in brokers for queue in range(queues)})


def test_offsets_by_queue_can_be_earliest_and_latest(load: Load, filled: str, brokers: tuple[str, str]) -> None:
    one, two = brokers
    starts = {filled: {one: {"0": -2, "1": 4}, two: {"0": 10, "1": 9}}}
    ends = {filled: {one: {"0": 3, "1": -1}, two: {"0": -1, "1": 9}}}
    found = places(load(subscribe=filled, startingOffsets=json.dumps(starts), endingOffsets=json.dumps(ends)))
    assert found == spans({(one, 0): range(3), (one, 1): range(4, 10)})
    words = load(subscribe=filled, startingOffsets="earliest", endingOffsets="LATEST")
    assert places(words) == places(load(subscribe=filled)) == whole(brokers)


def test_end_offset_that_is_never_stored_times_out(load: Load, filled: str, brokers: tuple[str, str]) -> None:
    one, two = brokers
    ends = {filled: {one: {"0": 12, "1": -1}, two: {"0": -1, "1": -1}}}
    beyond = load(subscribe=filled, endingOffsets=json.dumps(ends), readTimeoutMs="1000", pullTimeoutMs="1000")
    with pytest.raises(PySparkException, match=r"nothing came from offset 10 on for readTimeoutMs=1000"):
        beyond.collect()


def test_a_start_beyond_the_end_of_a_queue_is_lost_data(load: Load, filled: str, brokers: tuple[str, str]) -> None:
    one, two = brokers
    starts = {filled: {one: {"0": 12, "1": 9}, two: {"0": -2, "1": -2}}}
    options = {"subscribe": filled, "startingOffsets": json.dumps(starts), "pullTimeoutMs": "500"}
    lost = rf"{filled}/{one}/0 ends at offset 10, before 12, where the read begins: .*failOnDataLoss=false"
    with pytest.raises(PySparkException, match=lost):
        load(**options).collect()
    found = places(load(**options, failOnDataLoss="false"))
    assert found == spans({(one, 1): range(9, 10), (two, 0): range(10), (two, 1): range(10)})


def test_offsets_with_missing_or_unknown_queues_are_rejected(load: Load, filled: str, brokers: tuple[str, str]) -> None:
    one, two = brokers
    some = json.dumps({filled: {one: {"0": -2}, two: {"0": 0, "1": 0}}})
    with pytest.raises(PySparkException, match=rf"startingOffsets names some queues and not .*{one}.*1.*name every"):
        load(subscribe=filled, startingOffsets=some).collect()
    strange = json.dumps({filled: {name: {"0": 0, "1": 0, "7": 0} for name in brokers}})
    with pytest.raises(PySparkException, match=r"startingOffsets names .*7.*, which can't be read: no such queue"):
        load(subscribe=filled, startingOffsets=strange).collect()
    with pytest.raises(PySparkException, match=r"assign names .*7.*, which can't be read"):
        load(assign=json.dumps({filled: {one: [0, 7]}})).collect()


def test_several_topics_are_read_by_name_path_and_queues(
    spark: SparkSession, cluster: SharedCluster, topic: str, load: Load, filled: str, brokers: tuple[str, str]
) -> None:
    other = create_topic(cluster, topic, "NORMAL")
    fill(cluster, other, rows=1)
    both = Counter({filled: 40, other: 4})
    by_path = spark.read.format("rocketmq").option("nameServer", cluster.name_server).load(f"{filled},{other}")
    for frame in (load(subscribe=f" {filled} , {other} "), load(topic=f"{other},{filled}"), by_path):
        assert Counter(row.topic for row in frame.collect()) == both
    chosen = load(assign=json.dumps({filled: {brokers[0]: [1]}, other: {brokers[1]: [0, 1]}}))
    assert Counter((row.topic, row.brokerName, row.queueId) for row in chosen.collect()) == {
        (filled, brokers[0], 1): 10,
        (other, brokers[1], 0): 1,
        (other, brokers[1], 1): 1,
    }


def test_pattern_matches_whole_names_and_skips_system_topics(cluster: SharedCluster, topic: str, load: Load) -> None:
    names = [f"{topic}-a", f"{topic}-ab", f"before-{topic}-a", f"%RETRY%{topic}-a", f"%DLQ%{topic}-a"]
    with Producer("read-pattern", name_server=cluster.name_server) as producer:
        for name in names:
            create_topic(cluster, name, "NORMAL", 1)
            producer.send(Message.of(name, b"x"))
    wait_for(lambda: all(messages_in(cluster.name_server, name) == 1 for name in names))

    def read(pattern: str) -> list[str]:
        return sorted(row.topic for row in load(subscribePattern=pattern).select("topic").collect())

    assert read(f"{topic}-a") == [names[0]]
    assert read(f"{topic}-a.?|TBW102|SELF_TEST_TOPIC|RMQ_SYS.*") == names[:2]
    assert read(f".*{topic}-a") == [names[2], names[0]]
    # A topic that the user names is read, even if patterns exclude it.
    assert [row.topic for row in load(subscribe=names[3]).collect()] == [names[3]]
    assert read(f"nobody-{topic}") == []


def test_receipt_reads_exactly_the_rows_of_its_write(
    spark: SparkSession, cluster: SharedCluster, topic: str, metrics: Metrics, save: Save, load: Load
) -> None:
    # Create the topic first: otherwise first messages create it on one broker after the other.
    create_topic(cluster, topic, "NORMAL")
    receipts = []
    for writer in range(3):
        save(spark.range(0, 3_000, 1, 3).selectExpr(f"concat('{writer} ', id) AS body"), batchBytes="8k")
        receipts.append(json.dumps(metrics.to_dict(metrics.writes()[-1][0])))
    for writer, text in enumerate(receipts):
        expected = Counter(f"{writer} {number}" for number in range(3_000))
        assert Counter(bytes(row.body).decode() for row in load(startingOffsets=text).collect()) == expected
    # From the start of the first write to the end of the second. `subscribe` is allowed too.
    frame = load(subscribe=topic, startingOffsets=receipts[0], endingOffsets=receipts[1])
    assert Counter(bytes(row.body[:1]) for row in frame.collect()) == {b"0": 3_000, b"1": 3_000}


@pytest.mark.parametrize(
    ("options", "partitions"),
    [
        ({}, 1),
        ({"minPartitions": "4"}, 4),
        ({"minPartitions": "10"}, 12),
        ({"minPartitions": "1000"}, 40),
        ({"maxRecordsPerPartition": "10"}, 4),
        ({"maxRecordsPerPartition": "4"}, 12),
        ({"maxRecordsPerPartition": "1", "minPartitions": "2"}, 40),
    ],
)
def test_every_message_is_read_once_with_the_expected_number_of_tasks(
    load: Load, filled: str, brokers: tuple[str, str], options: dict[str, str], partitions: int
) -> None:
    frame = load(subscribe=filled, **options)
    assert frame.rdd.getNumPartitions() == partitions
    assert places(frame) == whole(brokers)


def test_a_hundred_queues_are_read_whole(
    cluster: SharedCluster, topic: str, load: Load, brokers: tuple[str, str]
) -> None:
    create_topic(cluster, topic, "NORMAL", 50)
    fill(cluster, topic, queues=50, rows=40)
    assert places(load()) == places(load(pullBatchSize="7")) == whole(brokers, 50, 40)


def test_empty_topic_has_no_rows_and_one_message_one_row(cluster: SharedCluster, topic: str, load: Load) -> None:
    create_topic(cluster, topic, "NORMAL")
    inner = create_topic(cluster, f"{topic}-inner", "NORMAL", inner=True)
    assert load(subscribe=f"{topic},{inner}").collect() == []
    assert load(minPartitions="8").count() == 0
    assert load(subscribe=f"{topic},{inner}", endingTimestamp="1").collect() == []
    with Producer("read-one", name_server=cluster.name_server) as producer:
        producer.send(Message.of(topic, b"one"))
    wait_for(lambda: messages_in(cluster.name_server, topic) == 1)
    assert [bytes(row.body) for row in load(minPartitions="8").collect()] == [b"one"]


def test_limited_read_returns_early(load: Load, filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    frame = load(subscribe=filled)
    assert len(frame.limit(3).collect()) == len(frame.take(3)) == 3
    assert frame.first() is not None
    frame.select("queueId").show(2)
    assert "only showing top 2 rows" in capsys.readouterr().out
    assert not frame.isEmpty()


def test_include_properties_false_omits_the_column(load: Load, filled: str) -> None:
    frame = load(subscribe=filled, includeProperties="false")
    assert "properties" not in frame.columns
    assert frame.where("msgId IS NOT NULL AND queueOffset < 3").count() == 12


@pytest.fixture
def with_schema(
    spark: SparkSession, cluster: SharedCluster, filled: str, metrics: Metrics
) -> Callable[..., list[tuple[Any, ...]]]:
    def rows(schema: str | StructType, **options: str) -> list[tuple[Any, ...]]:
        reader = spark.read.format("rocketmq").options(nameServer=cluster.name_server, subscribe=filled, **options)
        return [tuple(row) for row in reader.schema(schema).load().collect()]

    return rows


def test_user_schema_selects_and_orders_columns(
    with_schema: Callable[..., list[tuple[Any, ...]]], brokers: tuple[str, str]
) -> None:
    found = with_schema("queueOffset bigint, brokerName string, queueId int")
    assert Counter((broker, queue, offset) for offset, broker, queue in found) == whole(brokers)
    assert with_schema("tags string, keys string") == [(None, None)] * 40
    assert {name for (properties,) in with_schema("properties map<string,string>") for name in properties} >= {
        "UNIQ_KEY"
    }


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("body string", "column body is binary in a read, not string; leave .schema"),
        ("storeTimestamp bigint", "column storeTimestamp is timestamp in a read, not bigint"),
        ("body binary, value string", "a read has no column value; its columns are topic string, body binary"),
        (StructType(), "it names no column"),
        ("Body binary", "a read has no column Body"),
        ("properties map<string,int>", "column properties is map<string,string> in a read"),
        (StructType().add("tags", StringType(), nullable=False), "column tags may be null"),
    ],
)
def test_user_schema_with_unsupported_columns_or_types_is_rejected(
    with_schema: Callable[..., list[tuple[Any, ...]]], schema: str | StructType, text: str
) -> None:
    with pytest.raises(PySparkException) as raised:
        with_schema(schema)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingOfsets": "earliest"}, "unknown option 'startingofsets': did you mean startingOffsets"),
        ({"sendMsgTimeout": "3000"}, "sendMsgTimeout is an option of a write"),
        ({"startingOffsets": "latest"}, "startingOffsets=latest: starting offset can't be latest for batch queries"),
        ({"startingOffsets": "{"}, "startingOffsets"),
        ({"assign": '{"t":{"b":[0]}}'}, "only one of the following options"),
        ({"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger is for streams"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"filterType": "SQL92"}, "filterType=SQL92 requires a condition"),
        ({"endpoints": "127.0.0.1:8081"}, "endpoints is an option of a write: reads use only the remoting protocol"),
        ({"nameServer": ""}, "nameServer"),
    ],
)
def test_invalid_options_are_rejected_before_any_task(
    load: Load, filled: str, options: dict[str, str], text: str
) -> None:
    with pytest.raises(PySparkException) as raised:
        load(**{"subscribe": filled, **options}).collect()
    assert text in str(raised.value)


def test_read_without_a_name_server_fails_with_advice(
    spark: SparkSession, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(PySparkException, match="nameServer is missing: give"):
        spark.read.format("rocketmq").option("subscribe", "orders").load().collect()


def test_a_topic_that_does_not_exist_is_an_error_and_is_not_created(
    cluster: SharedCluster, topic: str, load: Load
) -> None:
    for _ in range(2):
        with pytest.raises(
            PySparkException, match=rf"reading topic {topic}: .*TOPIC_NOT_EXIST.*create the topic, or check"
        ):
            load(subscribe=topic).collect()


def test_topic_without_read_permission_is_an_error_with_the_command(
    spark: SparkSession, cluster: SharedCluster, topic: str, load: Load, tmp_path: Path
) -> None:
    one, two = cluster.brokers
    make_topic(cluster, topic, queues=1)
    fill(cluster, topic, queues=1)
    make_topic(cluster, topic, queues=1, perm=2, on=[two])
    text = rf"reading topic {topic}: broker {two.name} rejects reads, because the topic's permission there is w"
    stream = spark.readStream.format("rocketmq").option("nameServer", cluster.name_server).load(topic)
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(StreamingQueryException, match=text):
        query.awaitTermination(60)
    with pytest.raises(PySparkException, match=text):
        load(assign=json.dumps({topic: {two.name: [0]}})).collect()
    assert load(assign=json.dumps({topic: {one.name: [0]}})).count() == PER_QUEUE
    with pytest.raises(ReadError, match=text) as raised:
        rocketmq_spark.read_arrow(topic, nameServer=cluster.name_server)
    with pytest.raises(PySparkException, match=text):
        load().collect()
    # The command of the error.
    command = re.search(rf"mqadmin (updateTopicPerm -t {topic} -b {two.address} -p 6)\.", str(raised.value))
    assert command is not None
    mqadmin(tmp_path, *shlex.split(command[1]), "-n", cluster.name_server)
    wait_for(lambda: all(data.perm == 6 for data in Admin(cluster.name_server).route(topic).queue_datas))
    assert load().count() == 2 * PER_QUEUE


def test_broker_that_one_name_server_does_not_list_is_read(
    cluster: SharedCluster, load: Load, filled: str, brokers: tuple[str, str]
) -> None:
    with Admin(cluster.name_server) as admin:
        part = admin.route(filled).only(brokers[:1])
    with fakes.name_server({filled: part}) as restarted:
        for servers in (f"{restarted.address};{cluster.name_server}", f"{cluster.name_server};{restarted.address}"):
            assert places(load(nameServer=servers, subscribe=filled)) == whole(brokers)
        alone = {"nameServer": restarted.address, "subscribe": filled}
        assert load(**alone).count() == 2 * PER_QUEUE
        with pytest.raises(PySparkException, match=rf"requireBrokers=2: .* list {brokers[0]}, and not 2 brokers"):
            load(**alone, requireBrokers="2").collect()


def test_queues_above_the_read_queues_of_a_topic_are_an_error(cluster: SharedCluster, topic: str, load: Load) -> None:
    make_topic(cluster, topic, queues=2)
    fill(cluster, topic)
    broker = cluster.brokers[0]
    with RemotingTransport([cluster.name_server]) as transport:
        transport.create_topic(broker.address, topic, 2, 6, 5.0, read_queue_nums=1)
        wait_for(lambda: transport.query_route(topic, 5.0).queue_datas[0].read_queue_nums == 1)
    with pytest.raises(PySparkException, match=rf"broker {broker.name} rejects reads of the queues 1 to 1, because"):
        load().collect()


def test_a_name_server_that_does_not_answer_is_an_error_that_names_it(load: Load) -> None:
    with pytest.raises(PySparkException, match=r"127\.0\.0\.1:1\b"):
        load(nameServer="127.0.0.1:1", subscribe="orders", pullTimeoutMs="2000", readTimeoutMs="2000").collect()
