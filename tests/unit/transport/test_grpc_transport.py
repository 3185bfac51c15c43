"""The gRPC transport with a test proxy: routes, sends, limits, and close."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rocketmq_spark.arrow.gather import varint
from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    MessageRefusedException,
    MQBrokerException,
    MQClientException,
    OptionError,
    RemotingCommandException,
    RemotingConnectException,
    RemotingException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RemotingTooMuchRequestException,
    RocketMQError,
    TopicRouteStaleException,
    UserRefusedException,
)
from rocketmq_spark.model.message import EncodedBatch, Encoding, MessageQueue, SendStatus
from rocketmq_spark.model.route import MASTER_ID, BrokerData, QueueData
from rocketmq_spark.protocol.grpc._pb import definition_pb2 as pb
from rocketmq_spark.protocol.grpc._pb import service_pb2 as service
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_proxy import FakeProxy
from rocketmq_spark.testing.fake_proxy_messages import status_reply
from rocketmq_spark.transport.grpc.transport import GrpcTransport
from tests.support.contract import SOON, Outcomes, batch, single
from tests.support.peer import refused_address
from tests.support.processes import PATIENCE, wait_for
from tests.support.proxies import route_reply, running_proxy, stored
from tests.support.transports import Grpc


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with running_proxy() as proxy:
        yield proxy


@pytest.fixture
def transport(proxy: FakeProxy) -> Iterator[GrpcTransport]:
    with GrpcTransport([proxy.address], client_id="test") as transport:
        yield transport


@pytest.fixture
def seam(transport: GrpcTransport, proxy: FakeProxy) -> Grpc:
    return Grpc(transport, proxy, None)


def have_routed(proxy: FakeProxy, reply: service.QueryRouteResponse) -> None:
    """Make a proxy answer every lookup with this route."""
    proxy.handlers["QueryRoute"] = lambda *_: reply.SerializeToString()


class NotRandom:
    """Starts with the first endpoint."""

    def randrange(self, _: int) -> int:
        return 0

    def getrandbits(self, _: int) -> int:
        return 7


def transport_to(*endpoints: str, **settings: Any) -> GrpcTransport:
    return GrpcTransport(endpoints, client_id="test", random=NotRandom(), **settings)  # type: ignore[arg-type]


def test_route_has_the_configured_endpoints_and_the_topic_types(proxy: FakeProxy) -> None:
    other = refused_address()
    have_routed(proxy, route_reply(pb.NORMAL, pb.FIFO, 99))
    with transport_to(proxy.address, other) as transport:
        route = transport.query_route("orders", PATIENCE)
    names = sorted([proxy.address, other])
    assert route.queue_datas == tuple(QueueData(name, 1, 1, 6) for name in names)
    assert route.broker_datas == tuple(BrokerData(name, {MASTER_ID: name}) for name in names)
    assert route.message_types == {"NORMAL", "FIFO"}
    [asked] = proxy.requests("QueryRoute")
    assert service.QueryRouteRequest.FromString(asked.request).endpoints == pb.Endpoints(
        scheme=pb.IPv4, addresses=[pb.Address(host="127.0.0.1", port=int(proxy.address.rpartition(":")[2]))]
    )


def test_addresses_in_a_proxy_answer_do_not_change_the_route(proxy: FakeProxy, transport: GrpcTransport) -> None:
    foreign = transport.query_route("orders", PATIENCE)
    have_routed(proxy, route_reply(pb.NORMAL, host="10.9.9.9"))
    assert transport.query_route("orders", PATIENCE) == foreign
    have_routed(proxy, route_reply(pb.NORMAL, host=""))
    assert transport.query_route("orders", PATIENCE) == foreign


@pytest.mark.parametrize(
    "reply",
    [
        route_reply(pb.NORMAL, permission=pb.READ),
        route_reply(pb.NORMAL, broker_id=1),
        service.QueryRouteResponse(status=route_reply().status),
    ],
)
def test_topic_without_a_writable_master_queue_is_not_writable(
    proxy: FakeProxy, transport: GrpcTransport, reply: service.QueryRouteResponse
) -> None:
    have_routed(proxy, reply)
    route = transport.query_route("orders", PATIENCE)
    assert [queue.writable for queue in route.queue_datas] == [False]
    assert route.message_types == frozenset()


def test_unreachable_endpoint_is_skipped_and_queried_last_afterwards(proxy: FakeProxy) -> None:
    dead = refused_address()
    with transport_to(dead, proxy.address) as transport:
        transport.query_route("orders", PATIENCE)
        proxy.handlers["QueryRoute"] = lambda *_: status_reply(40402, "No topic route info")
        # The proxy that answered is asked first; the dead one is not tried again.
        with pytest.raises(TopicRouteStaleException) as raised:
            transport.query_route("orders", PATIENCE)
    assert raised.value.response_code == 40402
    assert dead not in str(raised.value)


@pytest.mark.parametrize(("code", "why"), [(42900, "flow limit"), (50001, "trouble"), (50001, "name server not ready")])
def test_proxy_that_cannot_answer_is_skipped(proxy: FakeProxy, code: int, why: str) -> None:
    with running_proxy() as troubled, transport_to(troubled.address, proxy.address) as transport:
        troubled.handlers["QueryRoute"] = lambda *_: status_reply(code, why)
        assert transport.query_route("orders", PATIENCE).message_types == {"NORMAL"}


def test_error_of_a_failed_lookup_names_each_endpoint_and_reason(proxy: FakeProxy) -> None:
    dead = refused_address()
    proxy.handlers["QueryRoute"] = lambda *_: status_reply(42900, "flow limit")
    with transport_to(dead, proxy.address) as transport, pytest.raises(BrokerBusyException) as raised:
        transport.query_route("orders", PATIENCE)
    assert all(word in str(raised.value) for word in (dead, "Connection refused", proxy.address, "flow limit"))
    assert raised.value.response_code == 42900
    with transport_to(proxy.address, dead) as transport, pytest.raises(RemotingConnectException) as failed:
        transport.query_route("orders", PATIENCE)
    assert all(word in str(failed.value) for word in (dead, "Connection refused", proxy.address, "flow limit"))


def test_silent_proxy_leaves_time_for_the_next(proxy: FakeProxy) -> None:
    with running_proxy() as silent, transport_to(silent.address, proxy.address) as transport:
        silent.handlers["QueryRoute"] = lambda _, context: silent.silence(context) or b""
        assert transport.query_route("orders", 4 * SOON).message_types == {"NORMAL"}


def test_permanent_error_of_a_proxy_is_raised_without_asking_others(proxy: FakeProxy) -> None:
    proxy.handlers["QueryRoute"] = lambda *_: status_reply(40100, "check signature failed.")
    with transport_to(proxy.address, refused_address()) as transport, pytest.raises(MQBrokerException) as raised:
        transport.query_route("orders", PATIENCE)
    assert raised.value.response_code == 40100
    assert "no proxy gave" not in str(raised.value)


def test_lookup_without_an_endpoint_is_10004() -> None:
    with transport_to() as transport, pytest.raises(MQClientException, match="set the option endpoints") as raised:
        transport.query_route("orders", PATIENCE)
    assert raised.value.response_code == 10004


def test_malformed_answer_is_a_command_error(seam: Grpc) -> None:
    seam.proxy.handlers["SendMessage"] = seam.proxy.handlers["QueryRoute"] = lambda *_: b"\xff\xff"
    [outcome] = seam.send(single("orders", b"one"))
    assert isinstance(outcome.error, RemotingCommandException)
    assert outcome.error.maybe_stored is True
    with pytest.raises(RemotingCommandException, match=f"route of topic orders.*{seam.address} answered 2 bytes"):
        seam.transport.query_route("orders", PATIENCE)


def test_reply_above_16_mib_is_rejected_and_its_rows_may_be_stored(seam: Grpc) -> None:
    def padded(reply: bytes, length: int) -> bytes:
        # An unknown field, which is ignored.
        head = b"\xfa\x07" + varint(length - len(reply) - 6)
        return reply + head + bytes(length - len(reply) - len(head))

    def answering(length: int) -> Callable[[bytes, Any], bytes]:
        def answer(request: bytes, context: Any) -> bytes:
            return padded(store(request, context), length)

        return answer

    store = seam.proxy.handlers["SendMessage"]
    seam.proxy.handlers["SendMessage"] = answering(16 * 1024 * 1024)
    [outcome] = seam.send(batch("orders", b"one"))
    assert outcome.status is SendStatus.SEND_OK
    seam.proxy.handlers["SendMessage"] = answering(16 * 1024 * 1024 + 1)
    [outcome] = seam.send(batch("orders", b"two"))
    assert type(outcome.error) is RemotingCommandException
    assert (outcome.error.maybe_stored, outcome.error.flow_control, outcome.error.split) == (True, False, False)
    assert "may have been executed" in str(outcome.error)
    assert [message.body for message in stored(seam.proxy)] == [b"one", b"two"]
    seam.proxy.handlers["QueryRoute"] = lambda *_: padded(route_reply(pb.NORMAL).SerializeToString(), 17 * 1024 * 1024)
    with pytest.raises(RemotingCommandException, match="larger than max"):
        seam.transport.query_route("orders", PATIENCE)


def test_stored_batch_has_an_offset_and_an_unknown_queue(seam: Grpc) -> None:
    [first] = seam.send(batch("orders", b"one", b"two"))
    [second] = seam.send(batch("orders", b"three"))
    assert first.queue == MessageQueue("orders", seam.address, -1)
    assert (first.queue_offset, second.queue_offset) == (0, 2)
    assert (first.offset_msg_id, first.transaction_id) == ("", "")
    assert first.latency_ms > 0


def has_requests(proxy: FakeProxy, count: int) -> bool:
    return len(proxy.requests("SendMessage")) == count


def test_encoded_request_is_sent_unchanged_while_it_is_young(seam: Grpc) -> None:
    encoded = seam.request(batch("orders", b"one", b"two"))
    seam.transport.send(encoded, PATIENCE, Outcomes())
    wait_for(lambda: bool(seam.proxy.requests("SendMessage")))
    body = seam.proxy.requests("SendMessage")[0].request
    ready = EncodedBatch(
        "orders", (body[:20], memoryview(body)[20:]), 2, len(body), encoding=Encoding.GRPC, born_timestamp=10_000
    )
    for count, later in enumerate((0, 29_999, 30_000), 2):
        request = replace(seam.request(ready), born_timestamp=10_000 + later)
        seam.transport.send(request, PATIENCE, Outcomes())
        wait_for(partial(has_requests, seam.proxy, count))
    _, same, still, renewed = [call.request for call in seam.proxy.requests("SendMessage")]
    assert same == still == body != renewed
    born = [message.system_properties.born_timestamp.ToMilliseconds()
            for message in service.SendMessageRequest.FromString(renewed).messages]  # fmt: skip
    assert born == [40_000, 40_000]


def test_throttled_request_is_flow_control_and_is_resent_unchanged(seam: Grpc) -> None:
    seam.play(Reply.code(42900, "flow limit"))
    encoded = batch("orders", b"one", b"two")
    [throttled] = seam.send(encoded)
    assert type(throttled.error) is BrokerBusyException
    assert (throttled.error.flow_control, throttled.error.retriable, throttled.error.maybe_stored) == (
        True,
        True,
        False,
    )
    [stored] = seam.send(encoded)
    assert stored.status is SendStatus.SEND_OK
    ids = [
        [message.system_properties.message_id for message in service.SendMessageRequest.FromString(sent).messages]
        for sent in (call.request for call in seam.proxy.requests("SendMessage"))
    ]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


@pytest.mark.parametrize(
    ("code", "message", "kind", "flags"),
    [
        (40007, "illegal property", MessageRefusedException, {"split"}),
        (41300, "too large", MessageRefusedException, {"split"}),
        (50001, "message body size exceeded", MessageRefusedException, {"split"}),
        (50400, "timeout", BrokerOutcomeUnknownException, {"retriable", "isolate", "maybe_stored"}),
        (40402, "no route", TopicRouteStaleException, {"retriable", "refresh_route"}),
        (40014, "expected type is UNSPECIFIED", TopicRouteStaleException, {"retriable", "refresh_route"}),
        (40014, "expected type is FIFO", MQBrokerException, set()),
        (40100, "User:u has no permission to access Topic:orders", MQBrokerException, set()),
        (40100, "User:u is not found.", UserRefusedException, set()),
    ],
)
def test_rejection_sets_the_flags_for_the_reaction(
    seam: Grpc, code: int, message: str, kind: type[MQBrokerException], flags: set[str]
) -> None:
    seam.play(Reply.code(code, message))
    [outcome] = seam.send(batch("orders", b"one"))
    assert type(outcome.error) is kind
    named = ("retriable", "refresh_route", "isolate", "flow_control", "maybe_stored", "split")
    assert {name for name in named if getattr(outcome.error, name)} == flags
    [call] = seam.proxy.requests("SendMessage")
    assert call.metadata["x-mq-request-id"] in str(outcome.error)
    assert f"sending 1 rows to {seam.queue}" in str(outcome.error)


def test_lost_proxy_may_have_stored_a_sent_request(seam: Grpc) -> None:
    seam.play(Reply(silent=True))
    outcomes = Outcomes()
    seam.transport.send(seam.request(batch("orders", b"one")), PATIENCE, outcomes)
    wait_for(lambda: bool(seam.proxy.requests("SendMessage")))
    seam.proxy.stop()
    [outcome] = outcomes.wait(1)
    assert type(outcome.error) is RemotingSendRequestException
    assert outcome.error.maybe_stored is True
    assert outcome.error.__cause__ is not None


def test_message_that_grpc_cannot_carry_fails_unsent(seam: Grpc) -> None:
    [flagged, levelled] = seam.send(replace(single("orders", b"one"), flag=7), single("orders", b"two", DELAY="3"))
    assert isinstance(flagged.error, MQClientException)
    assert isinstance(levelled.error, MQClientException)
    assert "send over remoting (nameServer instead of endpoints)" in str(flagged.error)
    assert "delayMs" in str(levelled.error)
    assert list(seam.proxy.calls) == []


def test_calls_that_the_protocol_does_not_have_are_refused(seam: Grpc) -> None:
    queue, address = seam.queue, seam.address
    # Not in the interface of proxies.
    transport: Any = seam.transport
    for call in (
        lambda: transport.send_oneway(seam.request(single("orders", b"one")), PATIENCE),
        lambda: transport.max_offset(queue, address, PATIENCE),
        lambda: transport.min_offset(queue, address, PATIENCE),
        lambda: transport.search_offset(queue, 0, address, PATIENCE),
        lambda: transport.earliest_msg_store_time(queue, address, PATIENCE),
        lambda: transport.view_message(address, 0, PATIENCE, topic="orders"),
        lambda: transport.topic_config(address, "orders", PATIENCE),
        lambda: transport.create_topic(address, "orders", 4, 6, PATIENCE, attributes="+message.type=FIFO"),
    ):
        with pytest.raises(
            MQClientException, match=r"the gRPC protocol has no .*; give name_server instead of endpoints"
        ):
            call()
    assert list(seam.proxy.calls) == []


def test_send_beyond_the_limit_fails_at_once_and_permits_return(proxy: FakeProxy) -> None:
    with transport_to(proxy.address, client_async_semaphore_value=2) as transport:
        seam, outcomes = Grpc(transport, proxy, None), Outcomes()
        for _ in range(2):
            proxy.play(Reply(silent=True))
            transport.send(seam.request(single("orders", b"one")), 4 * SOON, outcomes)
        [refused] = seam.send(single("orders", b"two"))
        assert type(refused.error) is RemotingTooMuchRequestException
        assert "clientAsyncSemaphoreValue" in str(refused.error)
        assert refused.error.maybe_stored is False
        # A call that waits for its answer needs no permit.
        transport.query_route("orders", PATIENCE)
        assert {type(outcome.error) for outcome in outcomes.wait(2)} == {RemotingTimeoutException}
        assert [one.status for one in seam.send(*[single("orders", b"three")] * 2)] == [SendStatus.SEND_OK] * 2


def test_send_succeeds_after_one_that_could_start_no_thread(proxy: FakeProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with transport_to(proxy.address, client_async_semaphore_value=1) as transport:
        seam, outcomes = Grpc(transport, proxy, None), Outcomes()
        request = seam.request(single("orders", b"one"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", none_left)
            for _ in range(2):
                with pytest.raises(RocketMQError, match=r"thread failed: can't start new thread; raise the process"):
                    transport.send(request, PATIENCE, outcomes)
        transport.send(request, PATIENCE, outcomes)
        assert [outcome.status for outcome in outcomes.wait(1)] == [SendStatus.SEND_OK]
    assert len(outcomes) == 1


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_of_zero_or_less_is_rejected(limit: int) -> None:
    with pytest.raises(OptionError, match="clientAsyncSemaphoreValue"):
        transport_to("proxy:8081", client_async_semaphore_value=limit)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_without_time_nothing_is_sent(seam: Grpc, timeout: float) -> None:
    outcomes = Outcomes()
    seam.transport.send(seam.request(single("orders", b"one")), timeout, outcomes)
    seam.transport.send(seam.request(single("orders", b"one")), math.inf, outcomes, within=timeout)
    for outcome in outcomes.wait(2):
        assert type(outcome.error) is RemotingTooMuchRequestException
        assert "no time is left" in str(outcome.error)
    with pytest.raises(RemotingTooMuchRequestException):
        seam.transport.probe(seam.queue, seam.address, timeout)
    assert list(seam.proxy.calls) == []


def test_failing_callback_is_logged_and_later_sends_succeed(seam: Grpc, caplog: pytest.LogCaptureFixture) -> None:
    called = Outcomes()

    def fail(outcome: object) -> None:
        called(outcome)
        raise ValueError("a fault of the caller's")

    seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, fail)
    called.wait(1)
    [outcome] = seam.send(single("orders", b"two"))
    assert outcome.status is SendStatus.SEND_OK
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "a fault of the caller's" in str(record.exc_info[1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_thread_closes_the_transport_and_completes_all_requests(seam: Grpc) -> None:
    def die(_: object) -> None:
        raise SystemExit

    outcomes = Outcomes()
    seam.play(Reply(silent=True))
    seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, outcomes)
    wait_for(lambda: bool(seam.proxy.requests("SendMessage")))
    seam.transport.send(seam.request(single("orders", b"two")), PATIENCE, die)
    [outcome] = outcomes.wait(1)
    assert type(outcome.error) is RemotingSendRequestException
    assert seam.transport.closed is True
    with pytest.raises(RocketMQError, match="closed"):
        seam.transport.send(seam.request(single("orders", b"three")), PATIENCE, outcomes)


def test_all_outcomes_are_delivered_on_one_separate_thread(seam: Grpc) -> None:
    outcomes = seam.send(*(single("orders", b"one") for _ in range(20)))
    assert {thread.name for thread in outcomes.threads} == {"rocketmq-spark-grpc"}


def test_callback_can_close_the_transport(seam: Grpc) -> None:
    outcomes = Outcomes()

    def close(outcome: object) -> None:
        seam.transport.close()
        outcomes(outcome)

    seam.play(Reply(silent=True))
    seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, outcomes)
    wait_for(lambda: bool(seam.proxy.requests("SendMessage")))
    seam.transport.send(seam.request(single("orders", b"two")), PATIENCE, close)
    closed, failed = outcomes.wait(2)
    assert closed.status is SendStatus.SEND_OK
    assert type(failed.error) is RemotingSendRequestException


def test_close_ends_a_call_that_another_thread_waits_for(seam: Grpc) -> None:
    failures = Outcomes()
    seam.proxy.handlers["QueryRoute"] = lambda _, context: seam.proxy.silence(context) or b""

    def ask() -> None:
        try:
            seam.transport.query_route("orders", PATIENCE)
        except RocketMQError as exc:
            failures(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: bool(seam.proxy.requests("QueryRoute")))
    seam.transport.close()
    thread.join(PATIENCE)
    [error] = failures.wait(1)
    assert isinstance(error, RemotingException)


def test_sends_that_race_with_close_have_one_outcome_or_raise(proxy: FakeProxy) -> None:
    for _ in range(10):
        with transport_to(proxy.address) as transport:
            seam, outcomes = Grpc(transport, proxy, None), Outcomes()
            taken: list[int] = []

            def send(seam: Grpc = seam, outcomes: Outcomes = outcomes, taken: list[int] = taken) -> None:
                with contextlib.suppress(RocketMQError):
                    for _ in range(100):
                        seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, outcomes)
                        taken.append(1)

            threads = [threading.Thread(target=send) for _ in range(2)]
            for thread in threads:
                thread.start()
            outcomes.wait(5)
            transport.close()
            for thread in threads:
                thread.join(PATIENCE)
            assert len(outcomes.wait(len(taken))) == len(taken)


def test_unused_transport_starts_no_thread() -> None:
    before = threading.active_count()
    transport = transport_to("proxy:8081")
    transport.close()
    assert threading.active_count() == before
    assert transport.closed is True


def test_importing_and_creating_the_transport_imports_no_grpc() -> None:
    code = (
        "import sys, rocketmq_spark, rocketmq_spark.transport.grpc.transport as module\n"
        "transport = module.GrpcTransport(['proxy:8081'], client_id='test')\n"
        "assert 'grpc' not in sys.modules, 'imported'\n"
        "transport.close()\n"
        "assert 'grpc' not in sys.modules, 'imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_transport_cannot_be_pickled_or_copied(transport: GrpcTransport) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickle its options"):
            attempt(transport)


def test_repr_shows_the_state(seam: Grpc) -> None:
    assert repr(seam.transport).startswith(f"<GrpcTransport endpoints={seam.address} <GrpcClient test@")
    seam.play(Reply(silent=True))
    seam.transport.send(seam.request(single("orders", b"one")), PATIENCE, Outcomes())
    assert f"open, 1 in flight, <Channels ['{seam.address}']>" in repr(seam.transport)
    seam.transport.close()
    assert repr(seam.transport) == f"<GrpcTransport endpoints={seam.address} closed>"
