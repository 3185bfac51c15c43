"""Differences of a producer that sends to proxies."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    MQBrokerException,
    MQClientException,
    OptionError,
    RouteNotFoundException,
    SchemaError,
)
from rocketmq_spark.model.message import Encoding, Message, MessageQueue
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, LocalTransactionState
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.grpc._pb.service_pb2 import SendMessageRequest
from rocketmq_spark.protocol.grpc.codes import proxy_error
from rocketmq_spark.routing.connect import PROTOBUF_FLOOR, check_connection, new_transport
from rocketmq_spark.routing.selectors import SelectMessageQueueByHash
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.pipelines import ENDPOINTS, ScriptedProxies, proxy_route
from tests.support.processes import PATIENCE

Make = Callable[..., Producer]
ROOT = Path(__file__).parents[3]
NAMES_REMOTING = r"transport=remoting \(name_server\)"


@pytest.fixture
def transport() -> Iterator[ScriptedProxies]:
    routes = {"T": proxy_route("NORMAL"), "fifo": proxy_route("FIFO"), "delay": proxy_route("DELAY")}
    with ScriptedProxies(routes, threaded=True) as scripted:
        yield scripted


@pytest.fixture
def make(make_producer: Make) -> Make:
    def start(group: str = "pg", **properties: Any) -> Producer:
        producer = make_producer(group, **{"name_server": None, "endpoints": ENDPOINTS, **properties})
        producer.start()
        return producer

    return start


@pytest.fixture
def producer(make: Make) -> Producer:
    return make()


def test_a_message_goes_to_an_endpoint_under_its_plain_names(make: Make, transport: ScriptedProxies) -> None:
    result = make(namespace="ns").send(Message.of("T", b"x" * 9000))
    [request] = transport.requests
    assert request.address in ENDPOINTS
    assert result.message_queue == MessageQueue("T", request.address, -1)
    assert (request.batch.topic, request.producer_group) == ("T", "pg")
    assert "INSTANCE_ID" not in request.batch.properties
    assert (request.batch.sys_flag, request.batch.nbytes) == (0, 9000)


@pytest.mark.parametrize("code", [40300, 40402, 40800, 42900, 50000, 50001, 50400])
def test_retriable_proxy_code_is_retried_at_the_other_proxy(
    producer: Producer, transport: ScriptedProxies, code: int
) -> None:
    kind = BrokerBusyException if code == 42900 else BrokerOutcomeUnknownException
    for endpoint in ENDPOINTS:
        transport.play(endpoint, Reply(error=kind("no", code, "no", endpoint)))
    producer.send(Message.of("T", b"x"))
    assert sorted({request.address for request in transport.requests[:2]}) == sorted(ENDPOINTS)
    assert len(transport.requests) == 3


@pytest.mark.parametrize("code", [40300, 40402, 40800, 42900, 50000, 50001, 50400])
def test_proxy_code_ends_an_async_send(producer: Producer, transport: ScriptedProxies, code: int) -> None:
    transport.always.update({name: Reply(error=proxy_error(code, "no", name, "sending")) for name in ENDPOINTS})
    error = producer.send_async(Message.of("T", b"x")).exception(PATIENCE)
    assert isinstance(error, MQBrokerException)
    assert (error.response_code, len(transport.requests)) == (code, 1)


def test_permanent_rejection_is_not_retried(producer: Producer, transport: ScriptedProxies) -> None:
    refusal = MQBrokerException("illegal", 40007, "illegal", "p:8081")
    transport.always.update(dict.fromkeys(ENDPOINTS, Reply(error=refusal)))
    with pytest.raises(MQBrokerException) as caught:
        producer.send(Message.of("T", b"x"))
    assert caught.value.response_code == 40007
    assert len(transport.requests) == 1


def test_queue_or_selector_is_rejected_before_sending(producer: Producer, transport: ScriptedProxies) -> None:
    message, queue = Message.of("T", b"x"), MessageQueue("T", ENDPOINTS[0], 0)
    targets: list[dict[str, Any]] = [{"queue": queue}, {"selector": SelectMessageQueueByHash(), "arg": "o-1"}]
    for target in targets:
        with pytest.raises(MQClientException, match=rf"a proxy chooses the queues itself.*{NAMES_REMOTING}"):
            producer.send(message, **target)
        error = producer.send_async(message, **target).exception(20)
        assert isinstance(error, MQClientException)
        assert "a proxy chooses the queues itself" in str(error)
    with pytest.raises(MQClientException, match="a proxy chooses the queues itself"):
        producer.send_batch([message], queue)
    assert transport.requests == []


def test_oneway_sends_are_refused(producer: Producer, transport: ScriptedProxies) -> None:
    with pytest.raises(MQClientException, match=rf"a proxy answers every request.*{NAMES_REMOTING}"):
        producer.send_oneway(Message.of("T", b"x"))
    assert (transport.oneways, transport.requests, transport.calls) == ([], [], [])


@pytest.mark.parametrize(
    "ask",
    [
        lambda producer: producer.create_topic("TBW102", "new", 4),
        lambda producer: producer.fetch_publish_message_queues("T"),
        lambda producer: producer.max_offset(MessageQueue("T", "p:8081", 0)),
        lambda producer: producer.min_offset(MessageQueue("T", "p:8081", 0)),
        lambda producer: producer.search_offset(MessageQueue("T", "p:8081", 0), 0),
        lambda producer: producer.earliest_msg_store_time(MessageQueue("T", "p:8081", 0)),
        lambda producer: producer.view_message("no id at all"),
    ],
)
def test_questions_of_an_admin_are_refused(
    producer: Producer, transport: ScriptedProxies, ask: Callable[[Producer], object]
) -> None:
    with pytest.raises(MQClientException, match=rf"works over gRPC.*{NAMES_REMOTING}"):
        ask(producer)
    assert transport.calls == []


def test_running_producer_can_switch_its_fault_strategy(producer: Producer) -> None:
    producer.set_send_latency_fault_enable(True)
    assert producer._service is not None
    assert producer._service.instance.faults.enabled


def test_topic_unknown_to_all_proxies_has_no_template(producer: Producer, transport: ScriptedProxies) -> None:
    transport.routes["TBW102"] = proxy_route("NORMAL")
    with pytest.raises(RouteNotFoundException, match=r"create it first .*-t new -a \+message\.type=NORMAL.*30 s"):
        producer.send(Message.of("new", b"x"))
    assert [call for call in transport.calls if call[0] == "query_route"] == [("query_route", "new")]
    assert transport.requests == []


@pytest.mark.parametrize("unique_id", ["0" * 32, "an id of my own"])
def test_a_transaction_is_ended_at_its_proxy_without_any_offset(
    make: Make, transport: ScriptedProxies, unique_id: str
) -> None:
    class Listener:
        def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState:
            return LocalTransactionState.COMMIT_MESSAGE

        def check_local_transaction(self, message: Message) -> None:
            return None

    producer = make(transaction_listener=Listener())
    producer.send_in_transaction(Message.of("T", b"x").with_properties({"UNIQ_KEY": unique_id}))
    [request] = transport.requests
    [(_, address, end)] = [call for call in transport.calls if call[0] == "end_transaction"]
    assert address == request.address
    assert (end.topic, end.msg_id, end.commit_or_rollback) == ("T", unique_id, TRANSACTION_COMMIT_TYPE)
    assert end.commit_log_offset == 0


# Arrow tables


def rows(**columns: Any) -> pa.Table:
    return pa.table({"body": ["x" * 9000], **columns})


def test_arrow_table_is_sent_uncompressed_and_has_no_receipt(producer: Producer, transport: ScriptedProxies) -> None:
    facts = producer.send_arrow(rows(), "T").to_dict()
    [request] = transport.requests
    assert (facts[request.address]["rows"], facts[request.address]["queues"]) == (1, {})
    assert request.batch.sys_flag == 0


@pytest.mark.parametrize(
    ("topic", "columns", "text"),
    [
        ("T", {"shardingKey": ["k"]}, r"column shardingKey makes FIFO messages, and topic T accepts .* NORMAL only"),
        ("T", {"delayMs": [5]}, r"column delayMs makes DELAY messages.*-a \+message\.type=DELAY"),
        ("fifo", {}, "topic fifo accepts messages of the type FIFO only.*add the column shardingKey"),
        ("delay", {}, "topic delay accepts messages of the type DELAY only.*add the column delayMs or deliverTime"),
        ("T", {"delayTimeLevel": [3]}, "column delayTimeLevel: .*use delayMs or deliverTime"),
    ],
)
def test_columns_that_a_topic_does_not_accept_are_rejected_before_sending(
    producer: Producer, transport: ScriptedProxies, topic: str, columns: dict[str, Any], text: str
) -> None:
    with pytest.raises(SchemaError, match=text):
        producer.send_arrow(rows(**columns), topic)
    assert transport.requests == []


def test_ordered_write_requires_a_fifo_topic_and_keeps_group_order(
    producer: Producer, transport: ScriptedProxies
) -> None:
    with pytest.raises(SchemaError, match="column shardingKey makes FIFO messages"):
        producer.send_arrow(rows(shardingKey=["k"]), "T", ordered="true")
    assert transport.requests == []
    keys = [f"k{number % 7}" for number in range(200)]
    producer.send_arrow(pa.table({"body": list(map(str, range(200))), "shardingKey": keys}), "fifo", ordered="true")
    assert {request.batch.message_group for request in transport.requests} == set(keys)
    for key in set(keys):
        sent = [int(b"".join(one.batch.body)) for one in transport.requests if one.batch.message_group == key]
        assert sent == [number for number in range(200) if f"k{number % 7}" == key]


def test_write_options_unsupported_over_grpc_are_rejected(producer: Producer, transport: ScriptedProxies) -> None:
    with pytest.raises(OptionError, match="queueSelector=hash is not available over gRPC"):
        producer.send_arrow(rows(shardingKey=["k"]), "T", queueSelector="hash")
    with pytest.raises(OptionError, match="options endpoints belong to the producer"):
        producer.send_arrow(rows(), "T", endpoints="r:8081")


def test_batches_and_message_ids_use_the_grpc_encoding(make: Make, transport: ScriptedProxies) -> None:
    producer = make(namespace="ns", client_ip="10.1.2.3")
    producer.send_arrow(pa.table({"body": ["one", "two"], "tags": ["a", None], "keys": ["j", "k"]}), "T")
    [request] = transport.requests
    assert (request.batch.encoding, request.batch.rows) == (Encoding.GRPC, 2)
    first, second = SendMessageRequest.FromString(b"".join(request.batch.body)).messages
    assert (first.topic.name, first.topic.resource_namespace) == ("T", "ns")
    assert (first.body, first.system_properties.tag) == (b"one", "a")
    assert (second.body, list(second.system_properties.keys)) == (b"two", ["k"])
    assert first.system_properties.born_host == "10.1.2.3"
    assert first.system_properties.born_timestamp.ToMilliseconds() == request.batch.born_timestamp
    sent = producer.send(Message.of("T", b"x"))
    ids = [first.system_properties.message_id, second.system_properties.message_id, sent.msg_id]
    assert [(len(one), one[:2]) for one in ids] == [(34, "01")] * 3
    assert len(set(ids)) == 3
    assert [message.body for messages in transport.stored.values() for message in messages] == [b"one", b"two", b"x"]


def test_invalid_rows_over_grpc_become_dead_letters(producer: Producer, transport: ScriptedProxies) -> None:
    transport.routes["dead"] = proxy_route("NORMAL")
    table = pa.table({"body": ["good", "with a flag"], "flag": [0, 7]})
    facts = producer.send_arrow(table, "T", onError="deadLetter", deadLetterTopic="dead")
    assert facts.invalid_rows()["dead_lettered_by_rule"] == {"flag is set": 1}
    stored = {queue.topic: messages[0] for queue, messages in transport.stored.items()}
    assert stored["T"].body == b"good"
    assert (stored["dead"].body, stored["dead"].properties["DEAD_LETTER_rule"]) == (b"with a flag", "flag is set")


# Shared connections


def test_name_servers_create_a_remoting_transport_without_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    options = SinkOptions.of(name_server=("a:1",))
    check_connection(options.connection)
    transport = new_transport(options.connection, "client@1")
    assert isinstance(transport, RemotingTransport)
    transport.close()


def test_endpoints_create_a_grpc_transport_whose_repr_has_no_secret() -> None:
    given = {"endpoints": "https://p:8081;q:8081", "namespace": "ns", "accessKey": "me", "secretKey": "hush-hush"}
    secured = parse_sink_options({**given, "useTls": "true", "tlsServerName": "mq"}, {})
    transport = new_transport(secured.connection, "client@1")
    assert isinstance(transport, GrpcTransport)
    assert transport.endpoints == ENDPOINTS
    assert "client@1" in repr(transport)
    assert "hush-hush" not in repr(transport)
    transport.close()


def test_transport_property_selects_grpc() -> None:
    assert Producer("pg", transport="grpc", endpoints="p:8081").options.over_grpc
    with pytest.raises(OptionError, match="property transport is 'http', which is not allowed"):
        Producer("pg", transport="http")


@pytest.mark.parametrize("missing", ["grpc", "google", "google.protobuf"])
def test_missing_grpc_packages_are_a_one_line_error_with_advice(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    # Modules that other tests have imported would be found in any case.
    monkeypatch.delitem(sys.modules, "google.protobuf", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    options = SinkOptions.of(transport="grpc", endpoints=ENDPOINTS)
    for refused in (
        lambda: check_connection(options.connection),
        lambda: new_transport(options.connection, "client@1"),
    ):
        with pytest.raises(OptionError, match=r"pip install 'rocketmq-spark\[grpc\]'") as caught:
            refused()
        assert "\n" not in str(caught.value)


LOAD = """
from rocketmq_spark.routing.connect import check_connection, new_transport
from rocketmq_spark.options.sink import SinkOptions
options = SinkOptions.of(transport="grpc", endpoints=("p:8081",))
for refused in (lambda: check_connection(options.connection), lambda: new_transport(options.connection, "client@1")):
    try:
        refused()
    except Exception as exc:
        print(type(exc).__name__, exc)
"""


@pytest.mark.parametrize("version", ["3.20.3", "5.29.3", "6.31.0"])
@pytest.mark.parametrize("zipped", [False, True])
def test_too_old_protobuf_is_a_one_line_error_naming_the_required_version(
    tmp_path: Path, version: str, zipped: bool
) -> None:
    folder = tmp_path / "old" / "google" / "protobuf"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"# Copyright\n\n__version__ = {version!r}\n")
    old = shutil.make_archive(str(tmp_path / "old"), "zip", tmp_path / "old") if zipped else str(tmp_path / "old")
    run = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((old, *filter(None, sys.path)))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    wanted = (
        f"OptionError transport=grpc needs protobuf {PROTOBUF_FLOOR} or newer, and {version} is installed here: pip"
    )
    assert [line[: len(wanted)] for line in run.stdout.splitlines()] == [wanted] * 2
    assert "pip install 'rocketmq-spark[grpc]'" in run.stdout


def test_required_protobuf_matches_the_extra_and_the_generated_code() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert f"protobuf>={PROTOBUF_FLOOR},<8" in config["options.extras_require"]["grpc"].split()
    generated = (ROOT / "rocketmq_spark/protocol/grpc/_pb/service_pb2.py").read_text(encoding="utf-8")
    assert f"# Protobuf Python Version: {PROTOBUF_FLOOR}\n" in generated
