"""The first and last offsets of a read."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.errors import (
    BrokerBusyException,
    DataLossError,
    MQBrokerException,
    OptionError,
    ReadError,
    RemotingConnectException,
    RemotingTimeoutException,
    RemotingTooMuchRequestException,
    TopicRouteStaleException,
)
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.model.message_ext import PullOutcome, PullRequest, PullStatus
from rocketmq_spark.options.offsets import OffsetSpec
from rocketmq_spark.source.queue_requests import QueueRequests
from rocketmq_spark.source.ranges import OffsetRange
from tests.support.scripted import PullReply, route
from tests.unit.source.conftest import A0, A1, B0, B1, QUEUES, Make, Reader, stored


def spec(**offsets: int) -> OffsetSpec:
    """Offsets by broker and queue, as in a0=5."""
    found = {MessageQueue("orders", name[0], int(name[1:])): offset for name, offset in offsets.items()}
    return OffsetSpec(None, tuple(sorted(found.items())))


def times(**stamps: int) -> tuple[tuple[MessageQueue, int], ...]:
    return spec(**stamps).offsets


def filled(reader: Reader) -> Reader:
    """Two messages a second in each queue, at 1000 s and 1001 s, in `b`'s second queue at the first only."""
    reader.fill(dict.fromkeys(QUEUES, 2))
    reader.clock.advance(1.0)
    reader.fill(dict.fromkeys(QUEUES[:3], 2))
    reader.clock.advance(1.0)
    return reader


def test_default_offsets_cover_all_messages(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.expired[A1] = 3
    reader.transport.expired[B1] = -1
    queues = reader.queues.look_up()
    assert reader.resolver.starts(queues) == {A0: 0, A1: 3, B0: 0, B1: 0}
    assert reader.resolver.ends(queues) == {A0: 4, A1: 4, B0: 4, B1: 2}
    assert make_reader(starting_offsets=OffsetSpec("latest")).resolver.starts([]) == {}


def test_latest_is_resolved_at_the_start_of_a_query(make_reader: Make) -> None:
    reader = filled(make_reader(starting_offsets=OffsetSpec("latest")))
    assert reader.resolver.starts(QUEUES) == {A0: 4, A1: 4, B0: 4, B1: 2}


def test_offsets_by_queue_can_be_earliest_and_latest(make_reader: Make) -> None:
    reader = filled(
        make_reader(starting_offsets=spec(a0=1, a1=-2, b0=-1, b1=9), ending_offsets=spec(a0=3, a1=-1, b0=4, b1=9))
    )
    reader.transport.expired[A1] = 2
    assert reader.resolver.starts(QUEUES) == {A0: 1, A1: 2, B0: 4, B1: 9}
    assert reader.resolver.ends(QUEUES) == {A0: 3, A1: 4, B0: 4, B1: 9}


def test_offsets_by_queue_must_name_exactly_the_queues(make_reader: Make) -> None:
    with pytest.raises(OptionError, match="startingOffsets names some queues and not orders/b/0, orders/b/1: name"):
        make_reader(starting_offsets=spec(a0=1, a1=1)).resolver.starts(QUEUES)
    with pytest.raises(OptionError, match="endingOffsets names orders/a/7, orders/c/0, which can't be read"):
        make_reader(ending_offsets=spec(a0=1, a1=1, a7=1, b0=1, b1=1, c0=1)).resolver.ends(QUEUES)
    with pytest.raises(OptionError, match="startingOffsetsByTimestamp names some queues and not orders/b/1"):
        make_reader(starting_offsets_by_timestamp=times(a0=1, a1=1, b0=1)).resolver.starts(QUEUES)


def test_receipt_can_contain_other_topics(make_reader: Make) -> None:
    offsets = ((A0, 1), (MessageQueue("others", "a", 0), 7))
    reader = filled(make_reader(starting_offsets=OffsetSpec(None, offsets, receipt=True)))
    queues = reader.queues.look_up()
    assert reader.resolver.starts(queues) == {A0: 1}


def test_time_resolves_to_the_first_message_at_or_after_it(make_reader: Make) -> None:
    reader = filled(make_reader(starting_timestamp=1_000_500, ending_timestamp=1_001_000))
    assert reader.resolver.starts(QUEUES[:3]) == dict.fromkeys(QUEUES[:3], 2)
    assert reader.resolver.ends(QUEUES[:3]) == dict.fromkeys(QUEUES[:3], 2)
    assert reader.at({A0: 0, A1: 1_001_000, B0: 1_001_001, B1: 1_000_001}) == {A0: 0, A1: 2}


def test_time_after_all_inner_batches_is_not_the_last_batch(make_reader: Make) -> None:
    reader = filled(make_reader(threaded=True))
    reader.transport.attributes["orders"] = {"queue.type": "BatchCQ"}
    assert reader.at({A0: 1_000_500, A1: 1_001_001, B0: 1_001_000}) == {A0: 2, B0: 2}
    # One pull of each queue.
    assert {(one.target.queue, one.offset) for one in reader.transport.pulls} == {(A0, 1), (A1, 2), (B0, 1)}


@pytest.mark.parametrize("attributes", [{}, {"queue.type": "BatchCQ"}, {"cleanup.policy": "COMPACTION"}])
@pytest.mark.parametrize("answer", [-1, *range(7), 99])
def test_wrong_answers_of_a_broker_to_a_search_are_corrected(
    make_reader: Make, answer: int, attributes: dict[str, str]
) -> None:
    """RocketMQ 4.9.7 names the nearest message, or any message of the time."""
    reader = filled(make_reader())
    reader.fill({A0: 2})
    reader.transport.attributes["orders"] = attributes
    reader.transport.search_offset = lambda *_: answer
    expected = {1_000_000: 0, 1_000_001: 2, 1_001_000: 2, 1_001_001: 4, 1_002_000: 4}
    assert {time: reader.at({A0: time})[A0] for time in expected} == expected
    assert reader.at({A0: 1_002_001}) == {}


def test_search_by_time_ignores_the_filter_of_the_read(make_reader: Make) -> None:
    reader = filled(make_reader(starting_timestamp=1_000_500, sub_expression="a || b"))
    assert reader.resolver.starts([A0]) == {A0: 2}
    assert {(one.target.sub_expression, one.target.expression_type) for one in reader.transport.pulls} == {("*", "TAG")}


def test_search_by_time_costs_one_pull_of_each_queue(make_reader: Make) -> None:
    queues = [MessageQueue("orders", "a", number) for number in range(64)]
    reader = make_reader(starting_timestamp=1_000_500)
    reader.transport.routes["orders"] = route({"a": 64})
    for _ in range(2):
        reader.fill(dict.fromkeys(queues, 5))
        reader.clock.advance(1.0)
    assert reader.resolver.starts(queues) == dict.fromkeys(queues, 5)
    assert len(reader.transport.pulls) == 64
    assert [len(reader.asked(call)) for call in ("max_offset", "min_offset", "search_offset")] == [64, 64, 64]


def test_queue_whose_messages_have_all_expired_has_none_of_a_time(make_reader: Make) -> None:
    reader = filled(make_reader(starting_timestamp=1_000_000))
    reader.transport.removed[A0] = 4
    assert reader.at({A0: 1_000_500}) == {}
    assert reader.resolver.starts([A0]) == {A0: 4}


def test_message_that_cannot_be_decoded_is_not_skipped_by_a_start_time(make_reader: Make) -> None:
    reader = filled(make_reader(starting_timestamp=1_000_500))
    damaged = stored(2)[:4] + b"\1\2\3\4" + stored(2)[8:]

    def reply(request: PullRequest) -> PullReply:
        records = {0: stored(0), 1: stored(1), 2: damaged}
        body = b"".join(record for offset, record in records.items() if offset >= request.offset)
        status = PullStatus.FOUND if body else PullStatus.NO_NEW_MSG
        return PullReply(PullOutcome(status, max(3, request.offset), 0, 3, body))

    reader.transport.play_pulls(A0, *[reply] * 100)
    assert reader.resolver.starts([A0]) == {A0: 2}
    damaged = stored(2)[:40] + b"\xff" * 60
    assert reader.resolver.starts([A0]) == {A0: 2}


def test_clock_that_was_set_back_is_logged_once(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = filled(make_reader(starting_timestamp=1_000_000, ending_timestamp=1_000_001))
    reader.clock.advance(-10.0)
    reader.fill({B1: 1})
    reader.resolver.ranges([A0, B1])
    (text,) = caplog.messages
    assert "reading orders/b/1 by time: the message at offset 2 was stored 8000 ms earlier than the one at" in text
    assert "begin earlier and end later" in text


def test_pulls_of_a_search_end_at_the_planning_deadline(make_reader: Make) -> None:
    reader = filled(make_reader(read_timeout_ms=20_000, starting_timestamp=1_000_500))

    def further(request: PullRequest) -> PullReply:
        reader.clock.advance(0.1)
        return PullReply(PullOutcome(PullStatus.OFFSET_ILLEGAL, request.offset + 1, 0, 2**60))

    reader.transport.play_pulls(A0, *[further] * 1_000)
    reader.queues.look_up()
    with pytest.raises(ReadError, match="readTimeoutMs=20000"):
        reader.resolver.starts([A0])
    assert len(reader.transport.pulls) < 300


def test_each_queue_can_have_its_own_timestamp(make_reader: Make) -> None:
    stamps = times(a0=1_000_000, a1=1_001_000, b0=1_000_999, b1=1_000_000)
    reader = filled(make_reader(starting_offsets_by_timestamp=stamps, ending_offsets_by_timestamp=stamps))
    assert reader.resolver.starts(QUEUES) == reader.resolver.ends(QUEUES) == {A0: 0, A1: 2, B0: 2, B1: 0}


def test_start_time_without_later_messages_fails_unless_latest_is_set(make_reader: Make) -> None:
    text = (
        r"queue orders/b/1 has no message stored at the starting time 1970-01-01 00:16:40.500 UTC \(1000500 ms since "
        r"1970\) or later: its last message is of 1970-01-01 00:16:40.000 UTC \(queues with only older messages: 1\)"
        r".*Strategy=latest"
    )
    with pytest.raises(OptionError, match=text):
        filled(make_reader(starting_timestamp=1_000_500)).resolver.starts(QUEUES)
    reader = filled(make_reader(starting_timestamp=1_000_500, starting_offsets_by_timestamp_strategy="latest"))
    assert reader.resolver.starts(QUEUES)[B1] == 2
    # An end beyond the last offset becomes the last offset.
    assert filled(make_reader(ending_timestamp=1_000_500)).resolver.ends(QUEUES)[B1] == 2


@pytest.mark.parametrize("strategy", ["error", "latest"])
def test_empty_queue_begins_at_its_end_for_every_start_time(make_reader: Make, strategy: str) -> None:
    reader = make_reader(starting_timestamp=1_000_500, starting_offsets_by_timestamp_strategy=strategy)
    assert reader.resolver.starts(QUEUES) == dict.fromkeys(QUEUES, 0)
    reader.fill(dict.fromkeys(QUEUES, 3))
    reader.clock.advance(1.0)
    reader.fill({A0: 1})
    # All messages of these queues have expired.
    reader.transport.expired |= {A1: 3, B0: 3}
    reader.transport.removed[B1] = 3
    assert reader.resolver.starts(QUEUES) == {A0: 3, A1: 3, B0: 3, B1: 3}


def test_messages_stored_while_a_start_is_searched_are_not_skipped(make_reader: Make) -> None:
    reader = make_reader(starting_timestamp=5, starting_offsets_by_timestamp_strategy="latest")
    works = reader.transport.max_offset

    def then_stored(queue: MessageQueue, address: str, timeout: float) -> int:
        offset = works(queue, address, timeout)
        reader.fill({A0: 3})
        return offset

    reader.transport.max_offset = then_stored
    assert reader.resolver.starts([A0]) == {A0: 0}


def test_offsets_in_a_namespace_have_the_users_names(make_reader: Make) -> None:
    reader = make_reader(namespace="ns", starting_timestamp=5)
    reader.fill({A0: 3})
    assert reader.at({A0: 5}) == {A0: 0}
    assert reader.resolver.latest([A0]) == {A0: 3}
    assert {queue for queue, _ in reader.asked("max_offset")} == {A0}


def test_queue_that_ends_before_the_start_is_lost_data(make_reader: Make) -> None:
    reader = filled(make_reader(starting_offsets=spec(a0=1, a1=4, b0=9, b1=2)))
    lost = r"queue orders/b/0 ends at offset 4, before 9, where the read begins: .*failOnDataLoss=false"
    with pytest.raises(DataLossError, match=lost):
        reader.resolver.ranges(QUEUES)
    assert 9.9 < sum(reader.slept) < 11


def test_queue_that_ends_before_the_start_is_skipped_without_fail(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = filled(make_reader(starting_offsets=spec(a0=1, a1=4, b0=9, b1=2), fail_on_data_loss=False))
    found = reader.resolver.ranges(QUEUES)
    assert [one.size for one in found] == [3, 0, 0, 0]
    assert "orders/b/0 ends at offset 4" in caplog.text


def test_start_offset_that_is_not_yet_in_the_queue_is_waited_for(make_reader: Make) -> None:
    reader = filled(make_reader(starting_offsets=spec(a0=4, a1=4, b0=4, b1=4)))
    reader.while_asleep = lambda: reader.fill({B1: 1})
    assert [one.size for one in reader.resolver.ranges(QUEUES)] == [0, 0, 0, 0]
    assert len(reader.slept) == 2


def test_a_batch_from_a_time_to_an_offset_before_it_is_empty(make_reader: Make) -> None:
    reader = filled(make_reader(starting_timestamp=1_001_000, ending_offsets=spec(a0=1, a1=4, b0=4)))
    assert [one.size for one in reader.resolver.ranges([A0, A1, B0])] == [0, 2, 2]
    assert reader.slept == []


def test_expired_start_offset_is_lost_data(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.expired |= {A0: 2, A1: 4}
    lost = r"messages 1 to 1 of orders/a/0 are not there any more, the first one left is 2: .*failOnDataLoss=false"
    with pytest.raises(DataLossError, match=lost):
        reader.resolver.ranges_between({A0: 1, B0: 0}, {A0: 4, B0: 4})
    # A range that starts later has lost nothing, and neither has an empty range.
    assert reader.resolver.ranges_between({A0: 2, A1: 1}, {A0: 4, A1: 1}) == [
        OffsetRange(A0, 2, 4),
        OffsetRange(A1, 1, 1),
    ]


def test_expired_start_offset_is_moved_without_fail_on_data_loss(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = filled(make_reader(fail_on_data_loss=False))
    reader.transport.expired |= {A0: 2, A1: 4}
    found = reader.resolver.ranges_between({A0: 1, A1: 0, B0: 0}, {A0: 4, A1: 3, B0: 9})
    assert found == [
        OffsetRange(A0, 2, 4, expired=1),
        OffsetRange(A1, 3, 3, expired=3),
        OffsetRange(B0, 0, 9),
    ]
    assert len(caplog.records) == 2


def test_silent_master_is_queried_again_instead_of_its_slave(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    reader.transport.fail("max_offset", RemotingConnectException("refused"), RemotingTimeoutException("no answer"))
    assert reader.resolver.latest([A0]) == {A0: 4}
    assert [address for _, address in reader.asked("max_offset")] == ["master:1"] * 3
    assert reader.slept == [0.2, 0.2]


@pytest.mark.parametrize("call", ["min_offset", "max_offset", "search_offset", "pull_now"])
def test_offsets_of_a_slave_are_used_after_read_timeout(
    make_reader: Make, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    reader = filled(make_reader(read_timeout_ms=20_000, pull_timeout_ms=5_000, starting_timestamp=1_001_000))
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    works, asked = getattr(reader.transport, call), []

    def master_away(*arguments: Any) -> Any:
        request = arguments[0]
        address = request.address if isinstance(request, PullRequest) else arguments[-2]
        asked.append((address, reader.clock.now))
        if address == "master:1":
            raise RemotingTimeoutException("no answer")
        return works(*arguments)

    setattr(reader.transport, call, master_away)
    assert reader.resolver.starts([A0]) == {A0: 2}
    slave = [when for address, when in asked if address == "slave:1"]
    # The time counts from the first failure on.
    assert slave[0] - asked[0][1] >= 20.0
    # Master and slave are asked by turns from then on, without another wait.
    assert sum(reader.slept) < 25.0
    reader.resolver.ends([A0])
    assert sum(reader.slept) < 26.0
    assert sum("offsets of its slave slave:1 count" in text for text in caplog.messages) == 1


def test_planning_deadline_leaves_time_for_the_slave(make_reader: Make) -> None:
    reader = filled(make_reader(read_timeout_ms=20_000, pull_timeout_ms=5_000))
    reader.addresses("a", {0: "master:1", 1: "slave:1"})
    works = reader.transport.min_offset

    def master_away(queue: MessageQueue, address: str, timeout: float) -> int:
        if address == "master:1":
            reader.clock.advance(max(timeout, 0.1))
            raise RemotingTimeoutException("no answer")
        return works(queue, address, timeout)

    reader.transport.min_offset = master_away
    reader.queues.look_up()
    assert reader.resolver.earliest([A0]) == {A0: 0}
    reader.addresses("a", {0: "master:1"})
    reader.queues.look_up()
    with pytest.raises(ReadError, match="readTimeoutMs=20000"):
        reader.resolver.earliest([A0])


def test_no_try_begins_after_the_planning_deadline(make_reader: Make) -> None:
    # Such a try fails at once, and its error would hide the cause.
    reader = make_reader(read_timeout_ms=20_000)
    timeouts: list[float] = []

    def refuse(queue: MessageQueue, address: str, timeout: float) -> int:
        timeouts.append(timeout)
        reader.clock.advance(0.1)
        raise RemotingConnectException("refused")

    reader.transport.min_offset = refuse
    reader.queues.look_up()
    with pytest.raises(ReadError, match="refused"):
        reader.resolver.earliest([A0])
    assert min(timeouts) > 0


def test_a_master_that_is_in_no_route_is_waited_for(make_reader: Make) -> None:
    reader = filled(make_reader(read_timeout_ms=20_000))
    reader.addresses("a", {1: "slave:1"})

    def come_back() -> None:
        if sum(reader.slept) > 10.0:
            reader.addresses("a", {0: "master:1", 1: "slave:1"})

    reader.while_asleep = come_back
    assert reader.resolver.earliest([A0]) == {A0: 0}
    assert {address for _, address in reader.asked("min_offset")} == {"master:1"}


def test_minimum_offset_of_a_queue_is_requested_once(make_reader: Make) -> None:
    reader = filled(make_reader(starting_offsets=spec(a0=-2, a1=1)))
    reader.resolver.ranges([A0, A1])
    assert sorted(queue.queue_id for queue, _ in reader.asked("min_offset")) == [0, 1]
    reader = filled(make_reader(starting_timestamp=1_001_000))
    reader.transport.expired[A0] = 3
    assert reader.resolver.ranges([A0]) == [OffsetRange(A0, 3, 4)]


def test_messages_that_expired_before_the_plan_are_not_lost(make_reader: Make) -> None:
    """The minimum offset of the queue is not corrected yet."""
    reader = filled(make_reader(starting_offsets=spec(a0=-2, a1=1, b0=-2)))
    reader.transport.removed |= {A0: 3, B0: 4}
    assert reader.resolver.earliest([A0, B0]) == {A0: 3, B0: 4}
    assert reader.resolver.starts([A0, A1, B0]) == {A0: 3, A1: 1, B0: 4}
    reader = filled(make_reader(starting_timestamp=1_001_000))
    reader.transport.removed[A0] = 3
    assert reader.resolver.starts([A0, A1]) == {A0: 3, A1: 2}


def test_busy_broker_does_not_delay_planning(make_reader: Make) -> None:
    reader = filled(make_reader())
    busy = PullReply(PullOutcome(None, error=BrokerBusyException("busy", 2, "", "a:10911")))
    reader.transport.always_pull[A0] = busy
    assert reader.resolver.earliest([A0]) == {A0: 0}
    assert reader.slept == []


def test_compacted_topic_starts_at_offset_0(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.attributes["orders"] = {"cleanup.policy": "COMPACTION"}
    reader.transport.expired[A0] = 3
    assert reader.resolver.earliest([A0]) == {A0: 0}
    assert reader.resolver.ranges([A0]) == [OffsetRange(A0, 0, 4, compacted=True)]
    # Each broker is asked once.
    assert len(reader.asked("topic_config")) == 1


def test_topic_created_again_without_compaction_reports_expired_messages(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.attributes["orders"] = {"cleanup.policy": "COMPACTION"}
    assert reader.resolver.ranges_between({A0: 0}, {A0: 4}) == [OffsetRange(A0, 0, 4, compacted=True)]
    reader.transport.attributes["orders"] = {}
    reader.transport.expired[A0] = 3
    reader.clock.advance(1.0)
    with pytest.raises(DataLossError, match="messages 0 to 2 of orders/a/0"):
        reader.resolver.ranges_between({A0: 0}, {A0: 4})


def test_topic_with_unknown_configuration_counts_as_not_compacted(
    make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    reader = filled(make_reader())
    reader.transport.fail("topic_config", *[MQBrokerException("no permission", 16, "", "a:10911")] * 2)
    assert reader.resolver.ranges([A0]) == [OffsetRange(A0, 0, 4)]
    assert "unknown if the topic is a compaction topic" in caplog.text


def test_unknown_configuration_of_a_topic_is_logged_once(make_reader: Make, caplog: pytest.LogCaptureFixture) -> None:
    reader = filled(make_reader())
    reader.transport.fail("topic_config", *[MQBrokerException("no permission", 16, "", "a:10911")] * 3)
    for _ in range(3):
        reader.resolver.ranges_between({A0: 1}, {A0: 4})
    assert caplog.text.count("unknown if the topic is a compaction topic") == 1


def test_broker_without_the_topic_is_queried_once(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.fail("topic_config", TopicRouteStaleException("no topic", 17, "", "a:10911"))
    assert reader.resolver.ranges([A0]) == [OffsetRange(A0, 0, 4)]
    assert reader.slept == []


def test_unreachable_master_does_not_delay_planning_of_a_micro_batch(make_reader: Make) -> None:
    reader = filled(make_reader())
    reader.transport.fail("min_offset", RemotingConnectException("refused"))
    assert reader.resolver.ranges_between({A0: 1}, {A0: 4}) == [OffsetRange(A0, 1, 4)]
    assert reader.slept == []


def test_unreachable_broker_is_an_error_naming_queue_and_option(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=5000)

    def refused(*_: object, **__: object) -> int:
        raise RemotingConnectException("refused")

    reader.transport.max_offset = refused
    with pytest.raises(ReadError, match=r"queue orders/a/0: .*readTimeoutMs=5000. The last try: refused"):
        reader.resolver.latest([A0])
    assert sum(reader.slept) == pytest.approx(5.0)


def test_topic_without_a_route_is_waited_for_at_a_limited_rate(make_reader: Make) -> None:
    reader = make_reader(read_timeout_ms=3000)
    known = reader.transport.routes.pop("orders")
    with pytest.raises(ReadError, match="No topic route info"):
        reader.resolver.latest([A0])
    # Asked again after each second, and not with every try.
    assert len(reader.asked("query_route")) <= 5
    reader.clock.advance(2.0)
    reader.transport.routes["orders"] = known
    assert reader.resolver.latest([A0]) == {A0: 0}


def test_a_refusal_is_raised_at_once(make_reader: Make) -> None:
    reader = make_reader()
    reader.transport.fail("min_offset", MQBrokerException("no permission", 16, "", "a:10911"))
    with pytest.raises(MQBrokerException, match="no permission"):
        reader.resolver.earliest([A0])
    assert reader.slept == []


def test_offsets_of_1000_queues_are_resolved_despite_some_failures(make_reader: Make) -> None:
    queues = [MessageQueue("orders", "a", number) for number in range(1000)]
    reader = make_reader()
    reader.transport.fail("max_offset", *[RemotingConnectException("refused")] * 40)
    assert reader.resolver.latest(queues) == dict.fromkeys(queues, 0)


def test_offsets_of_many_queues_have_one_deadline(make_reader: Make) -> None:
    queues = [MessageQueue("orders", "a", number) for number in range(1000)]
    reader = make_reader(read_timeout_ms=60_000)
    reader.transport.routes["orders"] = route({"a": 1000})
    works = reader.transport.min_offset

    def slow(queue: MessageQueue, address: str, timeout: float) -> int:
        reader.clock.advance(1.0)
        return works(queue, address, timeout)

    reader.transport.min_offset = slow
    reader.queues.look_up()
    with pytest.raises(ReadError, match=r"readTimeoutMs=60000 has passed with \d+ of 1000 offsets of queues known"):
        reader.resolver.ranges(queues)
    assert len(reader.asked("min_offset")) <= 60 + 16


def test_once_sends_no_requests_after_read_timeout(make_reader: Make) -> None:
    reader = filled(make_reader(read_timeout_ms=10_000))
    times = iter([0.0, 10.0])
    requests = QueueRequests(reader.queues, lambda: next(times, 10.1))
    _, errors = requests.once(QUEUES, lambda queue, *_: queue.queue_id)
    refused = [error for error in errors.values() if isinstance(error, RemotingTooMuchRequestException)]
    assert len(refused) == 3
    assert "other queues took readTimeoutMs=10000" in str(refused[0])


def test_time_search_in_a_compacted_topic_uses_its_remaining_messages(make_reader: Make) -> None:
    """A broker searches the queue before compaction, which may have lost messages that compaction keeps."""
    reader = make_reader()
    reader.transport.attributes["orders"] = {"cleanup.policy": "COMPACTION"}
    reader.fill({A0: 20})
    reader.transport.expired[A0] = 20
    left = {1: 100, 4: 200, 5: 300, 13: 400}

    def reply(request: PullRequest) -> PullReply:
        for offset, time in left.items():
            if offset >= request.offset:
                return PullReply(PullOutcome(PullStatus.FOUND, offset + 1, 1, 14, stored(offset, time=time)))
        return PullReply(PullOutcome(PullStatus.NO_NEW_MSG, request.offset, 1, 14))

    reader.transport.play_pulls(A0, *[reply] * 100)
    # The offset of the message, or one in the gap before it.
    for time, offsets in {0: range(2), 100: range(2), 101: range(2, 5), 300: [5], 301: range(6, 14)}.items():
        assert reader.at({A0: time})[A0] in offsets
        # Compaction, which is no loss, may have removed older messages.
        assert reader.resolver.at_and_older({A0: time}, {A0: 14})[1] == {A0}
    assert reader.at({A0: 401}) == {}


def test_damaged_first_message_does_not_move_the_beginning(make_reader: Make) -> None:
    reader = filled(make_reader())
    damaged = b"\0\0\1\0" + b"\x01" * 252
    reader.transport.play_pulls(A0, PullReply(PullOutcome(PullStatus.FOUND, 1, 0, 4, damaged)))
    assert reader.resolver.earliest([A0]) == {A0: 0}
