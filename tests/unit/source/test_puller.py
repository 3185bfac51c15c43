"""A puller returns its ranges completely and in order, whatever brokers answer."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import (
    BrokerBusyException,
    BrokerOutcomeUnknownException,
    MQBrokerException,
    ReadError,
    RemotingConnectException,
    RemotingTimeoutException,
    RocketMQError,
    RouteNotFoundException,
    TooLongFrameException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import Pulled, PullOutcome, PullRequest, PullStatus
from rocketmq_spark.protocol.remoting.records import decode_records
from rocketmq_spark.source.broker_choice import BrokerChoice
from rocketmq_spark.source.puller import WINDOW, Puller
from rocketmq_spark.source.queue_fetch import TURN
from rocketmq_spark.source.ranges import OffsetRange
from rocketmq_spark.transport.remoting.loop import PolledClock
from tests.support.scripted import PullReply, ScriptedTransport, route
from tests.unit.source.conftest import A0, A1, B0, QUEUES, Make, Reader

BUSY = BrokerBusyException("busy", 2, "", "a:10911")


def puller(reader: Reader, window: int = WINDOW) -> Puller:
    return Puller(reader.options, reader.transport, reader.queues.brokers, reader.clock, window)


def read(reader: Reader, *ranges: OffsetRange, window: int = WINDOW) -> list[Pulled]:
    return list(puller(reader, window).pull(ranges))


def covered(pulls: Sequence[Pulled]) -> dict[MessageQueue, list[int]]:
    """Return the offsets of each queue, decoded and cut like a reader."""
    found: dict[MessageQueue, list[int]] = {}
    for pull in pulls:
        offsets = [record.queue_offset for record in decode_records(pull.body)]
        found.setdefault(pull.queue, []).extend(offset for offset in offsets if pull.start <= offset < pull.end)
    return found


def found(start: int, after: int) -> PullOutcome:
    return PullOutcome(PullStatus.FOUND, after, 0, 10**9, b"")


def nothing(status: PullStatus, after: int, first: int = 0, end: int = 100) -> PullReply:
    return PullReply(PullOutcome(status, after, first, end))


def failed(error: RocketMQError) -> PullReply:
    return PullReply(PullOutcome(None, error=error))


errors = st.sampled_from([RemotingConnectException("refused"), RemotingTimeoutException("no answer"), BUSY])
delays = st.sampled_from([0.0, 0.0, 0.01, 0.3, 4.0])
# Full, short, late and missing answers, and answers that require another request.
replies = st.one_of(
    st.builds(PullReply, most=st.integers(1, 32), delay=delays),
    st.builds(lambda error, delay: PullReply(PullOutcome(None, error=error), delay=delay), errors, delays),
    st.just(PullReply(silent=True)),
    st.builds(lambda delay: PullReply(PullOutcome(PullStatus.NO_NEW_MSG, -1), delay=delay), delays),
)
spans = st.tuples(st.integers(0, 40), st.integers(0, 200))


@given(
    st.dictionaries(st.sampled_from(QUEUES), spans),
    st.dictionaries(st.sampled_from(QUEUES), st.lists(replies, max_size=12)),
    st.integers(1, 40),
    st.integers(1, 32),
)
def test_a_range_comes_out_whole_in_order_and_once(
    asked: dict[MessageQueue, tuple[int, int]],
    script: dict[MessageQueue, list[PullReply]],
    window: int,
    pull_batch_size: int,
) -> None:
    reader = Reader(pull_batch_size=pull_batch_size, pull_timeout_ms=5000)
    reader.fill({queue: start + size + 7 for queue, (start, size) in asked.items()})
    for queue, played in script.items():
        reader.transport.play_pulls(queue, *played)
    in_flight = []
    pull = reader.transport.pull

    def counted(request: PullRequest, *others: Any, **more: Any) -> None:
        pull(request, *others, **more)
        in_flight.append(reader.transport.in_flight)

    reader.transport.pull = counted
    ranges = [OffsetRange(queue, start, start + size) for queue, (start, size) in asked.items()]
    pulls = read(reader, *ranges, window=window)
    assert covered(pulls) == {one.queue: list(range(one.start, one.end)) for one in ranges if one.size}
    # Each continues where the one before has ended.
    for one in ranges:
        mine = [pull for pull in pulls if pull.queue == one.queue]
        borders = [one.start, *(pull.end for pull in mine)]
        assert [pull.start for pull in mine] == borders[:-1]
        assert borders[-1] == one.end
    assert max(in_flight, default=0) <= window


@given(st.integers(0, 500), st.integers(1, 300), st.lists(st.integers(1, 90), min_size=1, max_size=8), st.data())
def test_filtered_read_continues_at_the_offset_of_each_answer(
    start: int, size: int, steps: list[int], data: st.DataObject
) -> None:
    reader = Reader(sub_expression="a || b")
    answered: dict[int, tuple[int, bool]] = {}

    def answer(request: PullRequest) -> PullReply:
        if request.target.sub_expression == "*":
            # A check of what was passed over: the message is there.
            return PullReply(PullOutcome(PullStatus.FOUND, request.offset + 1, 0, 10**6))
        # With a filter, the answer says how far the broker has searched.
        after = request.offset + steps[len(answered) % len(steps)]
        hit = data.draw(st.booleans())
        answered[request.offset] = after, hit
        status = PullStatus.FOUND if hit else PullStatus.NO_MATCHED_MSG
        return PullReply(PullOutcome(status, after, 0, 10**6))

    reader.transport.play_pulls(A0, *[answer] * (size + 1))
    end = start + size
    pulls = read(reader, OffsetRange(A0, start, end))
    # One at a time, each where the one before has ended.
    asked = [request.offset for request in reader.transport.pulls if request.target.sub_expression != "*"]
    assert asked == list(answered)
    assert list(answered) == [start, *[after for after, _ in answered.values()][:-1]]
    assert [(pull.start, pull.end) for pull in pulls] == [
        (offset, min(after, end)) for offset, (after, hit) in answered.items() if hit
    ]


@given(st.integers(0, 100), st.integers(1, 400), st.integers(2, 100))
def test_inner_batches_beyond_the_range_are_cut(start: int, size: int, batch: int) -> None:
    reader = Reader()

    def answer(request: PullRequest) -> PullReply:
        first = request.offset - request.offset % batch
        return PullReply(found(first, first + batch))

    reader.transport.play_pulls(A0, *[answer] * size)
    pulls = read(reader, OffsetRange(A0, start, start + size))
    borders = [start, *(pull.end for pull in pulls)]
    assert [pull.start for pull in pulls] == borders[:-1]
    assert borders[-1] == start + size


def test_requests_of_a_queue_are_pipelined(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 1000})
    for queue in QUEUES:
        reader.transport.always_pull[queue] = PullReply(delay=0.1)
    began = reader.clock.now
    assert covered(read(reader, OffsetRange(A0, 0, 1000))) == {A0: list(range(1000))}
    assert reader.clock.now - began < 0.6


def test_pull_requests_carry_the_filter_of_the_options(make_reader: Make) -> None:
    reader = make_reader(sub_expression="a > 5", filter_type="SQL92", consumer_group="cg", pull_batch_size=7)
    reader.fill({A0: 3})
    read(reader, OffsetRange(A0, 0, 3))
    target = reader.transport.pulls[0].target
    assert (target.queue, target.consumer_group, target.max_msg_nums) == (A0, "cg", 7)
    assert (target.sub_expression, target.expression_type) == ("a > 5", "SQL92")


def test_names_in_a_namespace_are_the_users(make_reader: Make) -> None:
    reader = make_reader(namespace="ns")
    reader.fill({A0: 3})
    [pulled] = read(reader, OffsetRange(A0, 0, 3))
    assert pulled.queue == A0
    assert reader.transport.pulls[0].target.queue == A0


@given(st.integers(0, 30), st.integers(1, 200), st.integers(0, 250))
def test_expired_messages_are_returned_as_an_empty_body(start: int, size: int, expired: int) -> None:
    reader = Reader()
    reader.fill({A0: 260})
    reader.transport.expired[A0] = expired
    pulls = read(reader, OffsetRange(A0, start, start + size))
    gap = min(expired, start + size)
    gone = [(pull.start, pull.end, pull.contiguous) for pull in pulls if not pull.body]
    assert gone == ([(start, gap, True)] if gap > start else [])
    assert covered(pulls)[A0] == list(range(max(start, expired), start + size))


def test_data_that_is_not_there_yet_is_waited_for(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 5})
    pulls = puller(reader).pull([OffsetRange(A0, 0, 10)])
    assert next(pulls).end == 5

    def arrive(_: PullRequest) -> PullReply:
        reader.fill({A0: 5})
        return PullReply()

    reader.transport.play_pulls(A0, nothing(PullStatus.NO_NEW_MSG, 5), arrive)
    assert [(pull.start, pull.end) for pull in pulls] == [(5, 10)]
    # After an answer without messages the broker may hold the request.
    assert [request.suspend_ms for request in reader.transport.pulls][-1] == 5000


def test_queue_without_messages_is_an_error_naming_offset_and_option(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=20_000)
    reader.fill({A0: 5})
    began = reader.clock.now
    text = r"orders/a/0 up to offset 9: nothing came from offset 5 on for readTimeoutMs=20000\. The last try: .*"
    with pytest.raises(ReadError, match=text + "minOffset=0 and maxOffset=5"):
        read(reader, OffsetRange(A0, 0, 10))
    assert 20.0 < reader.clock.now - began < 30.0


def test_unreachable_broker_is_waited_for_until_read_timeout(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=20_000)
    reader.fill({A0: 100})
    gone = failed(RemotingConnectException("refused"))
    reader.transport.play_pulls(A0, *[gone] * 5)
    assert covered(read(reader, OffsetRange(A0, 0, 100))) == {A0: list(range(100))}
    reader.transport.always_pull[A0] = gone
    with pytest.raises(ReadError, match=r"readTimeoutMs=20000. The last try: refused"):
        read(reader, OffsetRange(A0, 0, 100))


def test_a_broker_that_moved_is_found(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 100})

    def moved(request: PullRequest) -> PullReply:
        reader.addresses("a", {0: "moved:1"})
        return failed(RemotingConnectException("refused")) if request.address != "moved:1" else PullReply()

    reader.transport.play_pulls(A0, *[moved] * 200)
    assert covered(read(reader, OffsetRange(A0, 0, 100))) == {A0: list(range(100))}
    assert reader.transport.pulls[-1].address == "moved:1"


@pytest.mark.parametrize("is_back", [True, False])
def test_slave_of_a_trusted_queue_is_asked_after_read_timeout(make_reader: Make, *, is_back: bool) -> None:
    reader = make_reader(read_timeout_ms=20_000, pull_timeout_ms=1_000)
    reader.fill({A0: 5})
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    refused = PullReply(outcome=PullOutcome(None, error=RemotingConnectException("refused")))

    def reply(request: PullRequest) -> PullReply:
        return refused if request.address == "master:1" and not (is_back and reader.clock.now > 1_005) else PullReply()

    reader.transport.play_pulls(A0, *[reply] * 1_000)
    pulling = Puller(reader.options, reader.transport, reader.queues.brokers, reader.clock, trusted={A0})
    assert covered(list(pulling.pull([OffsetRange(A0, 0, 5)]))) == {A0: list(range(5))}
    assert (reader.clock.now > 1_020) is not is_back
    assert ("slave:1" in {request.address for request in reader.transport.pulls}) is not is_back
    assert pulling.of_masters == ({A0} if is_back else set())


def test_slave_that_is_behind_falls_back_to_the_master(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 100})
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.transport.play_pulls(
        A0,
        failed(RemotingTimeoutException("no answer")),
        nothing(PullStatus.NO_MATCHED_MSG, 0, end=0),
    )
    assert covered(read(reader, OffsetRange(A0, 0, 32))) == {A0: list(range(32))}
    assert [request.address for request in reader.transport.pulls] == ["master:1", "slave:1", "master:1"]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (MQBrokerException("no permission", 16, "", "a:10911"), {}),
        (BrokerOutcomeUnknownException("no SQL", 1, "", "a:10911"), {"filter_type": "SQL92", "sub_expression": "a>1"}),
    ],
)
def test_a_refusal_is_raised_at_once(make_reader: Make, error: MQBrokerException, options: dict[str, Any]) -> None:
    reader = make_reader(**options)
    reader.fill({A0: 100})
    reader.transport.play_pulls(A0, failed(error))
    began = reader.clock.now
    with pytest.raises(ReadError, match=f"reading orders/a/0 from offset 3 to 8: {error}"):
        read(reader, OffsetRange(A0, 3, 9))
    assert reader.clock.now == began


def test_slow_consumer_does_not_count_as_a_silent_broker(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=20_000)
    reader.fill({A0: 200, B0: 200})
    reader.transport.play_pulls(B0, *[nothing(PullStatus.NO_NEW_MSG, 0)] * 4)
    clock, poll, found = PolledClock(reader.clock), reader.transport.poll, []

    def poll_on_the_clock(timeout: float) -> None:
        with clock.running():
            poll(timeout)

    reader.transport.poll = poll_on_the_clock
    polled = Puller(reader.options, reader.transport, BrokerChoice(reader.queues.brokers.routes), clock)
    for pulled in polled.pull([OffsetRange(A0, 0, 200), OffsetRange(B0, 0, 200)]):
        found.append(pulled)
        reader.clock.advance(60.0)
    assert covered(found) == {A0: list(range(200)), B0: list(range(200))}


def test_concurrent_failures_count_as_one(make_reader: Make) -> None:
    # A broken connection fails all requests in flight on it; the following wait is short.
    reader = make_reader()
    reader.fill({A0: 1000})
    reader.transport.play_pulls(A0, PullReply(), *[failed(RemotingConnectException("reset"))] * 16)
    began = reader.clock.now
    assert covered(read(reader, OffsetRange(A0, 0, 1000))) == {A0: list(range(1000))}
    assert reader.clock.now - began < 0.2


def test_queues_of_an_unreachable_broker_take_no_room_from_the_queue_in_turn(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=60_000)
    gone = [MessageQueue("orders", "b", number) for number in range(100)]
    reader.fill({A0: 2000})
    for queue in gone:
        reader.transport.always_pull[queue] = PullReply(silent=True)
    began = reader.clock.now
    pulls = puller(reader).pull([OffsetRange(A0, 0, 2000), *(OffsetRange(queue, 0, 10) for queue in gone)])
    offsets: list[int] = []
    while len(offsets) < TURN:
        offsets += covered([next(pulls)])[A0]
    assert offsets == list(range(TURN))
    assert reader.clock.now == began
    with pytest.raises(ReadError, match="orders/b/0 up to offset 9: nothing came from offset 0 on"):
        next(pulls)
    assert 60.0 < reader.clock.now - began < 90.0


def test_queue_that_is_not_asked_is_not_silent(make_reader: Make) -> None:
    # An answer of the queue in turn takes all the room, so the other queue is asked first, and then in its turn.
    reader = make_reader(read_timeout_ms=20_000)
    reader.fill({B0: 1})
    large = bytes(32 * 1024 * 1024)

    def answer(request: PullRequest) -> PullReply:
        return PullReply(PullOutcome(PullStatus.FOUND, request.offset + 1, 0, 100, large), delay=1.0)

    reader.transport.play_pulls(A0, *[answer] * 100)
    reader.transport.play_pulls(B0, *[failed(RemotingConnectException("refused"))] * 8)
    pulls = puller(reader).pull([OffsetRange(A0, 0, 100), OffsetRange(B0, 0, 1)])
    assert [pull.queue for pull in pulls] == [A0] * 100 + [B0]
    asked = [request.target.queue for request in reader.transport.pulls]
    # It failed at the beginning, and after its turn began: in between is more than readTimeoutMs.
    assert asked[:20].count(B0) >= 2
    assert B0 not in asked[20:-4]
    assert asked[-4:] == [B0] * 4


def test_waiting_for_unreachable_brokers_does_not_poll_busily(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=10_000)
    many = [MessageQueue("orders", "b", number) for number in range(50)]
    for queue in many:
        reader.transport.always_pull[queue] = failed(RemotingConnectException("refused"))
    slow = puller(reader, window=8)
    with pytest.raises(ReadError):
        list(slow.pull([OffsetRange(queue, 0, 10) for queue in many]))
    assert reader.transport.polls < 2000


def test_segments_that_wait_for_a_failed_one_do_not_block_its_retry(make_reader: Make) -> None:
    # Answers behind the oldest segments take all room; these segments have failed.
    reader = make_reader()
    reader.fill(dict.fromkeys(QUEUES, 600))
    for queue in QUEUES:
        reset = [PullReply(PullOutcome(None, error=RemotingTimeoutException("no")), delay=0.05)]
        reader.transport.play_pulls(queue, PullReply(), *reset)
    found = read(reader, *(OffsetRange(queue, 0, 600) for queue in QUEUES), window=4)
    assert covered(found) == {queue: list(range(600)) for queue in QUEUES}


def test_large_answers_reduce_the_number_of_requests(make_reader: Make) -> None:
    reader = make_reader()
    large = bytes(8 * 1024 * 1024)
    most = 0

    def answer(request: PullRequest) -> PullReply:
        nonlocal most
        if len(reader.transport.pulls) > 8:
            most = max(most, reader.transport.in_flight + 1)
        return PullReply(PullOutcome(PullStatus.FOUND, request.offset + 1, 0, 100, large), delay=0.01)

    reader.transport.play_pulls(A0, *[answer] * 60)
    assert [pull.start for pull in read(reader, OffsetRange(A0, 0, 60))] == list(range(60))
    assert 1 <= most <= 4


def test_few_requests_are_in_flight_before_the_size_of_answers_is_known(make_reader: Make) -> None:
    reader = make_reader()
    many = [MessageQueue("orders", "b", number) for number in range(100)]
    reader.fill(dict.fromkeys(many, 1))
    waiting = []

    def answer(request: PullRequest) -> PullReply:
        waiting.append(reader.transport.in_flight + 1)
        return PullReply(PullOutcome(PullStatus.FOUND, 1, 0, 1, bytes(4 * 1024 * 1024)), delay=0.05)

    for queue in many:
        reader.transport.play_pulls(queue, answer)
    assert len(read(reader, *(OffsetRange(queue, 0, 1) for queue in many))) == 100
    assert max(waiting) <= 8


def test_too_long_answers_are_asked_for_with_fewer_messages(make_reader: Make) -> None:
    reader = make_reader(pull_batch_size=512)
    reader.fill({A0: 2000})
    master = reader.transport.routes["orders"].broker_datas[0].broker_addrs[0]
    reader.addresses("a", {0: master, 1: "slave:10911"})

    def large_at_first(request: PullRequest) -> PullReply:
        asked = request.target.max_msg_nums
        too_long = asked > 20 and request.offset < 1000
        return failed(TooLongFrameException("too long")) if too_long else PullReply(most=asked)

    reader.transport.play_pulls(A0, *[large_at_first] * 2000)
    assert covered(read(reader, OffsetRange(A0, 0, 2000))) == {A0: [*range(2000)]}
    asked = [request.target.max_msg_nums for request in reader.transport.pulls]
    assert asked[:4] == [512, 128, 32, 8]
    assert asked[-1] > 20, "requests grow again"
    assert {request.address for request in reader.transport.pulls} == {master}


def test_single_message_above_the_frame_limit_fails_the_read(make_reader: Make) -> None:
    reader = make_reader(pull_batch_size=512, read_timeout_ms=3000, pull_timeout_ms=1000)
    reader.fill({A0: 10})
    reader.transport.always_pull[A0] = failed(TooLongFrameException("too long"))
    with pytest.raises(ReadError, match=r"readTimeoutMs=3000\. The last try: too long"):
        read(reader, OffsetRange(A0, 0, 10))
    assert [request.target.max_msg_nums for request in reader.transport.pulls][:6] == [512, 128, 32, 8, 2, 1]


def test_busy_broker_gets_one_request_of_a_queue_until_it_answers(make_reader: Make) -> None:
    reader = make_reader(pull_batch_size=8)
    reader.fill({A0: 800})
    full, busy = PullReply(most=8), failed(BUSY)
    # The first answer opens the window of the queue. All of its requests fail together.
    reader.transport.play_pulls(A0, full, *[busy] * WINDOW)
    assert covered(read(reader, OffsetRange(A0, 0, 800))) == {A0: [*range(800)]}
    refused = [request.offset for request in reader.transport.pulls[1 : 1 + WINDOW]]
    window = refused.index(8, 1)
    assert refused[:window] == [*range(8, 8 * window + 1, 8)]
    assert set(refused[window:]) == {8}


def test_segment_with_a_temporarily_unknown_broker_is_sent_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 300})
    address, unknown = reader.queues.brokers.address, [RouteNotFoundException("no broker a just now")]
    reader.transport.always_pull[A0] = PullReply(delay=0.1)
    reader.transport.play_pulls(A0, PullReply(), PullReply(most=5))
    pulls = puller(reader).pull([OffsetRange(A0, 0, 300)])
    found = [next(pulls), next(pulls)]

    def sometimes(queue: MessageQueue, *, trusted: bool = False) -> str:
        if unknown:
            raise unknown.pop()
        return address(queue, trusted=trusted)

    reader.queues.brokers.address = sometimes
    found += pulls
    assert covered(found) == {A0: list(range(300))}
    offsets = [request.offset for request in reader.transport.pulls]
    assert sorted(set(offsets)) == sorted(offsets)


def test_empty_range_sends_no_request(make_reader: Make) -> None:
    reader = make_reader()
    assert read(reader, OffsetRange(A0, 5, 5), OffsetRange(A1, 5, 3)) == []
    assert reader.transport.pulls == []


def test_a_closed_transport_ends_a_read_at_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 500})
    pulls = puller(reader).pull([OffsetRange(A0, 0, 500)])
    next(pulls)
    reader.transport.close()
    with pytest.raises(RocketMQError, match="closed"):
        list(pulls)


def test_closing_the_generator_stops_the_requests(make_reader: Make) -> None:
    reader = make_reader()
    reader.fill({A0: 500})
    reader.transport.always_pull[A0] = PullReply(delay=0.1)
    pulls: Iterator[Pulled] = puller(reader).pull([OffsetRange(A0, 0, 500)])
    next(pulls)
    pulls.close()  # type: ignore[attr-defined]
    asked = len(reader.transport.pulls)
    reader.transport.advance(10.0)
    assert len(reader.transport.pulls) == asked


def test_transport_with_its_own_thread_can_be_read() -> None:
    reader = Reader()
    with ScriptedTransport({"orders": route({"a": 30, "b": 30})}, threaded=True) as transport:
        reader.transport = transport
        queues = [MessageQueue("orders", broker, number) for broker in "ab" for number in range(30)]
        reader.fill(dict.fromkeys(queues, 100))
        pulling = Puller(reader.options, transport, reader.queues.brokers, time.monotonic)
        found = list(pulling.pull([OffsetRange(queue, 3, 97) for queue in queues]))
    assert covered(found) == {queue: list(range(3, 97)) for queue in queues}


def test_large_answers_waiting_out_of_order_are_dropped_above_a_limit(make_reader: Make) -> None:
    reader = make_reader(pull_batch_size=2)
    reader.fill({A0: 40})
    # The second answer keeps all others waiting, and these are larger than any before.
    reader.transport.play_pulls(A0, PullReply(most=2), PullReply(delay=2.0))
    pull, bodies = reader.transport.pull, []

    def with_long_bodies(request: PullRequest, timeout: float, on_pulled: Any) -> None:
        def pulled(outcome: PullOutcome) -> None:
            if request.offset:
                body = memoryview(bytes(16 * 1024 * 1024))
                outcome = replace(outcome, body=body)
                bodies.append(weakref.ref(body))
            on_pulled(outcome)

        pull(request, timeout, pulled)

    reader.transport.pull = with_long_bodies
    most, borders = 0, [0]
    for pulled in puller(reader).pull([OffsetRange(A0, 0, 40)]):
        most = max(most, sum(body() is not None for body in bodies))
        assert pulled.start == borders[-1]
        borders.append(pulled.end)
    assert borders[-1] == 40
    # 64 MiB of waiting answers, and the answer that is returned.
    assert most <= 6
    assert len(bodies) > 19
