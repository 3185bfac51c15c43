"""The proxy of the fake cluster: brokers behind it, replies on request, and settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    ClusterError,
    MQBrokerException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import EncodedBatch, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    EndTransaction,
    RecallMessage,
    TransactionCheck,
)
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.testing import BrokerSettings, FakeCluster, ProxySettings, Reply
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from tests.support.contract import SOON, Outcomes, batch, single
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import running_proxy, stored
from tests.support.transports import Grpc


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """A broker with a slave behind a proxy, and a topic of every type."""
    with FakeCluster(slaves=1, proxy=ProxySettings(broker_timeout=PATIENCE)) as cluster:
        cluster.create_topic("orders", attributes={"message.type": "MIXED"})
        yield cluster


@pytest.fixture
def proxy(cluster: FakeCluster) -> FakeProxy:
    assert cluster.proxy is not None
    return cluster.proxy


@pytest.fixture
def seam(proxy: FakeProxy) -> Iterator[Grpc]:
    with GrpcTransport([proxy.address], client_id="test") as transport:
        yield Grpc(transport, proxy, None)


def outcome_of(seam: Grpc, encoded: EncodedBatch | None = None, timeout: float = PATIENCE) -> SendOutcome:
    """Send, by default one message of the body `one`."""
    outcome: SendOutcome = seam.send(encoded or single("orders", b"one"), timeout=timeout)[0]
    return outcome


def bodies(cluster: FakeCluster) -> list[bytes]:
    return [message.body for message in cluster.messages("orders")]


def test_cluster_without_a_proxy_imports_neither_grpc_nor_protobuf() -> None:
    code = (
        "import sys\n"
        "from rocketmq_spark import Message, Producer\n"
        "from rocketmq_spark.testing import FakeCluster\n"
        "with FakeCluster(topics={'orders': 1}) as cluster:\n"
        "    with Producer('pg', name_server=cluster.name_server) as producer:\n"
        "        producer.send(Message.of('orders', b'one'))\n"
        "print({'grpc', 'google.protobuf'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.strip() == "set()"


def test_endpoints_of_a_cluster_without_a_proxy_are_an_error() -> None:
    with FakeCluster() as cluster, pytest.raises(ClusterError, match=r"FakeCluster\(proxy=True\)"):
        _ = cluster.endpoints


def test_endpoints_are_the_address_of_the_proxy() -> None:
    address = refused_address()
    with FakeCluster(proxy=ProxySettings(address=address)) as cluster:
        assert cluster.endpoints == address
        assert repr(cluster.proxy) == f"<FakeProxy {address} running, 0 calls>"
        with pytest.raises(RuntimeError, match=address), FakeCluster(proxy=ProxySettings(address=address)):
            pass


@pytest.mark.parametrize(
    ("reply", "expected", "code", "kept"),
    [
        (Reply.code(2, "broker busy"), BrokerBusyException, 42900, False),
        (Reply.code(13, "the message is illegal"), MQBrokerException, 50001, False),
        (Reply(closes=True), BrokerOutcomeUnknownException, 50001, False),
        (Reply(closes=True, stored=True), BrokerOutcomeUnknownException, 50001, True),
        (Reply(delay=0.01), SendStatus.SEND_OK, 0, True),
        (Reply(status=SendStatus.FLUSH_DISK_TIMEOUT), SendStatus.FLUSH_DISK_TIMEOUT, 0, True),
        (Reply(status=SendStatus.FLUSH_SLAVE_TIMEOUT), SendStatus.FLUSH_SLAVE_TIMEOUT, 0, True),
        (Reply(status=SendStatus.SLAVE_NOT_AVAILABLE), SendStatus.SLAVE_NOT_AVAILABLE, 0, True),
    ],
)
def test_reply_of_a_broker_reaches_the_client(
    cluster: FakeCluster, seam: Grpc, reply: Reply, expected: Any, code: int, kept: bool
) -> None:
    cluster.brokers["broker-0"].play(reply)
    outcome = outcome_of(seam)
    if isinstance(expected, SendStatus):
        assert outcome.status is expected
    else:
        assert isinstance(outcome.error, expected)
        assert outcome.error.response_code == code
    assert bodies(cluster) == [b"one"] * kept


def test_silent_broker_is_a_time_out_of_the_proxy(cluster: FakeCluster, seam: Grpc) -> None:
    seam.proxy.settings.broker_timeout = 0.01
    cluster.brokers["broker-0"].play(Reply(silent=True, stored=True))
    error = outcome_of(seam).error
    assert isinstance(error, BrokerOutcomeUnknownException)
    assert error.response_code == 50400
    assert bodies(cluster) == [b"one"]


def test_killed_broker_fails_requests_in_flight(cluster: FakeCluster, seam: Grpc) -> None:
    broker, outcomes = cluster.brokers["broker-0"], Outcomes()
    broker.play(Reply(silent=True))
    seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, outcomes)
    wait_for(lambda: len(broker.requests) == 1)
    cluster.kill("broker-0")
    assert "send request to" in str(outcomes.wait(1)[0].error)


def test_new_master_takes_the_messages_after_failover(cluster: FakeCluster, seam: Grpc) -> None:
    outcome_of(seam)
    cluster.brokers["broker-0"].running = False
    assert "connect to" in str(outcome_of(seam).error)
    cluster.promote("broker-0")
    assert outcome_of(seam, single("orders", b"two")).status is SendStatus.SEND_OK
    assert sorted(bodies(cluster)) == [b"one", b"two"]


def test_broker_without_a_master_has_no_writable_queue(cluster: FakeCluster, seam: Grpc) -> None:
    outcome_of(seam)
    wait_for(lambda: "orders" in cluster.slaves["broker-0"][0].storage.topics)
    cluster.kill("broker-0")
    error = outcome_of(seam).error
    assert isinstance(error, TopicRouteStaleException)
    assert "no writable queue" in str(error)


def test_proxy_keeps_its_routes_while_no_name_server_runs(cluster: FakeCluster, seam: Grpc) -> None:
    cluster.stop_name_server(0)
    assert outcome_of(seam).status is SendStatus.SEND_OK
    assert seam.transport.query_route("orders", PATIENCE).message_types == {"NORMAL", "FIFO", "DELAY", "TRANSACTION"}


@pytest.mark.parametrize(
    ("reply", "expected", "kept"),
    [
        (Reply.code(42900, "flow limit"), BrokerBusyException, False),
        (Reply(closes=True), RemotingSendRequestException, False),
        (Reply(closes=True, stored=True), RemotingSendRequestException, True),
        (Reply(delay=0.01), SendStatus.SEND_OK, True),
        (Reply(status=SendStatus.FLUSH_DISK_TIMEOUT), SendStatus.FLUSH_DISK_TIMEOUT, True),
        (lambda call: Reply.code(50400, call.method), BrokerOutcomeUnknownException, False),
        (lambda call: None, SendStatus.SEND_OK, True),
    ],
)
def test_proxy_plays_a_reply_once(cluster: FakeCluster, seam: Grpc, reply: Any, expected: Any, kept: bool) -> None:
    seam.proxy.play(reply)
    outcome = outcome_of(seam)
    assert outcome.status is expected or isinstance(outcome.error, expected)
    assert bodies(cluster) == [b"one"] * kept
    assert outcome_of(seam).status is SendStatus.SEND_OK
    assert [call.method for call in seam.proxy.calls] == ["SendMessage"] * 2


def test_silent_proxy_may_have_stored(cluster: FakeCluster, seam: Grpc) -> None:
    seam.proxy.play(Reply(silent=True, stored=True))
    assert isinstance(outcome_of(seam, timeout=SOON).error, RemotingTimeoutException)
    wait_for(lambda: bodies(cluster) == [b"one"])


def test_replies_are_played_by_method(seam: Grpc) -> None:
    seam.proxy.play(Reply.code(40402, "no route"), method="QueryRoute", times=2)
    assert outcome_of(seam).status is SendStatus.SEND_OK
    for _ in range(2):
        with pytest.raises(TopicRouteStaleException):
            seam.transport.query_route("orders", PATIENCE)
    seam.transport.query_route("orders", PATIENCE)


def test_messages_take_queues_in_turn_and_those_of_a_group_one_queue(cluster: FakeCluster, seam: Grpc) -> None:
    for number in range(4):
        outcome_of(seam, batch("orders", b"%d" % number))
    assert [message.queue_id for message in cluster.messages("orders")] == [0, 1, 2, 3]
    for _ in range(4):
        outcome_of(seam, single("orders", b"of a group", __SHARDINGKEY="group-1"))
    queues = {message.queue_id for message in cluster.messages("orders") if message.body == b"of a group"}
    assert len(queues) == 1


def queues_of(proxy: FakeProxy, topic: str) -> list[pb.MessageQueue]:
    request = service.QueryRouteRequest(topic=pb.Resource(name=topic)).SerializeToString()
    with grpc.insecure_channel(proxy.address) as channel:
        call = channel.unary_unary("/apache.rocketmq.v2.MessagingService/QueryRoute")
        reply = call(request, PATIENCE, metadata=[("x-mq-client-id", "test")])
    return list(service.QueryRouteResponse.FromString(reply).message_queues)


@pytest.mark.parametrize(("perm", "permission"), [(6, pb.READ_WRITE), (4, pb.READ), (2, pb.WRITE)])
def test_route_has_masters_slaves_and_permissions(cluster: FakeCluster, seam: Grpc, perm: int, permission: int) -> None:
    cluster.create_topic("orders", 2, perm=perm)
    queues = queues_of(seam.proxy, "orders")
    assert [(queue.broker.id, queue.id) for queue in queues] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {queue.permission for queue in queues} == {permission}
    outcome = outcome_of(seam)
    assert (outcome.error is None) is (permission != pb.READ)


def test_without_the_type_check_every_type_is_stored(cluster: FakeCluster, seam: Grpc) -> None:
    cluster.create_topic("orders", attributes={"message.type": "DELAY"})
    error = outcome_of(seam).error
    assert isinstance(error, MQBrokerException)
    assert error.response_code == 40014
    seam.proxy.settings.topic_message_type_check = False
    assert outcome_of(seam).status is SendStatus.SEND_OK
    unknown = outcome_of(seam, single("unknown", b"one")).error
    assert isinstance(unknown, MQBrokerException)
    assert unknown.response_code == 40402


def half(seam: Grpc) -> str:
    outcome = outcome_of(seam, single("orders", b"half", TRAN_MSG="true", KEYS="k1 k2", TAGS="a", mine="yours"))
    return outcome.transaction_id


def commit(seam: Grpc, transaction_id: str) -> None:
    end = EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=0,
        commit_log_offset=0,
        commit_or_rollback=TRANSACTION_COMMIT_TYPE,
        msg_id=transaction_id,
        transaction_id=transaction_id,
        broker_name="",
    )
    seam.transport.end_transaction_oneway(seam.address, end, PATIENCE)


def test_broker_checks_an_open_transaction_through_the_proxy() -> None:
    quick = BrokerSettings(transaction_timeout=0.05, transaction_check_interval=0.05, transaction_check_max=10_000)
    with FakeCluster(proxy=True, settings=lambda: quick) as cluster:
        cluster.create_topic("orders", attributes={"message.type": "TRANSACTION"})
        assert cluster.proxy is not None
        checks = Outcomes()
        with GrpcTransport([cluster.endpoints], client_id="test") as transport:
            seam = Grpc(transport, cluster.proxy, None)
            transport.on_check_transaction = checks
            transaction_id = half(seam)
            check = checks.wait(1)[0]
            assert isinstance(check, TransactionCheck)
            assert check.transaction_id == transaction_id
            assert (check.message.body, check.message.keys, check.message.tags) == (b"half", "k1 k2", "a")
            assert check.message.user_properties == {"mine": "yours"}
            transport.end_transaction_oneway(check.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE)
        assert bodies(cluster) == [b"half"]


def test_transaction_ends_only_at_its_proxy_and_in_time(cluster: FakeCluster, seam: Grpc) -> None:
    first, second = half(seam), half(seam)
    commit(seam, first)
    seam.proxy.settings.transaction_data_expire = -1.0
    for transaction_id in (first, second):
        with pytest.raises(MQBrokerException, match="cannot found transaction data"):
            commit(seam, transaction_id)
    assert bodies(cluster) == [b"half"]


def test_restarted_proxy_has_its_address_and_no_half_messages(cluster: FakeCluster, seam: Grpc) -> None:
    transaction_id, address = half(seam), seam.proxy.address
    seam.proxy.stop()
    seam.proxy.stop()
    seam.proxy.start()
    assert cluster.endpoints == address
    with GrpcTransport([address], client_id="test") as transport:
        again = Grpc(transport, seam.proxy, None)
        with pytest.raises(MQBrokerException, match="cannot found transaction data"):
            commit(again, transaction_id)
        assert outcome_of(again).status is SendStatus.SEND_OK


def test_delayed_message_is_recalled_through_the_proxy(cluster: FakeCluster, seam: Grpc) -> None:
    cluster.create_topic("orders", attributes={"message.type": "DELAY"})
    outcome = outcome_of(seam, single("orders", b"later", TIMER_DELAY_MS="60000"))
    request = RecallMessage("orders", outcome.recall_handle, "pg", "")
    assert seam.transport.recall_message(seam.address, request, PATIENCE) == outcome.transaction_id
    with pytest.raises(MQBrokerException, match="recall failed"):
        seam.transport.recall_message(seam.address, request, PATIENCE)


def test_handlers_can_be_replaced(seam: Grpc) -> None:
    send = seam.proxy.handlers["SendMessage"]
    texts: list[bytes] = []

    def noted(request: bytes, context: Any) -> Any:
        texts.append(request)
        return send(request, context)

    seam.proxy.handlers["SendMessage"] = noted
    assert outcome_of(seam).status is SendStatus.SEND_OK
    assert len(texts) == 1


def test_remoting_consumers_see_messages_of_both_protocols(cluster: FakeCluster, seam: Grpc) -> None:
    assert seam.queue == MessageQueue("orders", seam.address, 0)
    outcome_of(seam)
    (message,) = cluster.messages("orders")
    assert message.properties["PGROUP"] == "orders"
    assert [one.body for one in stored(seam.proxy)] == [b"one"]


def test_proxy_of_a_test_has_one_topic_of_one_queue() -> None:
    with running_proxy() as proxy:
        assert [(queue.id, list(queue.accept_message_types)) for queue in queues_of(proxy, "orders")] == [
            (0, [pb.NORMAL])
        ]
