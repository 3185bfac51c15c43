"""The pipeline with a manual clock and a scripted cluster: every outcome of a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.errors import DeliveryError, RemotingCertificateException, RemotingTimeoutException, RocketMQError
from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.routing.fault_strategy import PRESETS
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.sink.pipeline import Unfinished
from rocketmq_spark.testing import Reply
from tests.support.pipelines import CERTAIN_REPLIES, REPLIES, Rig, refused
from tests.support.scripted import route


def test_every_batch_is_stored_and_counted_with_its_queue_and_offset() -> None:
    rig = Rig(route({"a": 2, "b": 2}))
    rig.offer(20, rows=5)
    rig.run()
    facts = rig.facts
    assert rig.pipeline.pending_bytes == 0
    assert sum(broker["rows"] for broker in facts.values()) == 100
    assert sum(len(messages) for messages in rig.transport.stored.values()) == 100
    assert Counter(rig.brokers) == {"a": 10, "b": 10}


def test_a_failure_goes_to_another_broker_at_once_with_the_same_bytes() -> None:
    rig = Rig(route({"a": 4, "b": 4}))
    rig.transport.always["a"] = refused()
    rig.offer(10)
    started = rig.clock.now
    rig.run()
    assert rig.pipeline.failure is None
    assert rig.clock.now == started
    assert sum(facts["rows"] for facts in rig.facts.values()) == 10
    assert rig.facts["a"]["retries_by_reason"] == {"RemotingConnectException": rig.brokers.count("a")}
    assert rig.refreshed


def test_broker_that_refuses_connections_is_retried_with_backoff() -> None:
    rig = Rig(route({"a": 4, "b": 4}))
    rig.transport.always["a"] = refused()
    rig.transport.always["b"] = Reply(delay=0.01)
    rig.offer(400)
    rig.run()
    assert sum(facts["rows"] for facts in rig.facts.values()) == 400
    assert rig.brokers.count("a") < 20


def test_flow_control_retries_the_same_queue_without_isolation() -> None:
    rig = Rig(route({"a": 4, "b": 4}), send_latency_fault_enable=True)
    rig.transport.play("a", *[Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")] * 3)
    rig.transport.play("b", *[Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")] * 3)
    rig.offer(1)
    rig.run()
    assert len({request.queue for request in rig.transport.requests}) == 1
    assert len(rig.transport.requests) == 4
    assert rig.clock.now > 100.0
    assert all(rig.faults.is_available(broker, rig.clock.now) for broker in "ab")


def test_permanent_flow_control_fails_at_the_delivery_timeout() -> None:
    rig = Rig(route({"a": 1}), delivery_timeout_ms=5000)
    rig.transport.always["a"] = Reply.code(2, "[TIMEOUT_CLEAN_QUEUE]broker busy")
    rig.offer(3, rows=7)
    rig.run()
    assert isinstance(rig.pipeline.failure, DeliveryError)
    assert "deliveryTimeoutMs=5000" in str(rig.pipeline.failure)
    assert "broker busy" in str(rig.pipeline.failure)
    assert rig.clock.now <= 105.0
    assert rig.pipeline.unfinished().not_sent == 21
    assert rig.pipeline.unfinished().unknown == 0


def test_bound_rows_are_retried_at_their_queue_only() -> None:
    rig, queue = Rig(route({"a": 2, "b": 2})), MessageQueue("T", "a", 1)
    rig.transport.play("a", *[refused()] * 6)
    rig.offer(3, bound=queue)
    rig.run()
    assert {request.queue for request in rig.transport.requests} == {queue}
    assert len(rig.transport.requests) > 3
    assert [len(messages) for messages in rig.transport.stored.values()] == [3]


def test_bound_rows_of_a_lost_broker_fail_at_delivery_timeout() -> None:
    rig, queue = Rig(route({"a": 2, "b": 2}), delivery_timeout_ms=4000), MessageQueue("T", "c", 0)
    rig.offer(1, bound=queue)
    rig.run()
    assert "T/c/0" in str(rig.pipeline.failure)
    assert rig.refreshed
    assert 104.0 <= rig.clock.now < 105.0
    assert rig.pipeline.unfinished().not_sent == 1


def test_bound_rows_of_a_lost_broker_do_not_delay_other_rows() -> None:
    rig, queue = Rig(route({"a": 2, "b": 2}), delivery_timeout_ms=4000), MessageQueue("T", "c", 0)
    rig.offer(5, bound=queue)
    rig.offer(50)
    rig.run()
    assert sum(facts["rows"] for facts in rig.facts.values()) == 50


def test_unsafe_rows_are_resent_retry_times_then_the_write_fails() -> None:
    rig = Rig(route({"a": 1}), retry_times_when_send_failed=2)
    rig.transport.always["a"] = Reply(SendStatus.SLAVE_NOT_AVAILABLE)
    rig.offer(1, rows=9)
    rig.run()
    assert len(rig.transport.requests) == 3
    text = str(rig.pipeline.failure)
    assert "broker a" in text
    assert "SLAVE_NOT_AVAILABLE" in text
    assert "requireStoreOk" in text
    assert rig.pipeline.unfinished().unknown == 9
    assert rig.facts["a"]["failures_by_code"] == {"SLAVE_NOT_AVAILABLE": 1}


def test_permanent_rejection_fails_at_once() -> None:
    rig = Rig(route({"a": 1, "b": 1}))
    rig.transport.always.update(a=Reply.code(13, "the message is illegal"), b=Reply.code(13, "the message is illegal"))
    rig.offer(1)
    rig.run()
    assert len(rig.transport.requests) == 1
    assert "the message is illegal" in str(rig.pipeline.failure)
    assert rig.pipeline.failure is not None
    assert isinstance(rig.pipeline.failure.__cause__, RocketMQError)


def test_error_before_any_request_is_not_called_a_rejection() -> None:
    rig = Rig(route({"a": 1}))
    rig.transport.play("a", Reply(error=RemotingCertificateException("the server's certificate is not trusted")))
    rig.offer(1)
    rig.run()
    assert "the broker rejected" not in str(rig.pipeline.failure)
    assert "a retry would fail, too; last error: the server's certificate" in str(rig.pipeline.failure)


def test_failure_stops_sending_but_requests_in_flight_still_count() -> None:
    rig = Rig(route({"a": 8}))
    rig.transport.play("a", Reply.code(13, "the message is illegal"), Reply(delay=1.0))
    rig.offer(10, rows=2)
    rig.run()
    assert len(rig.transport.requests) == 2
    assert rig.facts["a"]["rows"] == 2
    assert rig.pipeline.unfinished().not_sent == 18


def test_missing_outcome_fails_the_write_instead_of_blocking_it() -> None:
    rig = Rig(route({"a": 1}), delivery_timeout_ms=3000)
    rig.offer(1, rows=4)
    list(rig.pipeline.dispatches(rig.clock.now))
    rig.pipeline.check_overdue(rig.clock.now + 32)
    assert rig.pipeline.failure is None
    rig.pipeline.check_overdue(rig.clock.now + 34)
    assert "no outcome" in str(rig.pipeline.failure)
    assert rig.pipeline.unfinished().unknown == 4


def test_failed_pipeline_has_no_timed_wakeup() -> None:
    rig = Rig(route({"a": 1}))
    rig.transport.play("a", Reply.code(2, "busy"), Reply.code(13, "the message is illegal", delay=0.5))
    rig.offer(4)
    rig.run()
    rig.transport.advance(60.0)
    assert rig.pipeline.failure is not None
    assert rig.pipeline.next_wakeup(rig.clock.now) is None


def test_rows_of_a_split_batch_count_as_unknown_if_it_timed_out_before() -> None:
    rig = Rig(route({"a": 1}))
    rig.transport.play("a", Reply(silent=True), Reply.code(3, "not supported"), Reply.code(13, "illegal"))
    rig.offer(1, rows=3)
    rig.run()
    assert len(rig.transport.requests) > 2
    assert rig.pipeline.failure is not None
    assert rig.pipeline.unfinished() == Unfinished(0, {"a": 3 - rig.pipeline.stored_rows})


def test_timed_out_rows_count_as_unknown_when_the_write_fails() -> None:
    rig = Rig(route({"a": 1}), delivery_timeout_ms=10_000)
    rig.transport.always["a"] = Reply(silent=True)
    rig.offer(2, rows=3)
    rig.run()
    failure = rig.pipeline.failure
    assert failure is not None
    assert "no answer" in str(failure) or isinstance(failure.__cause__, RemotingTimeoutException)
    assert rig.pipeline.unfinished().unknown == 6
    assert rig.clock.now <= 110.0 + 0.1


@pytest.mark.parametrize("over_grpc", [False, True])
def test_timeout_of_attempts_doubles_only_over_grpc(*, over_grpc: bool) -> None:
    # Over gRPC it includes the time of sending, which is the same at every attempt over a slow link.
    options: dict[str, Any] = {"transport": "grpc", "endpoints": ("a:1",)} if over_grpc else {}
    rig = Rig(route({"a": 1}), send_msg_timeout=1000, delivery_timeout_ms=60_000, **options)
    rig.offer()
    timeouts: list[float] = []
    while len(timeouts) < 4:
        for dispatch in rig.pipeline.dispatches(rig.clock.now):
            timeouts.append(round(dispatch.timeout, 3))
            late = SendOutcome(dispatch.queue, None, RemotingTimeoutException("no answer"), 0.0)
            rig.pipeline.complete(dispatch.pending, late, rig.clock.now)
        rig.clock.now += 1.0
    assert timeouts == ([1.0, 2.0, 4.0, 8.0] if over_grpc else [1.0] * 4)


def test_paused_broker_delays_only_its_requests_in_flight() -> None:
    rig = Rig(route({"a": 4, "b": 4}))
    rig.transport.always["a"] = Reply(silent=True)
    rig.transport.always["b"] = Reply(delay=0.01)
    rig.offer(200)
    while rig.facts.get("b", {"rows": 0})["rows"] < 198:
        assert rig.clock.now < 104.0
        rig.step()
        rig.transport.advance(0.01)
        for pending, outcome in rig.outcomes:
            rig.pipeline.complete(pending, outcome, rig.clock.now)
        rig.outcomes.clear()
    rig.run()
    assert sum(facts["rows"] for facts in rig.facts.values()) == 200


def test_a_slow_broker_is_isolated_only_with_the_fault_strategy() -> None:
    for enabled, expected in [(True, True), (False, False)]:
        rig = Rig(route({"a": 4, "b": 4}), send_latency_fault_enable=enabled)
        rig.transport.always["a"] = Reply(delay=0.6)
        rig.transport.always["b"] = Reply(delay=0.01)
        rig.offer(1000)
        rig.run()
        assert (rig.brokers.count("a") <= 2) is expected
        assert (rig.facts["a"]["isolated_times"] > 0) is expected


@pytest.mark.parametrize("preset", PRESETS)
def test_isolated_broker_is_used_if_there_is_no_other(preset: str) -> None:
    rig = Rig(route({"a": 1}), send_latency_fault_enable=True, fault_preset=preset)
    rig.transport.play("a", refused())
    rig.offer(3)
    rig.run(until=110.0)
    assert rig.facts["a"]["rows"] == 3


@pytest.mark.parametrize("detector", [False, True])
def test_lost_connection_marks_broker_unreachable_only_with_detector(detector: bool) -> None:
    rig = Rig(route({"a": 1, "b": 1}), send_latency_fault_enable=True, start_detector_enable=detector)
    rig.transport.always["a"] = refused()
    rig.transport.always["b"] = Reply.code(14, "shutting down")
    rig.offer(1)
    rig.step()
    rig.transport.deliver()
    rig.pipeline.complete(*rig.outcomes.pop(), rig.clock.now)
    rig.step()
    rig.transport.deliver()
    rig.pipeline.complete(*rig.outcomes.pop(), rig.clock.now)
    reachable = {name: item.reachable for name, item in rig.faults.table.items().items()}
    assert reachable == {"a": not detector, "b": False}


def test_order_configuration_of_lost_brokers_fails_at_delivery_timeout() -> None:
    rig = Rig(replace(route({"a": 1}), order_topic_conf="gone:4"), delivery_timeout_ms=5000)
    rig.offer(1)
    rig.run()
    assert "any writable queue of topic T: its route has no master with one; start a broker" in str(
        rig.pipeline.failure
    )
    assert rig.refreshed


def test_lost_broker_of_an_order_configuration_is_skipped() -> None:
    rig = Rig(replace(route({"a": 1}), order_topic_conf="a:1;gone:4"))
    rig.transport.play("a", refused())
    rig.offer(3)
    rig.run()
    assert set(rig.brokers) == {"a"}
    assert rig.facts["a"]["rows"] == 3


def test_a_topic_that_loses_its_queues_waits_for_a_new_route() -> None:
    rig = Rig(route({"a": 1}))
    rig.infos["T"] = publish_info_of("T", route({"a": 1}, perm=4))
    rig.offer(1)
    for _ in range(5):
        rig.step()
        wakeup = rig.pipeline.next_wakeup(rig.clock.now)
        assert wakeup is not None
        rig.transport.advance(wakeup - rig.clock.now)
    assert rig.refreshed
    assert rig.transport.requests == []
    rig.infos["T"] = publish_info_of("T", route({"b": 1}))
    rig.run()
    assert rig.brokers == ["b"]


def test_missing_route_is_requested_before_the_send() -> None:
    rig = Rig(route({"a": 1}))
    info = rig.infos.pop("T")
    rig.offer(1)
    rig.step()
    assert rig.refreshed == ["T"]
    rig.infos["T"] = info
    rig.run()
    assert rig.facts["a"]["rows"] == 1


def test_batch_waiting_for_a_frozen_broker_does_not_delay_later_ones() -> None:
    rig = Rig(route({"a": 4, "b": 4}), delivery_timeout_ms=600_000)
    rig.transport.always.update(a=Reply(delay=0.005), b=Reply(silent=True))
    rig.transport.play("a", *([Reply(delay=0.005)] * 20 + [Reply.code(14, "service not available", 0.005)]) * 10)
    rig.offer(1000)
    started = rig.clock.now
    while rig.facts.get("a", {"rows": 0})["rows"] < 990:
        rig.step()
        rig.transport.advance(0.005)
        for pending, outcome in rig.outcomes:
            rig.pipeline.complete(pending, outcome, rig.clock.now)
        rig.outcomes.clear()
        assert rig.clock.now < started + 20
    assert rig.pipeline.failure is None


def test_waiting_for_the_window_does_not_use_up_the_delivery_timeout() -> None:
    rig = Rig(route({"a": 64}), max_in_flight=1, delivery_timeout_ms=3000)
    rig.transport.always["a"] = Reply(delay=0.2)
    for queue_id in range(64):
        rig.offer(1, bound=MessageQueue("T", "a", queue_id))
    rig.run()
    assert rig.pipeline.failure is None
    assert rig.facts["a"]["rows"] == len(rig.transport.requests) == 64


def test_eight_single_messages_count_as_one_batch_in_the_window() -> None:
    rig = Rig(route({"a": 1}), max_in_flight=2)
    rig.transport.always["a"] = Reply(delay=1.0)
    rig.offer(40, single=True)
    rig.step()
    assert rig.pipeline.in_flight == 16
    rig.run()
    assert rig.facts["a"]["rows"] == 40


def test_single_message_counts_with_its_overhead() -> None:
    rig = Rig(route({"a": 1}))
    rig.offer(10, single=True)
    assert rig.pipeline.pending_bytes > 10 * 500
    rig.run()
    assert rig.pipeline.pending_bytes == 0


def test_queues_alternate_when_one_slot_is_free_at_a_time() -> None:
    rig = Rig(route({"a": 4}), max_in_flight=1)
    rig.transport.always["a"] = Reply(delay=0.1)
    for queue_id in range(4):
        rig.offer(3, bound=MessageQueue("T", "a", queue_id))
    rig.run()
    assert [request.queue.queue_id for request in rig.transport.requests] == [0, 1, 2, 3] * 3


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(REPLIES, max_size=12), min_size=1),
    st.integers(0, 2**32),
    st.sampled_from([None, *PRESETS]),
)
def test_no_row_is_lost_with_any_broker_behaviour(
    script: dict[str, list[Reply]], seed: int, preset: str | None
) -> None:
    cluster = route(dict.fromkeys(script, 2))
    rig = Rig(cluster, seed, send_latency_fault_enable=preset is not None, fault_preset=preset or "v4")
    for broker, replies in script.items():
        rig.transport.play(broker, *replies)
    queue = MessageQueue("T", min(script), 1)
    bodies = [b"%d" % number for number in range(24)]
    # Batches of three rows, batches bound to the queue, and single messages; all rows are different.
    for at in range(0, 18, 3):
        rig.offer_bodies(bodies[at : at + 3], queue if at < 9 else None)
    for body in bodies[18:]:
        rig.offer_bodies([body], single=True)
    rig.run()
    acknowledged = sum(facts["rows"] for facts in rig.facts.values())
    unfinished = rig.pipeline.unfinished()
    assert acknowledged + unfinished.not_sent + unfinished.unknown == 24
    # The stored rows decide; the figures must not contradict them.
    places = {(message.body, at) for at, messages in rig.transport.stored.items() for message in messages}
    found = {body for body, _ in places}
    assert found <= set(bodies)
    assert acknowledged <= len(found) <= acknowledged + unfinished.unknown
    assert {at for body, at in places if body in bodies[:9]} <= {queue}
    if rig.pipeline.failure is None:
        assert found == set(bodies)
        assert (acknowledged, rig.pipeline.pending_bytes) == (24, 0)
    else:
        # Only a batch that is stored but not safe may give up within the delivery timeout.
        assert "never safely: broker" in str(rig.pipeline.failure)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(CERTAIN_REPLIES, max_size=12), min_size=1),
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
def test_unsafe_rows_are_stored_at_most_retries_plus_one_times(
    script: dict[str, list[Reply]], seed: int, retries: int, elsewhere: bool, required: bool
) -> None:
    rig = Rig(
        route(dict.fromkeys(script, 2)),
        seed,
        retry_times_when_send_failed=retries,
        retry_another_broker_when_not_store_ok=elsewhere,
        require_store_ok=required,
    )
    for broker, replies in script.items():
        rig.transport.play(broker, *replies)
    for number in range(8):
        rig.offer_bodies([b"%d" % number])
    rig.run()
    times = Counter(message.body for messages in rig.transport.stored.values() for message in messages)
    assert max(times.values(), default=0) <= 1 + retries


TOO_LATE = Reply.code(13, "timer message illegal, the delay time should not be bigger than the max delay 259200000ms")


@pytest.mark.parametrize("on_error", ["skip", "deadLetter"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_beyond_the_delay_limit_does_not_stop_the_next_ones(on_error: str, *, ordered: bool) -> None:
    dead = "dead" if on_error == "deadLetter" else None
    rig = Rig(route({"a": 1}), on_error=on_error, dead_letter_topic=dead, ordered=ordered)
    rig.transport.play("a", Reply(), TOO_LATE, Reply())
    rig.offer(4, single=True, bound=MessageQueue("T", "a", 0) if ordered else None)
    rig.run()
    assert rig.pipeline.failure is None
    assert rig.pipeline.pending_bytes == 0
    assert rig.pipeline.stored_rows == 3
    assert [batch.rows for batch, _ in rig.pipeline.rejections()] == [1]
    assert rig.pipeline.rejections() == []
    assert rig.pipeline.unfinished().not_sent == 0


def test_a_message_beyond_the_delay_limit_fails_the_write_by_default() -> None:
    rig = Rig(route({"a": 1}))
    rig.transport.play("a", TOO_LATE)
    rig.offer(1, single=True)
    rig.run()
    assert "timer message illegal" in str(rig.pipeline.failure)
    assert rig.pipeline.rejections() == []


def test_another_rejection_is_no_invalid_row() -> None:
    rig = Rig(route({"a": 1}), on_error="skip")
    rig.transport.play("a", Reply.code(13, "the message is illegal, maybe msg body or properties length not matched."))
    rig.offer(1, single=True)
    rig.run()
    assert isinstance(rig.pipeline.failure, DeliveryError)
