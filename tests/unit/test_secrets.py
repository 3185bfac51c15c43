"""The secrets of a write reach the tasks, and no plan, log or error shows them."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StructType

from rocketmq_spark.deliveries.at_least_once import AtLeastOnce
from rocketmq_spark.errors import DeliveryError, RocketMQError
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.model.message import Message, MessageQueue
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.grpc._pb.definition_pb2 import FORBIDDEN, Status
from rocketmq_spark.protocol.grpc._pb.service_pb2 import QueryRouteResponse
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.routing.client_instance import registry
from rocketmq_spark.sink.routes import new_instance
from rocketmq_spark.spark.datasource import RocketMQDataSource
from rocketmq_spark.spark.writer import RocketMQBatchWriter, stream_writer
from rocketmq_spark.testing import FakeCluster, Reply
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from tests.support.processes import PATIENCE

SECRETS = ("hush-hush", "token-token")
LOG_KEY = "a-key-of-the-decision-log"
KEYS = {"accessKey": "the-user", "secretKey": SECRETS[0], "securityToken": SECRETS[1]}
SCHEMA = StructType().add("body", "string")
ROWS = pa.RecordBatch.from_pydict({"body": ["one", "two"]})


@pytest.fixture(autouse=True)
def _close_instances() -> Iterator[None]:
    yield
    registry.close_all()


def leaked(text: str) -> list[str]:
    return [secret for secret in (*SECRETS, LOG_KEY) if secret in text]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_pickled_writers_contain_the_secrets_but_do_not_show_them() -> None:
    options = parse_sink_options({"nameServer": "a:9876", **KEYS}, {})
    delivery = AtLeastOnce(options)
    for writer in (RocketMQBatchWriter(delivery, None), stream_writer(delivery, None, StructType())):
        shipped = cloudpickle.dumps(writer)
        assert leaked(shipped.decode("latin-1")) == list(SECRETS)
        arrived = pickle.loads(shipped)
        assert arrived.options == options
        assert leaked(f"{writer} {writer!r} {vars(arrived)}") == []


def test_the_key_of_the_decision_log_is_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeCluster(brokers=2, topics={"orders": 1}) as cluster:
        given = {
            "delivery": "effectivelyOnce",
            "transactionalId": "job",
            "transactionalKey": LOG_KEY,
            "writeId": "day-1",
        }
        options = {"nameServer": cluster.name_server, "topic": "orders", "retryBackoffMs": "1", "fenceMs": "0", **given}
        writer = RocketMQDataSource(options).writer(SCHEMA, overwrite=False)
        writer.commit([writer.write(iter([ROWS]))])
        assert len(cluster.messages("orders")) == 2
        assert leaked(f"{writer} {writer!r} {vars(writer)}") == []
        with pytest.raises(RocketMQError) as raised:
            parse_sink_options({**options, "transactionalKey": LOG_KEY[:15]}, {})
        registry.close_all()
    assert LOG_KEY[:15] not in "".join(traceback.format_exception(raised.value))
    assert caplog.records
    assert leaked(caplog.text + "".join(repr(vars(record)) for record in caplog.records)) == []
    stored = [message for topic in ("orders", "rocketmq-spark-decisions") for message in cluster.messages(topic)]
    assert leaked("".join(f"{message.body!r}{message.properties}" for message in stored)) == []


@pytest.mark.parametrize("remark", ["check signature failed.", "User:the-user is not found."])
def test_a_refused_write_shows_no_secret(caplog: pytest.LogCaptureFixture, remark: str) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeCluster(topics={"orders": 4}) as cluster:
        broker = cluster.brokers["broker-0"]
        broker.always[None] = Reply.code(16, remark)
        options = {"nameServer": cluster.name_server, "topic": "orders", "retryBackoffMs": "1", **KEYS}
        source = RocketMQDataSource(options)
        writer = source.writer(SCHEMA, overwrite=False)
        with pytest.raises(DeliveryError, match=f"16 NO_PERMISSION: {remark} .*accessKey, secretKey") as raised:
            writer.write(iter([ROWS]))
        registry.close_all()
    requests = [*cluster.name_servers[0].requests, *broker.requests]
    assert len([request for request in requests if "Signature" in request.ext_fields]) == len(broker.requests) > 1
    assert broker.played.total() == 1, "a final refusal is not tried again"
    assert caplog.records
    assert leaked(caplog.text + "".join(repr(vars(record)) for record in caplog.records)) == []
    assert leaked("".join(traceback.format_exception(raised.value))) == []
    assert leaked("".join(repr((error, vars(error))) for error in chain(raised.value))) == []
    # The pickled form of a task's failure.
    assert leaked(pickle.dumps([str(error) for error in chain(raised.value)]).decode("latin-1")) == []


@pytest.mark.parametrize("code", [1, 2, 16])
def test_an_answer_that_repeats_the_request_shows_no_token(code: int) -> None:
    keys: dict[str, Any] = {"access_key": "the-user", "secret_key": SECRETS[0], "security_token": SECRETS[1]}
    with FakeCluster(topics={"orders": 1}) as cluster:
        for kind in (None, RequestCode.GET_MAX_OFFSET):
            cluster.brokers["broker-0"].always[kind] = lambda command: Reply.code(code, f"bad {command.ext_fields}")
        with Producer("pg", name_server=cluster.name_server, send_msg_timeout=300, **keys) as producer:
            failures = [
                lambda: producer.send(Message.of("orders", b"x")),
                lambda: producer.send_async(Message.of("orders", b"x")).result(PATIENCE),
                lambda: producer.send_arrow(ROWS, "orders", deliveryTimeoutMs=300),
                lambda: producer.max_offset(MessageQueue("orders", "broker-0", 0)),
            ]
            for fail in failures:
                # On a slow machine, the last attempt may end without an answer.
                for _ in range(20):
                    with pytest.raises(RocketMQError) as raised:
                        fail()
                    assert leaked("".join(repr((error, vars(error))) for error in chain(raised.value))) == []
                    if "no answer within" not in str(raised.value):
                        break
                assert re.search(r"'SecurityToken': '\*+'", str(raised.value))


class _Repeating(grpc.GenericRpcHandler):
    """Answers each call with the metadata that it has received, in the status of the reply or of gRPC."""

    def __init__(self, status: Callable[[str, grpc.ServicerContext], bytes]) -> None:
        self._status = status

    def service(self, handler_call_details: Any) -> Any:
        text = f"bad {dict(handler_call_details.invocation_metadata)}"
        return grpc.unary_unary_rpc_method_handler(lambda _, context: self._status(text, context))


def _in_reply(text: str, _: grpc.ServicerContext) -> bytes:
    return QueryRouteResponse(status=Status(code=FORBIDDEN, message=text)).SerializeToString()


def _of_grpc(text: str, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
    raise AssertionError


@pytest.mark.parametrize("status", [_in_reply, _of_grpc])
def test_a_proxy_that_repeats_the_metadata_shows_no_token(status: Callable[[str, grpc.ServicerContext], bytes]) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Repeating(status)])
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    credentials = Credentials("the-user", *SECRETS)
    transport = GrpcTransport((endpoint,), client_id="client", credentials=credentials)
    try:
        with pytest.raises(RocketMQError, match=r"x-mq-session-token': '\*+'") as raised:
            transport.query_route("orders", PATIENCE)
    finally:
        transport.close()
        server.stop(None).wait()
    assert leaked("".join(traceback.format_exception(raised.value))) == []
    assert leaked("".join(repr((error, vars(error))) for error in chain(raised.value))) == []


def test_the_client_id_which_is_sent_and_logged_is_not_made_of_secrets() -> None:
    ids = set()
    for secret in SECRETS:
        instance = new_instance(parse_sink_options({"nameServer": "a:9876", **KEYS, "secretKey": secret}, {}))
        ids.add(instance.client_id)
        instance.close()
    assert len(ids) == 1
