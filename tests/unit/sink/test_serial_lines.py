"""One request in flight, per queue (`ordered`) or in all (`sendMode=sync`); rate limit and timeout cap."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.model.message import MessageQueue, SendOutcome, SendRequest, SendStatus
from rocketmq_spark.protocol.remoting.records import decode_batch
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.testing import Reply
from rocketmq_spark.transport.base import OnOutcome
from tests.support.pipelines import REPLIES, Rig, refused
from tests.support.scripted import route

QUEUES = [MessageQueue("T", broker, queue_id) for broker in "ab" for queue_id in range(2)]


def first_occurrences(rig: Rig, queue: MessageQueue) -> list[int]:
    return list(dict.fromkeys(int(message.body) for message in rig.transport.stored.get(queue, [])))


def at_most_one_in_flight(rig: Rig) -> None:
    """Check at every attempt that no other attempt of its queue is in flight."""
    send, out = rig.transport.send, Counter[MessageQueue]()

    def checked(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        out[request.queue] += 1
        assert out[request.queue] == 1

        def ended(outcome: SendOutcome) -> None:
            out[request.queue] -= 1
            on_outcome(outcome)

        send(request, timeout, ended, within=within)

    rig.transport.send = checked


@settings(max_examples=100)
@given(
    st.dictionaries(st.sampled_from("ab"), st.lists(REPLIES, max_size=12)),
    st.lists(st.tuples(st.sampled_from(QUEUES), st.integers(1, 3), st.booleans()), min_size=1, max_size=14),
    st.integers(0, 2**32),
    st.sampled_from(["async", "sync"]),
    st.sampled_from([None, 3.0]),
)
def test_first_copies_of_rows_are_in_queue_order_with_any_broker(
    script: dict[str, list[Reply]],
    batches: list[tuple[MessageQueue, int, bool]],
    seed: int,
    send_mode: str,
    rate: float | None,
) -> None:
    rig = Rig(route({"a": 2, "b": 2}), seed, rate, ordered=True, send_mode=send_mode)
    at_most_one_in_flight(rig)
    for broker, replies in script.items():
        rig.transport.play(broker, *replies)
    offered: dict[MessageQueue, list[int]] = {queue: [] for queue in QUEUES}
    for queue, rows, single in batches:
        numbers = [len(offered[queue]) + row for row in range(1 if single else rows)]
        offered[queue] += numbers
        rig.offer_bodies([b"%d" % number for number in numbers], queue, single=single)
    rig.run()
    for queue, numbers in offered.items():
        found = first_occurrences(rig, queue)
        assert found == numbers[: len(found)]
        assert len(found) == len(numbers) or rig.pipeline.failure is not None


def test_later_batch_waits_while_an_earlier_one_is_retried() -> None:
    rig, queue = Rig(route({"a": 1}), ordered=True, retry_backoff_ms=1000), MessageQueue("T", "a", 0)
    rig.transport.play("a", refused())
    for number in range(3):
        rig.offer_bodies([b"%d" % number], queue)
    rig.step()
    rig.transport.deliver()
    rig.complete()
    rig.step()
    assert len(rig.transport.requests) == 1
    rig.run()
    assert first_occurrences(rig, queue) == [0, 1, 2]


def test_unbound_ordered_rows_are_all_stored() -> None:
    rig = Rig(route({"a": 2, "b": 2}), ordered=True)
    rig.transport.play("a", *[Reply.code(2, "busy"), refused(), Reply()] * 2)
    rig.transport.play("b", *[refused(), Reply.code(215, "flow"), Reply()] * 2)
    rig.offer(8)
    rig.run()
    assert rig.pipeline.is_empty
    assert sum(facts["rows"] for facts in rig.facts.values()) == 8


def test_retry_of_one_queue_does_not_delay_other_queues() -> None:
    rig = Rig(route({"a": 2, "b": 2}), ordered=True, retry_backoff_ms=5000)
    rig.transport.play("a", refused())
    rig.offer_bodies([b"0"], MessageQueue("T", "a", 0))
    for number in range(5):
        rig.offer_bodies([b"%d" % number], MessageQueue("T", "b", 1))
    started = rig.clock.now
    while rig.facts.get("b", {"rows": 0})["rows"] < 5:
        rig.step()
        rig.transport.deliver()
        rig.complete()
    assert rig.clock.now == started
    rig.run()
    assert rig.facts["a"]["rows"] == 1


def test_rows_of_a_broker_missing_in_the_route_wait_for_its_return() -> None:
    rig, queue = Rig(route({"a": 2, "b": 2}), ordered=True), MessageQueue("T", "a", 1)
    rig.infos["T"] = publish_info_of("T", route({"b": 2}))
    for number in range(4):
        rig.offer_bodies([b"%d" % number], queue)
    for _ in range(50):
        rig.go_on()
    assert rig.transport.requests == []
    assert rig.refreshed
    rig.infos["T"] = publish_info_of("T", route({"a": 2, "b": 2}))
    rig.run()
    assert first_occurrences(rig, queue) == [0, 1, 2, 3]
    assert {request.queue for request in rig.transport.requests} == {queue}


def test_batches_behind_a_failed_one_count_as_not_sent() -> None:
    rig, queue = Rig(route({"a": 1}), ordered=True), MessageQueue("T", "a", 0)
    rig.transport.play("a", Reply.code(13, "the message is illegal"))
    for _ in range(4):
        rig.offer(1, rows=5, bound=queue)
    rig.run()
    assert (rig.pipeline.unfinished().not_sent, rig.pipeline.unfinished().unknown) == (20, 0)
    assert not rig.pipeline.is_empty


def test_sync_has_one_request_in_flight() -> None:
    rig = Rig(route({"a": 4, "b": 4}), send_mode="sync", retry_backoff_ms=1000)
    rig.transport.always.update(a=Reply(delay=0.1), b=Reply(delay=0.1))
    rig.transport.play("a", Reply.code(2, "busy"))
    for number in range(10):
        rig.offer_bodies([b"%d" % number])
    while not rig.pipeline.is_empty:
        rig.step()
        assert rig.transport.in_flight <= 1
        rig.go_on()
    bodies = [decode_batch(b"".join(request.batch.body), "T")[0].body for request in rig.transport.requests]
    assert list(dict.fromkeys(bodies)) == [b"%d" % number for number in range(10)]
    assert len(bodies) == 11
    assert bodies == sorted(bodies)


@pytest.mark.parametrize(("send_mode", "at_once"), [("sync", 3), ("async", 1)])
def test_immediate_retries_depend_on_the_send_mode(send_mode: str, at_once: int) -> None:
    rig = Rig(
        route({"a": 1, "b": 1}),
        send_mode=send_mode,
        retry_times_when_send_failed=3,
        retry_times_when_send_async_failed=1,
    )
    rig.transport.always.update(a=refused(), b=refused())
    rig.offer(1)
    waits: list[int] = []
    while len(waits) < 5:
        waits += [pending.waits for pending in rig.go_on()]
    assert waits[: at_once + 2] == [0] * at_once + [1, 1]


def test_unsafe_rows_are_resent_retry_times_in_both_send_modes() -> None:
    for send_mode in ("sync", "async"):
        rig = Rig(
            route({"a": 1}),
            send_mode=send_mode,
            retry_times_when_send_failed=3,
            retry_times_when_send_async_failed=0,
        )
        rig.transport.always["a"] = Reply(SendStatus.FLUSH_DISK_TIMEOUT)
        rig.offer(1)
        rig.run()
        assert len(rig.transport.requests) == 4


def timeouts(rig: Rig, attempts: int) -> list[float]:
    """Return the timeout of each attempt, without any answer."""
    rig.transport.always.update(a=Reply(silent=True), b=Reply(silent=True))
    found: list[float] = []
    send = rig.transport.send

    def noted(request: SendRequest, timeout: float, on_outcome: OnOutcome, *, within: float = math.inf) -> None:
        found.append(round(timeout, 3))
        send(request, timeout, on_outcome, within=within)

    rig.transport.send = noted
    while len(found) < attempts:
        rig.go_on()
    return found


def test_cap_per_request_applies_to_all_but_the_last_attempt_of_a_round() -> None:
    rig = Rig(route({"a": 1, "b": 1}), send_msg_max_timeout_per_request=500)
    rig.offer(1)
    assert timeouts(rig, 6) == [0.5, 0.5, 3.0, 0.5, 0.5, 3.0]


def test_bound_rows_have_no_cap_per_request() -> None:
    rig = Rig(route({"a": 1}), send_msg_max_timeout_per_request=500)
    rig.offer(1, bound=MessageQueue("T", "a", 0))
    assert timeouts(rig, 3) == [3.0, 3.0, 3.0]


def test_cap_above_the_timeout_has_no_effect() -> None:
    rig = Rig(route({"a": 1, "b": 1}), send_msg_max_timeout_per_request=9000)
    rig.offer(1)
    assert timeouts(rig, 3) == [3.0, 3.0, 3.0]


def test_a_rate_spaces_first_tries_and_not_retries() -> None:
    rig = Rig(route({"a": 4}), rate=100.0)
    rig.transport.play("a", refused(), refused())
    for _ in range(5):
        rig.offer(1, rows=50)
    rig.run()
    assert rig.facts["a"]["rows"] == 250
    assert 102.5 <= rig.clock.now < 103.5


def test_waiting_for_the_rate_does_not_use_up_the_delivery_timeout() -> None:
    rig = Rig(route({"a": 4}), rate=1.0, delivery_timeout_ms=3000)
    rig.offer(1, rows=60)
    rig.run()
    assert rig.pipeline.failure is None
    assert rig.clock.now == 160.0


def test_rows_waiting_for_the_rate_count_as_not_sent_after_a_failure() -> None:
    rig = Rig(route({"a": 4}), rate=10.0)
    rig.transport.play("a", Reply.code(13, "the message is illegal"))
    rig.offer(3, rows=10)
    rig.run()
    assert rig.pipeline.unfinished().not_sent == 30


def test_the_account_names_the_brokers_of_rows_whose_outcome_is_unknown() -> None:
    rig = Rig(route({"a": 1, "b": 1}), delivery_timeout_ms=4000)
    rig.transport.always.update(a=Reply(silent=True), b=Reply(silent=True))
    rig.offer(1, rows=3, bound=MessageQueue("T", "a", 0))
    rig.offer(1, rows=4, bound=MessageQueue("T", "b", 0))
    rig.run()
    assert rig.pipeline.unfinished().unknown_by_broker == {"a": 3, "b": 4}
