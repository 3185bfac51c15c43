"""Arrow tables from plain Python: the checks that the driver makes for a DataFrame."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.errors import (
    InvalidRowError,
    MQBrokerException,
    OptionError,
    RemotingConnectException,
    RequestNotSupportedException,
    RouteNotFoundException,
    SchemaError,
)
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options, parse_source_options
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.sink.task import SendContext, write_rows
from rocketmq_spark.testing import FakeCluster, Reply
from tests.support.scripted import ScriptedTransport, route

KEYS = [f"key-{number}" for number in range(20)]


def keyed(first: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": [f"{first}"] * len(KEYS), "shardingKey": KEYS})


def test_queues_of_an_ordered_write_are_fixed_despite_route_changes(
    producer: Producer, transport: ScriptedTransport
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield keyed(0)
        transport.routes["T"] = route({"a": 2, "b": 2, "c": 3})
        assert producer._service is not None
        assert producer._service.instance.routes.refresh("T", 1.0)
        yield keyed(1)

    producer.send_arrow(batches(), "T", ordered="true")
    queues = {
        key: {queue for queue, messages in transport.stored.items() for one in messages if one.sharding_key == key}
        for key in KEYS
    }
    assert {len(found) for found in queues.values()} == {1}
    assert sum(map(len, transport.stored.values())) == 2 * len(KEYS)


def test_rows_of_small_record_batches_are_sent_before_the_next_one(
    producer: Producer, transport: ScriptedTransport
) -> None:
    def stored() -> int:
        return sum(map(len, list(transport.stored.values())))

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            yield pa.RecordBatch.from_pydict({"body": ["x"] * 20, "keys": KEYS})
            deadline = time.monotonic() + 60
            while stored() < 20 * (number + 1) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(stored())

    seen: list[int] = []
    producer.send_arrow(batches(), "T")
    assert seen == [20, 40, 60]


def test_topics_of_delayed_rows_may_be_views(producer: Producer, transport: ScriptedTransport) -> None:
    topics = pa.array(["T", "T"]).cast(pa.string_view())
    producer.send_arrow(pa.table({"body": ["x", "y"], "topic": topics, "delayMs": [1000, None]}))
    delays = {message.body: message.delay_ms for messages in transport.stored.values() for message in messages}
    assert delays == {b"x": 1000, b"y": 0}


def test_an_option_of_none_is_not_given(producer: Producer, transport: ScriptedTransport) -> None:
    table = pa.table({"body": ["x", None]})
    producer.send_arrow(table, "T", tags=None, transactionalId=None, rowId=None, onError="skip", deadLetterTopic=None)
    ((message,),) = transport.stored.values()
    assert (message.body, message.tags) == (b"x", None)
    with pytest.raises(OptionError, match="requires the option deadLetterTopic"):
        producer.send_arrow(table, "T", onError="deadLetter", deadLetterTopic=None)


def test_an_ordered_write_needs_a_topic_that_exists(producer: Producer, transport: ScriptedTransport) -> None:
    transport.routes["TBW102"] = route({"a": 4})
    with pytest.raises(RouteNotFoundException, match="topic new for an ordered write: the topic does not exist"):
        producer.send_arrow(keyed(0), "new", ordered="true")
    assert transport.requests == []


def test_missing_row_id_column_is_rejected_before_sending(
    make_producer: Callable[..., Producer], transport: ScriptedTransport
) -> None:
    with make_producer() as producer, pytest.raises(SchemaError, match="rowId=columns:order_id: there is no column"):
        producer.send_arrow(keyed(0), "T", rowId="columns:order_id")
    assert transport.requests == []


def test_ordered_write_without_sharding_keys_is_rejected_despite_skip(
    producer: Producer, transport: ScriptedTransport
) -> None:
    with pytest.raises(SchemaError, match="ordered=true keeps the order of rows of one shardingKey"):
        producer.send_arrow(pa.table({"body": ["x"]}), "T", ordered="true", onError="skip")
    assert transport.requests == []


def test_options_can_be_numbers_and_booleans(producer: Producer, transport: ScriptedTransport) -> None:
    producer.send_arrow(keyed(0), "T", ordered=True, batchBytes=2048)
    assert len(transport.requests) > 1
    assert sum(map(len, transport.stored.values())) == len(KEYS)


def test_inner_batches_require_a_batch_topic_if_its_type_is_known(
    producer: Producer, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    transport.attributes["T"] = {"message.type": "NORMAL", "queue.type": "SimpleCQ"}
    with pytest.raises(OptionError, match="topic T is of the type SimpleCQ on a; batchType=inner is for topics of the"):
        producer.send_arrow(keyed(0), "T", batchType="inner")
    assert transport.requests == []
    transport.attributes["T"] = {"queue.type": "BatchCQ"}
    producer.send_arrow(keyed(0), "T", batchType="inner")
    assert not caplog.records
    for _ in range(2):
        transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    producer.send_arrow(keyed(1), "T", batchType="inner")
    assert "batchType=inner: the type of topic T is unknown. If it is not BatchCQ, " in caplog.text
    assert "one by one: asking" in caplog.text
    assert sum(map(len, transport.stored.values())) == 2 * len(KEYS)


DELIVERY = {"delayMs": pa.array([None, 60_000]), "deliverTime": pa.array([None, 2**50], pa.timestamp("us", "UTC"))}


@pytest.mark.parametrize("options", [{"topic": "T"}, {}], ids=["option topic", "column topic"])
@pytest.mark.parametrize("column", DELIVERY)
@pytest.mark.parametrize("release", ["V4_9_7", "V5_0_0", ""])
def test_times_of_delivery_are_refused_where_brokers_have_no_timers(
    producer: Producer, transport: ScriptedTransport, column: str, options: dict[str, str], release: str
) -> None:
    transport.release = release
    for _ in range(2):
        transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    columns = {"body": ["at once", "later"], column: DELIVERY[column]}
    rows = pa.table(columns if options else {**columns, "topic": ["T", "T"]})
    if release == "V4_9_7":
        error = f"column {column}: broker a of topic T has RocketMQ 4.9.7, which ignores .* use delayTimeLevel"
        with pytest.raises(SchemaError, match=error):
            producer.send_arrow(rows, **options)
        assert transport.requests == []
    else:
        producer.send_arrow(rows, **options)
        assert sum(map(len, transport.stored.values())) == 2


@pytest.mark.parametrize("topic", [b"\xff\xfe", b"t" * 128, b"SCHEDULE_TOPIC_XXXX", b"", None])
def test_a_delayed_row_with_an_invalid_topic_is_skipped(
    producer: Producer, transport: ScriptedTransport, topic: bytes | None
) -> None:
    # Spark's `cast(binary as string)` makes strings of any bytes.
    topics = pa.array([b"T", topic])
    strings = pa.Array.from_buffers(pa.string(), 2, topics.buffers())
    rows = pa.table({"body": ["valid", "invalid"], "topic": strings, "delayMs": [60_000, 60_000]})
    producer.send_arrow(rows, onError="skip")
    assert [message.body for messages in transport.stored.values() for message in messages] == [b"valid"]


def test_rows_without_a_delay_need_no_timers(producer: Producer, transport: ScriptedTransport) -> None:
    transport.release = "V4_9_7"
    transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    rows = pa.table({"body": ["x"], "topic": ["T"], "delayMs": pa.array([None], pa.int64())})
    producer.send_arrow(rows)
    assert sum(map(len, transport.stored.values())) == 1


def test_inner_batches_are_refused_where_brokers_store_rows_one_by_one(
    producer: Producer, transport: ScriptedTransport
) -> None:
    transport.release = "V4_9_7"
    for _ in range(2):
        transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    with pytest.raises(OptionError, match=r"batchType=inner: broker a of topic T has RocketMQ 4\.9\.7, which stores"):
        producer.send_arrow(keyed(0), "T", batchType="inner")
    assert transport.requests == []


@pytest.mark.parametrize("topic", ["T", None], ids=["option topic", "column topic"])
def test_inner_batches_are_refused_where_the_store_would_lose_messages(
    producer: Producer, transport: ScriptedTransport, topic: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    rows = keyed(0) if topic else keyed(0).append_column("topic", pa.array(["T"] * len(KEYS)))
    transport.attributes["T"] = {"queue.type": "BatchCQ"}
    transport.settings = {"storeType": "defaultRocksDB"}
    for on_error in ("fail", "skip"):
        with pytest.raises(
            OptionError, match="a, a broker of topic T, has storeType=defaultRocksDB, which counts an inner"
        ):
            producer.send_arrow(rows, topic, batchType="inner", onError=on_error)
    assert transport.requests == []
    transport.fail("broker_config", *[MQBrokerException("asking", 16, "no permission", "a:10911")] * 2)
    producer.send_arrow(rows, topic, batchType="inner")
    assert len(transport.requests) > 0
    assert "batchType=inner: the store of a, a broker of topic T, is unknown." in caplog.text


def test_the_store_is_asked_once_for_many_topics_of_inner_batches(
    producer: Producer, transport: ScriptedTransport
) -> None:
    names = [f"T{number}" for number in range(20)]
    transport.routes |= dict.fromkeys(["plain", *names], route({"a": 1, "b": 1}))
    transport.attributes |= {name: {"queue.type": "BatchCQ"} for name in names}
    producer.send_arrow(pa.table({"body": names, "topic": names}), batchType="inner")
    asked = [call for call in transport.calls if call[0] == "broker_config"]
    assert len(asked) == len(set(asked)) == 2
    transport.settings = {"storeType": "defaultRocksDB"}
    # Brokers store the rows of a plain topic one by one.
    producer.send_arrow(pa.table({"body": ["x"], "topic": ["plain"]}), batchType="inner")
    assert sum(map(len, transport.stored.values())) == len(names) + 1


def test_dead_letters_of_inner_batches_go_in_plain_batches(producer: Producer, transport: ScriptedTransport) -> None:
    transport.attributes |= {name: {"queue.type": "BatchCQ"} for name in ("T", "dead")}
    transport.routes["dead"] = route({"a": 1})
    rows = pa.table({"body": ["x", None, "y", None]})
    producer.send_arrow(rows, "T", batchType="inner", onError="deadLetter", deadLetterTopic="dead")
    headers = {request.batch.topic: request.batch.properties for request in transport.requests}
    # Brokers make an inner batch of a batch with this property.
    assert {topic: "UNIQ_KEY" in properties for topic, properties in headers.items()} == {"T": True, "dead": False}


def test_priorities_require_a_topic_of_their_type_if_it_is_known(
    producer: Producer, transport: ScriptedTransport, caplog: pytest.LogCaptureFixture
) -> None:
    rows = pa.table({"body": ["x"], "priority": [3]})
    transport.attributes["T"] = {"message.type": "NORMAL"}
    with pytest.raises(SchemaError, match="column priority makes PRIORITY messages, and topic T has the type NORMAL"):
        producer.send_arrow(rows, "T")
    transport.fail("topic_config", RequestNotSupportedException("asking", 3, "not supported", "a:10911"))
    with pytest.raises(SchemaError, match="topic T has the type NORMAL on a"):
        producer.send_arrow(rows, "T")
    transport.routes["TBW102"] = route({"a": 4})
    with pytest.raises(SchemaError, match="topic new has the type NORMAL on the brokers, once it exists"):
        producer.send_arrow(rows, "new")
    assert transport.requests == []
    transport.attributes["T"] = {"message.type": "PRIORITY"}
    producer.send_arrow(rows, "T")
    assert not caplog.records
    transport.fail("topic_config", MQBrokerException("asking", 16, "no permission", "a:10911"))
    producer.send_arrow(rows, "T")
    assert "the type of topic T is unknown on a" in caplog.text
    assert sum(map(len, transport.stored.values())) == 2


def test_inner_batches_are_sent_to_an_order_topic_with_a_lost_master(
    producer: Producer, transport: ScriptedTransport
) -> None:
    transport.routes["T"] = replace(route({"a": 2}), order_topic_conf="gone:1;a:2")
    transport.attributes["T"] = {"queue.type": "BatchCQ"}
    producer.send_arrow(pa.table({"body": KEYS}), "T", batchType="inner")
    assert sum(map(len, transport.stored.values())) == len(KEYS)


def test_write_options_are_validated_with_producer_properties(
    make_producer: Callable[..., Producer], transport: ScriptedTransport
) -> None:
    with make_producer(send_msg_timeout=500) as hasty:
        hasty.send_arrow(keyed(0), "T", deliveryTimeoutMs="1000")
    assert sum(map(len, transport.stored.values())) == len(KEYS)
    with (
        make_producer(send_msg_timeout=200_000) as patient,
        pytest.raises(OptionError, match="sendMsgTimeout=200000 is more than deliveryTimeoutMs=120000"),
    ):
        patient.send_arrow(keyed(0), "T")
    with (
        make_producer(send_latency_fault_enable=True) as avoiding,
        pytest.raises(OptionError, match="ordered=true is not available with sendLatencyFaultEnable=true"),
    ):
        avoiding.send_arrow(keyed(0), "T", ordered="true")


def test_rows_that_a_compaction_topic_would_drop_are_rejected(producer: Producer, transport: ScriptedTransport) -> None:
    transport.attributes["T"] = {"cleanup.policy": "COMPACTION", "queue.type": "BatchCQ"}
    rows = pa.table({"body": ["x", "y"], "keys": ["k", None], "topic": ["T", "T"]})
    with pytest.raises(InvalidRowError, match=r"row 1 .*keys is null or blank"):
        producer.send_arrow(rows, "T")
    with pytest.raises(OptionError, match=r"batchType=inner: topic T is a compaction topic"):
        producer.send_arrow(rows, "T", batchType="inner")
    with pytest.raises(InvalidRowError, match=r"row 0 .*batchType=inner to a compaction topic"):
        producer.send_arrow(rows, batchType="inner")
    assert transport.requests == []


def test_task_of_an_ordered_write_looks_up_whether_rows_need_a_key(transport: ScriptedTransport) -> None:
    transport.attributes["T"] = {"cleanup.policy": "COMPACTION"}
    rows = pa.record_batch({"body": ["x", "y"], "keys": ["k", None], "shardingKey": ["s", "s"]})
    options = parse_sink_options({"nameServer": "ns:9876", "topic": "T", "ordered": "true", "onError": "skip"}, {})
    # The driver has looked up the queues; the process of the task has no route yet.
    instance = ClientInstance("id", transport, options.connection)
    recorder = Recorder("w", -1, 0)
    context = SendContext(options=options, instance=instance, queues=[MessageQueue("T", "a", 1)])
    write_rows(context, recorder, iter([rows]), "w")
    assert [message.body for messages in transport.stored.values() for message in messages] == [b"x"]


def test_configuration_of_each_topic_without_keys_is_requested_once(
    producer: Producer, transport: ScriptedTransport
) -> None:
    names = [f"T{number}" for number in range(50)]
    transport.routes.update((name, route({"a": 2})) for name in names)
    rows = pa.record_batch({"body": names, "topic": names})
    for _ in range(2):
        producer.send_arrow(iter([rows, rows]))
    asked = [call[2] for call in transport.calls if call[0] == "topic_config"]
    assert sorted(asked) == sorted(names)
    assert sum(map(len, transport.stored.values())) == 4 * len(names)


def test_unreachable_broker_is_queried_for_one_topic_only(producer: Producer, transport: ScriptedTransport) -> None:
    transport.routes["U"] = transport.routes["T"]
    transport.fail("topic_config", *[RemotingConnectException("down")] * 2)
    for topic in ("T", "U"):
        producer.send_arrow(pa.table({"body": ["x", "y"]}), topic)
    assert sum(call[0] == "topic_config" for call in transport.calls) == 2
    # The first row of each topic goes alone: a compaction topic would reject it.
    assert [request.batch.batch for request in transport.requests].count(False) == 2


@pytest.mark.parametrize("columns", [("delayMs", "shardingKey"), ("delayMs", "queueId", "brokerName")])
def test_dead_letters_of_rows_beyond_the_delay_limit_are_complete(
    producer: Producer, transport: ScriptedTransport, columns: tuple[str, ...]
) -> None:
    transport.routes |= {"T": route({"a": 1}), "dead": route({"a": 1})}
    late = Reply.code(13, "timer message illegal, the delay time should not be bigger than the max delay 1ms")
    transport.play("a", late, Reply(), late)
    values: dict[str, list[Any]] = {
        "delayMs": [7, 7, 7],
        "shardingKey": ["s"] * 3,
        "queueId": [0] * 3,
        "brokerName": ["a"] * 3,
    }
    rows = pa.table({"body": ["x", "y", "z"], "flag": [5, 5, 5], **{name: values[name] for name in columns}})
    selector = {"queueSelector": "column"} if "queueId" in columns else {}
    options = {**selector, "rowId": "true", "onError": "deadLetter", "deadLetterTopic": "dead"}
    summary = producer.send_arrow(iter(rows.to_batches(1)), "T", sendMode="sync", **options)
    assert summary.invalid_rows()["dead_lettered_by_rule"] == {"the delay is longer than the server allows": 2}
    found = {queue.topic: messages for queue, messages in transport.stored.items()}
    assert [message.body for message in found["T"]] == [b"y"]
    letters = [message.properties for message in found["dead"]]
    assert [message.body for message in found["dead"]] == [b"x", b"z"]
    assert [letter["DEAD_LETTER_row"] for letter in letters] == ["0", "2"]
    for letter in letters:
        assert letter["SPARK_ROW_ID"]
        for name in columns:
            assert letter[f"DEAD_LETTER_{name}"] == str(values[name][0])
        assert letter["DEAD_LETTER_flag"] == "5"


def test_the_error_of_a_write_that_sent_nothing_says_nothing_of_repeats(
    producer: Producer, transport: ScriptedTransport
) -> None:
    with pytest.raises(InvalidRowError) as raised:
        producer.send_arrow(pa.table({"body": ["x", ""]}), "T")
    assert str(raised.value).endswith("Rows of this task stored: none. Read but not sent: 2")
    assert "twice" not in str(raised.value)
    assert transport.requests == []


@pytest.mark.parametrize("column", ["delayMs", "delayTimeLevel"])
def test_a_receipt_of_delayed_rows_is_incomplete(column: str) -> None:
    with FakeCluster(["a"], topics={"T": 1}) as cluster, Producer("pg", name_server=cluster.name_server) as producer:
        delays = pa.array([1, None, 2], pa.int64() if column == "delayMs" else pa.int32())
        # A user's property may have a similar name.
        properties = pa.array([[("MY_DELAY", "1")]] * 3, pa.map_(pa.string(), pa.string()))
        rows = pa.table({"body": ["x", "y", "z"], column: delays, "properties": properties})
        receipt = producer.send_arrow(rows, "T").to_dict()
        assert receipt["a"]["incomplete"]
        assert receipt["a"]["rows"] == 3
        (span,) = receipt["a"]["queues"]["T"].values()
        # The broker has acknowledged the delayed rows with the offsets of another topic.
        assert span["first_offset"] == span["last_offset"]
        with pytest.raises(OptionError, match="the receipt is incomplete"):
            parse_source_options(
                {"nameServer": cluster.name_server, "startingOffsets": json.dumps(receipt)}, {}, streaming=False
            )
        plain = producer.send_arrow(rows.drop_columns([column]), "T").to_dict()
        assert not plain["a"]["incomplete"]
