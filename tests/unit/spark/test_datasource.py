"""The driver's checks of the data source, without a session and without a server."""

from __future__ import annotations

import io
import logging
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    IntegerType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    YearMonthIntervalType,
)

from rocketmq_spark.errors import (
    DeliveryError,
    MQBrokerException,
    OptionError,
    RemotingConnectException,
    RocketMQError,
    RouteNotFoundException,
    SchemaError,
)
from rocketmq_spark.metrics import Recorder
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.routing.client_instance import ClientInstance, registry
from rocketmq_spark.spark.datasource import RocketMQDataSource, _warn_once
from rocketmq_spark.spark.ordered_queues import _IN_MEMORY, _UNUSABLE
from rocketmq_spark.spark.ordered_queues import _warn_once as _warn_of_memory_once
from rocketmq_spark.spark.partition import RouteLookup
from rocketmq_spark.spark.planning import _await_any_answer
from rocketmq_spark.spark.report import CommitMessage
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema
from rocketmq_spark.testing import FakeCluster
from rocketmq_spark.testing.fake_name_server import FakeNameServer
from tests.support import fakes
from tests.support.peer import refused_address
from tests.support.pipelines import ScriptedProxies
from tests.support.proxies import running_proxy
from tests.support.scripted import route

BODY = StructType().add("body", StringType())
KEYED = StructType().add("body", StringType()).add("shardingKey", StringType())


@pytest.fixture(autouse=True)
def nothing_was_warned_of_yet() -> None:
    _warn_once.cache_clear()
    _warn_of_memory_once.cache_clear()
    _IN_MEMORY.clear()
    _UNUSABLE.clear()


@pytest.fixture(autouse=True)
def nobody_stays_warm() -> Iterator[None]:
    yield
    registry.close_all()


@pytest.fixture
def name_server() -> Iterator[FakeNameServer]:
    with fakes.name_server({"t": route({"a": 2})}) as peer:
        yield peer


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings of the source, without those of the heart-beats of its client."""
    return [
        record.getMessage()
        for record in caplog.records
        if (record.name, record.levelno) == ("rocketmq_spark.spark", logging.WARNING)
    ]


class OnASpeculatingCluster(RocketMQDataSource):
    _session = SessionFacts(speculation=True)


@pytest.mark.parametrize(("row_id", "warnings"), [("false", 1), ("true", 0), ("columns:body", 0)])
def test_speculation_without_row_ids_is_warned_of(
    name_server: FakeNameServer, caplog: pytest.LogCaptureFixture, row_id: str, warnings: int
) -> None:
    source = OnASpeculatingCluster({"nameServer": name_server.address, "topic": "t", "rowId": row_id})
    source.streamWriter(BODY, overwrite=False)
    assert ["set rowId=true" in message for message in warned(caplog)] == [True] * warnings


def test_complete_mode_warning_is_logged_once(name_server: FakeNameServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        source = RocketMQDataSource({"nameServer": name_server.address, "topic": "t", "sendMode": "oneway"})
        source.streamWriter(BODY, overwrite=True)
    assert [message.split(":")[0] for message in warned(caplog)] == ["sendMode=oneway", "outputMode complete"]


def test_no_warning_is_logged_without_speculation(
    name_server: FakeNameServer, caplog: pytest.LogCaptureFixture
) -> None:
    RocketMQDataSource({"nameServer": name_server.address, "topic": "t"}).streamWriter(BODY, overwrite=False)
    assert warned(caplog) == []


def test_timestamp_columns_of_a_read_and_deliver_time_can_be_written(name_server: FakeNameServer) -> None:
    columns = StructType([*BODY, *(StructField(name, TimestampType()) for name in ("deliverTime", "storeTimestamp"))])
    assert arrow_schema(columns).field("deliverTime").type == pa.timestamp("us", "UTC")
    RocketMQDataSource({"nameServer": name_server.address, "topic": "t"}).writer(columns, overwrite=False)


def test_selector_class_is_loaded_on_the_driver() -> None:
    source = RocketMQDataSource({"nameServer": "a:1", "topic": "t", "queueSelector": "no_such_module:Thing"})
    with pytest.raises(OptionError, match="importing module no_such_module failed"):
        source.streamWriter(BODY, overwrite=False)


OVER_GRPC = {"endpoints": "p:8081", "topic": "t"}


def test_stream_over_grpc_checks_columns_with_one_route_request() -> None:
    with running_proxy() as proxy:
        for _ in range(4):
            source = RocketMQDataSource({"endpoints": proxy.address, "topic": "orders"})
            assert lookup_of(source.streamWriter(BODY, overwrite=False)) == RouteLookup(None, servers_reached=True)
            with pytest.raises(SchemaError, match="FIFO"):
                source.streamWriter(KEYED, overwrite=False)
        assert [call.method for call in proxy.calls] == ["QueryRoute"]


def lookup_of(writer: Any) -> RouteLookup:
    """Return what a writer of the data source has looked up on the driver."""
    found: RouteLookup = writer.lookup
    return found


def stream_over(address: str, columns: StructType = BODY, **more: str) -> Any:
    options = {"nameServer": address, "topic": "t", "sendMsgTimeout": "1000", **more}
    return RocketMQDataSource(options).streamWriter(columns, overwrite=False)


def batch_over(address: str, **more: str) -> Any:
    options = {"nameServer": address, "topic": "t", "sendMsgTimeout": "1000", **more}
    return RocketMQDataSource(options).writer(BODY, overwrite=False)


def test_stream_requests_its_route_once_and_survives_a_lost_name_server() -> None:
    with fakes.name_server({"t": route({"a": 2})}) as peer:
        for _ in range(2):
            assert stream_over(peer.address).lookup == RouteLookup(None, servers_reached=True)
        asked = [command for command in peer.requests if command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC]
        assert len(asked) == 1
    assert stream_over(peer.address).lookup == RouteLookup(None, servers_reached=True)


def test_a_stream_of_an_unknown_topic_fails_before_any_task(name_server: FakeNameServer) -> None:
    with pytest.raises(RouteNotFoundException, match="no name server knows it"):
        stream_over(name_server.address, topic="unheard-of")


def finished(rows: int, partition_id: int = 0) -> CommitMessage:
    recorder = Recorder("query", 0, partition_id)
    if rows:
        recorder.record_success("a", rows, 100, 8.0, MessageQueue("t", "a", 0), 5, 1.0)
    return CommitMessage.of(recorder.snapshot(), histograms=False)


def test_stream_with_unreachable_name_servers_leaves_lookup_to_its_tasks(caplog: pytest.LogCaptureFixture) -> None:
    # The driver may have restarted during the query, so rows of this micro-batch may be stored already.
    address = refused_address()
    writer = stream_over(address)
    assert not writer.lookup.servers_reached
    [text] = warned(caplog)
    assert "the driver could not look up topic t for a micro-batch" in text
    assert address in text
    with pytest.raises(RouteNotFoundException, match="refused"):
        stream_over(address, KEYED, ordered="true")
    # A wrong address fails a new query even if its first micro-batch is empty.
    with pytest.raises(RouteNotFoundException, match=rf"{address}.*refused"):
        writer.commit([finished(0)], 0)
    writer.commit([finished(0)], 1)
    writer.commit([finished(0), finished(5, 1)], 0)


def test_no_writer_commits_without_the_message_of_each_task(name_server: FakeNameServer) -> None:
    for messages in ([], [None], [finished(5), None]):
        with pytest.raises(DeliveryError, match="sent no message"):
            stream_over(name_server.address).commit(messages, 3)
        with pytest.raises(DeliveryError, match="sent no message"):
            batch_over(name_server.address).commit(messages)


@pytest.mark.parametrize("delivery", ["effectivelyOnce", "exactlyOnce"])
def test_a_batch_write_without_an_identity_is_refused_on_the_driver(delivery: str) -> None:
    # The address refuses connections, so this error precedes any request.
    with pytest.raises(OptionError, match=rf"delivery={delivery} requires writeId"):
        batch_over(refused_address(), delivery=delivery, transactionalId="job")


def ordered_stream(peer: FakeNameServer, checkpoint: str) -> Counter[str]:
    """Return the number of queues of each broker to which the driver of a new process binds keys."""
    registry.close_all()
    writer = stream_over(peer.address, KEYED, ordered="true", checkpointLocation=checkpoint)
    assert len(set(writer.lookup.queues)) == len(writer.lookup.queues)
    assert list(writer.lookup.queues) == sorted(writer.lookup.queues, key=lambda one: (one.broker_name, one.queue_id))
    return Counter(queue.broker_name for queue in writer.lookup.queues)


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_ordered_stream_keeps_queues_of_a_lost_broker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    checkpoint = f"{scheme}{tmp_path}"
    with fakes.name_server({"t": route({"a": 2, "b": 3})}) as peer:
        assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}
        peer.routes["t"] = route({"a": 2})
        _IN_MEMORY.clear()
        assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}
        [text] = warned(caplog)
        assert "topic t has no master of b now" in text
        assert f"delete {checkpoint}/rocketmq-queues-t.json" in text
        # A broker without a route, as after a restart of the name servers.
        peer.routes["TBW102"] = route({"a": 8})
        del peer.routes["t"]
        assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}
        del peer.routes["TBW102"]
        assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}
        # New queues count, and so does the present number of queues of a reachable broker.
        peer.routes["t"] = route({"a": 1, "c": 1})
        assert ordered_stream(peer, checkpoint) == {"a": 1, "b": 3, "c": 1}
        # The warning comes also if the Python process of the driver continues.
        (tmp_path / "rocketmq-queues-t.json").unlink()
        assert ordered_stream(peer, checkpoint) == {"a": 1, "c": 1}


def test_order_configuration_replaces_the_queues_that_a_stream_has_kept(tmp_path: Path) -> None:
    with fakes.name_server({"t": route({"a": 2, "b": 3})}) as peer:
        ordered_stream(peer, str(tmp_path))
        peer.routes["t"] = replace(route({"a": 2}), order_topic_conf="a:2;z:1")
        assert ordered_stream(peer, str(tmp_path)) == {"a": 2, "z": 1}
        peer.routes["t"] = route({"a": 2})
        assert ordered_stream(peer, str(tmp_path)) == {"a": 2, "b": 3}


def test_ordered_stream_warns_where_it_can_not_keep_its_queues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fakes.name_server({"t": route({"a": 2, "b": 3})}) as peer:
        for checkpoint in (str(tmp_path / "hdfs"), "s3a://bucket/query"):
            assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}
            [text] = warned(caplog)
            assert f"cannot be saved in {checkpoint}/rocketmq-queues-t.json" in text
            assert "Set an order configuration" in text
            caplog.clear()
        peer.routes["t"] = route({"a": 2})
        assert ordered_stream(peer, checkpoint) == {"a": 2, "b": 3}


@pytest.mark.parametrize("text", ["", "[]", '{"a": "2"}', '{"a": -1}', "\xff"])
def test_damaged_file_of_kept_queues_fails_the_stream(tmp_path: Path, name_server: FakeNameServer, text: str) -> None:
    (tmp_path / "rocketmq-queues-t.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RocketMQError, match=r"reading the queues of topic t from .*rocketmq-queues-t\.json"):
        ordered_stream(name_server, str(tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that can't be read by root either")
def test_file_of_kept_queues_that_can_not_be_read_fails_the_stream(tmp_path: Path, name_server: FakeNameServer) -> None:
    (tmp_path / "rocketmq-queues-t.json").symlink_to("/proc/self/mem")
    with pytest.raises(RocketMQError, match=r"reading the queues of topic t from .*rocketmq-queues-t\.json: .*rror"):
        ordered_stream(name_server, str(tmp_path))


def test_ordered_write_binds_keys_to_brokers_that_have_only_a_slave_now() -> None:
    there = route({"a": 2, "b": 3})
    brokers = tuple(replace(broker, broker_addrs={1: "slave:1"}) for broker in there.broker_datas[1:])
    with fakes.name_server({"t": replace(there, broker_datas=(there.broker_datas[0], *brokers))}) as peer:
        options = {"nameServer": peer.address, "topic": "t", "ordered": "true"}
        found = lookup_of(RocketMQDataSource(options).writer(KEYED, overwrite=False))
        assert Counter(queue.broker_name for queue in found.queues or ()) == {"a": 2, "b": 3}


def test_stream_with_a_topic_column_sends_no_request() -> None:
    options = {"nameServer": refused_address()}
    columns = StructType([*BODY, *StructType().add("topic", StringType())])
    assert lookup_of(RocketMQDataSource(options).streamWriter(columns, overwrite=False)) == RouteLookup()


@pytest.mark.parametrize(("batch_id", "patient"), [(0, False), (1, True)])
def test_tasks_wait_for_name_servers_from_the_second_micro_batch_on(batch_id: int, *, patient: bool) -> None:
    assert stream_over(refused_address()).lookup.right_address(batch_id) is patient


def test_task_waits_for_name_servers_that_its_driver_reached() -> None:
    with FakeCluster(topics={"t": 2}) as cluster:
        options = {"nameServer": cluster.name_server, "topic": "t", "sendMsgTimeout": "200"}
        source = RocketMQDataSource({**options, "deliveryTimeoutMs": "60000"})
        writer = pickle.loads(cloudpickle.dumps(source.writer(BODY, overwrite=False)))
        # The task must look the topic up itself.
        registry.close_all()
        cluster.stop_name_server(0)
        # Without a name server on the driver, the task would fail after sendMsgTimeout, much earlier.
        comes_back = threading.Timer(0.6, cluster.start_name_server, [0])
        comes_back.start()
        writer.write(iter([pa.RecordBatch.from_pydict({"body": ["x"]})]))
        comes_back.join()
        assert len(cluster.messages("t")) == 1


class Unpickler(pickle.Unpickler):
    """Records the module of every object in a pickle."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


def test_pickled_writer_contains_no_connection() -> None:
    with running_proxy() as proxy:
        source = RocketMQDataSource({"endpoints": proxy.address, "topic": "orders"})
        shipped = cloudpickle.dumps(source.writer(BODY, overwrite=False))
        assert [call.method for call in proxy.calls] == ["QueryRoute"]
    unpickler = Unpickler(shipped)
    assert unpickler.load().options.connection.endpoints == (proxy.address,)
    assert unpickler.modules == {
        "rocketmq_spark.spark.partition",
        "rocketmq_spark.spark.writer",
        "rocketmq_spark.deliveries.at_least_once",
        "rocketmq_spark.options.connection",
        "rocketmq_spark.options.sink",
    }


def test_data_source_and_its_pickled_writer_import_no_grpc() -> None:
    script = f"""
import pickle, sys
import pyspark_rocketmq, rocketmq_spark
from pyspark import cloudpickle
from pyspark.sql.types import StructType
from rocketmq_spark.deliveries.at_least_once import AtLeastOnce
from rocketmq_spark.spark.planning import checked_options
from rocketmq_spark.spark.spark_api import SessionFacts, arrow_schema
from rocketmq_spark.spark.writer import stream_writer
BODY = StructType().add("body", "string")
found = getattr(pyspark_rocketmq, "DefaultSource", rocketmq_spark.RocketMQDataSource)  # There is none on PySpark 4.0.
source = found({OVER_GRPC!r})
options = checked_options(source.options, arrow_schema(BODY), SessionFacts(), print)
writer = stream_writer(AtLeastOnce(options), None, BODY)
pickle.loads(cloudpickle.dumps((rocketmq_spark.Producer, type(source), writer)))
sys.exit(str({{"grpc", "google.protobuf"}} & set(sys.modules) or ""))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.strip() == ""


def test_a_delay_level_over_grpc_is_refused_on_the_driver(name_server: FakeNameServer) -> None:
    levels = StructType([*BODY, *StructType().add("delayTimeLevel", IntegerType())])
    RocketMQDataSource({"nameServer": name_server.address, "topic": "t"}).streamWriter(levels, overwrite=False)
    with pytest.raises(SchemaError, match=r"column delayTimeLevel: .*use delayMs or deliverTime"):
        RocketMQDataSource(OVER_GRPC).streamWriter(levels, overwrite=False)


def test_missing_grpc_package_is_an_error_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(OptionError, match=r"pip install 'rocketmq-spark\[grpc\]'"):
        RocketMQDataSource(OVER_GRPC).streamWriter(BODY, overwrite=False)


def test_the_group_goes_into_the_namespace_by_remoting_only() -> None:
    remoting = parse_sink_options({"nameServer": "MQ_INST_1_2.example:9876", "producerGroup": "g"}, {})
    assert remoting.connection.wire_name(remoting.producer_group) == "MQ_INST_1_2%g"
    grpc = {"endpoints": "MQ_INST_1_2.example:8081", "producerGroup": "g", "namespace": "n", "topic": "t" * 127}
    parsed = parse_sink_options(grpc, {})
    assert [parsed.connection.wire_name(name) for name in (parsed.producer_group, "t" * 127)] == ["g", "t" * 127]


@pytest.mark.parametrize("option", ["topic", "deadLetterTopic", "transactionTopic"])
def test_topic_too_long_with_its_namespace_is_an_error_on_the_driver(option: str) -> None:
    given = {"nameServer": "a:1", "namespace": "ns", "topic": "t", "onError": "deadLetter", "deadLetterTopic": "d"}
    if option == "transactionTopic":
        given |= {"delivery": "exactlyOnce", "transactionalId": "job", "writeId": "w"}
    parse_sink_options({**given, option: "t" * 124}, {})
    with pytest.raises(OptionError, match=r"topic t{125} with the prefix of namespace ns has more than 127 characters"):
        RocketMQDataSource({**given, option: "t" * 125}).writer(BODY, overwrite=False)


def instance_of(options: SinkOptions) -> tuple[ClientInstance, ScriptedProxies]:
    transport = ScriptedProxies({})
    return ClientInstance("test@1", transport, options.connection), transport


def test_any_answer_of_a_proxy_suffices_for_topics_from_a_column() -> None:
    options = SinkOptions.of(transport="grpc", endpoints=("p:8081", "q:8081"))
    instance, transport = instance_of(options)
    _await_any_answer(options, instance)
    for code in (40002, 40100, 40300):
        transport.fail("query_route", MQBrokerException("refused", code, "refused", "p:8081"))
        _await_any_answer(options, instance)
    # The reply comes from a gateway before the proxy.
    transport.fail("query_route", MQBrokerException("UNIMPLEMENTED", 50100, "status: 404", "p:8081"))
    with pytest.raises(MQBrokerException, match="UNIMPLEMENTED"):
        _await_any_answer(options, instance)
    transport.fail("query_route", RemotingConnectException("connecting to p:8081: refused"))
    with pytest.raises(RemotingConnectException):
        _await_any_answer(options, instance)
    assert len(transport.calls) == 6


def test_unknown_template_suffices_for_topics_from_a_column() -> None:
    options = SinkOptions.of(name_server=("a:1",))
    instance, transport = instance_of(options)
    _await_any_answer(options, instance)
    transport.fail("query_route", MQBrokerException("not ready", 1, "not ready", "a:1"))
    with pytest.raises(MQBrokerException, match="not ready"):
        _await_any_answer(options, instance)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (YearMonthIntervalType(), r"is interval year to month, .* drop it, or use CAST\(properties AS STRING\)"),
        (MapType(NullType(), NullType()), r"is map<void,void>, .* use CAST\(properties AS MAP<STRING,STRING>\)"),
        (ArrayType(CalendarIntervalType()), "is array<interval>, "),
    ],
)
def test_a_column_that_spark_cannot_convert_is_named(kind: DataType, text: str) -> None:
    source = RocketMQDataSource({"nameServer": "a:1", "topic": "t"})
    for write in (source.writer, source.streamWriter):
        with pytest.raises(SchemaError, match=f"column properties {text}"):
            write(StructType([*BODY, StructField("properties", kind)]), overwrite=False)


def test_exactly_once_to_a_missing_topic_is_refused_on_the_driver() -> None:
    options = {"topic": "new", "delivery": "exactlyOnce", "transactionalId": "job"}
    with FakeCluster() as cluster:
        options["nameServer"] = cluster.name_server
        stream, batch = RocketMQDataSource(options), RocketMQDataSource({**options, "writeId": "w"})
        for write in (stream.streamWriter, batch.writer):
            with pytest.raises(RouteNotFoundException, match=r"exactlyOnce: topic new does not exist, .* create it"):
                write(BODY, overwrite=False)
