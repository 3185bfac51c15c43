"""Transactions and recalled messages through a real proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import MQBrokerException
from rocketmq_spark.model.message import SendStatus
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
    LocalTransactionState,
)
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from tests.support.cluster import SharedCluster, create_topic
from tests.support.contract import Outcomes, next_id, single
from tests.support.java import CLIENTS, ReadWith, Seen
from tests.support.processes import PATIENCE
from tests.support.transactions import send, stored

pytestmark = pytest.mark.integration

# A proxy keeps a half message for 30 s and looks for old ones every 10 s.
FORGOTTEN_SECONDS = 42.0
# A proxy reports a new client's topics to its brokers every 20 s; before that the brokers check nothing.


def new_topic(cluster: SharedCluster) -> str:
    return create_topic(cluster, f"transactions-{next_id()}", "TRANSACTION", 1)


@pytest.fixture
def transport(tuned: SharedCluster) -> Iterator[GrpcTransport]:
    with GrpcTransport([tuned.endpoints], client_id="10.0.0.1@grpc-test") as transport:
        yield transport


class Aging(NamedTuple):
    """A half message that stays open, its transport, and the time of its send."""

    transport: GrpcTransport
    end: EndTransaction
    sent: float


@pytest.fixture(scope="module", autouse=True)
def aging(tuned: SharedCluster) -> Iterator[Aging]:
    """A half message sent before the first test of this file, so that the last test waits less."""
    topic = new_topic(tuned)
    with GrpcTransport([tuned.endpoints], client_id="10.0.0.1@aging") as transport:
        yield Aging(transport, half(transport, topic, b"aging"), time.monotonic())


def half(transport: GrpcTransport, topic: str, body: bytes) -> EndTransaction:
    """Send a half message; return the request that would commit it."""
    [outcome] = send(transport, single(topic, body, TRAN_MSG="true", KEYS="k1", mine="yours", PGROUP="pg"))
    assert outcome.status is SendStatus.SEND_OK
    return EndTransaction(
        topic=topic,
        producer_group="pg",
        tran_state_table_offset=outcome.queue_offset,
        commit_log_offset=-1,
        commit_or_rollback=TRANSACTION_COMMIT_TYPE,
        msg_id=outcome.transaction_id,
        transaction_id=outcome.transaction_id,
        broker_name=transport.endpoints[0],
    )


def rolled_back(end: EndTransaction) -> EndTransaction:
    return replace(end, commit_or_rollback=TRANSACTION_ROLLBACK_TYPE)


def test_committed_half_message_becomes_visible_and_rolled_back_one_not(
    tuned: SharedCluster, transport: GrpcTransport
) -> None:
    topic = new_topic(tuned)
    endpoint, never, visible = transport.endpoints[0], half(transport, topic, b"never"), half(transport, topic, b"yes")
    transport.end_transaction_oneway(endpoint, rolled_back(never), PATIENCE)
    transport.end_transaction_oneway(endpoint, visible, PATIENCE)
    [found] = stored(tuned.name_server, topic, 1).values()
    assert (found.body, found.keys, found.properties["mine"]) == (b"yes", "k1", "yours")
    # A half message can be ended once.
    for again in (visible, rolled_back(never)):
        with pytest.raises(MQBrokerException, match="cannot found transaction data") as raised:
            transport.end_transaction_oneway(endpoint, again, PATIENCE)
        assert raised.value.retriable is False


def test_check_answer_decides_about_pending_half_message(tuned: SharedCluster, transport: GrpcTransport) -> None:
    topic, checks = new_topic(tuned), Outcomes()
    transport.on_check_transaction = checks
    endpoint = transport.endpoints[0]
    commit, roll_back = half(transport, topic, b"commit"), half(transport, topic, b"roll back")
    # An end with the type NOT changes nothing: the broker checks the message later.
    transport.end_transaction_oneway(endpoint, replace(commit, commit_or_rollback=TRANSACTION_NOT_TYPE), PATIENCE)
    answers = {commit.msg_id: TRANSACTION_COMMIT_TYPE, roll_back.msg_id: TRANSACTION_ROLLBACK_TYPE}
    deadline = time.monotonic() + PATIENCE
    while answers.keys() - {check.unique_id for check in tuple(checks)}:
        assert time.monotonic() < deadline, f"not asked for: {answers}, but {checks}"
        transport.heart_beat(endpoint, "", [], PATIENCE)
        time.sleep(0.2)
    for message_id, answer in answers.items():
        check = next(check for check in checks if check.unique_id == message_id)
        assert (check.address, check.producer_group, check.message.topic) == (endpoint, "pg", topic)
        assert (check.message.keys, check.message.user_properties["mine"]) == ("k1", "yours")
        transport.end_transaction_oneway(check.address, check.answer(answer), PATIENCE)
    assert set(stored(tuned.name_server, topic, 1)) == {b"commit"}
    transport.unregister_client(endpoint, "", "pg", PATIENCE)


@pytest.mark.parametrize("client", CLIENTS)
def test_official_client_reads_only_the_committed_message_of_a_producer(
    tuned: SharedCluster, read_with: ReadWith, client: str
) -> None:
    class Listener:
        def execute_local_transaction(self, message: Message, arg: LocalTransactionState) -> LocalTransactionState:
            return arg

        def check_local_transaction(self, message: object) -> LocalTransactionState:
            return LocalTransactionState.UNKNOW

    topic, ids = new_topic(tuned), []
    with Producer("pg", endpoints=tuned.endpoints, transaction_listener=Listener()) as producer:
        for state in (LocalTransactionState.ROLLBACK_MESSAGE, LocalTransactionState.COMMIT_MESSAGE):
            message = Message.of(topic, state.name.encode(), tags="t", keys="k", properties={"own": "1"})
            ids.append(producer.send_in_transaction(message, state).msg_id)
    [found] = read_with(client, tuned, [topic], 1)
    # A broker with the RocksDB store leaves its counter of checks on the message; not every client hides it.
    properties = tuple(entry for entry in found.seen.properties if entry != ("TRANSACTION_CHECK_TIMES", "0"))
    seen = found.seen._replace(properties=properties)
    assert seen == Seen(topic, b"COMMIT_MESSAGE", ("k",), "t", None, (("own", "1"),))
    assert found.id == ids[1]
    assert 0 <= time.time() * 1000 - found.born < 600_000


@pytest.mark.parametrize("protocol", ["remoting", "grpc"])
def test_delayed_message_is_recalled(tuned: SharedCluster, protocol: str) -> None:
    topic, over_grpc = create_topic(tuned, f"recall-{next_id()}", "DELAY", 1), protocol == "grpc"
    servers: dict[str, Any] = {"endpoints": tuned.endpoints} if over_grpc else {"name_server": tuned.name_server}
    with Producer(f"pg-{protocol}", **servers) as producer:
        bodies = (b"taken back", b"kept")
        taken, _ = [producer.send(Message.of(topic, body, delay_ms=4000)) for body in bodies]
        assert producer.recall_message(topic, taken.recall_handle) == taken.msg_id
        # The later message has been delivered, so the recalled one will not be.
        assert set(stored(tuned.name_server, topic, 1)) == {b"kept"}


@pytest.mark.parametrize("protocol", ["remoting", "grpc"])
def test_delayed_row_of_a_write_is_recalled_by_its_saved_handle(
    tuned: SharedCluster, tmp_path: Path, protocol: str
) -> None:
    topic, over_grpc = create_topic(tuned, f"recall-rows-{next_id()}", "DELAY", 1), protocol == "grpc"
    servers: dict[str, Any] = {"endpoints": tuned.endpoints} if over_grpc else {"name_server": tuned.name_server}
    rows = pa.table({"body": ["taken back", "kept"], "keys": ["a", "b"], "delayMs": [4000, 4000]})
    with Producer(f"pg-rows-{protocol}", **servers) as producer:
        producer.send_arrow(rows, topic, recallPath=f"{tmp_path}/handles")
        saved = {row["keys"]: row for row in parquet.read_table(tmp_path / "handles").to_pylist()}
        assert saved.keys() == {"a", "b"}
        assert producer.recall_message(saved["a"]["topic"], saved["a"]["recallHandle"]) == saved["a"]["msgId"]
        assert set(stored(tuned.name_server, topic, 1)) == {b"kept"}


def test_half_message_that_the_proxy_has_forgotten_cannot_be_ended(aging: Aging) -> None:
    time.sleep(max(0.0, aging.sent + FORGOTTEN_SECONDS - time.monotonic()))
    with pytest.raises(MQBrokerException, match="cannot found transaction data"):
        aging.transport.end_transaction_oneway(aging.transport.endpoints[0], aging.end, PATIENCE)
