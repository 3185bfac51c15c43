from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    RemotingConnectException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.model.message_ext import decode_message_id
from rocketmq_spark.model.send_result import TRANSACTION_COMMIT_TYPE, TRANSACTION_ROLLBACK_TYPE
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE
from tests.support.scripted import ManualClock, ScriptedTransport, route

QUEUE = MessageQueue("orders", "broker-a", 0)
BatchTo = Callable[..., SendRequest]


def statuses(outcomes: Any) -> list[Any]:
    return [outcome.status or type(outcome.error) for outcome in outcomes]


def test_send_completes_only_on_deliver(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({})
    transport.send(request_to("broker-a:10911"), 3.0, outcomes)
    assert (outcomes, transport.in_flight) == ([], 1)
    assert transport.deliver() == 1
    assert (statuses(outcomes), transport.in_flight) == ([SendStatus.SEND_OK], 0)


def test_replies_are_played_in_order_per_broker(request_to: Any, outcomes: Any) -> None:
    script = {"broker-a": [Reply.code(2, "busy"), Reply(SendStatus.FLUSH_DISK_TIMEOUT)]}
    transport = ScriptedTransport({}, script)
    transport.play("broker-a", Reply(error=RemotingConnectException("down")))
    transport.always["broker-a"] = Reply(SendStatus.SLAVE_NOT_AVAILABLE)
    for _ in range(5):
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)
    transport.send(request_to("b:10911", queue=MessageQueue("orders", "broker-b", 0)), 3.0, outcomes)
    transport.deliver()
    assert statuses(outcomes) == [
        BrokerBusyException,
        SendStatus.FLUSH_DISK_TIMEOUT,
        RemotingConnectException,
        SendStatus.SLAVE_NOT_AVAILABLE,
        SendStatus.SLAVE_NOT_AVAILABLE,
        SendStatus.SEND_OK,
    ]


def test_reply_can_depend_on_the_request(request_to: Any, outcomes: Any) -> None:
    def by_queue(request: SendRequest) -> Reply:
        return Reply.code(29, "request queueId[9] is illegal") if request.queue.queue_id == 9 else Reply()

    transport = ScriptedTransport({}, {"broker-a": [by_queue, by_queue]})
    for queue_id in (9, 0):
        transport.send(request_to("broker-a:10911", queue=MessageQueue("orders", "broker-a", queue_id)), 3.0, outcomes)
    transport.deliver()
    assert statuses(outcomes) == [TopicRouteStaleException, SendStatus.SEND_OK]


def test_outcomes_come_in_the_order_in_which_they_fall_due(request_to: Any) -> None:
    clock, log = ManualClock(100.0), []
    transport = ScriptedTransport({}, clock=clock)

    def note(number: int, outcome: SendOutcome) -> None:
        log.append((number, clock.now, outcome.latency_ms))

    for number, delay in enumerate((0.3, 0.1, 0.2, 0.1)):
        transport.play("broker-a", Reply(delay=delay))
        transport.send(request_to("broker-a:10911"), 3.0, functools.partial(note, number))
    assert transport.advance(0.05) == 0
    assert transport.next_due == 100.1
    assert transport.advance(0.2) == 3
    assert clock.now == 100.25
    transport.advance(1.0)
    assert log == [(1, 100.1, 100.0), (3, 100.1, 100.0), (2, 100.2, 200.0), (0, 100.3, 300.0)]


def test_silence_and_slow_answers_time_out(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({}, {"broker-a": [Reply(silent=True), Reply(delay=3.1), Reply(delay=3.0)]})
    for _ in range(3):
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)
    transport.advance(2.9)
    assert outcomes == []
    transport.advance(0.1)
    assert statuses(outcomes) == [RemotingTimeoutException, RemotingTimeoutException, SendStatus.SEND_OK]
    assert outcomes[0].latency_ms == 3000.0


def test_send_in_a_callback_completes_with_the_next_delivery(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({}, {"broker-a": [Reply.code(2)]})

    def again(_outcome: SendOutcome) -> None:
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)

    transport.send(request_to("broker-a:10911"), 3.0, again)
    assert transport.deliver() == 1
    assert outcomes == []
    assert transport.deliver() == 1
    assert statuses(outcomes) == [SendStatus.SEND_OK]


def test_advance_delivers_sends_of_callbacks(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({}, {"broker-a": [Reply.code(2, delay=1.0), Reply(delay=1.0)]})

    def again(_outcome: SendOutcome) -> None:
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)

    transport.send(request_to("broker-a:10911"), 3.0, again)
    assert transport.advance(2.0) == 2
    assert statuses(outcomes) == [SendStatus.SEND_OK]


def test_stored_messages_can_be_looked_at(request_to: Any, batch_to: BatchTo, outcomes: Any) -> None:
    transport = ScriptedTransport({})
    transport.send(batch_to("broker-a:10911", b"one", b"two"), 3.0, outcomes)
    single = request_to("broker-a:10911", (b"th", b"ree"), properties="KEYS\x01k\x02", flag=5)
    transport.send(single, 3.0, outcomes)
    transport.deliver()
    messages = transport.stored[QUEUE]
    assert [message.body for message in messages] == [b"one", b"two", b"three"]
    assert (messages[2].flag, messages[2].properties) == (5, {"KEYS": "k"})
    assert [outcome.queue_offset for outcome in outcomes] == [0, 2]
    assert transport.max_offset(QUEUE, "broker-a:10911", 1.0) == 3
    assert transport.min_offset(QUEUE, "broker-a:10911", 1.0) == 0
    assert [request.batch.rows for request in transport.requests] == [2, 1]


def test_acknowledgement_can_be_lost_after_storing(batch_to: BatchTo, outcomes: Any) -> None:
    refusal = Reply(error=RemotingSendRequestException("reset"), stored=True)
    transport = ScriptedTransport({}, {"broker-a": [Reply(silent=True, stored=True), refusal, Reply.code(2)]})
    for body in (b"one", b"two", b"three"):
        transport.send(batch_to("broker-a:10911", body), 3.0, outcomes)
    transport.advance(3.0)
    assert [message.body for message in transport.stored[QUEUE]] == [b"one", b"two"]
    assert all(outcome.error is not None for outcome in outcomes)


def test_route_lookups_return_given_routes_and_can_fail() -> None:
    transport = ScriptedTransport({"orders": route({"broker-b": 2, "broker-a": 4})})
    transport.fail("query_route", RemotingConnectException("no name server"))
    with pytest.raises(RemotingConnectException):
        transport.query_route("orders", 1.0)
    found = transport.query_route("orders", 1.0)
    assert [(queue.broker_name, queue.write_queue_nums) for queue in found.queue_datas] == [
        ("broker-a", 4),
        ("broker-b", 2),
    ]
    transport.routes["orders"] = route({"broker-a": 8})
    assert transport.query_route("orders", 1.0).queue_datas[0].write_queue_nums == 8
    with pytest.raises(TopicRouteStaleException):
        transport.query_route("unknown", 1.0)
    with pytest.raises(RemotingTimeoutException, match="no time left"):
        transport.query_route("orders", 0.0)


def test_a_created_topic_is_routed_to_the_brokers_that_have_it() -> None:
    transport = ScriptedTransport({})
    for name, queues in (("broker-b", 2), ("broker-a", 2), ("broker-a", 4)):
        transport.create_topic(f"{name}:10911", "orders", queues, 6, 1.0)
    assert transport.query_route("orders", 1.0) == route({"broker-a": 4, "broker-b": 2})


def test_other_calls_are_recorded() -> None:
    transport = ScriptedTransport({})
    transport.heart_beat("a:1", "client", ["pg1", "pg2"], 1.0)
    transport.unregister_client("a:1", "client", "pg1", 1.0)
    assert transport.calls == [
        ("heart_beat", "a:1", "client", ("pg1", "pg2")),
        ("unregister_client", "a:1", "client", "pg1"),
    ]


def test_oneway_sends_are_recorded_separately_and_hide_rejections(
    request_to: Any, caplog: pytest.LogCaptureFixture
) -> None:
    transport = ScriptedTransport({})
    request = request_to("broker-a:10911")
    refused, lost = Reply.code(13), Reply(error=RemotingSendRequestException("broken while writing"))
    transport.play("broker-a", Reply(), refused, Reply(silent=True, stored=False), lost)
    with caplog.at_level(logging.WARNING, "rocketmq_spark.transport"):
        for _ in range(4):
            transport.send_oneway(request, 3.0)
    transport.play("broker-a", Reply(error=RemotingConnectException("nobody there")))
    with pytest.raises(RemotingConnectException, match="nobody there"):
        transport.send_oneway(request, 3.0)
    assert (len(transport.oneways), transport.requests, transport.in_flight) == (5, [], 0)
    assert len(transport.stored[QUEUE]) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "oneway send to orders/broker-a/0: broken while writing"
    ]
    transport.close()
    with pytest.raises(RocketMQError, match="closed"):
        transport.send_oneway(request, 3.0)


def test_half_message_is_visible_only_after_its_commit(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({})
    half_queue = MessageQueue("RMQ_SYS_TRANS_HALF_TOPIC", "broker-a", 0)
    for number in range(2):
        properties = f"UNIQ_KEY\x01U{number}\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
        transport.send(request_to("broker-a:10911", properties=properties, sys_flag=4), 3.0, outcomes)
    transport.deliver()
    assert [(outcome.queue, outcome.queue_offset) for outcome in outcomes] == [(QUEUE, 0), (QUEUE, 1)]
    assert (len(transport.stored[half_queue]), QUEUE in transport.stored) == (2, False)
    checks = [transport.check_transaction("broker-a:10911", at) for at in (0, 1)]
    assert [check.commit_log_offset for check in checks] == [2, 3]
    for check, decision in zip(checks, (TRANSACTION_ROLLBACK_TYPE, TRANSACTION_COMMIT_TYPE), strict=True):
        transport.end_transaction_oneway(check.address, check.answer(decision), 1.0)
    assert [message.properties["UNIQ_KEY"] for message in transport.stored[QUEUE]] == ["U1"]
    assert transport.calls == [
        ("end_transaction", "broker-a:10911", check.answer(decision))
        for check, decision in zip(checks, (TRANSACTION_ROLLBACK_TYPE, TRANSACTION_COMMIT_TYPE), strict=True)
    ]


def test_failed_end_of_a_transaction_raises_and_changes_no_message(request_to: Any, outcomes: Any) -> None:
    transport = ScriptedTransport({})
    properties = "UNIQ_KEY\x01U1\x02TRAN_MSG\x01true\x02PGROUP\x01pg\x02"
    transport.send(request_to("broker-a:10911", properties=properties), 3.0, outcomes)
    transport.fail("end_transaction", RemotingConnectException("down"))
    check = transport.check_transaction("broker-a:10911", 0)
    with pytest.raises(RemotingConnectException):
        transport.end_transaction_oneway(check.address, check.answer(TRANSACTION_COMMIT_TYPE), 1.0)
    assert QUEUE not in transport.stored
    with pytest.raises(IndexError):
        transport.check_transaction("broker-a:10911", 99)


def test_stored_messages_are_found_by_the_transports_clock(batch_to: BatchTo, outcomes: Any) -> None:
    transport = ScriptedTransport({}, clock=ManualClock(100.0))
    for _ in range(3):
        transport.send(batch_to("broker-a:10911", b"one", b"two"), 3.0, outcomes)
        transport.advance(1.0)
    assert transport.earliest_msg_store_time(QUEUE, "broker-a:10911", 1.0) == 100_000
    found = [transport.search_offset(QUEUE, at, "broker-a:10911", 1.0) for at in (0, 100_001, 102_000, 102_001)]
    assert found == [0, 2, 4, 6]
    ids = outcomes[2].offset_msg_id.split(",")
    viewed = [transport.view_message("broker-a:10911", decode_message_id(one)[1], 1.0) for one in ids]
    assert [(one.body, one.queue_offset, one.store_timestamp) for one in viewed] == [
        (b"one", 4, 102_000),
        (b"two", 5, 102_000),
    ]


def test_close_fails_requests_in_flight_and_rejects_later_ones(request_to: Any, outcomes: Any) -> None:
    with ScriptedTransport({}) as transport:
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)
        transport.close()
    assert statuses(outcomes) == [RemotingSendRequestException]
    with pytest.raises(RocketMQError, match="closed"):
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)
    assert repr(transport) == "<ScriptedTransport closed, 1 requests, 0 in flight>"


def test_a_clock_that_cant_be_moved_is_refused() -> None:
    with pytest.raises(TypeError, match="ManualClock"):
        ScriptedTransport({}, clock=lambda: 0.0).advance(1.0)


def test_threaded_outcomes_arrive_without_deliver(request_to: Any, outcomes: Any) -> None:
    with ScriptedTransport({}, {"broker-a": [Reply(delay=0.02), Reply()]}, threaded=True) as transport:
        for _ in range(2):
            transport.send(request_to("broker-a:10911"), 3.0, outcomes)
        outcomes.wait(2)
        # The order depends on the arrival of the second send.
        assert sorted(outcome.latency_ms for outcome in outcomes) == [0.0, 20.0]
        assert threading.current_thread() not in outcomes.threads
        transport.always["broker-a"] = Reply(silent=True)
        transport.send(request_to("broker-a:10911"), PATIENCE, outcomes)
    assert statuses(outcomes)[2] is RemotingSendRequestException


def test_threaded_on_a_manual_clock_waits_for_it_to_move(request_to: Any, outcomes: Any) -> None:
    with ScriptedTransport({}, {"broker-a": [Reply(delay=50.0)]}, clock=ManualClock(), threaded=True) as transport:
        transport.send(request_to("broker-a:10911"), 60.0, outcomes)
        transport.advance(49.0)
        assert transport.in_flight == 1
        transport.advance(1.0)
        assert statuses(outcomes.wait(1)) == [SendStatus.SEND_OK]


def test_a_callback_that_raises_does_not_end_the_thread(
    request_to: Any, outcomes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(_outcome: SendOutcome) -> None:
        raise ZeroDivisionError("in the callback")

    with (
        caplog.at_level(logging.ERROR, "rocketmq_spark.transport"),
        ScriptedTransport({}, threaded=True) as transport,
    ):
        transport.send(request_to("broker-a:10911"), 3.0, raising)
        transport.send(request_to("broker-a:10911"), 3.0, outcomes)
        outcomes.wait(1)
    assert [record.getMessage() for record in caplog.records] == ["a callback raised"]
