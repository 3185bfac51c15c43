"""`FakeCluster` through the connector's own transport, and its brokers with a manual clock."""

from __future__ import annotations

import gc
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import MQBrokerException, RemotingException, RocketMQError
from rocketmq_spark.model.message import Message, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.model.message_ext import PullRequest, PullStatus, PullTarget
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TransactionCheck
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.testing import BrokerSettings, FakeCluster, Reply
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.conformance import GROUP, Target, outcome_class, result_of
from tests.support.contract import SOON, Outcomes
from tests.support.processes import PATIENCE, wait_for
from tests.support.transports import Authority

QUEUE = MessageQueue("orders", "broker-0", 0)
NEVER = 3600.0


@contextmanager
def opened(brokers: int = 1, **given: Any) -> Iterator[tuple[FakeCluster, Target]]:
    """Run a cluster with topic `orders`, and a transport for its first broker."""
    with ExitStack() as stack:
        cluster = stack.enter_context(FakeCluster(brokers, topics={"orders": 4}, **given))
        transport = stack.enter_context(RemotingTransport(cluster.name_server.split(";")))
        # Connected, so that short time-outs are those of the answer alone.
        transport.max_offset(QUEUE, cluster.brokers["broker-0"].address, PATIENCE)
        yield cluster, Target(transport, "broker-0", cluster.brokers["broker-0"].address, "orders")


def bodies(cluster: FakeCluster) -> list[bytes]:
    return [message.body for message in cluster.messages("orders")]


def start_send(target: Target, body: bytes = b"x", timeout: float = PATIENCE) -> Outcomes:
    """Send a message; the outcome comes later."""
    outcomes = Outcomes()
    threading.Thread(target=lambda: outcomes(target.send(target.single(body), timeout=timeout))).start()
    return outcomes


@pytest.mark.parametrize(
    ("reply", "kind", "outcome", "stored"),
    [
        (Reply.code(2, "broker busy"), "code 2 before storing", "BrokerBusyException/2", False),
        (replace(Reply.code(2), stored=True), "code 2 after storing", "BrokerBusyException/2", True),
        (Reply(silent=True), "no answer before storing", "RemotingTimeoutException", False),
        (Reply(silent=True, stored=True), "no answer after storing", "RemotingTimeoutException", True),
        (Reply(closes=True), "connection closed before storing", "RemotingSendRequestException", False),
        (Reply(closes=True, stored=True), "connection closed after storing", "RemotingSendRequestException", True),
        (Reply(SendStatus.FLUSH_DISK_TIMEOUT), "FLUSH_DISK_TIMEOUT", "FLUSH_DISK_TIMEOUT", True),
        (Reply(delay=0.01), "answer delayed", "SEND_OK", True),
        (Reply(repeats=2), "answer repeated", "SEND_OK", True),
    ],
)
def test_reply_is_played_once_and_counted(reply: Reply, kind: str, outcome: str, stored: bool) -> None:
    with opened() as (cluster, target):
        broker = cluster.brokers["broker-0"]
        broker.play(reply)
        timeout = SOON if reply.silent else PATIENCE
        assert outcome_class(target.send(target.single(b"first"), timeout=timeout)) == outcome
        assert target.send(target.single(b"second")).status is SendStatus.SEND_OK
        assert bodies(cluster) == [b"first", b"second"][not stored :]
        assert broker.played == {kind: 1}


def test_functions_and_standing_replies_are_chosen_by_request() -> None:
    with opened() as (cluster, target):
        broker = cluster.brokers["broker-0"]
        broker.play(lambda request: Reply.code(14) if request.ext_fields["e"] == "1" else None, times=2)
        assert [outcome_class(target.send(target.single(), queue_id)) for queue_id in (0, 1, 1)] == [
            "SEND_OK",
            "BrokerUnavailableException/14",
            "SEND_OK",
        ]
        broker.always[RequestCode.GET_MAX_OFFSET] = Reply.code(1, "no")
        broker.play(Reply.code(2, "not now"), code=RequestCode.GET_MAX_OFFSET)
        remarks = [result_of(lambda: target.transport.max_offset(QUEUE, target.address, PATIENCE)) for _ in range(3)]
        assert remarks == ["BrokerBusyException/2", *["BrokerOutcomeUnknownException/1"] * 2]
        del broker.always[RequestCode.GET_MAX_OFFSET]
        assert target.transport.max_offset(QUEUE, target.address, PATIENCE) == 1


def test_reply_can_kill_its_own_broker() -> None:
    with opened() as (cluster, target):
        cluster.brokers["broker-0"].play(lambda _: cluster.kill("broker-0"))
        assert outcome_class(target.send(target.single())) == "RemotingSendRequestException"
        assert bodies(cluster) == []


def test_name_servers_play_replies() -> None:
    with opened() as (cluster, target):
        server = cluster.name_servers[0]
        server.play(Reply.code(1, "not ready"), code=RequestCode.GET_ROUTEINFO_BY_TOPIC)
        assert "orders" in target.transport.topics(PATIENCE)
        assert result_of(lambda: target.transport.query_route("orders", PATIENCE)) == "BrokerOutcomeUnknownException/1"
        server.play(Reply(closes=True), Reply(delay=0.01))
        assert result_of(lambda: target.transport.query_route("orders", PATIENCE)) == "RemotingSendRequestException"
        assert target.transport.query_route("orders", PATIENCE).queue_datas
        assert server.played.total() == 3


def test_paused_broker_executes_after_resume() -> None:
    with opened() as (cluster, target):
        broker = cluster.brokers["broker-0"]
        broker.pause()
        outcomes = start_send(target)
        with pytest.raises(RocketMQError, match="no answer within"):
            target.transport.max_offset(QUEUE, target.address, SOON)
        assert (len(outcomes), bodies(cluster)) == (0, [])
        broker.resume()
        assert outcomes.wait(1)[0].status is SendStatus.SEND_OK


def test_send_that_waits_too_long_for_a_thread_is_rejected() -> None:
    def settings() -> BrokerSettings:
        return BrokerSettings(send_threads=1, service_time=lambda rows, nbytes: NEVER)

    with opened(settings=settings) as (cluster, target):
        broker = cluster.brokers["broker-0"]
        broker.requests.clear()
        start_send(target)
        wait_for(lambda: len(broker.requests) == 1)
        outcome = target.send(target.single())
        assert outcome_class(outcome) == "BrokerBusyException/2"
        assert "[TIMEOUT_CLEAN_QUEUE]" in str(outcome.error)
        broker.settings.send_queue_capacity = 0
        assert "[OVERLOAD]" in str(target.send(target.single()).error)
        assert bodies(cluster) == []


@pytest.mark.parametrize(("sync_flush", "left"), [(False, [b"old"]), (True, [b"old", b"new"])])
def test_restarted_broker_has_all_but_its_unflushed_messages(sync_flush: bool, left: list[bytes]) -> None:
    with opened(settings=lambda: BrokerSettings(sync_flush=sync_flush, flush_interval=NEVER)) as (cluster, target):
        cluster.brokers["broker-0"].storage.store.put(QUEUE, [Message("orders", b"old")], 0.0)
        target.send(target.single(b"new"))
        cluster.kill("broker-0")
        assert isinstance(target.send(target.single()).error, RemotingException)
        with pytest.raises(MQBrokerException):
            target.transport.query_route("orders", PATIENCE)
        cluster.restart("broker-0")
        assert bodies(cluster) == [b"old", b"new"]
        cluster.kill("broker-0", lose_unflushed=True)
        cluster.restart("broker-0")
        assert bodies(cluster) == left
        assert target.send(target.single(b"newest")).queue_offset == len(left)


@pytest.mark.parametrize(
    ("slaves", "state", "status"),
    [
        (0, "", SendStatus.SLAVE_NOT_AVAILABLE),
        (1, "stopped", SendStatus.SLAVE_NOT_AVAILABLE),
        (1, "paused", SendStatus.FLUSH_SLAVE_TIMEOUT),
        (1, "slow", SendStatus.FLUSH_SLAVE_TIMEOUT),
        (2, "paused", SendStatus.SEND_OK),
    ],
)
def test_status_of_synchronous_replication(slaves: int, state: str, status: SendStatus) -> None:
    def settings() -> BrokerSettings:
        slowness = 0.02 if state == "slow" else 0.0
        return BrokerSettings(sync_replication=True, replication_time=slowness, sync_flush_timeout=0.01)

    with opened(slaves=slaves, settings=settings) as (cluster, target):
        for slave in cluster.slaves["broker-0"][:1]:
            if state == "stopped":
                slave.stop()
            elif state == "paused":
                slave.pause()
        assert target.send(target.single()).status is status
        assert target.send(target.single(WAIT="false")).status is SendStatus.SEND_OK
        assert len(bodies(cluster)) == 2


def test_slow_flush_is_reported_unless_the_message_does_not_wait() -> None:
    def settings() -> BrokerSettings:
        return BrokerSettings(sync_flush=True, flush_time=0.02, sync_flush_timeout=0.01)

    with opened(settings=settings) as (_, target):
        assert target.send(target.single()).status is SendStatus.FLUSH_DISK_TIMEOUT
        assert target.send(target.single(WAIT="false")).status is SendStatus.SEND_OK


def test_slave_serves_reads_and_catches_up_after_a_pause() -> None:
    with opened(slaves=1) as (cluster, target):
        (slave,) = cluster.slaves["broker-0"]
        read = replace(target, address=slave.address)
        target.send(target.batch(b"one", b"two"))
        assert [record.body for record in decode_records(read.pull(0).body)] == [b"one", b"two"]
        slave.pause()
        target.send(target.single(b"three"))
        cluster.create_topic("later", 1)
        slave.resume()
        assert [record.body for record in decode_records(read.pull(2).body)] == [b"three"]
        assert read.transport.topic_config(slave.address, "later", PATIENCE)
        assert outcome_class(read.send(read.single())) == "BrokerUnavailableException/14"


def test_promoted_slave_is_master_and_continues_deliveries() -> None:
    with opened(slaves=1) as (cluster, target):
        target.send(target.single(b"one"))
        target.send(target.single(b"delayed", TIMER_DELAY_MS="50"))
        new = cluster.promote("broker-0")
        (broker,) = target.transport.query_route("orders", PATIENCE).broker_datas
        assert broker.broker_addrs == {0: new.address}
        assert isinstance(target.send(target.single()).error, RemotingException)
        promoted = replace(target, address=new.address)
        assert promoted.send(promoted.single(b"two")).status is SendStatus.SEND_OK
        wait_for(lambda: sorted(bodies(cluster)) == [b"delayed", b"one", b"two"])


def test_stopped_name_server_is_skipped_and_returns_with_all_routes() -> None:
    with opened(name_servers=2) as (cluster, target):
        cluster.stop_name_server(0)
        cluster.create_topic("new", 1)
        assert target.transport.query_route("new", PATIENCE).queue_datas
        cluster.start_name_server(0)
        cluster.stop_name_server(1)
        assert target.transport.query_route("new", PATIENCE).queue_datas
        cluster.stop_name_server(0)
        with pytest.raises(RemotingException):
            target.transport.query_route("new", PATIENCE)


def test_frozen_name_server_keeps_stale_routes() -> None:
    with opened(2) as (cluster, target):
        cluster.name_servers[0].frozen = True
        cluster.kill("broker-0")
        assert len(target.transport.query_route("orders", PATIENCE).broker_datas) == 2
        assert isinstance(target.send(target.single()).error, RemotingException)
        cluster.name_servers[0].frozen = False
        cluster.create_topic("new", 1)
        assert len(target.transport.query_route("orders", PATIENCE).broker_datas) == 1


@pytest.mark.parametrize("arrives", [True, False])
def test_pull_waits_for_a_message_or_its_time(arrives: bool) -> None:
    with opened() as (_, target):
        outcomes = Outcomes()
        suspend_ms = int(NEVER * 1000) if arrives else 20
        request = PullRequest(PullTarget(QUEUE, "cg", 32, "a || b", "TAG"), target.address, 0, suspend_ms)
        target.transport.pull(request, PATIENCE, outcomes)
        # Neither a message of another queue ends the pull, nor one with another tag.
        target.send(target.single(b"other", TAGS="a"), 1)
        if arrives:
            target.send(target.single(b"c", TAGS="c"))
            assert outcomes == []
            target.send(target.single(b"x", TAGS="b"))
        assert outcomes.wait(1)[0].status is (PullStatus.FOUND if arrives else PullStatus.NO_NEW_MSG)


def half(target: Target) -> tuple[SendOutcome, int]:
    """Send a half message; return the outcome and its commit-log offset."""
    outcome = target.send(target.single(b"half", TRAN_MSG="true", PGROUP=GROUP, sys_flag=4))
    return outcome, int(outcome.offset_msg_id[-16:], 16)


def test_half_message_is_checked_until_it_ends() -> None:
    def settings() -> BrokerSettings:
        return BrokerSettings(transaction_timeout=0.01, transaction_check_interval=0.01)

    with opened(settings=settings) as (cluster, target):
        checks = Outcomes()
        target.transport.on_check_transaction = checks
        target.transport.heart_beat(target.address, "client", [GROUP], PATIENCE)
        half(target)
        check: TransactionCheck = checks.wait(3)[-1]
        assert {one.unique_id for one in checks} == {check.unique_id}
        ends = Outcomes()
        target.transport.end_transaction(target.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE, ends)
        assert ends.wait(1) == [None]
        assert bodies(cluster) == [b"half"]


def test_check_on_request_needs_a_producer_of_the_group() -> None:
    with opened() as (cluster, target):
        broker = cluster.brokers["broker-0"]
        _, offset = half(target)
        assert broker.check_transaction(offset) is None
        checks = Outcomes()
        target.transport.on_check_transaction = checks
        target.transport.heart_beat(target.address, "client", [GROUP], PATIENCE)
        assert broker.check_transaction(offset) == checks.wait(1)[0]


def test_delayed_message_is_delivered_after_a_restart() -> None:
    with opened() as (cluster, target):
        target.send(target.single(b"delayed", TIMER_DELAY_MS="50"))
        cluster.kill("broker-0")
        cluster.restart("broker-0")
        wait_for(lambda: bodies(cluster) == [b"delayed"])


def test_inner_batch_takes_an_offset_for_each_message() -> None:
    with opened(slaves=1, settings=lambda: BrokerSettings(flush_interval=NEVER)) as (cluster, target):
        cluster.create_topic("orders", attributes={"queue.type": "BatchCQ"})
        (slave,) = cluster.slaves["broker-0"]
        for unit in (b"ab", b"cde"):
            target.send(target.batch(*(bytes([one]) for one in unit), properties="UNIQ_KEY\x01U1\x02"))
        for address in (target.address, slave.address):
            assert target.transport.max_offset(QUEUE, address, PATIENCE) == 5
            records = decode_records(replace(target, address=address).pull(0).body)
            assert [(record.queue_offset, record.properties["INNER_NUM"]) for record in records] == [(0, "2"), (2, "3")]
        cluster.kill("broker-0", lose_unflushed=True)
        cluster.restart("broker-0")
        # Until the transport has noticed the end of its connection, requests fail.
        wait_for(lambda: result_of(lambda: target.transport.max_offset(QUEUE, target.address, PATIENCE)) == "0")


def test_concurrent_clients_get_different_offsets() -> None:
    with opened() as (cluster, target):
        found = Outcomes()

        def client(number: int) -> None:
            with RemotingTransport([cluster.name_server]) as transport:
                mine = replace(target, transport=transport)
                for _ in range(25):
                    found(mine.send(mine.single(), number % 2).queue_offset)
                    cluster.create_topic(f"topic-{number}", 1)
                    transport.topics(PATIENCE)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(found) == sorted([*range(100)] * 2)


def test_killed_broker_has_no_connection_and_others_keep_theirs() -> None:
    with opened(2) as (cluster, target):
        other = cluster.brokers["broker-1"].address
        target.transport.max_offset(replace(QUEUE, broker_name="broker-1"), other, PATIENCE)
        cluster.kill("broker-0")
        wait_for(lambda: cluster.connections(target.address) == 0)
        assert cluster.connections(other) == 1
        cluster.break_connections(other)
        wait_for(lambda: cluster.connections(other) == 0)
        # Until the transport has noticed it, requests fail.
        queue = replace(QUEUE, broker_name="broker-1")
        wait_for(lambda: result_of(lambda: target.transport.max_offset(queue, other, PATIENCE)) == "0")


@pytest.mark.parametrize("encrypted", [False, True])
def test_stop_is_idempotent_and_leaves_no_thread_and_no_socket(tmp_path: Path, encrypted: bool) -> None:
    tls = Authority(tmp_path).context("server", "IP:127.0.0.1") if encrypted else None
    threads = set(threading.enumerate())
    cluster = FakeCluster(slaves=1, topics={"orders": 1}, tls=tls)
    cluster.stop()
    cluster.start()
    address = cluster.brokers["broker-0"].address
    host, port = address.split(":")
    # With TLS, this client never begins its handshake.
    with socket.create_connection((host, int(port)), PATIENCE) as client:
        wait_for(lambda: cluster.connections(address) == 1)
        cluster.kill("broker-0")
        cluster.stop()
        cluster.stop()
        assert client.recv(1) == b""
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), PATIENCE)
    gc.collect()  # a socket left open would warn


def test_failed_handshake_gets_an_alert(tmp_path: Path) -> None:
    context = Authority(tmp_path).context("server", "IP:127.0.0.1")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with FakeCluster(tls=context) as cluster:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        host, port = cluster.name_server.split(":")
        refused = pytest.raises(ssl.SSLError, match="ALERT")
        with socket.create_connection((host, int(port)), PATIENCE) as sock, refused:
            client.wrap_socket(sock, server_hostname=host)


def test_bytes_that_are_no_request_end_the_connection() -> None:
    with FakeCluster(0) as cluster:
        host, port = cluster.name_server.split(":")
        with socket.create_connection((host, int(port)), PATIENCE) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert client.recv(1) == b""
