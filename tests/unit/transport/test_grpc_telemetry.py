"""Transaction checks over gRPC, and the telemetry streams that deliver them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rocketmq_spark import __version__
from rocketmq_spark.errors import MQBrokerException, RocketMQError
from rocketmq_spark.model.message import Message, SendStatus
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import (
    TRANSACTION_COMMIT_TYPE,
    TRANSACTION_NOT_TYPE,
    TRANSACTION_ROLLBACK_TYPE,
    EndTransaction,
    LocalTransactionState,
    TransactionCheck,
)
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status, status_reply
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from rocketmq_spark.transport.tls import TlsSettings
from tests.support.contract import Outcomes, batch, single
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import ends_at, running_proxy
from tests.support.transports import Authority, Grpc

AT_ONCE = 0.01
TOPICS = {"orders": "MIXED", "other": "TRANSACTION"}


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy(TOPICS) as proxy:
        yield proxy


@pytest.fixture
def seam(proxy: FakeProxy) -> Iterator[Grpc]:
    with GrpcTransport([proxy.address], client_id="test", namespace="ns", reopen_after=AT_ONCE) as transport:
        yield Grpc(transport, proxy, None)


def half(seam: Grpc, body: bytes = b"half", topic: str = "orders", group: str = "pg") -> str:
    """Send a half message; return its id."""
    encoded = single(topic, body, TRAN_MSG="true", PGROUP=group, TAGS="a", KEYS="k1", mine="yours")
    outcomes = Outcomes()
    seam.transport.send(replace(seam.request(encoded), producer_group=group), PATIENCE, outcomes)
    [outcome] = outcomes.wait(1)
    assert outcome.status is SendStatus.SEND_OK
    assert isinstance(outcome.transaction_id, str)
    return outcome.transaction_id


def has_settings(proxy: FakeProxy, count: int) -> bool:
    return len(proxy.client_settings) == count


def topics(proxy: FakeProxy) -> list[list[str]]:
    return [[topic.name for topic in settings.publishing.topics] for settings in tuple(proxy.client_settings)]


def test_without_a_half_message_there_is_no_stream(seam: Grpc) -> None:
    seam.transport.on_check_transaction = Outcomes()
    seam.send(batch("orders", b"one", b"two"), single("orders", b"three"))
    seam.transport.heart_beat(seam.address, "", ["pg"], PATIENCE)
    seam.transport.unregister_client(seam.address, "", "pg", PATIENCE)
    assert {call.method for call in seam.proxy.calls} == {"SendMessage"}


def test_without_a_check_handler_no_stream_is_opened(seam: Grpc) -> None:
    half(seam)
    seam.transport.heart_beat(seam.address, "", ["pg"], PATIENCE)
    assert {call.method for call in seam.proxy.calls} == {"SendMessage"}


def test_first_half_message_opens_streams_with_its_topic_in_settings(
    proxy: FakeProxy,
) -> None:
    with running_proxy(TOPICS) as other, GrpcTransport([proxy.address, other.address], client_id="test") as transport:
        seam = Grpc(transport, proxy, None)
        transport.on_check_transaction = Outcomes()
        half(seam)
        half(seam)
        for one in (proxy, other):
            wait_for(partial(has_settings, one, 1))
            [settings] = one.client_settings
            assert settings.client_type == pb.PRODUCER
            assert [address.port for address in settings.access_point.addresses] == [int(one.address.split(":")[1])]
            assert [topic.name for topic in settings.publishing.topics] == ["orders"]
            assert settings.publishing.validate_message_type is True
            assert settings.user_agent.language == pb.PYTHON
            assert settings.user_agent.version == __version__
            assert settings.request_timeout.ToMilliseconds() == 3000
        half(seam, topic="other")
        for one in (proxy, other):
            wait_for(partial(has_settings, one, 2))
            assert topics(one) == [["orders"], ["orders", "other"]]
            assert len(one.requests("Telemetry")) == 1


def test_check_reaches_the_handler_and_its_answer_ends_the_transaction(seam: Grpc) -> None:
    checks = Outcomes()
    seam.transport.on_check_transaction = checks
    message_id = half(seam, group="the-group")
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.proxy.check(message_id)
    [check] = checks.wait(1)
    assert isinstance(check, TransactionCheck)
    assert (check.address, check.broker_name) == (seam.address, seam.address)
    assert (check.producer_group, check.unique_id, check.transaction_id) == ("the-group", message_id, message_id)
    message = check.message
    assert (message.topic, message.body, message.tags, message.keys) == ("orders", b"half", "a", "k1")
    assert message.user_properties == {"mine": "yours"}
    assert message.is_half_message is True
    seam.transport.end_transaction_oneway(check.address, check.answer(TRANSACTION_COMMIT_TYPE), PATIENCE)
    [one] = ends_at(seam.proxy)
    assert (one.topic.name, one.topic.resource_namespace) == ("orders", "ns")
    assert (one.message_id, one.transaction_id) == (message_id, message_id)
    assert (one.resolution, one.source) == (pb.COMMIT, pb.SOURCE_SERVER_CHECK)
    assert [message.body for message in seam.stored(1)] == [b"half"]


def test_check_goes_to_the_last_group_that_sent_to_the_topic(seam: Grpc) -> None:
    checks = Outcomes()
    seam.transport.on_check_transaction = checks
    first, other = half(seam, group="first"), half(seam, topic="other", group="another")
    half(seam, group="second")
    wait_for(lambda: topics(seam.proxy)[-1:] == [["orders", "other"]])
    seam.proxy.check(first)
    seam.proxy.check(other)
    assert [check.producer_group for check in checks.wait(2)] == ["second", "another"]


def end(message_id: str, how: int) -> EndTransaction:
    return EndTransaction(
        topic="orders",
        producer_group="pg",
        tran_state_table_offset=0,
        commit_log_offset=-1,
        commit_or_rollback=how,
        msg_id=message_id,
        transaction_id=message_id,
        broker_name="",
    )


def test_answered_end_reports_its_outcome(seam: Grpc) -> None:
    message_id, ends = half(seam), Outcomes()
    seam.transport.end_transaction(seam.address, end(message_id, TRANSACTION_ROLLBACK_TYPE), PATIENCE, ends)
    assert ends.wait(1) == [None]
    assert [one.resolution for one in ends_at(seam.proxy)] == [pb.ROLLBACK]
    seam.proxy.handlers["EndTransaction"] = lambda *_: status_reply(50001, "cannot found transaction data")
    seam.transport.end_transaction(seam.address, end("gone", TRANSACTION_ROLLBACK_TYPE), PATIENCE, ends)
    error = ends.wait(2)[1]
    assert isinstance(error, MQBrokerException)
    assert "ending transaction gone" in str(error)
    with pytest.raises(ValueError, match="without a commit or rollback: brokers do not answer"):
        seam.transport.end_transaction(seam.address, end(message_id, TRANSACTION_NOT_TYPE), PATIENCE, ends)


def test_producer_end_has_source_client_and_undecided_end_is_not_sent(seam: Grpc) -> None:
    message_id = half(seam)
    seam.transport.end_transaction_oneway(seam.address, end(message_id, TRANSACTION_NOT_TYPE), PATIENCE)
    assert ends_at(seam.proxy) == []
    seam.transport.end_transaction_oneway(seam.address, end(message_id, TRANSACTION_ROLLBACK_TYPE), PATIENCE)
    assert [(one.resolution, one.source) for one in ends_at(seam.proxy)] == [(pb.ROLLBACK, pb.SOURCE_CLIENT)]
    assert seam.stored(0) == []


def test_an_end_that_comes_too_late_is_an_error(seam: Grpc) -> None:
    seam.proxy.handlers["EndTransaction"] = lambda *_: status_reply(50001, "cannot found transaction data")
    with pytest.raises(MQBrokerException, match=r"ending transaction id-1.*cannot found transaction data") as raised:
        seam.transport.end_transaction_oneway(seam.address, end("id-1", TRANSACTION_COMMIT_TYPE), PATIENCE)
    assert raised.value.retriable is False


def test_heart_beats_go_where_a_stream_is(seam: Grpc) -> None:
    seam.transport.on_check_transaction = Outcomes()
    half(seam)
    deadline = time.monotonic() + PATIENCE
    while not seam.proxy.requests("Heartbeat"):
        assert time.monotonic() < deadline
        seam.transport.heart_beat(seam.address, "", ["pg"], PATIENCE)
        time.sleep(0.01)
    seam.transport.heart_beat(refused_address(), "", ["pg"], PATIENCE)
    [beat] = seam.proxy.requests("Heartbeat")
    assert service.HeartbeatRequest.FromString(beat.request) == service.HeartbeatRequest(client_type=pb.PRODUCER)


def test_proxy_that_has_not_accepted_the_settings_gets_no_heartbeat(seam: Grpc) -> None:
    # The proxy would answer that it cannot find the client's settings.
    take = seam.proxy.handlers["Telemetry"]

    def take_silently(command: bytes, context: Any) -> bytes:
        take(command, context)
        return b""

    seam.proxy.handlers["Telemetry"] = take_silently
    seam.transport.on_check_transaction = Outcomes()
    half(seam)
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.transport.heart_beat(seam.address, "", ["pg"], PATIENCE)
    assert seam.proxy.requests("Heartbeat") == []


def test_removed_group_leaves_the_settings_and_the_last_one_terminates(seam: Grpc) -> None:
    seam.transport.on_check_transaction = Outcomes()
    half(seam, group="first")
    half(seam, topic="other", group="second")
    wait_for(lambda: topics(seam.proxy)[-1:] == [["orders", "other"]])
    seam.transport.unregister_client(seam.address, "", "first", PATIENCE)
    wait_for(lambda: topics(seam.proxy)[-1] == ["other"])
    assert seam.proxy.requests("NotifyClientTermination") == []
    seam.transport.unregister_client(seam.address, "", "second", PATIENCE)
    assert len(seam.proxy.requests("NotifyClientTermination")) == 1
    seam.transport.heart_beat(seam.address, "", [], PATIENCE)
    assert seam.proxy.requests("Heartbeat") == []
    # A returning proxy is connected again.
    half(seam, group="first")
    wait_for(lambda: topics(seam.proxy)[-1] == ["orders"])


def test_closed_stream_is_opened_again_with_its_settings(seam: Grpc, caplog: pytest.LogCaptureFixture) -> None:
    checks = Outcomes()
    seam.transport.on_check_transaction = checks
    message_id = half(seam)
    for turn in range(1, 4):
        wait_for(partial(has_settings, seam.proxy, turn))
        seam.proxy.hang_up_streams()
    wait_for(lambda: len(seam.proxy.client_settings) == 4)
    seam.proxy.check(message_id)
    checks.wait(1)
    assert all(f"Telemetry stream to {seam.address}: the proxy ended it" in record.message for record in caplog.records)


def test_unreachable_endpoint_is_logged_once_and_used_when_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    address = refused_address()

    def complaints() -> list[str]:
        records = [record for record in caplog.records if record.levelno == logging.WARNING]
        return [record.message for record in records if address in record.message]

    with (
        running_proxy(TOPICS) as proxy,
        GrpcTransport([proxy.address, address], client_id="t", reopen_after=AT_ONCE) as transport,
    ):
        transport.on_check_transaction = Outcomes()
        half(Grpc(transport, proxy, None))
        wait_for(lambda: bool(proxy.client_settings) and bool(complaints()))
        with running_proxy(TOPICS, address=address) as late:
            wait_for(lambda: bool(late.client_settings))
            late.hang_up_streams()
            wait_for(lambda: len(late.client_settings) == 2)
    # One opening until the proxy came, one after it closed the stream, and perhaps one more after its end.
    assert ["UNAVAILABLE" in message for message in complaints()[:2]] == [True, False]


def test_stream_with_insecure_skip_verify_waits_for_a_late_proxy(authority: Authority) -> None:
    # The certificate of the proxy is read before the call, which fails while no proxy listens.
    address, certificate = refused_address(), authority.server("late", "IP:127.0.0.1")
    tls = TlsSettings(insecure_skip_verify=True)
    with (
        running_proxy(TOPICS, certificate=certificate) as proxy,
        GrpcTransport([proxy.address, address], client_id="t", tls=tls, reopen_after=AT_ONCE) as transport,
    ):
        transport.on_check_transaction = Outcomes()
        half(Grpc(transport, proxy, None))
        wait_for(lambda: bool(proxy.client_settings))
        with running_proxy(TOPICS, address=address, certificate=certificate) as late:
            wait_for(lambda: bool(late.client_settings))


def test_settings_are_repeated_on_a_stream_that_stays_open(proxy: FakeProxy) -> None:
    with GrpcTransport([proxy.address], client_id="test", settings_every=0.01) as transport:
        transport.on_check_transaction = Outcomes()
        half(Grpc(transport, proxy, None))
        wait_for(lambda: len(proxy.client_settings) >= 4)
        assert len(proxy.requests("Telemetry")) == 1


@pytest.mark.parametrize(
    "command",
    [
        service.TelemetryCommand(),
        service.TelemetryCommand(status=status(40100, "check signature failed.")),
        service.TelemetryCommand(verify_message_command=service.VerifyMessageCommand(nonce="n")),
        service.TelemetryCommand(print_thread_stack_trace_command=service.PrintThreadStackTraceCommand(nonce="n")),
        service.TelemetryCommand(recover_orphaned_transaction_command=service.RecoverOrphanedTransactionCommand()),
    ],
)
def test_unsupported_and_empty_commands_do_not_end_the_stream(seam: Grpc, command: service.TelemetryCommand) -> None:
    checks = Outcomes()

    def on_check(check: TransactionCheck) -> None:
        if not check.unique_id:
            raise ValueError("a check of nothing")
        checks(check)

    seam.transport.on_check_transaction = on_check
    message_id = half(seam)
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.proxy.command(command)
    seam.proxy.check(message_id)
    checks.wait(1)
    assert len(seam.proxy.requests("Telemetry")) == 1


def test_rejection_of_a_stream_is_logged_with_its_reason(seam: Grpc, caplog: pytest.LogCaptureFixture) -> None:
    seam.transport.on_check_transaction = Outcomes()
    half(seam)
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.proxy.command(service.TelemetryCommand(status=status(40100, "check signature failed.")))
    seam.proxy.hang_up_streams()
    wait_for(lambda: len(seam.proxy.client_settings) > 1)
    assert "UNAUTHORIZED check signature failed." in caplog.text


def test_proxy_can_request_a_new_stream(seam: Grpc) -> None:
    seam.transport.on_check_transaction = Outcomes()
    half(seam)
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.proxy.command(service.TelemetryCommand(reconnect_endpoints_command=service.ReconnectEndpointsCommand()))
    wait_for(lambda: len(seam.proxy.requests("Telemetry")) == 2)


def test_close_ends_the_streams_and_their_threads(seam: Grpc) -> None:
    seam.transport.on_check_transaction = Outcomes()
    half(seam)
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith(seam.address)]


COMMIT, ROLLBACK, UNKNOW = LocalTransactionState


class Listener:
    """Leaves a transaction open, and decides at the check."""

    def __init__(self, execute: LocalTransactionState) -> None:
        self.execute = execute
        self.checked = Outcomes()

    def execute_local_transaction(self, message: Message, arg: object) -> LocalTransactionState:
        return self.execute

    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState:
        self.checked(message)
        return COMMIT


@pytest.fixture
def start(seam: Grpc) -> Iterator[Callable[[Listener], Producer]]:
    started: list[Producer] = []

    def make(listener: Listener) -> Producer:
        # The name server's address is unused, because the transport is given.
        transport: Any = seam.transport
        producer = Producer("pg", transport=transport, name_server="a:1", transaction_listener=listener)
        started.append(producer)
        producer.start()
        return producer

    yield make
    for producer in started:
        producer.shutdown()


@pytest.mark.parametrize(("decided", "resolution"), [(COMMIT, pb.COMMIT), (ROLLBACK, pb.ROLLBACK)])
def test_transaction_ends_at_the_proxy_that_stored_its_half_message(
    seam: Grpc, start: Callable[[Listener], Producer], decided: LocalTransactionState, resolution: int
) -> None:
    result = start(Listener(decided)).send_in_transaction(Message.of("orders", b"half"), None)
    assert result.local_transaction_state is decided
    [one] = ends_at(seam.proxy)
    assert (one.message_id, one.transaction_id) == (result.msg_id, result.msg_id)
    assert (one.resolution, one.source) == (resolution, pb.SOURCE_CLIENT)


def test_listener_is_checked_for_an_undecided_transaction(seam: Grpc, start: Callable[[Listener], Producer]) -> None:
    listener = Listener(UNKNOW)
    result = start(listener).send_in_transaction(Message.of("orders", b"half"), None)
    assert ends_at(seam.proxy) == []
    wait_for(lambda: bool(seam.proxy.client_settings))
    seam.proxy.check(result.msg_id)
    [asked] = listener.checked.wait(1)
    assert (asked.body, asked.transaction_id) == (b"half", result.msg_id)
    wait_for(lambda: bool(ends_at(seam.proxy)))
    assert [(one.resolution, one.source) for one in ends_at(seam.proxy)] == [(pb.COMMIT, pb.SOURCE_SERVER_CHECK)]
    assert [message.body for message in seam.stored(1)] == [b"half"]


def test_a_half_message_that_a_proxy_refuses_runs_no_transaction(
    seam: Grpc, start: Callable[[Listener], Producer]
) -> None:
    producer = start(Listener(COMMIT))
    seam.proxy.play(Reply.code(40014, "the expected type is NORMAL, but actual type is TRANSACTION"), times=9)
    with pytest.raises(RocketMQError, match="40014"):
        producer.send_in_transaction(Message.of("orders", b"half"), None)
    assert ends_at(seam.proxy) == []
