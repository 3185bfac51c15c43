"""The promises of the seam (transport/base.py), kept alike by every transport.

Each transport comes with the same cluster: one broker, `broker-a`, that plays `Reply`s.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerUnavailableException,
    MQBrokerException,
    MQClientException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.message import Message, MessageQueue, SendRequest, SendStatus
from rocketmq_spark.message_ext import decode_message_id
from rocketmq_spark.route_data import MASTER_ID, BrokerData, TopicRouteData
from rocketmq_spark.transaction import EndTransaction, TransactionCheck
from rocketmq_spark.transport.base import Transport
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.transport.script import Reply, route
from rocketmq_spark.transport.scripted import ScriptedTransport
from rocketmq_spark.transport.tls import TlsSettings
from rocketmq_spark.wire.acl import Credentials
from tests.certificates import Authority
from tests.peer import PATIENCE, BrokerPeer

QUEUE = MessageQueue("orders", "broker-a", 0)
SOON = 0.1


class Cluster:
    """A transport and the broker behind it."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        play: Callable[[Reply], None],
        stored: dict[MessageQueue, list[Message]],
        check_transaction: Callable[[int], TransactionCheck],
        advance: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.transport = transport
        self.address = address
        self.play = play
        self.stored = stored
        self.check_transaction = check_transaction
        self.advance = advance


def route_to(address: str) -> TopicRouteData:
    brokers = (BrokerData("broker-a", {MASTER_ID: address}),)
    return TopicRouteData(route({"broker-a": 4}).queue_datas, brokers)


def scripted(*, threaded: bool) -> Iterator[Cluster]:
    address = "broker-a:10911"
    with ScriptedTransport({"orders": route_to(address)}, threaded=threaded) as transport:
        cluster = Cluster(
            transport,
            address,
            lambda reply: transport.play("broker-a", reply),
            transport.stored,
            lambda physical_offset: transport.check_transaction(address, physical_offset),
        )
        if not threaded:
            cluster.advance = transport.advance
        yield cluster


def remoting() -> Iterator[Cluster]:
    with BrokerPeer() as peer, RemotingTransport([peer.address]) as transport:
        peer.routes["orders"] = route_to(peer.address)
        yield Cluster(transport, peer.address, peer.replies.append, peer.stored, peer.check_transaction)


def remoting_with_tls() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        tls = TlsSettings(str(authority.ca_file))
        with (
            BrokerPeer(tls=authority.context("server", "IP:127.0.0.1")) as peer,
            RemotingTransport([peer.address], tls=tls, credentials=Credentials("ak", "sk")) as transport,
        ):
            peer.routes["orders"] = route_to(peer.address)
            yield Cluster(transport, peer.address, peer.replies.append, peer.stored, peer.check_transaction)


TRANSPORTS = {
    "scripted": lambda: scripted(threaded=False),
    "scripted-threaded": lambda: scripted(threaded=True),
    "remoting": remoting,
    "remoting-tls": remoting_with_tls,
}


@pytest.fixture(params=TRANSPORTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with contextlib.contextmanager(TRANSPORTS[request.param])() as made:
        yield made


def wait(cluster: Cluster, outcomes: Any, count: int, seconds: float = 0.0) -> Any:
    """Let so many outcomes come; by hand where nothing comes by itself."""
    cluster.advance(seconds)
    return outcomes.wait(count)


def test_a_batch_is_stored_and_acknowledged_with_its_first_offset(
    cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    for bodies in ((b"one", b"two"), (b"three",)):
        cluster.transport.send(batch_to(cluster.address, *bodies), PATIENCE, outcomes)
    wait(cluster, outcomes, 2)
    assert [(one.queue, one.status, one.error, one.queue_offset) for one in outcomes] == [
        (QUEUE, SendStatus.SEND_OK, None, 0),
        (QUEUE, SendStatus.SEND_OK, None, 2),
    ]
    assert [message.body for message in cluster.stored[QUEUE]] == [b"one", b"two", b"three"]
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 3
    assert cluster.transport.min_offset(QUEUE, cluster.address, PATIENCE) == 0


def test_a_single_message_keeps_its_flag_and_properties(
    cluster: Cluster, request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    request = request_to(cluster.address, (b"in ", b"pieces"), properties="TAGS\x01a\x02KEYS\x01k\x02", flag=9)
    cluster.transport.send(request, PATIENCE, outcomes)
    wait(cluster, outcomes, 1)
    assert cluster.stored[QUEUE] == [Message("orders", b"in pieces", 9, {"TAGS": "a", "KEYS": "k"})]


@pytest.mark.parametrize("status", SendStatus)
def test_99_every_status_of_a_stored_batch_is_a_status(
    cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any, status: SendStatus
) -> None:
    cluster.play(Reply(status))
    cluster.transport.send(batch_to(cluster.address, b"one"), PATIENCE, outcomes)
    [outcome] = wait(cluster, outcomes, 1)
    assert (outcome.status, outcome.error) == (status, None)
    assert len(cluster.stored[QUEUE]) == 1


@pytest.mark.parametrize(
    ("code", "remark", "kind"),
    [
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy", BrokerBusyException),
        (14, "the broker's disk is full", BrokerUnavailableException),
        (17, "topic not exist", TopicRouteStaleException),
        (13, "the message is illegal", MQBrokerException),
    ],
)
def test_99_a_refusal_is_the_error_of_its_code(
    cluster: Cluster,
    batch_to: Callable[..., SendRequest],
    outcomes: Any,
    code: int,
    remark: str,
    kind: type[MQBrokerException],
) -> None:
    cluster.play(Reply.code(code, remark))
    cluster.transport.send(batch_to(cluster.address, b"one"), PATIENCE, outcomes)
    [outcome] = wait(cluster, outcomes, 1)
    assert outcome.status is None
    assert type(outcome.error) is kind
    assert (outcome.error.response_code, outcome.error.remark) == (code, remark)
    assert cluster.stored.get(QUEUE, []) == []


@pytest.mark.parametrize("stored", [False, True])
def test_silence_is_a_timeout_and_the_rows_may_be_stored(
    cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any, stored: bool
) -> None:
    cluster.play(Reply(silent=True, stored=stored))
    cluster.transport.send(batch_to(cluster.address, b"one"), SOON, outcomes)
    [outcome] = wait(cluster, outcomes, 1, SOON)
    assert outcome.status is None
    assert isinstance(outcome.error, RemotingTimeoutException)
    assert outcome.error.maybe_stored is True
    assert outcome.latency_ms >= SOON * 1000.0
    assert len(cluster.stored.get(QUEUE, [])) == stored


def test_the_outcome_never_comes_inside_send(
    cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    sending = threading.Lock()

    def on_outcome(outcome: Any) -> None:
        # Held by this very thread if we are inside send; by another one only for a moment.
        assert sending.acquire(timeout=PATIENCE)
        sending.release()
        outcomes(outcome)

    for _ in range(20):
        with sending:
            cluster.transport.send(batch_to(cluster.address, b"one"), PATIENCE, on_outcome)
    wait(cluster, outcomes, 20)


def test_a_callback_may_send_again(cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any) -> None:
    cluster.play(Reply.code(2))

    def again(outcome: Any) -> None:
        assert outcome.error.flow_control
        cluster.transport.send(batch_to(cluster.address, b"again"), PATIENCE, outcomes)

    cluster.transport.send(batch_to(cluster.address, b"once"), PATIENCE, again)
    wait(cluster, outcomes, 1)
    assert [message.body for message in cluster.stored[QUEUE]] == [b"again"]


def test_a_known_topic_has_a_route_and_an_unknown_one_code_17(cluster: Cluster) -> None:
    assert cluster.transport.query_route("orders", PATIENCE) == route_to(cluster.address)
    with pytest.raises(TopicRouteStaleException) as raised:
        cluster.transport.query_route("unknown", PATIENCE)
    assert raised.value.response_code == 17
    assert raised.value.refresh_route is True


def test_a_stored_message_can_be_viewed_and_found_by_its_time(
    cluster: Cluster, batch_to: Callable[..., SendRequest], request_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    transport, address = cluster.transport, cluster.address
    assert transport.earliest_msg_store_time(QUEUE, address, PATIENCE) == -1
    transport.send(batch_to(address, b"one", b"two"), PATIENCE, outcomes)
    transport.send(request_to(address, b"three", properties="KEYS\x01k\x02", flag=9), PATIENCE, outcomes)
    wait(cluster, outcomes, 2)
    assert outcomes[0].offset_msg_id.count(",") == 1
    _, physical_offset = decode_message_id(outcomes[1].offset_msg_id)
    viewed = transport.view_message(address, physical_offset, PATIENCE, topic="orders")
    assert (viewed.topic, viewed.body, viewed.flag, viewed.properties) == ("orders", b"three", 9, {"KEYS": "k"})
    assert (viewed.queue_id, viewed.queue_offset, viewed.offset_msg_id) == (0, 2, outcomes[1].offset_msg_id)
    assert viewed.born_timestamp == 1_700_000_000_000
    earliest = transport.earliest_msg_store_time(QUEUE, address, PATIENCE)
    assert earliest <= viewed.store_timestamp
    assert transport.search_offset(QUEUE, earliest, address, PATIENCE) == 0
    assert transport.search_offset(QUEUE, viewed.store_timestamp + 1, address, PATIENCE) == 3
    with pytest.raises(MQClientException, match="commit-log offset 4711"):
        transport.view_message(address, 4711, PATIENCE)


def test_a_oneway_send_is_stored_without_an_outcome(cluster: Cluster, batch_to: Callable[..., SendRequest]) -> None:
    cluster.transport.send_oneway(batch_to(cluster.address, b"one", b"two"), PATIENCE)
    # An answer on the same connection: so the oneway request before it has been served.
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 2
    assert [message.body for message in cluster.stored[QUEUE]] == [b"one", b"two"]


def test_108_a_oneway_sender_learns_of_no_refusal(cluster: Cluster, batch_to: Callable[..., SendRequest]) -> None:
    cluster.play(Reply.code(13, "the message is illegal"))
    cluster.transport.send_oneway(batch_to(cluster.address, b"one"), PATIENCE)
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 0


def test_a_half_message_is_checked_and_the_answer_carries_the_checks_offsets(
    cluster: Cluster, request_to: Callable[..., SendRequest], outcomes: Any, collected: Any
) -> None:
    checks = collected()
    cluster.transport.on_check_transaction = checks
    properties = "UNIQ_KEY\x01U1\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    cluster.transport.send(request_to(cluster.address, b"half", properties=properties, sys_flag=4), PATIENCE, outcomes)
    [outcome] = wait(cluster, outcomes, 1)
    assert cluster.stored.get(QUEUE, []) == []
    _, physical_offset = decode_message_id(outcome.offset_msg_id)
    asked = cluster.check_transaction(physical_offset)
    cluster.transport.heart_beat(cluster.address, "client", ["pg"], PATIENCE)
    [check] = checks.wait(1)
    assert check == asked
    assert (check.address, check.producer_group, check.unique_id) == (cluster.address, "pg", "U1")
    assert (check.message.topic, check.message.body) == ("orders", b"half")
    assert check.commit_log_offset != physical_offset
    assert check.answer(8, "found it") == EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=check.tran_state_table_offset,
        commit_log_offset=check.commit_log_offset,
        commit_or_rollback=8,
        msg_id="U1",
        transaction_id="U1",
        broker_name="broker-a",
        from_transaction_check=True,
        remark="found it",
    )
    cluster.transport.end_transaction(check.address, check.answer(8), PATIENCE)
    assert cluster.transport.max_offset(QUEUE, cluster.address, PATIENCE) == 1
    assert [message.body for message in cluster.stored[QUEUE]] == [b"half"]


def test_the_blocking_calls_return_when_the_broker_agrees(cluster: Cluster) -> None:
    cluster.transport.heart_beat(cluster.address, "10.0.0.1@test", ["pg"], PATIENCE)
    cluster.transport.unregister_client(cluster.address, "10.0.0.1@test", "pg", PATIENCE)
    cluster.transport.create_topic(cluster.address, "new", 4, 6, PATIENCE)
    assert cluster.transport.max_offset(MessageQueue("new", "broker-a", 0), cluster.address, PATIENCE) == 0


def test_close_gives_everything_in_flight_its_one_outcome(
    cluster: Cluster, batch_to: Callable[..., SendRequest], outcomes: Any
) -> None:
    for _ in range(5):
        cluster.play(Reply(silent=True))
        cluster.transport.send(batch_to(cluster.address, b"one"), PATIENCE, outcomes)
    # An answer to a later call: so these five are certainly written.
    cluster.transport.heart_beat(cluster.address, "10.0.0.1@test", ["pg"], PATIENCE)
    cluster.transport.close()
    cluster.transport.close()
    assert [type(outcome.error) for outcome in outcomes] == [RemotingSendRequestException] * 5
    with pytest.raises(RocketMQError, match="closed"):
        cluster.transport.send(batch_to(cluster.address, b"late"), PATIENCE, outcomes)
    assert len(outcomes) == 5
